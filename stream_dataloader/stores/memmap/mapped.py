"""Steps that lie end to end in flat files, a file for each leaf: mapped, or fetched in pieces.

Guarantee: a window is copied once. A file that is cut off or written to meanwhile is an error, not a crash.
"""

from __future__ import annotations

import mmap
import os
import pathlib
import weakref
from typing import Any

import numpy as np

from stream_dataloader._items.layout import as_array
from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.files import damage_named
from stream_dataloader.stores._base.leaves import LeafSpec, owned
from stream_dataloader.stores._base.shards import ShardReader, Shards
from stream_dataloader.stores._base.store import replaced
from stream_dataloader.streams._media.section import KnownFile
from stream_dataloader.streams.cache.file_cache import FileCache, LocalFile

__all__ = ["LeafFile", "Pieces", "RemoteLeaf"]

#: So much of a file is fetched at a time, or one step.
_PIECE_BYTES = 8 << 20


class LeafFile:
    """A leaf's file, mapped; a `tables.Table`. It may be inherited by fork.

    `rows` are all steps; see `check_size` and `check`.
    """

    def __init__(self, path: str, spec: LeafSpec, steps: int, *, exact: bool = True, readahead: bool = True) -> None:
        self.path, self.spec = path, spec
        self._known: KnownFile | None = None
        wanted = steps * spec.step_bytes
        flat: Any = b""
        if wanted or os.path.exists(path):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, descriptor).atexit = False
            known = KnownFile.of(path, descriptor)
            if known.size < wanted or (exact and known.size > wanted):
                raise StoreError(f"{path} is damaged: {known.size:,} bytes of {wanted:,}")
        if wanted:
            self._known = known
            self._map = flat = mmap.mmap(descriptor, wanted, access=mmap.ACCESS_READ)
            if not readahead:
                self._map.madvise(mmap.MADV_RANDOM)
        self.rows = np.frombuffer(flat, spec.stored).reshape(steps, *spec.shape)

    def __len__(self) -> int:
        return len(self.rows)

    def check_size(self) -> None:
        """Called before rows are read: reading behind a mapped file's end is a SIGBUS."""
        if self._known is not None and self._map.size() < self._known.size:
            self._known.check()

    def check(self) -> None:
        """Called after: raises if they were written to."""
        if self._known is not None:
            self._known.check()

    def row(self, index: int) -> Any:
        """One step, as a copy."""
        self.check_size()
        found = owned(self.rows[index], self.spec.dtype)
        self.check()
        return found

    def read(self, start: int, out: Any) -> None:
        """Write steps `[start, start + len(out))` to `out`."""
        self.check_size()
        as_array(out)[...] = self.rows[start : start + len(out)]
        self.check()


class _Piece(LeafFile):
    def __init__(self, file: LocalFile, spec: LeafSpec, steps: int) -> None:
        super().__init__(file.path, spec, steps)
        self._held = file

    def close(self) -> None:
        self._held.close()


class RemoteLeaf(Shards[_Piece]):
    """A leaf's file on a server; the store's header has `content` of all, and is `stamp` itself."""

    def __init__(self, url: str, spec: LeafSpec, steps: int, content: str, stamp: str, cache: FileCache) -> None:
        super().__init__()
        self._url, self.spec, self._steps, self._content, self._cache = url, spec, steps, content, cache
        self.piece_steps = max(1, _PIECE_BYTES // max(1, spec.step_bytes))
        with damage_named(url), cache.made(f"{url}#version", f"{content}{stamp}", 64, self._keep_version) as local:
            self._version = pathlib.Path(local.path).read_text()

    def _keep_version(self, path: str) -> None:
        version, size = self._cache.remote(self._url).ask()
        wanted = self._steps * self.spec.step_bytes
        if size not in (None, wanted):
            raise StoreError(f"{self._url} is damaged: {size:,} bytes of {wanted:,}")
        pathlib.Path(path).write_text(version)

    def file(self, number: int) -> LocalFile:
        first = number * self.piece_steps
        start, size = (steps * self.spec.step_bytes for steps in (first, min(self.piece_steps, self._steps - first)))

        def fetch(path: str) -> None:
            content, version, _ = self._cache.remote(self._url).part(start, size)
            if version != self._version:
                raise replaced(self._url)
            pathlib.Path(path).write_bytes(content)

        if not size:
            return LocalFile("")
        with damage_named(self._url):
            return self._cache.made(f"{self._url}#{start}+{size}", self._content, size, fetch)

    def _open(self, number: int) -> _Piece:
        return _Piece(self.file(number), self.spec, min(self.piece_steps, self._steps - number * self.piece_steps))


class Pieces:
    """What one stream reads of a leaf, up to step `stop`; a `tables.Table`."""

    def __init__(self, leaf: RemoteLeaf, stop: int, ahead: int) -> None:
        self._steps = leaf.piece_steps
        self._reader = ShardReader(leaf, ahead, (stop - 1) // self._steps)
        self.close = self._reader.close

    def row(self, index: int) -> Any:
        number, row = divmod(index, self._steps)
        return self._reader.at(number).row(row)

    def read(self, start: int, out: Any) -> None:
        rows = as_array(out)
        while len(rows):
            number, first = divmod(start, self._steps)
            count = min(len(rows), self._steps - first)
            self._reader.at(number).read(first, rows[:count])
            start, rows = start + count, rows[count:]
