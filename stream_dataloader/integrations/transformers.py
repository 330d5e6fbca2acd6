"""Hugging Face's `Trainer`, which trains on streams as one run and resumes at the next batch.

Guarantee: no batch is left out, cut off or read twice at the end of an epoch, at a stop, or on resume.

The Trainer finds its place from one number of batches that holds for all epochs. A loader's epochs may differ in
length. So the Trainer's epochs only count batches, and the loader's epochs follow each other independently::

    the loader's epochs     0 0 0 0 0 | 1 1 1 | 2 2 2 2 | 3 ...
    the Trainer's           0 0 0 0 | 1 1 1 1 | 2 2 2 2 |          4 batches each: the mean, rounded up
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from stream_dataloader._engine.options import check_changes
from stream_dataloader.batch import StreamBatch
from stream_dataloader.dataloader import StreamDataLoader
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import StateError
from stream_dataloader.integrations._all_ranks import Carried, Carrier, gathered, own_state
from stream_dataloader.integrations._trainer_run import ModelInputs, Numbers, TrainerRun, batches_an_epoch
from stream_dataloader.integrations.accelerate import PreparedLoader

__all__ = ["ModelInputs", "StreamTrainer", "StreamTrainerMixin"]

#: File in a Trainer's checkpoint with the loader's state.
STATE_NAME = "stream_dataloader.pt"


class StreamTrainerMixin:
    """Mixin of a `Trainer` that trains and evaluates on streams: `class Mine(StreamTrainerMixin, OtherTrainer)`.

    `train_dataset`, `eval_dataset` and the datasets passed to `evaluate` and `predict` may be `StreamDataLoader`s or
    `StreamDataset`s. For a `StreamDataset`, a loader is built with the `dataloader_...` arguments. Other datasets are
    left to the Trainer.

    A run starts at the loader's place and reads one epoch of the loader after another, for the number of batches that
    the Trainer plans. With the dataset's `lengths` that is `num_train_epochs` epochs, rounded up to the same number of
    batches for each. Without `lengths`, give `max_steps`. An evaluation always reads epoch 0.

    Args:
        model_inputs: Function that makes the model's keyword arguments from a `StreamBatch`; None: `ModelInputs()`.
        carry: State that the model carries along the lanes of `train_dataset`: a `RecurrentState`, `LaneCache` or
            `LaneMemory`, or a list of them. Checkpoints hold it for all ranks.
        changes: Options that you changed on purpose since the checkpoint was saved, such as `["batch_size"]`; see
            `StreamDataLoader.load_state_dict`. The Trainer's epochs keep their number of batches.

    Raises:
        ValueError: An argument cannot work with streams; the message names it and the remedy.
        StateError: The checkpoint to resume from has no state of the loader.

    Example::

        trainer = StreamTrainer(model, args, train_dataset=StreamDataLoader(dataset, num_workers=4))
        trainer.train(resume_from_checkpoint=True)
    """

    args: TrainingArguments
    model: torch.nn.Module
    train_dataset: Any
    eval_dataset: Any

    def __init__(
        self,
        *args: Any,
        model_inputs: Callable[[StreamBatch], Mapping[str, Any]] | None = None,
        carry: Carrier | Iterable[Carrier] | None = None,
        changes: Iterable[str] = (),
        **kwargs: Any,
    ) -> None:
        # search all arguments, because the class of a trainer may have its own
        settings = next((value for value in (*args, *kwargs.values()) if isinstance(value, TrainingArguments)), None)
        positional = [_with_loaders(value, settings) for value in args]
        named = {name: _with_loaders(value, settings) for name, value in kwargs.items()}
        self._given_inputs = model_inputs
        self._carried = Carried(carry)
        self._changes = check_changes(changes)
        self._run: TrainerRun | None = None  # the run that is being trained
        self._begin: Mapping[str, Any] | None = None  # the loader's first state, from which each new run begins
        self._batches: int | None = None  # number of batches of a Trainer's epoch
        self._checkpoint: Path | None = None  # the checkpoint to resume from
        super().__init__(*positional, **named)
        self.add_callback(_FollowsTraining(self))  # type: ignore[attr-defined]

    def train(
        self, resume_from_checkpoint: str | os.PathLike[str] | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train; see `Trainer.train`. `ignore_data_skip` has no effect, because the Trainer skips only numbers."""
        folder = resume_from_checkpoint
        if folder is True:
            folder = get_last_checkpoint(self.args.output_dir)
        self._checkpoint = Path(folder) if folder else None
        ignore_data_skip = self.args.ignore_data_skip
        if isinstance(self.train_dataset, StreamDataLoader):
            self.args.ignore_data_skip = False
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]
        finally:
            self._checkpoint = None
            self.args.ignore_data_skip = ignore_data_skip

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a `DataLoader` over the batches of the run, one Trainer's epoch after another."""
        loader = self.train_dataset
        if not isinstance(loader, StreamDataLoader):
            return super().get_train_dataloader()  # type: ignore[misc, no-any-return]
        _check(self.args)
        _place(loader, self.args)
        if self._begin is None:
            self._begin = loader.state_dict()
            self._batches = batches_an_epoch(loader, math.ceil(self.args.num_train_epochs))
        state, batches = self._begin, self._batches
        if self._checkpoint is not None:
            state, counted = self._load(loader, self._checkpoint)
            batches = counted or batches
        self._run = TrainerRun(loader, self._make_inputs(), state, batches)
        # A generator of its own: else a resumed run would draw other random numbers in the model.
        return DataLoader(
            self._run,
            batch_sampler=Numbers(self._run),
            collate_fn=operator.itemgetter(0),
            generator=torch.Generator(device="cpu"),
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(chosen, str):
            chosen = self.eval_dataset[chosen]
        loader = _with_loaders(chosen, self.args)
        if not isinstance(loader, StreamDataLoader):
            return super().get_eval_dataloader(eval_dataset)  # type: ignore[misc]
        return self._evaluation(loader)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        loader = _with_loaders(test_dataset, self.args)
        if not isinstance(loader, StreamDataLoader):
            return super().get_test_dataloader(test_dataset)  # type: ignore[misc]
        return self._evaluation(loader)

    def _evaluation(self, loader: StreamDataLoader[Any]) -> _Evaluation:
        if loader is self.train_dataset:
            raise ValueError("the training loader cannot be read twice at once; build another one to evaluate")
        _check(self.args)
        _place(loader, self.args)
        return _Evaluation(loader, self._make_inputs())

    def _make_inputs(self) -> Callable[[Any], Mapping[str, Any]]:
        make = ModelInputs() if self._given_inputs is None else self._given_inputs
        of_batch = make.of(self.model) if isinstance(make, ModelInputs) else make

        def inputs(batch: Any) -> Mapping[str, Any]:
            made = of_batch(batch) if isinstance(batch, StreamBatch) else batch
            if not isinstance(made, Mapping):
                what = f"a model takes arguments by name, but a batch is a {type(made).__name__}"
                raise TypeError(f"{what}; have collate_fn or model_inputs return a dict")
            return made

        return inputs

    def save_place(self, folder: Path) -> None:
        if self._run is None:
            return
        states, carried = gathered(dict(self._run.state_dict())), gathered(self._carried.state_dict())
        if self.args.should_save and folder.is_dir():
            partial = folder / f"{STATE_NAME}.part"
            torch.save({"states": states, "batches": self._run.batches, "carried": carried}, partial)
            partial.replace(folder / STATE_NAME)

    def _load(self, loader: StreamDataLoader[Any], folder: Path) -> tuple[Mapping[str, Any], int | None]:
        """Load a checkpoint; return the loader's state with today's options, and the length of a Trainer's epoch."""
        file = folder / STATE_NAME
        if not file.exists():
            what = f"the checkpoint {folder} has no {STATE_NAME}, which holds the loader's place"
            raise StateError(f"{what}: it is incomplete, or not from a StreamTrainer; resume from another one")
        saved = torch.load(file, weights_only=True)
        loader.load_state_dict(own_state(saved["states"]), self._changes)
        if self._carried:
            self._carried.load(saved.get("carried", [[]]), loader)
        return loader.state_dict(), saved["batches"]


class StreamTrainer(StreamTrainerMixin, Trainer):
    """A `Trainer` for streams; see `StreamTrainerMixin`."""


class _FollowsTraining(TrainerCallback):
    """Callback that follows the batches trained on, and saves the place in checkpoints."""

    def __init__(self, trainer: StreamTrainerMixin) -> None:
        self._trainer = trainer

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._trainer._run is not None:
            self._trainer._run.was_used()

    on_substep_end = on_step_end  # a batch whose gradients are accumulated

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._trainer.save_place(Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")


class _Evaluation(PreparedLoader[Any]):
    """Epoch 0 of a loader for each evaluation, as the model's arguments that `inputs` makes."""

    def __init__(self, loader: StreamDataLoader[Any], inputs: Callable[[Any], Mapping[str, Any]]) -> None:
        super().__init__(loader)
        self._inputs = inputs
        try:
            len(loader)
        except TypeError as error:
            if loader.dataset._is_endless:
                what = 'an evaluation reads an epoch to its end, but padding_mode="cycle" has no end'
                raise ValueError(f'{what}; evaluate with padding_mode="zeros"') from error

    def __iter__(self) -> Iterator[Any]:
        self.set_epoch(0)
        for batch in super().__iter__():
            yield self._inputs(batch)


def _with_loaders(dataset: Any, args: TrainingArguments | None) -> Any:
    """Return a dataset, or a dict of them, with a loader around each `StreamDataset`; leave others unchanged."""
    if isinstance(dataset, dict) and any(isinstance(one, StreamDataset) for one in dataset.values()):
        return {name: _with_loaders(one, args) for name, one in dataset.items()}
    if not isinstance(dataset, StreamDataset):
        return dataset
    if args is None or not args.dataloader_num_workers:
        return StreamDataLoader(dataset)
    return StreamDataLoader(
        dataset,
        args.dataloader_num_workers,
        prefetch_factor=args.dataloader_prefetch_factor,
        persistent_workers=args.dataloader_persistent_workers,
    )


def _check(args: TrainingArguments) -> None:
    """Refuse arguments that cannot work with streams."""
    if args.n_gpu > 1:
        what = f"the Trainer sees {args.n_gpu} GPUs in one process, and would split each batch among them"
        raise ValueError(f"{what}; start a process for each with torchrun, or set CUDA_VISIBLE_DEVICES to one")
    if args.auto_find_batch_size:
        raise ValueError("auto_find_batch_size=True cannot change the dataset's number of lanes; leave it out")


def _place(loader: StreamDataLoader[Any], args: TrainingArguments) -> None:
    """Deliver batches on the Trainer's device, if no device was chosen."""
    if loader.device is None and args.device.type != "cpu":
        loader.to(args.device)
