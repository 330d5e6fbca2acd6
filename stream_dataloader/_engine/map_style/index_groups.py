"""`IndexGroups`: groups of indices of a map-style dataset, as a sequence that makes each source on request.

::

    groups      range(0, 3)  range(7, 9)    [4, 1, 9]  [2]
    offsets     0 3 5                       0 3 4            the start of each group in the groups put together
    values      0 7                         4 1 9 2          their first indices if all are ranges, else all indices

Guarantee: even a million groups are two arrays, regardless of how they were passed; workers share these arrays.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from stream_dataloader._engine.memory.fields import Carver, bytes_of
from stream_dataloader._engine.memory.pickling import spawning
from stream_dataloader._engine.memory.shared_memory import SharedMemory
from stream_dataloader._engine.reading.sources import Sources
from stream_dataloader._engine.schedule.rules import IntArray

_HASHED_AT_ONCE = 1 << 20


class IndexGroups(Sources):
    """Groups of indices. Groups are `range`s if the indices of every group are consecutive, otherwise arrays.

    Args:
        indices: All indices, group after group; None: they count from 0.
        dataset_length: None: the largest index plus 1.
    """

    def __init__(self, lengths: npt.ArrayLike, indices: IntArray | None, dataset_length: int | None) -> None:
        offsets = self._offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        if dataset_length is None:
            dataset_length = int(offsets[-1] if indices is None else indices.max(initial=-1) + 1)
        self.dataset_length = dataset_length
        firsts = offsets[:-1] if indices is None else _first_indices(offsets, indices)
        self._are_ranges = firsts is not None
        # The first index of each group if groups are ranges, otherwise all indices.
        self._values: npt.NDArray[Any] = self._smallest(indices) if firsts is None else firsts

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __iter__(self) -> Iterator[Any]:
        return map(self._source, range(len(self)))

    def _source(self, index: int) -> range | npt.NDArray[Any]:
        begin, end = self._offsets[index : index + 2].tolist()
        if self._are_ranges:
            first = int(self._values[index])
            return range(first, first + end - begin)
        group = self._values[begin:end]
        group.flags.writeable = False
        return group

    @property
    def lengths(self) -> IntArray:
        """`(groups,)`, the number of indices of each."""
        return np.diff(self._offsets)

    @property
    def total(self) -> int:
        return int(self._offsets[-1])

    def part(self, begin: int, end: int) -> IndexGroups:
        """Return the groups `[begin, end)`."""
        first, last = self._offsets[begin], self._offsets[end]
        flat = np.arange(first, last) if self.flat is None else self.flat[first:last]
        return IndexGroups(self.lengths[begin:end], flat, self.dataset_length)

    @functools.cached_property
    def flat(self) -> npt.NDArray[Any] | None:
        """`(total,)`, the indices of all groups, group after group; None: they count from 0."""
        if not self._are_ranges:
            return self._values
        begins = self._offsets[:-1]
        if np.array_equal(self._values, begins):
            return None
        return self._smallest(np.repeat(self._values - begins, self.lengths) + np.arange(self.total))

    def _smallest(self, indices: Any) -> npt.NDArray[Any]:
        """Return indices in the dtype that takes the least memory."""
        return np.asarray(indices, np.int32 if self.dataset_length <= np.iinfo(np.int32).max else np.int64)

    @functools.cached_property
    def fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for array in (self._offsets, self._values):
            for begin in range(0, len(array), _HASHED_AT_ONCE):
                digest.update(array[begin : begin + _HASHED_AT_ONCE].astype("<i8").tobytes())
        of = f"{self.total} indices in {len(self)} groups, of a dataset of {self.dataset_length} items"
        return f"{of}, {digest.hexdigest()}"

    @functools.cached_property
    def _portable(self) -> SharedMemory:
        """The arrays in shared memory, for newly started processes."""
        memory = SharedMemory(bytes_of(self._lay_out))
        for array, value in zip(self._lay_out(Carver(memory.buffer)), (self._offsets, self._values), strict=True):
            array[:] = value
        return memory

    def _lay_out(self, carve: Carver) -> list[npt.NDArray[Any]]:
        return [carve(len(array), dtype=array.dtype) for array in (self._offsets, self._values)]

    def __getstate__(self) -> dict[str, Any]:
        kept = {"dataset_length": self.dataset_length, "_are_ranges": self._are_ranges}
        if spawning():  # on the way to a worker: share
            shapes = [(len(array), array.dtype.str) for array in (self._offsets, self._values)]
            return kept | {"_memory": self._portable, "_shapes": shapes}
        return kept | {"_offsets": self._offsets, "_values": self._values}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if "_memory" in state:
            carve = Carver(state["_memory"].buffer)
            self._offsets, self._values = (carve(count, dtype=dtype) for count, dtype in state["_shapes"])


def _first_indices(offsets: IntArray, indices: npt.NDArray[Any]) -> IntArray | None:
    """Return each group's first index if the indices of every group are consecutive; None otherwise.

    An empty group also gets a defined number, so that equal groups have the same fingerprint.
    """
    follows = np.diff(indices) == 1
    inner = offsets[1:-1]
    follows[inner[(inner > 0) & (inner < len(indices))] - 1] = True  # between two groups any step is allowed
    if not follows.all():
        return None
    firsts: IntArray = offsets[:-1].copy()
    has_some = np.diff(offsets) > 0
    firsts[has_some] = indices[firsts[has_some]]
    return firsts
