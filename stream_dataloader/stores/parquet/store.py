"""Reading of streams from tables: runs of rows with the same key, or files.

Guarantee: streams are found without handling single rows.
A group is read once while streams of the process use it. Numbers are copied once.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stream_dataloader._engine.items.structure import flatten
from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.files import damage_named, hashed, package, stamp_of
from stream_dataloader.stores._base.formats import given_columns, given_options
from stream_dataloader.stores._base.rows import Pictures, read_rows, row_of
from stream_dataloader.stores._base.store import Store
from stream_dataloader.stores._base.stream import cut
from stream_dataloader.stores.parquet.columns import Column, Source, changes, column_of, decoded, list_lengths
from stream_dataloader.stores.parquet.tables import (
    DatasetTable,
    TableFile,
    dataset_of,
    decoded_features,
    find_tables,
)
from stream_dataloader.streams._media.limits import DEFAULT, Limits, check_empty_rows
from stream_dataloader.streams._media.picture import Picture
from stream_dataloader.streams._media.section import whole_number
from stream_dataloader.streams._media.targets import IGNORE_INDEX, check_ignore_index
from stream_dataloader.streams.cache import FileCache, is_url, open_local
from stream_dataloader.streams.cache.gate import Files, Gate, check_files

__all__ = ["ParquetStore", "RowSteps", "Rows"]


class ParquetStore(Store):
    """Tables as streams: a run of rows with one key is a stream, and each row is a step.

    Items are dicts by column.

    Args:
        path: A file, a folder of files, which may have folders `key=value`,
            a pattern `"data-{00..15}.parquet"` or `"*.parquet"`, or a URL. Files are
            read in the order of their names. Or a `Dataset`, `DatasetDict` or
            `IterableDataset` of Hugging Face.
        split: Name of the split of a `DatasetDict`.
        stream: Name of a column: a run of rows with the same value is a stream, even across
            files. None: each file is a stream.
        elements: Each row is a stream, with the elements of its lists as items. The lists
            of a row must have the same length in all columns.
        targets: With `elements`, items are `{"input": token, "target": next
            token}`. Targets are int64.
        ignore_index: Target at the end of a row; give the loss the same number.
        columns: Names of the columns to read, in this order; None reads all.
        decode: Columns of encoded images: `{"image": "image"}`; with dots in
            structs. None: columns of the feature `Image`.
        fill_null: Value in place of nulls, or values by column. None: nulls
            raise an error.
        size: `(height, width)` of images; None keeps their size.
        layout: `"CHW"`, channels first, or `"HWC"`.
        color: `"rgb"` or `"gray"`.
        upright: Turn images as their EXIF data say.
        cache_bytes: Largest size of decoded row groups that are kept although no stream uses them.
        cache: Cache for files from URLs.
        files: Files of pictures that a `path` in the table may name: `"inside"` the folder or URL of the table, or
            `"anywhere"`, also URLs. A `Dataset` has no folder.
        limits: Largest sizes of decoded data; see `streams.Limits`. None: the defaults.
    """

    format: ClassVar[str] = "parquet"

    def __init__(
        self,
        path: Any,
        *,
        split: str | None = None,
        stream: str | None = None,
        elements: bool = False,
        targets: bool = False,
        ignore_index: int = IGNORE_INDEX,
        columns: Sequence[str] | None = None,
        decode: Mapping[str, str] | None = None,
        fill_null: Any = None,
        size: tuple[int, int] | None = None,
        layout: Literal["CHW", "HWC"] = "CHW",
        color: Literal["rgb", "gray"] = "rgb",
        upright: bool = True,
        cache_bytes: int = 256 << 20,
        cache: FileCache | None = None,
        files: Files = "inside",
        limits: Limits | None = None,
    ) -> None:
        self._given: Any = None if isinstance(path, (str, os.PathLike)) else dataset_of(path, split)
        self._features = decoded_features(getattr(self._given, "features", None))
        if self._given is not None:
            named = type(self._given).__name__, self._given.split
            path, split = " ".join(filter(None, named)), None
        if decode is None:
            decode = {name: "image" for name, kind in self._features.items() if kind == "Image"}
        decode = dict(decode)
        check_files(files)
        ignore_index = check_ignore_index(ignore_index, targets=targets)
        super().__init__(path, **given_options(locals(), columns=given_columns(columns)))
        package("pyarrow", "ParquetStore", "arrow")
        if elements and stream is not None:
            raise ValueError("elements=True and stream= are both given")
        if targets and not elements:
            raise ValueError("targets=True is for elements=True")
        self._ignore_index = ignore_index if targets else None
        if wrong := {name: kind for name, kind in decode.items() if kind != "image"}:
            raise ValueError(f"decode is {wrong}; columns are decoded as 'image'")
        whole_number("cache_bytes", cache_bytes, "give a number of bytes from 0 on", 0)
        picture = Picture(size=size, layout=layout, color=color, upright=upright, limits=limits)
        self._pictures = Pictures(picture, "reading images of a table") if decode else None
        _ = self.index

    def _state(self) -> str:
        return stamp_of(file["filename"] for file in getattr(self._given, "cache_files", ()))

    def _with_columns(self, names: list[str]) -> Store:
        given = self.path if self._given is None else self._given
        return type(self)(given, **self._options | {"columns": names})

    def _read_index(self) -> Any:
        if self._given is None:
            cache = self._options["cache"]
            paths = find_tables(self.path, cache, self._options["split"])
            files: list[Any] = [TableFile(path, self.path, cache, self._options["limits"]) for path in paths]
        else:
            files = [DatasetTable(self.path, self._given)]
        wanted = self._options["columns"] or files[0].shown
        for file in files:
            self._needed(wanted, file.columns, file.name)
            if self._options["columns"] is None and (more := sorted(set(file.shown).difference(wanted))):
                what = f"{file.name} has columns {more}, which {files[0].name} lacks"
                raise StoreError(f"{what}; name the columns that all files have by columns=")
        options: dict[str, Any] = {name: self._options[name] for name in ("elements", "cache_bytes")}
        key = self._options["stream"]
        return Rows(self.path, files, key, wanted, self._decode, ignore_index=self._ignore_index, **options)

    def _needed(self, wanted: Iterable[str], there: Collection[str], name: str) -> list[str]:
        key = self._options["stream"]
        images = (image.split(".")[0] for image in self._options["decode"])
        needed = list(dict.fromkeys([*wanted, *images, *([] if key is None else [key])]))
        if missing := sorted(set(needed).difference(there)):
            raise StoreError(f"{name} has no column {missing}; it has {sorted(there)}")
        for column, kind in self._features.items():
            if kind != "Image" and column.split(".")[0] in wanted:
                what = f"{name}: {column!r} is of the feature {kind}, which is not decoded"
                raise StoreError(f"{what}; leave it out by columns=, or cast_column it to {kind}(decode=False)")
        return needed

    def _decode(self, array: Any, source: Source) -> Column:
        fill = self._options["fill_null"]
        fill = fill.get(source.column) if isinstance(fill, Mapping) else fill
        images = frozenset(self._options["decode"])
        pictures: dict[str, Any] = {"images": images, "pictures": self._pictures, "read_named": self._read_named}
        limits = self._options["limits"] or DEFAULT
        return column_of(array, source._replace(**pictures, fill=fill, limits=limits))

    def _read_named(self, name: str, table: str, what: str) -> bytes:
        """Read the picture file that a row of a table names, relative to the table's folder."""
        if self._given is not None and self._options["files"] != "anywhere":
            told = f"{what} names the file {shorten(name)}, and a {type(self._given).__name__} has no folder"
            raise StoreError(f"{told}; give files='anywhere' if you trust the names in it")
        first, chain, rest = table.partition("::")
        folder = f"{first.rpartition('/')[0]}{chain}{rest}" if is_url(table) else os.path.dirname(table)
        root = self.path if self._given is None and os.path.isdir(self.path) else folder
        path = Gate(root, self._options["files"]).named(name, what, base=folder)
        with damage_named(what), open_local(path, self._options["cache"]) as local, open(local.path, "rb") as file:
            return file.read()

    def _open_steps(self, number: int) -> RowSteps:
        rows: Rows = self.index
        first, count = int(rows.start[number]), int(rows.lengths[number])
        return RowSteps(rows, first, count, self.name_of(number))

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
        return sum(int(file.size) for file in rows.files)


class _Group(NamedTuple):
    """Decoded rows `[first, stop)`, counted over all files."""

    first: int
    stop: int
    columns: dict[str, Column]
    file: Any
    size: int  # in bytes


class Rows:
    """Index of streams and groups, in rows or elements counted over all files."""

    def __init__(
        self,
        path: str,
        files: Sequence[Any],
        key: str | None,
        columns: Sequence[str],
        decode: Callable[[Any, Source], Column],
        cache_bytes: int,
        *,
        elements: bool = False,
        ignore_index: int | None = None,
    ) -> None:
        self.files, self._path, self._key, self._columns = files, path, key, columns
        self._decode, self._limit = decode, cache_bytes
        self._kept: OrderedDict[tuple[int, int], _Group] = OrderedDict()  # the last ones used
        self._lock = threading.Lock()
        #: For each file and group, the number of elements of each row.
        self._lists = lists = [_all_lengths(file, columns) for file in files if elements]
        self._ignore_index = ignore_index
        #: For each file, the first row of each group, and the number of rows.
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
        files = "".join(f"{file.digest} {_short(file.name, self._path)} " for file in self.files)
        targets = "" if self._ignore_index is None else f" targets {self._ignore_index}"
        kind = " elements" * bool(self._lists) + targets
        return hashed(f"{files}{self._key} {self._columns}{kind}")

    def __len__(self) -> int:
        return len(self.start)

    def key(self, number: int) -> Any:
        return self.keys[number]

    def file_at(self, row: int) -> int:
        return int(np.searchsorted(self._begin, row, "right")) - 1

    def _runs(self, key: str) -> tuple[NDArray[np.int64], list[Any]]:
        first: dict[Any, int] = {}  # first row of each key
        last: Any = ()  # equal to no key
        for file, begin in zip(self.files, self._begin.tolist(), strict=False):
            with damage_named(file.name):
                for row, value in zip(*changes(file.read([key])[key], key, file.name), strict=True):
                    if value in first and (row or value != last):
                        what = f"{file.name}, row {row}: rows with {key} = {value!r}"
                        raise StoreError(f"{what} are in several places; sort by it (table.sort_by, Dataset.sort)")
                    first.setdefault(value, begin + row)
                    last = value
        return np.array(list(first.values()), np.int64), list(first)

    def at(self, row: int) -> _Group:
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
        lengths = self._lists[place][group] if self._lists else None
        with damage_named(file.name):
            arrays = file.read(self._columns, group)
            columns = decoded(arrays, self._decode, file.name, first, lengths, ignore_index=self._ignore_index)
        size = sum(int(column.array.nbytes) for column in flatten(columns)[1])
        check_empty_rows(stop - first, size, file.name)
        return _Group(begin + first, begin + stop, columns, file, size)


def _all_lengths(file: Any, columns: Sequence[str]) -> list[NDArray[np.int64]]:
    begins = enumerate(file.first[:-1].tolist())
    return [list_lengths(file.read(columns, group), file.name, row) for group, row in begins]


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
        leaf, done = out, 0
        while isinstance(leaf, dict):
            leaf = next(iter(leaf.values()))
        for group, row, count in self._pieces(self._first + start, len(leaf)):
            part = out if count == len(leaf) else cut(out, done, done + count)
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
