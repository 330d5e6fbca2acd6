"""Store of an `IterableDataset`: each of its shards is a stream.

Guarantee: a resume is exact, because everything before the item is read again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stream_dataloader._engine.items.structure import flatten
from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.files import hashed
from stream_dataloader.stores._base.rows import read_rows, row_of
from stream_dataloader.stores._base.stream import cut
from stream_dataloader.stores.parquet.columns import Column, changes, decoded, joined, list_lengths
from stream_dataloader.stores.parquet.store import ParquetStore

__all__ = ["ShardStore"]

_ROWS = 100


@dataclass
class _Shards:
    """See `Store._read_index`."""

    count: int
    fingerprint: str
    lengths: None = None

    def __len__(self) -> int:
        return self.count


class ShardStore(ParquetStore):
    """Store of shards, with the options of `ParquetStore`.

    With `stream` or `elements`, a shard marks the starts of sequences in it.
    """

    def _read_index(self) -> _Shards:
        given = self._given
        if given.features is not None:
            self._needed(self._options["columns"] or given.features, given.features, self.path)
        name, version = given.info.dataset_name, str(given.info.version)
        said = [given.num_shards, str(given.features), name, version, self.path]
        options = ("stream", "elements", "targets", "columns")
        said += [self._options[option] for option in options]
        return _Shards(given.num_shards, hashed(repr(said)))

    def _with_columns(self, _: list[str]) -> ParquetStore:
        raise StoreError(f"{self.path} has no random access, for deltas=")

    def __call__(self, source: Any, *, start: int = 0) -> Any:
        number, first, given = self._section(source)
        stop = math.inf if given is None else given
        if not first <= first + start <= stop:
            raise ValueError(f"{self.name_of(number)}: no items {first + start} to {stop}")
        return _Shard(self, number, first, start, stop)

    def item(self, source: Any, position: int) -> Any:  # noqa: ARG002
        raise StoreError(f"{self.path} has no random access, for item(); open a Dataset in place of an IterableDataset")

    def metadata(self, number: int) -> Mapping[str, Any]:
        return {"shard": self._check_number(number)}

    def _metadata(self) -> Mapping[str, Any]:
        return {"shards": len(self)}

    def _disk_bytes(self) -> None:
        return None

    def tables(self, number: int) -> Iterator[dict[str, Any]]:
        """Yield the columns of a shard's rows as Arrow's arrays, some rows at a time."""
        shard = self._given.shard(num_shards=len(self), index=number)
        # Each row from `map` or a generator may have other types.
        rows = _ROWS if getattr(shard._ex_iterable, "iter_arrow", None) else 1
        for table in shard.with_format("arrow").iter(rows):
            there = table.column_names
            names = self._needed(self._options["columns"] or there, there, self.path)
            yield {name: joined(table.column(name)) for name in names}


class _Shard:
    """Stream of a shard's items; see `protocols.ReadsInto` and `protocols.MarksStarts`."""

    def __init__(self, store: ShardStore, number: int, first: int, start: int, stop: float) -> None:
        self._store, self._name = store, store.name_of(number)
        self._tables = store.tables(number)
        self._first, self._position, self._stop = first, first + start, stop
        self._begin = self._end = 0  # range of items in the current table
        self._columns: dict[str, Column] = {}
        self._last: Any = ()  # the key of its last row
        self._starts: NDArray[np.int64] = np.zeros(0, np.int64)

    def __iter__(self) -> _Shard:
        return self

    def __next__(self) -> Any:
        if not self._left():
            raise StopIteration
        self._position += 1
        return row_of(self._columns, self._position - 1 - self._begin)

    def read_into(self, out: Any) -> int:
        room = len(flatten(out)[1][0])
        if count := min(self._left(), room):
            out = out if count == room else cut(out, 0, count)
            read_rows(self._columns, self._position - self._begin, out)
            self._position += count
        return count

    def _left(self) -> int:
        """Return the number of next items in the table; read another table if there are none."""
        while self._end <= self._position < self._stop and (arrays := next(self._tables, None)) is not None:
            self._take(arrays)
        return int(max(0, min(self._end, self._stop) - self._position))

    def _take(self, arrays: dict[str, Any]) -> None:
        store, options = self._store, self._store._options
        key, lengths, starts = options["stream"], None, np.zeros(0, np.int64)
        self._begin, count = self._end, len(next(iter(arrays.values())))
        if options["elements"]:
            lengths = list_lengths(arrays, self._name, 0)
            starts, count = (np.cumsum(lengths) - lengths)[lengths > 0], int(lengths.sum())
        elif key is not None:
            rows, keys = changes(arrays[key], key, self._name)
            starts = np.array(rows[keys[0] == self._last :], np.int64)
            self._last = keys[-1]
        self._starts = np.append(self._starts, self._begin + starts)
        self._end += count
        if self._end > self._position:
            wanted = {name: arrays[name] for name in options["columns"] or arrays}
            at, ignore_index = self._begin, store._ignore_index
            self._columns = decoded(wanted, store._decode, self._name, at, lengths, ignore_index=ignore_index)

    def starts_within(self, start: int, stop: int) -> list[int]:
        starts = self._starts - self._first
        self._starts = self._starts[starts >= stop]
        found: list[int] = starts[(start <= starts) & (starts < stop)].tolist()
        return found

    def close(self) -> None:
        self._tables, self._stop = iter(()), 0
