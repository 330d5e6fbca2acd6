"""Reads a memory-mapped store.

Guarantee: opening takes the time and memory of a few pages, however many streams there are; a window is copied once,
from the map into the batch. A file that is cut off or written to while it is read is an error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from stream_dataloader._items.structure import Node
from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.leaves import check_names, chosen, leaf_names, names_given
from stream_dataloader.stores._base.mapped import LeafFile, MappedSteps
from stream_dataloader.stores._base.packed import PackedIndex
from stream_dataloader.stores._base.store import Store
from stream_dataloader.stores._base.structure import classes_of
from stream_dataloader.stores._base.tables import ROWS, crc_of
from stream_dataloader.stores.memmap.header import VERSION, Header, check_table, leaf_file, load_header

__all__ = ["MemmapStore"]

_CHECKED_AT_ONCE_BYTES = 1 << 22


class MemmapStore(Store):
    """A memory-mapped store, as `stores.pack` writes it; read at the speed of a copy.

    Args:
        path: Its folder.
        leaves: Names of the leaves to read of items that are dicts; None reads all.

    Raises:
        FileNotFoundError: There is no such folder.
        StoreError: The store is unfinished, damaged or of another version, or has no such leaf.
        TypeError: `leaves` is no list of names.
    """

    format: ClassVar[str] = "memmap"

    def __init__(self, path: str | os.PathLike[str], *, leaves: tuple[str, ...] | list[str] | None = None) -> None:
        self._wanted = names_given(leaves)
        super().__init__(path, leaves=self._wanted)
        self._classes: dict[str, type] = {}
        self._check_all = True
        header = self.index.header
        self._classes = {} if header.structure is None else classes_of(header.structure)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_check_all": False}

    def _read_index(self) -> _MemmapIndex:
        if not os.path.isdir(self.path):
            raise FileNotFoundError(f"there is no store at {self.path}; give the folder that stores.pack wrote")
        header = load_header(self.path, self._classes)
        check_names(self._wanted, header.structure, self.path)
        return _MemmapIndex(self.path, header, check_all=self._check_all)

    def _open_steps(self, number: int) -> MappedSteps:
        index: _MemmapIndex = self.index
        start, steps = int(index.table[0, number]), int(index.table[1, number])
        if not 0 <= start <= start + steps <= index.header.steps:  # a worker has not checked all of the table
            raise StoreError(f"{self.path}: stream {number} lies outside of the store's steps; pack it anew")
        return MappedSteps(*self._chosen(), start, steps)

    def _chosen(self) -> tuple[Node | None, Sequence[LeafFile]]:
        """The structure of items, and their leaves."""
        index: _MemmapIndex = self.index
        return chosen(self._wanted, index.header.structure, index.files)

    def key(self, number: int) -> str:
        return str(self.index.key(self._check_number(number)))

    def metadata(self, number: int) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.index.tables.note(self._check_number(number))
        return found

    def _version(self) -> str:
        return str(VERSION)

    def _metadata(self) -> Mapping[str, Any]:
        metadata: Mapping[str, Any] = self.index.header.metadata
        return metadata

    def _leaves(self) -> dict[str, str]:
        structure, files = self._chosen()
        return dict(zip(leaf_names(structure), map(str, files), strict=True))

    def check_stream(self, number: int) -> None:
        """Compare a stream with its checksums."""
        index: _MemmapIndex = self.index
        start, steps = int(index.table[0, number]), int(index.table[1, number])
        for leaf, (spec, name) in enumerate(zip(index.header.leaves, index.header.names, strict=True)):
            crc, file = 0, index.files[leaf]
            at_once = max(1, _CHECKED_AT_ONCE_BYTES // max(1, spec.step_bytes))
            for first in range(start, start + steps, at_once):
                file.check_size()
                crc = crc_of(file.rows[first : min(first + at_once, start + steps)], crc)
                file.check()
            if crc != index.table[len(ROWS) + leaf, number]:
                raise StoreError(f"{self.name_of(number)}: {name} is damaged, its checksum is another; pack it anew")


class _MemmapIndex(PackedIndex[Header]):
    """The tables of a store, and the maps of its leaves; inherited by fork, mapped anew otherwise."""

    def __init__(self, path: str, header: Header, *, check_all: bool) -> None:
        super().__init__(path, header, len(header.leaves), check=check_all)
        if check_all:
            check_table(self.table, header, self.tables.path)
        self.files = [
            LeafFile(os.path.join(path, leaf_file(leaf)), spec, header.steps) for leaf, spec in enumerate(header.leaves)
        ]
