"""Stores that `pack` writes in this library's own formats, and the factory that reads them.

A store is a folder. ::

    store.json     description, and the checksum of each table; its own is `check`
    streams.bin    a table, int64, little-endian, row after row, a column for each stream
                     start       first step, or another start that the format defines
                     steps       number of steps
                     key_stop    end of its key in keys.bin
                     note_stop   end of its metadata in notes.bin
                     ...         further rows of the format
    keys.bin       all streams' keys, UTF-8, end to end
    notes.bin      all streams' metadata, JSON, end to end
    ...            the format's files with the steps

Guarantee: a header that was changed raises an error. Opening takes the memory of a few pages.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from stream_dataloader._engine.descriptors import above_standard
from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.files import damage_named, hashed, in_folder, read_json, write_synced
from stream_dataloader.stores._base.leaves import chosen, classes_of, structure_of
from stream_dataloader.stores._base.packing import StreamRecord, said_in
from stream_dataloader.stores._base.store import Store
from stream_dataloader.streams._media.limits import Limits, check_empty_rows
from stream_dataloader.streams.cache import FileCache, is_url

__all__ = [
    "HEADER",
    "ROWS",
    "PackedIndex",
    "PackedStore",
    "StreamTables",
    "Texts",
    "check_sizes",
    "encoded",
    "finish_store",
]

HEADER = "store.json"

#: Number of rows of streams.bin before those of the format.
ROWS = 4

_TABLES = ("streams.bin", "keys.bin", "notes.bin")
_VERSION = 1
_MOST_STEPS = 1 << 56


def finish_store(
    folder: str,
    kind: str,
    records: Sequence[StreamRecord],
    starts: Sequence[int],
    own: NDArray[np.int64],
    files: Sequence[str],
    *,
    header: str = HEADER,
    **content: Any,
) -> list[str]:
    """Write the tables and the header; return all files, the header last."""
    keys, notes, stops = encoded([record.key for record in records], [record.metadata for record in records])
    table = np.array([starts, [record.steps for record in records], *stops, *own], "<i8")
    tables = dict(zip(_TABLES, (table.tobytes(), keys, notes), strict=True))
    said = said_in(folder)
    content = {
        "kind": f"stream_dataloader {kind}",
        "version": _VERSION,
        "streams": len(records),
        "checksums": {name: [zlib.crc32(data), len(data)] for name, data in tables.items()},
        "structure": [said["structure"]] if said else None,
        "leaves": said.get("leaves", []),
        **content,
    }
    tables[header] = json.dumps(content | {"check": _digest(content)}, indent=1).encode()
    for name, data in tables.items():
        write_synced(os.path.join(folder, name), data)
    return [*files, *tables]


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, ensure_ascii=True)
    return hashed(text)


def encoded(keys: Iterable[str], notes: Iterable[Mapping[str, Any]]) -> tuple[bytes, bytes, NDArray[np.int64]]:
    """Encode keys and metadata; return both, and the end of each, `(2, streams)`."""
    texts = [key.encode("utf-8", "backslashreplace") for key in keys]
    jsons = [json.dumps(note).encode() if note else b"" for note in notes]
    stops: NDArray[np.int64] = np.cumsum([list(map(len, texts)), list(map(len, jsons))], axis=1, dtype=np.int64)
    return b"".join(texts), b"".join(jsons), stops


class Texts:
    """Keys and metadata of all streams, end to end, with the end of each."""

    def __init__(self, keys: Any, key_stops: NDArray[np.int64], notes: Any, note_stops: NDArray[np.int64]) -> None:
        self._keys, self._notes = (keys, key_stops), (notes, note_stops)

    def key(self, number: int) -> str:
        return _part(*self._keys, number).decode("utf-8", "backslashreplace")

    def note(self, number: int) -> Mapping[str, Any]:
        text = _part(*self._notes, number)
        found: Mapping[str, Any] = json.loads(text) if text else {}
        return found


def _part(text: Any, stops: NDArray[np.int64], number: int) -> bytes:
    begin = int(stops[number - 1]) if number else 0
    return bytes(text[begin : int(stops[number])])


def _load_table(name: str, checksum: Sequence[int], check: bool, cache: FileCache) -> Any:
    crc, size = checksum
    with damage_named(name), cache.open(name) as local, open(local.path, "rb") as file:
        found = os.fstat(file.fileno()).st_size
        if found != size:
            raise StoreError(f"{name} is damaged: {found:,} bytes of {size:,}")
        with above_standard():  # mmap duplicates the descriptor
            mapped: Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    if check and zlib.crc32(mapped) != crc:
        raise StoreError(f"{name} is damaged: checksum mismatch")
    return mapped


class StreamTables(Texts):
    """Header and tables of a store: `table` is streams.bin, `(rows, streams)`.

    `stamp` is the version of the header on its server.
    """

    kind: ClassVar[str]
    header: ClassVar[str] = HEADER
    version: ClassVar[str] = str(_VERSION)

    def __init__(self, folder: str, *, check: bool, cache: FileCache | None = None) -> None:
        path, self._cache = in_folder(folder, self.header), cache or FileCache()
        check = check or is_url(folder)  # from a server, another process may have fetched other tables
        with self._cache.open(path) as local:
            content: dict[str, Any] = read_json(local.path, dict, path)
            self.stamp = os.path.basename(local.path).partition("-")[0]
        found = content.get("kind"), content.get("version")
        if found != (f"stream_dataloader {self.kind}", _VERSION):
            raise StoreError(f"{path} is not of a {self.kind}, version {_VERSION}, but of {found}")
        if content.get("check") != _digest({name: value for name, value in content.items() if name != "check"}):
            raise StoreError(f"{path} is damaged: its checksum is another; pack the store again")
        with damage_named(path):
            streams = content["streams"]
            check_sizes(streams)
            self.metadata: Mapping[str, Any] = content["metadata"]
            self.fingerprint: str = content["check"]
            rows = ROWS + self._read_own(folder, content)
            checksums = content["checksums"]
            texts = [_load_table(in_folder(folder, name), checksums[name], check, self._cache) for name in _TABLES]
        table = np.frombuffer(texts[0], "<i8")
        if len(table) != rows * streams:
            raise StoreError(f"{path} is damaged: {len(table)} numbers of {streams} streams")
        self.table: NDArray[np.int64] = table.reshape(rows, streams)
        super().__init__(texts[1], self.table[2], texts[2], self.table[3])
        if check and streams:
            outside = self.table[:2].min() < 0 or not self._streams_lie_inside()
            for stops, text in zip(self.table[2:4], texts[1:], strict=True):
                outside |= stops[0] < 0 or (np.diff(stops) < 0).any() or stops[-1] > len(text)
            if outside:
                raise StoreError(f"{path} is damaged: its table points outside of the store")

    @abstractmethod
    def _read_own(self, folder: str, content: Mapping[str, Any]) -> int:
        """Read what else the header has; return the number of further rows of the table."""

    @abstractmethod
    def _streams_lie_inside(self) -> bool: ...

    @property
    def lengths(self) -> NDArray[np.int64]:
        lengths: NDArray[np.int64] = self.table[1]
        return lengths

    def __len__(self) -> int:
        return int(self.table.shape[1])


class PackedIndex(StreamTables):
    """Index of a store whose items have leaves of numbers.

    `structure` and `leaves` describe packed items; `item` and `places` describe the items that are read.
    """

    def __init__(
        self,
        folder: str,
        classes: dict[str, type],
        wanted: list[str] | None,
        *,
        check: bool,
        cache: FileCache | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._classes, self._limits = classes, limits
        super().__init__(folder, check=check, cache=cache)
        self.item, self.places = chosen(wanted, self.structure, folder)
        if not any(leaf.step_bytes for leaf in self.leaves):
            check_empty_rows(int(self.lengths.sum()), 0, in_folder(folder, self.header))

    def _read_own(self, folder: str, content: Mapping[str, Any]) -> int:
        self.structure, self.leaves = structure_of(content, in_folder(folder, self.header), self._classes)
        check_sizes(*(size for leaf in self.leaves for size in leaf.shape))
        return self._read_format(folder, content)

    @abstractmethod
    def _read_format(self, folder: str, content: Mapping[str, Any]) -> int:
        """Read the format's own part of the header; return the number of its rows."""


def check_sizes(*sizes: Any) -> None:
    """Raise for sizes that no disk can hold."""
    if not all(isinstance(size, int) and 0 <= size < _MOST_STEPS for size in sizes):
        raise ValueError(f"sizes {list(sizes)}")


class PackedStore(Store):
    """Base of stores whose index is a `PackedIndex`."""

    def __init__(self, path: str | os.PathLike[str], **options: Any) -> None:
        super().__init__(path, **options)
        self._classes: dict[str, type] = {}
        self._check_all = True
        structure = self.index.structure
        self._classes = {} if structure is None else classes_of(structure)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_check_all": False}
