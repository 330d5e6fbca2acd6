"""Windows of several lanes side by side: workers fill blocks, and a block outside shared memory travels by queue."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stream_dataloader._engine.items.fill import Fills
from stream_dataloader._engine.items.layout import INLINE_BYTES, Layout, Leaves, Spec, storage_dtype
from stream_dataloader._engine.items.objects import lasting


@dataclass(eq=False)
class Block:
    """Windows of some lanes that share a layout.

    Attributes:
        layout: The layout.
        columns: One entry per leaf: an array `(capacity, width, ...)`, or a list `[t][row]`.
        counts: Number of steps of each row; 0 for rows in another block, or in none.
        capacity: The most time steps that there is room for.
        time_steps: T; only the first T steps of the columns are used.
        begins: First time step of each row that is not padding; None: 0 in each.
    """

    layout: Layout
    columns: list[Any]
    counts: list[int]
    capacity: int
    time_steps: int
    begins: list[int] | None = None

    def copy_to(self, block: Block) -> Block:
        """Write all rows into another block with at least as much room, and return that block."""
        for new, old in zip(block.columns, self.columns, strict=True):
            new[: self.time_steps] = old[: self.time_steps]
        block.counts, block.begins = self.counts, self.begins
        return block

    def put_step(self, row: int, t: int, leaves: Leaves) -> None:
        """Write one time step."""
        for i, column in enumerate(self.columns):
            if type(column) is list:
                column[t][row] = lasting(leaves[i])
            else:
                column[t, row] = leaves[i]
        self.counts[row] = t + 1

    def begin_at(self, row: int, t: int) -> None:
        """Let a row begin with padding, before time step `t`."""
        if self.begins is None:
            self.begins = [0] * len(self.counts)
        self.begins[row] = t

    def put_window(self, row: int, count: int, leaves: Leaves) -> None:
        """Write a whole window; leaves without a time axis are repeated."""
        for i, leaf in enumerate(leaves):
            column = self.columns[i]
            if type(column) is list:
                leaf = lasting(leaf)  # noqa: PLW2901
                for t in range(count):
                    column[t][row] = leaf[t] if self.layout.specs[i].timed else leaf
            else:
                column[:count, row] = leaf
        self.counts[row] = count

    def pad(self, fills: Fills) -> None:
        """Fill the unwritten cells of arrays; unwritten cells of lists stay None."""
        begins = self.begins
        if min(self.counts) == self.capacity and begins is None:  # a shortcut, as most blocks are full
            return
        for fill, column in zip(fills, self.columns, strict=True):
            if fill is not None:
                for row, count in enumerate(self.counts):
                    column[count:, row] = fill
                    if begins is not None:
                        column[: begins[row], row] = fill

    def left(self) -> list[Block]:
        """Return the rest to send of windows whose arrays are all in the slot: leaves that are objects, if any."""
        if not self.layout.has_objects:
            return []
        columns = [column[: self.time_steps] if type(column) is list else [] for column in self.columns]
        return [Block(self.layout, columns, self.counts, self.capacity, self.time_steps)]

    def __reduce__(self) -> tuple[Any, ...]:
        # Arrays are sent in their order in memory, so that a window in one piece arrives in one piece, without a copy.
        columns = [c[: self.time_steps] for c in self.columns]
        by_lane = any(type(c) is not list and not c.flags.c_contiguous for c in columns)
        packed = [c if type(c) is list else _packed(c.swapaxes(0, 1) if by_lane else c) for c in columns]
        return _unpack_block, (self.layout, packed, self.counts, self.time_steps, by_lane)


def _packed(column: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | torch.Tensor:
    """Return an array for another process: a tensor, which travels by torch's shared memory, or the array itself."""
    column = np.ascontiguousarray(column)
    # Writing more to torch's shared memory than is left kills the process with SIGBUS. Several workers write at once,
    # so each leaves ample room.
    if column.nbytes <= INLINE_BYTES or column.nbytes > _free_shared_bytes() / 8:
        return column
    return torch.from_numpy(column)


def _free_shared_bytes() -> float:
    try:
        system = os.statvfs("/dev/shm")  # noqa: S108
    except OSError:  # without /dev/shm there is no separate limit
        return float("inf")
    return system.f_bavail * system.f_frsize


def _unpack_block(layout: Layout, packed: list[Any], counts: list[int], time_steps: int, by_lane: bool) -> Block:
    arrays = [c.numpy() if isinstance(c, torch.Tensor) else c for c in packed]
    columns = [c.swapaxes(0, 1) if by_lane and type(c) is not list else c for c in arrays]
    return Block(layout, columns, counts, time_steps, time_steps)


def new_column(spec: Spec, time_steps: int, width: int, *, whole_windows: bool = False) -> Any:
    """Create room for one leaf of `width` lanes: an array, or a list of lists of None for objects.

    With `whole_windows` each lane's window is contiguous, instead of each time step.
    """
    if spec.dtype is None:
        return [[None] * width for _ in range(time_steps)]
    if whole_windows:
        return np.empty((width, time_steps, *spec.shape), storage_dtype(spec.dtype)).swapaxes(0, 1)
    return np.empty((time_steps, width, *spec.shape), storage_dtype(spec.dtype))
