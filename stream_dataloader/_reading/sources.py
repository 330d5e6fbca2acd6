"""The list of sources: packed into memory that all workers share, or a sequence of the user's that makes them.

A Python list handed to workers grows into a copy each, because touching an element writes its reference
count (https://github.com/pytorch/pytorch/issues/13246). `PackedSources` are blocks of sources, pickled back to back
into one buffer; a worker unpickles the block it reads from and writes nothing. An immutable sequence, which knows its
sources by a rule, is kept as it is (`MadeSources`).
"""

from __future__ import annotations

import copyreg
import functools
import io
import itertools
import pickle
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from typing import Any, overload

import numpy as np

from stream_dataloader._memory.fields import Carver, SharedFields
from stream_dataloader._memory.mapped_arrays import reduce_map
from stream_dataloader._memory.pickling import ByValue, dumps, dumps_by_value, mentions_hidden, spawning
from stream_dataloader._reading.opening import declares_early
from stream_dataloader.errors import shorten

_BLOCK = 64  # sources: reading one costs a few microseconds, packing little more than one pickling of the list
_LARGEST_BLOCK_BYTES = 1 << 16  # sources that make a larger one are packed one by one


def sources_of(given: Iterable[Any]) -> Sources:
    """The list of sources for what a user gives.

    Raises:
        TypeError: A source, or the sequence that makes them, cannot be pickled; names it.
    """
    if isinstance(given, Sources):
        return given
    if isinstance(given, Sequence) and not isinstance(given, (tuple, MutableSequence)):  # a list is one of the latter
        return MadeSources(given)
    return PackedSources(given)


def is_safe_anywhere(sources: Sequence[Any]) -> bool:
    """Whether a source may be read in any thread: it is packed, or made by a range, or by what declares that.

    Not that of several lists; each of them has its own say.
    """
    if not isinstance(sources, MadeSources):
        return True
    return isinstance(sources.sequence, range) or declares_early(sources.sequence)


class Sources(Sequence[Any]):
    """An immutable sequence of sources; each read gives an equal one, not the same object."""

    @abstractmethod
    def _source(self, index: int) -> Any:
        """A source by its index, 0 or more."""

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
    """A sequence of the user's, which makes a source when it is asked for it; nothing is asked beforehand.

    Attributes:
        sequence: It.

    Raises:
        TypeError: It cannot be pickled.
    """

    def __init__(self, sequence: Sequence[Any]) -> None:
        self.sequence = sequence
        try:
            dumps(sequence)
        except Exception as error:
            raise TypeError(
                f"sources is a {type(sequence).__name__} that cannot be pickled ({error}), which sending it to workers "
                "needs; keep in it only what sources are made from, and open files where they are used"
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
    """Picklable sources, packed.

    Args:
        pickle_block: How; None is pickle, or by value what that cannot take.

    Raises:
        TypeError: A source cannot be pickled; names it.
    """

    def __init__(self, sources: Iterable[Any], pickle_block: Callable[[Any], bytes] | None = None) -> None:
        listed = sources if isinstance(sources, list) else list(sources)
        self._set(len(listed), list(_blocks(listed, pickle_block or _by_reference)))

    def _set(self, length: int, blocks: Sequence[tuple[int, bytes]]) -> None:
        ends = np.cumsum([len(block) for _, block in blocks], dtype=np.int64)
        self._length, self._sizes = length, (len(blocks), int(ends[-1]) if blocks else 0)
        SharedFields.__init__(self)
        self._firsts[:], self._ends[:] = [first for first, _ in blocks], ends
        for (_, block), end in zip(blocks, ends.tolist(), strict=True):
            self._blob[end - len(block) : end] = block

    def _lay_out(self, carve: Carver) -> None:
        blocks, blob_bytes = self._sizes
        self._firsts = carve(blocks)  # the index of each block's first source
        self._ends = carve(blocks)  # where each block ends
        self._blob = memoryview(carve(blob_bytes, dtype=np.uint8).data)  # the blocks, one behind the other

    def __len__(self) -> int:
        return self._length

    def _source(self, index: int) -> Any:
        block = int(np.searchsorted(self._firsts, index, side="right")) - 1
        begin = self._ends[block - 1] if block else 0
        return pickle.loads(self._blob[begin : self._ends[block]])[index - int(self._firsts[block])]

    def __iter__(self) -> Iterator[Any]:
        begin = 0
        for end in self._ends.tolist():
            yield from pickle.loads(self._blob[begin:end])
            begin = end

    def __getstate__(self) -> dict[str, Any]:
        if spawning():  # on the way to a worker: share
            portable = self._portable or self
            return {name: getattr(portable, name) for name in ("_length", "_sizes", "_memory")}
        bounds = itertools.pairwise([0, *self._ends.tolist()])
        blocks = [bytes(self._blob[begin:end]) for begin, end in bounds]
        return {"given": (self._length, list(zip(self._firsts.tolist(), blocks, strict=True)))}

    @functools.cached_property
    def _portable(self) -> PackedSources | None:
        """The same for processes that are started anew; None if this will do."""
        return PackedSources(self, dumps_by_value) if mentions_hidden(self._blob) else None

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "given" in state:
            self._set(*state["given"])
        else:
            super().__setstate__(state)


def _blocks(sources: list[Any], dumps: Callable[[Any], bytes]) -> Iterator[tuple[int, bytes]]:
    for first in range(0, len(sources), _BLOCK):
        block = _pickle(sources[first : first + _BLOCK], first, dumps)
        if len(block) <= _LARGEST_BLOCK_BYTES:
            yield first, block
        else:
            for i in range(first, min(first + _BLOCK, len(sources))):
                yield i, _pickle(sources[i : i + 1], i, dumps)


def _by_reference(block: list[Any]) -> bytes:
    try:
        file = io.BytesIO()
        pickler: Any = pickle.Pickler(file, protocol=5)
        pickler.dispatch_table = copyreg.dispatch_table | {np.memmap: reduce_map}
        pickler.dump(block)
        return file.getvalue()
    except Exception:  # the second one says why, if it cannot either
        return dumps_by_value(block)


def _pickle(block: list[Any], start: int, dumps: Callable[[Any], bytes]) -> bytes:
    try:
        return dumps(block)
    except Exception:
        if len(block) > 1:  # find out which one
            half = len(block) // 2
            _pickle(block[:half], start, dumps)
            _pickle(block[half:], start + half, dumps)
        raise TypeError(
            f"source {start} ({shorten(block[0])}) cannot be pickled, which sending it to workers needs; "
            "make the source what the stream is opened from (a path, say) and open it in open_stream"
        ) from None
