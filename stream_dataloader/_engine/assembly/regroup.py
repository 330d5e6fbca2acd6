"""Regrouping: puts the workers' parts of one step side by side, in lane order, which makes the batch.

Guarantee: the result depends on what the lanes read, not on workers. All parts must share a layout, see `layout_check`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from stream_dataloader._engine.assembly.block import Block, new_column
from stream_dataloader._engine.assembly.layout_check import LayoutCheck
from stream_dataloader._engine.assembly.part import Part
from stream_dataloader._engine.assembly.slots import Slot, blocks_of
from stream_dataloader._engine.items.bookkeeping import Bookkeeping, asked
from stream_dataloader._engine.items.fill import FillValue
from stream_dataloader._engine.items.layout import Layout, as_tensor
from stream_dataloader._engine.schedule.rules import Reader
from stream_dataloader.batch import StreamBatch


class Regrouper:
    """Makes batches of parts.

    Args:
        fill_value: Fills padding.
        context: Number of time steps that each window begins with, of the window before.
    """

    def __init__(
        self,
        readers: Sequence[Reader],
        time_steps: int | None,
        fill_value: Any,
        layout_check: LayoutCheck,
        *,
        mark_ends: bool = False,
        context: int = 0,
    ) -> None:
        self._lanes = lanes = [reader.lanes for reader in readers]
        self._time_steps = time_steps
        self._last_time_steps = 1
        self._fill = FillValue(fill_value)
        self._layout_check = layout_check
        self._mark_ends, self._context = mark_ends, context
        self._all_lanes = range(lanes[0].start, lanes[-1].stop)
        self._lane = torch.arange(lanes[0].start, lanes[-1].stop, dtype=torch.int64, device="cpu")
        self._owners = _numbers([reader.worker_id for reader in readers for _ in reader.lanes])

    def batch(
        self,
        step: int,
        epoch: int,
        parts: Sequence[Part | None],
        slot: Slot | None,
        state: Callable[[], dict[str, Any]] | None = None,
    ) -> StreamBatch:
        """Make the batch of a step that was judged; its `state_dict` calls `state`."""
        layout = self._layout_check.layout
        assert layout is not None
        is_in_slot, longest, runs = slot is not None, 0, []
        for part in parts:
            if part is not None:
                # If one part could not be written to the slot, the parts are copied side by side instead.
                is_in_slot = is_in_slot and part.contents.in_slot
                longest = max(longest, part.contents.time_steps)
                runs.append(part.contents.runs)
        self._last_time_steps = longest or self._last_time_steps  # a step of padding only is as long as the one before
        time_steps = self._time_steps or self._last_time_steps
        if is_in_slot:
            assert slot is not None
            columns = self._in_slot(parts, slot, time_steps)
        else:
            blocks: list[Block | None] = []
            for part, lanes in zip(parts, self._lanes, strict=True):
                found = blocks_of(part.contents, slot, lanes) if part else ()
                blocks.append(found[0] if found else None)
            # The block of an only reader is the batch already, and is passed on without a copy.
            if len(blocks) == 1 and blocks[0] is not None:
                columns = blocks[0].columns
            else:
                columns = [self._column(i, layout, blocks, time_steps) for i in range(len(layout.specs))]
        pairs = zip(layout.specs, columns, strict=True)
        leaves = [column if spec.dtype is None else as_tensor(column, spec.dtype) for spec, column in pairs]
        books = Bookkeeping(runs, self._all_lanes, time_steps, self._context)
        return StreamBatch._of_checked(
            books,
            # torch.compile compiles a function again if a batch has other fields than the batch before, so fields that
            # it has asked for once are there from the beginning.
            **(books.made_before() if asked.by_compiled else {}),
            data=layout.build(leaves),
            worker_id=self._owners,
            lane=self._lane,
            member=None,
            batch_index=step,
            epoch=epoch,
            context=self._context,
            is_last=self._ends(parts, time_steps) if self._mark_ends else None,
            _state=state,
        )

    def _ends(self, parts: Sequence[Part | None], time_steps: int) -> torch.Tensor:
        """Mark the last steps of streams, `(T, B)`."""
        ends = np.zeros((time_steps, len(self._all_lanes)), np.bool_)
        for part, lanes in zip(parts, self._lanes, strict=True):
            for row, t in part.contents.ends if part else ():
                ends[t, lanes.start - self._all_lanes.start + row] = True
        return torch.from_numpy(ends)

    def _in_slot(self, parts: Sequence[Part | None], slot: Slot, time_steps: int) -> list[Any]:
        """Return the arrays of a slot that holds all parts, after padding the lanes of readers that have ended."""
        for part, lanes in zip(parts, self._lanes, strict=True):
            # The reader has ended, so its lanes still hold the items of the batch that used the slot before.
            if part is None:
                for value, column in zip(self._fill.of(slot.layout), slot.columns, strict=True):
                    if value is not None:
                        column[:, lanes.start : lanes.stop] = value
        columns = slot.columns
        # The slot is larger than the batch if this is one worker's part, or if windows are short.
        if len(self._all_lanes) < slot.lanes or time_steps < slot.time_steps:
            rows = slice(self._all_lanes.start, self._all_lanes.stop)
            columns = [None if column is None else column[:time_steps, rows] for column in columns]
        if not slot.layout.has_objects:
            return columns
        blocks = [part.contents.blocks[0] if part else None for part in parts]
        return [
            self._column(i, slot.layout, blocks, time_steps) if column is None else column
            for i, column in enumerate(columns)
        ]

    def _column(self, i: int, layout: Layout, blocks: list[Block | None], time_steps: int) -> Any:
        """Put one leaf of all readers side by side."""
        spec, first = layout.specs[i], self._all_lanes.start
        column = new_column(spec, time_steps, len(self._all_lanes))
        for lanes, block in zip(self._lanes, blocks, strict=True):
            rows = slice(lanes.start - first, lanes.stop - first)
            count = block.time_steps if block else 0
            if spec.dtype is None:
                for t in range(count):
                    column[t][rows] = block.columns[i][t] if block else []
            else:
                if block:
                    column[:count, rows] = block.columns[i][:count]
                if count < time_steps:
                    column[count:, rows] = self._fill.of(layout)[i]
        return column


def _numbers(listed: list[int]) -> torch.Tensor:
    return torch.tensor(listed, dtype=torch.int64, device="cpu")
