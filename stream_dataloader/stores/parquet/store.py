"""Reads streams out of tables: runs of rows that share a key, or files.

Guarantee: no row is handled alone to find the streams.
A group is read once while streams of the process are in it. Numbers are copied once.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stream_dataloader._items.structure import flatten, unflatten
from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.files import damage_named, digest_of
from stream_dataloader.stores._base.options import given_columns, given_options, renamed
from stream_dataloader.stores._base.pictures import Pictures
from stream_dataloader.stores._base.rows import read_rows, row_of
from stream_dataloader.stores._base.store import Store
from stream_dataloader.stores.parquet.columns import Column, Source, column_of
from stream_dataloader.stores.parquet.tables import TableFile, find_tables, pyarrow_of
from stream_dataloader.streams._media.picture import Picture
from stream_dataloader.streams._media.section import whole_number
from stream_dataloader.streams.cache.file_cache import FileCache

__all__ = ["ParquetStore", "RowSteps", "Rows"]


class ParquetStore(Store):
    """Streams in Parquet and Arrow files: a run of rows with one key is a stream, each row a step.

    Items are dicts by column; `stream_dataloader.stores.parquet.columns` says what becomes of Arrow's types.
    Parquet is read by row groups, of which some thousand rows serve best; Arrow's IPC files are mapped.

    Args:
        path: A file, a folder of files, also with folders `key=value` in it, a pattern `"data-{00..15}.parquet"` or
            `"*.parquet"`, or a URL. Files are read in the order of their names.
        stream: The column whose runs of one value are streams, across files too. None: each file is one.
        elements: Each row is a stream, of the elements of its lists: tokens, say. Choose columns that are lists of one
            length in each row.
        columns: Which to read, in this order; None reads all.
        decode: Columns of binary that hold encoded images: `{"image": "image"}`; with dots in structs.
        fill_null: What takes the place of nulls: a value, or values by column. None has nulls raise.
        size: `(height, width)` of images; None keeps theirs.
        layout: `"CHW"`, channels first, or `"HWC"`.
        color: `"rgb"` or `"gray"`.
        upright: Turn images as their EXIF says; False leaves them as they are stored.
        cache_bytes: What decoded row groups that no stream is in may take, in each process.
        cache: Where files from URLs are kept; None is the cache that all streams share.
    """

    format: ClassVar[str] = "parquet"

    @renamed(key="stream")
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        stream: str | None = None,
        elements: bool = False,
        columns: Sequence[str] | None = None,
        decode: Mapping[str, str] | None = None,
        fill_null: Any = None,
        size: tuple[int, int] | None = None,
        layout: Literal["CHW", "HWC"] = "CHW",
        color: Literal["rgb", "gray"] = "rgb",
        upright: bool = True,
        cache_bytes: int = 256 << 20,
        cache: FileCache | None = None,
    ) -> None:
        decode = {} if decode is None else dict(decode)
        super().__init__(path, **given_options(locals(), columns=given_columns(columns)))
        pyarrow_of("ParquetStore")
        if elements and stream is not None:
            raise ValueError(f"elements=True has each row be a stream, and stream is {stream!r}; leave out one of them")
        if wrong := {name: kind for name, kind in decode.items() if kind != "image"}:
            raise ValueError(f"decode is {wrong}; 'image' is what a column can be decoded as")
        whole_number("cache_bytes", cache_bytes, "give a number of bytes from 0 on", 0)
        self._picture = Picture(size=size, layout=layout, color=color, upright=upright)
        _ = self.index

    def _read_index(self) -> Rows:
        options = self._options
        key, fill, cache = options["stream"], options["fill_null"], options["cache"]
        images = frozenset(options["decode"])
        files = [TableFile(path, self.path, cache) for path in find_tables(self.path, cache)]
        wanted = options["columns"] or files[0].columns
        needed = {*wanted, *(name.split(".")[0] for name in images), *([] if key is None else [key])}
        for file in files:
            if missing := sorted(needed.difference(file.columns)):
                raise StoreError(f"{file.name} has no column {missing}; it has {sorted(file.columns)}")
        pictures = Pictures(self._picture, "reading images of a table") if images else None

        def decode(array: Any, source: Source) -> Column:
            filled = fill.get(source.column) if isinstance(fill, Mapping) else fill
            return column_of(array, source._replace(images=images, pictures=pictures, fill=filled))

        return Rows(self.path, files, key, wanted, decode, options["cache_bytes"], elements=options["elements"])

    def _open_steps(self, number: int) -> RowSteps:
        rows: Rows = self.index
        first, count = int(rows.start[number]), int(rows.lengths[number])
        return RowSteps(rows, first, count, self.name_of(number))

    def key(self, number: int) -> str:
        return str(self.index.keys[self._check_number(number)])

    def metadata(self, number: int) -> Mapping[str, Any]:
        rows: Rows = self.index
        file = number = self._check_number(number)
        if self._options["stream"] is not None or self._options["elements"]:  # else each file is a stream
            file = min(rows.file_at(int(rows.start[number])), len(rows.files) - 1)
        return {"file": rows.files[file].name}

    def _metadata(self) -> Mapping[str, Any]:
        files = self.index.files
        return {"files": len(files), "row_groups": sum(len(file.first) - 1 for file in files)}

    def _disk_bytes(self) -> int | None:
        rows: Rows = self.index
        return sum(file.known.size for file in rows.files)


class _Group(NamedTuple):
    """Rows `[first, stop)` of all files, decoded."""

    first: int
    stop: int
    columns: dict[str, Column]
    file: TableFile
    size: int  # in bytes


class Rows:
    """Where streams and groups are among the rows of all files, or among the elements of their lists."""

    def __init__(
        self,
        path: str,
        files: Sequence[TableFile],
        key: str | None,
        columns: Sequence[str],
        decode: Callable[[Any, Source], Column],
        cache_bytes: int,
        *,
        elements: bool = False,
    ) -> None:
        self.files, self._path, self._key, self._columns = files, path, key, columns
        self._decode, self._limit = decode, cache_bytes
        self._kept: OrderedDict[tuple[int, int], _Group] = OrderedDict()  # the last ones used
        self._lock = threading.Lock()
        self._elements = elements
        lists = [_list_lengths(file, columns) for file in files if elements]
        #: Of each file, the row that each of its groups begins at, and the number of its rows.
        self._first = [file.first for file in files]
        if elements:
            self._first = [np.cumsum([0, *(int(one.sum()) for one in groups)], dtype=np.int64) for groups in lists]
        self._begin = np.cumsum([0, *(first[-1] for first in self._first)], dtype=np.int64)
        self.start: NDArray[np.int64] = self._begin[:-1]
        self.keys: Sequence[Any] = [_short(file.name, path) for file in files]
        if key is not None:
            self.start, self.keys = self._runs(key)
        elif elements:
            flat = np.concatenate([np.zeros(0, np.int64), *itertools.chain.from_iterable(lists)])
            self.start, self.keys = np.cumsum(flat) - flat, range(len(flat))
        self.lengths: NDArray[np.int64] = np.diff(np.append(self.start, self._begin[-1]))

    @functools.cached_property
    def fingerprint(self) -> str:
        files = "".join(f"{digest_of(file.known)} {_short(file.name, self._path)} " for file in self.files)
        kind = " elements" if self._elements else ""
        text = f"{files}{self._key} {self._columns}{kind}".encode("utf-8", "surrogateescape")
        return hashlib.blake2b(text, digest_size=16).hexdigest()

    def __len__(self) -> int:
        return len(self.start)

    def file_at(self, row: int) -> int:
        return int(np.searchsorted(self._begin, row, "right")) - 1

    def _runs(self, key: str) -> tuple[NDArray[np.int64], list[Any]]:
        first: dict[Any, int] = {}  # the row that each key begins at
        last: Any = ()  # no key
        for file, begin in zip(self.files, self._begin.tolist(), strict=False):
            with damage_named(file.name):
                for row, value in zip(*_changes(file, key), strict=True):
                    if value in first and (row or value != last):
                        what = f"{file.name}, row {row}: rows with {key} = {value!r}"
                        raise StoreError(f"{what} are in several places; sort by it (table.sort_by)")
                    first.setdefault(value, begin + row)
                    last = value
        return np.array(list(first.values()), np.int64), list(first)

    def at(self, row: int) -> _Group:
        """The group that has a row."""
        place = self.file_at(row)
        group = int(np.searchsorted(self._first[place], row - int(self._begin[place]), "right")) - 1
        with self._lock:
            found = self._kept.pop((place, group), None)
            if found is None:
                found = self._read(place, group)
            self._kept[place, group] = found
            size = sum(kept.size for kept in self._kept.values())
            while size > self._limit:
                size -= self._kept.popitem(last=False)[1].size
            return found

    def _read(self, place: int, group: int) -> _Group:
        file, begin = self.files[place], int(self._begin[place])
        first, stop = self._first[place][group : group + 2].tolist()
        columns = {}
        with damage_named(file.name):
            for name, array in file.read(self._columns, group).items():
                array = array.flatten() if self._elements else array  # noqa: PLW2901
                columns[name] = self._decode(array, Source(file.name, name, first, stop - first))
        size = sum(int(column.array.nbytes) for column in flatten(columns)[1])
        return _Group(begin + first, begin + stop, columns, file, size)


def _list_lengths(file: TableFile, columns: Sequence[str]) -> list[NDArray[np.int64]]:
    """How many elements each row has, of each group."""
    import pyarrow.compute as pc

    groups = []
    for group in range(len(file.first) - 1):
        found: dict[str, NDArray[np.int64]] = {}
        for name, array in file.read(columns, group).items():
            if "list" not in str(array.type) or array.null_count:
                what = "has rows without one" if array.null_count else f"is of type {array.type}"
                raise StoreError(f"{file.name}: {name} {what}, and elements=True takes lists; choose columns")
            found[name] = pc.list_value_length(array).to_numpy(zero_copy_only=False).astype(np.int64)
        first, *others = found.items()
        for name, lengths in others:
            if len(wrong := np.flatnonzero(lengths != first[1])):
                row = int(wrong[0])
                what = f"{first[0]} has {first[1][row]} elements, and {name} {lengths[row]}"
                raise StoreError(f"{file.name}, row {int(file.first[group]) + row}: {what}; choose columns")
        groups.append(first[1])
    return groups


def _changes(file: TableFile, key: str) -> tuple[list[int], list[Any]]:
    """The rows where the key changes, and their keys."""
    array = file.read([key])[key]
    if array.null_count:
        row = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
        raise StoreError(f"{file.name}, row {row}: {key} is null")
    try:
        encoded = array if hasattr(array, "indices") else array.dictionary_encode()
    except NotImplementedError:
        raise StoreError(f"{file.name}: {key} is of type {array.type}, no key") from None
    codes = encoded.indices.to_numpy(zero_copy_only=False)
    rows = np.flatnonzero(np.diff(codes, prepend=codes[:1] - 1))
    return rows.tolist(), array.take(rows).to_pylist()


def _short(name: str, path: str) -> str:
    return os.path.basename(name) if name == path else name.removeprefix(path.rstrip("/") + "/")


class RowSteps:
    """One stream's steps; see `Steps`."""

    def __init__(self, rows: Rows, first: int, count: int, name: str) -> None:
        self._rows = rows
        self._first, self._count = first, count
        self._name = name
        self._group: _Group | None = None

    def __len__(self) -> int:
        return self._count

    def item(self, index: int) -> Any:
        ((group, row, _),) = self._pieces(self._first + index, 1)
        with group.file.held_while_read:
            return row_of(group.columns, row)

    def read(self, start: int, out: Any) -> None:
        leaf, part, done = out, out, 0
        while isinstance(leaf, dict):
            leaf = next(iter(leaf.values()))
        for group, row, count in self._pieces(self._first + start, len(leaf)):
            if count < len(leaf):
                structure, leaves = flatten(out)
                part = unflatten(structure, iter([leaf[done : done + count] for leaf in leaves]))
            with damage_named(self._name), group.file.held_while_read:
                read_rows(group.columns, row, part)
            done += count

    def _pieces(self, row: int, count: int) -> Iterator[tuple[_Group, int, int]]:
        stop = row + count
        while row < stop:
            if self._group is None or not self._group.first <= row < self._group.stop:
                self._group = self._rows.at(row)
            count = min(stop, self._group.stop) - row
            yield self._group, row - self._group.first, count
            row += count

    def close(self) -> None:
        self._group = None
