"""What the items of an MDS dataset are, and which of its samples are which stream.

Guarantee: opening takes the time and memory of a few pages, however many streams there are, if the dataset or its index
tells the streams; a pass over a column is made once by all processes, and kept.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from stream_dataloader._items.structure import Node, flatten
from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.files import inside, stamp_of
from stream_dataloader.stores._base.structure import from_json
from stream_dataloader.stores.mds.encodings import ArrayEncoding
from stream_dataloader.stores.mds.fetch import Shards
from stream_dataloader.stores.mds.index import INDEX, DatasetIndex, in_folder
from stream_dataloader.stores.mds.pictures import encoding_of
from stream_dataloader.stores.mds.shards import Column
from stream_dataloader.stores.mds.table import StreamTable, write_lengths, write_runs
from stream_dataloader.streams.cache.file_cache import FileCache, is_url

__all__ = ["MdsIndex"]

_COLUMN = "column:"
_KEYS = ("str", "bytes", "str_int", "str_decimal", "json")


class MdsIndex:
    """What is in a dataset, and what its streams are; see `store.Index`.

    Attributes:
        found: index.json.
        kind: What a stream is: "packed", "shard", "sample" or "column:" and a name.
        structure: Of an item.
        columns: Its leaves.
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
        stream: str | None,
        columns: list[str] | None,
        decoding: Mapping[str, bool],
        classes: dict[str, type],
        cache: FileCache,
        stamp: str,
    ) -> None:
        self.found = found
        self._folder, self._cache, self._decoding = folder, cache, decoding
        self._name = in_folder(folder, INDEX)
        self._key = (stream or "").removeprefix(_COLUMN)
        self.kind = stream or ("packed" if "table" in found.note else "shard")
        if self.kind not in ("packed", "shard", "sample"):
            self.kind = _COLUMN + self._key
        self.structure, self.columns = self._items(columns, classes)
        self.firsts: NDArray[np.int64] = np.cumsum([0, *(shard.samples for shard in found.shards)])
        hashed = all(shard.raw.hashes for shard in found.shards)
        replaceable = not hashed and is_url(folder)
        version = hashlib.sha256(f"{found.digest} {stamp if replaceable else ''}".encode()).hexdigest()[:16]
        self.shards = Shards(folder, found, version, cache, stamp)
        self.table, self.lengths = self._streams(version)
        self._count = len(self.firsts) - 1 if self.table is None else len(self.table.starts)
        if self.kind == "sample":
            self._count = int(self.firsts[-1])
        self.fingerprint = hashlib.blake2b(f"{found.digest} {self.kind}".encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return self._count

    def _column(self, name: str) -> Column:
        if name not in self.found.names:
            raise StoreError(f"{self._name} has no column {shorten(name)}; it has {self.found.names}")
        place = self.found.names.index(name)
        try:
            encoding = encoding_of(self.found.encodings[place], **self._decoding)
        except ValueError as error:
            raise StoreError(f"{self._name}, column {name!r}: {error}; or leave it out, by columns=[...]") from None
        if (encoding.size or None) != (self.found.sizes[place] or None):
            raise StoreError(
                f"{self._name}, column {name!r}: its values have {self.found.sizes[place]} bytes, and "
                f"{self.found.encodings[place]!r} has {encoding.size}; write the dataset anew"
            )
        if name in self.found.note.get("bools", ()) and isinstance(encoding, ArrayEncoding):
            encoding.as_bool()
        return Column(name, place, encoding)

    def _items(self, wanted: list[str] | None, classes: dict[str, type]) -> tuple[Node, list[Column]]:
        """The structure of an item, and the columns that are its leaves."""
        note = self.found.note
        if wanted is None and (packed := note.get("items")) is not None:
            structure, names = from_json(packed["structure"], self._name, classes), list(packed["columns"])
        else:
            others = [name for name in self.found.names if name not in (note.get("key"), self._key)]
            names = others or self.found.names if wanted is None else wanted
            structure, names = flatten({name: name for name in names})
        return structure, [self._column(name) for name in names]

    def _streams(self, version: str) -> tuple[StreamTable | None, NDArray[np.int64] | None]:
        """The table of streams, and their lengths; None where there is none."""
        total = int(self.firsts[-1])
        if self.kind == "shard":
            return None, np.diff(self.firsts)
        if self.kind == "packed":
            table = self._packed_table(total)
        elif self.kind == "sample":
            rows = next((column for column in self.columns if column.encoding.is_sequence), None)
            if rows is None:
                names = [column.name for column in self.columns]
                raise StoreError(f"{self._name}: no column of {names} is an array or a list, for time steps")
            if shape := getattr(rows.encoding, "shape", None):
                return None, np.full(total, shape[0], np.int64)
            if is_url(self._folder):
                return None, None  # to know them, all of it would have to be fetched
            table = self._made_table(version, lambda path: write_lengths(path, self.shards.parts(rows), rows), None)
        else:
            key = self._column(self._key)
            kind = self.found.encodings[key.place]
            if kind not in _KEYS and not (kind.lstrip("u").startswith("int") and key.encoding.size):
                raise StoreError(
                    f"{self._name}: the column {key.name!r} is {kind!r}, and streams are named by text or whole numbers"
                )
            table = self._made_table(version, lambda path: write_runs(path, self.shards.parts(key), key, total), total)
        return table, table.steps

    def _packed_table(self, total: int) -> StreamTable:
        said = self.found.note.get("table")
        if said is None:
            raise StoreError(f"{self._name} does not say where its streams are; name what a stream is, by stream=")
        inside(self._folder, said["basename"], self._name)
        with self._cache.open(in_folder(self._folder, said["basename"])) as local:
            table = StreamTable(local.path, total)
        if table.check != said["check"]:
            raise StoreError(f"{local.path} is damaged, or of another store: its checksum is another; pack it anew")
        return table

    def _made_table(self, version: str, make: Callable[[str], None], most: int | None) -> StreamTable:
        """A table that is made once, and kept in the cache."""
        folder, files = self._folder, []
        if not is_url(folder):
            folder = os.path.abspath(folder)
            files = [file for shard in self.found.shards for file in (shard.raw, shard.zip) if file]
        stamp = stamp_of(in_folder(folder, file.basename) for file in files)
        version = hashlib.sha256(f"{version} {stamp}".encode()).hexdigest()[:16]
        try:
            with self._cache.made(f"{folder}#{self.kind}.streams", version, 64 + 64 * int(self.firsts[-1]), make) as at:
                return StreamTable(at.path, most)
        except ValueError as error:
            raise StoreError(f"{self._folder}: {error}") from error

    def extent(self, number: int) -> tuple[int, int]:
        """A stream's first sample, and how many there are."""
        if self.kind == "sample":
            return number, 1
        if self.table is None:
            return int(self.firsts[number]), int(self.firsts[number + 1] - self.firsts[number])
        return int(self.table.starts[number]), int(self.table.steps[number])

    def key(self, number: int) -> str:
        """A stream's name."""
        if self.table is not None:
            return self.table.key(number)
        return self.found.shards[number].raw.basename if self.kind == "shard" else str(number)
