"""Arrays whose rows are time steps: `.npy` files, read through a memory map, and arrays in memory.

Guarantee: rows are written straight into the batch, without a copy in between; of a file only what is read
is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

__all__ = ["ArrayStream"]


class ArrayStream:
    """Opens arrays: each row of the first axis is an item.

    A source is the path of a `.npy` file, a NumPy array, a tensor, or `(source, start, stop)`: some of its
    rows. To be passed to `StreamDataset` as `open_stream`.

    Example:
        >>> import numpy as np
        >>> from stream_dataloader import StreamDataLoader, StreamDataset
        >>> from stream_dataloader.streams import ArrayStream
        >>> table = np.arange(10)
        >>> dataset = StreamDataset([table, (table, 4, 7)], ArrayStream(), batch_size=2, time_steps=5)
        >>> [batch.data.T.tolist() for batch in StreamDataLoader(dataset)]
        [[[0, 1, 2, 3, 4], [4, 5, 6, 0, 0]], [[5, 6, 7, 8, 9], [0, 0, 0, 0, 0]]]
    """

    def __call__(self, source: Any, *, start: int = 0) -> _Rows:
        """Open one source.

        Args:
            source: See the class.
            start: The first row wanted, counted from the source's own first.

        Raises:
            ValueError: The array has no rows, or fewer than asked for.
            OSError: The file cannot be read.
        """
        first, stop = 0, None
        if isinstance(source, tuple):
            source, first, stop = source
        if isinstance(source, (str, os.PathLike)):
            array = np.load(source, mmap_mode="r", allow_pickle=False)
        else:
            array = source if isinstance(source, torch.Tensor) else np.asarray(source)
        if array.ndim == 0:
            raise ValueError("the array is a single number, without an axis for time steps; give it one")
        if stop is None:
            stop = len(array)
        if not 0 <= first <= stop <= len(array):
            raise ValueError(f"rows {first} to {stop} were asked for, and the array has {len(array)}")
        return _Rows(array, min(first + start, stop), stop)


class _Rows:
    """Rows `[position, stop)`, one after the other; a `protocols.ReadsInto`."""

    def __init__(self, array: Any, position: int, stop: int) -> None:
        self._array, self._position, self._stop = array, position, stop

    def __iter__(self) -> Iterator[Any]:
        while self._position < self._stop:
            self._position += 1
            yield self._array[self._position - 1]

    def read_into(self, out: Any) -> int:
        """Write the next rows to `out`; see `protocols.ReadsInto`."""
        count = min(len(out), self._stop - self._position)
        rows = self._array[self._position : self._position + count]
        if isinstance(out, torch.Tensor):
            out[:count].copy_(rows)
        else:
            out[:count] = rows
        self._position += count
        return count
