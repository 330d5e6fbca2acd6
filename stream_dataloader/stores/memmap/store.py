"""Reads a memory-mapped store.

A packed store, see `packed`; `start` counts all streams' steps, and besides there are ::

    streams.bin    more rows: CRC-32 (zlib) of a stream's bytes, a row for each leaf
    0.bin ...      a leaf's steps: C order, little-endian, nothing between them

Guarantee: opening takes the time and memory of a few pages.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, ClassVar

import numpy as np

from stream_dataloader._items.structure import LEAF, Node, flatten
from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.files import in_folder
from stream_dataloader.stores._base.leaves import leaf_names
from stream_dataloader.stores._base.options import given_columns, given_options, renamed
from stream_dataloader.stores._base.rows import RowSteps
from stream_dataloader.stores.memmap.mapped import LeafFile, Pieces, RemoteLeaf
from stream_dataloader.stores.memmap.packed import ROWS, PackedIndex, PackedStore, check_sizes
from stream_dataloader.streams._media.section import whole_number
from stream_dataloader.streams.cache.file_cache import FileCache, is_url

__all__ = ["KIND", "MemmapStore", "leaf_file"]

KIND = "memmap store"

_CHECKED_AT_ONCE_BYTES = 1 << 22


def leaf_file(leaf: int) -> str:
    """Its name."""
    return f"{leaf}.bin"


class MemmapStore(PackedStore):
    """A memory-mapped store, as `stores.pack` writes it.

    Args:
        path: Its folder, or the URL of one, of any protocol that fsspec knows.
        columns: Names of the leaves to read of items that are dicts; None reads all.
        cache: Where pieces of remote files are kept; None is as for `FileCache`.
        predownload: How many more pieces of each leaf an open stream has fetched ahead.
    """

    format: ClassVar[str] = "memmap"

    @renamed(leaves="columns")
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        columns: Sequence[str] | None = None,
        cache: FileCache | None = None,
        predownload: int = 1,
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
        """Compare a stream with its checksums."""
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
    """Has the files of all leaves."""

    kind: ClassVar[str] = KIND

    def _read_own(self, folder: str, content: Mapping[str, Any]) -> int:
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
