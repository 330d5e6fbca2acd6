"""How the windows that workers read become the batch's tensors: torch's own worker queue.

A worker's `PartWriter` gathers its lanes' windows into *blocks*, arrays `(T, rows, ...)`, normally one for
all of its lanes; the main process puts the blocks of all workers side by side (`regroup`). Scheduling knows
nothing of this but the `lane.Sink` it writes to.

Guarantee: a batch holds the same values however its lanes were dealt to workers. Which lane's layout counts
is decided in lane order by the main process, never by who came first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from stream_dataloader.structure import INLINE_BYTES, Layout, Leaves, Misfit, Spec, as_array, storage_dtype


class Block:
    """Windows of some lanes that share a layout.

    Attributes:
        columns: One entry a leaf: an array `(T, width, ...)` of `storage_dtype`, or a list `[t][row]`.
        counts: How many steps each row holds; 0 for rows that are in no or another block.
        time_steps: T.
    """

    def __init__(self, layout: Layout, columns: list[Any], counts: list[int]) -> None:
        self.layout, self.columns, self.counts = layout, columns, counts
        self.time_steps = len(columns[0])

    @classmethod
    def empty(cls, layout: Layout, time_steps: int, width: int) -> Block:
        """Room for windows of `time_steps` in `width` rows; arrays are not initialised."""
        return cls(layout, [new_column(spec, time_steps, width) for spec in layout.specs], [0] * width)

    def grown(self, time_steps: int) -> Block:
        """A copy with room for longer windows."""
        block = Block.empty(self.layout, time_steps, len(self.counts))
        for new, old in zip(block.columns, self.columns, strict=True):
            new[: len(old)] = old
        block.counts = self.counts
        return block

    def put_step(self, row: int, t: int, leaves: Leaves) -> None:
        """Write one time step."""
        for i, column in enumerate(self.columns):
            if type(column) is list:
                column[t][row] = leaves[i]
            else:
                column[t, row] = leaves[i]
        self.counts[row] = t + 1

    def put_window(self, row: int, count: int, leaves: Leaves) -> None:
        """Write a whole window; leaves without a time axis are repeated."""
        for i, column in enumerate(self.columns):
            leaf = leaves[i]
            if type(column) is list:
                timed = self.layout.specs[i].timed
                for t in range(count):
                    column[t][row] = leaf[t] if timed else leaf
            else:
                column[:count, row] = leaf
        self.counts[row] = count

    def pad(self, fill_value: Any) -> None:
        """Fill the cells of the arrays that nothing was written to; those of lists are None."""
        if min(self.counts) == self.time_steps:
            return
        for spec, path, column in zip(self.layout.specs, self.layout.paths, self.columns, strict=True):
            if spec.dtype is not None:
                fill = fill_for(fill_value, spec, path)
                for row, count in enumerate(self.counts):
                    column[count:, row] = fill

    def __reduce__(self) -> tuple[Any, ...]:
        packed = [
            torch.from_numpy(column) if isinstance(column, np.ndarray) and column.nbytes > INLINE_BYTES else column
            for column in self.columns
        ]
        return _unpack_block, (self.layout, packed, self.counts)


def _unpack_block(layout: Layout, packed: list[Any], counts: list[int]) -> Block:
    return Block(layout, [c.numpy() if isinstance(c, torch.Tensor) else c for c in packed], counts)


def new_column(spec: Spec, time_steps: int, width: int) -> Any:
    """Room for one leaf of `width` lanes: an array, or a list of lists of None for objects."""
    if spec.dtype is None:
        return [[None] * width for _ in range(time_steps)]
    return np.empty((time_steps, width, *spec.shape), storage_dtype(spec.dtype))


def fill_for(fill_value: Any, spec: Spec, path: str) -> np.ndarray[Any, Any]:
    """`fill_value` as an array of the leaf's `storage_dtype` that broadcasts to its shape.

    Raises:
        ValueError: It does not broadcast, or the leaf's dtype cannot hold it.
    """
    assert spec.dtype is not None
    given = torch.as_tensor(0 if fill_value is None else fill_value)
    value = given.to(spec.dtype)
    exact = spec.dtype.is_floating_point or spec.dtype.is_complex or torch.equal(value.to(given.dtype), given)
    if not exact or (given.is_complex() and not spec.dtype.is_complex):
        raise ValueError(f"fill_value={fill_value!r} does not fit {path}, which is {spec}; use one that does, 0 say")
    try:
        torch.broadcast_to(value, spec.shape)
    except RuntimeError:
        raise ValueError(
            f"fill_value of shape {tuple(given.shape)} does not broadcast to {path}, which is {spec}; use a number"
        ) from None
    array: np.ndarray[Any, Any] = as_array(value)
    return array


class PartWriter:
    """Gathers what one worker's lanes read for one step; a `lane.Sink`.

    Args:
        width: Number of the worker's lanes.
        time_steps: Steps of a window; None if the streams cut windows.
        fill_value: Pads what no item was written to.
    """

    def __init__(self, width: int, time_steps: int | None, fill_value: Any) -> None:
        self._width, self._time_steps, self._fill_value = width, time_steps, fill_value
        self._layouts: dict[Layout, Layout] = {}
        self._start()

    def _start(self) -> None:
        self._blocks: dict[int, Block] = {}  # by the id of an interned layout
        self._latest: Block | None = None
        self._block_of_row: list[Block | None] = [None] * self._width
        self._objects: dict[int, Any] = {}

    def intern(self, layout: Layout) -> Layout:
        """See `lane.Sink`."""
        return self._layouts.setdefault(layout, layout)

    def put_step(self, row: int, t: int, layout: Layout, leaves: Leaves) -> None:
        """See `lane.Sink`."""
        block = self._block_of_row[row]
        if block is None or block.layout is not layout:
            if block is not None and block.counts[row]:
                raise Misfit(f"the window goes on with another stream, and {block.layout.difference(layout)}")
            assert self._time_steps is not None
            block = self._block(row, layout, self._time_steps)
        try:
            block.put_step(row, t, leaves)
        except OverflowError as error:
            raise Misfit(f"a number does not fit its dtype: {error}") from None

    def put_window(self, row: int, layout: Layout, leaves: Leaves, count: int, padded: int) -> None:
        """See `lane.Sink`."""
        block = self._latest
        if block is None or block.layout is not layout or block.time_steps < padded:
            block = self._latest = self._block(row, layout, padded)
        try:
            block.put_window(row, count, leaves)
        except OverflowError as error:
            raise Misfit(f"a number does not fit its dtype: {error}") from None

    def put_object(self, row: int, item: object) -> None:
        """See `lane.Sink`."""
        self._objects[row] = item

    def _block(self, row: int, layout: Layout, time_steps: int) -> Block:
        block = self._blocks.get(id(layout))
        if block is None:
            block = Block.empty(layout, time_steps, self._width)
        elif block.time_steps < time_steps:
            block = block.grown(time_steps)
        self._blocks[id(layout)] = self._block_of_row[row] = block
        return block

    def finish(self) -> tuple[list[Block], dict[int, Any]]:
        """The step's blocks, padded, and the windows to be passed on as they are, by row.

        Raises:
            ValueError: `fill_value` cannot pad a leaf.
        """
        blocks = [block for block in self._blocks.values() if any(block.counts)]  # none of a broken first item
        objects = self._objects
        for block in blocks:
            block.pad(self._fill_value)
        self._start()
        return blocks, objects
