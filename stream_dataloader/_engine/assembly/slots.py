"""Memory that windows are written to: a slot for a whole batch, which several readers share, or a reader's own memory.

::

    | leaf 0 | leaf 1 | ... |      a slot in shared memory: each leaf aligned to 64 bytes, the slot to pages

Guarantees: the layout of a slot is a pure function of a few numbers. A reader writes to its own lanes only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from stream_dataloader._engine.assembly.block import Block, new_column
from stream_dataloader._engine.assembly.part import Contents
from stream_dataloader._engine.items.bookkeeping import RUN_NUMBERS
from stream_dataloader._engine.items.layout import Layout, storage_dtype

MOST_STEPS_A_MESSAGE = 64
PAGE_BYTES = 4096
_ALIGNMENT_BYTES = 64  # a cache line, so that two leaves never share one
_STEPS_BYTES = 4 << 20  # a message carries several steps up to this size in slots, as each is a batch in memory
_HELD = 3  # batches that a user may hold before copies are handed out: the current, the last, and a trainer's one


def aligned(offset: int, to: int = _ALIGNMENT_BYTES) -> int:
    """Round up to a multiple of `to`."""
    return -(-offset // to) * to


class Slot(NamedTuple):
    """Arrays over the memory of one batch: `(T, B, ...)` per leaf; None for a leaf that is an object."""

    layout: Layout
    time_steps: int
    lanes: int
    columns: list[Any]

    def columns_of(self, lanes: range, lists: Sequence[Any]) -> list[Any]:
        """Return the columns of some lanes; leaves that are objects have no place in the slot and come from `lists`."""
        rows = slice(lanes.start, lanes.stop)
        pairs = zip(self.columns, lists, strict=True)
        return [sent if here is None else here[:, rows] for here, sent in pairs]


def blocks_of(contents: Contents, slot: Slot | None, lanes: range) -> Sequence[Block]:
    """Return the blocks of a part's windows; over the slot's memory if the windows are there."""
    if not contents.in_slot:
        return contents.blocks
    assert slot is not None
    counts = [0] * len(lanes)
    for lane in contents.runs[::RUN_NUMBERS]:  # a lane that read at all began at t = 0
        counts[lane - lanes.start] = contents.time_steps
    lists = contents.blocks[0].columns if contents.blocks else slot.columns
    return [Block(slot.layout, slot.columns_of(lanes, lists), counts, slot.time_steps, contents.time_steps)]


class Geometry:
    """Layout of a slot's memory; with `whole_windows` each lane's window of a leaf is contiguous."""

    def __init__(self, layout: Layout, time_steps: int, lanes: int, whole_windows: bool) -> None:
        self.layout = layout
        self.time_steps = time_steps
        self.whole_windows = whole_windows
        self._lanes = lanes
        self._places: list[tuple[tuple[int, ...], np.dtype[Any], int] | None] = []  # per leaf: shape, dtype, offset
        end = 0
        for spec in layout.specs:
            place = None
            if spec.dtype is not None:
                place = spec.shape, storage_dtype(spec.dtype), aligned(end)
                end = place[2] + time_steps * lanes * math.prod(spec.shape) * place[1].itemsize
            self._places.append(place)
        self.slot_bytes = max(aligned(end, PAGE_BYTES), PAGE_BYTES)
        self.most_steps = min(max(_STEPS_BYTES // self.slot_bytes, 1), MOST_STEPS_A_MESSAGE)  # in a message
        self.most_held = max(_HELD, self.most_steps)  # slots that may be leased at once

    def slot(self, memory: Any, offset: int = 0) -> Slot:
        """Make arrays over `memory` from an offset on; they keep the memory alive."""
        head = (self.time_steps, self._lanes)
        columns: list[Any] = []
        for place in self._places:
            column = None
            if place is not None:
                shape, dtype, begin = place
                if self.whole_windows:
                    column = np.ndarray((*head[::-1], *shape), dtype, memory, offset + begin).swapaxes(0, 1)
                else:
                    column = np.ndarray((*head, *shape), dtype, memory, offset + begin)
            columns.append(column)
        return Slot(self.layout, *head, columns)


class Slots:
    """Memory for the windows of one session. This base class has no slots: each reader has memory of its own.

    Args:
        whole_windows: A `collate_fn` takes windows lane by lane: as streams cut them, or each in one piece.
    """

    there = False  # whether there are slots

    def __init__(self, whole_windows: bool = False) -> None:
        self.whole_windows = whole_windows

    def offer(self, step: int, layout: Layout, time_steps: int) -> Slot | None:  # noqa: ARG002
        """Return the slot of a step; None if windows of this layout do not fit, or no slot is free."""
        return None

    def taken(self, step: int) -> Slot | None:  # noqa: ARG002
        """Hand over the slot of a step to its batch, if this process owns it; None if no slot was written to."""
        return None

    def own(self, width: int, layout: Layout, time_steps: int) -> Block:
        """Create room for windows outside of slots; arrays are not initialised."""
        columns = [new_column(spec, time_steps, width, whole_windows=self.whole_windows) for spec in layout.specs]
        return Block(layout, columns, [0] * width, time_steps, time_steps)

    def block(self, lanes: range, step: int, layout: Layout, time_steps: int) -> Block | None:
        """Return room for some lanes' windows in the step's slot; None as in `offer`."""
        slot = self.offer(step, layout, time_steps)
        if slot is None:
            return None
        lists = slot.columns
        if layout.has_objects:
            lists = [None if spec.dtype else new_column(spec, slot.time_steps, len(lanes)) for spec in layout.specs]
        return Block(layout, slot.columns_of(lanes, lists), [0] * len(lanes), slot.time_steps, time_steps)
