"""Reads streams out of tables: runs of rows that share a key, or files.

Guarantee: a window costs the groups of rows that it lies in, each read once while a process's streams are in it, and
only of the columns that were asked for. Numbers are copied once, from Arrow's memory to the batch.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.pictures import Pictures
from stream_dataloader.stores._base.store import Store
from stream_dataloader.stores.parquet.columns import (
    Column,
    Source,
    column_of,
    constant_column,
    item_of,
    size_of,
    write_to,
)
from stream_dataloader.stores.parquet.tables import TableFile, find_tables, open_table, pyarrow_of, told_by
from stream_dataloader.streams._media.picture import Picture
from stream_dataloader.streams._media.section import whole_number
from stream_dataloader.streams.cache.file_cache import FileCache

__all__ = ["ParquetStore"]


class ParquetStore(Store):
    """Streams in Parquet and Arrow files: rows with one key, one after the other, are a stream; each row is a step.

    Items are dicts by column; see `stream_dataloader.stores.parquet.columns` for what becomes of Arrow's types. It
    needs the package pyarrow: `pip install 'stream-dataloader[arrow]'`.

    Parquet is read by row groups. One that was read is kept for all streams of the process, up to `cache_bytes`, so
    row groups of some thousand rows serve best. Arrow's IPC files are memory-mapped, and read without a copy unless
    they are compressed.

    Args:
        path: A file, a folder of files, also with folders `key=value` in it, a pattern `"data-{00..15}.parquet"` or
            `"*.parquet"`, or a URL. Files are read in the order of their names.
        key: The column whose runs of one value are streams, also from one file to the next. None: each file is one.
        columns: Which to read, in this order; None reads all.
        decode: Columns of binary that hold encoded images: `{"image": "image"}`; with dots in structs.
        fill_null: What takes the place of nulls: a value, or values by column. None has nulls raise.
        size: `(height, width)` of images; None keeps theirs.
        layout: `"CHW"`, channels first, or `"HWC"`.
        color: `"rgb"` or `"gray"`.
        cache_bytes: How much decoded row groups may take that no stream is in, in each process.
        cache: Where files from URLs are kept; None is the cache that all streams share.

    Raises:
        FileNotFoundError: There is no file at a path.
        StoreError: A file is damaged, lacks a column, or has the rows of a key in several places.
        ImportError: pyarrow is not installed.

    Example:
        >>> import tempfile, pyarrow, pyarrow.parquet
        >>> path = tempfile.mkdtemp() + "/steps.parquet"
        >>> table = pyarrow.table({"episode": [7, 7, 9], "state": [[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]]})
        >>> pyarrow.parquet.write_table(table, path)
        >>> store = ParquetStore(path, key="episode", columns=["state"])
        >>> [(store.key(number), [item["state"].tolist() for item in store(number)]) for number in store.sources]
        [('7', [[0.0, 1.0], [1.0, 1.0]]), ('9', [[2.0, 1.0]])]
    """

    format: ClassVar[str] = "parquet"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        key: str | None = None,
        columns: Sequence[str] | None = None,
        decode: Mapping[str, str] | None = None,
        fill_null: Any = None,
        size: tuple[int, int] | None = None,
        layout: Literal["CHW", "HWC"] = "CHW",
        color: Literal["rgb", "gray"] = "rgb",
        cache_bytes: int = 256 << 20,
        cache: FileCache | None = None,
    ) -> None:
        if isinstance(columns, str):
            raise TypeError("columns is a list of names; give [name] for one")
        columns = None if columns is None else list(columns)
        decode = {} if decode is None else dict(decode)
        super().__init__(
            path,
            key=key,
            columns=columns,
            decode=decode or None,
            fill_null=fill_null,
            size=size,
            layout=layout,
            color=color,
            cache_bytes=cache_bytes,
            cache=cache,
        )
        pyarrow_of("ParquetStore")
        if columns is not None and (not columns or len(set(columns)) < len(columns)):
            raise ValueError(f"columns is {columns}; give each that is wanted once, or None for all")
        if wrong := {name: kind for name, kind in decode.items() if kind != "image"}:
            raise ValueError(f"decode is {wrong}; 'image' is what a column can be decoded as")
        whole_number("cache_bytes", cache_bytes, "give a number of bytes from 0 on", 0)
        self._key, self._columns, self._images = key, columns, frozenset(decode)
        self._fill, self._cache_bytes, self._cache = fill_null, cache_bytes, cache
        self._picture = Picture(size, layout, color)
        _ = self.index

    def _read_index(self) -> _Rows:
        pyarrow_of("ParquetStore")
        paths = find_tables(self.path)
        files = [open_table(path, self.path, self._cache) for path in paths]
        rows = _Rows(self.path, files, self._key, self._wanted(files), self._images, self._fill)
        rows.groups = _Groups(rows, self._cache_bytes)
        return rows

    def _wanted(self, files: list[TableFile]) -> list[str]:
        wanted = self._columns or list(files[0].columns)
        needed = {*wanted, *([] if self._key is None else [self._key]), *(name.split(".")[0] for name in self._images)}
        for file in files:
            if missing := sorted(needed - set(file.columns)):
                raise StoreError(f"{file.name} has no column {missing}; it has {sorted(file.columns)}")
        return wanted

    def _open_steps(self, number: int) -> _RowSteps:
        return _RowSteps(self.index, number, self.name_of(number), self._picture)

    def key(self, number: int) -> str:
        return str(self.index.key(self._check_number(number)))

    def metadata(self, number: int) -> Mapping[str, Any]:
        index: _Rows = self.index
        self._check_number(number)
        return {"file": index.files[index.file_of(index.group_of(int(index.start[number])))].name} if len(index) else {}

    def _metadata(self) -> Mapping[str, Any]:
        return {"files": len(self.index.files), "row_groups": len(self.index.first) - 1}

    def _disk_bytes(self) -> int | None:
        rows: _Rows = self.index
        return sum(file.state[0] for file in rows.files)


class _Rows:
    """Where streams and groups are among the rows of all files; see `Index`."""

    groups: _Groups

    def __init__(
        self,
        path: str,
        files: list[TableFile],
        key: str | None,
        columns: list[str],
        images: frozenset[str],
        fill: Any,
    ) -> None:
        self.path, self.files, self.columns = path, files, columns
        self._images, self._fill = images, fill
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
                            f"{file.name}, row {first - self.file_start(group) + place}: rows with {key} = {value!r} "
                            "are in several places; write the table sorted by it, as table.sort_by does"
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
        return changes, [value.as_py() for value in array.take(changes)]

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


class _Group(NamedTuple):
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


class _Groups:
    """The decoded groups of a process, the last ones used within a limit."""

    def __init__(self, rows: _Rows, limit_bytes: int) -> None:
        self._rows = rows
        self._limit = limit_bytes
        self._kept: OrderedDict[int, tuple[_Group, int]] = OrderedDict()
        self._lock = threading.Lock()

    def at(self, row: int) -> _Group:
        """The group that has a row."""
        number = self._rows.group_of(row)
        with self._lock:
            if number in self._kept:
                self._kept.move_to_end(number)
                return self._kept[number][0]
            columns = self._rows.read(number)
            file = self._rows.files[self._rows.file_of(number)]
            group = _Group(int(self._rows.first[number]), int(self._rows.first[number + 1]), columns, file)
            self._kept[number] = group, size_of(columns)
            while self._kept and sum(size for _, size in self._kept.values()) > self._limit:
                self._kept.popitem(last=False)
            return group


class _RowSteps:
    """One stream's steps; see `Steps`."""

    def __init__(self, rows: _Rows, number: int, name: str, picture: Picture) -> None:
        self._rows = rows
        self._first, self._count = int(rows.start[number]), int(rows.lengths[number])
        self._name = name
        self._picture = picture
        self._pictures: Pictures | None = None
        self._group: _Group | None = None

    def __len__(self) -> int:
        return self._count

    def item(self, index: int) -> Any:
        ((group, row, _),) = self._pieces(self._first + index, 1)
        return {name: item_of(column, row, self._decoder()) for name, column in group.columns.items()}

    def read(self, start: int, out: Any) -> None:
        columns = self._rows.columns
        if not isinstance(out, Mapping) or set(out) != set(columns):
            raise StoreError(f"{self._name} has columns {columns}, and room was given for {shorten(out)}")
        done = 0
        for group, row, count in self._pieces(self._first + start, _count_of(out)):
            for name, column in group.columns.items():
                place = _part(out[name], done, done + count)
                write_to(
                    place, column, row, count, self._decoder(), f"{self._name}, {group.file.name}, column {name!r}"
                )
            done += count

    def _pieces(self, row: int, count: int) -> Iterator[tuple[_Group, int, int]]:
        """The groups in which rows are: which, the first of its rows, and how many."""
        stop = row + count
        while row < stop:
            if self._group is None or not self._group.first <= row < self._group.stop:
                self._group = self._rows.groups.at(row)
            group = self._group
            group.file.check()
            here = min(stop, group.stop) - row
            yield group, row - group.first, here
            row += here

    def _decoder(self) -> Pictures:
        if self._pictures is None:
            self._pictures = Pictures(self._picture, "reading images of a table")
        return self._pictures

    def close(self) -> None:
        self._group = None


def _count_of(out: Any) -> int:
    while isinstance(out, Mapping):
        out = next(iter(out.values()))
    return len(out)


def _part(out: Any, start: int, stop: int) -> Any:
    if isinstance(out, Mapping):
        return {name: _part(child, start, stop) for name, child in out.items()}
    return out[start:stop]
