"""Shards of an MDS dataset: fetched and unpacked once, mapped, and read.

Source: `streaming/base/format/mds/reader.py` and `writer.py` of mosaicml-streaming 0.13. ::

    samples     uint32                    number of samples
    offsets     uint32 * (samples + 1)    start of each sample, and end of the last
    ...         JSON                      options of the writer; not read
    sample      uint32 * n                sizes of its n columns with varying sizes
                values                    of all columns

Guarantee: a shard that differs from the index, or is written to, raises an error.
A damaged sample raises an error in the streams that contain it.
"""

from __future__ import annotations

import functools
import itertools
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.codecs import check_hashes, unpack
from stream_dataloader.stores._base.files import damage_named, hashed, in_folder, stamp_of
from stream_dataloader.stores._base.handles import Shards
from stream_dataloader.stores._base.store import replaced
from stream_dataloader.stores.mds.encodings import ArrayEncoding, Encoding
from stream_dataloader.stores.mds.index import INDEX, DatasetIndex, ShardEntry, ShardFile
from stream_dataloader.streams._media.limits import Limits
from stream_dataloader.streams._media.section import KnownFile, closed_on_error
from stream_dataloader.streams.cache import FileCache, LocalFile, is_url

__all__ = ["Column", "MdsShards", "Rows", "Shard"]

#: Number of idle shards that stay open, if they are not in the cache.
_KEPT = 8

#: Number of samples of a shard that are located together.
_MOST_SAMPLES = 1 << 14


class Column(NamedTuple):
    """A column that is read, and its index among all."""

    name: str
    place: int
    encoding: Encoding


class Shard:
    """A mapped shard; `known` is entered while it is read."""

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
        self._heads = np.arange(4 * len(self._variable))
        self._places = np.cumsum([len(self._heads), *(size or 0 for size in sizes)])

    def close(self) -> None:
        self._held.close()

    def bounds(self, start: int, stop: int) -> NDArray[np.int64]:
        with damage_named(self.name):  # NumPy refuses places outside of the file
            offsets = self._offsets[start : stop + 1].astype(np.int64)
            begins, stops = offsets[:-1, None], offsets[1:]
            bounds: NDArray[np.int64] = begins + self._places
            sizes = np.frombuffer(self.content, np.uint8)[begins + self._heads].view("<u4")
            for number, place in enumerate(self._variable):
                bounds[:, place + 1 :] += sizes[:, number, None]
            wrong = (bounds[:, -1] != stops) | (stops > len(self.content))
            if wrong.any():
                raise ValueError(f"sample {start + wrong.argmax()} does not end where its columns do")
            return bounds


@dataclass
class Rows:
    """Time steps, and the offsets of their columns' values in a shard, `(rows, places)`.

    They are samples with some numbers, or steps of one sample whose number is repeated.
    """

    shard: Shard
    columns: Sequence[Column]
    numbers: Sequence[int]
    begins: NDArray[np.int64]
    stops: NDArray[np.int64]

    @classmethod
    def of(cls, shard: Shard, columns: Sequence[Column], start: int, stop: int) -> Rows:
        """Return the samples `[start, stop)`, or as many of them as are located together."""
        stop = min(stop, start + _MOST_SAMPLES)
        shard.known.check()
        bounds = shard.bounds(start, stop)
        return cls(shard, columns, range(start, stop), bounds[:, :-1], bounds[:, 1:])

    def of_sample(self) -> Rows:
        with self.shard.known:
            split = [self.read(0, column, column.encoding.split) for column in self.columns]
        found = zip(self.columns, split, strict=True)
        lengths = {column.name: bounds.shape[1] for column, (_, bounds) in found if column.encoding.is_sequence}
        if len(set(lengths.values())) != 1:
            raise StoreError(f"a sample's arrays and lists differ in length: {lengths}")
        steps, columns = next(iter(lengths.values())), []
        places = np.empty((2, steps, len(split)), np.int64)
        for place, (column, (element, bounds)) in enumerate(zip(self.columns, split, strict=True)):
            columns.append(Column(column.name, place, element))
            places[:, :, place] = self.begins[0, column.place] + bounds
        return Rows(self.shard, columns, [self.numbers[0]] * steps, *places)

    def __len__(self) -> int:
        return len(self.numbers)

    def part(self, row: int, column: Column) -> memoryview:
        return self.shard.content[self.begins[row, column.place] : self.stops[row, column.place]]

    def read(self, row: int, column: Column, method: Callable[[memoryview], Any]) -> Any:
        try:
            return method(self.part(row, column))
        except ValueError as error:
            where = f"{self.shard.name}, sample {self.numbers[row]}"
            raise StoreError(f"{where}: the column {column.name!r} has {error}") from error

    def values(self, row: int) -> list[Any]:
        return [self.read(row, column, column.encoding.decode) for column in self.columns]

    @functools.cached_property
    def _views(self) -> list[NDArray[Any] | None]:
        """Arrays `(rows, ...)` over the map for each column; None where sizes differ."""
        return [self._view(column, column.encoding) for column in self.columns]

    def _view(self, column: Column, encoding: Encoding) -> NDArray[Any] | None:
        if not isinstance(encoding, ArrayEncoding):
            return None
        dtype, shape, at = self.read(0, column, encoding.layout)
        begins, stops = self.begins[:, column.place], self.stops[:, column.place]
        begin, count, content = int(begins[0]), len(begins), self.shard.content
        stride = int(begins[-1] - begins[0]) // max(count - 1, 1)
        alike = encoding.size or (stops - begins == stops[0] - begins[0]).all()
        if not alike or (begins[1:] - begins[:-1] != stride).any():
            return None
        heads = np.ndarray((count, at), np.uint8, content, begin, (stride, 1))
        if at and (heads != heads[0]).any():
            return None
        inner = np.empty(shape, dtype).strides
        view: NDArray[Any] = np.ndarray((count, *shape), dtype, content, begin + at, (stride, *inner))
        return view

    def write(self, first: int, leaves: Sequence[Any]) -> None:
        for column, view, leaf in zip(self.columns, self._views, leaves, strict=True):
            if view is not None:
                _put(column, view[first : first + len(leaf)], leaf)
                continue
            for row in range(len(leaf)):
                value = np.asarray(self.read(first + row, column, column.encoding.decode))
                _put(column, value[None], leaf[row : row + 1])


def _put(column: Column, rows: NDArray[Any], leaf: Any) -> None:
    """Write a column's values; raise if they do not fit, because NumPy would convert or repeat them."""
    dtype = getattr(column.encoding, "delivered", None) or rows.dtype.newbyteorder("=")
    if dtype != leaf.dtype or rows.shape != leaf.shape:
        before = f"{leaf.dtype} {leaf.shape[1:]}"
        raise StoreError(f"the column {column.name!r} is {dtype} {rows.shape[1:]}, and before it {before}")
    leaf[...] = rows


class MdsShards(Shards[Shard]):
    """Shards of a dataset, fetched if necessary, and mapped."""

    def __init__(
        self,
        folder: str,
        index: DatasetIndex,
        version: str,
        cache: FileCache,
        stamp: str,
        limits: Limits | None = None,
    ) -> None:
        self._limits = limits
        self._folder, self._index, self._version, self._cache, self._stamp = folder, index, version, cache, stamp
        self._remote = is_url(folder)
        super().__init__(_KEPT if all(map(self.is_here, range(len(index.shards)))) else 0)

    def scan(self, column: Column) -> Iterator[tuple[Rows, int]]:
        """Yield all samples. Each must be read before the next."""
        for number, entry in enumerate(self._index.shards):
            with closing(self.open(number)) as lease, lease.handle.known:
                for start in range(0, entry.samples, _MOST_SAMPLES):
                    rows = Rows.of(lease.handle, [column], start, entry.samples)
                    yield from zip(itertools.repeat(rows), range(len(rows)), strict=False)

    def is_here(self, number: int) -> bool:
        entry = self._index.shards[number]
        return not self._remote and (entry.zip is None or os.path.exists(self._name(entry.raw)))

    def _name(self, file: ShardFile) -> str:
        return in_folder(self._folder, file.basename)

    def _opened(self, number: int) -> Shard:
        self._check()
        entry, file = self._index.shards[number], self.file(number)
        with closed_on_error(file), damage_named(self._name(entry.raw)):
            shard = Shard(file, self._name(entry.raw), entry, self._index.sizes)
            self._check()
            return shard

    def _check(self) -> None:
        if not self._remote and stamp_of([in_folder(self._folder, INDEX)]) != self._stamp:
            raise replaced(self._folder)

    def file(self, number: int) -> LocalFile:
        entry = self._index.shards[number]
        name = self._name(entry.raw)
        if self.is_here(number):
            return LocalFile(name)
        self._check()
        zipped = [self._name(entry.zip)] if entry.zip and not self._remote else []
        version = hashed(f"{self._version} {stamp_of(zipped)}")
        kept = name if self._remote else os.path.abspath(name)
        with damage_named(name):
            return self._cache.made(kept, version, entry.raw.bytes, lambda path: self._make(entry, name, path))

    def _make(self, entry: ShardEntry, name: str, path: str) -> None:
        source = entry.zip or entry.raw
        packed = self._name(source)
        if self._remote:
            data, _, size = self._cache.remote(packed).part(0, source.bytes)
            if size not in (None, source.bytes):
                raise ValueError(f"{packed} has {size:,} bytes, and should have {source.bytes:,}")
            check_hashes(source.hashes, data, packed)
        else:
            data = _checked(source, packed)
        if entry.compression is not None:
            data = unpack(entry.compression, data, entry.raw.bytes, packed, self._limits)
            check_hashes(entry.raw.hashes, data, name)
        try:
            with open(path, "wb") as file:
                file.write(data)
        except OSError as error:
            told = f"{name} cannot be kept in the cache: {error.strerror}; make room, or give cache="
            raise OSError(error.errno, told) from error

    def verify(self, number: int) -> None:
        entry = self._index.shards[number]
        with closing(self.open(number)) as lease, lease.handle.known:
            check_hashes(entry.raw.hashes, lease.handle.content, self._name(entry.raw))
        if entry.zip is not None and not self._remote:
            zipped = self._name(entry.zip)
            if os.path.exists(zipped) or not self.is_here(number):
                _checked(entry.zip, zipped)


def _checked(file: ShardFile, path: str) -> bytes:
    with damage_named(path), open(path, "rb") as opened:
        if (size := os.fstat(opened.fileno()).st_size) != file.bytes:
            raise ValueError(f"{size:,} bytes of {file.bytes:,}")
        data = opened.read()
    check_hashes(file.hashes, data, path)
    return data
