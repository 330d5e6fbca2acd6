"""One stream's rows, read by the groups that they lie in.

Guarantee: a group is read once while streams of the process are in it; numbers are copied once, from Arrow's memory to
the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.pictures import Pictures
from stream_dataloader.stores.parquet.columns import item_of, write_to
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
        item: dict[str, Any] = {}
        for group, row, _ in self._pieces(self._first + index, 1):
            item = {name: item_of(column, row, self._decoder()) for name, column in group.columns.items()}
        return item

    def read(self, start: int, out: Any) -> None:
        columns = self._rows.columns
        if not isinstance(out, Mapping) or set(out) != set(columns):
            raise StoreError(f"{self._name} has columns {columns}, and room was given for {shorten(out)}")
        done = 0
        for group, row, count in self._pieces(self._first + start, _count_of(out)):
            for name, column in group.columns.items():
                place = _part(out[name], done, done + count)
                write_to(
                    place, column, row, count, self._decoder(), f"{self._name}, {group.file.name}, column {name!r}"
                )
            done += count

    def _pieces(self, row: int, count: int) -> Iterator[tuple[Group, int, int]]:
        """The groups in which rows are: which, the first of its rows, and how many."""
        stop = row + count
        while row < stop:
            if self._group is None or not self._group.first <= row < self._group.stop:
                self._group = self._rows.at(row)
            group = self._group
            here = min(stop, group.stop) - row
            with group.file.held_while_read:
                yield group, row - group.first, here
            row += here

    def _decoder(self) -> Pictures:
        if self._pictures is None:
            self._pictures = Pictures(self._picture, "reading images of a table")
        return self._pictures

    def close(self) -> None:
        self._group = None


def _count_of(out: Any) -> int:
    while isinstance(out, Mapping):
        out = next(iter(out.values()))
    return len(out)


def _part(out: Any, start: int, stop: int) -> Any:
    if isinstance(out, Mapping):
        return {name: _part(child, start, stop) for name, child in out.items()}
    return out[start:stop]
