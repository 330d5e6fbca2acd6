"""The list of sources: packed into memory that all workers share, or a user's sequence that makes them on request.

A Python list handed to workers grows into a copy in each, because touching an element writes its reference
count (https://github.com/pytorch/pytorch/issues/13246). `PackedSources` are blocks of sources, pickled back to back
into one buffer; a worker unpickles the block it reads from and writes nothing. A large array is kept beside them, once
for all sources that hold it (`array_buffers`). An immutable sequence of the user, which computes its sources, is kept
unchanged (`MadeSources`).
"""

from __future__ import annotations

import copyreg
import functools
import io
import pickle
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from typing import Any, overload

import numpy as np
import torch

from stream_dataloader._engine.memory.fields import Carver, SharedFields
from stream_dataloader._engine.memory.mapped_arrays import reduce_map
from stream_dataloader._engine.memory.pickling import ByValue, dumps, dumps_by_value, mentions_hidden, spawning
from stream_dataloader._engine.reading.array_buffers import (
    ArrayBuffers,
    Block,
    BufferTaker,
    PickleBlock,
    RepeatedArrayError,
)
from stream_dataloader._engine.reading.opening import declares_early
from stream_dataloader.errors import shorten

_BLOCK = 64  # sources at most: packing costs little more than one pickling of the list
# To read one source, its whole block is unpickled: a few microseconds for strings, some ten for numbers and arrays.
_BLOCK_BYTES, _BLOCK_BYTES_OF_STRINGS = 1 << 10, 1 << 13


def sources_of(given: Iterable[Any]) -> Sources:
    """Create the list of sources from the user's `sources`.

    Raises:
        TypeError: A source, or the sequence that makes them, cannot be pickled; names it.
    """
    if isinstance(given, Sources):
        return given
    if isinstance(given, Sequence) and not isinstance(given, (tuple, MutableSequence)):  # a list is a MutableSequence
        return MadeSources(given)
    return PackedSources(given)


def is_safe_anywhere(sources: Sequence[Any]) -> bool:
    """Return whether any thread may read a source: it is packed, or its sequence is a range or declares it safe.

    For a single list only; each of several lists is asked on its own.
    """
    if not isinstance(sources, MadeSources):
        return True
    return isinstance(sources.sequence, range) or declares_early(sources.sequence)


class Sources(Sequence[Any]):
    """An immutable sequence of sources; each read gives an equal one, not the same object."""

    @abstractmethod
    def _source(self, index: int) -> Any:
        """Return a source by its index, 0 or more."""

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        count = len(self)
        if not -count <= index < count:
            raise IndexError(f"source index {index} is out of range for {count} sources")
        return self._source(index % count)


class MadeSources(Sources):
    """A user's sequence that makes each source on request; it is not read beforehand.

    Attributes:
        sequence: The user's sequence.

    Raises:
        TypeError: It cannot be pickled.
    """

    def __init__(self, sequence: Sequence[Any]) -> None:
        self.sequence = sequence
        try:
            dumps(sequence)
        except Exception as error:
            raise TypeError(
                f"sources is a {type(sequence).__name__} that cannot be pickled ({error}), so it cannot be sent to "
                "workers; keep only plain data in it, and open files where they are used"
            ) from None

    def __len__(self) -> int:
        return len(self.sequence)

    def _source(self, index: int) -> Any:
        return self.sequence[index]

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_sources, (ByValue(self.sequence, "sources"),)


def _made_sources(sequence: ByValue) -> MadeSources:
    sources = object.__new__(MadeSources)
    sources.sequence = sequence.value
    return sources


class PackedSources(Sources, SharedFields):
    """Picklable sources, packed; an array that several sources hold is one read-only array in all of them.

    Args:
        pickle_block: Pickles a block; None: pickle, or pickling by value where pickle fails.

    Raises:
        TypeError: A source cannot be pickled; names it.
    """

    def __init__(self, sources: Iterable[Any], pickle_block: PickleBlock | None = None) -> None:
        listed = sources if isinstance(sources, list) else list(sources)
        arrays = ArrayBuffers()
        ways = (_by_reference, _by_value) if pickle_block is None else (pickle_block,)
        blocks = list(_blocks(listed, ways, arrays))
        self._set(len(listed), blocks, arrays.contents, arrays.shared_in(block.arrays for _, block in blocks))

    def _set(
        self, length: int, blocks: Sequence[tuple[int, Block]], contents: Sequence[Any], shared: Sequence[bool]
    ) -> None:
        ends = np.cumsum([len(block.pickled) for _, block in blocks], dtype=np.int64)
        sizes = [memoryview(content).nbytes for content in contents]
        self._length, self._sizes = length, (len(blocks), int(ends[-1]) if blocks else 0)
        self._array_sizes = sum(len(block.arrays) for _, block in blocks), tuple(sizes), tuple(shared)
        SharedFields.__init__(self)
        np.asarray(self._firsts)[:], np.asarray(self._ends)[:] = [first for first, _ in blocks], ends
        self._used_ends[:] = np.cumsum([len(block.arrays) for _, block in blocks], dtype=np.int64)
        self._used[:] = [number for _, block in blocks for number in block.arrays]
        for (_, block), end in zip(blocks, ends.tolist(), strict=True):
            self._blob[end - len(block.pickled) : end] = block.pickled
        for piece, content in zip(self._arrays, contents, strict=True):
            piece[:] = np.frombuffer(content, np.uint8)

    def _lay_out(self, carve: Carver) -> None:
        (blocks, blob_bytes), (used, sizes, _) = self._sizes, self._array_sizes
        self._firsts = carve(blocks).data  # the index of each block's first source
        self._ends = carve(blocks).data  # where each block ends
        self._used_ends = carve(blocks)  # where the numbers of its arrays end
        self._used = carve(used)
        self._blob = memoryview(carve(blob_bytes, dtype=np.uint8).data)  # the blocks, one behind the other
        self._arrays = [carve(size, dtype=np.uint8) for size in sizes]

    def __len__(self) -> int:
        return self._length

    def _source(self, index: int) -> Any:
        firsts = self._firsts
        number = bisect_right(firsts, index) - 1
        return self._load(number)[index - firsts[number]]

    def _block(self, number: int) -> Block:
        begin, first = (self._ends[number - 1], self._used_ends[number - 1]) if number else (0, 0)
        return Block(self._blob[begin : self._ends[number]], self._used[first : self._used_ends[number]].tolist())

    def _load(self, number: int) -> Any:
        if not self._arrays:  # the usual case is kept fast, as a source is loaded for each stream
            return pickle.loads(self._blob[self._ends[number - 1] if number else 0 : self._ends[number]])
        block, shared = self._block(number), self._array_sizes[2]
        # Other sources read a shared array too, so it is read-only. Any other array is the caller's own copy.
        buffers = [
            self._arrays[number].data.toreadonly() if shared[number] else bytearray(self._arrays[number])
            for number in block.arrays
        ]
        return pickle.loads(block.pickled, buffers=buffers)

    def __iter__(self) -> Iterator[Any]:
        for number in range(len(self._firsts)):
            yield from self._load(number)

    def __getstate__(self) -> dict[str, Any]:
        if spawning():  # on the way to a worker: share
            portable = self._portable or self
            return {name: getattr(portable, name) for name in ("_length", "_sizes", "_array_sizes", "_memory")}
        found = map(self._block, range(len(self._firsts)))
        blocks = [Block(bytes(block.pickled), block.arrays) for block in found]
        contents, (_, _, shared) = [bytes(array) for array in self._arrays], self._array_sizes
        return {"given": (self._length, list(zip(self._firsts, blocks, strict=True)), contents, shared)}

    @functools.cached_property
    def _portable(self) -> PackedSources | None:
        """The same sources for processes that import the main module anew; None if these will do."""
        return PackedSources(self, _by_value) if mentions_hidden(self._blob) else None

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "given" in state:
            self._set(*state["given"])
        else:
            super().__setstate__(state)


def _blocks(sources: list[Any], ways: Sequence[PickleBlock], arrays: ArrayBuffers) -> Iterator[tuple[int, Block]]:
    first, length = 0, _BLOCK
    while first < len(sources):
        taken = sources[first : first + length]
        block = _pickle(taken, first, ways, arrays)
        limit = _BLOCK_BYTES_OF_STRINGS if type(taken[0]) is str else _BLOCK_BYTES
        length = 1 if block.arrays else min(max(limit * len(taken) // len(block.pickled), 1), _BLOCK)
        if 2 * length <= len(taken):  # much too large: again, with as many as fit
            continue
        yield first, block
        first += len(taken)


def _by_reference(block: list[Any], taker: BufferTaker) -> bytes:
    file = io.BytesIO()
    pickler: Any = pickle.Pickler(file, protocol=5, buffer_callback=taker.take)
    copied = {np.ndarray: taker.reduce_array, torch.Tensor: taker.reduce_tensor}
    pickler.dispatch_table = copyreg.dispatch_table | copied | {np.memmap: reduce_map}
    pickler.dump(block)
    return file.getvalue()


def _by_value(block: list[Any], taker: BufferTaker) -> bytes:
    return dumps_by_value(block, buffer_callback=taker.take)


def _pickle(block: list[Any], start: int, ways: Sequence[PickleBlock], arrays: ArrayBuffers) -> Block:
    why: Exception | None = None
    for way in ways:
        try:
            return arrays.pickled(block, way)
        except (RepeatedArrayError, MemoryError):
            raise
        except Exception as error:  # the next way may succeed; if none does, the error below is raised
            why = error
    if len(block) > 1:  # bisect, so that the error names the source
        half = len(block) // 2
        _pickle(block[:half], start, ways, arrays)
        _pickle(block[half:], start + half, ways, arrays)
    raise TypeError(
        f"source {start} ({shorten(block[0])}) cannot be pickled, so it cannot be sent to workers: {shorten(why)}; "
        "use plain data that the stream is opened from as the source (a path, say), and open it in open_stream"
    ) from why
