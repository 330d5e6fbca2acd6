"""Reads LMDB stores: those that were packed, and, by a function for their values, any other LMDB.

A packed store, see `_base/packed`; `start` is the number of a stream's first value in its database, and besides there
are ::

    streams.bin    two more rows: the database, and CRC-32 of its values' checksums
    0.lmdb ...     databases, a file each, as LMDB 0.9 writes them (data version 1). Keys are numbers from 0, 8 bytes,
                   big-endian, so that they are in order; a value holds a window of steps, see `windows`

All windows of a stream but the last have the same number of steps.

Guarantee: opening a packed store reads its tables only. A window is copied once, from the map into the batch. A file
that is damaged, cut off or replaced is an error, not a crash.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import numpy as np
import torch

from stream_dataloader._items.layout import as_array
from stream_dataloader._items.structure import flatten, unflatten
from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.files import inside
from stream_dataloader.stores._base.leaves import LeafSpec, chosen, leaf_names, owned
from stream_dataloader.stores._base.mapped import LeafFile
from stream_dataloader.stores._base.options import given_columns, renamed
from stream_dataloader.stores._base.packed import HEADER, PackedIndex, PackedStore, check_sizes
from stream_dataloader.stores._base.store import Index
from stream_dataloader.stores._base.stream import Steps, put_row
from stream_dataloader.stores.lmdb.pages import Tree, read_tree
from stream_dataloader.stores.lmdb.windows import CODECS, Windows, check_value
from stream_dataloader.streams._media.known_file import KnownFile

__all__ = ["KIND", "LmdbStore"]

KIND = "lmdb store"

_SUFFIXES = (".lmdb", ".mdb")


class LmdbStore(PackedStore):
    """An LMDB store: windows of steps as `stores.pack(format="lmdb")` writes them, or any LMDB with `decode`.

    Args:
        path: The folder that was packed; or any LMDB file, or a folder with some, if there is `decode`.
        columns: Names of the leaves to read of items that are dicts; None reads all. Of a packed store.
        open_databases: How many databases a process has open at most; None: all that it reads.
        readahead: Whether the system reads ahead in the files. It does not help where values that are read next to
            each other in time lie apart, and there is too little memory.
        check: Whether a process compares a value with its checksum when it reads it first. Of a packed store.
        decode: What makes an item of a value: called with its bytes. It is sent to workers. For LMDB files that were
            not packed as a store; each key is a time step, in LMDB's order, which is that of the keys' bytes.
        stream: A separator, such as `"/"`: keys that are alike up to the last one of it are a stream; keys without it
            are left out. None: each database is a stream. With `decode`.

    Raises:
        FileNotFoundError: There is nothing.
        StoreError: The store is unfinished, damaged or of another version, or has no such leaf, or is none of ours and
            there is no `decode`.
        TypeError: `columns` is no list of names, or `decode` no function.

    Checked against py-lmdb 3.0.0, with LMDB 0.9.36.
    """

    format: ClassVar[str] = "lmdb"

    @renamed(leaves="columns", separator="stream")
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        columns: Sequence[str] | None = None,
        open_databases: int | None = None,
        readahead: bool = True,
        check: bool = True,
        decode: Callable[[bytes], Any] | None = None,
        stream: str | None = None,
    ) -> None:
        if open_databases is not None and open_databases < 1:
            raise ValueError(f"open_databases is {open_databases}; one has to be open to be read, or None for all")
        if decode is not None and not callable(decode):
            raise TypeError(f"decode is {decode!r}; give a function that makes an item of a value's bytes, or None")
        if stream is not None and (decode is None or not stream):
            raise ValueError(f"stream is {stream!r}; give some text that separates, with decode=, or None")
        super().__init__(
            path,
            columns=given_columns(columns),
            open_databases=open_databases,
            readahead=readahead,
            check=check,
            decode=decode,
            stream=stream,
        )

    def _read_index(self) -> Index:
        if not os.path.exists(self.path):
            raise FileNotFoundError(f"there is no store at {self.path}; give the folder that stores.pack wrote")
        options = self._options
        was_packed = os.path.exists(os.path.join(self.path, HEADER))
        if options["decode"] is None and not was_packed:
            raise StoreError(
                f"{self.path} has no {HEADER}, and so was not packed as a store; to read an LMDB as it is, give decode="
            )
        if options["decode"] is None:
            return _PackedIndex(self.path, options, self._classes, check=self._check_all)
        if was_packed:
            raise ValueError(f"{self.path} was packed as a store, and its items need no decode=; leave it out")
        if options["columns"] is not None:
            raise ValueError("columns= is for stores that were packed; have decode= return what is wanted")
        return _PlainIndex(self.path, options)

    def _open_steps(self, number: int) -> Steps:
        index, name = self.index, self.name_of(number)
        if isinstance(index, _PlainIndex):
            return _PlainSteps(index, number, name, self._options["decode"])
        return _PackedSteps(index, number, name, self._options["columns"], self._options["check"])

    def _leaves(self) -> dict[str, str]:
        if isinstance(index := self.index, _PlainIndex):
            return super()._leaves()
        structure, leaves = chosen(self._options["columns"], index.structure, index.leaves)
        return dict(zip(leaf_names(structure), map(str, leaves), strict=True))

    def check_stream(self, number: int) -> None:
        """Compare a stream with its checksums."""
        if isinstance(index := self.index, _PlainIndex):
            super().check_stream(number)
        else:
            _PackedSteps(index, number, self.name_of(number), None, True).verify()


class _Databases:
    """The files of a store, mapped when they are read, of which a few are open at a time.

    Args:
        files: Of each its size, how many values it has, and `Tree.crc`; nothing if that is not known.
        options: Of the store.

    Attributes:
        checked: For each value of each file 1 if it was compared with its checksum.
    """

    def __init__(self, files: Mapping[str, Sequence[int]], options: Mapping[str, Any]) -> None:
        self._options = options
        self._files = files
        self.paths = list(files)
        self._known = [KnownFile.of(path) if os.path.exists(path) else None for path in files]
        self._open: dict[int, LeafFile] = {}  # the one that was used last is last
        self._trees: dict[int, Tree] = {}
        self.checked: dict[int, bytearray] = {}

    def opened(self, number: int) -> tuple[LeafFile, Tree]:
        """A file, and what it holds.

        Raises:
            StoreError: It is damaged, or another one than it was.
        """
        if (file := self._open.get(number)) is None:
            file = self._map(number)
        if (most := self._options["open_databases"]) is not None:
            self._open.pop(number, None)
            for other in list(self._open)[: len(self._open) + 1 - most]:
                self._open.pop(other, None)
        self._open[number] = file
        return file, self._trees[number]

    def _map(self, number: int) -> LeafFile:
        path, known = self.paths[number], self._known[number]
        if known is None:
            raise StoreError(f"{path} is missing: the store is damaged; write it anew")
        known.check()
        file = LeafFile(path, LeafSpec(torch.uint8, ()), known.size, readahead=self._options["readahead"])
        if number not in self._trees:
            tree = read_tree(file.rows, path)
            expected = self._files[path]
            if expected and tuple(expected) != (known.size, len(tree.values), tree.crc):
                raise StoreError(f"{path} is damaged: its size or its tree's checksum is another; pack the store anew")
            self._trees[number], self.checked[number] = tree, bytearray(len(tree.values))
        return file

    @contextmanager
    def value(self, number: int, place: int, name: str) -> Iterator[Any]:
        """The bytes of a file's value, by its place in the order of keys; they are the file's own."""
        file, tree = self.opened(number)
        file.check_size()
        begin, stop = tree.values[place].tolist()
        try:
            yield file.rows[begin:stop]
        except ValueError as error:
            raise StoreError(f"{name}, in {self.paths[number]}, is damaged: {error}; pack the store anew") from error
        finally:
            file.check()


class _PackedIndex(PackedIndex):
    """Also knows the windows of steps, and the databases in which they are."""

    kind: ClassVar[str] = KIND

    def __init__(self, folder: str, options: Mapping[str, Any], classes: dict[str, type], *, check: bool) -> None:
        self._options = options
        super().__init__(folder, classes, options["columns"], check=check)

    def _read_own(self, folder: str, content: Mapping[str, Any]) -> int:
        self.window: int = content["window"]
        files = {
            inside(folder, found["file"], folder): (found["size"], found["entries"], found["crc"])
            for found in content["databases"]
        }
        check_sizes(self.window - 1, *(number for numbers in files.values() for number in numbers))
        if content["codec"] not in CODECS:
            raise ValueError(f"codec {content['codec']!r}")
        self.windows = Windows(self.leaves, content["codec"])
        self.databases = _Databases(files, self._options)
        self._entries = np.array([entries for _, entries, _ in files.values()], np.int64)
        return 2

    def _streams_lie_inside(self) -> bool:
        has_steps = self.lengths > 0
        start, steps, database = (self.table[row, has_steps] for row in (0, 1, 4))
        if not len(steps):
            return True
        if database.min() < 0 or database.max() >= len(self._entries):
            return False
        return bool((start + -(-steps // self.window) <= self._entries[database]).all())


class _PackedSteps:
    """One stream's steps; see `Steps`."""

    def __init__(self, index: _PackedIndex, number: int, name: str, wanted: list[str] | None, check: bool) -> None:
        self._name = name
        self._first, self._steps, _, _, self._database, self._crc = index.table[:6, number].tolist()
        self._window = index.window
        self._windows = index.windows
        self._databases = index.databases
        self._check = check
        self._specs = index.leaves
        self._structure, self._leaves = chosen(wanted, index.structure, range(len(index.leaves)))
        self._kept: tuple[int, Any] | None = None  # the latest window that was decompressed

    def __len__(self) -> int:
        return int(self._steps)

    def item(self, index: int) -> Any:
        rows = [np.empty((1, *self._specs[leaf].shape), self._specs[leaf].stored) for leaf in self._leaves]
        self._read(index, rows)
        leaves = [owned(row[0], self._specs[leaf].dtype) for row, leaf in zip(rows, self._leaves, strict=True)]
        assert self._structure is not None
        return unflatten(self._structure, iter(leaves))

    def read(self, start: int, out: Any) -> None:
        _, leaves = flatten(out)
        self._read(start, [as_array(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])

    def _read(self, start: int, rows: list[Any]) -> None:
        """Write the steps from `start` on to rows of the leaves that are wanted."""
        stop = start + len(rows[0])
        at = start
        while at < stop:
            window, begin = divmod(at, self._window)
            count = min(self._window - begin, stop - at)
            out = [row[at - start : at - start + count] for row in rows]
            if self._kept is not None and self._kept[0] == window:
                self._copy(self._kept[1], begin, out)
            else:
                with self._value(window) as value:
                    place = self._first + window
                    checked = self._databases.checked[self._database]
                    if self._check and not checked[place]:
                        check_value(value)
                        checked[place] = 1
                    columns = self._columns(window, value)
                    self._copy(columns, begin, out)
                    self._kept = (window, columns) if self._windows.is_compressed else None
            at += count

    def _columns(self, window: int, value: Any) -> list[Any]:
        return self._windows.columns(value, min(self._window, self._steps - window * self._window))

    def _copy(self, columns: list[Any], begin: int, out: list[Any]) -> None:
        for leaf, target in zip(self._leaves, out, strict=True):
            self._windows.copy(columns[leaf][begin : begin + len(target)], self._windows.images[leaf], target)

    def _value(self, window: int) -> AbstractContextManager[Any]:
        name = f"{self._name}: the value of steps from {window * self._window} on"
        return self._databases.value(self._database, self._first + window, name)

    def verify(self) -> None:
        """Read all values, also those that were checked already, and compare the whole stream's checksum.

        Raises:
            StoreError: Something is damaged.
        """
        crc = 0
        for window in range(-(-self._steps // self._window)):
            with self._value(window) as value:
                crc = zlib.crc32(check_value(value).to_bytes(4, "little"), crc)
                self._columns(window, value)
        if crc != self._crc:
            raise StoreError(f"{self._name} is damaged: its values are those of another stream; pack the store anew")

    def close(self) -> None:
        self._kept = None


class _PlainIndex:
    """All keys of some databases that were not packed, and the streams that they make; see `Index`.

    Args:
        path: A file, or a folder.
        options: Of the store.
    """

    version = ""
    structure = None
    metadata: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, path: str, options: Mapping[str, Any]) -> None:
        names = _files_at(path)
        self.databases = _Databases(dict.fromkeys(names, ()), options)
        separator = options["stream"]
        digest = hashlib.blake2b(repr(separator).encode(), digest_size=16)
        self._names: list[str] = []
        self.places: list[tuple[int, int, int]] = []  # of each stream: database, first value, the one after its last
        for number, (file, name) in enumerate(names.items()):
            opened, tree = self.databases.opened(number)
            stat = os.stat(file)
            digest.update(repr((name, stat.st_size, tree.crc, stat.st_mtime_ns)).encode())
            groups = [("", 0, len(tree.keys))]
            if separator is not None:
                keys = [opened.rows[begin:stop].tobytes() for begin, stop in tree.keys.tolist()]
                groups = _groups(keys, os.fsencode(separator))
            for group, begin, end in groups:
                self._names.append("/".join(filter(None, [name if len(names) > 1 or not group else "", group])))
                self.places.append((number, begin, end))
        self.lengths = np.array([end - begin for _, begin, end in self.places], np.int64)
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._names)

    def key(self, number: int) -> str:
        return self._names[number]

    def note(self, _: int) -> Mapping[str, Any]:
        return {}


def _files_at(path: str) -> dict[str, str]:
    """The LMDB files at a path, each with its name: that of its folder if LMDB has called the file data.mdb."""
    if os.path.isfile(path):
        return {path: os.path.basename(path)}
    if os.path.isfile(data := os.path.join(path, "data.mdb")):
        return {data: os.path.basename(os.path.abspath(path))}
    found = {}
    for name in sorted(os.listdir(path)):
        inner = os.path.join(path, name)
        if os.path.isfile(inner) and name.endswith(_SUFFIXES) and name != "lock.mdb":
            found[inner] = name
        elif os.path.isfile(data := os.path.join(inner, "data.mdb")):
            found[data] = name
    if not found:
        raise StoreError(f"{path} has no LMDB in it: neither data.mdb, nor files *.lmdb or *.mdb, nor folders with one")
    return found


def _groups(keys: list[bytes], separator: bytes) -> list[tuple[str, int, int]]:
    """The keys that are alike up to the last separator: the text before it, and which they are."""
    found: list[tuple[str, int, int]] = []
    for place, key in enumerate(keys):
        group, middle, _ = key.rpartition(separator)
        if not middle:
            continue
        name = group.decode("utf-8", "backslashreplace")
        if found and found[-1][0] == name and found[-1][2] == place:
            found[-1] = (name, found[-1][1], place + 1)
        else:
            found.append((name, place, place + 1))
    if len({name for name, _, _ in found}) < len(found):
        raise StoreError(
            f"with the separator {os.fsdecode(separator)!r}, some stream's keys do not follow each other; use another"
        )
    return found


class _PlainSteps:
    """One stream's steps; see `Steps`."""

    def __init__(self, index: _PlainIndex, number: int, name: str, decode: Callable[[bytes], Any]) -> None:
        self._databases = index.databases
        self._database, self._begin, self._end = index.places[number]
        self._name = name
        self._decode = decode

    def __len__(self) -> int:
        return self._end - self._begin

    def item(self, index: int) -> Any:
        place = self._begin + index
        with self._databases.value(self._database, place, f"{self._name}, step {index}") as found:
            value = found.tobytes()
        try:
            return self._decode(value)
        except Exception as error:
            file, tree = self._databases.opened(self._database)
            key = file.rows[slice(*tree.keys[place])].tobytes()
            raise StoreError(
                f"{self._name}, step {index} (key {key!r}): decode= raised {type(error).__name__}: {error}"
            ) from error

    def read(self, start: int, out: Any) -> None:
        _, leaves = flatten(out)
        for row in range(len(leaves[0])):
            put_row(self.item(start + row), out, row, f"{self._name}, step {start + row}")

    def close(self) -> None:
        pass
