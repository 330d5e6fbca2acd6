"""Where streams and groups of rows are among the rows of all files, and the steps of a stream.

Guarantee: only the key column is read to find the streams, and no row of it is handled alone. Rows with one key that
lie in several places are an error. A group is read once while streams of the process are in it; numbers are copied
once, from Arrow's memory to the batch.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stream_dataloader._items.structure import flatten
from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.files import damage_named
from stream_dataloader.stores._base.pictures import Pictures
from stream_dataloader.stores._base.rows import read_rows, row_of
from stream_dataloader.stores.parquet.columns import Column, Source, column_of, constant_column
from stream_dataloader.stores.parquet.tables import TableFile

__all__ = ["Group", "RowSteps", "Rows"]


class Group(NamedTuple):
    """A group of rows, decoded.

    Attributes:
        first: Its first row, counted over all files.
        stop: The row behind its last.
        columns: By their names, as an item has them.
        file: Where it is from.
    """

    first: int
    stop: int
    columns: dict[str, Column]
    file: TableFile


class _Place(NamedTuple):
    """Where a group is: its file, its number there, and its first row there."""

    file: TableFile
    number: int
    row: int


class Rows:
    """Where streams and groups are among the rows of all files; see `Store._read_index`."""

    def __init__(
        self,
        path: str,
        files: list[TableFile],
        key: str | None,
        columns: list[str],
        images: frozenset[str],
        pictures: Pictures | None,
        fill: Any,
        cache_bytes: int,
    ) -> None:
        self.files, self.columns, self._key = files, columns, key
        self._images, self._pictures, self._fill, self._limit = images, pictures, fill, cache_bytes
        self._kept: OrderedDict[int, tuple[Group, int]] = OrderedDict()  # the last ones used, and what they take
        self._lock = threading.Lock()
        self._places = [
            _Place(file, number, row)
            for file in files
            for number, row in enumerate(np.cumsum([0, *file.groups])[:-1].tolist())
        ]
        groups = [file.groups for file in files]
        #: The row that each group begins at, counted over all files, and the number of rows.
        self.first = np.cumsum(np.concatenate([np.zeros(1, np.int64), *groups]))
        #: The row that each stream begins at.
        self.start: NDArray[np.int64]
        if key is None:
            self._keys: Any = [_short(file.name, path) for file in files]
            self.start = np.cumsum([0, *(rows.sum() for rows in groups)], dtype=np.int64)[:-1]
        else:
            self.start, self._keys = self._runs(key)
        self.lengths: NDArray[np.int64] = np.diff(np.append(self.start, self.first[-1:]))
        digest = hashlib.blake2b(digest_size=16)
        for file in files:
            digest.update(f"{file.digest} {_short(file.name, path)} ".encode("utf-8", "surrogateescape"))
        digest.update(f"{key} {columns}".encode("utf-8", "surrogateescape"))
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self.start)

    def key(self, number: int) -> Any:
        """A stream's name."""
        found = self._keys[number]
        return found if isinstance(found, str) else found.as_py()

    def file_of(self, number: int) -> TableFile:
        """The file that a stream begins in."""
        if self._key is None:
            return self.files[number]
        return self._places[int(np.searchsorted(self.first, self.start[number], "right")) - 1].file

    def _runs(self, key: str) -> tuple[NDArray[np.int64], Any]:
        """Where the key changes, and to what."""
        import pyarrow as pa

        starts: list[NDArray[np.int64]] = []
        values: list[Any] = []
        seen: set[Any] = set()
        for place, first, after in zip(self._places, self.first[:-1].tolist(), self.first[1:].tolist(), strict=True):
            if first == after:
                continue
            with damage_named(place.file.name):
                rows, found = _changes(place, key)
                if values and values[-1] == found[0]:
                    rows, found = rows[1:], found[1:]
                for row, value in zip(rows.tolist(), found, strict=True):
                    if value in seen:
                        raise StoreError(
                            f"{place.file.name}, row {place.row + row}: rows with {key} = {value!r} are in several "
                            "places; write the table sorted by it, as table.sort_by does"
                        )
                    seen.add(value)
                starts.append(first + rows)
                values += found
        return np.concatenate([np.zeros(0, np.int64), *starts]), pa.array(values)

    def at(self, row: int) -> Group:
        """The group that has a row, counted over all files; the last ones that were used are kept, within a limit."""
        number = int(np.searchsorted(self.first, row, "right")) - 1
        with self._lock:
            if number in self._kept:
                self._kept.move_to_end(number)
                return self._kept[number][0]
            first, stop = self.first[number : number + 2].tolist()
            columns = self._read(self._places[number], stop - first)
            group = Group(first, stop, columns, self._places[number].file)
            self._kept[number] = group, sum(int(column.array.nbytes) for column in flatten(columns)[1])
            while self._kept and sum(size for _, size in self._kept.values()) > self._limit:
                self._kept.popitem(last=False)
            return group

    def _read(self, place: _Place, rows: int) -> dict[str, Column]:
        """The columns of a group."""
        file = place.file
        arrays = file.read(place.number, self.columns)
        source = Source(file.name, "", place.row, rows, self._images, self._pictures, None)
        with damage_named(file.name):
            return {
                name: constant_column(file.constants[name], source._replace(column=name))
                if name in file.constants
                else column_of(arrays[name], source._replace(column=name, fill=self._filled(name)))
                for name in self.columns
            }

    def _filled(self, name: str) -> Any:
        return self._fill.get(name) if isinstance(self._fill, Mapping) else self._fill


def _changes(place: _Place, key: str) -> tuple[NDArray[np.int64], list[Any]]:
    """Where a group's key has another value than in the row before, and the values."""
    file = place.file
    if key in file.constants:
        return np.zeros(1, np.int64), [file.constants[key]]
    array = file.read(place.number, [key])[key]
    if array.null_count:
        row = place.row + int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
        raise StoreError(f"{file.name}, row {row}: {key} is null, and no stream's; write the table without such rows")
    try:
        encoded = array if hasattr(array, "indices") else array.dictionary_encode()
    except NotImplementedError:
        raise StoreError(f"{file.name}: {key} is of type {array.type}; give a column of numbers or strings") from None
    codes = encoded.indices.to_numpy(zero_copy_only=False)
    changes = np.concatenate([np.zeros(1, np.int64), 1 + np.flatnonzero(codes[1:] != codes[:-1])])
    return changes, array.take(changes).to_pylist()


def _short(name: str, path: str) -> str:
    """A file's name in the store."""
    if name == path or not name.startswith(path.rstrip("/") + "/"):
        return os.path.basename(name) if name == path else name
    return name[len(path.rstrip("/")) + 1 :]


class RowSteps:
    """One stream's steps; see `Steps`."""

    def __init__(self, rows: Rows, number: int, name: str) -> None:
        self._rows = rows
        self._first, self._count = int(rows.start[number]), int(rows.lengths[number])
        self._name = name
        self._group: Group | None = None

    def __len__(self) -> int:
        return self._count

    def item(self, index: int) -> Any:
        ((group, row, _),) = self._pieces(self._first + index, 1)
        with group.file.held_while_read:
            return row_of(group.columns, row)

    def read(self, start: int, out: Any) -> None:
        leaf, done = out, 0
        while isinstance(leaf, dict):
            leaf = next(iter(leaf.values()))
        for group, row, count in self._pieces(self._first + start, len(leaf)):
            part = out if count == len(leaf) else _part(out, slice(done, done + count))
            try:
                with group.file.held_while_read:
                    read_rows(group.columns, row, part)
            except (KeyError, TypeError) as error:
                raise StoreError(
                    f"{self._name} has columns {list(group.columns)}, and not those before: {error}"
                ) from None
            done += count

    def _pieces(self, row: int, count: int) -> Iterator[tuple[Group, int, int]]:
        """The groups in which rows are: which, the first of its rows, and how many."""
        stop = row + count
        while row < stop:
            if self._group is None or not self._group.first <= row < self._group.stop:
                self._group = self._rows.at(row)
            group = self._group
            here = min(stop, group.stop) - row
            yield group, row - group.first, here
            row += here

    def close(self) -> None:
        self._group = None


def _part(out: Any, rows: slice) -> Any:
    return {name: _part(below, rows) for name, below in out.items()} if isinstance(out, dict) else out[rows]
