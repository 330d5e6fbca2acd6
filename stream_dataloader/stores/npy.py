"""Folders of `.npy` files, in two layouts that are never mixed.

::

    folder/clip1.npy             a file is a stream, an item is one of its rows

    folder/clip1/state.npy       a folder is a stream, an item is {"action": ..., "state": ...}
    folder/clip1/action.npy

Guarantee: opening reads only headers.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.files import damage_named, hashed
from stream_dataloader.stores._base.formats import given_columns
from stream_dataloader.stores._base.rows import RowSteps, Selection, check_lengths
from stream_dataloader.stores._base.store import Index, Store
from stream_dataloader.streams._media.listing import entries_in
from stream_dataloader.streams.array.tables import NpyTable, checked_header
from stream_dataloader.streams.cache.gate import Files

__all__ = ["NpyStore"]

_SUFFIX = ".npy"


class NpyStore(Store):
    """Folder of `.npy` files, or of folders with such files; the first axis is time.

    Streams are in the order of their names. Names that begin with a dot are ignored.

    Args:
        path: The folder, or one file, which is one stream.
        columns: Names of the files to read in a stream's folder, without suffix; None reads all.
        files: Files that links in the folder may lead to: `"inside"` it, or `"anywhere"`.
    """

    format: ClassVar[str] = "npy"

    def __init__(
        self, path: str | os.PathLike[str], *, columns: Sequence[str] | None = None, files: Files = "inside"
    ) -> None:
        self._wanted = given_columns(columns)
        super().__init__(path, columns=self._wanted, files=files)
        _ = self.index

    def _read_index(self) -> _Index:
        folder, keys, names = self._listed()
        lengths = np.zeros(len(keys), np.int64)
        stamps = np.zeros(len(keys), np.uint64)
        for number, key in enumerate(keys):
            with damage_named(os.path.join(folder, key)):
                lengths[number], stamps[number] = _examine(_files(folder, key, names))
        fingerprint = hashed(repr((names, keys)), stamps.tobytes())
        selection = Selection("", [""]) if names is None else Selection.of(names)
        return _Index(fingerprint, lengths, stamps, folder, keys, names, selection)

    def _listed(self) -> tuple[str, list[str], list[str] | None]:
        """Return `folder`, `keys` and `names` of the index; see `_Index`."""
        if not os.path.exists(self.path):
            raise FileNotFoundError(f"there is no .npy file or folder at {self.path}")
        if os.path.isdir(self.path):
            folder = self.path
            keys, folders = _named(folder)
        else:
            folder, name = os.path.split(self.path)
            keys, folders = [name.removesuffix(_SUFFIX)], []
            if not name.endswith(_SUFFIX):
                raise StoreError(f"{self.path} is no {_SUFFIX} file")
        inside = {name: _named(os.path.join(folder, name))[0] for name in folders}
        filled = [name for name, files in inside.items() if files]
        if bool(keys) == bool(filled):
            found = f"{keys[0]}{_SUFFIX} and {filled[0]}/, not of one kind" if keys else f"no {_SUFFIX} files"
            raise StoreError(f"{folder} has {found}; streams are files, or folders of files")
        if not keys:
            return folder, folders, self._leaf_names(folder, inside)
        if self._wanted is not None:
            raise StoreError(f"{self.path}: each stream is one array; leave out columns=")
        return folder, keys, None

    def _leaf_names(self, folder: str, inside: dict[str, list[str]]) -> list[str]:
        names = next(iter(inside.values()))
        for number, (key, files) in enumerate(inside.items()):
            odd = set(self._wanted or names) - set(files)
            if self._wanted is None:
                odd |= set(files) - set(names)
            if odd:
                found = f"{shorten(files, 120)}: not all streams have {shorten(sorted(odd), 120)}"
                raise StoreError(f"{os.path.join(folder, key)} (stream {number}) has {found}; use columns=")
        return self._wanted or names

    def _open_steps(self, number: int) -> RowSteps:
        index: _Index = self.index
        files = _files(index.folder, index.keys[number], index.names)
        with damage_named(self.name_of(number)), ExitStack() as opened:
            tables = {name: NpyTable(path, path) for name, path in files.items()}
            for table in tables.values():
                opened.callback(table.close)
            if _examine(files) != (index.lengths[number], index.stamps[number]):
                raise StoreError(f"{self.name_of(number)} was written to since; open the store again")
            ordered = [tables[name] for name in index.selection.names]
            return RowSteps(index.selection.structure, ordered, len(ordered[0]), close=opened.pop_all().close)


@dataclass
class _Index(Index):
    """Index of the folder, see `Store._read_index`; names are without suffix."""

    stamps: NDArray[np.uint64]  # a hash of each stream's headers, sizes and times
    folder: str
    keys: list[str]
    names: list[str] | None  # of the files in each folder; None if a stream is one file
    selection: Selection

    def key(self, number: int) -> str:
        return self.keys[number]


def _named(folder: str) -> tuple[list[str], list[str]]:
    """Return the `.npy` files in a folder, without suffix, and the folders."""
    entries = entries_in(folder)
    files = [entry.name.removesuffix(_SUFFIX) for entry in entries if entry.name.endswith(_SUFFIX)]
    return files, [entry.name for entry in entries if entry.is_dir()]


def _files(folder: str, key: str, names: list[str] | None) -> dict[str, str]:
    """Return the files of a stream by the names of leaves; the name is "" if it is one file."""
    if names is None:
        return {"": os.path.join(folder, key + _SUFFIX)}
    return {name: os.path.join(folder, key, name + _SUFFIX) for name in names}


def _examine(files: Mapping[str, str]) -> tuple[int, int]:
    content = hashlib.blake2b(digest_size=8)
    lengths: dict[str, int] = {}
    for name, path in files.items():
        with open(path, "rb") as file:
            found, header = os.fstat(file.fileno()), checked_header(file, path)
        content.update(repr((header, (found.st_size, found.st_mtime_ns))).encode())
        lengths[name] = header.shape[0]
    return check_lengths(os.path.dirname(path), lengths), int.from_bytes(content.digest(), "little")
