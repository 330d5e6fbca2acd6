"""Memory-mapped LMDB files, and their pages, which have the places of keys and values.

LMDB trusts the content of a file: 77 to 152 of 500 damaged files end a process that reads them
by py-lmdb 3. So this module itself reads and checks the pages that lead to values.

Source: `MDB_meta`, `MDB_page` and `MDB_node` of LMDB 0.9's mdb.c, data version 1.

Guarantee: all keys and values of a tree that was read lie within the file.
"""

from __future__ import annotations

import functools
import os
import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.files import damage_named
from stream_dataloader.stores._base.leaves import LeafSpec
from stream_dataloader.stores.memmap.store import LeafFile
from stream_dataloader.streams._media.section import KnownFile, natural_order

__all__ = ["Databases", "ResultT", "Tree", "mapped", "natural_key", "read_tree"]

ResultT = TypeVar("ResultT")

_MAGIC, _DATA_VERSION = 0xBEEFC0DE, 1
_PAGE_HEADER, _NODE_HEADER = 16, 8
#: Magic, version, address, map size; two databases; last page, number.
_META = struct.Struct("=16xIIQQ" + "IHHQQQQQ" * 2 + "QQ")
_BRANCH, _LEAF = 0x01, 0x02  # of pages
_BIG, _NAMED = 0x01, 0x02  # of nodes: the value has pages of its own, or is a database
_DATABASE = struct.Struct("=4xHHQQQQQ")
_PAGES_AT_ONCE = 1024

_Positions = NDArray[np.int64]


class Tree(NamedTuple):
    """Start and end of keys and values, `(entries, 2)`, and the pages' CRC-32."""

    keys: _Positions
    values: _Positions
    crc: int

    def names(self, rows: NDArray[np.uint8], start: int = 0, stop: int | None = None) -> list[bytes]:
        return [rows[begin:end].tobytes() for begin, end in self.keys[start:stop].tolist()]


def read_tree(content: NDArray[np.uint8], path: str, name: str | None = None) -> Tree:
    """Find the keys and values of a file, or of a named database in it."""
    with damage_named(path):  # NumPy refuses positions outside of an array
        metas = [_META.unpack_from(content.data)]
        page_bytes = metas[0][4]
        metas.append(_META.unpack_from(content.data, page_bytes))
        if any(meta[:2] != (_MAGIC, _DATA_VERSION) for meta in metas):
            raise ValueError("it does not begin as files of LMDB 0.9 in this byte order")
        depth, *_, count, root, last_page, _ = max(reversed(metas), key=lambda meta: meta[-1])[14:]
        pages = content[: (last_page + 1) * page_bytes].reshape(last_page + 1, page_bytes)
        crc = zlib.crc32(content[: 2 * page_bytes].data)
        if name is not None:
            found, crc = _walk(pages, depth, root, count, crc, _BIG | _NAMED)
            names = Tree(found[:, :2], found[:, 2:], crc).names(content)
            if (key := os.fsencode(name)) not in names:
                raise StoreError(f"{path} has no database {name!r}; it has {shorten(names)}")
            flags, depth, *_, count, root = _DATABASE.unpack(content[slice(*found[names.index(key), 2:])].data)
            if flags:
                raise StoreError(f"{path}: the database {name!r} has several values a key, or numbers as keys")
        found, crc = _walk(pages, depth, root, count, crc, _BIG)
        first, stop = found[:, 0], found[:, 1]  # of keys; those such as `__len__` describe the others
        around = content[np.stack([first, first + 1, stop - 2, stop - 1])]
        found = found[~((around == ord("_")).all(0) & (stop - first > 3))]
        return Tree(found[:, :2], found[:, 2:], crc)


def _walk(pages: NDArray[np.uint8], depth: int, root: int, count: int, crc: int, kinds: int) -> tuple[_Positions, int]:
    """Return the start and end of keys and values, `(entries, 4)`, and the CRC-32."""
    level = np.array([root], np.uint64).view(np.int64)[:depth]
    entries = [np.empty((0, 4), np.int64)]
    for height in reversed(range(depth)):
        below = []
        for begin in range(0, len(level), _PAGES_AT_ONCE):
            some = level[begin : begin + _PAGES_AT_ONCE]
            chosen = pages[some]
            crc = zlib.crc32(chosen.data, crc)
            at, numbers = _nodes(chosen.view(np.uint16), some, _BRANCH if height else _LEAF)
            if height:
                below.append(numbers[0] | numbers[1] << 16 | numbers[2] << 32)
            else:
                entries.append(_entries(pages, at, numbers, kinds))
        if height and len(level := np.concatenate(below)) > len(pages):
            raise ValueError("its pages lead in a circle")
    found = np.concatenate(entries)
    if len(found) != count:
        raise ValueError(f"it has {len(found)} values, and says {count}")
    return found, crc


def _nodes(halves: NDArray[np.uint16], pages: _Positions, kind: int) -> tuple[_Positions, list[_Positions]]:
    """Return the start of each entry of some pages, and its first four numbers."""
    count = (halves[:, 6].astype(np.int64) - _PAGE_HEADER) // 2
    wrong = (halves[:, :4].copy().view(np.int64)[:, 0] != pages) | (halves[:, 5] != kind) | (count < 1)
    if wrong.any():
        raise ValueError(f"page {pages[wrong.argmax()]} is not what it should be")
    row, entry = np.nonzero(np.arange(count.max()) < count[:, None])
    at = halves[row, 8 + entry].astype(np.int64)
    if (at < halves[row, 7]).any() or (at % 2).any():
        raise ValueError("an entry lies outside of its page")
    numbers = [halves[row, at // 2 + i].astype(np.int64) for i in range(4)]
    return pages[row] * 2 * halves.shape[1] + at, numbers


def _entries(pages: NDArray[np.uint8], at: _Positions, numbers: list[_Positions], kinds: int) -> _Positions:
    """Return the start and end of keys and values, `(entries, 4)`."""
    low, high, flags, key_bytes = numbers
    if (flags & ~kinds).any():
        raise ValueError("it has named databases (give db=), or several values a key")
    content, page_bytes = pages.reshape(-1), pages.shape[1]
    size, is_big = low | high << 16, flags == _BIG
    key = at + _NODE_HEADER
    value = key + key_bytes
    if (value + np.where(is_big, 8, size) > (at // page_bytes + 1) * page_bytes).any():
        raise ValueError("an entry lies outside of its page")
    page = content[value[is_big, None] + np.arange(8)].view(np.uint64)[:, 0]
    value[is_big] = np.minimum(page, len(pages)).astype(np.int64) * page_bytes + _PAGE_HEADER
    if (value + size > len(content)).any():
        raise ValueError("a value lies outside of the file")
    return np.stack([key, key + key_bytes, value, value + size], 1)


def natural_key(key: bytes) -> tuple[Any, str]:
    """Return a key for `sorted` that sorts numbers in a name as numbers."""
    return natural_order(os.fsdecode(key))


def mapped(path: str, size: int, *, readahead: bool = True) -> LeafFile:
    """Map a file as bytes."""
    return LeafFile(path, LeafSpec(torch.uint8, ()), size, readahead=readahead)


class Databases:
    """Files of a store by number.

    `file` maps one, `tree` finds its values, `checked` notes which values were checked.
    `expected` has the size of each file, its number of values, and `Tree.crc`.
    """

    def __init__(self, expected: Mapping[str, tuple[int, ...] | None], options: Mapping[str, Any]) -> None:
        self.known = known = [
            KnownFile.of(path) if os.path.exists(path) else KnownFile(path, 0, 0, 0, path) for path in expected
        ]

        most: int | None = options["open_databases"]

        @functools.lru_cache(most)  # not a method: the cache would keep files open by a reference cycle
        def file(number: int) -> LeafFile:
            known[number].check()
            return mapped(known[number].path, known[number].size, readahead=options["readahead"])

        @functools.cache
        def tree(number: int) -> Tree:
            path, _, size, *_ = known[number]
            found = read_tree(file(number).rows, path, options["db"])
            if expected[path] not in (None, (size, len(found.values), found.crc)):
                raise StoreError(f"{path} is damaged: it has another size or tree; pack it again")
            if options["order"] != "natural":
                return found
            keys = list(map(natural_key, found.names(file(number).rows)))
            order = sorted(range(len(keys)), key=keys.__getitem__)
            return Tree(found.keys[order], found.values[order], found.crc)

        self.file, self.tree = file, tree
        self.checked = functools.cache(lambda number: bytearray(len(tree(number).values)))

    def value(self, number: int, position: int, name: str, take: Callable[[Any], ResultT]) -> ResultT:
        file = self.file(number)
        begin, stop = self.tree(number).values[position].tolist()
        file.check_size()
        try:
            return take(file.rows[begin:stop])
        except Exception as error:
            raise StoreError(f"{name}, in {file.path}, is damaged: {error}; pack it again") from error
        finally:
            file.check()
