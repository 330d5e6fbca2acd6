"""`LaneIndex`: an index of a dataset that also says where in the batch its item goes.

Guarantee: a batch of them is a list of plain integers for all that reads it in C (NumPy, torch, `json`), and costs the
process that draws it, and its way to a worker, no more than that. Whoever iterates over it, or takes one by its place,
gets `LaneIndex`es: torch's fetcher, in the worker.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any, SupportsIndex, overload

from stream_dataloader._schedule.replay import FRESH, START

__all__ = ["LaneIndex"]


class LaneIndex(int):
    """An index that `LaneBatchSampler` drew: an `int` that also says where in the batch its item goes.

    A dataset's `__getitem__` may look at it. In calculations it is a plain `int`.

    Attributes:
        lane: Row of the batch, 0 to B - 1.
        t: Time step of the window, 0 to T - 1.
        is_start: The item is the first of its group: what was carried in this lane ends here.
        mask: The item is read for the first time this epoch. False: it is padding, or is read again.

    Example:
        >>> from stream_dataloader import LaneIndex
        >>> index = LaneIndex(7, lane=1, t=0, is_start=True, mask=True)
        >>> index, index + 1, index.lane, index.is_start, "abcdefghi"[index]
        (7, 8, 1, True, 'h')
    """

    lane: int
    t: int
    is_start: bool
    mask: bool

    def __new__(cls, index: int, lane: int, t: int, is_start: bool, mask: bool) -> LaneIndex:
        """Build one."""
        made = super().__new__(cls, index)
        made.lane, made.t, made.is_start, made.mask = lane, t, is_start, mask
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (int(self), self.lane, self.t, self.is_start, self.mask)


class LaneIndices(list[int]):
    """The `T * B` indices of a batch, time-major: those of all lanes at t = 0, then at t = 1, and so on.

    Attributes:
        kinds: One byte an index: `FRESH` and `START`, added up.
        lanes: Number of lanes B.
    """

    __slots__ = ("kinds", "lanes")

    kinds: bytes
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
        """A plain list of `LaneIndex`es."""
        return list(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _indices, (array("q", self).tobytes(), self.kinds, self.lanes)


def _indices(numbers: bytes, kinds: bytes, lanes: int) -> LaneIndices:
    made = LaneIndices(array("q", numbers))
    made.kinds, made.lanes = kinds, lanes
    return made
