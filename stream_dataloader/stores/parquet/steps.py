"""One stream's rows, read by the groups that they lie in.

Guarantee: a group is read once while streams of the process are in it; numbers are copied once, from Arrow's memory to
the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.pictures import Pictures
from stream_dataloader.stores.parquet.columns import Column
from stream_dataloader.stores.parquet.rows import Group, Rows
from stream_dataloader.streams._media.picture import Picture

__all__ = ["RowSteps"]


class RowSteps:
    """One stream's steps; see `Steps`."""

    def __init__(self, rows: Rows, number: int, name: str, picture: Picture) -> None:
        self._rows = rows
        self._first, self._count = int(rows.start[number]), int(rows.lengths[number])
        self._name = name
        self._picture = picture
        self._pictures: Pictures | None = None
        self._group: Group | None = None

    def __len__(self) -> int:
        return self._count

    def item(self, index: int) -> Any:
        ((group, row, _),) = self._pieces(self._first + index, 1)
        with group.file.held_while_read:
            return _item(group.columns, row, self._decoder())

    def read(self, start: int, out: Any) -> None:
        pictures, leaf, done = self._decoder(), out, 0
        while isinstance(leaf, dict):
            leaf = next(iter(leaf.values()))
        for group, row, count in self._pieces(self._first + start, len(leaf)):
            with group.file.held_while_read:
                self._write(group.columns, row, out, slice(done, done + count), pictures)
            done += count

    def _write(self, column: Column, row: int, out: Any, part: slice, pictures: Pictures) -> None:
        if not isinstance(column, dict):
            column.write(row, out[part], pictures)
            return
        if not isinstance(out, dict) or out.keys() != column.keys():
            raise StoreError(f"{self._name} has columns {list(column)}, and room was given for {shorten(out)}")
        for name, child in column.items():
            self._write(child, row, out[name], part, pictures)

    def _pieces(self, row: int, count: int) -> Iterator[tuple[Group, int, int]]:
        """The groups in which rows are: which, the first of its rows, and how many."""
        stop = row + count
        while row < stop:
            if self._group is None or not self._group.first <= row < self._group.stop:
                self._group = self._rows.at(row)
            group = self._group
            here = min(stop, group.stop) - row
            yield group, row - group.first, here
            row += here

    def _decoder(self) -> Pictures:
        if self._pictures is None:
            self._pictures = Pictures(self._picture, "reading images of a table")
        return self._pictures

    def close(self) -> None:
        self._group = None


def _item(column: Column, row: int, pictures: Pictures) -> Any:
    if isinstance(column, dict):
        return {name: _item(child, row, pictures) for name, child in column.items()}
    return column.item(row, pictures)
