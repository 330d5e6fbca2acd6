"""The time steps of one stream: samples that follow each other, or rows of what one sample holds.

Guarantee: numbers of samples that are alike go from the map to the batch in one copy for each leaf. A value that does
not fit the batch is an error, never converted or spread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from stream_dataloader._items.layout import DTYPES_OF_NUMPY, spec_of
from stream_dataloader._items.structure import Misfit, Node, flatten, unflatten
from stream_dataloader.errors import StoreError
from stream_dataloader.stores.mds.encodings import ArrayEncoding, Encoding, ListEncoding
from stream_dataloader.stores.mds.fetch import Ahead, Shards
from stream_dataloader.stores.mds.pictures import PictureEncoding
from stream_dataloader.stores.mds.scan import steps_of
from stream_dataloader.stores.mds.shards import Shard

__all__ = ["ItemColumns", "RowSteps", "SampleSteps"]


class ItemColumns:
    """How items are made of columns.

    Args:
        structure: Of an item.
        names: The columns that are its leaves.
        places: Where they are among all.
        encodings: Theirs.

    Attributes:
        names: As given.
        places: As given.
        encodings: As given.
        direct: Each column is one leaf of numbers, so that it can be written without making an item.
    """

    def __init__(
        self, structure: Node, names: Sequence[str], places: Sequence[int], encodings: Sequence[Encoding]
    ) -> None:
        self._structure = structure
        self.names = list(names)
        self.places = list(places)
        self.encodings = list(encodings)
        self.direct = all(isinstance(encoding, (ArrayEncoding, PictureEncoding)) for encoding in encodings)

    def item(self, values: Iterable[Any]) -> Any:
        """An item of columns' values."""
        return unflatten(self._structure, iter(values))


class SampleSteps:
    """A stream whose time steps are samples; see `Steps`.

    Args:
        shards: The dataset's.
        firsts: The first sample of each shard, and behind them the number of all samples.
        start: The stream's first sample.
        steps: How many there are.
        columns: Of an item.
        ahead: How many shards are fetched ahead of use.
        name: What errors call the stream.
    """

    def __init__(
        self,
        shards: Shards,
        firsts: Any,
        start: int,
        steps: int,
        columns: ItemColumns,
        ahead: int,
        name: Callable[[], str],
    ) -> None:
        self._shards = shards
        self._firsts = firsts
        self._start = start
        self._steps = steps
        self._columns = columns
        self._most_ahead = ahead
        self._name = name
        self._shard: Shard | None = None
        self._first = self._stop = 0  # of the shard
        self._ahead: list[Ahead] = []
        if steps:
            self._open(start)

    def __len__(self) -> int:
        return self._steps

    def _open(self, sample: int) -> Shard:
        """The shard that a sample is in; those that follow are begun to be fetched."""
        if self._shard is not None and self._first <= sample < self._stop:
            return self._shard
        self._shard = None
        number = int(np.searchsorted(self._firsts, sample, "right")) - 1
        for one in self._ahead:
            if one.number == number:
                one.wait()
        try:
            shard = self._shards.open(number)
        except StoreError as error:
            raise self._error(error) from error
        last = int(np.searchsorted(self._firsts, self._start + self._steps - 1, "right")) - 1
        wanted = range(number + 1, min(number + self._most_ahead, last) + 1)
        begun = {one.number: one for one in self._ahead}
        found = [begun.get(one) or self._shards.ahead(one) for one in wanted]
        self._ahead = [one for one in found if one is not None]
        self._first, self._stop = int(self._firsts[number]), int(self._firsts[number + 1])
        self._shard = shard
        return shard

    def _error(self, error: Exception) -> StoreError:
        return StoreError(f"{self._name()}: {error}")

    def item(self, index: int) -> Any:
        shard = self._open(self._start + index)
        sample = self._start + index - self._first
        try:
            with shard.known:
                return self._columns.item([shard.value(sample, place) for place in self._columns.places])
        except StoreError as error:
            raise self._error(error) from error

    def read(self, start: int, out: Any) -> None:
        _, leaves = flatten(out)
        count = len(leaves[0])
        if not self._columns.direct:
            write_items((self.item(index) for index in range(start, start + count)), leaves)
            return
        done = 0
        while done < count:
            shard = self._open(self._start + start + done)
            begin = self._start + start + done - self._first
            end = min(begin + count - done, shard.samples)
            try:
                with shard.known:
                    self._write(shard, begin, end, [leaf[done : done + end - begin] for leaf in leaves])
            except StoreError as error:
                raise self._error(error) from error
            done += end - begin

    def _write(self, shard: Shard, begin: int, end: int, leaves: list[Any]) -> None:
        columns = self._columns
        try:
            views = shard.windows(columns.places, begin, end)
        except StoreError:
            raise
        except ValueError as error:
            raise shard.error(begin, columns.places[0], error) from error
        for name, place, encoding, view, leaf in zip(
            columns.names, columns.places, columns.encodings, views, leaves, strict=True
        ):
            if view is None:
                for row, sample in enumerate(range(begin, end)):
                    value = np.asarray(shard.value(sample, place))
                    check_fit(name, value.dtype, value.shape, leaf)
                    leaf[row] = value
            else:
                delivered = encoding.delivered if isinstance(encoding, ArrayEncoding) else None
                check_fit(name, delivered or view.dtype, view.shape[1:], leaf)
                leaf[...] = view

    def close(self) -> None:
        self._shard, self._ahead = None, []


class RowSteps:
    """A stream that one sample holds: its arrays' rows, and its lists' elements, are time steps; see `Steps`.

    What is neither is the same in all time steps.

    Args:
        shard: The shard that it is in.
        sample: Its number there.
        columns: Of an item.
        name: What errors call the stream.
    """

    def __init__(self, shard: Shard, sample: int, columns: ItemColumns, name: Callable[[], str]) -> None:
        self._shard: Shard | None = shard
        self._sample = sample
        self._columns = columns
        self._name = name
        self._rows: list[Any] = []
        lengths: dict[str, int] = {}
        for column, place, encoding in zip(columns.names, columns.places, columns.encodings, strict=True):
            try:
                part = shard.part(sample, place)
                if isinstance(encoding, ArrayEncoding) and encoding.shape != ():
                    self._rows.append(encoding.view(part))
                    lengths[column] = steps_of(encoding, part)
                elif isinstance(encoding, ListEncoding):
                    self._rows.append(encoding.parts(part))
                    lengths[column] = steps_of(encoding, part)
                else:
                    self._rows.append(encoding.decode(part))
            except ValueError as error:
                raise StoreError(f"{name()}: {shard.error(sample, place, error)}") from error
        if len(set(lengths.values())) != 1:
            told = f"its columns have {lengths} time steps" if lengths else "none of its columns is an array or a list"
            raise StoreError(f"{name()}: a sample that is a stream has as many rows in all its arrays, and {told}")
        self._steps = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self._steps

    def item(self, index: int) -> Any:
        assert self._shard is not None
        with self._shard.known:
            return self._columns.item(
                self._value(encoding, rows, index)
                for encoding, rows in zip(self._columns.encodings, self._rows, strict=True)
            )

    def _value(self, encoding: Encoding, rows: Any, index: int) -> Any:
        if isinstance(encoding, ArrayEncoding) and encoding.shape != ():
            return np.array(rows[index], encoding.delivered or rows.dtype.newbyteorder("="))[()]
        if not isinstance(encoding, ListEncoding):
            return rows
        try:
            return encoding.element.decode(rows[index])
        except ValueError as error:
            raise StoreError(f"{self._name()}, step {index}: a list has {error}") from error

    def read(self, start: int, out: Any) -> None:
        assert self._shard is not None
        _, leaves = flatten(out)
        count = len(leaves[0])
        if not all(isinstance(encoding, ArrayEncoding) for encoding in self._columns.encodings):
            write_items((self.item(index) for index in range(start, start + count)), leaves)
            return
        with self._shard.known:
            for name, encoding, rows, leaf in zip(
                self._columns.names, self._columns.encodings, self._rows, leaves, strict=True
            ):
                values = np.asarray(rows) if encoding.shape == () else rows[start : start + count]  # type: ignore[attr-defined]
                shape = values.shape if encoding.shape == () else values.shape[1:]  # type: ignore[attr-defined]
                check_fit(name, encoding.delivered or values.dtype, shape, leaf)  # type: ignore[attr-defined]
                leaf[...] = values

    def close(self) -> None:
        self._shard, self._rows = None, []


def check_fit(name: str, dtype: np.dtype[Any], shape: tuple[int, ...], leaf: Any) -> None:
    """Refuse to write what is not alike: NumPy would convert it, or repeat it.

    Raises:
        Misfit: Says what it is, and what it was.
    """
    if dtype.newbyteorder("=") != leaf.dtype or shape != leaf.shape[1:]:
        raise Misfit(f"the column {name!r} is {dtype.name} {shape}, and was {leaf.dtype} {leaf.shape[1:]}")


def write_items(items: Iterable[Any], leaves: list[Any]) -> None:
    """Write items, whose leaves have to be as those of the first were.

    Raises:
        Misfit: They are not.
    """
    for row, item in enumerate(items):
        _, values = flatten(item)
        if len(values) != len(leaves):
            raise Misfit(f"an item has {len(values)} leaves, and the first had {len(leaves)}")
        for value, leaf in zip(values, leaves, strict=True):
            spec = spec_of(value)
            if spec.dtype is None or DTYPES_OF_NUMPY.get(spec.dtype) != leaf.dtype or spec.shape != leaf.shape[1:]:
                raise Misfit(f"a leaf is {spec}, and was {leaf.dtype} {leaf.shape[1:]}")
            leaf[row] = value
