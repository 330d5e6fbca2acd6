"""Bookkeeping of a batch's cells: the stream that was read there, the position in it, whether for the first time.

Fields are made only on request: for windows of bytes they are 26 times as large as the data. A function under
`torch.compile` would be compiled anew for each batch if it had to make them. So once a compiled function has asked for
a field, all later batches have their fields made beforehand.

Guarantee: a pure function of the runs, in memory of its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch

#: Numbers of a run, in the order of `part.Run`: lane, t, steps, source, position, fresh, starts, seed.
RUN_NUMBERS = 8

Array = np.ndarray[Any, Any]


#: Fields that repeat one of a run's numbers: the index of that number, the value in padding, and the dtype.
_REPEATED: Mapping[str, tuple[int, int, Any]] = {
    "mask": (5, False, np.bool_),
    "source_index": (3, -1, np.int64),
    "stream_seed": (7, 0, np.int64),
}


class Asked:
    """Record whether compiled code has asked for bookkeeping; an attribute, as `torch.compile` can set one."""

    by_compiled = False


asked = Asked()


@lru_cache(maxsize=1)
def _time_steps(steps: int, lanes: int) -> Array:
    """Return `(T, B)`, each cell's time step; cached, as the batches of a loader share a shape."""
    cells: Array = np.arange(steps).repeat(lanes).reshape(steps, lanes)
    return cells


class Bookkeeping:
    """The bookkeeping of one batch, made on request; the names are those of `StreamBatch`, and `shape` is `(T, B)`.

    In lane order, a field consists of a few numbers that repeat, so `numpy.repeat` makes it. In step order, whole rows
    repeat instead: between two steps at which any run begins or ends, all rows are equal::

        lane 0  a a a b b       rows    a c  1 time         (T = 5, two lanes, `.` is padding)
        lane 1  c d d . .               a d  2 times
                                        b .  2 times
    """

    def __init__(self, runs: Sequence[Sequence[int]], lanes: range, time_steps: int, context: int = 0) -> None:
        self._context = context
        self._runs = runs
        self._lanes = lanes
        self.shape = time_steps, len(lanes)

    def made_before(self) -> dict[str, torch.Tensor]:
        """Make all fields beforehand, for compiled functions."""
        names = "is_first", "mask", "source_index", "position", "stream_seed"
        return {made: tensor for name in names for made, tensor in self(name).items()}

    def __call__(self, name: str) -> dict[str, torch.Tensor]:
        """Make a field, and the fields that are views of it."""
        if torch.compiler.is_compiling():  # checked here, because the callers may not be traced, or not to their end
            asked.by_compiled = True
            return self._traced()
        if name in ("reset", "is_first"):
            is_first = self._is_first()
            return {"is_first": torch.from_numpy(is_first), "reset": torch.from_numpy(is_first[self._context])}
        if name == "position":
            return {name: torch.from_numpy(self._position())}
        if name == "mask" and not self._has_padding and self._numbers[5].all():  # as in most batches
            return {name: torch.from_numpy(np.ones(self.shape, np.bool_))}
        number, padding, dtype = _REPEATED[name]
        return {name: torch.from_numpy(self._repeated(self._numbers[number], padding, dtype))}

    def starts(self) -> Array:
        """Return the starts of streams, as places in the row of lanes laid end to end."""
        lane, t, *_, starts, _ = self._numbers
        places: Array = lane * self.shape[0] + t
        started: Array = places[starts != 0]
        return started

    def padding_edges(self) -> Array:
        """Return the places in that row where padding begins or ends; padding may span two lanes."""
        lane, t, steps = self._numbers[:3]
        begin = lane * self.shape[0] + t
        return np.setxor1d(begin, begin + steps) if self._has_padding else begin[:0]

    def _traced(self) -> dict[str, torch.Tensor]:
        """Make all fields run by run, for `torch.compile`, which cannot trace sizes that follow from data."""
        is_first, mask = (torch.full(self.shape, False, device="cpu") for _ in range(2))
        source_index, position = (torch.full(self.shape, -1, device="cpu") for _ in range(2))
        stream_seed = torch.full(self.shape, 0, device="cpu")
        numbers = tuple(itertools.chain.from_iterable(self._runs))
        for i in range(0, len(numbers), RUN_NUMBERS):
            lane, t, steps, source, first, fresh, starts, seed = numbers[i : i + RUN_NUMBERS]
            cells = slice(t, t + steps), lane - self._lanes.start
            is_first[t, cells[1]] = bool(starts)
            mask[cells] = bool(fresh)
            source_index[cells] = source
            position[cells] = torch.arange(first, first + steps, device="cpu")
            stream_seed[cells] = seed
        marks = {"is_first": is_first, "reset": is_first[self._context], "mask": mask}
        return {**marks, "source_index": source_index, "position": position, "stream_seed": stream_seed}

    def _is_first(self) -> Array:
        numbers = self._numbers
        is_first = np.zeros(self.shape, np.bool_)
        if self._is_full:
            is_first[0] = numbers[6]
        else:
            is_first[numbers[1], numbers[0]] = numbers[6]
        return is_first

    def _position(self) -> Array:
        time_steps, width = self.shape
        numbers = self._numbers
        if self._is_full:
            whole: Array = np.arange(time_steps)[:, None] + numbers[4]
            return whole
        position = self._repeated(numbers[4] - numbers[1], -1 - time_steps, np.int64)  # as if each run began at t = 0
        position += _time_steps(time_steps, width)
        return np.maximum(position, -1, out=position) if self._has_padding else position

    def _repeated(self, values: Array | bool, padding: int, dtype: Any) -> Array:
        """Return a field `(T, B)` with one value per run."""
        if self._is_full:
            field = np.empty(self.shape, dtype)
            field[:] = values
            return field
        stretches, times = self._lengths
        found = np.full(len(stretches), padding, dtype)
        found[1::2] = values
        rows: Array = found.repeat(stretches).reshape(self.shape[1], len(times)).T
        return rows.repeat(times, axis=0)

    @cached_property
    def _numbers(self) -> Array:
        """The runs, `(RUN_NUMBERS, runs)`, with lanes counted from the first one."""
        found = np.concatenate([np.empty(0, np.int64), *(np.array(runs, np.int64) for runs in self._runs)])
        numbers: Array = found.reshape(-1, RUN_NUMBERS).T
        numbers[0] -= self._lanes.start
        return numbers

    @cached_property
    def _is_full(self) -> bool:
        """Whether each lane has one run that fills its whole window."""
        time_steps, width = self.shape
        steps: list[int] = self._numbers[2].tolist()
        return steps == [time_steps] * width

    @cached_property
    def _has_padding(self) -> bool:
        return int(self._numbers[2].sum()) < math.prod(self.shape)

    @cached_property
    def _lengths(self) -> tuple[Array, Array]:
        """Lengths, in rows, of alternating padding and runs in lane order; and the number of time steps of each row."""
        (lane, t, steps), (time_steps, width) = self._numbers[:3], self.shape
        end = t + steps
        bounds = np.concatenate((t, end, (0, time_steps)))  # equal bounds make rows of no time step, which do no harm
        bounds.sort()
        rows = len(bounds) - 1
        edges = np.zeros(2 * len(t) + 2, np.int64)
        before = lane * rows
        edges[1:-1:2] = before + bounds.searchsorted(t)
        edges[2:-1:2] = before + bounds.searchsorted(end)
        edges[-1] = width * rows
        return edges[1:] - edges[:-1], bounds[1:] - bounds[:-1]
