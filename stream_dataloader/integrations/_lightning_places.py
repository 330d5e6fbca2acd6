"""Place of a Lightning run: from the counters of a checkpoint, and from the loaders after each batch.

Lightning counts an event four times: ready, started, processed, completed. Callbacks save anywhere between::

    epoch    ready ─ on_train_epoch_start ─ started ─ batches, validation ─ processed ─ on_train_epoch_end ─ completed
    batch    ready ─ on_train_batch_start ─ started ─ training_step ─ processed ─ on_train_batch_end ─ completed

If a run resumes from such a checkpoint, Lightning's own rules can lose a validation, a batch or an epoch. So the
counters are first changed to say one of three things, see `Stage`.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from stream_dataloader._engine.merging import merge_states
from stream_dataloader._engine.ranks.own_rank import is_started
from stream_dataloader.dataloader import StreamDataLoader
from stream_dataloader.integrations._all_ranks import State, gathered, place_of


class Stage(enum.Enum):
    """Part of an epoch in which a checkpoint was saved."""

    WITHIN = "some of its batches are trained on"
    AT_END = "all of them are; its validation and end are not done, or not all"
    BETWEEN = "it has not begun"


class LoopProgress(NamedTuple):
    """Place of a run when it was saved."""

    stage: Stage
    epoch: int  # Lightning's number
    batches: int  # number of the epoch's batches that were trained on
    in_batch_end: bool = False  # it was saved in `on_train_batch_end`: the step was not counted for loggers
    unvalidated: bool = False  # a validation that may be due after the last batch has not begun, or not ended


def progress_of(loop: dict[str, Any]) -> LoopProgress:
    """Return the place of a run, given the fit loop's part of a checkpoint."""
    epoch, batch = loop["epoch_progress"]["current"], loop["epoch_loop.batch_progress"]["current"]
    is_last = loop["epoch_loop.batch_progress"]["is_last_batch"] and batch["processed"] == batch["ready"]
    in_batch_end = batch["completed"] < batch["processed"]
    unvalidated = in_batch_end or not _is_over(loop["epoch_loop.val_loop.batch_progress"])
    between = LoopProgress(Stage.BETWEEN, epoch["processed"], 0)
    within = LoopProgress(Stage.WITHIN, epoch["processed"], batch["processed"], in_batch_end, unvalidated)
    if epoch["processed"] == epoch["started"]:
        cut = epoch["ready"] == epoch["started"] > 0 and not is_last and batch["processed"] > 0
        # max_steps or a stopping callback ended the run within the epoch, but Lightning counts the epoch as done
        return within._replace(epoch=epoch["processed"] - 1) if cut else between
    if is_last:
        return within._replace(stage=Stage.AT_END)
    return within if batch["processed"] else between


def taken_up(loop: dict[str, Any], progress: LoopProgress) -> dict[str, Any]:
    """Return a copy of the fit loop's state that makes Lightning resume at `progress`, without loaders' states."""
    loop = copy.deepcopy(
        {**loop, "state_dict": {k: v for k, v in loop["state_dict"].items() if k != "combined_loader"}}
    )
    epoch, batch = loop["epoch_progress"], loop["epoch_loop.batch_progress"]
    done = epoch["total"]["processed"] - (epoch["current"]["processed"] - progress.epoch)
    is_open = progress.stage is not Stage.BETWEEN
    _count(epoch["current"], progress.epoch, is_open)
    _count(epoch["total"], done, is_open)
    _count(batch["current"], progress.batches, False)
    _count(batch["total"], batch["total"]["processed"], False)
    batch["is_last_batch"] = progress.stage is Stage.AT_END
    if progress.unvalidated:  # as if a validation had just begun; Lightning ignores this unless one is due
        validation = loop["epoch_loop.val_loop.batch_progress"]
        _count(validation["total"], validation["total"]["completed"], True)
        _count(validation["current"], 0, True)
        validation["is_last_batch"] = False
    return loop


def _is_over(validation: dict[str, Any]) -> bool:
    current = validation["current"]
    return bool(validation["is_last_batch"]) and current["completed"] == current["ready"]


def _count(counter: dict[str, int], done: int, is_open: bool) -> None:
    """Set a counter to `done` events, and to one more that is begun if `is_open`."""
    counter.update(ready=done + is_open, started=done + is_open, processed=done, completed=done)


class Count(NamedTuple):
    """Numbers of batches of an epoch that Lightning has fetched, begun, and trained on."""

    fetched: int
    ready: int
    processed: int


class Places:
    """Places of loaders after the last batches. A state is made from a place only on request."""

    def __init__(self) -> None:
        self._after: dict[int, dict[StreamDataLoader[Any], Callable[[], State]]] = {}
        self._loaded: dict[StreamDataLoader[Any], Callable[[], State]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as an empty object, because loaders in another process are copies with their own places."""
        return Places, ()

    def restart(self, loaders: Iterable[Any]) -> None:
        """Remember the states that a checkpoint gave to loaders."""
        self._loaded = {loader: partial(dict, loader.state_dict()) for loader in stream_loaders(loaders)}

    def begin(self, loaders: Iterable[Any], count: Count) -> None:
        """Remember the places of loaders when training begins."""
        begin = {
            loader: self._loaded.get(loader) or place_of(loader, count.fetched) or partial(dict, loader.state_dict())
            for loader in stream_loaders(loaders)
        }
        self._after, self._loaded = {count.processed: begin}, {}

    def turn(self, processed: int) -> None:
        """Begin the next epoch at the place after `processed` batches, where one ended."""
        places = self._after.get(processed)
        self._after = {} if places is None else {processed: places, 0: places}

    def note(self, loaders: Iterable[Any], count: Count) -> None:
        """Remember the places of loaders before a batch is trained on."""
        if count.ready == 1:
            self._after = {0: self._after[0]} if 0 in self._after else {}
        loaders = list(loaders)
        for number in range(count.ready - 1, count.fetched + 1):
            if number not in self._after or number == count.fetched:
                places = {loader: place_of(loader, count.fetched - number) for loader in stream_loaders(loaders)}
                self._after[number] = {loader: place for loader, place in places.items() if place is not None}
        for number in [number for number in self._after if number < count.ready - 1]:
            del self._after[number]

    def handed_over(self, loaders: Iterable[Any]) -> list[tuple[StreamDataLoader[Any], State]]:
        """Return the loaders that replace others, with the last states of those."""
        last = self._after[max(self._after)] if self._after else {}
        pairs = zip(stream_loaders(loaders), last.items(), strict=False)
        return [(new, place()) for new, (old, place) in pairs if new is not old]

    def state_of(self, loader: StreamDataLoader[Any], processed: int) -> State | None:
        """Return the state after `processed` batches, or None if it is not known."""
        place = self._after.get(processed, {}).get(loader)
        return None if place is None else place()


def stream_loaders(loaders: Iterable[Any]) -> list[StreamDataLoader[Any]]:
    """Return the loaders that are a `StreamDataLoader`."""
    return [loader for loader in loaders if isinstance(loader, StreamDataLoader)]


def of_all_ranks(loader: StreamDataLoader[Any], state: State) -> State:
    """Merge the states of all ranks. Model-parallel ranks that share data count once."""
    place = loader._ranks._info
    if place.world_size == 1 or not is_started():
        return state
    return merge_states(list(dict(gathered((place.rank, state))).values()))
