"""Named fields over one flat block of memory that several processes share.

::

    class Counters(SharedFields):                  memory   | lanes x int64 | workers x float64 |
        def _lay_out(self, carve):                            reading         seconds
            self.reading = carve(self._lanes)
            self.seconds = carve(self._workers, dtype=np.float64)

Guarantee: fields do not overlap, follow each other in the order of the calls, and are aligned for their dtype.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from stream_dataloader._engine.memory.shared_memory import SharedMemory

_ALIGNMENT = 8  # bytes; enough for every dtype that is used here


class Carver:
    """Hands out consecutive pieces of a block of memory, as arrays.

    Args:
        memory: A writable buffer, aligned to 8 bytes. None only counts bytes: each piece is then a new array.

    Attributes:
        end_bytes: Number of bytes handed out so far.
    """

    def __init__(self, memory: Any | None = None) -> None:
        self._memory = memory
        self.end_bytes = 0

    def __call__(self, *shape: int, dtype: Any = np.int64) -> npt.NDArray[Any]:
        """Hand out the next piece, an array of `shape`."""
        start = self.end_bytes
        size_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        self.end_bytes = start + -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
        if self._memory is None:
            return np.zeros(shape, dtype)
        piece: npt.NDArray[Any] = np.ndarray(shape, dtype, self._memory, start)
        return piece


def bytes_of(lay_out: Callable[[Carver], object]) -> int:
    """Return the number of bytes that the fields of `lay_out` take."""
    carver = Carver()
    lay_out(carver)
    return carver.end_bytes


class SharedFields:
    """Fields that are shared with all processes that are started with this object."""

    _memory: SharedMemory

    def __init__(self, *, shared: bool = True) -> None:
        carver = Carver()
        self._lay_out(carver)
        if shared:
            self._memory = SharedMemory(carver.end_bytes)
            self._lay_out(Carver(self._memory.buffer))

    @abstractmethod
    def _lay_out(self, carve: Carver) -> None:
        """Set an attribute for each field; other attributes that this needs are set before."""

    def __getstate__(self) -> dict[str, Any]:
        views = np.ndarray, memoryview  # some fields are an array's `data`, where access to a number takes a third
        return {name: value for name, value in self.__dict__.items() if not isinstance(value, views)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lay_out(Carver(self._memory.buffer))
