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

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError
from stream_dataloader.stores.mds.encodings import ArrayEncoding, Encoding
from stream_dataloader.stores.mds.index import ShardEntry
from stream_dataloader.streams._media.known_file import KnownFile
from stream_dataloader.streams.cache.file_cache import LocalFile

__all__ = ["Columns", "Shard"]


@dataclass(frozen=True)
class Columns:
    """The columns of a dataset.

    Attributes:
        names: Of all, in the order in which samples have them.
        sizes: Of their values in bytes; None where they differ.
        encodings: Of those that are read, by their place among all.
    """

    names: tuple[str, ...]
    sizes: tuple[int | None, ...]
    encodings: dict[int, Encoding]

    def place(self, name: str) -> int:
        """Where a column is among all."""
        return self.names.index(name)


class Shard:
    """A shard, mapped.

    Args:
        file: The file, which is held as long as this is.
        name: What errors call it.
        entry: What the index says of it.
        columns: Of the dataset.

    Attributes:
        known: The file as it was, to be held while something is read.

    Raises:
        StoreError: It is damaged.
        FileNotFoundError: It is missing.
    """

    def __init__(self, file: LocalFile, name: str, entry: ShardEntry, columns: Columns) -> None:
        self.name = name
        self.samples = entry.samples
        self._columns = columns
        self._held = file
        self._bytes = entry.raw.bytes
        with open(file.path, "rb") as opened:
            self.known = KnownFile.of(file.path, opened.fileno(), name=name)._replace(descriptor=-1)
            if self.known.size != self._bytes:
                raise StoreError(
                    f"{name} is damaged: {self.known.size:,} bytes of {self._bytes:,}; fetch or write it anew"
                )
            self._mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        self._memory = memoryview(self._mapped)
        count = int.from_bytes(self._memory[:4], "little")
        if count != self.samples:
            raise StoreError(f"{name} is damaged: it holds {count:,} samples, and the index says {self.samples:,}")
        self._offsets = np.frombuffer(self._mapped, "<u4", count + 1, 4).astype(np.int64)
        sizes = np.diff(self._offsets)
        if self._offsets[0] < 8 + 4 * count or self._offsets[-1] > self._bytes or (sizes < 0).any():
            raise StoreError(f"{name} is damaged: places of samples lie outside of its {self._bytes:,} bytes")
        self._variable = [place for place, size in enumerate(columns.sizes) if not size]
        self._alike: list[int] | None = None  # where columns begin in a sample, and where it ends, if all are alike
        self._views: dict[int, NDArray[Any]] = {}
        if not self._variable:
            self._alike = np.cumsum([0, *columns.sizes]).tolist()
            if (sizes != self._alike[-1]).any():
                raise StoreError(f"{name} is damaged: samples have other sizes than {self._alike[-1]:,} bytes")

    @property
    def content(self) -> memoryview:
        """All of its bytes."""
        return self._memory

    def value(self, sample: int, place: int) -> Any:
        """A column's value in a sample, as a copy.

        Raises:
            StoreError: It is damaged.
        """
        try:
            return self._columns.encodings[place].decode(self.part(sample, place))
        except ValueError as error:
            raise self.error(sample, place, error) from error

    def error(self, sample: int, place: int, error: Exception) -> StoreError:
        """The error for a value that cannot be decoded."""
        what = error if isinstance(error, StoreError) else f"the column {self._columns.names[place]!r} has {error}"
        return StoreError(f"{self.name}, sample {sample}: {what}")

    def part(self, sample: int, place: int) -> memoryview:
        """The bytes of a column's value in a sample."""
        begin = int(self._offsets[sample])
        bounds = self._bounds(sample) if self._alike is None else self._alike
        return self._memory[begin + bounds[place] : begin + bounds[place + 1]]

    def parts(self, place: int) -> list[memoryview]:
        """The bytes of a column's values in all samples."""
        begins, sizes = self._offsets[:-1], self._columns.sizes
        if self._alike is not None:
            begin, end = self._alike[place : place + 2]
            return [self._memory[at + begin : at + end] for at in begins.tolist()]
        head = 4 * len(self._variable)
        if (np.diff(self._offsets) < head).any():
            raise StoreError(f"{self.name} is damaged: samples have less than {head} bytes")
        bytes_ = np.frombuffer(self._memory, np.uint8)
        heads = bytes_[begins[:, None] + np.arange(head)].view("<u4").astype(np.int64)
        all_sizes = np.empty((self.samples, len(sizes)), np.int64)
        for column, size in enumerate(sizes):
            all_sizes[:, column] = size or heads[:, self._variable.index(column)]
        ends = begins + head + np.cumsum(all_sizes, axis=1).T
        if (ends[-1] != self._offsets[1:]).any():
            raise StoreError(f"{self.name} is damaged: the columns of samples do not end where samples do")
        places = zip((ends[place] - all_sizes[:, place]).tolist(), ends[place].tolist(), strict=True)
        return [self._memory[begin:end] for begin, end in places]

    def _bounds(self, sample: int) -> list[int]:
        """Where columns begin in a sample, and where it ends."""
        begin, end = int(self._offsets[sample]), int(self._offsets[sample + 1])
        head = 4 * len(self._variable)
        if end - begin < head:
            raise StoreError(f"{self.name} is damaged: sample {sample} has {end - begin} bytes")
        return self._bounds_of(np.frombuffer(self._memory[begin : begin + head], "<u4"), end - begin, sample)

    def _bounds_of(self, head: NDArray[Any], size: int, sample: int) -> list[int]:
        sizes = list(self._columns.sizes)
        for place, found in zip(self._variable, head.tolist(), strict=True):
            sizes[place] = found
        bounds: list[int] = np.cumsum([4 * len(self._variable), *sizes]).tolist()
        if bounds[-1] != size:
            raise StoreError(
                f"{self.name} is damaged: the columns of sample {sample} take {bounds[-1]} bytes of {size}"
            )
        return bounds

    def windows(self, places: Sequence[int], start: int, stop: int) -> list[NDArray[Any] | None]:
        """The numbers of columns in samples `[start, stop)`, over the map.

        Args:
            places: The columns.
            start: The first sample.
            stop: The one behind the last.

        Returns:
            Arrays `(stop - start, ...)`; None where a column holds no numbers, or samples are not alike.
        """
        if self._alike is not None:
            return [self._view(place, start, stop) for place in places]
        bounds = self._bounds_of_all(start, stop)
        if bounds is None:
            return [None] * len(places)
        return [self._strided(place, start, stop, bounds) for place in places]

    def _view(self, place: int, start: int, stop: int) -> NDArray[Any] | None:
        """Of a shard whose samples are all alike."""
        view = self._views.get(place)
        if view is None:
            assert self._alike is not None
            found = self._strided(place, 0, self.samples, self._alike)
            if found is None:
                return None
            view = self._views[place] = found
        return view[start:stop]

    def _bounds_of_all(self, start: int, stop: int) -> list[int] | None:
        """The columns' places in samples; None if they differ."""
        sizes = np.diff(self._offsets[start : stop + 1])
        head = len(self._variable)
        size = int(sizes[0])
        if (sizes != size).any() or size < 4 * head:
            return None
        heads = self._rows(start, stop, 0, np.dtype("<u4"), (head,), size)
        return None if (heads != heads[0]).any() else self._bounds_of(heads[0], size, start)

    def _strided(self, place: int, start: int, stop: int, bounds: list[int]) -> NDArray[Any] | None:
        encoding = self._columns.encodings[place]
        if not isinstance(encoding, ArrayEncoding):
            return None
        if encoding.size is None:
            dtype, shape, at = encoding.layout(self.part(start, place))
            heads = self._rows(start, stop, bounds[place], np.dtype(np.uint8), (at,), bounds[-1])
            if (heads != heads[0]).any():
                return None
        else:
            assert encoding.dtype is not None
            dtype, shape, at = encoding.dtype, encoding.shape or (), 0
        return self._rows(start, stop, bounds[place] + at, dtype, shape, bounds[-1])

    def _rows(
        self, start: int, stop: int, at: int, dtype: np.dtype[Any], shape: tuple[int, ...], stride: int
    ) -> NDArray[Any]:
        """The same place of samples that have one size, which is the stride."""
        inner = [dtype.itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        begin = int(self._offsets[start]) + at
        rows: NDArray[Any] = np.ndarray((stop - start, *shape), dtype, self._mapped, begin, (stride, *inner))
        return rows
