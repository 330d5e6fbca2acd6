"""The time steps of one stream: samples that follow each other, or rows of what one sample holds.

Guarantee: numbers of samples that are alike go from the map to the batch in one copy for each leaf. A value that does
not fit the batch is an error, never converted or spread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stream_dataloader._items.structure import flatten, unflatten
from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.handles import Lease
from stream_dataloader.stores._base.values import put_row
from stream_dataloader.stores.mds.encodings import ArrayEncoding
from stream_dataloader.stores.mds.fetch import Ahead
from stream_dataloader.stores.mds.pictures import PictureEncoding
from stream_dataloader.stores.mds.shards import Column, SampleRows, Shard
from stream_dataloader.stores.mds.streams import MdsIndex

__all__ = ["MdsSteps"]


class MdsSteps:
    """A stream whose time steps are samples, or what one sample holds; see `Steps`."""

    def __init__(self, index: MdsIndex, number: int, ahead: int, name: Callable[[], str]) -> None:
        self._shards = index.shards
        self._firsts = index.firsts
        self._structure = index.structure
        self._columns = index.columns
        self._most_ahead = ahead
        self._name = name
        self._direct = all(isinstance(one.encoding, (ArrayEncoding, PictureEncoding)) for one in self._columns)
        self._lease: Lease[int, Shard] | None = None
        self._rows: Any = None  # a `Shard`, or `SampleRows`
        self._first = self._stop = 0  # its samples, counted over all shards
        self._ahead: dict[int, Ahead] = {}
        self._start, self._steps = index.extent(number)
        try:
            if self._steps:
                rows, row = self._at(0)
                if isinstance(rows, Shard) and index.kind == "sample":
                    with rows.known:
                        self._rows = rows.rows(row, self._columns)
                    self._start = self._first = 0
                    self._stop = self._steps = self._rows.samples
        except StoreError as error:
            self.close()
            raise self._error(error) from error

    def __len__(self) -> int:
        return self._steps

    def _at(self, step: int) -> tuple[Shard | SampleRows, int]:
        """The shard that a step is in, and its number there."""
        sample = self._start + step
        if not self._first <= sample < self._stop:
            if self._lease is not None:
                self._lease.close()
            number, last = np.searchsorted(self._firsts, [sample, self._start + self._steps - 1], "right") - 1
            self._lease = self._shards.open(int(number))
            wanted = range(int(number) + 1, min(int(number) + self._most_ahead, int(last)) + 1)
            self._ahead = {
                one: self._ahead.get(one) or Ahead(self._shards, one) for one in wanted if not self._shards.is_here(one)
            }
            self._first, self._stop = self._firsts[number : number + 2].tolist()
            self._rows = self._lease.handle
        return self._rows, sample - self._first

    def _error(self, error: Exception) -> StoreError:
        return StoreError(f"{self._name()}: {error}")

    def item(self, index: int) -> Any:
        try:
            rows, row = self._at(index)
            with rows.known:
                return unflatten(self._structure, iter(rows.values(row, self._columns)))
        except StoreError as error:
            raise self._error(error) from error

    def read(self, start: int, out: Any) -> None:
        _, leaves = flatten(out)
        count = len(leaves[0])
        if not self._direct:
            for row in range(count):
                put_row(self.item(start + row), out, row, f"{self._name()}, step {start + row}")
            return
        done = 0
        while done < count:
            try:
                rows, first = self._at(start + done)
                more = min(count - done, rows.samples - first)
                with rows.known:
                    self._write(rows, first, [leaf[done : done + more] for leaf in leaves])
            except StoreError as error:
                raise self._error(error) from error
            done += more

    def _write(self, rows: Shard | SampleRows, first: int, leaves: list[Any]) -> None:
        windows = rows.windows(self._columns, first, first + len(leaves[0]))
        for column, window, leaf in zip(self._columns, windows, leaves, strict=True):
            if window is not None:
                _put(window, column, leaf)
                continue
            for row in range(len(leaf)):
                (value,) = rows.values(first + row, [column])
                put_row(value, leaf, row, f"sample {first + row}, the column {column.name!r},")

    def close(self) -> None:
        if self._lease is not None:
            self._lease.close()
        self._lease, self._rows, self._ahead = None, None, {}
        self._first = self._stop = 0


def _put(window: NDArray[Any], column: Column, leaf: Any) -> None:
    """Write numbers over the map; NumPy would convert what is not alike, or repeat it."""
    assert isinstance(column.encoding, ArrayEncoding)
    dtype = column.encoding.delivered or window.dtype.newbyteorder("=")
    if dtype != leaf.dtype or window.shape[1:] != leaf.shape[1:]:
        raise StoreError(
            f"the column {column.name!r} is {dtype} {window.shape[1:]}, and in the steps before it {leaf.dtype} "
            f"{leaf.shape[1:]}; store all alike"
        )
    leaf[...] = window
