"""Reads LMDB stores: those that were packed, and, by a function for their values, any other LMDB.

Guarantee: opening a store reads its tables only; a database is opened, and its tree is checked, when a process reads of
it first. A window is copied once, from the map into the batch. A process compares each value with its checksum when it
reads it first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from stream_dataloader._items.layout import as_array
from stream_dataloader._items.structure import flatten, unflatten
from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.header import HEADER
from stream_dataloader.stores._base.leaves import check_names, chosen, leaf_names, names_given, owned
from stream_dataloader.stores._base.packed import PackedIndex
from stream_dataloader.stores._base.store import Index, Store
from stream_dataloader.stores._base.stream import Steps
from stream_dataloader.stores._base.structure import classes_of
from stream_dataloader.stores._base.tables import crc_of
from stream_dataloader.stores.lmdb.databases import Database, Shelf, import_lmdb
from stream_dataloader.stores.lmdb.format import OWN_ROWS, VERSION, Header, check_table, load_header
from stream_dataloader.stores.lmdb.plain import PlainIndex, PlainSteps
from stream_dataloader.stores.lmdb.windows import Windows, check_value

__all__ = ["LmdbStore"]


class LmdbStore(Store):
    """An LMDB store: windows of steps as `stores.pack(format="lmdb")` writes them, or any LMDB with `decode`.

    Args:
        path: The folder that was packed; or any LMDB file, or a folder with some, if there is `decode`.
        leaves: Names of the leaves to read of items that are dicts; None reads all. Of a packed store.
        open_databases: How many databases a process has open at most, where memory is short; None: all that it reads.
        readahead: Whether the system reads ahead in the files. Streams are read in order, so it mostly helps; it does
            not where the values that are read next to each other in time lie apart, and there is too little memory.
        check: Whether a process compares a value with its checksum when it reads it first. Of a packed store.
        decode: What makes an item of a value: called with its bytes. It is sent to workers. For LMDB files that were
            not packed as a store; each key is a time step, in LMDB's order, which is that of the keys' bytes.
        separator: Keys that are alike up to the last one of it are a stream; keys without it are left out. None: each
            database is a stream. With `decode`.

    Raises:
        FileNotFoundError: There is nothing.
        StoreError: The store is unfinished, damaged or of another version, or has no such leaf, or is none of ours and
            there is no `decode`.
        TypeError: `leaves` is no list of names, or `decode` no function.
        ImportError: The package lmdb is missing.

    Checked against py-lmdb 3.0.0, with LMDB 0.9.36.
    """

    format: ClassVar[str] = "lmdb"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        leaves: tuple[str, ...] | list[str] | None = None,
        open_databases: int | None = None,
        readahead: bool = True,
        check: bool = True,
        decode: Callable[[bytes], Any] | None = None,
        separator: str | None = None,
    ) -> None:
        if open_databases is not None and open_databases < 1:
            raise ValueError(f"open_databases is {open_databases}; one has to be open to be read, or None for all")
        if decode is not None and not callable(decode):
            raise TypeError(f"decode is {decode!r}; give a function that makes an item of a value's bytes, or None")
        if separator is not None and (decode is None or not separator):
            raise ValueError(f"separator is {separator!r}; give some text, with decode=, or None")
        import_lmdb()
        super().__init__(
            path,
            leaves=names_given(leaves),
            open_databases=open_databases,
            readahead=readahead,
            check=check,
            decode=decode,
            separator=separator,
        )
        self._classes: dict[str, type] = {}
        self._check_all = True
        index = self.index
        if isinstance(index, _PackedIndex):
            self._classes = {} if index.header.structure is None else classes_of(index.header.structure)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_check_all": False}

    def _read_index(self) -> Index:
        if not os.path.exists(self.path):
            raise FileNotFoundError(f"there is no store at {self.path}; give the folder that stores.pack wrote")
        options = self._options
        shelf = Shelf(options["open_databases"], options["readahead"])
        if options["decode"] is not None:
            if os.path.exists(os.path.join(self.path, HEADER)):
                raise ValueError(f"{self.path} was packed as a store, and its items need no decode=; leave it out")
            if options["leaves"] is not None:
                raise ValueError("leaves= is for stores that were packed; have decode= return what is wanted")
            return PlainIndex(self.path, shelf, options["decode"], options["separator"])
        if not os.path.exists(os.path.join(self.path, HEADER)):
            raise StoreError(
                f"{self.path} has no {HEADER}, and so was not packed as a store; to read an LMDB as it is, give "
                "decode=, a function that makes an item of a value's bytes"
            )
        header = load_header(self.path, self._classes)
        check_names(options["leaves"], header.structure, self.path)
        return _PackedIndex(self.path, header, shelf, check_all=self._check_all)

    def _open_steps(self, number: int) -> Steps:
        index = self.index
        if isinstance(index, PlainIndex):
            return PlainSteps(index, number, self.name_of(number))
        return _PackedSteps(index, number, self.name_of(number), self._options["leaves"], self._options["check"])

    def key(self, number: int) -> str:
        return str(self.index.key(self._check_number(number)))

    def metadata(self, number: int) -> Mapping[str, Any]:
        number, index = self._check_number(number), self.index
        return index.tables.note(number) if isinstance(index, _PackedIndex) else {}

    def _version(self) -> str:
        return str(VERSION) if isinstance(self.index, _PackedIndex) else ""

    def _metadata(self) -> Mapping[str, Any]:
        return self.index.header.metadata if isinstance(self.index, _PackedIndex) else {}

    def _leaves(self) -> dict[str, str]:
        if not isinstance(index := self.index, _PackedIndex):
            return super()._leaves()
        structure, leaves = chosen(self._options["leaves"], index.header.structure, index.header.leaves)
        return dict(zip(leaf_names(structure), map(str, leaves), strict=True))

    def check_stream(self, number: int) -> None:
        """Compare a stream with its checksums."""
        index = self.index
        if isinstance(index, PlainIndex):
            super().check_stream(number)
            return
        _PackedSteps(index, number, self.name_of(number), None, True).verify()


class _PackedIndex(PackedIndex[Header]):
    """The tables of a store, and its databases; the tables are inherited by fork."""

    def __init__(self, path: str, header: Header, shelf: Shelf, *, check_all: bool) -> None:
        super().__init__(path, header, OWN_ROWS, check=check_all)
        if check_all:
            check_table(self.table, header, self.tables.path)
        self.windows = Windows(header.leaves, header.codec)
        self.databases = [
            Database(os.path.join(path, spec.file), shelf, (spec.size, spec.crc)) for spec in header.databases
        ]


class _PackedSteps:
    """One stream's steps; see `Steps`."""

    def __init__(self, index: _PackedIndex, number: int, name: str, wanted: list[str] | None, check: bool) -> None:
        header = index.header
        self._name = name
        self._first, self._steps = int(index.table[0, number]), int(index.table[1, number])
        self._crc = int(index.table[5, number])
        self._window = header.window
        self._windows = index.windows
        self._database = index.databases[int(index.table[4, number])] if self._steps else None
        self._check = check
        self._specs = header.leaves
        self._structure, self._leaves = chosen(wanted, header.structure, range(len(header.leaves)))
        self._kept: tuple[int, Any] | None = None  # the latest window that was decompressed

    def __len__(self) -> int:
        return self._steps

    def item(self, index: int) -> Any:
        rows = [np.empty((1, *self._specs[leaf].shape), self._specs[leaf].stored) for leaf in self._leaves]
        self._read(index, 1, rows)
        leaves = [owned(row[0], self._specs[leaf].dtype) for row, leaf in zip(rows, self._leaves, strict=True)]
        assert self._structure is not None
        return unflatten(self._structure, iter(leaves))

    def read(self, start: int, out: Any) -> None:
        _, leaves = flatten(out)
        rows = [as_array(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._read(start, len(rows[0]), rows)

    def _read(self, start: int, count: int, rows: list[Any]) -> None:
        """Write steps `[start, start + count)` to rows of the leaves that are wanted."""
        out: list[Any] = [None] * len(self._specs)
        for leaf, row in zip(self._leaves, rows, strict=True):
            out[leaf] = row
        at = start
        while at < start + count:
            window, begin = divmod(at, self._window)
            steps = min(self._window, self._steps - window * self._window)
            stop = min(steps, begin + start + count - at)
            self._copy(window, steps, begin, stop, out, at - start)
            at += stop - begin

    def _copy(self, window: int, steps: int, begin: int, stop: int, out: list[Any], row: int) -> None:
        if self._kept is not None and self._kept[0] == window:
            self._windows.copy(self._kept[1], steps, begin, stop, out, row)
            return
        assert self._database is not None
        number = self._first + window
        with self._database.reading() as opened:
            value = self._value(opened, number, window)
            try:
                if self._check and not self._database.checked[number]:
                    check_value(value)
                    self._database.checked[number] = 1
                body = self._windows.body(value, steps)
                self._windows.copy(body, steps, begin, stop, out, row)
            except ValueError as error:
                raise self._damaged(window, str(error)) from error
        if self._windows.compressed:
            self._kept = window, body

    def _value(self, opened: Any, number: int, window: int) -> Any:
        value = opened.get(number.to_bytes(8, "big"))
        if value is None:
            raise self._damaged(window, "it is missing")
        return value

    def _damaged(self, window: int, what: str) -> StoreError:
        assert self._database is not None
        return StoreError(
            f"{self._name}: the value of steps from {window * self._window} on, in {self._database.path}, is damaged: "
            f"{what}; pack the store anew"
        )

    def verify(self) -> None:
        """Read all values, also those that were checked already, and compare the whole stream's checksum.

        Raises:
            StoreError: Something is damaged.
        """
        crc = 0
        for window in range(-(-self._steps // self._window)):
            assert self._database is not None
            with self._database.reading() as opened:
                value = self._value(opened, self._first + window, window)
                try:
                    crc = crc_of(check_value(value).to_bytes(4, "little"), crc)
                    steps = min(self._window, self._steps - window * self._window)
                    self._windows.body(value, steps)
                except ValueError as error:
                    raise self._damaged(window, str(error)) from error
        if crc != self._crc:
            raise StoreError(f"{self._name} is damaged: its values are those of another stream; pack the store anew")

    def close(self) -> None:
        self._kept = None
