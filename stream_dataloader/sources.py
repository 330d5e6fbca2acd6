"""`PackedSources`: the list of sources as two arrays that all workers share.

A Python list handed to workers grows into a copy each, because touching an element writes its reference
count (https://github.com/pytorch/pytorch/issues/13246). Here blocks of sources are pickled back to back
into one buffer; a worker unpickles the block it reads from and writes nothing.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from typing import Any, overload

import cloudpickle
import numpy as np

from stream_dataloader.errors import shorten
from stream_dataloader.pickling import spawning
from stream_dataloader.shared_memory import SharedMemory

_BLOCK = 64  # sources: reading one costs a few microseconds, packing little more than one pickling of the list


class PackedSources(Sequence[Any]):
    """An immutable sequence of picklable sources, packed.

    Args:
        sources: The sources; each read gives an equal copy, not the same object.

    Raises:
        TypeError: A source cannot be pickled; names it.
    """

    def __init__(self, sources: Iterable[Any]) -> None:
        listed = list(sources)
        blocks = [_pickle(listed[i : i + _BLOCK], i) for i in range(0, len(listed), _BLOCK)]
        self._length = len(listed)
        self._set(b"".join(blocks), [len(block) for block in blocks])

    def _set(self, blob: bytes, sizes: Sequence[int]) -> None:
        ends = np.cumsum([0, *sizes], dtype=np.int64)
        self._memory = SharedMemory(ends.nbytes + len(blob))
        self._memory.array(np.int64)[: len(ends)] = ends
        self._memory.array(np.uint8)[ends.nbytes :] = np.frombuffer(blob, np.uint8)
        self._view()

    def _view(self) -> None:
        blocks = -(-self._length // _BLOCK)
        self._ends = self._memory.array(np.int64)[: blocks + 1]
        self._blob = memoryview(self._memory.array(np.uint8).data)[self._ends.nbytes :]

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._length))]
        if not -self._length <= index < self._length:
            raise IndexError(f"source index {index} is out of range for {self._length} sources")
        block, offset = divmod(index % self._length, _BLOCK)
        return pickle.loads(self._blob[self._ends[block] : self._ends[block + 1]])[offset]

    def __getstate__(self) -> tuple[Any, ...]:
        if spawning():  # on the way to a worker: share
            return self._length, self._memory
        return self._length, bytes(self._blob), np.diff(self._ends).tolist()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._length = state[0]
        if len(state) == 2:
            self._memory = state[1]
            self._view()
        else:
            self._set(*state[1:])


def _pickle(block: list[Any], start: int) -> bytes:
    try:
        return pickle.dumps(block, protocol=5)
    except Exception:  # whatever pickle could not do, cloudpickle may; if not, it says why below
        try:
            return bytes(cloudpickle.dumps(block, protocol=5))
        except Exception:
            if len(block) > 1:  # find out which one
                half = len(block) // 2
                _pickle(block[:half], start)
                _pickle(block[half:], start + half)
            raise TypeError(
                f"source {start} ({shorten(block[0])}) cannot be pickled, which sending it to workers needs; "
                "make the source what the stream is opened from (a path, say) and open it in open_stream"
            ) from None
