"""Puts the parts that workers made of one step side by side again, in lane order: the batch.

Guarantee: the result depends on what the lanes read, not on the workers they were dealt to. Whether streams
fit together is judged here, in (step, lane) order, so an error does not depend on who was faster either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from stream_dataloader.batch import StreamBatch
from stream_dataloader.errors import ErrorReport, ItemError
from stream_dataloader.lane import Run
from stream_dataloader.structure import Layout, Spec, as_tensor
from stream_dataloader.transport import Block, fill_for, new_column


class Fault(NamedTuple):
    """A stream's error that ends the epoch, and whether the stream was read for the first time."""

    lane: int
    fresh: bool
    error: ErrorReport


class Part(NamedTuple):
    """What one worker contributes to one step.

    Attributes:
        runs: What its lanes read, in lane order.
        blocks: The windows, see `transport`.
        objects: Windows passed on as they are, by row.
        failures: Errors of streams that were skipped.
        faults: Errors of streams that were not; the worker sends no further part.
        end: All of its lanes are idle; it sends no further part.
    """

    worker_id: int
    step: int
    runs: list[Run]
    blocks: list[Block]
    objects: dict[int, Any]
    failures: list[ErrorReport]
    faults: list[Fault]
    end: bool = False


_IDLE = object()  # stands for an idle lane's window until the layout is known


class Regrouper:
    """Makes batches of parts.

    Args:
        lanes: The lanes of each worker, consecutive.
        worker_ids: Whose they are.
        time_steps: Steps of a window; None if the streams cut windows.
        fill_value: Pads what no item was read for.
    """

    def __init__(
        self, lanes: Sequence[range], worker_ids: Sequence[int], time_steps: int | None, fill_value: Any
    ) -> None:
        self._lanes, self._time_steps, self._fill_value = lanes, time_steps, fill_value
        self._layout: Layout | None = None
        self._first = lanes[0].start
        self._width = lanes[-1].stop - self._first
        self._lane = torch.arange(self._first, self._first + self._width)
        self._owners = torch.tensor([w for w, rows in zip(worker_ids, lanes, strict=True) for _ in rows])

    def batch(self, step: int, epoch: int, parts: Sequence[Part | None]) -> StreamBatch:
        """The batch of a step.

        Args:
            parts: One a worker; None for one that has ended.

        Raises:
            ItemError: A stream's items do not fit those of the streams before it.
        """
        self.judge(parts)
        time_steps = self._time_steps or max(block.time_steps for part in parts if part for block in part.blocks)
        runs = [run for part in parts if part for run in part.runs]
        source, position, mask, is_start = self._bookkeeping(runs, time_steps)
        starts = torch.from_numpy(is_start)
        return StreamBatch(
            data=self._data(parts, time_steps),
            reset=starts[0],
            is_start=starts,
            mask=torch.from_numpy(mask),
            source=torch.from_numpy(source),
            position=torch.from_numpy(position),
            worker_id=self._owners,
            lane=self._lane,
            step=step,
            epoch=epoch,
        )

    def _bookkeeping(self, runs: list[Run], time_steps: int) -> tuple[np.ndarray[Any, Any], ...]:
        """What was read where: source, position, mask and is_start, each `(T, B)`."""
        shape = (time_steps, self._width)
        if len(runs) == self._width and not any(run.t for run in runs):  # a run a lane, from t = 0: at once
            steps, indices, starts, fresh = map(np.array, list(zip(*runs, strict=True))[2:])
            t = np.arange(time_steps)[:, None]
            real = t < steps
            is_start = np.zeros(shape, np.bool_)
            is_start[0] = starts == 0
            return np.where(real, indices, -1), np.where(real, t + starts, -1), real & fresh, is_start
        source, position = np.full((2, *shape), -1, np.int64)
        mask, is_start = np.zeros((2, *shape), np.bool_)
        for run in runs:
            row, end = run.lane - self._first, run.t + run.steps
            source[run.t : end, row] = run.source
            position[run.t : end, row] = np.arange(run.position, run.position + run.steps)
            mask[run.t : end, row] = run.fresh
            is_start[run.t, row] = run.position == 0
        return source, position, mask, is_start

    def windows(self, parts: Sequence[Part | None]) -> list[Any]:
        """The B lanes' windows of a step, for `collate_fn`."""
        windows: list[Any] = []
        for lanes, part in zip(self._lanes, parts, strict=True):
            for row in range(len(lanes)):
                block = next((b for b in part.blocks if b.counts[row]), None) if part else None
                if block is not None:
                    self._layout = self._layout or block.layout
                    windows.append(_window(block, row))
                else:
                    windows.append(part.objects.get(row, _IDLE) if part else _IDLE)
        return [self._idle_window() if window is _IDLE else window for window in windows]

    def _idle_window(self) -> Any:
        if self._time_steps is None or self._layout is None:
            return self._fill_value
        block = Block.empty(self._layout, self._time_steps, 1)
        block.pad(self._fill_value)
        return _window(block, 0)

    def judge(self, parts: Sequence[Part | None]) -> None:
        """Check that the streams of a step share the layout of the epoch's first.

        Raises:
            ItemError: One does not; the first in lane order.
        """
        for lanes, part in zip(self._lanes, parts, strict=True):
            if part is None or (len(part.blocks) == 1 and part.blocks[0].layout == self._layout):
                continue
            for run in part.runs:
                layout = next((b.layout for b in part.blocks if b.counts[run.lane - lanes.start]), None)
                if layout is None:  # the worker failed in making the part
                    continue
                self._layout = self._layout or layout
                if layout != self._layout:
                    raise ItemError(
                        f"source {run.source}, item {run.position}, lane {run.lane}, worker {part.worker_id}: the "
                        f"stream does not fit beside the epoch's first: {self._layout.difference(layout)}; make "
                        "all streams alike (resize, crop, convert), or pass a collate_fn, which may mix them",
                        source_index=run.source,
                        position=run.position,
                        lane=run.lane,
                        worker_id=part.worker_id,
                    )

    def _data(self, parts: Sequence[Part | None], time_steps: int) -> Any:
        assert self._layout is not None
        blocks = [part.blocks[0] if part and part.blocks else None for part in parts]
        if len(blocks) == 1 and blocks[0] is not None:
            columns = blocks[0].columns
        else:
            columns = [new_column(spec, time_steps, self._width) for spec in self._layout.specs]
            for i, (spec, column) in enumerate(zip(self._layout.specs, columns, strict=True)):
                for lanes, block in zip(self._lanes, blocks, strict=True):
                    rows = slice(lanes.start - self._first, lanes.stop - self._first)
                    count = block.time_steps if block else 0
                    if spec.dtype is None:
                        for t in range(count):
                            column[t][rows] = block.columns[i][t] if block else []
                    else:
                        if block:
                            column[:count, rows] = block.columns[i]
                        if count < time_steps:
                            column[count:, rows] = fill_for(self._fill_value, spec, self._layout.paths[i])
        return self._layout.build(map(_leaf, self._layout.specs, columns))


def _leaf(spec: Spec, column: Any) -> Any:
    return column if spec.dtype is None else as_tensor(column, spec.dtype)


def _window(block: Block, row: int) -> Any:
    """One row of a block as a user sees it: tensors `(T, ...)` and lists `[t]`."""
    return block.layout.build(
        [step[row] for step in column] if spec.dtype is None else as_tensor(column[:, row], spec.dtype)
        for spec, column in zip(block.layout.specs, block.columns, strict=True)
    )
