"""Folders of `.npy` files, as `numpy.save` writes them (NumPy enhancement proposal 1).

Two layouts are read, never mixed::

    folder/clip1.npy             a file is a stream, an item is a row of it
    folder/clip2.npy

    folder/clip1/state.npy       a folder is a stream, an item is a dict of the files' rows,
    folder/clip1/action.npy      {"action": ..., "state": ...}
    folder/clip2/...

Guarantee: opening reads headers, and no array. A file that is not as its header says, that was replaced since, or that
is cut off while it is read, is an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.files import damage_named
from stream_dataloader.stores._base.options import given_columns, renamed
from stream_dataloader.stores._base.rows import RowSteps, Selection, check_untold
from stream_dataloader.stores._base.store import Store
from stream_dataloader.streams._media.names import natural_order
from stream_dataloader.streams.array.tables import NpyTable, checked_header

__all__ = ["NpyStore"]

_SUFFIX = ".npy"


class NpyStore(Store):
    """A folder of `.npy` files: of streams, or of folders that are streams. The first axis of a file is time.

    Streams are in the order of their names, numbers as numbers, and a name is a stream's key. Other files, and names
    that begin with a dot, are left alone.

    Args:
        path: The folder, or one file, which is one stream.
        columns: Which files of a stream's folder to read, by their names without suffix; None reads all.
    """

    format: ClassVar[str] = "npy"

    @renamed(leaves="columns")
    def __init__(self, path: str | os.PathLike[str], *, columns: Sequence[str] | None = None) -> None:
        self._wanted = given_columns(columns)
        super().__init__(path, columns=self._wanted)
        _ = self.index

    def _read_index(self) -> _Index:
        folder, keys, names = self._listed()
        lengths = np.zeros(len(keys), np.int64)
        stamps = np.zeros(len(keys), np.uint64)
        for number, key in enumerate(keys):
            with damage_named(os.path.join(folder, key)):
                lengths[number], stamps[number] = _examine(_files(folder, key, names))
        content = hashlib.blake2b(digest_size=16)
        content.update(repr((names, keys)).encode("utf-8", "backslashreplace"))
        content.update(stamps.tobytes())
        selection = Selection("", [""]) if names is None else Selection.of(names)
        return _Index(content.hexdigest(), lengths, stamps, folder, keys, names, selection)

    def _listed(self) -> tuple[str, list[str], list[str] | None]:
        """The folder of the streams, their keys, and the names of leaves; None if a stream is one file."""
        if not os.path.exists(self.path):
            raise FileNotFoundError(f"there is no store at {self.path}; give a folder of .npy files")
        if not os.path.isdir(self.path):
            folder, name = os.path.split(self.path)
            if not name.endswith(_SUFFIX):
                raise StoreError(f"{self.path} is no {_SUFFIX} file; give one, or a folder of them")
            files, folders = [name.removesuffix(_SUFFIX)], list[str]()
        else:
            folder = self.path
            files, folders = _named(folder)
            filled = [name for name in folders if _named(os.path.join(folder, name))[0]]
            if files and filled:
                raise StoreError(
                    f"{folder} holds .npy files ({files[0]}{_SUFFIX}) and folders of them ({filled[0]}); a stream is "
                    "either a file or a folder: move those of one kind to another folder"
                )
            if not files and not filled:
                raise StoreError(f"{folder} has no {_SUFFIX} files, nor have the folders in it")
        if not files:
            return folder, folders, self._leaf_names(folder, folders)
        if self._wanted is not None:
            raise StoreError(f"{self.path} has no columns {self._wanted}: each stream is one array; leave out columns=")
        return folder, files, None

    def _leaf_names(self, folder: str, keys: list[str]) -> list[str]:
        """The files that each stream has."""
        first: list[str] = []
        for number, key in enumerate(keys):
            files, _ = _named(place := os.path.join(folder, key))
            first = first or files
            if missing := [name for name in self._wanted or first if name not in files]:
                raise StoreError(
                    f"{place} (stream {number}) has no {missing[0]}{_SUFFIX}; it has {shorten(files, 120)}"
                    + (
                        ""
                        if self._wanted
                        else f", and {keys[0]} has {shorten(first, 120)}; all need the same, or columns="
                    )
                )
            if self._wanted is None and len(files) > len(first):
                extra = next(name for name in files if name not in first)
                raise StoreError(
                    f"{place} (stream {number}) has {extra}{_SUFFIX}, which {keys[0]} lacks; all streams need the same "
                    "files, or columns= says which to read"
                )
        return self._wanted or first

    def _open_steps(self, number: int) -> RowSteps:
        index: _Index = self.index
        files = _files(index.folder, index.keys[number], index.names)
        with damage_named(self.name_of(number)), contextlib.ExitStack() as opened:
            tables = {name: NpyTable(path, path) for name, path in files.items()}
            for table in tables.values():
                opened.callback(table.close)
            if _examine(files) != (index.lengths[number], index.stamps[number]):
                raise StoreError(f"{self.name_of(number)} was written to since the store was opened; open it again")
            opened.pop_all()
            return RowSteps(index.selection, [tables[name] for name in index.selection.names])

    def key(self, number: int) -> str:
        return str(self.index.keys[self._check_number(number)])


class _Index(NamedTuple):
    """See `Store._read_index`; names are those of files and folders, without suffix."""

    fingerprint: str
    lengths: NDArray[np.int64]
    stamps: NDArray[np.uint64]  # of each stream, a hash of its files' headers, sizes and times of writing
    folder: str
    keys: list[str]
    names: list[str] | None  # of the files in each folder; None if a stream is one file
    selection: Selection

    def __len__(self) -> int:
        return len(self.keys)


def _named(folder: str) -> tuple[list[str], list[str]]:
    """The `.npy` files in a folder, without suffix, and the folders in it, in order."""
    files, folders = [], []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                folders.append(entry.name)
            elif entry.name.endswith(_SUFFIX):
                files.append(entry.name.removesuffix(_SUFFIX))
    return sorted(files, key=natural_order), sorted(folders, key=natural_order)


def _files(folder: str, key: str, names: list[str] | None) -> dict[str, str]:
    """The files of a stream, by the names of leaves; of "" if it is one file."""
    if names is None:
        return {"": os.path.join(folder, key + _SUFFIX)}
    return {name: os.path.join(folder, key, name + _SUFFIX) for name in names}


def _examine(files: Mapping[str, str]) -> tuple[int, int]:
    """How many rows a stream's files have, and a hash of what tells them from others."""
    content = hashlib.blake2b(digest_size=8)
    lengths: dict[str, int] = {}
    row_bytes = []
    for path in files.values():
        with open(path, "rb") as file:
            found, header = os.fstat(file.fileno()), checked_header(file, path)
        content.update(repr((header, (found.st_size, found.st_mtime_ns))).encode())
        lengths[path] = header.shape[0]
        row_bytes.append(math.prod(header.shape[1:]) * header.dtype.itemsize)
    first, rows = next(iter(lengths.items()))
    if wrong := next((path for path, found in lengths.items() if found != rows), None):
        raise StoreError(
            f"{wrong} has {lengths[wrong]} rows, and {os.path.basename(first)} beside it {rows}; files that are read "
            "side by side need as many"
        )
    check_untold(first, rows, row_bytes)
    return rows, int.from_bytes(content.digest(), "little")
