"""Check that batches arrive in order, so that each lane continues where its state stopped.

A batch that was left out, repeated, or is from another loader is detected, even if each stream is one window.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from stream_dataloader.batch import StreamBatch
from stream_dataloader.errors import StateError

#: Rows of the table of lanes: the last item and its stream, the batch that it was in, and the number of items in the
#: lane's state, which is counted for burn-in only. -1: not known.
ROWS = ("source", "position", "stream", "epoch", "step", "age")
_ITEM, _BATCH = slice(0, 3), slice(3, 5)
_AGE = ROWS.index("age")
_OLD = 1 << 62  # age of a state that was saved without its age: beyond any burn-in

#: Values in place of a lane's source: the lane has no state yet, or it was reset and may begin anywhere.
_NEVER, _ANYWHERE = -3, -2

_REMEDY = "pass each batch to before() and after() once, in order, and save both states after the same batch"


def on_host(batch: StreamBatch) -> StreamBatch:
    """Return the batch's bookkeeping in host memory."""
    return batch if batch.mask.device.type == "cpu" else batch.host


def check_batch(batch: object, user: str) -> None:
    """Raise if `batch` is not a `StreamBatch`, which `user` needs."""
    if not isinstance(batch, StreamBatch):
        remedy = "leave collate_fn out of StreamDataLoader; under torch's DataLoader use lane_dataset and collate_lanes"
        raise TypeError(f"{user} needs a StreamBatch, not a {type(batch).__name__}; {remedy}")
    if batch.context:
        what = f"the batch begins with {batch.context} time steps of context, which {user} has seen before"
        raise ValueError(f"{what}; pass batch.without_context()")


class Ends(NamedTuple):
    """Source, position and stream seed of one time step of each lane."""

    source: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]
    stream: npt.NDArray[np.int64]


class Window(NamedTuple):
    """Facts about a batch, lane by lane."""

    lanes: npt.NDArray[np.int64]  # numbers of the lanes
    real: npt.NDArray[np.bool_]  # the lane has an item, new or read again
    starts: npt.NDArray[np.bool_]  # a stream starts at the lane's first item
    goes_on: npt.NDArray[np.bool_]  # the lane's first item is not the first one of its stream
    first: Ends
    last: Ends
    epoch: int
    step: int
    is_first: torch.Tensor  # (T, B), in host memory
    there: npt.NDArray[np.bool_]  # (T, B): the step is an item
    batch: Any  # equal for a batch, its micro-batches and its copies on devices, and for no other batch

    @classmethod
    def of(cls, batch: StreamBatch) -> Window:
        host = on_host(batch)
        source, position, stream = host.source_index.numpy(), host.position.numpy(), host.stream_seed.numpy()
        there = source >= 0
        time_steps, lanes = there.shape
        rows = np.arange(lanes)
        begin = 0 if there[0].all() else there.argmax(0)  # the loader pads only the end, other code may pad the front
        stop = -1 if there[-1].all() else time_steps - 1 - there[::-1].argmax(0)
        real = there[begin, rows]
        starts = host.is_first.numpy()[begin, rows]
        first, last = [Ends(source[t, rows], position[t, rows], stream[t, rows]) for t in (begin, stop)]
        token = batch.__dict__.get("_state") or weakref.ref(batch)
        place = batch.epoch, batch.batch_index, host.is_first, there
        return cls(host.lane.numpy(), real, starts, real & ~starts, first, last, *place, token)

    def ages(self, before: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the number of items in the state before each step, `(T + 1, B)`; the last row is after the window.

        Args:
            before: `(B,)`: the number of items in the states that the window begins with.
        """
        steps = len(self.there)
        items = np.zeros((steps + 1, len(before)), np.int64)
        np.cumsum(self.there, 0, out=items[1:])
        begun = np.empty_like(items)  # count of items at which the state was reset
        begun[0] = -before
        begun[1:] = -before
        np.copyto(begun[:-1], items[:-1], where=self.is_first.numpy())
        aged: npt.NDArray[np.int64] = items - np.maximum.accumulate(begun, 0)
        return aged


def check_no_start_inside(batch: StreamBatch) -> None:
    """Raise if a stream starts after the first time step."""
    host = on_host(batch)
    if host.is_first[1:].any():
        t, row = (host.is_first[1:].nonzero()[0] + torch.tensor([1, 0], dtype=torch.int64, device="cpu")).tolist()
        what = f"lane {host.lane[row]} starts source {host.source_index[t, row]} at t = {t}, inside the window"
        raise ValueError(f'{what}; use windows="aligned", or packed=True with a model that looks at is_first')


class LaneOrder:
    """Last item and batch of each lane's state.

    After a state is loaded, the next batches must have its lanes. `is_loaded` is set until each lane had a batch.
    """

    def __init__(self) -> None:
        self.is_loaded = False
        self._missing = _NEVER
        self._last = np.empty((len(ROWS), 0), np.int64)
        self._given = np.empty(0, np.int64)  # each lane's last batch, as the number of batches before it
        self._age_before = np.empty(0, np.int64)  # each lane's age before its last batch
        self._batch: Any = None  # the last batch
        self._count = 0

    def _grow(self, lanes: npt.NDArray[np.int64]) -> None:
        if (more := int(lanes.max()) + 1 - len(self._given)) > 0:
            new = np.full((len(ROWS), more), -1)
            new[0] = self._missing
            new[_AGE] = 0
            self._age_before = np.concatenate([self._age_before, np.zeros(more, np.int64)])
            self._last = np.concatenate([self._last, new], axis=1)
            self._given = np.concatenate([self._given, np.full(more, -1)])

    def known(self, window: Window) -> npt.NDArray[np.bool_]:
        self._grow(window.lanes)
        found: npt.NDArray[np.bool_] = self._last[0, window.lanes] > _ANYWHERE
        return found

    def check(self, window: Window, *, whole: bool) -> None:
        """Raise unless each lane of a batch, or of a part, continues where its state stopped."""
        self._grow(window.lanes)
        if self.is_loaded:
            self._check_lanes(window, whole)
        source, position, stream, epoch, step, _ = self._last[:, window.lanes]
        # A source may have got another number since, as an interleaved dataset's list grew. Its stream's seed stays.
        same = (stream == window.first.stream) & ((source == window.first.source) | (stream != 0))
        same &= position + 1 == window.first.position
        lost = window.goes_on & ~same
        # Two epochs may have the same number, so only the batch itself shows that an epoch's first one is repeated.
        again = self._is_again(window)
        follows = (epoch == window.epoch) & (step + 1 == window.step) | (window.step == 0) & ~again
        follows |= (step < 0) & (source != _NEVER)
        wrong = (lost | ~follows) & (source != _ANYWHERE)
        if wrong.any():
            raise _out_of_order(window, int((lost if (lost & wrong).any() else wrong).argmax()), self._last)

    def _is_again(self, window: Window) -> npt.NDArray[np.bool_]:
        """Return `(B,)`: the lane's last batch was this very one."""
        again: npt.NDArray[np.bool_] = (self._given[window.lanes] == self._count) & (window.batch == self._batch)
        return again

    def age(self, window: Window) -> npt.NDArray[np.int64]:
        """Return the number of items in each lane's state at the beginning of a batch.

        Raises:
            StateError: The batch is neither the next one of its lanes nor their last one.
        """
        self._grow(window.lanes)
        again = self._is_again(window)
        if not again.any():
            self.check(window, whole=False)
        age = np.where(again, self._age_before[window.lanes], self._last[_AGE, window.lanes])
        return np.where(age < 0, _OLD, age)

    def begin_anew(self, lanes: npt.NDArray[np.int64]) -> None:
        """Count the items of lanes from 0, because their states were reset."""
        self._last[_AGE, lanes] = 0

    def _check_lanes(self, window: Window, whole: bool) -> None:
        saved, fed = self._last[0] != _NEVER, self._given >= 0
        is_short = whole and fed[window.lanes].any() and not fed[saved].all()  # parts of idle lanes may be missing
        if is_short or not saved[window.lanes].all():
            fed[window.lanes] = True
            lanes, had = named(np.flatnonzero(fed)), named(np.flatnonzero(saved))
            what = f"the state was saved with {had}, but the batches have {lanes}"
            remedy = "load_state_dict(state, loader=loader) moves it to another number of lanes"
            raise StateError(f"{what}; {remedy}, if the loader has loaded its own state; reset() forgets it")

    def advance(self, window: Window, *, counts: bool) -> None:
        """Record a batch as the lanes' last one; with `counts`, also the number of items in their states."""
        age = self.age(window) if counts else None
        self._grow(window.lanes)
        if window.batch != self._batch:
            self._batch, self._count = window.batch, self._count + 1
        self._given[window.lanes] = self._count
        self._last[_BATCH, window.lanes] = [[window.epoch], [window.step]]
        self._age_before[window.lanes] = -1 if age is None else age
        self._last[_AGE, window.lanes] = -1 if age is None else window.ages(age)[-1]
        real = window.lanes[window.real]
        self._last[_ITEM, real] = [row[window.real] for row in window.last]
        idle = window.lanes[~window.real]
        self._last[0, idle] = np.where(self._last[0, idle] == _NEVER, -1, self._last[0, idle])
        self.is_loaded = self.is_loaded and not (self._given[self._last[0] != _NEVER] >= 0).all()

    def forget(self, lanes: Iterable[int] | None) -> npt.NDArray[np.int64] | None:
        """Let lanes, or all of them, begin anywhere; return their numbers, or None for all.

        Raises:
            ValueError: A number is negative.
        """
        if lanes is None:
            self.is_loaded = False
            self._missing = _ANYWHERE
            self._last[0], self._last[_AGE] = _ANYWHERE, 0
            return None
        chosen = np.array([int(lane) for lane in lanes], np.int64)
        if len(chosen) and chosen.min() < 0:
            raise ValueError(f"lane {chosen.min()} cannot be reset, because lanes are numbered from 0")
        self.is_loaded = False
        if len(chosen):
            self._grow(chosen)
            self._last[0, chosen] = _ANYWHERE
            self.begin_anew(chosen)
        return chosen

    def begin(self, lanes: npt.NDArray[np.int64]) -> None:
        """Add lanes without an item so far; each must begin with a new stream."""
        if len(lanes):
            self._grow(lanes)
            self._last[:, lanes] = -1

    def last(self, lanes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return self._last[:, lanes]

    @classmethod
    def of(cls, lanes: npt.NDArray[np.int64], last: npt.NDArray[np.int64]) -> LaneOrder:
        order = cls()
        if len(lanes):
            order._grow(lanes)
            order._last[:, lanes] = last
            order.is_loaded = True
        return order

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_batch": None}


def _out_of_order(window: Window, row: int, known: npt.NDArray[np.int64]) -> StateError:
    """Return the error for a row of a batch."""
    lane = window.lanes[row]
    source, position, _, epoch, step, _ = known[:, lane]
    now = f"lane {lane} goes on with" if window.goes_on[row] else f"lane {lane} has"
    now += f" source {window.first.source[row]} at position {window.first.position[row]}"
    now += f" in batch {window.step} of epoch {window.epoch}"
    if source == _NEVER:
        return StateError(
            f"{now}, but no state is kept for it; call after() for each batch; after a resume, load the "
            "state that was saved with the loader's, or call reset()"
        )
    kept = f"after source {source}, position {position}" if source >= 0 else "before its first item"
    batch = f" (batch {step} of epoch {epoch})" if step >= 0 else ""
    return StateError(f"{now}, but its state is the one {kept}{batch}; {_REMEDY}")


def named(lanes: Iterable[int]) -> str:
    """Return a description of lanes for messages."""
    numbers = [int(lane) for lane in lanes]
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"lanes {numbers[0]} to {numbers[-1]}"
    return f"lanes {numbers}"
