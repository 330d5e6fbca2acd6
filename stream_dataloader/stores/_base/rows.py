"""Steps whose leaves are tables with a row a time step, such as the datasets of a file.

Guarantee: a window is read by one call a leaf. Small tables are read at once, whole, when the first row of them is
wanted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np

from stream_dataloader._items.structure import flatten, unflatten
from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.streams.array.tables import Table

__all__ = ["Leaves", "RowSteps", "RowTable", "Selection", "loaded_if_small", "selected"]

#: What a step's leaf may take. No batch holds more; a damaged header may say so.
LARGEST_ROW_BYTES = 1 << 30

#: So many steps may have leaves without any number in them.
_MOST_UNTOLD = 1 << 24

#: A table of no more bytes is read whole: a call for each window costs more.
_SMALL_BYTES = 128 << 10

_CHECKED_AT_ONCE_BYTES = 4 << 20

#: How a user names leaves: one, which is an item by itself, or several, which are the entries of a dict.
Leaves = str | Sequence[str] | None


class RowTable(Table, Protocol):
    """A table that says what its rows are."""

    @property
    def row_shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...


class Selection:
    """Which leaves an item has.

    Args:
        names: Their names, with a slash before each further level: `"obs/image"`.
        alone: The only name is an item by itself, not the entry of a dict.

    Raises:
        StoreError: A name is both a leaf and a level.
    """

    def __init__(self, names: Sequence[str], *, alone: bool) -> None:
        item: dict[str, Any] = {}
        for name in names:
            *levels, last = name.split("/")
            level = item
            for key in levels:
                level = level.setdefault(key, {})
                if not isinstance(level, dict):
                    raise StoreError(f"{key!r} is a leaf, so {name!r} cannot be below it")
            level[last] = name
        self.structure, self.names = flatten(names[0] if alone else item)


def selected(leaves: Leaves, there: Sequence[str], name: str) -> Selection:
    """Find the leaves that a user wants among those there are.

    Args:
        leaves: See `given_columns`. A level's name stands for all leaves below it.
        there: The names of all.
        name: Of the store, for errors.

    Raises:
        StoreError: There is no such leaf.
    """
    if not there:
        raise StoreError(f"{name} holds no arrays")
    wanted = [leaves] if isinstance(leaves, str) else leaves
    found: dict[str, None] = {}
    for want in there if wanted is None else wanted:
        below = [one for one in there if one == want.strip("/") or one.startswith(want.strip("/") + "/")]
        if not below:
            raise StoreError(f"{name} has no leaf {want!r}; it has {shorten(list(there), 300)}")
        found.update(dict.fromkeys(below))
    return Selection(list(found), alone=isinstance(leaves, str) and leaves.strip("/") in there)


def check_row(name: str, row_shape: Sequence[int], dtype: np.dtype[Any]) -> None:
    """Refuse a time step that is absurdly large.

    Raises:
        StoreError: Names the leaf.
    """
    size = math.prod(row_shape) * dtype.itemsize
    if size > LARGEST_ROW_BYTES:
        raise StoreError(
            f"{name} is {dtype} {tuple(row_shape)} a step, {size:,} bytes, more than the {LARGEST_ROW_BYTES:,} that "
            "one may have: the store is damaged, or its first axis is not time; leave it out, by columns="
        )


def check_untold(name: str, steps: int, row_bytes: Iterable[int]) -> None:
    """Refuse many time steps of no bytes: there is nothing on the disk that they could be compared with.

    Args:
        name: Of the store or the stream, for errors.
        steps: How many it says that there are.
        row_bytes: What each leaf takes a step.

    Raises:
        StoreError: There are too many.
    """
    if steps > _MOST_UNTOLD and not any(row_bytes):
        raise StoreError(f"{name} says that it has {steps:,} steps, of no bytes; it is damaged, write it anew")


def check_lengths(name: str, lengths: Mapping[str, int]) -> int:
    """How many time steps there are, by the lengths of all leaves.

    Raises:
        StoreError: They differ; says which could be read together.
    """
    by_length: dict[int, list[str]] = {}
    for leaf, length in lengths.items():
        by_length.setdefault(length, []).append(leaf)
    if len(by_length) > 1:
        told = "; ".join(f"{length} steps of {shorten(leaves, 200)}" for length, leaves in by_length.items())
        most = max(by_length.values(), key=len)
        raise StoreError(
            f"{name}: leaves that are read side by side need as many steps each, and there are {told}; choose some "
            f"that have, such as columns={shorten(most, 200)}, or cut the others"
        )
    return next(iter(by_length), 0)


class RowSteps:
    """One stream's steps; see `stream.Steps`.

    Args:
        selection: Which leaves an item has.
        tables: One for each of its names.
        close: Called once, when they are closed.
        known: Held while rows are read: raises if they are others than they were.
    """

    def __init__(
        self,
        selection: Selection,
        tables: Sequence[RowTable],
        close: Callable[[], Any],
        known: AbstractContextManager[None] | None = None,
    ) -> None:
        self._structure = selection.structure
        self._tables = tables
        self._close: Callable[[], Any] | None = close
        self._length = len(tables[0])
        self._known = nullcontext() if known is None else known

    def __len__(self) -> int:
        return self._length

    def item(self, index: int) -> Any:
        with self._known:
            return unflatten(self._structure, iter([table.row(index) for table in self._tables]))

    def read(self, start: int, out: Any) -> None:
        _, leaves = flatten(out)
        with self._known:
            for table, leaf in zip(self._tables, leaves, strict=True):
                table.read(start, leaf)

    def check(self) -> None:
        """Read all, and throw it away."""
        for table in self._tables:
            at_once = max(1, _CHECKED_AT_ONCE_BYTES // max(1, math.prod(table.row_shape) * table.dtype.itemsize))
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


def loaded_if_small(table: RowTable) -> RowTable:
    """The table, or one that reads all of it at once."""
    size = len(table) * math.prod(table.row_shape) * table.dtype.itemsize
    return _LoadedTable(table) if size <= _SMALL_BYTES else table


class _LoadedTable:
    """A table whose rows are read all together; see `RowTable`."""

    def __init__(self, table: RowTable) -> None:
        self._table = table
        self._rows: Any = None
        self.row_shape = table.row_shape
        self.dtype = table.dtype

    def __len__(self) -> int:
        return len(self._table)

    def _load(self) -> Any:
        if self._rows is None:
            rows = np.empty((len(self._table), *self.row_shape), self.dtype)
            self._table.read(0, rows)
            self._rows = rows
        return self._rows

    def row(self, index: int) -> Any:
        return self._load()[index].copy()

    def read(self, start: int, out: Any) -> None:
        out[...] = self._load()[start : start + len(out)]

    def close(self) -> None:
        self._rows = None
        self._table.close()
