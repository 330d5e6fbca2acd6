"""What a batch says of its cells: which stream was read there, at which position, whether for the first time.

Guarantee: it is written in one way, wherever it lies: in a slot, by the worker that read, or in the main process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from stream_dataloader._assembly.part import Run

Array = np.ndarray[Any, Any]

#: Of the arrays, in their order.
DTYPES: tuple[type, ...] = (np.int64, np.int64, np.bool_, np.bool_)

_MANY_RUNS = 8  # from so many on, whole arrays are written in less time than one run after the other


class Bookkeeping(NamedTuple):
    """Arrays `(T, lanes)`, as in `StreamBatch`."""

    source: Array
    position: Array
    mask: Array
    is_start: Array

    @classmethod
    def empty(cls, time_steps: int, lanes: int) -> Bookkeeping:
        """Arrays that are not initialised."""
        return cls(*[np.empty((time_steps, lanes), dtype) for dtype in DTYPES])

    def rows(self, rows: slice) -> Bookkeeping:
        """That of some lanes, over the same memory."""
        source, position, mask, is_start = self
        return Bookkeeping(source[:, rows], position[:, rows], mask[:, rows], is_start[:, rows])

    def until(self, stop: int) -> Bookkeeping:
        """That of the first time steps, over the same memory."""
        source, position, mask, is_start = self
        return Bookkeeping(source[:stop], position[:stop], mask[:stop], is_start[:stop])

    def copy_to(self, other: Bookkeeping) -> None:
        """Write all of it to one of the same shape."""
        for new, old in zip(other, self, strict=True):
            new[:] = old

    def write(self, runs: Sequence[Run], first_lane: int) -> None:
        """Say what was read where, and that all else is padding.

        Args:
            runs: What was read, in lane order.
            first_lane: The lane of the first row.
        """
        width = self.source.shape[1]
        if len(runs) == width >= _MANY_RUNS and not any(run.t for run in runs):
            self._write_one_a_lane(runs)
        else:
            self._write_one_by_one(runs, first_lane)

    def _write_one_by_one(self, runs: Sequence[Run], first_lane: int) -> None:
        source, position, mask, is_start = self
        source.fill(-1)
        position.fill(-1)
        mask.fill(False)
        is_start.fill(False)
        for lane, t, steps, index, begin, fresh, starts in runs:
            row = lane - first_lane
            if steps == 1:  # the least work for the most frequent case
                source[t, row], position[t, row], mask[t, row] = index, begin, fresh
            else:
                end = t + steps
                source[t:end, row] = index
                position[t:end, row] = np.arange(begin, begin + steps)
                mask[t:end, row] = fresh
            if starts:
                is_start[t, row] = True

    def _write_one_a_lane(self, runs: Sequence[Run]) -> None:
        """All lanes at once: each has one run, from t = 0."""
        _, _, *rest = zip(*runs, strict=True)
        steps, indices, begins, fresh, starts = map(np.array, rest)
        t = np.arange(len(self.source))[:, None]
        real = t < steps
        source, position, mask, is_start = self
        source.fill(-1)
        position.fill(-1)
        is_start.fill(False)
        np.copyto(source, indices, where=real)
        np.add(t, begins, out=position, where=real)
        np.logical_and(real, fresh, out=mask)
        is_start[0] = starts
