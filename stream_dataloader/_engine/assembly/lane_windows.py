"""The lanes' windows one by one, for `collate_fn`.

Guarantee: a window that the stream cut itself is passed on as it was yielded; others are tensors `(T, ...)` and lists
`[t]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stream_dataloader._engine.assembly.block import Block, new_column
from stream_dataloader._engine.assembly.layout_check import LayoutCheck
from stream_dataloader._engine.assembly.part import Part
from stream_dataloader._engine.assembly.slots import Slot, blocks_of
from stream_dataloader._engine.assembly.writer import WindowKind
from stream_dataloader._engine.items.fill import Fills, FillValue
from stream_dataloader._engine.items.layout import Layout, as_tensor
from stream_dataloader._engine.items.structure import sorted_keys, unflatten
from stream_dataloader._engine.schedule.rules import Reader

_IDLE = object()  # stands for an idle lane's window until the layout is known


class LaneWindows:
    """Takes windows out of parts."""

    def __init__(
        self, readers: Sequence[Reader], time_steps: int | None, fill_value: Any, layout_check: LayoutCheck
    ) -> None:
        self._lanes = [reader.lanes for reader in readers]
        self._time_steps = time_steps
        self._fill_value, self._fill = fill_value, FillValue(fill_value)
        self._layout_check = layout_check

    def of(self, parts: Sequence[Part | None], slot: Slot | None) -> list[Any]:
        """Return the B lanes' windows of a step; windows in the slot are views into it."""
        self._layout_check.note_layouts(parts)
        windows: list[Any] = []
        for part, lanes in zip(parts, self._lanes, strict=True):
            windows += [_IDLE] * len(lanes) if part is None else self._of_part(part, slot, lanes)
        # A second pass is needed, as the first lanes may be idle while only the last one's window shows the layout.
        return [self._idle_window() if window is _IDLE else window for window in windows]

    def _of_part(self, part: Part, slot: Slot | None, lanes: range) -> list[Any]:
        contents = part.contents
        blocks = blocks_of(contents, slot, lanes)
        if contents.objects:
            return [_as_yielded(contents.objects.get(row, _IDLE), blocks, row) for row in range(len(lanes))]
        return [self._read(blocks, row) for row in range(len(lanes))]

    def _read(self, blocks: Sequence[Block], row: int) -> Any:
        """Read a window that the loader cut or padded."""
        block = next((block for block in blocks if block.counts[row]), None)
        if block is None:
            return _IDLE
        layout = self._layout_check.with_first_keys(block.layout)
        self._layout_check.layout = self._layout_check.layout or layout
        return _window(block, row, layout)

    def _idle_window(self) -> Any:
        layout = self._layout_check.layout
        if self._time_steps is None or layout is None:
            return self._fill_value
        return idle_window(layout, self._time_steps, self._fill.of(layout))


def idle_window(layout: Layout, time_steps: int, fills: Fills) -> Any:
    """Make the window of a lane that reads nothing: padding of a layout."""
    columns = [new_column(spec, time_steps, 1) for spec in layout.specs]
    block = Block(layout, columns, [0], time_steps, time_steps)
    block.pad(fills)
    return _window(block, 0, layout)


def _window(block: Block, row: int, layout: Layout) -> Any:
    return layout.build(
        [step[row] for step in column] if spec.dtype is None else as_tensor(column[: block.time_steps, row], spec.dtype)
        for spec, column in zip(block.layout.specs, block.columns, strict=True)
    )


def _as_yielded(given: Any, blocks: Sequence[Block], row: int) -> Any:
    """Return a window as the stream yielded it: sent with the part, or rebuilt from the slot's only block."""
    if not isinstance(given, WindowKind):
        return given
    (block,) = blocks
    leaves = [column[: given.steps, row] for column in block.columns]
    built = (
        as_tensor(leaf, spec.dtype) if is_tensor and spec.dtype is not None else leaf
        for leaf, spec, is_tensor in zip(leaves, block.layout.specs, given.tensors, strict=True)
    )
    return unflatten(sorted_keys(block.layout.structure), built)
