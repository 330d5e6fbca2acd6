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

import errno
import hashlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.files import stamp_of
from stream_dataloader.stores._base.store import replaced
from stream_dataloader.stores.mds.compression import unpack, wrong_hash
from stream_dataloader.stores.mds.index import INDEX, DatasetIndex, ShardEntry, ShardFile, in_folder
from stream_dataloader.stores.mds.shards import Columns, Shard
from stream_dataloader.streams._media.section import closed_on_error
from stream_dataloader.streams.cache.file_cache import FileCache, LocalFile, is_url

__all__ = ["Ahead", "Shards"]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

#: So many local shards stay open that no stream reads just now: streams of a few samples each share a shard. Those of
#: the cache do not, as they could not be deleted to make room.
_KEPT = 8


class Shards:
    """The shards of a dataset, opened by number.

    Args:
        folder: The dataset's, or its URL.
        index: What is in it.
        version: Tells this dataset from another that was at the same place before.
        columns: Which are read.
        cache: Where remote and unpacked shards are kept.
        stamp: Of index.json, if that is in a folder: see `stamp_of`.
    """

    def __init__(
        self,
        folder: str,
        index: DatasetIndex,
        version: str,
        columns: Columns,
        cache: FileCache,
        stamp: str,
    ) -> None:
        self._stamp = stamp
        self._folder = folder
        self._index = index
        self._version = version
        self._columns = columns
        self._cache = cache
        self._remote = is_url(folder)
        self._begin()

    def _begin(self) -> None:
        """Have nothing open."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._locks: dict[int, threading.Lock] = {}
        self._opened: weakref.WeakValueDictionary[int, Shard] = weakref.WeakValueDictionary()
        self._recent: deque[Shard] = deque(maxlen=_KEPT)

    @property
    def samples(self) -> list[int]:
        """How many samples each shard has."""
        return [shard.samples for shard in self._index.shards]

    def name(self, number: int) -> str:
        """What errors call a shard."""
        return in_folder(self._folder, self._index.shards[number].raw.basename)

    def open(self, number: int) -> Shard:
        """A shard; waits until it is there.

        Raises:
            StoreError: It is damaged.
            OSError: It is missing, or cannot be fetched.
            ImportError: A package is missing that unpacks it, or fetches it.
        """
        if self._pid != os.getpid():
            self._begin()
        with self._lock:
            found = self._opened.get(number)
            lock = self._locks.setdefault(number, threading.Lock())
        if found is None:
            with lock:
                if (found := self._opened.get(number)) is None:
                    found = self._opened[number] = self._open(number)
                    if self._is_here(self._index.shards[number]):
                        self._recent.append(found)
        return found

    def ahead(self, number: int) -> Ahead | None:
        """Begin to open a shard that is needed soon; None if that takes no time."""
        if number >= len(self._index.shards) or self._is_here(self._index.shards[number]):
            return None
        return Ahead(self.open, number)

    def _is_here(self, entry: ShardEntry) -> bool:
        return not self._remote and (entry.zip is None or os.path.exists(in_folder(self._folder, entry.raw.basename)))

    def _open(self, number: int) -> Shard:
        self._check()
        entry, name = self._index.shards[number], self.name(number)
        if self._is_here(entry):
            file = LocalFile(name)
        else:
            try:
                file = self._cache.made(
                    name if self._remote else os.path.abspath(name),
                    self._version_of(entry),
                    entry.raw.bytes,
                    lambda path: self._make(entry, name, path),
                )
            except StoreError:
                raise
            except FileNotFoundError as error:
                raise _missing(name) from error
            except OSError as error:
                if error.errno not in _FULL or error.filename is not None:
                    raise
                raise OSError(
                    error.errno,
                    f"{name} cannot be unpacked into the cache: {error.strerror}; make room there, or give another "
                    "cache=, or set STREAM_DATALOADER_CACHE to another directory",
                ) from error
            except ValueError as error:  # larger than the cache may be, or of a process that this one waited for
                raise StoreError(f"{name}: {error}") from error
        with closed_on_error(file):
            try:
                shard = Shard(file, name, entry, self._columns)
            except FileNotFoundError:
                raise _missing(name) from None
            self._check()
            return shard

    def _check(self) -> None:
        """Raise if another dataset is in the folder now than that of the index."""
        if not self._remote and stamp_of([in_folder(self._folder, INDEX)]) != self._stamp:
            raise replaced(self._folder)

    def _version_of(self, entry: ShardEntry) -> str:
        """Tells what the cache has of a shard from that of another one."""
        if self._remote or entry.zip is None:
            return self._version
        try:
            known = os.stat(in_folder(self._folder, entry.zip.basename))
        except FileNotFoundError:
            return self._version
        return hashlib.sha256(f"{self._version} {known.st_mtime_ns} {known.st_size}".encode()).hexdigest()[:16]

    def _make(self, entry: ShardEntry, name: str, path: str) -> None:
        """Fetch a shard, or what it is unpacked from, and write what it must be to a path."""
        source = entry.zip or entry.raw
        told = in_folder(self._folder, source.basename)
        if self._remote:
            self._cache.fetch(told, path, source.bytes)
        if entry.zip is None:
            check_file(source, path, told)
            return
        data = check_file(source, path if self._remote else told, told)
        assert entry.compression is not None
        with open(path, "wb") as file:
            for piece in unpack(entry.compression, data, entry.raw.bytes, told):
                file.write(piece)
        check_file(entry.raw, path, name)

    def verify(self, number: int) -> None:
        """Compare a shard with all that the index says of it.

        Raises:
            StoreError: It is damaged, or missing.
        """
        entry, name = self._index.shards[number], self.name(number)
        shard = self.open(number)
        with shard.known:
            wrong = wrong_hash(entry.raw.hashes, shard.content)
        if wrong:
            raise StoreError(f"{name} is damaged: {wrong}; fetch or write it anew")
        if entry.zip is not None and not self._remote:
            zipped = in_folder(self._folder, entry.zip.basename)
            if os.path.exists(zipped) or not self._is_here(entry):
                check_file(entry.zip, zipped, zipped)


def _missing(name: str) -> StoreError:
    return StoreError(f"{name} is missing, and the index names it: the dataset is unfinished or damaged")


def check_file(file: ShardFile, path: str, name: str) -> bytes:
    """The bytes of a file.

    Args:
        file: What it must be.
        path: Where it is.
        name: What errors call it.

    Raises:
        StoreError: It is missing, of another size, or has other hashes.
    """
    try:
        with open(path, "rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            if size != file.bytes:
                raise StoreError(f"{name} is damaged: {size:,} bytes of {file.bytes:,}; fetch or write it anew")
            data = opened.read()
    except FileNotFoundError:
        raise _missing(name) from None
    if wrong := wrong_hash(file.hashes, data):
        raise StoreError(f"{name} is damaged: {wrong}; fetch or write it anew")
    return data


class Ahead:
    """A shard that is being opened in a thread of its own, and held once it is.

    Args:
        open_shard: Opens it.
        number: Its number.
    """

    def __init__(self, open_shard: Callable[[int], Shard], number: int) -> None:
        self.number = number
        self._shard: list[Shard] = []
        self._thread = threading.Thread(
            target=_open_quietly, args=(open_shard, number, self._shard), name="stream_dataloader shard", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until it is open, or could not be; who opens it then gets it, or the error."""
        self._thread.join()


def _open_quietly(open_shard: Callable[[int], Shard], number: int, opened: list[Shard]) -> None:
    with suppress(Exception):  # the reader meets it again, and says where
        opened.append(open_shard(number))
