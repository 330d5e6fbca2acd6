"""What a slot looks like: arrays for one whole batch, side by side in one piece of memory.

Guarantee: where things lie is a pure function of a few numbers, so all processes agree without a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from stream_dataloader._assembly.block import Block
from stream_dataloader._assembly.part import Contents
from stream_dataloader._items.fill import Fills
from stream_dataloader._items.layout import Layout, storage_dtype

MOST_STEPS_A_MESSAGE = 64
PAGE_BYTES = 4096
_ALIGNMENT_BYTES = 64  # a cache line: two leaves share none
_STEPS_BYTES = 4 << 20  # a message carries several steps up to so much in slots: they are as many batches in memory
_HELD = 3  # batches that a user may hold before copies are handed out: the one in use, the last, one of a trainer's


def aligned(offset: int, to: int = _ALIGNMENT_BYTES) -> int:
    """The next multiple of `to`."""
    return -(-offset // to) * to


class Slot(NamedTuple):
    """Arrays over the memory of one batch: `(T, B, ...)` a leaf; None for one that is an object.

    Attributes:
        lanes: How many lanes' windows they are.
    """

    layout: Layout
    time_steps: int
    lanes: int
    columns: list[Any]

    def rows(self, lanes: range) -> Slot:
        """Some lanes of it."""
        rows = slice(lanes.start, lanes.stop)
        cut = [None if column is None else column[:, rows] for column in self.columns]
        return Slot(self.layout, self.time_steps, len(lanes), cut)

    def until(self, stop: int) -> Slot:
        """The first time steps of it."""
        cut = [None if column is None else column[:stop] for column in self.columns]
        return Slot(self.layout, stop, self.lanes, cut)

    def pad(self, fills: Fills) -> None:
        """Fill all with what pads it."""
        for fill, column in zip(fills, self.columns, strict=True):
            if fill is not None:
                column[:] = fill

    def _block(self, lanes: range, contents: Contents) -> Block:
        """The windows of some lanes, of which all is in the slot but leaves that are objects: those were sent."""
        ours = self.rows(lanes)
        columns = ours.columns
        if contents.blocks:
            (block,) = contents.blocks
            columns = [sent if here is None else here for here, sent in zip(columns, block.columns, strict=True)]
        counts = [0] * len(lanes)
        for run in contents.runs:  # a lane that read began at t = 0
            counts[run.lane - lanes.start] = contents.time_steps
        return Block(self.layout, columns, counts, self.time_steps, contents.time_steps)


def blocks_of(contents: Contents, slot: Slot | None, lanes: range) -> Sequence[Block]:
    """The blocks of a part's windows; over the slot's memory if they are there."""
    if not contents.in_slot:
        return contents.blocks
    assert slot is not None
    return [slot._block(lanes, contents)]


class _Place(NamedTuple):
    """Where an array `(T, B, *shape)` lies in a slot."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    begin_bytes: int


class Geometry:
    """Where things lie in a slot: a pure function of layout, T, B and the order of these.

    ::

        | leaf 0 | leaf 1 | ... |      each aligned to 64 bytes, the slot to pages

    Attributes:
        layout: What items look like.
        time_steps: T, the most that fits.
        whole_windows: Each lane's window of a leaf lies in one piece, instead of each time step's lanes.
        slot_bytes: Size of a slot.
        most_steps: How many steps a message may carry.
        most_held: How many slots may be leased at once.
    """

    def __init__(self, layout: Layout, time_steps: int, lanes: int, whole_windows: bool) -> None:
        self.layout = layout
        self.time_steps = time_steps
        self.whole_windows = whole_windows
        self._lanes = lanes
        self._end_bytes = 0
        self._columns = [
            None if spec.dtype is None else self._place(storage_dtype(spec.dtype), spec.shape) for spec in layout.specs
        ]
        self.slot_bytes = max(aligned(self._end_bytes, PAGE_BYTES), PAGE_BYTES)
        self.most_steps = min(max(_STEPS_BYTES // self.slot_bytes, 1), MOST_STEPS_A_MESSAGE)
        self.most_held = max(_HELD, self.most_steps)

    def _place(self, dtype: Any, shape: tuple[int, ...]) -> _Place:
        """Room behind what has its place already."""
        place = _Place(shape, np.dtype(dtype), aligned(self._end_bytes))
        cells = self.time_steps * self._lanes * int(np.prod(shape, dtype=np.int64))
        self._end_bytes = place.begin_bytes + cells * place.dtype.itemsize
        return place

    def slot(self, memory: Any, offset: int = 0) -> Slot:
        """Arrays over `memory`, which they keep alive.

        Args:
            offset: Where in the memory the slot begins.
        """
        head = (self.time_steps, self._lanes)
        columns: list[Any] = []
        for place in self._columns:
            if place is None:
                columns.append(None)
                continue
            shape, dtype, begin = place
            if self.whole_windows:
                column = np.ndarray((*head[::-1], *shape), dtype, memory, offset + begin).swapaxes(0, 1)
            else:
                column = np.ndarray((*head, *shape), dtype, memory, offset + begin)
            columns.append(column)
        return Slot(self.layout, *head, columns)
