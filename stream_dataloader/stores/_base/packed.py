"""Stores that `pack` writes in formats of our own: what is in one, and the factory that reads it.

A store is a folder. ::

    store.json     what there is, and the checksum of each table; its own is `check`
    streams.bin    tables, see `tables`; so are keys.bin and notes.bin
    ...            the format's files, in which the steps are

Guarantee: a header that was read is consistent, and as it was written.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.files import damage_named, read_json
from stream_dataloader.stores._base.leaves import check_names, structure_of
from stream_dataloader.stores._base.packing import StreamRecord, said_in
from stream_dataloader.stores._base.store import Store
from stream_dataloader.stores._base.structure import classes_of
from stream_dataloader.stores._base.tables import KEYS, NOTES, ROWS, STREAMS, Texts, load_table, write_tables

__all__ = ["HEADER", "PackedIndex", "PackedStore", "check_sizes", "finish_store"]

HEADER = "store.json"

_VERSION = 1
_MOST_HEADER_BYTES = 1 << 26
_MOST_STEPS = 1 << 56


def finish_store(
    folder: str,
    kind: str,
    records: Sequence[StreamRecord],
    starts: Sequence[int],
    own: NDArray[np.int64],
    files: Sequence[str],
    **content: Any,
) -> list[str]:
    """Write the tables, with rows of the format's own, and the header; returns all files' names."""
    said = said_in(folder)
    checksums = write_tables(folder, records, starts, own)
    content = {
        "kind": f"stream_dataloader {kind}",
        "version": _VERSION,
        "streams": len(records),
        "checksums": checksums,
        "structure": [said["structure"]] if said else None,
        "leaves": said.get("leaves", []),
        **content,
    }
    with open(os.path.join(folder, HEADER), "w", encoding="utf-8") as file:
        json.dump(content | {"check": _digest(content)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    return [HEADER, *checksums, *files]


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class PackedIndex(Texts):
    """The header and the tables of a store.

    Attributes:
        kind: What the header calls the format.
        structure: Of an item; None if there is no item.
        leaves: An item's leaves, in the structure's order.
        fingerprint: Of all that the store holds.
        table: What streams.bin holds, `(rows, streams)`.
    """

    kind: ClassVar[str]
    version: ClassVar[str] = str(_VERSION)

    def __init__(self, folder: str, classes: dict[str, type], wanted: list[str] | None, *, check: bool) -> None:
        path = os.path.join(folder, HEADER)
        content: dict[str, Any] = read_json(path, dict, _MOST_HEADER_BYTES)
        if content.get("kind") != f"stream_dataloader {self.kind}":
            raise StoreError(f"{path} is not of a {self.kind}: its kind is {content.get('kind')!r}")
        if content.get("version") != _VERSION:
            raise StoreError(
                f"{path} is of version {content.get('version')!r}, and this release reads version {_VERSION}; "
                "pack it anew"
            )
        if content.get("check") != _digest({name: value for name, value in content.items() if name != "check"}):
            raise StoreError(f"{path} is damaged: its checksum is another; pack the store anew")
        with damage_named(path):
            self.structure, self.leaves = structure_of(content, path, classes)
            streams = content["streams"]
            check_sizes(streams, *(size for leaf in self.leaves for size in leaf.shape))
            self.metadata: Mapping[str, Any] = content["metadata"]
            self.fingerprint: str = content["check"]
            rows = len(ROWS) + self._read_own(folder, content)
            checksums = content["checksums"]
            texts = [load_table(os.path.join(folder, name), checksums[name], check) for name in (STREAMS, KEYS, NOTES)]
        self._path = os.path.join(folder, STREAMS)
        check_names(wanted, self.structure, folder)
        table = np.frombuffer(texts[0], "<i8")
        if len(table) != rows * streams:
            raise StoreError(f"{self._path} is damaged: {len(table)} numbers for {streams} streams")
        self.table: NDArray[np.int64] = table.reshape(rows, streams)
        super().__init__(texts[1], self.table[2], texts[2], self.table[3])
        if check and streams:
            for stops, text in zip(self.table[2:4], texts[1:], strict=True):
                if stops[0] < 0 or (np.diff(stops) < 0).any() or stops[-1] > len(text):
                    raise StoreError(f"{self._path} is damaged: it points outside of a file; pack it anew")
            if self.table[0].min() < 0 or self.lengths.min() < 0 or not self._streams_lie_inside():
                raise StoreError(f"{self._path} is damaged: streams lie outside of the store; pack it anew")

    @abstractmethod
    def _read_own(self, folder: str, content: Mapping[str, Any]) -> int:
        """Take what the format has in the header; returns how many rows it has."""

    @abstractmethod
    def _streams_lie_inside(self) -> bool:
        """Whether the table leads to what is there."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Steps of each stream."""
        lengths: NDArray[np.int64] = self.table[1]
        return lengths

    def __len__(self) -> int:
        return int(self.table.shape[1])


def check_sizes(*sizes: Any) -> None:
    """Refuse sizes that no disk can hold."""
    if not all(isinstance(size, int) and 0 <= size < _MOST_STEPS for size in sizes):
        raise ValueError(f"sizes {list(sizes)}")


class PackedStore(Store):
    """A store whose index is a `PackedIndex`."""

    def __init__(self, path: str | os.PathLike[str], **options: Any) -> None:
        super().__init__(path, **options)
        self._classes: dict[str, type] = {}
        self._check_all = True
        structure = self.index.structure
        self._classes = {} if structure is None else classes_of(structure)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_check_all": False}

    def key(self, number: int) -> str:
        return str(self.index.key(self._check_number(number)))

    def metadata(self, number: int) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.index.note(self._check_number(number))
        return found

    def _version(self) -> str:
        return str(self.index.version)

    def _metadata(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.index.metadata
        return found
