"""Reading of packed LMDB stores, and of any other LMDB with a function that decodes its values.

A packed store is described in `memmap/packed`; `start` is a stream's first value. It also has ::

    streams.bin    two more rows: the database, and CRC-32 of its values' checksums
    0.lmdb ...     databases, one per file. Keys are numbers from 0, 8 bytes, big-endian;
                   a value is a window of steps, see `windows`; a stream's last may be shorter

Guarantee: opening a packed store reads only its tables. A window is copied once.
A file that is damaged, cut off or replaced raises an error.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from stream_dataloader._engine.items.layout import as_array
from stream_dataloader._engine.items.structure import flatten, unflatten
from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.files import hashed, inside
from stream_dataloader.stores._base.formats import given_columns, given_options
from stream_dataloader.stores._base.leaves import owned
from stream_dataloader.stores._base.store import Store
from stream_dataloader.stores._base.stream import Steps, put_row
from stream_dataloader.stores.lmdb.pages import Databases, ResultT, natural_key
from stream_dataloader.stores.lmdb.windows import Windows, check_value
from stream_dataloader.stores.memmap.packed import HEADER, PackedIndex, PackedStore, check_sizes
from stream_dataloader.streams._media.limits import Limits
from stream_dataloader.streams._media.listing import entries_in
from stream_dataloader.streams.cache.gate import Files

__all__ = ["KIND", "LmdbStore"]

KIND = "lmdb store"

#: Number of keys of a database that are read to check whether their order is natural.
_LOOKED_AT = 2000


class LmdbStore(PackedStore):
    """LMDB store, as written by `stores.pack(format="lmdb")`, or any LMDB with `decode`.

    Args:
        path: The folder that was packed; with `decode` any LMDB file, or a folder with some.
        columns: Names of the leaves to read from a packed store; None reads all.
        open_databases: Largest number of databases that a process keeps open; None: all that it reads.
        readahead: Whether the system reads ahead.
        check: Whether values of a packed store are compared with checksums.
        decode: Function that makes an item from a value's bytes, in files that were not packed. Each key is
            a time step, except those such as `__len__`.
        order: Order of keys, with `decode`: `"bytes"`, or `"natural"`, with `frame_2` before `frame_10`.
            None: by bytes, with a warning if that is not natural.
        stream: A separator, such as `"/"`, with `decode`: keys with the same text before the last separator are
            a stream, and other keys are left out. None: each database is a stream.
        db: Name of a database in each file, with `decode`. None: the unnamed database.
        files: Files that links in the folder may lead to: `"inside"` it, or `"anywhere"`.
        limits: Largest sizes of decoded data; see `streams.Limits`. None: the defaults.

    Checked against py-lmdb 3.0.0, with LMDB 0.9.36.
    """

    format: ClassVar[str] = "lmdb"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        columns: Sequence[str] | None = None,
        open_databases: int | None = None,
        readahead: bool = True,
        check: bool = True,
        decode: Callable[[bytes], Any] | None = None,
        order: Literal["bytes", "natural"] | None = None,
        stream: str | None = None,
        db: str | None = None,
        files: Files = "inside",
        limits: Limits | None = None,
    ) -> None:
        if open_databases is not None and open_databases < 1:
            raise ValueError(f"open_databases is {open_databases}; give 1 or more, or None")
        if stream is not None and (decode is None or not stream):
            raise ValueError(f"stream is {stream!r}; give a separator, with decode=")
        if decode is None and (db, order) != (None, None):
            raise ValueError(f"db is {db!r}, order is {order!r}; give decode=")
        if order not in (None, "bytes", "natural"):
            raise ValueError(f"order is {order!r}; use 'bytes' or 'natural'")
        super().__init__(path, **given_options(locals(), columns=given_columns(columns)))

    def _read_index(self) -> _PackedIndex | _PlainIndex:
        if not os.path.exists(self.path):
            raise FileNotFoundError(f"there is no store at {self.path}; give its folder")
        options = self._options
        was_packed = os.path.exists(os.path.join(self.path, HEADER))
        if options["decode"] is None:
            if not was_packed:
                raise StoreError(f"{self.path} was not packed; for any LMDB, give decode=")
            packed = _PackedIndex(
                self.path, self._classes, options["columns"], check=self._check_all, limits=options["limits"]
            )
            packed.databases = Databases(packed.files, options)
            return packed
        if was_packed or options["columns"] is not None:
            raise ValueError("decode= is for an LMDB that was not packed, columns= for one that was")
        return _PlainIndex(self.path, options)

    def _open_steps(self, number: int) -> Steps:
        index, name = self.index, self.name_of(number)
        if isinstance(index, _PlainIndex):
            return _PlainSteps(index, number, name, self._options["decode"])
        return _PackedSteps(index, number, name, self._options["check"])

    def _leaves(self) -> dict[str, str]:
        return Store._leaves(self) if isinstance(self.index, _PlainIndex) else super()._leaves()

    def check_stream(self, number: int) -> None:
        if isinstance(index := self.index, _PlainIndex):
            super().check_stream(number)
        else:
            _PackedSteps(index, number, self.name_of(number), True).verify()


class _PackedIndex(PackedIndex):
    """Index that also knows the windows of steps."""

    kind: ClassVar[str] = KIND
    databases: Databases

    def _read_format(self, folder: str, content: Mapping[str, Any]) -> int:
        self.window: int = content["window"]
        self.files: dict[str, tuple[int, ...]] = {
            inside(folder, found["file"], folder): (found["size"], found["entries"], found["crc"])
            for found in content["databases"]
        }
        check_sizes(self.window - 1, *itertools.chain(*self.files.values()))
        self.windows = Windows(self.leaves, content["codec"], limits=self._limits)
        return 2

    def _streams_lie_inside(self) -> bool:
        start, steps, database = self.table[[0, 1, 4]][:, self.lengths > 0]
        entries = np.array([entries for _, entries, _ in self.files.values()], np.int64)
        is_there = (database >= 0) & (database < len(entries))
        return bool(is_there.all() and (start + -(-steps // self.window) <= entries[database]).all())


class _PackedSteps:
    """One stream's steps; see `Steps`."""

    def __init__(self, index: _PackedIndex, number: int, name: str, check: bool) -> None:
        self._name, self._check = name, check
        self._first, self._steps, _, _, self._database, self._crc = index.table[:6, number].tolist()
        self._window, self._windows, self._databases = index.window, index.windows, index.databases
        self._structure, self._leaves = index.item, index.places
        self._specs = [index.leaves[leaf] for leaf in self._leaves]
        self._kept: tuple[int, Any] = (-1, None)  # the last decompressed window

    def __len__(self) -> int:
        return int(self._steps)

    def item(self, index: int) -> Any:
        rows = [np.empty((1, *spec.shape), spec.stored) for spec in self._specs]
        self._read(index, rows)
        assert self._structure is not None
        leaves = [owned(row[0], spec.dtype) for row, spec in zip(rows, self._specs, strict=True)]
        return unflatten(self._structure, iter(leaves))

    def read(self, start: int, out: Any) -> None:
        _, leaves = flatten(out)
        self._read(start, [as_array(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])

    def _read(self, start: int, rows: list[Any]) -> None:
        done, count = 0, len(rows[0])
        while done < count:
            window, begin = divmod(start + done, self._window)
            stop = min(begin + count - done, self._window)
            out = [row[done : done + stop - begin] for row in rows]
            if self._kept[0] == window:
                self._copy(self._kept[1], begin, out)
            else:
                self._value(window, functools.partial(self._take, window, begin, out))
            done += stop - begin

    def _take(self, window: int, begin: int, out: list[Any], value: Any) -> None:
        checked, position = self._databases.checked(self._database), self._first + window
        if self._check and not checked[position]:
            check_value(value)
            checked[position] = 1
        columns = self._columns(window, value)
        self._copy(columns, begin, out)
        if self._windows.is_compressed:
            self._kept = (window, columns)

    def _columns(self, window: int, value: Any) -> list[Any]:
        return self._windows.columns(value, min(self._window, self._steps - window * self._window))

    def _copy(self, columns: list[Any], begin: int, out: list[Any]) -> None:
        for leaf, target in zip(self._leaves, out, strict=True):
            self._windows.copy(columns[leaf][begin : begin + len(target)], target)

    def _value(self, window: int, take: Callable[[Any], ResultT]) -> ResultT:
        name = f"{self._name}: the value of steps from {window * self._window} on"
        return self._databases.value(self._database, self._first + window, name, take)

    def verify(self) -> None:
        crc = 0
        for window in range(-(-self._steps // self._window)):
            crc = zlib.crc32(self._value(window, check_value).to_bytes(4, "little"), crc)
            self._value(window, functools.partial(self._columns, window))
        if crc != self._crc:
            raise StoreError(f"{self._name} is damaged: its values are those of another stream; pack it again")

    def close(self) -> None:
        pass


class _PlainIndex:
    """Index of the streams of databases that were not packed."""

    structure = None

    def __init__(self, path: str, options: Mapping[str, Any]) -> None:
        is_natural = options["order"] == "natural"
        names = _files_at(path, natural=is_natural)
        self.databases = Databases(dict.fromkeys(names), options)
        separator = options["stream"]
        of = (separator, options["db"]) if options["db"] else separator
        content = repr(("natural", of) if is_natural else of)
        self._names: list[str] = []
        self.streams: list[tuple[int, int, int]] = []  # database, first value, stop
        for number, (name, known) in enumerate(zip(names.values(), self.databases.known, strict=True)):
            rows, tree = self.databases.file(number).rows, self.databases.tree(number)
            content += repr((name, known.size, tree.crc, known.modified_ns))
            groups = {"": (0, len(tree.keys))}
            if separator is not None:
                groups = _groups(tree.names(rows), separator)
            for group, bounds in groups.items():
                self._names.append("/".join(filter(None, [name if len(names) > 1 or not group else "", group])))
                self.streams.append((number, *bounds))
            if groups and options["order"] is None:
                start, stop = next(iter(groups.values()))
                _warn_of_order(name, tree.names(rows, start, min(stop, start + _LOOKED_AT)))
        self.lengths = np.array([end - begin for _, begin, end in self.streams], np.int64)
        self.fingerprint = hashed(content)

    def __len__(self) -> int:
        return len(self._names)

    def key(self, number: int) -> str:
        return self._names[number]


def _files_at(path: str, *, natural: bool) -> dict[str, str]:
    if os.path.isfile(path):
        return {path: os.path.basename(path)}
    if os.path.isfile(data := os.path.join(path, "data.mdb")):
        return {data: os.path.basename(os.path.abspath(path))}
    found = {}
    entries = entries_in(path)
    for entry in entries if natural else sorted(entries, key=lambda entry: entry.name):
        file = os.path.join(entry.path, "data.mdb") if entry.is_dir() else entry.path
        if file.endswith((".lmdb", ".mdb")) and entry.name != "lock.mdb" and os.path.isfile(file):
            found[file] = entry.name
    if not found:
        raise StoreError(f"{path} has no LMDB in it: no *.lmdb, *.mdb or folder with one")
    return found


def _warn_of_order(name: str, keys: list[bytes]) -> None:
    """Warn about neighbouring keys that differ only in numbers which decrease."""
    texts = [re.split(rb"\d+", key) for key in keys]
    for i, (one, other) in enumerate(itertools.pairwise(keys)):
        if texts[i] == texts[i + 1] and natural_key(one) > natural_key(other):
            found = f"{name} has {other!r} after {one!r}"
            warnings.warn(f"{found}; give order='natural' or 'bytes'", stacklevel=6)
            return


def _groups(keys: list[bytes], separator: str) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    stop = 0
    for (group, middle), alike in itertools.groupby(keys, lambda key: key.rpartition(os.fsencode(separator))[:2]):
        start, stop = stop, stop + len(list(alike))
        name = group.decode("utf-8", "backslashreplace")
        if middle and name in found:
            raise StoreError(f"with {separator!r}, keys of stream {name!r} do not follow each other")
        if middle:
            found[name] = (start, stop)
    return found


class _PlainSteps:
    """One stream's steps; see `Steps`."""

    def __init__(self, index: _PlainIndex, number: int, name: str, decode: Callable[[bytes], Any]) -> None:
        self._databases, self._name, self._decode = index.databases, name, decode
        self._database, self._begin, self._end = index.streams[number]

    def __len__(self) -> int:
        return self._end - self._begin

    def item(self, index: int) -> Any:
        position, name = self._begin + index, f"{self._name}, step {index}"
        value = self._databases.value(self._database, position, name, bytes)
        try:
            return self._decode(value)
        except Exception as error:
            file, tree = self._databases.file(self._database), self._databases.tree(self._database)
            (key,) = tree.names(file.rows, position, position + 1)
            raise StoreError(f"{name} (key {key!r}): decode= raised {type(error).__name__}: {error}") from error

    def read(self, start: int, out: Any) -> None:
        _, leaves = flatten(out)
        for row in range(len(leaves[0])):
            put_row(self.item(start + row), out, row, f"{self._name}, step {start + row}")

    def close(self) -> None:
        pass
