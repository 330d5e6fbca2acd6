"""Stores of arrays with a row a time step.

Guarantee: a window is read by one call a leaf. Small tables are read whole.
What a damaged header claims is refused before anything is allocated for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from stream_dataloader._items.structure import flatten
from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.streams.array.tables import MemoryTable, Table

__all__ = ["RowSteps", "Selection", "loaded_if_small", "read_rows", "row_of", "selected"]

#: What a step's leaf may take; a damaged header may say more.
LARGEST_ROW_BYTES = 1 << 30

#: A table of no more bytes is read whole.
_SMALL_BYTES = 128 << 10

_CHECKED_AT_ONCE_BYTES = 4 << 20


class Selection(NamedTuple):
    """Which leaves an item has.

    Attributes:
        item: An item, with each leaf's name in its place: a nested dict, or one name.
        names: All of them, with a slash before each further level: `"obs/image"`.
    """

    item: Any
    names: list[str]

    @classmethod
    def of(cls, names: Sequence[str]) -> Selection:
        item: dict[str, Any] = {}
        for name in names:
            *levels, last = name.split("/")
            level = item
            for key in levels:
                level = level.setdefault(key, {})
                if not isinstance(level, dict):
                    raise StoreError(f"{key!r} is a leaf, so {name!r} cannot be below it")
            level[last] = name
        return cls(item, flatten(item)[1])


def selected(columns: str | Sequence[str] | None, there: Sequence[str], name: str) -> Selection:
    """The leaves that a user wants: one by itself, several, or None for all."""
    if not there:
        raise StoreError(f"{name} holds no arrays")
    if isinstance(columns, str) and columns.strip("/") in there:
        return Selection(columns.strip("/"), [columns.strip("/")])
    found: dict[str, None] = {}
    wanted = [columns] if isinstance(columns, str) else columns
    for want in there if wanted is None else wanted:
        level = want.strip("/")
        below = [one for one in there if one == level or one.startswith(level + "/")]
        if not below:
            raise StoreError(f"{name} has no leaf {want!r}; it has {shorten(list(there), 300)}")
        found.update(dict.fromkeys(below))
    return Selection.of(list(found))


def check_row(name: str, row_shape: Sequence[int], dtype: np.dtype[Any]) -> None:
    size = math.prod(row_shape) * dtype.itemsize
    if size > LARGEST_ROW_BYTES:
        raise StoreError(
            f"{name} is {dtype} {tuple(row_shape)} a step, {size:,} bytes, more than the {LARGEST_ROW_BYTES:,} "
            "that one may have: the "
            "store is damaged, or its first axis is not time; leave it out, by columns="
        )


def check_lengths(name: str, lengths: Mapping[str, int]) -> int:
    by_length: dict[int, list[str]] = {}
    for leaf, length in lengths.items():
        by_length.setdefault(length, []).append(leaf)
    if len(by_length) > 1:
        found = "; ".join(f"{length} steps of {shorten(leaves, 200)}" for length, leaves in by_length.items())
        most = max(by_length.values(), key=len)
        raise StoreError(
            f"{name}: there are {found}; choose some that have, such as columns={shorten(most, 200)}, or cut the others"
        )
    return next(iter(by_length), 0)


class RowSteps:
    """One stream's steps, see `stream.Steps`: a table a leaf.

    `close` is called once. `known` is held while rows are read, and raises if they were replaced.
    """

    def __init__(
        self,
        selection: Selection,
        tables: Sequence[Any],
        close: Callable[[], Any] = tuple,
        known: AbstractContextManager[None] | None = None,
    ) -> None:
        self._tables = tables
        self._tree = _over(selection.item, dict(zip(selection.names, tables, strict=True)))
        self._close: Callable[[], Any] | None = close
        self._length = len(tables[0])
        self._known = known

    def __len__(self) -> int:
        return self._length

    def item(self, index: int) -> Any:
        if self._known is None:
            return row_of(self._tree, index)
        with self._known:
            return row_of(self._tree, index)

    def read(self, start: int, out: Any) -> None:
        with nullcontext() if self._known is None else self._known:
            read_rows(self._tree, start, out)

    def check(self) -> None:
        for table in self._tables:
            if not hasattr(table, "row_shape"):  # it was loaded
                continue
            row_bytes = math.prod(table.row_shape) * table.dtype.itemsize
            at_once = max(1, _CHECKED_AT_ONCE_BYTES // max(1, row_bytes))
            room = np.empty((min(at_once, len(table)), *table.row_shape), table.dtype)
            for start in range(0, len(table), at_once):
                table.read(start, room[: len(table) - start])

    def close(self) -> None:
        close, self._close = self._close, None
        tables, self._tables = self._tables, []
        if close is not None:
            for table in tables:
                table.close()
            close()


def _over(item: Any, tables: Mapping[str, Table]) -> Any:
    return {key: _over(below, tables) for key, below in item.items()} if isinstance(item, dict) else tables[item]


def row_of(tree: Any, index: int) -> Any:
    """One row of each table of a tree, a nested dict of them."""
    if type(tree) is dict:
        return {key: row_of(below, index) for key, below in tree.items()}
    return tree.row(index)


def read_rows(tree: Any, start: int, out: Any) -> None:
    if type(tree) is dict:
        if len(tree) != len(out):
            raise KeyError(*out)
        for key, below in tree.items():
            read_rows(below, start, out[key])
    else:
        tree.read(start, out)


def loaded_if_small(table: Any) -> Any:
    """The table, or its rows in memory: a call for each window costs more."""
    shape = (len(table), *table.row_shape)
    if math.prod(shape) * table.dtype.itemsize > _SMALL_BYTES:
        return table
    rows = np.empty(shape, table.dtype)
    table.read(0, rows)
    table.close()
    return MemoryTable(rows, "")
