"""The pages of an LMDB file: where its keys and values lie.

LMDB trusts what is in a file: of 500 files with some bytes of these pages changed, four end a process that reads them
by py-lmdb 3.0.0. So the few pages that lead to values are looked at here.

Source: `MDB_meta`, `MDB_page` and `MDB_node` of LMDB 0.9's mdb.c, data version 1.

Guarantee: all keys and values of a tree that was read lie within the file. What values hold is not checked.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError

__all__ = ["Tree", "read_tree"]

_MAGIC, _DATA_VERSION = 0xBEEFC0DE, 1
_PAGE_HEADER, _NODE_HEADER = 16, 8
_META = struct.Struct("=IIQQ" + "IHHQQQQQ" * 2 + "QQ")  # magic, version, address, map size, 2 databases, last page, txn
_BRANCH, _LEAF = 0x01, 0x02  # of pages
_BIG = 0x01  # of nodes: the value has pages of its own
_DUPLICATES = 0x04 | 0x10 | 0x20 | 0x40
_NO_PAGE = (1 << 64) - 1
_MOST_DEPTH = 32
_PAGES_AT_ONCE = 1024


class Tree(NamedTuple):
    """What an LMDB file holds.

    Attributes:
        keys: Where each key begins and ends in the file, `(entries, 2)`, in order.
        values: The same of each key's value.
        crc: CRC-32 of the two meta pages, and of all branch and leaf pages from the root down.
    """

    keys: NDArray[np.int64]
    values: NDArray[np.int64]
    crc: int


#: Entries of some pages: where each begins, its first four numbers, and the room that is left of its page.
_Nodes = tuple[NDArray[np.int64], list[NDArray[np.int64]], NDArray[np.int64]]


def read_tree(content: NDArray[np.uint8], path: str) -> Tree:
    """Find the keys and values of a file.

    Args:
        content: All its bytes.
        path: Its name, for errors.

    Raises:
        StoreError: It is no LMDB file, is damaged, or holds named databases or several values a key.
    """
    return _Walk(content, path).tree()


class _Walk:
    """Goes down the tree, level by level."""

    def __init__(self, content: NDArray[np.uint8], path: str) -> None:
        self._content = content
        self._path = path
        self._crc = 0
        first = self._meta(0)
        self._page_bytes = first[1]
        second = self._meta(self._page_bytes)
        if second[1] != self._page_bytes:
            raise self._damaged("its two meta pages are of different sizes")
        newest = max(second, first, key=lambda meta: meta[0])
        self._flags, self._depth, self._count, self._root, last = newest[2:]
        self._pages = last + 1
        if (needed := self._pages * self._page_bytes) > len(content):
            raise self._damaged(f"it was cut off, and has {len(content):,} bytes of {needed:,}")

    def _damaged(self, what: str) -> StoreError:
        return StoreError(f"{self._path} is damaged: {what}; write it anew")

    def _meta(self, offset: int) -> tuple[int, ...]:
        """Transaction, bytes of a page, and of the tree flags, depth, entries, root and last page."""
        head = self._content[offset + _PAGE_HEADER : offset + _PAGE_HEADER + _META.size].tobytes()
        if len(head) < _META.size:
            raise self._damaged(f"it has {len(self._content):,} bytes, which are no LMDB file")
        found = _META.unpack(head)
        magic, version, page_bytes = found[0], found[1], found[4]
        flags, depth, (entries, root, last, transaction) = found[13], found[14], found[18:]
        if magic != _MAGIC:
            raise self._damaged("it does not begin as an LMDB file of this machine's byte order does")
        if version != _DATA_VERSION:
            raise StoreError(
                f"{self._path} has LMDB's data version {version}, and version {_DATA_VERSION} of LMDB 0.9 can be read"
            )
        if page_bytes not in (1 << power for power in range(9, 17)) or depth > _MOST_DEPTH or last >= 1 << 40:
            raise self._damaged(f"page size {page_bytes}, depth {depth}, last page {last}")
        self._crc = zlib.crc32(self._content[offset : offset + page_bytes].data, self._crc)
        return transaction, page_bytes, flags, depth, entries, root, last

    def tree(self) -> Tree:
        if self._flags & _DUPLICATES:
            raise StoreError(
                f"{self._path} keeps several values a key (dupsort); copy it into a database of one value a key"
            )
        found = [(np.empty((0, 2), np.int64),) * 2]
        if self._root != _NO_PAGE:
            level = np.array([self._root], np.uint64)
            for _ in range(self._depth - 1):
                level = np.concatenate([_children(nodes) for nodes in self._nodes(level, _BRANCH)])
                if len(level) > self._pages or len(np.unique(level)) != len(level):
                    raise self._damaged("its pages lead in a circle")
            found += [self._entries(nodes) for nodes in self._nodes(level, _LEAF)]
        keys, values = map(np.concatenate, zip(*found, strict=True))
        if len(keys) != self._count or (self._root == _NO_PAGE) != (self._depth == 0):
            raise self._damaged(f"it has {len(keys)} values, and says {self._count}")
        return Tree(keys, values, self._crc)

    def _nodes(self, level: NDArray[np.uint64], kind: int) -> Iterator[_Nodes]:
        """The entries of all pages of a level, of some pages at a time."""
        if level.min() < 2 or level.max() >= self._pages:
            raise self._damaged("a page's number is none")
        pages = self._content[: self._pages * self._page_bytes].reshape(self._pages, -1)
        for begin in range(0, len(level), _PAGES_AT_ONCE):
            some = level[begin : begin + _PAGES_AT_ONCE].astype(np.int64)
            halves = pages[some].view(np.uint16)
            self._crc = zlib.crc32(halves.data, self._crc)
            flags, lower, upper = (halves[:, i].astype(np.int64) for i in (5, 6, 7))
            count = (lower - _PAGE_HEADER) // 2
            wrong = (halves[:, :4].copy().view(np.int64)[:, 0] != some) | (flags != kind) | (count < 1)
            wrong |= (lower > upper) | (upper > self._page_bytes) | (lower % 2 != 0)
            if wrong.any():
                raise self._damaged(f"page {some[wrong.argmax()]} is not what it should be")
            places = halves[:, 8 : 8 + int(count.max())].astype(np.int64)
            is_node = np.arange(places.shape[1]) < count[:, None]
            page, _ = np.nonzero(is_node)
            place = places[is_node]
            room = self._page_bytes - _NODE_HEADER - place
            if (place % 2).any() or (place < upper[page]).any() or (room < 0).any():
                raise self._damaged("an entry lies outside of its page")
            numbers = [halves[page, place // 2 + i].astype(np.int64) for i in range(4)]
            if (numbers[3] > room).any():
                raise self._damaged("a key lies outside of its page")
            yield some[page] * self._page_bytes + place, numbers, room

    def _entries(self, nodes: _Nodes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where keys and values begin and end."""
        at, (low, high, flags, key_bytes), room = nodes
        if (flags & ~_BIG).any():
            raise StoreError(
                f"{self._path} has named databases in it, or several values a key; copy it into databases without"
            )
        size, is_big = low | high << 16, flags == _BIG
        if (key_bytes + np.where(is_big, 8, size) > room).any():
            raise self._damaged("a value lies outside of its page")
        key = at + _NODE_HEADER
        value = key + key_bytes
        if is_big.any():
            page = self._content[value[is_big, None] + np.arange(8)].view(np.uint64)[:, 0]
            if (page < 2).any() or (page >= self._pages).any():
                raise self._damaged("a value lies outside of the file")
            value[is_big] = page.astype(np.int64) * self._page_bytes + _PAGE_HEADER
        stop = value + size
        if (stop > self._pages * self._page_bytes).any():
            raise self._damaged("a value lies outside of the file")
        return np.stack([key, key + key_bytes], 1), np.stack([value, stop], 1)


def _children(nodes: _Nodes) -> Any:
    _, (low, high, higher, _), _ = nodes
    return (low | high << 16 | higher << 32).astype(np.uint64)
