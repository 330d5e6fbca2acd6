"""The shards of an MDS dataset: fetched and unpacked once by all processes, mapped, and read.

Source: `streaming/base/format/mds/reader.py` and `writer.py` of mosaicml-streaming 0.13. ::

    samples     uint32                    how many
    offsets     uint32 * (samples + 1)    where each begins, and where the last ends
    ...         JSON                      how it was written; not read
    sample      uint32 * n                sizes of its n columns whose sizes differ
                values                    of all columns

All numbers are little-endian. A local shard that is not compressed is mapped where it is, any other lies in the cache.

Guarantee: a shard that does not hold what the index says is an error, and is not kept. A file that is written to while
it is read is an error.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.codecs import unpack, wrong_hash
from stream_dataloader.stores._base.files import damage_named, stamp_of
from stream_dataloader.stores._base.handles import Handles, Lease
from stream_dataloader.stores._base.store import replaced
from stream_dataloader.stores.mds.encodings import ArrayEncoding, Encoding
from stream_dataloader.stores.mds.index import INDEX, DatasetIndex, ShardEntry, ShardFile, in_folder
from stream_dataloader.streams._media.section import KnownFile, closed_on_error
from stream_dataloader.streams.cache.file_cache import FileCache, LocalFile, is_url

__all__ = ["MOST_SAMPLES", "Ahead", "Column", "Sample", "Samples", "Shard", "Shards"]

#: So many shards stay open that no stream reads; none of the cache, which deletes them to make room.
_KEPT = 8

#: So many samples of a shard are looked at together.
MOST_SAMPLES = 1 << 14

#: Numbers `(samples, ...)` over the map; None where a column has none, or samples are not alike.
View = NDArray[Any] | None


class Column(NamedTuple):
    """A column that is read: its name, its place among all, and how it is encoded."""

    name: str
    place: int
    encoding: Encoding

    def read(self, where: str, read: Callable[..., Any], *given: Any) -> Any:
        """What a method of the encoding returns."""
        try:
            return read(*given)
        except ValueError as error:
            raise StoreError(f"{where}: the column {self.name!r} has {error}") from error


class Shard:
    """A shard, mapped.

    Attributes:
        name: What errors call it.
        content: All of its bytes.
        known: The file as it was, to be held while something is read.
    """

    def __init__(self, file: LocalFile, name: str, entry: ShardEntry, sizes: Sequence[int | None]) -> None:
        self.name, self._held = name, file
        with open(file.path, "rb") as opened:
            self.known = KnownFile.of(file.path, opened.fileno(), name=name)._replace(descriptor=-1)
            if self.known.size != entry.raw.bytes:
                raise ValueError(f"{self.known.size:,} bytes of {entry.raw.bytes:,}")
            self.content = memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
        found, *_ = np.frombuffer(self.content, "<u4", 1)
        if found != entry.samples:
            raise ValueError(f"it holds {found:,} samples, and the index says {entry.samples:,}")
        self._offsets = np.frombuffer(self.content, "<u4", entry.samples + 1, 4)
        self._variable = [place for place, size in enumerate(sizes) if not size]
        self._sizes = [4 * len(self._variable), *(size or 0 for size in sizes)]

    def close(self) -> None:
        """Let go of the file; what was read stays."""
        self._held.close()

    def bounds(self, start: int, stop: int) -> NDArray[np.int64]:
        """Where the columns of samples `[start, stop)` begin, and where the last one ends."""
        with damage_named(self.name):  # NumPy refuses places outside of the file
            offsets = self._offsets[start : stop + 1].astype(np.int64)
            heads = np.frombuffer(self.content, np.uint8)[offsets[:-1, None] + np.arange(self._sizes[0])]
            lengths = np.tile(self._sizes, (stop - start, 1))
            lengths[:, [place + 1 for place in self._variable]] = heads.view("<u4")
            bounds: NDArray[np.int64] = offsets[:-1, None] + np.cumsum(lengths, axis=1)
            wrong = (bounds[:, -1] != offsets[1:]) | (offsets[1:] > len(self.content))
            if wrong.any():
                raise ValueError(f"sample {start + wrong.argmax()} does not end where its columns do")
            return bounds


class Samples:
    """Samples `[start, stop)` of a shard, each of which is a time step."""

    def __init__(self, shard: Shard, start: int, stop: int) -> None:
        self.known, self._content, self._name = shard.known, shard.content, shard.name
        self._start = start
        with self.known:
            self._bounds = shard.bounds(start, stop)

    def parts(self, column: Column) -> list[memoryview]:
        """The bytes of a column's value in each sample."""
        return [self._content[begin:stop] for begin, stop in self._bounds[:, column.place : column.place + 2].tolist()]

    def of(self, row: int, columns: Sequence[Column]) -> Iterator[tuple[Column, memoryview, str]]:
        """Columns, the bytes of their values in a sample, and what errors call it."""
        bounds, where = self._bounds[row].tolist(), f"{self._name}, sample {self._start + row}"
        for column in columns:
            yield column, self._content[bounds[column.place] : bounds[column.place + 1]], where

    def values(self, row: int, columns: Sequence[Column]) -> list[Any]:
        """Columns' values in a sample, as copies."""
        return [column.read(where, column.encoding.decode, part) for column, part, where in self.of(row, columns)]

    def views(self, columns: Sequence[Column]) -> list[View]:
        """The columns in all samples, if these are alike."""
        count, steps = len(self._bounds), np.diff(self._bounds, axis=0)
        if steps.size and (steps != steps[0, 0]).any():
            return [None] * len(columns)
        stride = int(steps[0, 0]) if steps.size else 0
        views: list[View] = []
        for column, part, where in self.of(0, columns):
            view = None
            if isinstance(column.encoding, ArrayEncoding):
                dtype, shape, at = column.read(where, column.encoding.layout, part)
                begin = int(self._bounds[0, column.place])
                rows = np.ndarray((count, len(part)), np.uint8, self._content, begin, (stride, 1))
                if not (rows[:, :at] != rows[0, :at]).any():
                    inner = np.empty(shape, dtype).strides
                    view = np.ndarray((count, *shape), dtype, self._content, begin + at, (stride, *inner))
            views.append(view)
        return views


class Sample:
    """One sample, whose arrays' rows and lists' elements are time steps; see `Samples`."""

    def __init__(self, samples: Samples, columns: Sequence[Column]) -> None:
        self.known = samples.known
        with self.known:
            self._rows = {
                column: column.read(where, column.encoding.rows, part) for column, part, where in samples.of(0, columns)
            }
        lengths = {column.name: len(rows) for column, rows in self._rows.items() if column.encoding.is_sequence}
        if len(set(lengths.values())) != 1:
            raise StoreError(f"arrays and lists of a sample have one length to be a stream, and not {lengths}")
        self.steps = next(iter(lengths.values()))

    def values(self, row: int, columns: Sequence[Column]) -> list[Any]:
        """See `Samples`."""
        where = f"step {row}"
        return [column.read(where, column.encoding.row, self._rows[column], row) for column in columns]

    def views(self, columns: Sequence[Column]) -> list[View]:
        """See `Samples`."""
        is_rows = [isinstance(column.encoding, ArrayEncoding) and column.encoding.is_sequence for column in columns]
        return [self._rows[one] if yes else None for one, yes in zip(columns, is_rows, strict=True)]


class Shards:
    """The shards of a dataset, opened by number; `version` and `stamp` tell it from others at the same place."""

    def __init__(self, folder: str, index: DatasetIndex, version: str, cache: FileCache, stamp: str) -> None:
        self._folder = folder
        self._index = index
        self._version = version
        self._cache = cache
        self._stamp = stamp
        self._remote = is_url(folder)
        here = all(map(self.is_here, range(len(index.shards))))
        self._opened: Handles[int, Shard] = Handles(self._open, _KEPT if here else 0)

    def open(self, number: int) -> Lease[int, Shard]:
        """A shard, to be closed; waits until it is there."""
        with self.file(number):  # fetched before it is opened: one is opened at a time
            return self._opened.lease(number)

    def parts(self, column: Column) -> Iterator[tuple[int, memoryview]]:
        """Each sample's number, and the bytes of its value in a column, until the next."""
        first = 0
        for number, entry in enumerate(self._index.shards):
            with closing(self.open(number)) as lease, lease.handle.known:
                for start in range(0, entry.samples, MOST_SAMPLES):
                    samples = Samples(lease.handle, start, min(start + MOST_SAMPLES, entry.samples))
                    yield from enumerate(samples.parts(column), first + start)
            first += entry.samples

    def is_here(self, number: int) -> bool:
        """Whether a shard need not be fetched or unpacked."""
        entry = self._index.shards[number]
        return not self._remote and (entry.zip is None or os.path.exists(self._name(entry.raw)))

    def _name(self, file: ShardFile) -> str:
        return in_folder(self._folder, file.basename)

    def _open(self, number: int) -> Shard:
        self._check()
        entry, file = self._index.shards[number], self.file(number)
        with closed_on_error(file), damage_named(self._name(entry.raw)):
            shard = Shard(file, self._name(entry.raw), entry, self._index.sizes)
            self._check()
            return shard

    def _check(self) -> None:
        """Raise if another dataset is in the folder now than that of the index."""
        if not self._remote and stamp_of([in_folder(self._folder, INDEX)]) != self._stamp:
            raise replaced(self._folder)

    def close(self) -> None:
        """Close what no stream reads."""
        self._opened.close()

    def file(self, number: int) -> LocalFile:
        """A shard's file, fetched and unpacked; to be closed."""
        entry = self._index.shards[number]
        name = self._name(entry.raw)
        if self.is_here(number):
            return LocalFile(name)
        self._check()
        zipped = [self._name(entry.zip)] if entry.zip and not self._remote else []
        version = hashlib.sha256(f"{self._version} {stamp_of(zipped)}".encode()).hexdigest()[:16]
        kept = name if self._remote else os.path.abspath(name)
        with damage_named(name):
            try:
                return self._cache.made(kept, version, entry.raw.bytes, lambda path: self._make(entry, name, path))
            except FileNotFoundError as error:  # of a server
                raise StoreError(f"{name} is missing: the store is unfinished or damaged") from error

    def _make(self, entry: ShardEntry, name: str, path: str) -> None:
        """Fetch a shard, or what it is unpacked from, and write what it must be to a path."""
        source = entry.zip or entry.raw
        packed = self._name(source)
        if self._remote:
            self._cache.fetch(packed, path, source.bytes)
        data = _checked(source, path if self._remote else packed, packed)
        if entry.compression is None:
            return
        raw = unpack(entry.compression, data, entry.raw.bytes, packed)
        _check_hashes(entry.raw, raw, name)
        try:
            with open(path, "wb") as file:
                file.write(raw)
        except OSError as error:
            told = f"{name} cannot be unpacked into the cache: {error.strerror}; make room, or give cache="
            raise OSError(error.errno, told) from error

    def verify(self, number: int) -> None:
        """Compare a shard with all that the index says of it."""
        entry = self._index.shards[number]
        with closing(self.open(number)) as lease, lease.handle.known:
            _check_hashes(entry.raw, lease.handle.content, self._name(entry.raw))
        if entry.zip is not None and not self._remote:
            zipped = self._name(entry.zip)
            if os.path.exists(zipped) or not self.is_here(number):
                _checked(entry.zip, zipped, zipped)


def _check_hashes(file: ShardFile, data: Any, name: str) -> None:
    if wrong := wrong_hash(file.hashes, data):
        raise StoreError(f"{name} is damaged: {wrong}; fetch or write it anew")


def _checked(file: ShardFile, path: str, name: str) -> bytes:
    """The bytes of a file at a path, which errors call `name`."""
    with damage_named(name), open(path, "rb") as opened:
        if (size := os.fstat(opened.fileno()).st_size) != file.bytes:
            raise ValueError(f"{size:,} bytes of {file.bytes:,}")
        data = opened.read()
    _check_hashes(file, data, name)
    return data


class Ahead(threading.Thread):
    """Fetches a shard ahead of use, and holds it until then."""

    def __init__(self, shards: Shards, number: int) -> None:
        super().__init__(name="stream_dataloader shard", daemon=True)
        self._shards = shards
        self._number = number
        self._held: LocalFile | None = None
        self.start()

    def run(self) -> None:
        """Fetch it."""
        with suppress(Exception):  # the reader meets it again, and says where
            self._held = self._shards.file(self._number)
