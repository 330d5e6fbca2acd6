"""The shards of a dataset, on this disk: fetched, checked and unpacked once by all processes together.

::

    local, not compressed    mapped where it is
    local, compressed        unpacked into the cache, checked
    remote                   fetched into the cache, unpacked there, checked

What is in the cache is a whole shard, whose hashes were right. It is held while it is read, and deleted to make room
when it was not used for longest; see `FileCache`.

Guarantee: a shard that does not hold what the index says is an error that names it, and is not kept. No more is fetched
or unpacked than the index says. What a process has open belongs to it; a forked one opens its own.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.codecs import unpack, wrong_hash
from stream_dataloader.stores._base.files import stamp_of
from stream_dataloader.stores._base.handles import Handles, Lease
from stream_dataloader.stores._base.store import replaced
from stream_dataloader.stores.mds.index import INDEX, DatasetIndex, ShardEntry, ShardFile, in_folder
from stream_dataloader.stores.mds.shards import Column, Shard
from stream_dataloader.streams._media.section import closed_on_error
from stream_dataloader.streams.cache.file_cache import FileCache, LocalFile, is_url

__all__ = ["Ahead", "Shards", "checked"]

#: So many shards stay open that no stream reads just now: streams of a few samples each share a shard. Those of the
#: cache do not, as they could not be deleted to make room.
_KEPT = 8


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
        """The bytes of a column's value in each sample, and the sample's number; each is valid until the next."""
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
        data = checked(source, path if self._remote else packed, packed)
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
                f"{name} cannot be unpacked into the cache: {error.strerror}; make room there, or give another "
                "cache=, or set STREAM_DATALOADER_CACHE to another directory",
            ) from error

    def verify(self, number: int) -> None:
        """Compare a shard with all that the index says of it."""
        entry = self._index.shards[number]
        with closing(self.open(number)) as lease, lease.handle.known:
            _check_hashes(entry.raw, lease.handle.content, self._name(entry.raw))
        if entry.zip is not None and not self._remote:
            zipped = self._name(entry.zip)
            if os.path.exists(zipped) or not self.is_here(number):
                checked(entry.zip, zipped, zipped)


def _missing(name: str) -> StoreError:
    return StoreError(f"{name} is missing, and the index names it: the dataset is unfinished or damaged")


def _check_hashes(file: ShardFile, data: Any, name: str) -> None:
    if wrong := wrong_hash(file.hashes, data):
        raise StoreError(f"{name} is damaged: {wrong}; fetch or write it anew")


def checked(file: ShardFile, path: str, name: str) -> bytes:
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
