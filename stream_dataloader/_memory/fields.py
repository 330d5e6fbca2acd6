"""Named fields over one flat block of memory that several processes share.

::

    class Counters:                                memory   | lanes x int64 | workers x float64 |
        def __init__(self, carve, lanes, workers):           reading         seconds
            self.reading = carve(lanes)
            self.seconds = carve(workers, dtype=np.float64)

The same constructor lays the fields out and counts their bytes (`bytes_of`), so size and places cannot disagree.

Guarantee: fields do not overlap, lie in the order in which they are asked for, and are aligned for their dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

_ALIGNMENT = 8  # bytes; no dtype that is used here wants more


class Carver:
    """Hands out consecutive pieces of a block of memory, as arrays.

    Args:
        memory: A writable buffer, aligned to 8 bytes. None only counts bytes: each piece is then a new array.

    Attributes:
        end_bytes: How much was handed out so far.
    """

    def __init__(self, memory: Any | None = None) -> None:
        self._memory = memory
        self.end_bytes = 0

    def __call__(self, *shape: int, dtype: Any = np.int64) -> npt.NDArray[Any]:
        """The next piece, an array `shape`."""
        start = self.end_bytes
        size_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        self.end_bytes = start + -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
        if self._memory is None:
            return np.zeros(shape, dtype)
        piece: npt.NDArray[Any] = np.ndarray(shape, dtype, self._memory, start)
        return piece


def bytes_of(lay_out: Callable[[Carver], object]) -> int:
    """How many bytes the fields take that `lay_out` asks a carver for."""
    carver = Carver()
    lay_out(carver)
    return carver.end_bytes
