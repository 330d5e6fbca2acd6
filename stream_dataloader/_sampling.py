"""Parts of `LaneBatchSampler`: `Drawing` draws the batches of an epoch, which contain `LaneIndex`es.

Guarantees: the place of a drawing is known for every batch since it began. Code in C that reads a batch (NumPy, torch,
`json`) sees plain integers, and iteration yields `LaneIndex`es.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from typing import Any, SupportsIndex, overload

import numpy.typing as npt

from stream_dataloader._map_style.index_groups import IndexGroups
from stream_dataloader._schedule.order import Order
from stream_dataloader._schedule.position import EpochStart
from stream_dataloader._schedule.replay import FRESH, START, Replay
from stream_dataloader._schedule.rules import Rules
from stream_dataloader._schedule.snapshot import Snapshot

_KEPT_PLACES = 8  # one place is kept per block of steps
_ALL = 1 << 62


class LaneIndex(int):
    """An index that `LaneBatchSampler` drew: an `int` with the cell of the batch that its item fills.

    A dataset's `__getitem__` may read these attributes. In calculations it is a plain `int`.

    Attributes:
        lane: Row of the batch, 0 to B - 1.
        t: Time step of the window, 0 to T - 1.
        is_first: The item is the first of its group, so the state carried in this lane must be reset.
        mask: The item is read for the first time this epoch. False: it is padding, or is read again.

    Example:
        >>> from stream_dataloader import LaneIndex
        >>> index = LaneIndex(7, lane=1, t=0, is_first=True, mask=True)
        >>> index, index + 1, index.lane, index.is_first, "abcdefghi"[index]
        (7, 8, 1, True, 'h')
    """

    lane: int
    t: int
    is_first: bool
    mask: bool

    def __new__(cls, index: int, lane: int, t: int, is_first: bool, mask: bool) -> LaneIndex:
        """Build an index with its cell."""
        made = super().__new__(cls, index)
        made.lane, made.t, made.is_first, made.mask = lane, t, is_first, mask
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (int(self), self.lane, self.t, self.is_first, self.mask)


class LaneIndices(list[int]):
    """The `T * B` indices of a batch, time-major: those of all lanes at t = 0, then at t = 1, and so on."""

    __slots__ = ("kinds", "lanes")

    kinds: bytes  # one byte per index: `FRESH` and `START`, added up
    lanes: int

    def __iter__(self) -> Iterator[int]:
        lanes = self.lanes
        for number, (index, kind) in enumerate(zip(super().__iter__(), self.kinds, strict=True)):
            yield LaneIndex(index, number % lanes, number // lanes, kind & START != 0, kind & FRESH != 0)

    @overload
    def __getitem__(self, place: SupportsIndex) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> list[int]: ...
    def __getitem__(self, place: SupportsIndex | slice) -> int | list[int]:
        if isinstance(place, slice):
            return list(self)[place]
        number = range(len(self))[place]
        kind = self.kinds[number]
        t, lane = divmod(number, self.lanes)
        return LaneIndex(super().__getitem__(number), lane, t, kind & START != 0, kind & FRESH != 0)

    def copy(self) -> list[int]:
        return list(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _indices, (array("q", self).tobytes(), self.kinds, self.lanes)


def _indices(numbers: bytes, kinds: bytes, lanes: int) -> LaneIndices:
    made = LaneIndices(array("q", numbers))
    made.kinds, made.lanes = kinds, lanes
    return made


class Drawing:
    """One epoch being drawn.

    Attributes:
        start: The start of the drawing.
        total: Number of batches of the epoch; None without an end.
        fetched: Number of batches drawn so far.
        first_step: The first step that is drawn.
    """

    def __init__(self, groups: IndexGroups, rules: Rules, start: EpochStart, total: int | None) -> None:
        self.start = start
        self.total = total
        self.fetched = start.epoch.delivered
        self._groups, self._rules = groups, rules
        self.first_step = 0 if start.place is None else start.place.step
        self._kept: deque[Snapshot] = deque(maxlen=_KEPT_PLACES)

    def batches(self) -> Iterator[LaneIndices]:
        replay = self._replay(self.start.place)
        lanes, flat = self._rules.lanes, self._groups.flat
        while (left := (_ALL if self.total is None else self.total) - self.fetched) > 0:
            self._kept.append(replay.place())
            places, kinds = replay.read(left)
            size = places[0].size
            all_kinds = kinds.tobytes()
            indices: npt.NDArray[Any] = (places if flat is None else flat[places]).reshape(-1, size)
            for number, row in enumerate(indices.tolist()):
                batch = LaneIndices(row)
                batch.kinds, batch.lanes = all_kinds[number * size : (number + 1) * size], lanes
                self.fetched += 1
                yield batch

    def reached(self) -> Snapshot:
        """Return the place after all batches that were drawn."""
        return self.place(self.fetched)

    def place(self, batches: int) -> Snapshot:
        number, first = self.start.epoch
        if not first <= batches <= self.fetched:
            what = f"the state after {batches} batches is not known: batches {first} to {self.fetched}"
            raise ValueError(f"{what} of epoch {number} were drawn; pass the number that the trainer has used")
        step = self.first_step + batches - first
        before = [place for place in self._kept if place.step <= step]
        replay = self._replay(before[-1] if before else self.start.place)
        replay.skip_to(step)
        return replay.place()

    def _replay(self, place: Snapshot | None) -> Replay:
        lengths = self._groups.lengths
        return Replay(self._rules, Order(self._rules, self.start.run, lengths), lengths, place)
