"""Puts the parts that workers made of one step side by side again, in lane order: the batch.

Guarantee: the result depends on what the lanes read, not on the workers they were dealt to. Parts are judged before
(`judge`): here, all have the epoch's layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from stream_dataloader._assembly.block import Block, new_column
from stream_dataloader._assembly.bookkeeping import Bookkeeping
from stream_dataloader._assembly.judge import Judge
from stream_dataloader._assembly.part import Part
from stream_dataloader._assembly.slots import Slot, blocks_of
from stream_dataloader._items.fill import FillValue
from stream_dataloader._items.layout import Spec, as_tensor
from stream_dataloader._schedule.rules import Reader
from stream_dataloader.batch import StreamBatch


class Regrouper:
    """Makes batches of parts.

    Args:
        fill_values: What pads each member's lanes.
        numbered: Whether batches say which member each lane is of.
    """

    def __init__(
        self,
        readers: Sequence[Reader],
        time_steps: int | None,
        fill_values: Sequence[Any],
        judge: Judge,
        *,
        mark_ends: bool = False,
        numbered: bool = False,
    ) -> None:
        self._lanes = lanes = [reader.lanes for reader in readers]
        self._time_steps = time_steps
        self._last_time_steps = 1
        self._fills = [FillValue(fill_values[reader.member]) for reader in readers]
        self._judge = judge
        self._mark_ends = mark_ends
        self._first = lanes[0].start
        self._width = lanes[-1].stop - self._first
        self._all_lanes = range(self._first, self._first + self._width)
        self._lane = torch.arange(self._first, self._first + self._width)
        members = torch.tensor([reader.member for reader in readers for _ in reader.lanes])
        self._member = members if numbered else None
        self._owners = torch.tensor([reader.worker_id for reader in readers for _ in reader.lanes])

    def batch(self, step: int, epoch: int, parts: Sequence[Part | None], slot: Slot | None) -> StreamBatch:
        """The batch of a step that was judged."""
        is_in_slot, longest, runs = slot is not None, 0, []
        for part in parts:
            if part is not None:
                is_in_slot = is_in_slot and part.contents.in_slot
                longest = max(longest, part.contents.time_steps)
                runs.append(part.contents.runs)
        self._last_time_steps = longest or self._last_time_steps  # a step without any is as long as the one before
        time_steps = self._time_steps or self._last_time_steps
        if is_in_slot:
            assert slot is not None
            columns = self._in_slot(parts, slot, time_steps)
        else:
            found = [
                part and blocks_of(part.contents, slot, lanes) for part, lanes in zip(parts, self._lanes, strict=True)
            ]
            columns = self._columns([blocks[0] if blocks else None for blocks in found], time_steps)
        assert self._judge.layout is not None
        books = Bookkeeping(runs, self._all_lanes, time_steps)
        return StreamBatch._of_checked(
            books,
            **books.made_before(),
            data=self._judge.layout.build(map(_leaf, self._judge.layout.specs, columns)),
            worker_id=self._owners,
            lane=self._lane,
            member=self._member,
            step=step,
            epoch=epoch,
            is_last=self._ends(parts, time_steps) if self._mark_ends else None,
        )

    def _ends(self, parts: Sequence[Part | None], time_steps: int) -> torch.Tensor:
        """Where streams end; most batches have few ends."""
        ends = np.zeros((time_steps, self._width), np.bool_)
        for part, lanes in zip(parts, self._lanes, strict=True):
            for row, t in part.contents.ends if part else ():
                ends[t, lanes.start - self._first + row] = True
        return torch.from_numpy(ends)

    def _rows(self, lanes: range) -> slice:
        """Where some lanes are in the batch."""
        return slice(lanes.start - self._first, lanes.stop - self._first)

    def _in_slot(self, parts: Sequence[Part | None], slot: Slot, time_steps: int) -> list[Any]:
        """The arrays of a slot that holds all parts; only the lanes of readers that have ended are to be padded."""
        for part, lanes, fill in zip(parts, self._lanes, self._fills, strict=True):
            if part is None:
                for value, column in zip(fill.of(slot.layout), slot.columns, strict=True):
                    if value is not None:
                        column[:, lanes.start : lanes.stop] = value
        columns = slot.columns
        if self._width < slot.lanes or time_steps < slot.time_steps:  # what one worker put there, or not all of it
            rows = slice(self._first, self._first + self._width)
            columns = [None if column is None else column[:time_steps, rows] for column in columns]
        if None not in slot.layout.dtypes:
            return columns
        blocks = [part.contents.blocks[0] if part else None for part in parts]
        return [
            self._column(i, spec, blocks, time_steps) if spec.dtype is None else column
            for i, (spec, column) in enumerate(zip(slot.layout.specs, columns, strict=True))
        ]

    def _columns(self, blocks: list[Block | None], time_steps: int) -> list[Any]:
        if len(blocks) == 1 and blocks[0] is not None:
            return blocks[0].columns
        assert self._judge.layout is not None
        return [self._column(i, spec, blocks, time_steps) for i, spec in enumerate(self._judge.layout.specs)]

    def _column(self, i: int, spec: Spec, blocks: list[Block | None], time_steps: int) -> Any:
        """One leaf of all readers, side by side."""
        assert self._judge.layout is not None
        column = new_column(spec, time_steps, self._width)
        for lanes, block, fill in zip(self._lanes, blocks, self._fills, strict=True):
            rows = self._rows(lanes)
            count = block.time_steps if block else 0
            if spec.dtype is None:
                for t in range(count):
                    column[t][rows] = block.columns[i][t] if block else []
            else:
                if block:
                    column[:count, rows] = block.columns[i][:count]
                if count < time_steps:
                    column[count:, rows] = fill.of(self._judge.layout)[i]
        return column


def _leaf(spec: Spec, column: Any) -> Any:
    return column if spec.dtype is None else as_tensor(column, spec.dtype)
