"""Puts the parts that workers made of one step side by side again, in lane order: the batch.

Guarantee: the result depends on what the lanes read, not on the workers they were dealt to. Whether streams
fit together is judged here, in (step, lane) order, so an error does not depend on who was faster either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from stream_dataloader._assembly.block import Block, new_column
from stream_dataloader._assembly.part import Part
from stream_dataloader._assembly.slots import Array, Slot
from stream_dataloader._assembly.writer import WindowKind, rows_of, write_bookkeeping
from stream_dataloader._items.fill import FillValue
from stream_dataloader._items.layout import Layout, Spec, as_tensor
from stream_dataloader._items.structure import ALIKE, sorted_keys, unflatten
from stream_dataloader.batch import StreamBatch
from stream_dataloader.errors import ItemError, shorten

_IDLE = object()  # stands for an idle lane's window until the layout is known


class Regrouper:
    """Makes batches of parts.

    Args:
        lanes: The lanes of each worker, consecutive.
        worker_ids: Whose they are.
        time_steps: Steps of a window; None if the streams cut windows.
        fill_value: Pads what no item was read for.
        sources: What is read, for error messages.
        known: Shared with another regrouper of the same epoch.

    Attributes:
        layout: That of the epoch's items, once it is known.
        known: Layouts that dicts were met with, each as it was met first, which decides the order of keys.
    """

    def __init__(
        self,
        lanes: Sequence[range],
        worker_ids: Sequence[int],
        time_steps: int | None,
        fill_value: Any,
        sources: Sequence[Any],
        known: dict[Layout, Layout] | None = None,
    ) -> None:
        self._lanes, self._time_steps, self._fill_value = lanes, time_steps, fill_value
        self._sources, self._fill = sources, FillValue(fill_value)
        self.layout: Layout | None = None
        self.known: dict[Layout, Layout] = {} if known is None else known
        self._first_source = -1  # whose layout it is; -1: it was read elsewhere
        self._fitting: Layout | None = None  # of slots, equal to `layout`
        self._last_time_steps = 1
        self._first = lanes[0].start
        self._width = lanes[-1].stop - self._first
        self._lane = torch.arange(self._first, self._first + self._width)
        self._owners = torch.tensor([w for w, rows in zip(worker_ids, lanes, strict=True) for _ in rows])

    def batch(self, step: int, epoch: int, parts: Sequence[Part | None], slot: Slot | None) -> StreamBatch:
        """The batch of a step.

        Args:
            parts: One a worker; None for one that has ended.
            slot: The step's slot of the ring, if it has one.

        Raises:
            ItemError: A stream's items do not fit those of the streams before it.
        """
        self.judge(parts, slot)
        time_steps = self._time_steps or max([part.time_steps for part in parts if part], default=self._last_time_steps)
        self._last_time_steps = time_steps
        if slot is not None and all(part is None or part.in_slot for part in parts):
            source, position, mask, is_start, columns = self._finished(parts, slot, time_steps)
        else:
            source, position, mask, is_start = self._bookkeeping(parts, slot, time_steps)
            columns = self._columns([_block_of(part, slot, lanes) for part, lanes in self._dealt(parts)], time_steps)
        assert self.layout is not None
        return StreamBatch.of_checked(
            data=self.layout.build(map(_leaf, self.layout.specs, columns)),
            reset=torch.from_numpy(is_start[0]),
            is_start=torch.from_numpy(is_start),
            mask=torch.from_numpy(mask),
            source=torch.from_numpy(source),
            position=torch.from_numpy(position),
            worker_id=self._owners,
            lane=self._lane,
            step=step,
            epoch=epoch,
        )

    def _dealt(self, parts: Sequence[Part | None]) -> Iterator[tuple[Part | None, range]]:
        return zip(parts, self._lanes, strict=True)

    def _finished(
        self, parts: Sequence[Part | None], slot: Slot, time_steps: int
    ) -> tuple[Array, Array, Array, Array, list[Any]]:
        """The arrays of a slot that holds all parts; only the lanes of workers that have ended are to be padded."""
        for part, lanes in self._dealt(parts):
            if part is None:
                ended = rows_of(slot, slice(lanes.start, lanes.stop))
                write_bookkeeping(ended, (), lanes.start)
                for fill, column in zip(self._fill.of(slot.layout), ended.columns, strict=True):
                    if fill is not None:
                        column[:] = fill
        if self._width < slot.source.shape[1]:
            slot = rows_of(slot, slice(self._first, self._first + self._width))
        _, source, position, mask, is_start, columns = slot
        if time_steps < len(source):
            source, position, mask, is_start = (a[:time_steps] for a in (source, position, mask, is_start))
            columns = [None if column is None else column[:time_steps] for column in columns]
        if None in slot.layout.dtypes:
            blocks = [part.blocks[0] if part else None for part in parts]
            columns = [
                self._column(i, spec, blocks, time_steps) if spec.dtype is None else column
                for i, (spec, column) in enumerate(zip(slot.layout.specs, columns, strict=True))
            ]
        return source, position, mask, is_start, columns

    def _bookkeeping(self, parts: Sequence[Part | None], slot: Slot | None, time_steps: int) -> tuple[Array, ...]:
        """What was read where: source, position, mask and is_start, each `(T, B)`."""
        shape = (time_steps, self._width)
        runs = [run for part in parts if part for run in part.runs]
        if len(runs) == self._width and not any(run.t for run in runs):  # a run a lane, from t = 0: at once
            steps, indices, starts, fresh = map(np.array, list(zip(*runs, strict=True))[2:])
            t = np.arange(time_steps)[:, None]
            real = t < steps
            is_start = np.zeros(shape, np.bool_)
            is_start[0] = starts == 0
            return np.where(real, indices, -1), np.where(real, t + starts, -1), real & fresh, is_start
        source, position = np.empty((2, *shape), np.int64)
        mask, is_start = np.empty((2, *shape), np.bool_)
        assert self.layout is not None
        write_bookkeeping(Slot(self.layout, source, position, mask, is_start, []), runs, self._first)
        for part, lanes in self._dealt(parts):
            if part and part.in_slot and slot:
                rows, count = slice(lanes.start - self._first, lanes.stop - self._first), part.time_steps
                there = rows_of(slot, slice(lanes.start, lanes.stop))
                source[:count, rows], position[:count, rows] = there.source[:count], there.position[:count]
                mask[:count, rows], is_start[:count, rows] = there.mask[:count], there.is_start[:count]
        return source, position, mask, is_start

    def _columns(self, blocks: list[Block | None], time_steps: int) -> list[Any]:
        assert self.layout is not None
        if len(blocks) == 1 and blocks[0] is not None:
            return blocks[0].columns
        return [self._column(i, spec, blocks, time_steps) for i, spec in enumerate(self.layout.specs)]

    def _column(self, i: int, spec: Spec, blocks: list[Block | None], time_steps: int) -> Any:
        """One leaf of all workers, side by side."""
        assert self.layout is not None
        column = new_column(spec, time_steps, self._width)
        for lanes, block in zip(self._lanes, blocks, strict=True):
            rows = slice(lanes.start - self._first, lanes.stop - self._first)
            count = block.time_steps if block else 0
            if spec.dtype is None:
                for t in range(count):
                    column[t][rows] = block.columns[i][t] if block else []
            else:
                if block:
                    column[:count, rows] = block.columns[i][:count]
                if count < time_steps:
                    column[count:, rows] = self._fill.of(self.layout)[i]
        return column

    def windows(self, parts: Sequence[Part | None], slot: Slot | None) -> list[Any]:
        """The B lanes' windows of a step, for `collate_fn`; those in the slot are views into it."""
        self._meet(parts)
        windows: list[Any] = []
        for part, lanes in self._dealt(parts):
            block = _block_of(part, slot, lanes) if part and part.in_slot else None
            for row in range(len(lanes)):
                given = part.objects.get(row, _IDLE) if part else _IDLE
                if isinstance(given, WindowKind):
                    assert block is not None
                    windows.append(_whole_window(block, row, given))
                    continue
                if part and not part.objects:
                    held = next((b for b in ([block] if block else part.blocks) if b.counts[row]), None)
                    if held is not None:
                        layout = self.known.get(held.layout, held.layout)
                        self.layout = self.layout or layout
                        given = _window(held, row, layout)
                windows.append(given)
        return [self._idle_window() if window is _IDLE else window for window in windows]

    def _idle_window(self) -> Any:
        if self._time_steps is None or self.layout is None:
            return self._fill_value
        block = Block.empty(self.layout, self._time_steps, 1, by_lane=True)
        block.pad(self._fill.of(self.layout))
        return _window(block, 0, self.layout)

    def _fits(self, part: Part, slot: Slot | None) -> bool:
        """Whether a part's windows all have the epoch's layout, as most do."""
        if part.in_slot and slot is not None:
            return slot.layout is self._fitting
        return len(part.blocks) == 1 and part.blocks[0].layout == self.layout

    def judge(self, parts: Sequence[Part | None], slot: Slot | None) -> None:
        """Check that the streams of a step share the layout of the epoch's first.

        Raises:
            ItemError: One does not; the first in lane order.
        """
        self._meet(parts)
        for part, lanes in self._dealt(parts):
            if part is None or self._fits(part, slot):
                continue
            for lane, source, position, layout in _reads(part, slot, lanes):
                if self.layout is None:
                    self.layout, self._first_source = self.known.get(layout, layout), source
                if layout == self.layout:
                    if part.in_slot:
                        self._fitting = layout
                    continue
                raise self._misfit(part, lane, source, position, layout)

    def _misfit(self, part: Part, lane: int, source: int, position: int, layout: Layout) -> ItemError:
        assert self.layout is not None
        index, name = self._first_source, self._name(source)
        first = "" if index < 0 else f" (source {index}, {self._name(index)})"
        return ItemError(
            f"source {source} ({name}), item {position}, lane {lane}, worker {part.worker_id}: the stream does not fit "
            f"beside the epoch's first{first}: {self.layout.difference(layout)}; {ALIKE}; or pass a collate_fn, which "
            "may mix them",
            source_index=source,
            source=name,
            position=position,
            lane=lane,
            worker_id=part.worker_id,
        )

    def _meet(self, parts: Sequence[Part | None]) -> None:
        for part in parts:
            if part is not None:
                for layout in part.layouts:
                    self.known.setdefault(layout, layout)

    def _name(self, source: int) -> str:
        try:
            return shorten(self._sources[source])
        except Exception:  # the error that is told matters more
            return "?"


def _reads(part: Part, slot: Slot | None, lanes: range) -> Iterator[tuple[int, int, int, Layout]]:
    """What a part's lanes read: lane, source, position and layout, in lane order."""
    if part.in_slot and slot is not None:
        for lane in lanes:
            if slot.source[0, lane] >= 0:
                yield lane, int(slot.source[0, lane]), int(slot.position[0, lane]), slot.layout
        return
    for run in part.runs:
        layout = next((b.layout for b in part.blocks if b.counts[run.lane - lanes.start]), None)
        if layout is not None:  # else the worker failed in making the part
            yield run.lane, run.source, run.position, layout


def _block_of(part: Part | None, slot: Slot | None, lanes: range) -> Block | None:
    """The block of a part whose windows share a layout; over the slot's memory if it is there."""
    if part is None:
        return None
    if not part.in_slot:
        return part.blocks[0] if part.blocks else None
    assert slot is not None
    rows = rows_of(slot, slice(lanes.start, lanes.stop))
    columns = rows.columns
    if part.blocks:
        columns = [
            sent if column is None else column for column, sent in zip(columns, part.blocks[0].columns, strict=True)
        ]
    counts = [int(source >= 0) * part.time_steps for source in rows.source[0]]
    return Block(slot.layout, columns, counts, len(rows.source), part.time_steps)


def _leaf(spec: Spec, column: Any) -> Any:
    return column if spec.dtype is None else as_tensor(column, spec.dtype)


def _window(block: Block, row: int, layout: Layout) -> Any:
    """One row of a block as a user sees it: tensors `(T, ...)` and lists `[t]`."""
    return layout.build(
        [step[row] for step in column] if spec.dtype is None else as_tensor(column[: block.time_steps, row], spec.dtype)
        for spec, column in zip(block.layout.specs, block.columns, strict=True)
    )


def _whole_window(block: Block, row: int, kind: WindowKind) -> Any:
    """One row of a block as the stream yielded it."""
    leaves = [column[: kind.steps, row] for column in block.columns]
    built = (
        as_tensor(leaf, spec.dtype) if is_tensor and spec.dtype is not None else leaf
        for leaf, spec, is_tensor in zip(leaves, block.layout.specs, kind.tensors, strict=True)
    )
    return unflatten(sorted_keys(block.layout.structure), built)
