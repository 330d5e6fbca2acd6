"""Private parts of Lightning that the callback needs. No other module uses them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection
from typing import Any

from lightning import __version__
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.combined_loader import _SUPPORTED_MODES

from stream_dataloader.dataloader import StreamDataLoader
from stream_dataloader.errors import StateError
from stream_dataloader.integrations._lightning_places import Count, stream_loaders

#: `setup_data` calls this once loaders and their limits are known, right before it fetches from them.
_BEFORE_FETCH = "_load_combined_loader_states"


def forget_place(loader: StreamDataLoader[Any]) -> None:
    """Read the coming epoch from its beginning. Lightning may have restarted a shorter loader in it."""
    if loader._position.coming_step and loader.batches_per_epoch is None:
        loader._position.forget_place()


def call_before_first_fetch(trainer: Any, function: Callable[[], None]) -> None:
    """Have a function called right before Lightning fetches the first batch; Lightning has no hook there."""
    loop = trainer.fit_loop
    needed = {
        "FitLoop": (loop, [_BEFORE_FETCH, "setup_data", "epoch_progress", "max_batches", "_combined_loader"]),
        "TrainingEpochLoop": (loop.epoch_loop, ["batch_progress", "_should_check_val_fx", "val_loop"]),
    }
    missing = [f"{name}.{each}" for name, (of, names) in needed.items() for each in names if not hasattr(of, each)]
    if missing:
        what = f"StreamEpochs does not know Lightning {__version__}: it has no {', '.join(missing)}"
        raise RuntimeError(f"{what}; use a version from 2.4 to 2.6, or a newer stream_dataloader")
    setattr(loop, _BEFORE_FETCH, function)  # hides the method, in this trainer's loop alone


def call_no_more(trainer: Any) -> None:
    """Undo `call_before_first_fetch`."""
    vars(trainer.fit_loop).pop(_BEFORE_FETCH, None)


def is_fitting(trainer: Any) -> bool:
    """Return True if `trainer.fit` runs, rather than `validate` or another."""
    return bool(trainer.state.fn == TrainerFn.FITTING)


def train_loaders(trainer: Any) -> Any:
    """Return the `CombinedLoader` of the training loaders, or None if it is not built yet."""
    return trainer.fit_loop._combined_loader


def stateful(combined: Any) -> list[Any]:
    """Return the loaders whose states Lightning saves."""
    return [loader for loader in combined.flattened if isinstance(loader, _Stateful)]


def evaluation_loaders(trainer: Any) -> list[StreamDataLoader[Any]]:
    """Return the loaders of validation, test and prediction that exist, without training loaders."""
    loops = [trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop]
    of_loops = [loop._combined_loader for loop in loops]
    found = [loader for combined in of_loops if combined is not None for loader in combined.flattened]
    trained = train_loaders(trainer).flattened if train_loaders(trainer) is not None else []
    return [loader for loader in stream_loaders(found) if not any(loader is each for each in trained)]


def load_states(combined: Any, states: list[dict[str, Any]], changes: Collection[str], *, needed: bool) -> bool:
    """Load the loaders' states; return True if they continue from them.

    A state that does not fit raises `StateError` if `needed`, because it was saved within an epoch. Otherwise the next
    epoch is read from its beginning, with a warning.
    """
    if needed and not states:
        warnings.warn(
            "the checkpoint has no state of a loader, so its epoch is read from the beginning again",
            stacklevel=2,
        )
    try:
        if changes and len(states) == len(loaders := stateful(combined)):
            for loader, state in zip(loaders, states, strict=True):
                given = {"changes": changes} if isinstance(loader, StreamDataLoader) else {}
                loader.load_state_dict(state, **given)
        else:
            combined._load_state_dicts(states)
    except StateError as error:
        if needed:
            raise
        warnings.warn(
            f"the next epoch is read from its beginning, without the loader's state: {error}",
            stacklevel=2,
        )
        return False
    return bool(states)


def at_beginning(state: Any, epoch: int) -> Any:
    """Return a state of an endless run moved to an epoch's beginning; `limit_train_batches` may have ended it early."""
    if not isinstance(state, dict) or "epoch_place" not in state:
        return state
    return {**state, "epoch_place": {**state["epoch_place"], "number": epoch, "delivered": 0}}


def renew_limits(trainer: Any) -> None:
    """Tell Lightning the number of batches of the coming epoch, for which it asks before the first epoch only."""
    combined = train_loaders(trainer)
    lengths = [length_of_coming(loader) for loader in combined.flattened]
    combined.limits = [_parse_num_batches(RunningStage.TRAINING, n, trainer.limit_train_batches) for n in lengths]


def length_of_coming(loader: Any) -> float:
    """Return the number of batches of a loader's coming epoch; infinite if it is not known.

    `len(loader)` would still be that of the epoch before, since Lightning stops asking at the last batch.
    """
    if not isinstance(loader, StreamDataLoader) or loader.batches_per_epoch is not None:
        length = sized_len(loader)
        return math.inf if length is None else length
    loader._kept_length.renewed()
    position = loader._position
    try:
        return int(position.count(position.coming_number))
    except TypeError:
        return math.inf


def renew_length(trainer: Any) -> None:
    """Tell Lightning the length of the coming epoch, which progress bars and the validation interval use."""
    loop, combined = trainer.fit_loop, train_loaders(trainer)
    counts = [min(length_of_coming(each), n) for each, n in zip(combined.flattened, combined.limits, strict=True)]
    loop.max_batches = _SUPPORTED_MODES[combined._mode]["fn"](counts)
    is_timed = getattr(trainer, "_val_check_time_interval", None) is not None
    if isinstance(trainer.val_check_interval, float) and not is_timed and loop.max_batches != math.inf:
        trainer.val_check_batch = max(1, int(loop.max_batches * trainer.val_check_interval))


def will_iterate(trainer: Any) -> bool:
    """Return True if Lightning will call `iter` for the epoch that starts, as it does for all but the first."""
    loop = trainer.fit_loop
    is_resuming = getattr(loop, "is_resuming", False)  # since 2.5.1; 2.4 calls `iter` again
    return trainer.current_epoch > 0 and not is_resuming and not loop.epoch_loop.restarting


def fetch_anew(trainer: Any) -> None:
    """Begin the first epoch again. `estimated_stepping_batches` begins it too early: DeepSpeed and FSDP load later."""
    iter(trainer.fit_loop._data_fetcher)
    renew_length(trainer)


def leave_no_batch(trainer: Any) -> None:
    """End the epoch without another batch, since all were trained on before the checkpoint was saved."""
    fetcher = trainer.fit_loop._data_fetcher
    fetcher.iterator = iter(())
    fetcher.batches = []


def begin_anew(trainer: Any) -> None:
    """Begin the epoch like any other. With `max_steps`, Lightning would take it for the rest of one."""
    trainer.fit_loop.epoch_loop.restarting = False


def count_step_for_loggers(trainer: Any) -> None:
    """Count the step that the checkpoint had not counted, unless a validation that is due counts it."""
    loop = trainer.fit_loop.epoch_loop
    if hasattr(loop, "restarted_on_last") and not loop._should_check_val_fx(trainer.fit_loop._data_fetcher):
        loop._batches_that_stepped += not loop._should_accumulate()


def epochs_processed(trainer: Any) -> int:
    """Return the number of the next epoch; `current_epoch` is not right yet when Lightning asks for loaders."""
    return int(trainer.fit_loop.epoch_progress.current.processed)


def batches_counted(trainer: Any) -> Count:
    """Return the numbers of batches that Lightning has fetched, begun and trained on."""
    loop = trainer.fit_loop
    current = loop.epoch_loop.batch_progress.current
    return Count(loop._data_fetcher.fetched, current.ready, current.processed)


def fetches_batches(trainer: Any) -> bool:
    """Return True if Lightning fetches batches itself, rather than `training_step(dataloader_iter)`."""
    return isinstance(trainer.fit_loop._data_fetcher, _PrefetchDataFetcher)


def set_batch_size(trainer: Any, lanes: int) -> None:
    """Set the batch size that `self.log` uses as weight. Lightning would take the first dimension, which is time."""
    if trainer._results is not None and trainer._results.batch_size is None:
        trainer._results.batch_size = lanes
