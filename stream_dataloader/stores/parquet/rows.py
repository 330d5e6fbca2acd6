"""Where streams and groups of rows are among the rows of all files.

Guarantee: only the key column is read to find the streams, and no row of it is handled alone. Rows with one key that
lie in several places are an error. A group is read once while streams of the process are in it.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError
from stream_dataloader.stores.parquet.columns import Column, Source, column_of, constant_column, size_of
from stream_dataloader.stores.parquet.tables import TableFile, told_by

__all__ = ["Group", "Rows"]


class Rows:
    """Where streams and groups are among the rows of all files; see `Index`."""

    def __init__(
        self,
        path: str,
        files: list[TableFile],
        key: str | None,
        columns: list[str],
        images: frozenset[str],
        fill: Any,
        cache_bytes: int,
    ) -> None:
        self.path, self.files, self.columns = path, files, columns
        self._images, self._fill = images, fill
        self.groups = Groups(self, cache_bytes)
        #: The row that each group begins at, counted over all files, and the number of rows.
        self.first = np.cumsum(np.concatenate([np.zeros(1, np.int64), *(file.groups for file in files)]))
        #: The first group of each file, and the number of groups.
        self._first_group = np.cumsum([0, *(len(file.groups) for file in files)])
        if key is None:
            self._keys: Any = [_short(file.name, path) for file in files]
            start = self.first[self._first_group[:-1]]
        else:
            start, self._keys = self._runs(key)
        self.start: NDArray[np.int64] = start
        stops = (
            self.first[self._first_group[1:]] if key is None else np.append(start[1:], self.first[-1:])[: len(start)]
        )
        self.lengths: NDArray[np.int64] = (stops - start).astype(np.int64)
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

    def _runs(self, key: str) -> tuple[NDArray[np.int64], Any]:
        """Where the key changes, and to what."""
        import pyarrow as pa

        starts: list[NDArray[np.int64]] = []
        values: list[Any] = []
        seen: set[Any] = set()
        for group, first in enumerate(self.first[:-1].tolist()):
            file = self.files[self.file_of(group)]
            if not file.groups[self.in_file(group)]:
                continue
            with told_by(file.name):
                places, found = self._changes(group, file, key)
                if values and values[-1] == found[0]:
                    places, found = places[1:], found[1:]
                starts.append(first + places)
                for place, value in zip(places.tolist(), found, strict=True):
                    if value in seen:
                        raise StoreError(
                            f"{file.name}, row {self.file_row(group) + place}: rows with {key} = {value!r} are in "
                            "several places; write the table sorted by it, as table.sort_by does"
                        )
                    seen.add(value)
                values += found
        return np.concatenate([np.zeros(0, np.int64), *starts]), pa.array(values)

    def _changes(self, group: int, file: TableFile, key: str) -> tuple[NDArray[np.int64], list[Any]]:
        """Where a group's key has another value than in the row before, and the values."""
        if key in file.constants:
            return np.zeros(1, np.int64), [file.constants[key]]
        array = file.read(self.in_file(group), [key])[key]
        if array.null_count:
            row = self.file_row(group) + int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
            raise StoreError(
                f"{file.name}, row {row}: {key} is null, and no stream's; write the table without such rows"
            )
        try:
            encoded = array if hasattr(array, "indices") else array.dictionary_encode()
        except NotImplementedError:
            raise StoreError(
                f"{file.name}: {key} is of type {array.type}; give a column of numbers or strings"
            ) from None
        places = encoded.indices.to_numpy(zero_copy_only=False)
        changes = np.concatenate([np.zeros(1, np.int64), 1 + np.flatnonzero(places[1:] != places[:-1])])
        return changes, array.take(changes).to_pylist()

    def group_of(self, row: int) -> int:
        """Which group has a row, counted over all files."""
        return int(np.searchsorted(self.first, row, "right")) - 1

    def file_of(self, group: int) -> int:
        """Which file has a group."""
        return int(np.searchsorted(self._first_group, group, "right")) - 1

    def in_file(self, group: int) -> int:
        """Which of its file's groups this is."""
        return group - int(self._first_group[self.file_of(group)])

    def file_start(self, group: int) -> int:
        """The first row of a group's file, counted over all files."""
        return int(self.first[self._first_group[self.file_of(group)]])

    def file_row(self, group: int) -> int:
        """The first row of a group, counted in its file."""
        return int(self.first[group]) - self.file_start(group)

    def read(self, group: int) -> dict[str, Column]:
        """The columns of a group."""
        file = self.files[self.file_of(group)]
        arrays = file.read(self.in_file(group), self.columns)
        rows = int(self.first[group + 1] - self.first[group])
        source = Source(file.name, "", self.file_row(group), rows, self._images, None)
        with told_by(file.name):
            return {
                name: constant_column(file.constants[name], source._replace(column=name))
                if name in file.constants
                else column_of(arrays[name], source._replace(column=name, fill=self._filled(name)))
                for name in self.columns
            }

    def _filled(self, name: str) -> Any:
        return self._fill.get(name) if isinstance(self._fill, Mapping) else self._fill


def _short(name: str, path: str) -> str:
    """A file's name in the store."""
    if name == path or not name.startswith(path.rstrip("/") + "/"):
        return os.path.basename(name) if name == path else name
    return name[len(path.rstrip("/")) + 1 :]


class Group(NamedTuple):
    """A group of rows, decoded.

    Attributes:
        first: Its first row, counted over all files.
        stop: The row behind its last.
        columns: By their names.
        file: Where it is from.
    """

    first: int
    stop: int
    columns: dict[str, Column]
    file: TableFile


class Groups:
    """The decoded groups of a process, the last ones used within a limit."""

    def __init__(self, rows: Rows, limit_bytes: int) -> None:
        self._rows = rows
        self._limit = limit_bytes
        self._kept: OrderedDict[int, tuple[Group, int]] = OrderedDict()
        self._lock = threading.Lock()

    def at(self, row: int) -> Group:
        """The group that has a row."""
        number = self._rows.group_of(row)
        with self._lock:
            if number in self._kept:
                self._kept.move_to_end(number)
                return self._kept[number][0]
            columns = self._rows.read(number)
            file = self._rows.files[self._rows.file_of(number)]
            group = Group(int(self._rows.first[number]), int(self._rows.first[number + 1]), columns, file)
            self._kept[number] = group, size_of(columns)
            while self._kept and sum(size for _, size in self._kept.values()) > self._limit:
                self._kept.popitem(last=False)
            return group
