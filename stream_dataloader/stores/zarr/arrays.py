"""Arrays of a Zarr store, whose chunks streams share.

Guarantee: a chunk is unpacked once while streams hold it.
"""

from __future__ import annotations

import math
import os
import weakref
from typing import Any

import numpy as np

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.files import damage_named
from stream_dataloader.stores._base.rows import check_row
from stream_dataloader.streams._media.limits import Limits
from stream_dataloader.streams._media.section import KnownFile
from stream_dataloader.streams.array.tables import check_rows
from stream_dataloader.streams.cache.gate import Files, Gate

__all__ = ["ArrayRows", "ZarrArray"]

#: Largest number of chunks in one time step: each takes a tenth of a millisecond, even if it does not exist.
_MOST_CHUNKS = 1 << 16

#: Size of a member's entry in the directory of a ZIP archive, without its name.
_LEAST_MEMBER_BYTES = 46


class ZarrArray:
    """Array of a store, and its unpacked rows of chunks that streams hold."""

    def __init__(self, path: str, place: str, array: Any, files: Files, limits: Limits) -> None:
        from stream_dataloader.stores.zarr.chunks import with_checks  # imports zarr

        self._name = name = f"{path}, array {place}"
        folder = os.path.join(path, place)
        self.known = KnownFile.of(folder, name=f"{path}, {place}") if os.path.isdir(path) else KnownFile.of(path)
        self.described = described = array.metadata.to_dict()
        if "pickle" in repr([described.get(key) for key in ("filters", "compressor", "codecs")]).lower():
            raise StoreError(f"{name} was written by pickle, which may run any code")
        check_rows(array.shape, array.dtype, name)
        self.row_shape: tuple[int, ...] = tuple(map(int, array.shape[1:]))
        self.dtype: np.dtype[Any] = array.dtype.newbyteorder("=")
        check_row(name, self.row_shape, self.dtype)
        limits.check_chunk(math.prod(array.chunks) * array.dtype.itemsize, name)
        chunks = math.prod(-(-side // chunk) for side, chunk in zip(array.shape[1:], array.chunks[1:], strict=True))
        if chunks > _MOST_CHUNKS:
            raise StoreError(
                f"{name} has {chunks:,} chunks a step, and may have {_MOST_CHUNKS:,}; leave it out, by columns="
            )
        self._array = with_checks(array)
        self._unchecked = Gate(path, files) if os.path.isdir(path) else None  # until the first read
        self.chunk_rows = max(1, min(array.chunks[0], array.shape[0]))
        self._chunks: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def __len__(self) -> int:
        return int(self._array.shape[0])

    def check_chunks(self) -> None:
        """Raise if the array claims many chunks that cannot be there, before all of it is read."""
        claimed = -(-len(self) // self._array.chunks[0])
        if claimed <= _MOST_CHUNKS:
            return
        there = self.known.size // _LEAST_MEMBER_BYTES
        if os.path.isdir(self.known.path):
            there = sum(len(names) for _, _, names in os.walk(self.known.path))
        if claimed > there:
            raise StoreError(
                f"{self._name} claims {claimed:,} chunks, and has at most {there:,}: it is damaged; write it again"
            )

    def chunk(self, number: int) -> Any:
        found = self._chunks.get(number)
        if found is None:
            found = self._chunks[number] = self.unpack(number * self.chunk_rows, (number + 1) * self.chunk_rows)
        return found

    def unpack(self, start: int, stop: int) -> Any:
        """Unpack rows `[start, stop)`, as far as the array has them."""
        if self._unchecked is not None:
            self._unchecked.check_links(self.known.path)
            self._unchecked = None
        with self.known, damage_named(f"{self._name}, rows {start} to {stop}"):  # zarr opens chunks by name
            return np.asarray(self._array[start : min(stop, len(self))])


class ArrayRows:
    """Rows of an array, which keep the latest row of chunks; a `tables.Table`."""

    def __init__(self, array: ZarrArray) -> None:
        self._array = array
        self._kept: tuple[int, Any] = -1, None
        self.row_shape, self.dtype = array.row_shape, array.dtype

    def row(self, index: int) -> Any:
        number, inside = divmod(index, self._array.chunk_rows)
        return np.array(self._chunk(number)[inside], self.dtype)[()]

    def read(self, start: int, out: Any) -> None:
        """Write rows to `out`; whole chunks are unpacked directly into it."""
        position, stop, rows = start, start + len(out), self._array.chunk_rows
        while position < stop:
            number, inside = divmod(position, rows)
            until = stop // rows * rows
            if not inside and until > position and number != self._kept[0]:
                out[position - start : until - start] = self._array.unpack(position, until)
            else:
                until = min(stop, (number + 1) * rows)
                out[position - start : until - start] = self._chunk(number)[inside : inside + until - position]
            position = until

    def _chunk(self, number: int) -> Any:
        if self._kept[0] != number:
            self._kept = -1, None  # released before the next one is allocated
            self._kept = number, self._array.chunk(number)
        return self._kept[1]
