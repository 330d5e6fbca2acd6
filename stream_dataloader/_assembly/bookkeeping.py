"""What a batch says of its cells: which stream was read there, at which position, whether for the first time.

It is made only if it is asked for: for windows of bytes it is 26 times as large as what was read. A function that
`torch.compile` compiles would be compiled anew for each batch: from when one asked, all have theirs made before.

Guarantee: it is a pure function of the runs, in memory of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from stream_dataloader._assembly.part import RUN_NUMBERS

Array = np.ndarray[Any, Any]


class Asked:
    """Who has asked for bookkeeping: an attribute, which `torch.compile` can set."""

    by_compiled = False


asked = Asked()


class Bookkeeping:
    """The bookkeeping of one batch, to be made; the names are those of `StreamBatch`."""

    def __init__(self, runs: Sequence[Sequence[int]], lanes: range, time_steps: int) -> None:
        self._runs = runs
        self._lanes = lanes
        self._shape = time_steps, len(lanes)

    def made_before(self) -> dict[str, torch.Tensor]:
        """All fields, where a compiled function will ask for them."""
        return {**self("mask"), **self("source_index"), **self("stream_seed")}

    def __call__(self, name: str) -> dict[str, torch.Tensor]:
        if name == "stream_seed":
            made = self._seeds()
        else:
            made = self._marks() if name in ("reset", "is_first", "mask") else self._places()
        return {field: torch.from_numpy(array) for field, array in made.items()}

    def _marks(self) -> dict[str, Array]:
        runs, full = self._numbers()
        mask, is_first = np.zeros(self._shape, np.bool_), np.zeros(self._shape, np.bool_)
        if full:
            mask[:], is_first[0] = runs[5], runs[6]
        else:
            run, cells = self._cells(runs)
            mask[cells] = runs[5][run]
            is_first[runs[1], runs[0] - self._lanes.start] = runs[6]
        return {"mask": mask, "is_first": is_first, "reset": is_first[0]}

    def _places(self) -> dict[str, Array]:
        runs, full = self._numbers()
        if full:
            source = np.empty(self._shape, np.int64)
            source[:] = runs[3]
            return {"source_index": source, "position": np.arange(self._shape[0])[:, None] + runs[4]}
        source, position = np.full(self._shape, -1), np.full(self._shape, -1)
        run, cells = self._cells(runs)
        source[cells], position[cells] = runs[3][run], runs[4][run] + cells[0] - runs[1][run]
        return {"source_index": source, "position": position}

    def _seeds(self) -> dict[str, Array]:
        runs, full = self._numbers()
        seeds = np.zeros(self._shape, np.int64)
        if full:
            seeds[:] = runs[7]
        else:
            run, cells = self._cells(runs)
            seeds[cells] = runs[7][run]
        return {"stream_seed": seeds}

    def _numbers(self) -> tuple[Array, bool]:
        """The runs, `(RUN_NUMBERS, runs)`; and whether each lane has one, of its whole window."""
        if torch.compiler.is_compiling():  # here, as what calls this may not be traced, or not to its end
            asked.by_compiled = True
        numbers = tuple(itertools.chain.from_iterable(self._runs))
        time_steps, width = self._shape
        full = numbers[2::RUN_NUMBERS] == (time_steps,) * width
        return np.array(numbers, np.int64).reshape(-1, RUN_NUMBERS).T, full

    def _cells(self, runs: Array) -> tuple[Array, tuple[Array, Array]]:
        """Of each time step that was read its run, and where it is."""
        lane, t, steps = runs[:3]
        run = np.repeat(np.arange(len(steps)), steps)
        offset = np.arange(len(run)) - (np.cumsum(steps) - steps)[run]
        return run, (t[run] + offset, lane[run] - self._lanes.start)
