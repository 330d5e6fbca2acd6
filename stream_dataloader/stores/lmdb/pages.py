"""The pages of an LMDB file, checked before LMDB itself follows them.

LMDB trusts what is in a file: a wrong number in a page has it read memory that is not there, and ends the process.
So the pages that lead to values, which are few, are looked at here first, by plain reads.

Source: `MDB_meta`, `MDB_page` and `MDB_node` of LMDB 0.9's mdb.c, data version 1, as py-lmdb 3.0.0 has it.

Guarantee: of a file that passes, LMDB finds each key, and the value within the file. What values hold is not checked.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.tables import crc_of

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
    """What leads to a database's values.

    Attributes:
        entries: How many values there are.
        crc: CRC-32 of the two meta pages, and of all branch and leaf pages from the root down.
        size: Of the file in bytes.
        keys: All keys, in order; None if they were not asked for.
    """

    entries: int
    crc: int
    size: int
    keys: list[bytes] | None


class _Meta(NamedTuple):
    page_bytes: int
    flags: int
    depth: int
    entries: int
    root: int
    last_page: int
    transaction: int


def read_tree(path: str, *, keys: bool = False) -> Tree:
    """Check the pages of a database.

    Args:
        path: Its file.
        keys: Whether to collect the keys.

    Raises:
        StoreError: It is no LMDB file, is damaged, or holds named databases or several values a key.
        OSError: It cannot be read.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _Walk(path, file).tree(keys)
    finally:
        os.close(file)


class _Walk:
    """Goes down the tree, level by level."""

    def __init__(self, path: str, file: int) -> None:
        self._path = path
        self._file = file
        self._size = os.fstat(file).st_size
        self._crc = 0
        first = self._meta(0)
        second = self._meta(first.page_bytes)
        self._meta_of_last = max(second, first, key=lambda meta: meta.transaction)
        self._page_bytes = first.page_bytes
        if second.page_bytes != first.page_bytes:
            raise self._damaged("its two meta pages are of different sizes")
        if (needed := (self._meta_of_last.last_page + 1) * self._page_bytes) > self._size:
            raise self._damaged(f"it was cut off, and has {self._size:,} bytes of {needed:,}")

    def _damaged(self, what: str) -> StoreError:
        return StoreError(f"{self._path} is damaged: {what}; write it anew")

    def _meta(self, offset: int) -> _Meta:
        head = os.pread(self._file, _PAGE_HEADER + _META.size, offset)
        if len(head) < _PAGE_HEADER + _META.size:
            raise self._damaged(f"it has {self._size:,} bytes, which are no LMDB file")
        magic, version, _, _, page_bytes, *of_free, _, flags, depth, _, _, _, entries, root, last, txn = _META.unpack(
            head[_PAGE_HEADER:]
        )
        del of_free
        if magic != _MAGIC:
            raise self._damaged("it does not begin as an LMDB file of this machine's byte order does")
        if version != _DATA_VERSION:
            raise StoreError(
                f"{self._path} has LMDB's data version {version}, and version {_DATA_VERSION} of LMDB 0.9 can be read; "
                "copy it into a database of that version"
            )
        if page_bytes not in (1 << power for power in range(9, 17)) or depth > _MOST_DEPTH or last >= 1 << 48:
            raise self._damaged(f"page size {page_bytes}, depth {depth}, last page {last}")
        self._crc = crc_of(os.pread(self._file, page_bytes, offset), self._crc)
        return _Meta(page_bytes, flags, depth, entries, root, last, txn)

    def tree(self, with_keys: bool) -> Tree:
        meta = self._meta_of_last
        if meta.flags & _DUPLICATES:
            raise StoreError(
                f"{self._path} keeps several values a key (dupsort), which are not read; copy it into a database of "
                "one value a key"
            )
        keys: list[bytes] | None = [] if with_keys else None
        found = 0
        if meta.root != _NO_PAGE:
            level = np.array([meta.root], np.uint64)
            for _ in range(meta.depth - 1):
                level = np.concatenate([self._branches(*block) for block in self._blocks(level, _BRANCH)])
                if len(level) > meta.last_page or len(np.unique(level)) != len(level):
                    raise self._damaged("its pages lead in a circle")
            found = sum(self._leaves(text, pages, places, keys) for text, pages, places in self._blocks(level, _LEAF))
        if found != meta.entries or (meta.root == _NO_PAGE) != (meta.depth == 0):
            raise self._damaged(f"it has {found} values, and says {meta.entries}")
        return Tree(found, self._crc, self._size, keys)

    def _blocks(self, numbers: NDArray[np.uint64], kind: int) -> Iterator[tuple[bytes, Any, Any]]:
        """Some pages at a time: their 16-bit numbers, and of each node the page it is on and its place there."""
        if numbers.min() < 2 or numbers.max() > self._meta_of_last.last_page:
            raise self._damaged("a page's number is none")
        for begin in range(0, len(numbers), _PAGES_AT_ONCE):
            some = numbers[begin : begin + _PAGES_AT_ONCE]
            text = b"".join(os.pread(self._file, self._page_bytes, int(n) * self._page_bytes) for n in some)
            if len(text) != len(some) * self._page_bytes:
                raise self._damaged("it was cut off while it was read")
            self._crc = crc_of(text, self._crc)
            halves = np.frombuffer(text, np.uint16).reshape(len(some), -1)
            flags, lower, upper = (halves[:, i].astype(np.int64) for i in (5, 6, 7))
            count = (lower - _PAGE_HEADER) // 2
            wrong = (halves[:, :4].copy().view(np.uint64)[:, 0] != some) | (flags != kind) | (count < 1)
            wrong |= (lower > upper) | (upper > self._page_bytes) | (lower % 2 != 0)
            if wrong.any():
                raise self._damaged(f"page {some[wrong.argmax()]} is not what it should be")
            places = halves[:, 8 : 8 + int(count.max())].astype(np.int64)
            is_node = np.arange(places.shape[1]) < count[:, None]
            pages, _ = np.nonzero(is_node)
            places = places[is_node]
            if (places % 2).any() or (places < upper[pages]).any() or (places > self._page_bytes - _NODE_HEADER).any():
                raise self._damaged("an entry lies outside of its page")
            yield text, pages, places

    def _nodes(self, text: bytes, pages: Any, places: Any) -> tuple[Any, ...]:
        """Each node's place in the text, and the four numbers it begins with."""
        halves = np.frombuffer(text, np.uint16)
        at = pages * self._page_bytes + places
        numbers = [halves[at // 2 + i].astype(np.int64) for i in range(4)]
        if (places + _NODE_HEADER + numbers[3] > self._page_bytes).any():
            raise self._damaged("a key lies outside of its page")
        return at, *numbers

    def _branches(self, text: bytes, pages: Any, places: Any) -> NDArray[np.uint64]:
        _, low, high, higher, _ = self._nodes(text, pages, places)
        children: NDArray[np.uint64] = (low | high << 16 | higher << 32).astype(np.uint64)
        return children

    def _leaves(self, text: bytes, pages: Any, places: Any, keys: list[bytes] | None) -> int:
        at, low, high, flags, key_bytes = self._nodes(text, pages, places)
        if (flags & ~_BIG).any():
            raise StoreError(
                f"{self._path} has named databases in it, or several values a key, which are not read; copy what is "
                "wanted into a database of its own"
            )
        size, is_big = low | high << 16, flags == _BIG
        if (places + _NODE_HEADER + key_bytes + np.where(is_big, 8, size) > self._page_bytes).any():
            raise self._damaged("a value lies outside of its page")
        if is_big.any():
            bytes_at = (at + _NODE_HEADER + key_bytes)[is_big, None] + np.arange(8)
            first = np.frombuffer(text, np.uint8)[bytes_at].view(np.uint64)[:, 0]
            taken = (-(-(size[is_big] + _PAGE_HEADER) // self._page_bytes)).astype(np.uint64)
            last = np.uint64(self._meta_of_last.last_page)
            if (first < 2).any() or (first > last).any() or (first + taken > last + np.uint64(1)).any():
                raise self._damaged("a value lies outside of the file")
        if keys is not None:
            begins = (at + _NODE_HEADER).tolist()
            keys += [text[begin : begin + n] for begin, n in zip(begins, key_bytes.tolist(), strict=True)]
        return len(at)
