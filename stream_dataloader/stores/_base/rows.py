"""Stores of arrays with a row for each time step.

Guarantee: a window is read with one call for each leaf. Small tables are read completely.
The claims of a damaged header are refused before memory is allocated for them.
An encoded image whose size or depth differs from the batch raises an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from stream_dataloader._engine.items.structure import Node, flatten, unflatten
from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.files import damage_named
from stream_dataloader.stores._base.leaves import entries_of
from stream_dataloader.streams._media.opencv import check_opencv, decoded_image, import_opencv
from stream_dataloader.streams._media.picture import ArrayConverter, Picture, picture_with
from stream_dataloader.streams.array.tables import MemoryTable

__all__ = ["PictureRows", "Pictures", "RowSteps", "Selection", "loaded_if_small", "read_rows", "row_of", "selected"]

#: Largest size of a step's leaf. A damaged header may claim more.
LARGEST_ROW_BYTES = 1 << 30

#: Largest size of a table that is read completely.
_SMALL_BYTES = 128 << 10

_CHECKED_AT_ONCE_BYTES = 4 << 20


class Selection(NamedTuple):
    """Leaves that an item has."""

    item: Any  # an item with each leaf's name in place of its value
    names: list[str]  # with slashes: "obs/image"

    @property
    def structure(self) -> Node:
        return flatten(self.item)[0]

    @classmethod
    def of(cls, names: Sequence[str]) -> Selection:
        """Return a selection of leaves, nested according to their names."""
        item: dict[str, Any] = {}
        for name in names:
            *levels, last = name.split("/")
            level = item
            for key in levels:
                level = level.setdefault(key, {})
            level[last] = name
        return cls(item, flatten(item)[1])


def selected(columns: str | Sequence[str] | None, there: Sequence[str], name: str) -> Selection:
    """Return the leaves that a user wants: one by itself, several, or None for all."""
    if not there:
        raise StoreError(f"{name} holds no arrays")
    if isinstance(columns, str) and (alone := columns.strip("/")) in there:
        return Selection(alone, [alone])
    whole = Selection.of(there)
    if columns is None:
        return whole
    wanted = [columns] if isinstance(columns, str) else columns
    item = entries_of(whole.item, wanted, name, there)
    return Selection(item, flatten(item)[1])


def check_row(name: str, row_shape: Sequence[int], dtype: np.dtype[Any]) -> None:
    """Raise if a row has more bytes than a time step may have."""
    size = math.prod(row_shape) * dtype.itemsize
    if size > LARGEST_ROW_BYTES:
        what = f"{name} is {dtype} {tuple(row_shape)} a step, {size:,} bytes of {LARGEST_ROW_BYTES:,}"
        raise StoreError(f"{what}: its first axis may not be time; leave it out, by columns=")


def check_lengths(name: str, lengths: Mapping[str, int]) -> int:
    """Return the number of steps of the leaves; raise if it differs."""
    by_length: dict[int, list[str]] = {}
    for leaf, length in lengths.items():
        by_length.setdefault(length, []).append(leaf)
    if len(by_length) > 1:
        found = "; ".join(f"{length} steps of {shorten(leaves, 200)}" for length, leaves in by_length.items())
        most = max(by_length.values(), key=len)
        remedy = f"choose some that have, such as columns={shorten(most, 200)}, or cut the others"
        raise StoreError(f"{name}: there are {found}; {remedy}")
    return next(iter(by_length), 0)


class RowSteps:
    """Steps with a table for each leaf, see `Steps`; `known` is entered while rows are read."""

    def __init__(
        self,
        structure: Node,
        tables: Sequence[Any],
        steps: int,
        *,
        first: int = 0,
        close: Callable[[], Any] = tuple,
        known: AbstractContextManager[None] | None = None,
    ) -> None:
        self._structure, self._tables = structure, tables
        self._tree = unflatten(structure, iter(tables)) if _is_of_dicts(structure) else None
        self._first, self._steps = first, steps
        self._close, self._known = close, known or nullcontext()

    def __len__(self) -> int:
        return self._steps

    def item(self, index: int) -> Any:
        with self._known:
            if self._tree is not None:
                return row_of(self._tree, self._first + index)
            return unflatten(self._structure, iter([table.row(self._first + index) for table in self._tables]))

    def read(self, start: int, out: Any) -> None:
        with self._known:
            if self._tree is not None:
                read_rows(self._tree, self._first + start, out)
                return
            for table, leaf in zip(self._tables, flatten(out)[1], strict=True):
                table.read(self._first + start, leaf)

    def check(self) -> None:
        """Read all rows that are not in memory."""
        for table in self._tables:
            if isinstance(table, MemoryTable):
                continue
            at_once = max(1, _CHECKED_AT_ONCE_BYTES // max(1, math.prod(table.row_shape) * table.dtype.itemsize))
            room = np.empty((min(at_once, self._steps), *table.row_shape), table.dtype)
            for start in range(0, self._steps, at_once):
                table.read(self._first + start, room[: self._steps - start])

    def close(self) -> None:
        close, self._close, self._tables, self._tree = self._close, tuple, (), None
        close()


def _is_of_dicts(structure: Node) -> bool:
    """Return True if an item is a leaf, or dicts of leaves, which have a faster path."""
    return structure.type in (None, dict) and all(map(_is_of_dicts, structure.children))


def row_of(tree: Any, index: int) -> Any:
    """Return one row of each table in a nested dict."""
    if type(tree) is dict:
        return {key: row_of(below, index) for key, below in tree.items()}
    return tree.row(index)


def read_rows(tree: Any, start: int, out: Any) -> None:
    """Write rows of each table in a nested dict to `out`."""
    if type(tree) is dict:
        if len(tree) != len(out):
            raise KeyError(*out)
        for key, below in tree.items():
            read_rows(below, start, out[key])
    else:
        tree.read(start, out)


def loaded_if_small(table: Any) -> Any:
    """Return the table's rows in memory if they are small, because reading each window costs more; else the table."""
    shape = (len(table), *table.row_shape)
    if math.prod(shape) * table.dtype.itemsize > _SMALL_BYTES:
        return table
    rows = np.empty(shape, table.dtype)
    table.read(0, rows)
    table.close()
    return MemoryTable(rows, "")


class Pictures:
    """Decoder of images. If `swapped` is given, gray images keep one channel; True swaps blue and red."""

    def __init__(self, picture: Picture, user: str, *, swapped: bool | None = None) -> None:
        check_opencv(user)
        self._picture, self._swapped = picture, swapped

    def item(self, data: bytes, name: str, out: Any = None) -> Any:
        picture, flags = self._picture, None
        if self._swapped is not None:
            cv2 = import_opencv("")
            flags = cv2.IMREAD_ANYCOLOR | cv2.IMREAD_ANYDEPTH
        is_gray = picture.color == "gray"
        try:
            options: dict[str, Any] = {"upright": picture.upright, "limits": picture.limits}
            image = decoded_image(data, name, gray=is_gray, deep=True, flags=flags, **options)
        except ValueError as error:
            raise StoreError(str(error)) from error.__cause__
        if flags is not None and image.ndim == 2:
            picture = picture_with(picture, color="gray")
        elif self._swapped:
            image = cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
        # A converter for each image: one for all would rescale to the size of the first.
        converter = ArrayConverter(picture_with(picture, deep=image.dtype == np.uint16))
        own = converter.empty(image)
        if out is None:
            out = own
        elif (own.dtype, own.shape) != (out.dtype, out.shape):
            what = f"{name} is {own.dtype} {own.shape}, but images before are {out.dtype} {out.shape}"
            raise StoreError(f"{what}; give size=(height, width) to rescale all")
        converter.write(image, out)
        return out


class PictureRows:
    """Table of encoded images, each maybe followed by zeros. All have the shape of the first. See `tables.Table`."""

    def __init__(self, rows: Any, pictures: Pictures, name: str) -> None:
        self._rows, self._pictures, self._name = rows, pictures, name

    def __len__(self) -> int:
        return len(self._rows)

    @cached_property
    def _first(self) -> Any:
        return self.row(0)

    @property
    def row_shape(self) -> tuple[int, ...]:
        return tuple(self._first.shape)

    @property
    def dtype(self) -> Any:
        return self._first.dtype

    def row(self, index: int, out: Any = None) -> Any:
        name = f"{self._name}, row {index}"
        with damage_named(name):
            return self._pictures.item(bytes(self._rows[index]), name, out)

    def read(self, start: int, out: Any) -> None:
        for row, place in enumerate(out, start):
            self.row(row, place)

    def close(self) -> None:
        self._rows = ()
