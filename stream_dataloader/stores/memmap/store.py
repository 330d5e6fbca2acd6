"""Reading of a memory-mapped store.

A packed store is described in `packed`; `start` counts the steps of all streams. It also has ::

    streams.bin    more rows: CRC-32 (zlib) of a stream's bytes, a row for each leaf
    0.bin ...      a leaf's steps: C order, little-endian, without gaps

These files are mapped, or fetched from a server in pieces.

Guarantee: opening takes the time and memory of a few pages. A window is copied once.
A file that is cut off or written to while it is read raises an error, and does not crash the process.
"""

from __future__ import annotations

import mmap
import os
import pathlib
import weakref
import zlib
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, ClassVar

import numpy as np

from stream_dataloader._engine.descriptors import above_standard
from stream_dataloader._engine.items.layout import as_array
from stream_dataloader._engine.items.structure import LEAF, Node, flatten
from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.files import damage_named, in_folder
from stream_dataloader.stores._base.formats import given_columns, given_options
from stream_dataloader.stores._base.handles import ShardReader, Shards
from stream_dataloader.stores._base.leaves import LeafSpec, leaf_names, owned
from stream_dataloader.stores._base.rows import RowSteps
from stream_dataloader.stores._base.store import replaced
from stream_dataloader.stores.memmap.packed import ROWS, PackedIndex, PackedStore, check_sizes
from stream_dataloader.streams._media.section import KnownFile, whole_number
from stream_dataloader.streams.cache import FileCache, LocalFile, is_url
from stream_dataloader.streams.cache.gate import Files

__all__ = ["KIND", "LeafFile", "MemmapStore", "leaf_file"]

KIND = "memmap store"

_CHECKED_AT_ONCE_BYTES = 1 << 22

#: Bytes of a file that are fetched at a time, or one step if it is larger.
_PIECE_BYTES = 8 << 20


def leaf_file(leaf: int) -> str:
    """Return the name of a leaf's file."""
    return f"{leaf}.bin"


class MemmapStore(PackedStore):
    """Memory-mapped store, as `stores.pack` writes it.

    Args:
        path: Folder of the store, or its URL by any protocol that fsspec knows.
        columns: Names of the leaves to read from items that are dicts; None reads all.
        cache: Cache for pieces of remote files; None is the cache that all streams share.
        predownload: Number of further pieces of each leaf that are fetched in advance.
        files: Files that links in the folder may lead to: `"inside"` it, or `"anywhere"`.
    """

    format: ClassVar[str] = "memmap"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        columns: Sequence[str] | None = None,
        cache: FileCache | None = None,
        predownload: int = 1,
        files: Files = "inside",
    ) -> None:
        predownload = whole_number("predownload", predownload, "give a number of pieces from 0 on", 0)
        super().__init__(path, **given_options(locals(), columns=given_columns(columns)))

    def _read_index(self) -> _Index:
        if not is_url(self.path) and not os.path.isdir(self.path):
            raise FileNotFoundError(f"there is no store at {self.path}; give one that stores.pack wrote")
        options = self._options
        return _Index(self.path, self._classes, options["columns"], check=self._check_all, cache=options["cache"])

    def _open_steps(self, number: int) -> RowSteps:
        index: _Index = self.index
        return self._rows(number, index.item or flatten({})[0], [index.files[leaf] for leaf in index.places])

    def _rows(self, number: int, item: Node, files: Sequence[Any]) -> RowSteps:
        index: _Index = self.index
        start, steps = int(index.table[0, number]), int(index.table[1, number])
        if not 0 <= start <= start + steps <= index.steps:
            raise StoreError(f"{self.path}: stream {number} lies outside of the store")
        if not is_url(self.path):
            return RowSteps(item, files, steps, first=start)
        pieces = [Pieces(file, start + steps, self._options["predownload"]) for file in files]
        return RowSteps(item, pieces, steps, first=start, close=lambda: [one.close() for one in pieces])

    def check_stream(self, number: int) -> None:
        index: _Index = self.index
        for leaf, (file, name) in enumerate(zip(index.files, leaf_names(index.structure), strict=True)):
            crc, spec = 0, file.spec
            at_once = max(1, _CHECKED_AT_ONCE_BYTES // max(1, spec.step_bytes))
            with closing(self._rows(number, LEAF, [file])) as steps:
                room = np.empty((min(at_once, len(steps)), *spec.shape), spec.stored)
                for first in range(0, len(steps), at_once):
                    rows = room[: len(steps) - first]
                    steps.read(first, rows)
                    crc = zlib.crc32(rows.data, crc)
            if crc != index.table[ROWS + leaf, number]:
                raise StoreError(f"{self.name_of(number)}: {name} is damaged: checksum mismatch")


class _Index(PackedIndex):
    """Index with the files of all leaves."""

    kind: ClassVar[str] = KIND

    def _read_format(self, folder: str, content: Mapping[str, Any]) -> int:
        check_sizes(content["steps"])
        self.steps: int = content["steps"]
        self.files: list[Any] = []
        for leaf, spec in enumerate(self.leaves):
            path, steps = in_folder(folder, leaf_file(leaf)), self.steps
            if is_url(path):
                self.files.append(RemoteLeaf(path, spec, steps, self.fingerprint, self.stamp, self._cache))
            else:
                self.files.append(LeafFile(path, spec, steps))
        return len(self.files)

    def _streams_lie_inside(self) -> bool:
        return bool((self.table[0] + self.lengths).max() <= self.steps)


class LeafFile:
    """Mapped file of a leaf; a `tables.Table`. It may be inherited by fork.

    `rows` are all steps. Call `check_size` before reading them, and `check` after.
    """

    def __init__(self, path: str, spec: LeafSpec, steps: int, *, exact: bool = True, readahead: bool = True) -> None:
        self.path, self.spec = path, spec
        self._known: KnownFile | None = None
        wanted = steps * spec.step_bytes
        flat: Any = b""
        if wanted or os.path.exists(path):
            with above_standard():
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, descriptor).atexit = False
            known = KnownFile.of(path, descriptor)
            if known.size < wanted or (exact and known.size > wanted):
                raise StoreError(f"{path} is damaged: {known.size:,} bytes of {wanted:,}")
        if wanted:
            self._known = known
            with above_standard():  # mmap duplicates the descriptor
                self._map = flat = mmap.mmap(descriptor, wanted, access=mmap.ACCESS_READ)
            if not readahead:
                self._map.madvise(mmap.MADV_RANDOM)
        self.rows = np.frombuffer(flat, spec.stored).reshape(steps, *spec.shape)

    def __len__(self) -> int:
        return len(self.rows)

    def check_size(self) -> None:
        """Raise if the file became shorter. Call this before a read: reading beyond a mapped file's end is a SIGBUS."""
        if self._known is not None and self._map.size() < self._known.size:
            self._known.check()

    def check(self) -> None:
        """Raise if the rows were written to. Call this after a read."""
        if self._known is not None:
            self._known.check()

    def row(self, index: int) -> Any:
        self.check_size()
        found = owned(self.rows[index], self.spec.dtype)
        self.check()
        return found

    def read(self, start: int, out: Any) -> None:
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
    """File of a leaf on a server; `content` and `stamp` are those of the store's header."""

    def __init__(self, url: str, spec: LeafSpec, steps: int, content: str, stamp: str, cache: FileCache) -> None:
        super().__init__()
        self._url, self.spec, self._steps, self._content, self._cache = url, spec, steps, content, cache
        self.piece_steps = max(1, _PIECE_BYTES // max(1, spec.step_bytes))
        kept = f"{url}#version", f"{content}{stamp}"
        with damage_named(url), cache.made(*kept, 64, self._keep_version) as local:
            self._version = pathlib.Path(local.path).read_text()

    def _keep_version(self, path: str) -> None:
        version, size = self._cache.remote(self._url).ask()
        wanted = self._steps * self.spec.step_bytes
        if size not in (None, wanted):
            raise StoreError(f"{self._url} is damaged: {size:,} bytes of {wanted:,}")
        pathlib.Path(path).write_text(version)

    def file(self, number: int) -> LocalFile:
        first = number * self.piece_steps
        count = min(self.piece_steps, self._steps - first)
        start, size = first * self.spec.step_bytes, count * self.spec.step_bytes

        def fetch(path: str) -> None:
            content, version, _ = self._cache.remote(self._url).part(start, size)
            if version != self._version:
                raise replaced(self._url)
            pathlib.Path(path).write_bytes(content)

        if not size:
            return LocalFile("")
        with damage_named(self._url):
            return self._cache.made(f"{self._url}#{start}+{size}", self._content, size, fetch)

    def _opened(self, number: int) -> _Piece:
        return _Piece(self.file(number), self.spec, min(self.piece_steps, self._steps - number * self.piece_steps))


class Pieces:
    """Pieces of a leaf that one stream reads, up to step `stop`; a `tables.Table`."""

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
