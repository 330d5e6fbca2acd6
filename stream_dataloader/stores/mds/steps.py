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
from stream_dataloader.stores.mds.shards import Column, Shard
from stream_dataloader.stores.mds.streams import MdsIndex

__all__ = ["RowSteps", "SampleSteps"]


class SampleSteps:
    """A stream whose time steps are samples; see `Steps`.

    Args:
        index: Of the dataset.
        start: The stream's first sample.
        steps: How many there are.
        ahead: How many shards are fetched ahead of use.
        name: What errors call the stream.
    """

    def __init__(self, index: MdsIndex, start: int, steps: int, ahead: int, name: Callable[[], str]) -> None:
        self._shards = index.shards
        self._firsts = index.firsts
        self._start = start
        self._steps = steps
        self._structure = index.structure
        self._columns = index.columns
        self._most_ahead = ahead
        self._name = name
        self._direct = all(isinstance(one.encoding, (ArrayEncoding, PictureEncoding)) for one in self._columns)
        self._lease: Lease[int, Shard] | None = None
        self._first = self._stop = 0  # samples of the shard
        self._ahead: dict[int, Ahead] = {}
        if steps:
            self._at(0)

    def __len__(self) -> int:
        return self._steps

    def _at(self, step: int) -> tuple[Shard, int]:
        """The shard that a step is in, and its number there."""
        sample = self._start + step
        if self._lease is None or not self._first <= sample < self._stop:
            if self._lease is not None:
                self._lease.close()
            number, last = np.searchsorted(self._firsts, [sample, self._start + self._steps - 1], "right") - 1
            try:
                self._lease = self._shards.open(int(number))
            except StoreError as error:
                raise self._error(error) from error
            wanted = range(int(number) + 1, min(int(number) + self._most_ahead, int(last)) + 1)
            self._ahead = {
                one: self._ahead.get(one) or Ahead(self._shards, one) for one in wanted if not self._shards.is_here(one)
            }
            self._first, self._stop = self._firsts[number : number + 2].tolist()
        return self._lease.handle, sample - self._first

    def _error(self, error: Exception) -> StoreError:
        return StoreError(f"{self._name()}: {error}")

    def item(self, index: int) -> Any:
        shard, sample = self._at(index)
        try:
            with shard.known:
                return unflatten(self._structure, iter(shard.values(sample, self._columns)))
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
            shard, sample = self._at(start + done)
            more = min(count - done, shard.samples - sample)
            try:
                with shard.known:
                    self._write(shard, sample, [leaf[done : done + more] for leaf in leaves])
            except StoreError as error:
                raise self._error(error) from error
            done += more

    def _write(self, shard: Shard, first: int, leaves: list[Any]) -> None:
        windows = shard.windows(self._columns, first, first + len(leaves[0]))
        for column, window, leaf in zip(self._columns, windows, leaves, strict=True):
            if window is not None:
                _put(window, column, leaf)
                continue
            for row in range(len(leaf)):
                (value,) = shard.values(first + row, [column])
                put_row(value, leaf, row, f"sample {first + row}, the column {column.name!r},")

    def close(self) -> None:
        if self._lease is not None:
            self._lease.close()
        self._lease, self._ahead = None, {}


class RowSteps:
    """A stream that one sample holds: its arrays' rows, and its lists' elements, are time steps; see `Steps`.

    What is neither is the same in all time steps.

    Args:
        lease: The shard that it is in.
        sample: Its number there.
        index: Of the dataset.
        name: What errors call the stream.

    Raises:
        StoreError: Its columns have other numbers of rows, or are damaged.
    """

    def __init__(self, lease: Lease[int, Shard], sample: int, index: MdsIndex, name: Callable[[], str]) -> None:
        self._lease: Lease[int, Shard] | None = lease
        self._structure = index.structure
        self._columns = index.columns
        self._name = name
        self._rows: list[Any] = []
        lengths: dict[str, int] = {}
        shard = lease.handle
        with shard.known:
            for column in self._columns:
                part = shard.part(sample, column)
                try:
                    if column.encoding.is_sequence:
                        self._rows.append(rows := column.encoding.rows(part))
                        lengths[column.name] = len(rows)
                    else:
                        self._rows.append(column.encoding.decode(part))
                except ValueError as error:
                    raise StoreError(f"{name()}: {shard.error(sample, column, error)}") from error
        if len(set(lengths.values())) != 1:
            raise StoreError(
                f"{name()}: a sample that is a stream has as many rows in all its arrays and lists, and these have "
                f"{lengths or 'none'}"
            )
        self._steps = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self._steps

    def item(self, index: int) -> Any:
        assert self._lease is not None
        try:
            with self._lease.handle.known:
                return unflatten(self._structure, iter([self._value(one, index) for one in range(len(self._rows))]))
        except ValueError as error:
            raise StoreError(f"{self._name()}, step {index}: {error}") from error

    def _value(self, column: int, index: int) -> Any:
        encoding, rows = self._columns[column].encoding, self._rows[column]
        return encoding.row(rows, index) if encoding.is_sequence else rows

    def read(self, start: int, out: Any) -> None:
        assert self._lease is not None
        _, leaves = flatten(out)
        count = len(leaves[0])
        if not all(isinstance(column.encoding, ArrayEncoding) for column in self._columns):
            for row in range(count):
                put_row(self.item(start + row), out, row, f"{self._name()}, step {start + row}")
            return
        with self._lease.handle.known:
            for column, rows, leaf in zip(self._columns, self._rows, leaves, strict=True):
                window = rows[start : start + count] if column.encoding.is_sequence else np.full(count, rows)
                _put(window, column, leaf)

    def close(self) -> None:
        if self._lease is not None:
            self._lease.close()
        self._lease, self._rows = None, []


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
