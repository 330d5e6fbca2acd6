"""Items of an MDS dataset, and the samples of each stream.

Guarantee: all processes together read a column once, and save the result.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stream_dataloader._engine.items.structure import Node, flatten
from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.files import damage_named, hashed, in_folder, inside, stamp_of
from stream_dataloader.stores._base.leaves import chosen, from_json
from stream_dataloader.stores.mds.encodings import ArrayEncoding, encoding_of
from stream_dataloader.stores.mds.index import INDEX, DatasetIndex, StreamTable, write_table
from stream_dataloader.stores.mds.shards import Column, MdsShards
from stream_dataloader.streams.cache import FileCache, is_url

__all__ = ["MdsIndex"]

_MOST_ROWS = 1 << 56
_COLUMN = "column:"
_KEYS = ("str", "bytes", "str_int", "str_decimal", "json")


class MdsIndex:
    """Index of a dataset and its streams; see `Store._read_index`.

    `kind` is "packed", "shard", "sample", or "column:" and a name. `firsts` has the
    first sample of each shard, followed by the number of all samples.
    """

    version = "2"

    def __init__(
        self,
        folder: str,
        found: DatasetIndex,
        stamp: str,
        options: Mapping[str, Any],
        classes: dict[str, type],
        cache: FileCache,
    ) -> None:
        self.found = found
        self._folder, self._cache, self._options = folder, cache, options
        self._name = in_folder(folder, INDEX)
        self._key = (options["stream"] or "").removeprefix(_COLUMN)
        self.kind = options["stream"] or ("packed" if "table" in found.note else "shard")
        if self.kind not in ("packed", "shard", "sample"):
            self.kind = _COLUMN + self._key
        self.structure, self.columns = self._items(options["columns"], classes)
        self.firsts = list(itertools.accumulate((shard.samples for shard in found.shards), initial=0))
        replaceable = is_url(folder) and not all(shard.raw.hashes for shard in found.shards)
        self._version = hashed(f"{found.digest} {stamp if replaceable else ''}")
        self.shards = MdsShards(folder, found, self._version, cache, stamp, options["limits"])
        self.key: Callable[[int], str] = str
        self.note: Callable[[int], Mapping[str, Any]] = lambda _: {}
        self.starts: NDArray[np.int64] = np.array(self.firsts[:-1], np.int64)
        self.lengths: NDArray[np.int64] | None = np.diff(self.firsts)
        if self.kind == "shard":
            self.key = lambda number: found.shards[number].raw.basename
        elif self.kind == "sample":
            self.starts = np.arange(self.firsts[-1])
            self.lengths = self._rows_of_samples()
        else:
            table = self._packed_table() if self.kind == "packed" else self._table_of_runs()
            self.starts, self.lengths, self.key, self.note = table.starts, table.steps, table.key, table.note
        self.fingerprint = hashed(f"{found.digest} {self.kind}")

    def __len__(self) -> int:
        return len(self.starts)

    def _column(self, name: str) -> Column:
        if name not in self.found.names:
            raise StoreError(f"{self._name} has no column {shorten(name)}; it has {self.found.names}")
        place = self.found.names.index(name)
        kind, size, options = self.found.encodings[place], self.found.sizes[place], self._options
        try:
            given = {name: options[name] for name in ("allow_pickle", "upright", "limits")}
            encoding = encoding_of(kind, **given)
        except ValueError as error:
            raise StoreError(f"{self._name}, column {name!r}: {error}; or leave it out, by columns=") from None
        if (encoding.size or None) != (size or None):
            raise StoreError(f"{self._name}, column {name!r}: {size} bytes a value, and {kind!r} has {encoding.size}")
        if name in self.found.note.get("bools", ()) and isinstance(encoding, ArrayEncoding):
            encoding.delivered = np.dtype(bool)  # the format has no bool, so `MdsPacker` writes uint8
        return Column(name, place, encoding)

    def _items(self, wanted: list[str] | None, classes: dict[str, type]) -> tuple[Node, list[Column]]:
        note = self.found.note
        packed = note.get("items")
        if packed is not None and (wanted is None or not set(wanted) <= set(self.found.names)):
            whole = from_json(packed["structure"], self._name, classes)
            structure, places = chosen(wanted, whole, self._name)
            assert structure is not None
            names = [packed["columns"][place] for place in places]
        else:
            others = [name for name in self.found.names if name not in (note.get("key"), self._key)]
            structure, names = flatten({name: name for name in wanted or others or self.found.names})
        return structure, [self._column(name) for name in names]

    def _rows_of_samples(self) -> NDArray[np.int64] | None:
        """Return the number of time steps of each sample, or None if the dataset is remote."""
        column = next((column for column in self.columns if column.encoding.is_sequence), None)
        if column is None:
            names = [column.name for column in self.columns]
            raise StoreError(f"{self._name}: no column of {names} is an array or a list")
        if shape := getattr(column.encoding, "shape", None):
            return np.full(len(self.starts), shape[0], np.int64)
        if is_url(self._folder):
            return None

        def write_lengths(path: str) -> None:
            scan = self.shards.scan(column)
            steps = [rows.read(row, column, column.encoding.split)[1].shape[1] for rows, row in scan]
            count = len(steps)
            write_table(path, [0] * count, steps, [""] * count, [{}] * count)

        return self._made_table(write_lengths, _MOST_ROWS).steps

    def _packed_table(self) -> StreamTable:
        said = self.found.note.get("table")
        if said is None:
            raise StoreError(f"{self._name} has no table of streams; say what a stream is, by stream=")
        inside(self._folder, said["basename"], self._name)
        with self._cache.open(in_folder(self._folder, said["basename"])) as local:
            table = StreamTable(local.path, self.firsts[-1])
        if table.check != said["check"]:
            raise StoreError(f"{local.path} is damaged: its checksum is another; pack it again")
        return table

    def _table_of_runs(self) -> StreamTable:
        column, total = self._column(self._key), self.firsts[-1]
        kind = self.found.encodings[column.place]
        if kind not in _KEYS and not (kind.lstrip("u").startswith("int") and column.encoding.size):
            raise StoreError(f"{self._name}: {column.name!r} is {kind!r}, and names no streams")

        def write_runs(path: str) -> None:
            starts: dict[str, int] = {}
            before: bytes | None = None
            for sample, (rows, row) in enumerate(self.shards.scan(column)):
                if before == (before := bytes(rows.part(row, column))):
                    continue
                value = rows.read(row, column, column.encoding.decode)
                key = value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
                starts[f"{key}@{sample}" if key in starts else key] = sample  # again: another stream
            steps = np.diff([*starts.values(), total][-1 - len(starts) :])
            write_table(path, list(starts.values()), steps, list(starts), [{}] * len(starts))

        return self._made_table(write_runs, total)

    def _made_table(self, make: Callable[[str], None], most: int) -> StreamTable:
        folder, files = self._folder, []
        if not is_url(folder):
            folder = os.path.abspath(folder)
            files = [file for shard in self.found.shards for file in (shard.raw, shard.zip) if file]
        stamp = stamp_of(in_folder(folder, file.basename) for file in files)
        version = hashed(f"{self._version} {stamp}")
        size = 64 + 64 * self.firsts[-1]
        name = f"{folder}#{self.kind}.streams"
        with damage_named(folder), self._cache.made(name, version, size, make) as at:
            return StreamTable(at.path, most)
