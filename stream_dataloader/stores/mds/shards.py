"""One shard of an MDS dataset, mapped.

Source: `streaming/base/format/mds/reader.py` and `writer.py` of mosaicml-streaming 0.13. ::

    samples     uint32                    how many
    offsets     uint32 * (samples + 1)    where each begins, and where the last ends
    ...         JSON                      how it was written; not read
    sample      uint32 * n                sizes of its n columns whose sizes differ
                values                    of all columns

All numbers are little-endian.

Guarantee: no place outside of the file is read, whatever it holds. A file that is cut off or written to while it is
read is an error. Where samples are alike, numbers of many samples are one array over the map.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError
from stream_dataloader.stores.mds.encodings import ArrayEncoding, Encoding
from stream_dataloader.stores.mds.index import ShardEntry
from stream_dataloader.streams._media.known_file import KnownFile
from stream_dataloader.streams.cache.file_cache import LocalFile

__all__ = ["Column", "SampleRows", "Shard"]


class Column(NamedTuple):
    """A column that is read: its name, its place among all, and how it is encoded."""

    name: str
    place: int
    encoding: Encoding

    def error(self, error: Exception) -> StoreError:
        """The error for a value that cannot be decoded."""
        return StoreError(f"the column {self.name!r} has {error}")


class Shard:
    """A shard, mapped.

    Attributes:
        content: All of its bytes.
        known: The file as it was, to be held while something is read.
        samples: How many it has.
    """

    def __init__(self, file: LocalFile, name: str, entry: ShardEntry, sizes: Sequence[int | None]) -> None:
        self._name = name
        self._held = file
        self.samples = entry.samples
        with open(file.path, "rb") as opened:
            self.known = KnownFile.of(file.path, opened.fileno(), name=name)._replace(descriptor=-1)
            if self.known.size != entry.raw.bytes:
                raise self._damaged(f"{self.known.size:,} bytes of {entry.raw.bytes:,}")
            self.content = memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
        count = int.from_bytes(self.content[:4], "little")
        if count != self.samples:
            raise self._damaged(f"it holds {count:,} samples, and the index says {self.samples:,}")
        self._offsets = np.frombuffer(self.content, "<u4", count + 1, 4).astype(np.int64)
        self._sizes = [size or 0 for size in sizes]
        self._variable = [place for place, size in enumerate(sizes) if not size]
        self._head = struct.Struct(f"<{len(self._variable)}I")
        least = self._head.size + sum(self._sizes)
        outside = self._offsets[0] < 8 + 4 * count or self._offsets[-1] > entry.raw.bytes
        if outside or (np.diff(self._offsets) < least).any():
            raise self._damaged(f"places of samples lie outside of its {entry.raw.bytes:,} bytes")
        self._views: list[NDArray[Any] | None] | None = None  # of all samples, where all are alike

    def close(self) -> None:
        """Let go of the file; what was read stays."""
        self._held.close()

    def _damaged(self, what: str) -> StoreError:
        return StoreError(f"{self._name} is damaged: {what}; fetch or write it anew")

    def _bounds(self, sample: int) -> list[int]:
        """Where the columns of a sample begin, and where the last one ends."""
        begin, end = self._offsets[sample : sample + 2].tolist()
        sizes = self._sizes
        if self._variable:
            sizes = sizes.copy()
            for place, size in zip(self._variable, self._head.unpack_from(self.content, begin), strict=True):
                sizes[place] = size
        bounds = list(accumulate(sizes, initial=begin + self._head.size))
        if bounds[-1] != end:
            raise self._damaged(f"the columns of sample {sample} take {bounds[-1] - begin:,} bytes of {end - begin:,}")
        return bounds

    def parts(self, column: Column) -> list[memoryview]:
        """The bytes of a column's value in each sample."""
        heads = np.frombuffer(self.content, np.uint8)[self._offsets[:-1, None] + np.arange(self._head.size)]
        sizes = np.tile(np.array(self._sizes, np.int64), (self.samples, 1))
        sizes[:, self._variable] = heads.view("<u4")
        ends = self._offsets[:-1] + self._head.size + np.cumsum(sizes, axis=1).T
        for sample in np.flatnonzero(ends[-1] != self._offsets[1:])[:1].tolist():
            self._bounds(sample)  # which says what is wrong
        stops = ends[column.place]
        begins = stops - sizes[:, column.place]
        return [self.content[begin:stop] for begin, stop in zip(begins.tolist(), stops.tolist(), strict=True)]

    def values(self, sample: int, columns: Sequence[Column]) -> list[Any]:
        """Columns' values in a sample, as copies."""
        return self._read(sample, columns, lambda column, part: column.encoding.decode(part))

    def rows(self, sample: int, columns: Sequence[Column]) -> SampleRows:
        """What a sample holds, for a stream of its own."""
        return SampleRows(self.known, columns, self._read(sample, columns, _opened))

    def _read(self, sample: int, columns: Sequence[Column], decode: Any) -> list[Any]:
        bounds, found = self._bounds(sample), []
        for column in columns:
            try:
                found.append(decode(column, self.content[bounds[column.place] : bounds[column.place + 1]]))
            except ValueError as error:
                raise StoreError(f"{self._name}, sample {sample}: {column.error(error)}") from error
        return found

    def windows(self, columns: Sequence[Column], start: int, stop: int) -> list[NDArray[Any] | None]:
        """The numbers of columns, the same ones in each call, in samples `[start, stop)`, over the map.

        Returns:
            Arrays `(stop - start, ...)`; None where a column holds no numbers, or samples are not alike.
        """
        if self._variable:
            return self._alike(columns, start, stop)
        if self._views is None:
            self._views = self._alike(columns, 0, self.samples)
        return [None if view is None else view[start:stop] for view in self._views]

    def _alike(self, columns: Sequence[Column], start: int, stop: int) -> list[NDArray[Any] | None]:
        bounds = self._bounds(start)
        stride = bounds[-1] - int(self._offsets[start])
        windows: list[NDArray[Any] | None] = [None] * len(columns)
        if (np.diff(self._offsets[start : stop + 1]) != stride).any():
            return windows

        def rows(at: int, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
            """The same place of all samples."""
            inner = np.empty(shape, dtype).strides
            found: NDArray[Any] = np.ndarray((stop - start, *shape), dtype, self.content, at, (stride, *inner))
            return found

        heads = rows(int(self._offsets[start]), "<u4", (len(self._variable),))
        if (heads != heads[0]).any():
            return windows
        for number, column in enumerate(columns):
            if isinstance(encoding := column.encoding, ArrayEncoding):
                begin = bounds[column.place]
                try:
                    dtype, shape, at = encoding.layout(self.content[begin : bounds[column.place + 1]])
                except ValueError as error:
                    raise StoreError(f"{self._name}, sample {start}: {column.error(error)}") from error
                described = rows(begin, np.uint8, (at,))
                if not (described != described[0]).any():
                    windows[number] = rows(begin + at, dtype, shape)
        return windows


def _opened(column: Column, part: memoryview) -> Any:
    return column.encoding.rows(part) if column.encoding.is_sequence else column.encoding.decode(part)


class SampleRows:
    """What one sample holds, read as a shard is: its arrays' rows and its lists' elements are time steps.

    What is neither is the same in all of them.
    """

    def __init__(self, known: KnownFile, columns: Sequence[Column], values: list[Any]) -> None:
        self.known = known
        self._values = {column.place: value for column, value in zip(columns, values, strict=True)}
        lengths = {one.name: len(self._values[one.place]) for one in columns if one.encoding.is_sequence}
        if len(set(lengths.values())) != 1:
            raise StoreError(
                f"a sample that is a stream has as many rows in all its arrays and lists, and these have "
                f"{lengths or 'none'}"
            )
        self.samples = next(iter(lengths.values()))

    def values(self, row: int, columns: Sequence[Column]) -> list[Any]:
        """See `Shard`."""
        found = []
        for column in columns:
            value = self._values[column.place]
            try:
                found.append(column.encoding.row(value, row) if column.encoding.is_sequence else value)
            except ValueError as error:
                raise StoreError(f"step {row}: {column.error(error)}") from error
        return found

    def windows(self, columns: Sequence[Column], start: int, stop: int) -> list[NDArray[Any] | None]:
        """See `Shard`."""
        return [self._window(column, start, stop) for column in columns]

    def _window(self, column: Column, start: int, stop: int) -> NDArray[Any] | None:
        if not isinstance(column.encoding, ArrayEncoding):
            return None
        value = self._values[column.place]
        return value[start:stop] if column.encoding.is_sequence else np.full(stop - start, value)
