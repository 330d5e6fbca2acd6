"""Where a run of Lightning stands: what a checkpoint says of it, and what loaders had yielded after each batch.

Lightning counts an event four times: ready, started, processed, completed. Callbacks save anywhere between::

    epoch    ready ─ on_train_epoch_start ─ started ─ batches, validation ─ processed ─ on_train_epoch_end ─ completed
    batch    ready ─ on_train_batch_start ─ started ─ training_step ─ processed ─ on_train_batch_end ─ completed

Its own rules for going on lose a validation, a batch or an epoch there. So the counters are first made to say one of
three things, see `Stage`.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from stream_dataloader._merging import merge_states
from stream_dataloader._ranks.place import is_started
from stream_dataloader.dataloader import StreamDataLoader
from stream_dataloader.integrations._all_ranks import State, gathered, place_of


class Stage(enum.Enum):
    """Where in an epoch a checkpoint was saved."""

    WITHIN = "some of its batches are trained on"
    AT_END = "all of them are; its validation and end are not done, or not all"
    BETWEEN = "it has not begun"


class Standing(NamedTuple):
    """Where a run stood when it was saved."""

    stage: Stage
    epoch: int  # Lightning's number of it
    batches: int  # number of its batches trained on
    in_batch_end: bool = False  # it was saved in `on_train_batch_end`: the step was not counted for loggers
    unvalidated: bool = False  # a validation that may be due after the last batch has not begun, or not ended


def standing_of(loop: dict[str, Any]) -> Standing:
    """Where a run stood, by the fit loop's part of a checkpoint."""
    epoch, batch = loop["epoch_progress"]["current"], loop["epoch_loop.batch_progress"]["current"]
    is_last = loop["epoch_loop.batch_progress"]["is_last_batch"] and batch["processed"] == batch["ready"]
    in_batch_end = batch["completed"] < batch["processed"]
    unvalidated = in_batch_end or not _is_over(loop["epoch_loop.val_loop.batch_progress"])
    between = Standing(Stage.BETWEEN, epoch["processed"], 0)
    within = Standing(Stage.WITHIN, epoch["processed"], batch["processed"], in_batch_end, unvalidated)
    if epoch["processed"] == epoch["started"]:
        cut = epoch["ready"] == epoch["started"] > 0 and not is_last and batch["processed"] > 0
        # max_steps, or a callback that stops, ended the run within the epoch, which Lightning counts as done
        return within._replace(epoch=epoch["processed"] - 1) if cut else between
    if is_last:
        return within._replace(stage=Stage.AT_END)
    return within if batch["processed"] else between


def taken_up(loop: dict[str, Any], standing: Standing) -> dict[str, Any]:
    """A copy without loaders' states, whose counters Lightning takes up as they were meant."""
    loop = copy.deepcopy(
        {**loop, "state_dict": {k: v for k, v in loop["state_dict"].items() if k != "combined_loader"}}
    )
    epoch, batch = loop["epoch_progress"], loop["epoch_loop.batch_progress"]
    done = epoch["total"]["processed"] - (epoch["current"]["processed"] - standing.epoch)
    is_open = standing.stage is not Stage.BETWEEN
    _count(epoch["current"], standing.epoch, is_open)
    _count(epoch["total"], done, is_open)
    _count(batch["current"], standing.batches, False)
    _count(batch["total"], batch["total"]["processed"], False)
    batch["is_last_batch"] = standing.stage is Stage.AT_END
    if standing.unvalidated:  # as if a validation had just begun: Lightning looks at it only where one is due
        validation = loop["epoch_loop.val_loop.batch_progress"]
        _count(validation["total"], validation["total"]["completed"], True)
        _count(validation["current"], 0, True)
        validation["is_last_batch"] = False
    return loop


def _is_over(validation: dict[str, Any]) -> bool:
    current = validation["current"]
    return bool(validation["is_last_batch"]) and current["completed"] == current["ready"]


def _count(counter: dict[str, int], done: int, is_open: bool) -> None:
    """Have a counter say that some events are done, and one more is begun."""
    counter.update(ready=done + is_open, started=done + is_open, processed=done, completed=done)


class Count(NamedTuple):
    """How many batches of an epoch Lightning has fetched, begun, and trained on."""

    fetched: int
    ready: int
    processed: int


class Places:
    """Remembers places; a state is made of one only when it is asked for."""

    def __init__(self) -> None:
        self._after: dict[int, dict[StreamDataLoader[Any], Callable[[], State]]] = {}
        self._loaded: dict[StreamDataLoader[Any], Callable[[], State]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy in another process, where loaders are copies too, knows no place."""
        return Places, ()

    def restart(self, loaders: Iterable[Any]) -> None:
        """A checkpoint was loaded: remember the states that it gave."""
        self._loaded = {loader: partial(dict, loader.state_dict()) for loader in stream_loaders(loaders)}

    def begin(self, loaders: Iterable[Any], count: Count) -> None:
        """Training begins: remember where loaders stand."""
        begin = {
            loader: self._loaded.get(loader) or place_of(loader, count.fetched) or partial(dict, loader.state_dict())
            for loader in stream_loaders(loaders)
        }
        self._after, self._loaded = {count.processed: begin}, {}

    def turn(self, processed: int) -> None:
        """An epoch ended after `processed` batches, and the next one begins there."""
        places = self._after.get(processed)
        self._after = {} if places is None else {processed: places, 0: places}

    def note(self, loaders: Iterable[Any], count: Count) -> None:
        """A batch is about to be trained on: remember where loaders stand."""
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
        """Loaders that take the place of others, with the states that those ended with."""
        last = self._after[max(self._after)] if self._after else {}
        pairs = zip(stream_loaders(loaders), last.items(), strict=False)
        return [(new, place()) for new, (old, place) in pairs if new is not old]

    def state_of(self, loader: StreamDataLoader[Any], processed: int) -> State | None:
        """The state after so many batches; None if it is not known."""
        place = self._after.get(processed, {}).get(loader)
        return None if place is None else place()


def stream_loaders(loaders: Iterable[Any]) -> list[StreamDataLoader[Any]]:
    """Those of ours."""
    return [loader for loader in loaders if isinstance(loader, StreamDataLoader)]


def of_all_ranks(loader: StreamDataLoader[Any], state: State) -> State:
    """The whole of which each rank has a part; of model-parallel ones, several have the same."""
    place = loader._ranks._place
    if place.world_size == 1 or not is_started():
        return state
    return merge_states(list(dict(gathered((place.rank, state))).values()))
