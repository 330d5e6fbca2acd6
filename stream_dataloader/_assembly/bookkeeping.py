"""What a batch says of its cells: which stream was read there, at which position, whether for the first time.

It is made of the runs of all lanes, in the main process. It is not put off until somebody asks for it: that would save
10 microseconds a batch, and a batch could no longer be given to a function that `torch.compile` takes as one graph.

Guarantee: it is made in one way, whoever read, in memory of its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from stream_dataloader._assembly.part import RUN_NUMBERS

Array = np.ndarray[Any, Any]


class Bookkeeping(NamedTuple):
    """Arrays `(T, lanes)`, as in `StreamBatch`."""

    source: Array
    position: Array
    mask: Array
    is_start: Array


class Bookkeeper:
    """Makes the bookkeeping of some lanes.

    Args:
        lanes: The lanes.
    """

    def __init__(self, lanes: range) -> None:
        self._first = lanes.start
        self._width = len(lanes)
        self._t: npt.NDArray[np.int64] = np.arange(0)[:, None]
        self._all_full: tuple[int, ...] = ()  # the steps of runs that fill their windows
        self._last = Bookkeeping(*np.zeros((4, 0)))  # of runs that filled their windows; its source and mask are used
        self._of_last: tuple[tuple[int, ...], ...] = ()  # what those were made of

    def write(self, numbers: tuple[int, ...], time_steps: int) -> Bookkeeping:
        """What was read where. All else is padding.

        Args:
            numbers: Those of the lanes' runs, in lane order.
            time_steps: T.
        """
        if len(self._t) != time_steps:
            self._t = np.arange(time_steps)[:, None]
            self._all_full = (time_steps,) * self._width
            self._of_last = ()
        if numbers[2::RUN_NUMBERS] != self._all_full:  # nearly always, each lane has one run, of the whole window
            return self._of_any(numbers, time_steps)
        source, fresh, starts = numbers[3::RUN_NUMBERS], numbers[5::RUN_NUMBERS], numbers[6::RUN_NUMBERS]
        if self._of_last != (source, fresh):  # nearly always, they go on with the streams that they read before
            self._last, self._of_last = self._of_any(numbers, time_steps), (source, fresh)
        is_start = np.zeros(self._last.mask.shape, np.bool_)
        if any(starts):
            is_start[0] = starts
        position = self._t + np.array(numbers[4::RUN_NUMBERS])
        return Bookkeeping(self._last.source.copy(), position, self._last.mask.copy(), is_start)

    def _of_any(self, numbers: tuple[int, ...], time_steps: int) -> Bookkeeping:
        """The same of any runs, or none."""
        lane, t, steps, source, position, fresh, starts = np.array(numbers, np.int64).reshape(-1, RUN_NUMBERS).T
        row, nothing = lane - self._first, np.full((time_steps, self._width), -1)
        books = Bookkeeping(nothing, nothing.copy(), nothing >= 0, nothing >= 0)
        run = np.repeat(np.arange(len(t)), steps)  # of each step that was read
        offset = np.arange(len(run)) - (np.cumsum(steps) - steps)[run]
        cells = t[run] + offset, row[run]
        books.source[cells] = source[run]
        books.position[cells] = position[run] + offset
        books.mask[cells] = fresh[run]
        books.is_start[t, row] = starts
        return books
