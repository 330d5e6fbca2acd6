"""Rows of arrays that are kept in chunks, each unpacked once for all of its rows that are read one after the other.

Guarantee: rows that share a chunk with others are taken from the chunk that was unpacked last, of which all streams of
a process have one copy. Chunks that are wanted whole are unpacked together, and not kept.
"""

from __future__ import annotations

import errno
import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.rows import check_row
from stream_dataloader.streams._media.known_file import KnownFile
from stream_dataloader.streams.array.tables import check_rows

__all__ = ["ChunkedArray", "ChunkedTable", "zarr_errors"]

#: What the chunks of one row of them may take: they are unpacked together.
_LARGEST_CHUNKS_BYTES = 4 << 30


@contextmanager
def zarr_errors(name: str) -> Iterator[None]:
    """Have what zarr raises about a damaged store say which one; `name` is of the store, the stream or the array."""
    try:
        yield
    except (StoreError, ImportError):
        raise
    except Exception as error:  # of zarr, of codecs, of zip archives: any kind
        # a damaged archive has files sought at places that cannot be
        if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT, errno.EINVAL):
            raise
        text = str(error) or repr(error)
        raise StoreError(f"{name} cannot be read: {text}; it is damaged, or is no Zarr store: write it anew") from error


class ChunkedArray:
    """An array of a store, and the chunks of it that some stream holds."""

    def __init__(self, array: Any, name: str, known: KnownFile) -> None:
        self.name = name
        self._known = known
        self._array = array
        _refuse_pickle(array, name)
        try:
            check_rows(array.shape, array.dtype, name)
        except ValueError as error:
            raise StoreError(str(error)) from None
        self.row_shape: tuple[int, ...] = tuple(map(int, array.shape[1:]))
        self.dtype: np.dtype[Any] = array.dtype.newbyteorder("=")
        check_row(name, self.row_shape, self.dtype)
        sizes = [min(chunk, size) for chunk, size in zip(array.chunks, array.shape, strict=True)]
        self._rows = max(1, sizes[0])
        across = math.prod(-(-size // chunk) for size, chunk in zip(array.shape[1:], array.chunks[1:], strict=True))
        unpacked = math.prod(array.chunks) * self.dtype.itemsize * across
        if unpacked > _LARGEST_CHUNKS_BYTES:
            raise StoreError(
                f"{name} is {array.dtype} {tuple(array.shape)} in chunks {tuple(array.chunks)}: {unpacked:,} bytes "
                f"would be unpacked for a step, more than {_LARGEST_CHUNKS_BYTES:,}; it is damaged, or has to be "
                "written anew in smaller chunks"
            )
        self._chunks: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def __len__(self) -> int:
        return int(self._array.shape[0])

    def read(self, start: int, out: Any, kept: dict[int, Any]) -> None:
        """Write rows to `out`.

        Args:
            start: The first of them.
            out: Room for them.
            kept: The chunks that the stream keeps, by number; those that it needs next time are in it afterwards. ::

                chunks      |  0    |  1    |  2    |  3    |
                rows                xx xxxxxx xxxxxx xx          0 is kept from before, 1 and 2 are read straight, and
                                                                 3 is kept for the next time
        """
        position, stop = start, start + len(out)
        while position < stop:
            number, inside = divmod(position, self._rows)
            whole = stop // self._rows if not inside else number
            if whole > number and number not in kept:
                until = whole * self._rows
                out[position - start : until - start] = self._unpack(position, until)
            else:
                until = min(stop, (number + 1) * self._rows)
                rows = self._chunk(number, kept)
                out[position - start : until - start] = rows[inside : inside + until - position]
            position = until

    def row(self, index: int, kept: dict[int, Any]) -> Any:
        """A copy of one row."""
        number, inside = divmod(index, self._rows)
        return np.array(self._chunk(number, kept)[inside], self.dtype)[()]

    def _chunk(self, number: int, kept: dict[int, Any]) -> Any:
        """The rows of one chunk, and of those beside it; kept instead of those that the stream kept before."""
        found = kept.get(number)
        if found is None:
            kept.clear()
            found = self._chunks.get(number)
            if found is None:
                found = self._unpack(number * self._rows, (number + 1) * self._rows)
                self._chunks[number] = found
            kept[number] = found
        return found

    def _unpack(self, start: int, stop: int) -> Any:
        with self._known, zarr_errors(f"{self.name}, rows {start} to {stop}"):  # zarr opens chunks by their names
            return np.asarray(self._array[start : min(stop, len(self))])


def _refuse_pickle(array: Any, name: str) -> None:
    """Refuse a codec that runs code which is in the data."""
    described = array.metadata.to_dict()
    codecs = repr([described.get(key) for key in ("filters", "compressor", "codecs")])
    if "pickle" in codecs.lower():
        raise StoreError(f"{name} was written by pickle, which runs code when it is read; it is refused, convert it")


class ChunkedTable:
    """The rows `[start, stop)` of an array, as a stream reads them; see `rows.RowTable`."""

    def __init__(self, array: ChunkedArray, start: int, stop: int) -> None:
        self._array = array
        self._start = start
        self._length = stop - start
        self._kept: dict[int, Any] = {}
        self.row_shape = array.row_shape
        self.dtype = array.dtype

    def __len__(self) -> int:
        return self._length

    def row(self, index: int) -> Any:
        return self._array.row(self._start + index, self._kept)

    def read(self, start: int, out: Any) -> None:
        self._array.read(self._start + start, out, self._kept)

    def close(self) -> None:
        self._kept = {}
