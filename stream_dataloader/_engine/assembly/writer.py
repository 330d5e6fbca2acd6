"""Writing of windows in workers: into the batch's slot, where they are in place, or for the message queue.

A worker's `PartWriter` gathers its lanes' windows into *blocks*, normally a single one for all of its lanes, in the
batch's slot. Windows that do not fit there travel with the part.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from stream_dataloader._engine.assembly.block import Block
from stream_dataloader._engine.assembly.part import Contents, PartDraft
from stream_dataloader._engine.assembly.slots import Slots
from stream_dataloader._engine.items.fill import FillValue
from stream_dataloader._engine.items.layout import Layout, Leaves, as_tensor
from stream_dataloader._engine.items.step_writer import StepWriter, Taken, WindowWriter, step_writer, window_writer
from stream_dataloader._engine.items.structure import Misfit, StreamMisfit, flatten, has_dict, is_rebuilt


class WindowKind(NamedTuple):
    """Description of a window in a block, from which it is rebuilt as the stream made it.

    Attributes:
        steps: Number of its time steps.
        tensors: For each leaf, whether it is a tensor and not an array.
    """

    steps: int
    tensors: tuple[bool, ...]


class PartWriter:
    """Gathers the windows of one reader's lanes.

    Args:
        runs_ahead: Streams are read on before the windows are used, so windows that are passed on must be copied.

    Attributes:
        alike: Layouts of streams with a key, by the key; see `Handle.alike`.
    """

    def __init__(
        self, lanes: range, time_steps: int | None, fill_value: Any, slots: Slots, *, runs_ahead: bool = True
    ) -> None:
        self._runs_ahead = runs_ahead
        self._lanes = lanes
        self._time_steps = time_steps
        self._slots = slots
        self._fill = FillValue(fill_value)
        self._met: set[Layout] = set()
        self._usual: Layout | None = None  # the one met last, interned
        self.alike: dict[Any, Layout] = {}
        self._layouts: dict[Layout, Layout] = {}
        self._step_writers: dict[int, StepWriter] = {}  # by the id of an interned layout
        self._window_writers: dict[int, WindowWriter] = {}
        self._write_window: WindowWriter  # for the layout of the step's latest block
        self._whole_layout: Layout | None = None  # of the last window that was passed on unchanged
        self.draft = PartDraft(-1, len(lanes))  # the step's part

    def begin(self, step: int) -> PartDraft:
        """Begin a step."""
        self.draft = PartDraft(step, len(self._lanes))
        return self.draft

    def intern(self, layout: Layout) -> Layout:
        """Return the single object for all layouts equal to `layout`; the other methods expect it.

        Raises:
            ValueError: `fill_value` cannot pad it.
        """
        found = self._layouts.get(layout)
        if found is None:
            self._fill.of(layout)  # raises now if the fill value does not fit, not at the first padding
            found = self._layouts[layout] = layout
        return found

    def note_layout(self, layout: Layout) -> None:
        """Note the layout of a stream's first item; called in lane order."""
        self._usual = self.intern(layout)
        if layout not in self._met:
            self._met.add(layout)
            if has_dict(layout.structure):  # only the order of dicts' keys may differ between equal layouts
                self.draft.layouts.append(layout)

    def usual(self, row: int, alike: Any) -> Layout | None:
        """Return the layout of streams alike; without a key the one met last, which is most likely the next stream's.

        Return None if it is not known, or if a row's window cannot go on with it.
        """
        usual = self._usual if alike is None else self.alike.get(alike)
        block = self.draft.block_of_row[row]
        return usual if block is None or block.layout is usual else None

    def put_step(self, row: int, t: int, layout: Layout, leaves: Leaves) -> None:
        """Write time step `t` of a row.

        Raises:
            OverflowError: A number does not fit its dtype.
            StreamMisfit: The row's window has steps of another layout.
        """
        self._block_for_steps(row, layout).put_step(row, t, leaves)

    def put_run(self, row: int, t: int, stop: int, layout: Layout, stream: Iterator[Any]) -> Taken:
        """Take time steps `[t, stop)` of a row from a stream, as long as they have the layout."""
        block = self._block_for_steps(row, layout)
        write = self._step_writers.get(id(layout))
        if write is None:
            write = self._step_writers[id(layout)] = step_writer(layout, block.capacity)
        taken = write(stream, t, stop, block.columns, row)
        try:
            block.counts[row] = t + taken.written
            return taken
        finally:
            del taken  # its error's traceback holds this frame: a cycle that would keep the loader's iterator alive

    def room(self, row: int, t: int, stop: int, layout: Layout) -> tuple[Block, Any]:
        """Return the memory for time steps `[t, stop)`, as an item's structure; see `ReadsInto.read_into`.

        Raises:
            StreamMisfit: As `put_step`.
        """
        block = self._block_for_steps(row, layout)
        room: list[Any] = [column[t:stop, row] for column in block.columns]
        for i, dtype in layout.foreign:
            room[i] = as_tensor(room[i], dtype)
        return block, layout.build(room)

    def _block_for_steps(self, row: int, layout: Layout) -> Block:
        draft = self.draft
        block = draft.block_of_row[row]
        if block is not None and block.layout is layout:
            return block
        if block is not None and block.counts[row]:
            raise StreamMisfit(f"the window goes on with another stream, and {block.layout.difference(layout)}")
        assert self._time_steps is not None
        block = draft.block_of_row[row] = draft.blocks.get(id(layout)) or self._block(row, layout, self._time_steps)
        return block

    def put_window(self, row: int, layout: Layout, item: object, first: int) -> int:
        """Write a row's whole window, and return its number of steps; it is padded to at least `first` steps.

        Raises:
            Misfit: It is not of this layout.
            OverflowError: A number does not fit its dtype.
        """
        block = self.draft.latest
        count = 0
        if block is not None and block.layout is layout and block.time_steps >= first:
            count = block.counts[row] = self._write_window(item, block.columns, row, block.time_steps)
        if count:
            return count
        leaves = layout.read(item)
        if count := layout.window_length(leaves):
            padded = max(first, count)
            if block is None or block.layout is not layout or block.time_steps < padded:
                block = self.draft.latest = self._block(row, layout, padded)
                self._write_window = self._window_writers.get(id(layout)) or window_writer(layout)
                self._window_writers[id(layout)] = self._write_window
            block.put_window(row, count, leaves)
        return count

    def put_object(self, row: int, item: object) -> None:
        """Keep a row's whole window unchanged.

        Raises:
            Misfit: It cannot be copied.
        """
        kept = self._into_slot(row, item) if self._slots.there else item
        self.draft.objects[row] = _lasting(item) if kept is item and self._runs_ahead else kept

    def _into_slot(self, row: int, item: object) -> object:
        """Put a window into the slot and return its `WindowKind`; return the window if it cannot be rebuilt exactly."""
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
        if not plain or not count:
            return item
        draft = self.draft
        block = draft.in_slot or self._slots.block(self._lanes, draft.step, self._whole_layout, count)
        if block is None or block.layout is not self._whole_layout or count > block.capacity:
            return item
        draft.in_slot = draft.blocks[id(block.layout)] = block
        block.time_steps = max(block.time_steps, count)
        block.put_window(row, count, leaves)
        return WindowKind(count, tuple(type(leaf) is torch.Tensor for leaf in whole))

    def _block(self, row: int, layout: Layout, time_steps: int) -> Block:
        draft, slots, width = self.draft, self._slots, len(self._lanes)
        block = draft.blocks.get(id(layout))
        if block is None:
            block = slots.block(self._lanes, draft.step, layout, time_steps) if slots.there else None
            if block is not None:
                draft.in_slot = block
            else:
                block = slots.own(width, layout, time_steps)
        elif block.capacity < time_steps:
            block = block.copy_to(slots.own(width, layout, time_steps))
        else:
            block.time_steps = max(block.time_steps, time_steps)
        draft.blocks[id(layout)] = draft.block_of_row[row] = block
        return block

    def finish(self) -> Contents:
        """Finish the step: pad its blocks and return its contents."""
        draft, time_steps = self.draft, 0
        blocks: list[Block] = []
        for block in draft.blocks.values():
            if any(block.counts):  # a broken first item leaves an empty block
                blocks.append(block)
                time_steps = max(time_steps, block.time_steps)
                if not draft.objects:  # windows that are passed on keep their own number of steps
                    block.pad(self._fill.of(block.layout))
        in_slot = len(blocks) == 1 and blocks[0] is draft.in_slot
        sent = blocks[0].left() if in_slot else blocks
        return Contents(in_slot, time_steps, draft.runs, sent, draft.objects, draft.layouts, tuple(draft.ends))


def _lasting(item: object) -> object:
    """Copy a window, with its arrays and tensors."""
    try:
        _, leaves = flatten(item)
        return copy.deepcopy(item, {id(leaf): _copied(leaf) for leaf in leaves})
    except Exception as error:
        raise Misfit(
            f"the window, a {type(item).__name__}, cannot be copied ({type(error).__name__}: {error}). Workers copy "
            "windows, as streams may reuse their memory; yield arrays, numbers, strings or other plain objects"
        ) from None


def _copied(leaf: object) -> object:
    if isinstance(leaf, torch.Tensor):
        return leaf.clone()
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _plain(leaf: object) -> bool:
    """Return whether a leaf is an array or tensor that can be rebuilt exactly from shared memory."""
    if type(leaf) is torch.Tensor:
        return leaf.device.type == "cpu" and not leaf.requires_grad
    return type(leaf) is np.ndarray and leaf.dtype.isnative
