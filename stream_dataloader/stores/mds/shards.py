"""The shards of an MDS dataset: fetched and unpacked once by all processes together, mapped, and read.

Source: `streaming/base/format/mds/reader.py` and `writer.py` of mosaicml-streaming 0.13. ::

    samples     uint32                    how many
    offsets     uint32 * (samples + 1)    where each begins, and where the last ends
    ...         JSON                      how it was written; not read
    sample      uint32 * n                sizes of its n columns whose sizes differ
                values                    of all columns

All numbers are little-endian. A local shard that is not compressed is mapped where it is, any other lies in the cache.

Guarantee: a shard that does not hold what the index says is an error that names it, and is not kept. No place outside
of the file is read, whatever it holds. A file that is cut off or written to while it is read is an error.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.codecs import unpack, wrong_hash
from stream_dataloader.stores._base.files import stamp_of
from stream_dataloader.stores._base.handles import Handles, Lease
from stream_dataloader.stores._base.store import replaced
from stream_dataloader.stores.mds.encodings import ArrayEncoding, Encoding
from stream_dataloader.stores.mds.index import INDEX, DatasetIndex, ShardEntry, ShardFile, in_folder
from stream_dataloader.streams._media.known_file import KnownFile
from stream_dataloader.streams._media.section import closed_on_error
from stream_dataloader.streams.cache.file_cache import FileCache, LocalFile, is_url

__all__ = ["Ahead", "Column", "Sample", "Shard", "Shards"]

#: So many shards stay open that no stream reads just now; none of the cache, which deletes them to make room.
_KEPT = 8

#: Numbers `(samples, ...)` over the map; None where a column has none, or samples are not alike.
View = NDArray[Any] | None


class Column(NamedTuple):
    """A column that is read: its name, its place among all, and how it is encoded."""

    name: str
    place: int
    encoding: Encoding

    def error(self, where: str, error: Exception) -> StoreError:
        """The error for a value that cannot be decoded."""
        return StoreError(f"{where}: the column {self.name!r} has {error}")


class Shard:
    """A shard, mapped.

    Attributes:
        content: All of its bytes.
        known: The file as it was, to be held while something is read.
        samples: How many it has.
    """

    def __init__(self, file: LocalFile, name: str, entry: ShardEntry, sizes: Sequence[int | None]) -> None:
        self._name = name
        self._held = file
        self.samples = entry.samples
        with open(file.path, "rb") as opened:
            self.known = KnownFile.of(file.path, opened.fileno(), name=name)._replace(descriptor=-1)
            if self.known.size != entry.raw.bytes:
                raise self._damaged(f"{self.known.size:,} bytes of {entry.raw.bytes:,}")
            self.content = memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
        count = int.from_bytes(self.content[:4], "little")
        if count != self.samples:
            raise self._damaged(f"it holds {count:,} samples, and the index says {self.samples:,}")
        self._offsets = np.frombuffer(self.content, "<u4", count + 1, 4).astype(np.int64)
        self._sizes = [size or 0 for size in sizes]
        self._variable = [place for place, size in enumerate(sizes) if not size]
        self._head = struct.Struct(f"<{len(self._variable)}I")
        least = self._head.size + sum(self._sizes)
        outside = self._offsets[0] < 8 + 4 * count or self._offsets[-1] > entry.raw.bytes
        if outside or (np.diff(self._offsets) < least).any():
            raise self._damaged(f"places of samples lie outside of its {entry.raw.bytes:,} bytes")

    def close(self) -> None:
        """Let go of the file; what was read stays."""
        self._held.close()

    def _damaged(self, what: str) -> StoreError:
        return StoreError(f"{self._name} is damaged: {what}; fetch or write it anew")

    def _bounds(self, sample: int) -> list[int]:
        """Where the columns of a sample begin, and where the last one ends."""
        begin, end = self._offsets[sample : sample + 2].tolist()
        sizes = self._sizes
        if self._variable:
            sizes = sizes.copy()
            for place, size in zip(self._variable, self._head.unpack_from(self.content, begin), strict=True):
                sizes[place] = size
        bounds = list(accumulate(sizes, initial=begin + self._head.size))
        if bounds[-1] != end:
            raise self._damaged(f"the columns of sample {sample} take {bounds[-1] - begin:,} bytes of {end - begin:,}")
        return bounds

    def parts(self, column: Column) -> list[memoryview]:
        """The bytes of a column's value in each sample."""
        heads = np.frombuffer(self.content, np.uint8)[self._offsets[:-1, None] + np.arange(self._head.size)]
        sizes = np.tile(np.array(self._sizes, np.int64), (self.samples, 1))
        sizes[:, self._variable] = heads.view("<u4")
        ends = self._offsets[:-1] + self._head.size + np.cumsum(sizes, axis=1).T
        for sample in np.flatnonzero(ends[-1] != self._offsets[1:])[:1].tolist():
            self._bounds(sample)  # which says what is wrong
        stops = ends[column.place]
        begins = stops - sizes[:, column.place]
        return [self.content[begin:stop] for begin, stop in zip(begins.tolist(), stops.tolist(), strict=True)]

    def values(self, sample: int, columns: Sequence[Column]) -> list[Any]:
        """Columns' values in a sample, as copies."""
        return self._read(sample, columns, lambda encoding, part: encoding.decode(part))

    def rows(self, sample: int, columns: Sequence[Column]) -> list[Any]:
        """See `Encoding.rows`."""
        return self._read(sample, columns, lambda encoding, part: encoding.rows(part))

    def _read(self, sample: int, columns: Sequence[Column], decode: Callable[[Any, memoryview], Any]) -> list[Any]:
        bounds, found = self._bounds(sample), []
        for column in columns:
            try:
                found.append(decode(column.encoding, self.content[bounds[column.place] : bounds[column.place + 1]]))
            except ValueError as error:
                raise column.error(f"{self._name}, sample {sample}", error) from error
        return found

    def views(self, columns: Sequence[Column], start: int, stop: int) -> list[View]:
        """The columns in samples `[start, stop)`, if all of these are alike."""
        bounds, first = self._bounds(start), int(self._offsets[start])
        stride = bounds[-1] - first
        views: list[View] = [None] * len(columns)

        def same_place(at: int, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
            inner = np.empty(shape, dtype).strides
            found: NDArray[Any] = np.ndarray((stop - start, *shape), dtype, self.content, at, (stride, *inner))
            return found

        if (np.diff(self._offsets[start : stop + 1]) != stride).any():
            return views
        heads = same_place(first, np.uint8, (self._head.size,))
        if (heads != heads[0]).any():
            return views
        for number, column in enumerate(columns):
            if isinstance(column.encoding, ArrayEncoding):
                begin = bounds[column.place]
                try:
                    dtype, shape, at = column.encoding.layout(self.content[begin : bounds[column.place + 1]])
                except ValueError as error:
                    raise column.error(f"{self._name}, sample {start}", error) from error
                described = same_place(begin, np.uint8, (at,))
                if not (described != described[0]).any():
                    views[number] = same_place(begin + at, dtype, shape)
        return views


class Sample:
    """What one sample holds, read as a shard is: its arrays' rows and its lists' elements are time steps.

    What is neither is the same in all of them.
    """

    def __init__(self, shard: Shard, sample: int, columns: Sequence[Column]) -> None:
        self.known = shard.known
        with self.known:
            self._rows = dict(zip(columns, shard.rows(sample, columns), strict=True))
        lengths = {column.name: len(rows) for column, rows in self._rows.items() if column.encoding.is_sequence}
        if len(set(lengths.values())) != 1:
            raise StoreError(
                f"a sample that is a stream has as many rows in all its arrays and lists, and these have "
                f"{lengths or 'none'}"
            )
        self.samples = next(iter(lengths.values()))

    def values(self, row: int, columns: Sequence[Column]) -> list[Any]:
        """See `Shard`."""
        found = []
        for column in columns:
            try:
                found.append(column.encoding.row(self._rows[column], row))
            except ValueError as error:
                raise column.error(f"step {row}", error) from error
        return found

    def views(self, columns: Sequence[Column], start: int, stop: int) -> list[View]:
        """See `Shard`."""
        is_rows = [isinstance(column.encoding, ArrayEncoding) and column.encoding.is_sequence for column in columns]
        return [self._rows[one][start:stop] if yes else None for one, yes in zip(columns, is_rows, strict=True)]


class Shards:
    """The shards of a dataset, opened by number.

    Args:
        folder: The dataset's, or its URL.
        index: What is in it.
        version: Tells this dataset from another that was at the same place before.
        cache: Where remote and unpacked shards are kept.
        stamp: Of index.json, if that is in a folder: see `stamp_of`.
    """

    def __init__(self, folder: str, index: DatasetIndex, version: str, cache: FileCache, stamp: str) -> None:
        self._folder = folder
        self._index = index
        self._version = version
        self._cache = cache
        self._stamp = stamp
        self._remote = is_url(folder)
        here = all(self.is_here(number) for number in range(len(index.shards)))
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
                yield from enumerate(lease.handle.parts(column), first)
            first += entry.samples

    def is_here(self, number: int) -> bool:
        """Whether a shard need not be fetched or unpacked."""
        entry = self._index.shards[number]
        return not self._remote and (entry.zip is None or os.path.exists(self._name(entry.raw)))

    def _name(self, file: ShardFile) -> str:
        return in_folder(self._folder, file.basename)

    def _open(self, number: int) -> Shard:
        self._check()
        entry = self._index.shards[number]
        file = self.file(number)
        with closed_on_error(file):
            try:
                shard = Shard(file, self._name(entry.raw), entry, self._index.sizes)
            except FileNotFoundError:
                raise _missing(self._name(entry.raw)) from None
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
        """A shard's file, fetched and unpacked if it has to be; to be closed."""
        entry = self._index.shards[number]
        name = self._name(entry.raw)
        if self.is_here(number):
            return LocalFile(name)
        self._check()
        zipped = [self._name(entry.zip)] if entry.zip and not self._remote else []
        version = hashlib.sha256(f"{self._version} {stamp_of(zipped)}".encode()).hexdigest()[:16]
        kept = name if self._remote else os.path.abspath(name)
        try:
            return self._cache.made(kept, version, entry.raw.bytes, lambda path: self._make(entry, name, path))
        except FileNotFoundError as error:
            raise _missing(name) from error
        except StoreError:
            raise
        except ValueError as error:  # larger than the cache may be, or of a process that this one waited for
            raise StoreError(f"{name}: {error}") from error

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
            raise OSError(
                error.errno,
                f"{name} cannot be unpacked into the cache: {error.strerror}; make room there, or give cache=",
            ) from error

    def verify(self, number: int) -> None:
        """Compare a shard with all that the index says of it."""
        entry = self._index.shards[number]
        with closing(self.open(number)) as lease, lease.handle.known:
            _check_hashes(entry.raw, lease.handle.content, self._name(entry.raw))
        if entry.zip is not None and not self._remote:
            zipped = self._name(entry.zip)
            if os.path.exists(zipped) or not self.is_here(number):
                _checked(entry.zip, zipped, zipped)


def _missing(name: str) -> StoreError:
    return StoreError(f"{name} is missing, and the index names it: the dataset is unfinished or damaged")


def _check_hashes(file: ShardFile, data: Any, name: str) -> None:
    if wrong := wrong_hash(file.hashes, data):
        raise StoreError(f"{name} is damaged: {wrong}; fetch or write it anew")


def _checked(file: ShardFile, path: str, name: str) -> bytes:
    """The bytes of a file at a path, which errors call `name`."""
    try:
        with open(path, "rb") as opened:
            if (size := os.fstat(opened.fileno()).st_size) != file.bytes:
                raise StoreError(f"{name} is damaged: {size:,} bytes of {file.bytes:,}; fetch or write it anew")
            data = opened.read()
    except FileNotFoundError:
        raise _missing(name) from None
    _check_hashes(file, data, name)
    return data


class Ahead(threading.Thread):
    """Fetches a shard that is needed soon, and holds it until it is used."""

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
