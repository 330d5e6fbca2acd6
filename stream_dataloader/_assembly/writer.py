"""How the windows that workers read become the batch's tensors: in place in the ring, or through torch's queue.

A worker's `PartWriter` gathers its lanes' windows into *blocks*, arrays `(T, rows, ...)`, normally one for
all of its lanes, that lies in the batch's slot of the ring. What does not fit there travels with the part, and
the main process puts the blocks of all workers side by side (`regroup`). A lane knows only the `part.Sink` that it
writes to.

Guarantee: a batch holds the same values whichever worker reads a lane, and however windows travel. The main process
decides in lane order which lane's layout counts; it does not matter which worker was first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from stream_dataloader._assembly.block import Block, new_column
from stream_dataloader._assembly.part import Run
from stream_dataloader._assembly.slots import Ring, Slot
from stream_dataloader._items.fill import FillValue
from stream_dataloader._items.layout import (
    DTYPES_OF_NUMPY,
    Layout,
    Leaves,
    as_tensor,
)
from stream_dataloader._items.structure import Misfit, StreamMisfit, flatten, has_dict, is_rebuilt


class WindowKind(NamedTuple):
    """How a window that was put into a block is passed on as the stream made it: a row's steps and leaf types."""

    steps: int
    tensors: tuple[bool, ...]  # the leaf is a tensor, not an array


class Gathered(NamedTuple):
    """What a worker's lanes read for one step.

    Attributes:
        in_slot: The arrays are in the step's slot of the ring.
        time_steps: How many time steps of the blocks count; 0 if there are none.
        blocks: The windows; what is in the slot is not among their columns.
        objects: Windows that are passed on as they are, by row: the window, or a `WindowKind` of what is in a block.
        layouts: Those with dicts that were met for the first time, in lane order.
    """

    in_slot: bool
    time_steps: int
    blocks: list[Block]
    objects: dict[int, Any]
    layouts: Sequence[Layout] = ()


class SlotWriter:
    """A worker's end of the ring, for one session.

    Args:
        lanes: The worker's lanes.
        session: The session's number.
        by_lane: Each lane's window is to lie in one piece.
    """

    def __init__(self, ring: Ring, lanes: range, session: int, *, by_lane: bool) -> None:
        self._ring, self._session, self._by_lane = ring, session, by_lane
        self._rows = slice(lanes.start, lanes.stop)
        self._width = len(lanes)
        self._fitting: Layout | None = None  # equal to the ring's, and the last one asked for
        self._slots: dict[int, Slot] = {}

    def block(self, step: int, layout: Layout, time_steps: int) -> Block | None:
        """Room in the step's slot; None if windows of this layout do not fit, or no slot is free."""
        ring = self._ring
        if layout is not self._fitting:
            geometry = ring.offer(layout, time_steps)
            if geometry is None or geometry.layout != layout:
                return None
            self._fitting = layout
        geometry = ring.geometry
        assert geometry is not None
        if time_steps > geometry.time_steps or (number := ring.claim(self._session, step)) is None:
            return None
        slot = self.slot(number)
        columns = [
            new_column(spec, geometry.time_steps, self._width) if column is None else column
            for spec, column in zip(layout.specs, slot.columns, strict=True)
        ]
        return Block(layout, columns, [0] * self._width, geometry.time_steps, time_steps)

    def slot(self, number: int) -> Slot:
        """This worker's rows of a slot."""
        slot = self._slots.get(number)
        if slot is None:
            assert self._ring.geometry is not None
            whole = self._ring.geometry.slot(self._ring.memory, self._ring.offset(number), by_lane=self._by_lane)
            slot = self._slots[number] = rows_of(whole, self._rows)
        return slot

    def finish(self, step: int, block: Block, runs: list[Run]) -> list[Block]:
        """Write the bookkeeping of a step whose windows are all in the slot; what is left to be sent."""
        number = self._ring.claim(self._session, step)
        assert number is not None
        write_bookkeeping(self.slot(number), runs, self._rows.start)
        if None not in block.layout.dtypes:
            return []
        columns = [column[: block.time_steps] if type(column) is list else [] for column in block.columns]
        return [Block(block.layout, columns, block.counts, block.capacity, block.time_steps)]


def rows_of(slot: Slot, rows: slice) -> Slot:
    """Some lanes of a slot."""
    layout, source, position, mask, is_start, columns = slot
    cut = [None if column is None else column[:, rows] for column in columns]
    return Slot(layout, source[:, rows], position[:, rows], mask[:, rows], is_start[:, rows], cut)


def write_bookkeeping(slot: Slot, runs: Sequence[Run], first_lane: int) -> None:
    """Say what was read where, and that all else is padding."""
    _, source, position, mask, is_start, _ = slot
    source.fill(-1)
    position.fill(-1)
    mask.fill(False)
    is_start.fill(False)
    for lane, t, steps, index, begin, fresh in runs:
        row = lane - first_lane
        if steps == 1:
            source[t, row], position[t, row], mask[t, row] = index, begin, fresh
        else:
            end = t + steps
            source[t:end, row] = index
            position[t:end, row] = np.arange(begin, begin + steps)
            mask[t:end, row] = fresh
        if begin == 0:
            is_start[t, row] = True


class PartWriter:
    """Gathers what one worker's lanes read for one step; a `lane.Sink`.

    Args:
        width: Number of the worker's lanes.
        time_steps: Steps of a window; None if the streams cut windows.
        fill_value: Pads what no item was written to.
        slots: The ring, if there is one.
        by_lane: Each lane's window is to lie in one piece.
    """

    def __init__(
        self, width: int, time_steps: int | None, fill_value: Any, slots: SlotWriter | None, *, by_lane: bool
    ) -> None:
        self._width, self._time_steps, self._slots = width, time_steps, slots
        self._fill = FillValue(fill_value)
        self._by_lane = by_lane
        self._met: set[Layout] = set()
        self._layouts: dict[Layout, Layout] = {}
        self._whole_layout: Layout | None = None  # of the last window passed on as it is
        self.begin(0)

    def begin(self, step: int) -> None:
        """Start with a step."""
        self._step = step
        self._blocks: dict[int, Block] = {}  # by the id of an interned layout
        self._in_slot: Block | None = None
        self._latest: Block | None = None
        self._block_of_row: list[Block | None] = [None] * self._width
        self._objects: dict[int, Any] = {}
        self._met_now: list[Layout] = []

    def intern(self, layout: Layout) -> Layout:
        """See `lane.Sink`."""
        found = self._layouts.get(layout)
        if found is None:
            self._fill.of(layout)
            found = self._layouts[layout] = layout
        return found

    def met(self, layout: Layout) -> None:
        """See `lane.Sink`."""
        if layout not in self._met:
            self._met.add(layout)
            if has_dict(layout.structure):
                self._met_now.append(layout)

    def put_step(self, row: int, t: int, layout: Layout, leaves: Leaves) -> None:
        """See `lane.Sink`."""
        block = self._block_of_row[row]
        if block is None or block.layout is not layout:
            block = self._block_for_steps(row, layout)
        try:
            block.put_step(row, t, leaves)
        except OverflowError as error:
            raise Misfit(f"a number does not fit its dtype: {error}") from None

    def room(self, row: int, t: int, stop: int, layout: Layout) -> Any:
        """See `lane.Sink`."""
        block = self._block_of_row[row]
        if block is None or block.layout is not layout:
            block = self._block_for_steps(row, layout)
        return layout.build(
            column[t:stop, row]
            if spec.dtype is None or spec.dtype in DTYPES_OF_NUMPY
            else as_tensor(column[t:stop, row], spec.dtype)
            for spec, column in zip(layout.specs, block.columns, strict=True)
        )

    def wrote(self, row: int, stop: int) -> None:
        """See `lane.Sink`."""
        block = self._block_of_row[row]
        assert block is not None
        block.counts[row] = stop

    def _block_for_steps(self, row: int, layout: Layout) -> Block:
        block = self._block_of_row[row]
        if block is not None and block.counts[row]:
            raise StreamMisfit(f"the window goes on with another stream, and {block.layout.difference(layout)}")
        assert self._time_steps is not None
        return self._block(row, layout, self._time_steps)

    def put_window(self, row: int, layout: Layout, leaves: Leaves, count: int, padded: int) -> None:
        """See `lane.Sink`."""
        block = self._latest
        if block is None or block.layout is not layout or block.time_steps < padded:
            block = self._latest = self._block(row, layout, padded)
        try:
            block.put_window(row, count, leaves)
        except OverflowError as error:
            raise Misfit(f"a number does not fit its dtype: {error}") from None

    def put_object(self, row: int, item: object) -> None:
        """See `lane.Sink`."""
        self._objects[row] = item if self._slots is None else self._in_ring(row, item)

    def _in_ring(self, row: int, item: object) -> object:
        """Put a window into the ring and return what says so; the window itself if it does not go there."""
        try:
            if self._whole_layout is not None:
                leaves = self._whole_layout.read(item)
            else:
                layout, leaves = Layout.of(item, windowed=True)
                self._whole_layout = self._layouts.setdefault(layout, layout)
            count = self._whole_layout.window_length(leaves)
        except Misfit:
            return item
        _, whole = flatten(item)
        plain = all(map(_plain, whole)) and all(spec.timed for spec in self._whole_layout.specs) and is_rebuilt(item)
        if not plain or not count or self._slots is None:
            return item
        block = self._in_slot or self._slots.block(self._step, self._whole_layout, count)
        if block is None or block.layout is not self._whole_layout or count > block.capacity:
            return item
        self._in_slot = self._blocks[id(block.layout)] = block
        block.time_steps = max(block.time_steps, count)
        block.put_window(row, count, leaves)
        return WindowKind(count, tuple(type(leaf) is torch.Tensor for leaf in whole))

    def _block(self, row: int, layout: Layout, time_steps: int) -> Block:
        block = self._blocks.get(id(layout))
        if block is None:
            if self._slots is not None and (block := self._slots.block(self._step, layout, time_steps)) is not None:
                self._in_slot = block
            else:
                block = Block.empty(layout, time_steps, self._width, by_lane=self._by_lane)
        elif block.capacity < time_steps:
            block = block.copy_to(Block.empty(layout, time_steps, self._width, by_lane=self._by_lane))
        else:
            block.time_steps = max(block.time_steps, time_steps)
        self._blocks[id(layout)] = self._block_of_row[row] = block
        return block

    def finish(self, runs: list[Run]) -> Gathered:
        """What the step holds, padded."""
        blocks = [block for block in self._blocks.values() if any(block.counts)]  # none of a broken first item
        for block in blocks:
            if not self._objects:
                block.pad(self._fill.of(block.layout))
        time_steps = max([block.time_steps for block in blocks], default=0)
        in_slot = len(blocks) == 1 and blocks[0] is self._in_slot
        if in_slot:
            assert self._slots is not None
            blocks = self._slots.finish(self._step, blocks[0], runs)
        return Gathered(in_slot, time_steps, blocks, self._objects, self._met_now)


def _plain(leaf: object) -> bool:
    """Whether a leaf is an array or tensor that comes out of shared memory as it went in."""
    if type(leaf) is torch.Tensor:
        return leaf.device.type == "cpu" and not leaf.requires_grad
    return type(leaf) is np.ndarray and leaf.dtype.isnative
