"""What the items of an MDS dataset are, and which of its samples are which stream.

Guarantee: finding the streams costs nothing where the dataset or its index tells them; where a column has to be read
for it, that is done once, and kept in the cache.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stream_dataloader._items.structure import Node, flatten, leaf_paths
from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.files import inside, stamp_of
from stream_dataloader.stores._base.structure import from_json
from stream_dataloader.stores.mds.encodings import ArrayEncoding, Encoding, ListEncoding
from stream_dataloader.stores.mds.fetch import Shards
from stream_dataloader.stores.mds.index import INDEX, DatasetIndex, in_folder
from stream_dataloader.stores.mds.kinds import encoding_of
from stream_dataloader.stores.mds.scan import write_key_table, write_length_table
from stream_dataloader.stores.mds.shards import Columns
from stream_dataloader.stores.mds.steps import ItemColumns
from stream_dataloader.stores.mds.table import StreamTable
from stream_dataloader.streams.cache.file_cache import FileCache, is_url

__all__ = ["MdsIndex", "Wanted"]

_COLUMN = "column:"


class Wanted(NamedTuple):
    """What the user asks for; see `MdsStore`."""

    stream: str | None
    columns: list[str] | None
    allow_pickle: bool


class MdsIndex:
    """What is in a dataset, and what its streams are; see `store.Index`.

    Args:
        folder: Of index.json, or its URL.
        found: What index.json says.
        wanted: See `Wanted`.
        classes: See `structure.from_json`.
        cache: Where shards and tables are kept.
        copy: What the cache calls index.json, if it was fetched.
        stamp: See `files.stamp_of`, of index.json.

    Attributes:
        found: index.json.
        kind: What a stream is: "packed", "shard", "sample" or "column:" and a name.
        structure: Of an item.
        columns: That items are made of.
        firsts: The first sample of each shard, and behind them the number of all samples.
        shards: All of them.
        table: Which samples are which stream; None where that is plain.
        lengths: See `Index`.
        fingerprint: See `Index`.
    """

    def __init__(
        self,
        folder: str,
        found: DatasetIndex,
        wanted: Wanted,
        classes: dict[str, type],
        cache: FileCache,
        copy: str,
        stamp: str,
    ) -> None:
        self.found = found
        self._folder, self._cache = folder, cache
        self._name = in_folder(folder, INDEX)
        self.kind = self._kind(wanted.stream)
        self.structure, names = self._items(wanted.columns, classes)
        self._allow_pickle = wanted.allow_pickle
        encodings = {found.names.index(name): self._encoding(name) for name in names}
        places = [found.names.index(name) for name in names]
        self.columns = ItemColumns(self.structure, names, places, [encodings[place] for place in places])
        self.firsts: NDArray[np.int64] = np.cumsum([0, *(shard.samples for shard in found.shards)])
        hashed = all(shard.raw.hashes for shard in found.shards)
        version = hashlib.sha256(f"{found.digest} {'' if hashed else copy}".encode()).hexdigest()[:16]
        columns = Columns(found.names, found.sizes, encodings)
        self.shards = Shards(folder, found, version, columns, cache, stamp)
        self.table, self.lengths = self._streams(version, encodings)
        self._count = len(found.shards) if self.table is None else len(self.table.starts)
        if self.kind == "sample":
            self._count = int(self.firsts[-1])
        self.fingerprint = hashlib.blake2b(f"{found.digest} {self.kind}".encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return self._count

    def _kind(self, asked: str | None) -> str:
        if asked is None:
            return "packed" if "table" in self.found.note else "shard"
        if asked in ("shard", "sample"):
            return asked
        name = asked.removeprefix(_COLUMN)
        self._check_column(name)
        return _COLUMN + name

    def _check_column(self, name: str) -> None:
        if name not in self.found.names:
            raise StoreError(f"{self._name} has no column {shorten(name)}; it has {list(self.found.names)}")

    def _items(self, wanted: list[str] | None, classes: dict[str, type]) -> tuple[Node, list[str]]:
        """The structure of an item, and the columns that are its leaves."""
        found = self.found
        for name in wanted or ():
            self._check_column(name)
        if wanted is not None and (not wanted or len(set(wanted)) < len(wanted)):
            raise StoreError(f"columns is {wanted}; name one or more of {list(found.names)}, each once")
        if wanted is None and (packed := found.note.get("items")) is not None:
            try:
                structure, names = (
                    from_json(packed["structure"], self._name, classes),
                    list(map(str, packed["columns"])),
                )
                if len(leaf_paths(structure)) != len(names) or not set(names) <= set(found.names):
                    raise ValueError(f"leaves {names}")
            except (KeyError, TypeError, ValueError) as error:
                raise StoreError(f"{self._name} does not say what items are ({error}); pack the store anew") from error
            return structure, names
        hidden = (found.note.get("key"), self.kind.removeprefix(_COLUMN) if self.kind.startswith(_COLUMN) else None)
        names = wanted or [name for name in found.names if name not in hidden] or list(found.names)
        structure, names = flatten({name: name for name in names})
        return structure, names

    def _encoding(self, name: str) -> Encoding:
        """How a column is encoded."""
        place = self.found.names.index(name)
        try:
            encoding = encoding_of(self.found.encodings[place], allow_pickle=self._allow_pickle)
        except ValueError as error:
            raise StoreError(f"{self._name}, column {name!r}: {error}; or leave it out, by columns=[...]") from None
        if (encoding.size or None) != (self.found.sizes[place] or None):
            raise StoreError(
                f"{self._name}, column {name!r}: its values have {self.found.sizes[place]} bytes, and "
                f"{self.found.encodings[place]!r} has {encoding.size}; write the dataset anew"
            )
        if name in self.found.note.get("bools", ()) and isinstance(encoding, ArrayEncoding):
            encoding.as_bool()
        return encoding

    def _streams(
        self, version: str, encodings: dict[int, Encoding]
    ) -> tuple[StreamTable | None, NDArray[np.int64] | None]:
        """The table of streams, and their lengths; None where there is none."""
        total = int(self.firsts[-1])
        if self.kind == "shard":
            return None, np.diff(self.firsts)
        if self.kind == "packed":
            return self._packed_table(total)
        if self.kind == "sample":
            return self._sample_table(total, version)
        return self._column_table(total, version, encodings)

    def _sample_table(self, total: int, version: str) -> tuple[StreamTable | None, NDArray[np.int64] | None]:
        pairs = zip(self.columns.places, self.columns.encodings, strict=True)
        place, encoding = next(((place, one) for place, one in pairs if _is_rows(one)), (None, None))
        if place is None or encoding is None:
            raise StoreError(f"{self._name}: no column of {self.columns.names} is an array or a list, for time steps")
        if isinstance(encoding, ArrayEncoding) and encoding.shape:
            return None, np.full(total, encoding.shape[0], np.int64)
        if is_url(self._folder):
            return None, None  # to know them, all of it would have to be fetched
        count = len(self.found.shards)
        make = functools.partial(write_length_table, shards=self.shards, count=count, place=place, encoding=encoding)
        table = self._made_table(version, make, None)
        return table, table.steps

    def _column_table(
        self, total: int, version: str, encodings: dict[int, Encoding]
    ) -> tuple[StreamTable, NDArray[np.int64]]:
        name = self.kind.removeprefix(_COLUMN)
        place = self.found.names.index(name)
        key = encodings.setdefault(place, self._encoding(name))  # the shards' columns have it, too
        if not _is_key(key, self.found.encodings[place]):
            raise StoreError(
                f"{self._name}: the column {name!r} is {self.found.encodings[place]!r}, and streams are named by text "
                "or whole numbers"
            )
        count = len(self.found.shards)
        scan = functools.partial(write_key_table, shards=self.shards, count=count, place=place, encoding=key)
        table = self._made_table(version, scan, total)
        return table, table.steps

    def _packed_table(self, total: int) -> tuple[StreamTable, NDArray[np.int64]]:
        note = self.found.note["table"]
        try:
            basename, check = note["basename"], int(note["check"])
        except (KeyError, TypeError, ValueError):
            raise StoreError(f"{self._name} does not say where its streams are; pack the store anew") from None
        inside(self._folder, basename, self._name)
        with self._cache.open(in_folder(self._folder, basename)) as local:
            table = StreamTable(local.path, total)
        if table.check != check:
            raise StoreError(f"{local.path} is damaged, or of another store: its checksum is another; pack it anew")
        return table, table.steps

    def _made_table(self, version: str, make: Callable[[str], None], most: int | None) -> StreamTable:
        """A table that is made once, and kept in the cache."""
        files = (
            () if is_url(self._folder) else (file for one in self.found.shards for file in (one.raw, one.zip) if file)
        )
        stamp = stamp_of(in_folder(self._folder, file.basename) for file in files)  # of the shards that are here
        found = hashlib.sha256(f"{version} {stamp}".encode()).hexdigest()[:16]
        name = f"{os.path.abspath(self._folder) if not is_url(self._folder) else self._folder}#{self.kind}.streams"
        size = 64 + 64 * int(self.firsts[-1])
        try:
            with self._cache.made(name, found, size, make) as local:
                return StreamTable(local.path, most)
        except ValueError as error:
            raise StoreError(f"{self._folder}: {error}") from error

    def extent(self, number: int) -> tuple[int, int]:
        """A stream's first sample, and how many there are."""
        if self.table is None:
            return int(self.firsts[number]), int(self.firsts[number + 1] - self.firsts[number])
        return int(self.table.starts[number]), int(self.table.steps[number])

    def key(self, number: int) -> str:
        """A stream's name."""
        if self.table is not None:
            return self.table.key(number)
        return self.found.shards[number].raw.basename if self.kind == "shard" else str(number)


def _is_rows(encoding: Encoding) -> bool:
    return isinstance(encoding, ListEncoding) or (isinstance(encoding, ArrayEncoding) and encoding.shape != ())


def _is_key(encoding: Encoding, name: str) -> bool:
    if isinstance(encoding, ArrayEncoding):
        return encoding.shape == () and encoding.dtype is not None and encoding.dtype.kind in "iu"
    return name in ("str", "bytes", "str_int", "str_decimal", "json")
