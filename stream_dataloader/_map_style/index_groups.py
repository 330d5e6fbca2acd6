"""`IndexGroups`: groups of indices of a map-style dataset, as a sequence of sources that makes each one when asked.

::

    groups      range(0, 3)  range(7, 9)            [4, 1, 9]  [2]
    offsets     0 3 5                               0 3 4             where each group begins in the groups put together
    firsts      0 7            (and no indices)     -                 where all groups are consecutive indices
    indices     -                                   4 1 9 2           where they are not

Guarantee: a million groups are two or three arrays, whichever way they were given. A forked worker shares them, as
nothing is written to them, and one that is started anew is passed their memory.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from stream_dataloader._memory.fields import Carver, bytes_of
from stream_dataloader._memory.pickling import spawning
from stream_dataloader._memory.shared_memory import SharedMemory
from stream_dataloader._reading.sources import Sources
from stream_dataloader._schedule.rules import IntArray

_HASHED_AT_ONCE = 1 << 20


class IndexGroups(Sources):
    """Groups of indices. One is a `range` if its indices are consecutive in all groups, else an array.

    Args:
        offsets: `(groups + 1,)`, where each group begins in all of them put one after the other, and their end.
        firsts: `(groups,)`, each group's first index, where all groups are consecutive indices; else None.
        indices: All indices, one group's after the other's; None if there are `firsts`.
        dataset_length: Number of items of the dataset.
    """

    def __init__(
        self, offsets: IntArray, firsts: IntArray | None, indices: npt.NDArray[Any] | None, dataset_length: int
    ) -> None:
        assert (firsts is None) != (indices is None)
        if indices is not None and (found := _first_indices(offsets, indices)) is not None:
            firsts, indices = found, None
        if firsts is not None:  # what an empty group has is all the same; so an equal list has an equal fingerprint
            firsts = np.where(np.diff(offsets) > 0, firsts, offsets[:-1])
        self._offsets, self._firsts, self._indices = offsets, firsts, indices
        self.dataset_length = dataset_length

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __iter__(self) -> Iterator[Any]:
        return map(self._source, range(len(self)))

    def _source(self, index: int) -> range | npt.NDArray[Any]:
        begin, end = self._offsets[index : index + 2].tolist()
        if self._firsts is not None:
            first = int(self._firsts[index])
            return range(first, first + end - begin)
        assert self._indices is not None
        group = self._indices[begin:end]
        group.flags.writeable = False
        return group

    @property
    def lengths(self) -> IntArray:
        """`(groups,)`, the number of indices of each."""
        return np.diff(self._offsets)

    @property
    def total(self) -> int:
        """The number of indices of all groups."""
        return int(self._offsets[-1])

    @functools.cached_property
    def flat(self) -> npt.NDArray[Any] | None:
        """`(total,)`, the indices of all groups, one group's after the other's; None: they count from 0."""
        if self._firsts is None:
            return self._indices
        begins = self._offsets[:-1]
        if np.array_equal(self._firsts, begins):
            return None
        flat = np.repeat(self._firsts - begins, self.lengths) + np.arange(self.total)
        return flat.astype(smallest_dtype(self.dataset_length))

    @functools.cached_property
    def fingerprint(self) -> str:
        """Tells these groups, and the length of the dataset, from others; says the numbers, for errors."""
        digest = hashlib.blake2b(digest_size=8)
        for array in (self._offsets, self._firsts if self._indices is None else self._indices):
            assert array is not None
            for begin in range(0, len(array), _HASHED_AT_ONCE):
                digest.update(array[begin : begin + _HASHED_AT_ONCE].astype("<i8").tobytes())
        return (
            f"{self.total} indices in {len(self)} groups, of a dataset of {self.dataset_length} items, "
            f"{digest.hexdigest()}"
        )

    @functools.cached_property
    def _portable(self) -> SharedMemory:
        """The arrays, for processes that are started anew."""
        values = self._offsets, self._firsts if self._indices is None else self._indices
        memory = SharedMemory(bytes_of(self._lay_out))
        for array, value in zip(self._lay_out(Carver(memory.buffer)), values, strict=True):
            array[:] = value
        return memory

    def _lay_out(self, carve: Carver) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        return _arrays(carve, *self._shape)

    @property
    def _shape(self) -> tuple[int, int, str]:
        """Numbers of groups, and of indices if they are kept, and those indices' dtype."""
        if self._indices is None:
            return len(self), -1, ""
        return len(self), len(self._indices), self._indices.dtype.str

    def __getstate__(self) -> tuple[Any, ...]:
        if spawning():  # on the way to a worker: share
            return self.dataset_length, self._shape, self._portable
        return self.dataset_length, self._offsets, self._firsts, self._indices

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dataset_length = state[0]
        if len(state) == 4:
            self._offsets, self._firsts, self._indices = state[1:]
            return
        _, shape, self._memory = state
        self._offsets, second = _arrays(Carver(self._memory.buffer), *shape)
        self._firsts, self._indices = (second, None) if shape[1] < 0 else (None, second)


def _arrays(carve: Carver, groups: int, indices: int, dtype: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    return carve(groups + 1), carve(groups) if indices < 0 else carve(indices, dtype=dtype)


def smallest_dtype(length: int) -> Any:
    """The dtype that takes least memory of those that hold the indices of a dataset of this length."""
    return np.int32 if length <= np.iinfo(np.int32).max else np.int64


def _first_indices(offsets: IntArray, indices: npt.NDArray[Any]) -> IntArray | None:
    """Each group's first index, if the indices of each group are consecutive; 0 for an empty group."""
    follows = np.diff(indices) == 1
    inner = offsets[1:-1]
    follows[inner[(inner > 0) & (inner < len(indices))] - 1] = True  # from one group to the next
    if not follows.all():
        return None
    firsts = np.zeros(len(offsets) - 1, np.int64)
    has_some = np.diff(offsets) > 0
    firsts[has_some] = indices[offsets[:-1][has_some]]
    return firsts
