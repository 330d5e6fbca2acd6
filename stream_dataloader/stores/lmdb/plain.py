"""Reads LMDB files that people already have: a value is a time step, and the user says how to decode it.

Guarantee: all keys are found once, when the store is opened, without LMDB; the file's pages are checked by that.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from stream_dataloader._items.layout import Layout, as_array
from stream_dataloader._items.structure import Misfit, flatten
from stream_dataloader.errors import StoreError
from stream_dataloader.stores.lmdb.databases import Database, Shelf
from stream_dataloader.stores.lmdb.pages import read_tree

__all__ = ["PlainIndex", "PlainSteps"]

_SUFFIXES = (".lmdb", ".mdb")


def _files(path: str) -> list[tuple[str, str]]:
    """The LMDB files at a path, each with its name: that of its folder if LMDB has called the file data.mdb."""
    if os.path.isfile(path):
        return [(os.path.basename(path), path)]
    if os.path.isfile(data := os.path.join(path, "data.mdb")):
        return [(os.path.basename(os.path.abspath(path)), data)]
    found = []
    for name in sorted(os.listdir(path)):
        inner = os.path.join(path, name)
        if os.path.isfile(inner) and name.endswith(_SUFFIXES) and name != "lock.mdb":
            found.append((name, inner))
        elif os.path.isfile(data := os.path.join(inner, "data.mdb")):
            found.append((name, data))
    if not found:
        raise StoreError(f"{path} has no LMDB in it: neither data.mdb, nor files *.lmdb or *.mdb, nor folders with one")
    return found


class PlainIndex:
    """All keys of some databases, and the streams that they make.

    Args:
        path: A file, or a folder.
        shelf: See `Shelf`.
        decode: See `LmdbStore`.
        separator: See `LmdbStore`.
    """

    def __init__(self, path: str, shelf: Shelf, decode: Callable[[bytes], Any], separator: str | None) -> None:
        self.decode = decode
        self.databases: list[Database] = []
        self._names: list[str] = []
        places: list[tuple[int, int, int]] = []  # of each stream: database, first and last key
        texts, sizes, before = [], [], 0
        digest = hashlib.blake2b(repr(separator).encode(), digest_size=16)
        files = _files(path)
        for number, (name, file) in enumerate(files):
            stat = os.stat(file)
            tree = read_tree(file, keys=True)
            digest.update(repr((name, tree.size, tree.crc, stat.st_mtime_ns)).encode())
            self.databases.append(Database(file, shelf, (tree.size, tree.crc)))
            keys = tree.keys or []
            groups = [("", 0, len(keys))] if separator is None else _groups(keys, os.fsencode(separator))
            for group, begin, end in groups:
                self._names.append("/".join(filter(None, [name if len(files) > 1 or not group else "", group])))
                places.append((number, before + begin, before + end))
            texts.append(b"".join(keys))
            sizes += [len(key) for key in keys]
            before += len(keys)
        self._text = b"".join(texts)
        self._stops = np.cumsum(np.array([0, *sizes], np.int64))
        self.places = np.array(places, np.int64).reshape(-1, 3)
        self.lengths = self.places[:, 2] - self.places[:, 1]
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._names)

    def key(self, number: int) -> str:
        """A stream's name."""
        return self._names[number]

    def lmdb_key(self, place: int) -> bytes:
        """A key, counted over all databases."""
        return self._text[self._stops[place] : self._stops[place + 1]]


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


class PlainSteps:
    """One stream's steps; see `Steps`."""

    def __init__(self, index: PlainIndex, number: int, name: str) -> None:
        database, self._begin, self._end = index.places[number].tolist()
        self._index = index
        self._database = index.databases[database]
        self._name = name
        self._layout: Layout | None = None

    def __len__(self) -> int:
        return int(self._end - self._begin)

    def item(self, index: int) -> Any:
        key = self._index.lmdb_key(self._begin + index)
        with self._database.reading() as opened:
            value = opened.get(key)
            text = None if value is None else bytes(value)
        del value
        if text is None:
            raise StoreError(f"{self._name}: key {key!r} is missing in {self._database.path}; open the store again")
        try:
            return self._index.decode(text)
        except Exception as error:
            raise StoreError(
                f"{self._name}, step {index} (key {key!r}): decode= raised {type(error).__name__}: {error}"
            ) from error

    def read(self, start: int, out: Any) -> None:
        _, leaves = flatten(out)
        rows = [as_array(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        for step in range(len(rows[0])):
            item = self.item(start + step)
            if self._layout is None:
                self._layout, found = Layout.of(item, windowed=False)
            try:
                found = list(self._layout.read(item))
                for row, leaf in zip(rows, map(np.asarray, found), strict=True):
                    if leaf.shape != row.shape[1:] or leaf.dtype.newbyteorder("=") != row.dtype:
                        raise Misfit(f"a leaf is {leaf.dtype} {leaf.shape}, and was {row.dtype} {row.shape[1:]}")
                    row[step] = leaf
            except Misfit as error:
                raise ValueError(f"{self._name}, step {start + step}: {error}") from error

    def close(self) -> None:
        self._layout = None
