"""Lightning: epochs at their true length, and checkpoints that continue at the next batch.

Guarantees: every epoch is read to its end, validated and counted, and has Lightning's number. A resumed run trains on
the same batches as an uninterrupted one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

from lightning.pytorch import Callback, LightningModule, Trainer

from stream_dataloader._engine.options import check_changes
from stream_dataloader.batch import StreamBatch
from stream_dataloader.dataloader import StreamDataLoader
from stream_dataloader.integrations import _lightning_internals as internals
from stream_dataloader.integrations._all_ranks import Carried, Carrier, gathered
from stream_dataloader.integrations._lightning_places import (
    LoopProgress,
    Places,
    Stage,
    of_all_ranks,
    progress_of,
    stream_loaders,
    taken_up,
)

__all__ = ["ExactResume", "StreamEpochs"]

#: Key of a checkpoint under which the carried state is saved.
_CARRIED = "stream_dataloader_carried"


class _Resume(NamedTuple):
    """Contents of a checkpoint that a run resumes from."""

    progress: LoopProgress
    states: list[dict[str, Any]]
    carried: list[list[dict[str, Any]]] | None  # of all ranks


class StreamEpochs(Callback):
    """Callback with which Lightning reads, validates, counts and resumes the epochs of `StreamDataLoader`s exactly.

    It works for all `StreamDataLoader`s among the training loaders, also with a `collate_fn`. It sets Lightning's epoch
    number on them; with `overfit_batches` that is always 0. Checkpoints hold the states of all ranks.

    Args:
        same_validation: Loaders of validation, test and prediction always read their epoch 0, so that shuffles and
            random draws are the same. False: in `fit`, they read the epoch that is trained on.
        carry: State that the model carries along the lanes of the training loader: a `RecurrentState`, `LaneCache` or
            `LaneMemory`, or a list of them. Checkpoints hold it for all ranks.
        changes: Options that you changed on purpose since the checkpoint was saved, such as `["batch_size"]`; see
            `StreamDataLoader.load_state_dict`.

    Raises:
        TypeError: `carry` has another type.
        ValueError: `changes` has an unknown name.

    Example::

        Trainer(callbacks=[StreamEpochs(), ModelCheckpoint(every_n_train_steps=100)])
    """

    def __init__(
        self,
        *,
        same_validation: bool = True,
        carry: Carrier | Iterable[Carrier] | None = None,
        changes: Iterable[str] = (),
    ) -> None:
        self._same_validation = same_validation
        self._changes = check_changes(changes)
        self._carried = Carried(carry)
        self._carried_before = self._carried  # before the batch that was begun last
        self._places = Places()
        self._resume: _Resume | None = None  # until the first batch after it
        self._prepared: Any = None  # the train loaders that the first epoch is prepared for

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Prepare epochs before Lightning fetches from them."""
        if stage != "fit" or not self._is_first(trainer):
            return
        self._resume = self._prepared = None
        self._places = Places()
        own: Any = trainer  # its type does not declare `callbacks`
        callbacks: list[Any] = own.callbacks
        callbacks.remove(self)
        callbacks.insert(0, self)
        internals.call_before_first_fetch(trainer, functools.partial(self._prepare, trainer))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            internals.call_no_more(trainer)

    def _is_first(self, trainer: Any) -> bool:
        """Return True for the first of several callbacks of this class, which does the work."""
        return next((each for each in trainer.callbacks if isinstance(each, StreamEpochs)), None) is self

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take the loaders' states out, and correct Lightning's counters."""
        if internals.is_fitting(trainer) and self._is_first(trainer) and "loops" in checkpoint:
            loops = checkpoint["loops"] = {**checkpoint["loops"]}
            states = loops["fit_loop"]["state_dict"].get("combined_loader", [])
            progress = progress_of(loops["fit_loop"])
            loops["fit_loop"] = taken_up(loops["fit_loop"], progress)
            self._resume = _Resume(progress, states, checkpoint.get(_CARRIED))

    def _prepare(self, trainer: Trainer) -> None:
        combined, resume = internals.train_loaders(trainer), self._resume
        if resume is None:
            epoch = internals.epochs_processed(trainer)
            for loader, state in self._places.handed_over(combined.flattened):
                if loader.batches_per_epoch is not None:  # built again, with reload_dataloaders_every_n_epochs
                    loader.load_state_dict(internals.at_beginning(state, epoch))
            self._set_epoch(trainer, epoch)
        else:
            self._go_on(trainer, resume)
        self._set_validation_epoch(trainer)
        internals.renew_limits(trainer)
        self._prepared = combined

    def _go_on(self, trainer: Trainer, resume: _Resume) -> None:
        combined, (stage, epoch, *_) = internals.train_loaders(trainer), resume.progress
        states = resume.states
        if stage is not Stage.WITHIN:
            states = [internals.at_beginning(state, epoch + (stage is Stage.AT_END)) for state in states]
        if not internals.load_states(combined, states, self._changes, needed=stage is not Stage.BETWEEN):
            self._carried.reset()
        elif self._carried and resume.carried is not None:
            self._carried.load(resume.carried, self._carried_along(combined.flattened))
        self._places.restart(combined.flattened)
        if stage is Stage.BETWEEN or not states:
            self._set_epoch(trainer, epoch)
        elif stage is Stage.AT_END:  # no batch of it is left to read, but Lightning asks for its length
            for loader in stream_loaders(combined.flattened):
                if loader.batches_per_epoch is None:
                    loader.set_epoch(epoch)

    def _carried_along(self, loaders: Iterable[Any]) -> StreamDataLoader[Any] | None:
        """Return the loader whose lanes carry, or None if it is one of several with unchanged lanes."""
        found = stream_loaders(loaders)
        if len(found) > 1 and "batch_size" in self._changes:
            what = f"there are {len(found)} training loaders, so it is not known whose lanes carry= belongs to"
            raise ValueError(f'{what}; resume with the batch_size that was saved, without changes=["batch_size"]')
        return found[0] if len(found) == 1 else None

    def _set_epoch(self, trainer: Any, epoch: int) -> None:
        for loader in stream_loaders(internals.train_loaders(trainer).flattened):
            loader.set_epoch(0 if trainer.overfit_batches > 0 else epoch)
            internals.forget_place(loader)

    def _set_validation_epoch(self, trainer: Trainer) -> None:
        """Set the epoch of evaluation loaders early, because Lightning has no hook right before they begin."""
        epoch = trainer.current_epoch if internals.is_fitting(trainer) and not self._same_validation else 0
        for loader in internals.evaluation_loaders(trainer):
            if self._same_validation or loader.batches_per_epoch is None:
                loader.set_epoch(epoch)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare the first epoch if that was not done, and leave no batch to an epoch that was finished."""
        if not self._is_first(trainer):
            return
        combined = internals.train_loaders(trainer)
        if self._resume is not None and self._prepared is not combined:
            self._prepare(trainer)
            internals.fetch_anew(trainer)
        if self._resume is not None:
            if self._resume.progress.stage is Stage.AT_END:
                internals.leave_no_batch(trainer)
            elif self._resume.progress.stage is Stage.BETWEEN:
                internals.begin_anew(trainer)
            if self._resume.progress.in_batch_end:
                internals.count_step_for_loggers(trainer)
        self._places.begin(combined.flattened, internals.batches_counted(trainer))
        self._prepared = None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell loaders the epoch's number, and Lightning the epoch's length."""
        if not self._is_first(trainer):
            return
        self._places.turn(internals.batches_counted(trainer).processed)
        if internals.will_iterate(trainer):
            self._resume = None
            self._set_epoch(trainer, trainer.current_epoch)
            internals.renew_limits(trainer)
            internals.renew_length(trainer)
        self._set_validation_epoch(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._is_first(trainer):
            self._resume = None
            if internals.fetches_batches(trainer):
                self._places.note(internals.train_loaders(trainer).flattened, internals.batches_counted(trainer))
            self._carried_before = self._carried.snapshot()
            _set_batch_size(trainer, batch)

    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        _set_batch_size(trainer, batch)

    on_test_batch_start = on_validation_batch_start

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._set_validation_epoch(trainer)

    on_test_end = on_predict_end = on_validation_end

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Replace the loaders' states by those of all ranks after the last batch trained on."""
        loop = checkpoint.get("loops", {}).get("fit_loop", {})
        states = loop.get("state_dict", {}).get("combined_loader")
        combined = internals.train_loaders(trainer)
        if not states or combined is None or not self._is_first(trainer):
            return
        batches = loop["epoch_loop.batch_progress"]["current"]
        processed = batches["processed"]
        for i, loader in enumerate(internals.stateful(combined)):
            if isinstance(loader, StreamDataLoader):
                state = self._places.state_of(loader, processed)
                states[i] = of_all_ranks(loader, states[i] if state is None else state)
        if self._carried:
            carried = self._carried if batches["started"] == processed else self._carried_before
            checkpoint[_CARRIED] = gathered(carried.state_dict())


#: Former name, from when exact resume was its only feature.
ExactResume = StreamEpochs


def _set_batch_size(trainer: Trainer, batch: Any) -> None:
    if isinstance(batch, StreamBatch):
        internals.set_batch_size(trainer, len(batch))
