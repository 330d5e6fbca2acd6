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
from typing import Any, ClassVar

from stream_dataloader._items.structure import flatten
from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.leaves import leaf_names
from stream_dataloader.stores._base.options import given_columns, renamed
from stream_dataloader.stores._base.rows import RowSteps
from stream_dataloader.stores.memmap.mapped import LeafFile
from stream_dataloader.stores.memmap.packed import ROWS, PackedIndex, PackedStore, check_sizes

__all__ = ["KIND", "MemmapStore", "leaf_file"]

KIND = "memmap store"

_CHECKED_AT_ONCE_BYTES = 1 << 22


def leaf_file(leaf: int) -> str:
    """Its name."""
    return f"{leaf}.bin"


class MemmapStore(PackedStore):
    """A memory-mapped store, as `stores.pack` writes it.

    Args:
        path: Its folder.
        columns: Names of the leaves to read of items that are dicts; None reads all.
    """

    format: ClassVar[str] = "memmap"

    @renamed(leaves="columns")
    def __init__(self, path: str | os.PathLike[str], *, columns: Sequence[str] | None = None) -> None:
        self._wanted = given_columns(columns)
        super().__init__(path, columns=self._wanted)

    def _read_index(self) -> _Index:
        if not os.path.isdir(self.path):
            raise FileNotFoundError(f"there is no store at {self.path}; give one that stores.pack wrote")
        return _Index(self.path, self._classes, self._wanted, check=self._check_all)

    def _open_steps(self, number: int) -> RowSteps:
        index: _Index = self.index
        start, steps = int(index.table[0, number]), int(index.table[1, number])
        if not 0 <= start <= start + steps <= index.steps:
            raise StoreError(f"{self.path}: stream {number} lies outside of the store")
        return RowSteps(index.item or flatten({})[0], [index.files[leaf] for leaf in index.places], steps, first=start)

    def check_stream(self, number: int) -> None:
        """Compare a stream with its checksums."""
        index: _Index = self.index
        start, steps = int(index.table[0, number]), int(index.table[1, number])
        for leaf, (file, name) in enumerate(zip(index.files, leaf_names(index.structure), strict=True)):
            crc = 0
            at_once = max(1, _CHECKED_AT_ONCE_BYTES // max(1, file.spec.step_bytes))
            for first in range(start, start + steps, at_once):
                file.check_size()
                crc = zlib.crc32(file.rows[first : min(first + at_once, start + steps)].data, crc)
                file.check()
            if crc != index.table[ROWS + leaf, number]:
                raise StoreError(f"{self.name_of(number)}: {name} is damaged: checksum mismatch")


class _Index(PackedIndex):
    """Has the maps of all leaves."""

    kind: ClassVar[str] = KIND

    def _read_own(self, folder: str, content: Mapping[str, Any]) -> int:
        check_sizes(content["steps"])
        self.steps: int = content["steps"]
        self.files = []
        for leaf, spec in enumerate(self.leaves):
            path = os.path.join(folder, leaf_file(leaf))
            self.files.append(LeafFile(path, spec, self.steps))
        return len(self.files)

    def _streams_lie_inside(self) -> bool:
        return bool((self.table[0] + self.lengths).max() <= self.steps)
