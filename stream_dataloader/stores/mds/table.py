"""Which samples of an MDS dataset are which stream, as a file: beside the shards of a packed store, or in the cache.

::

    "SDMDST1", line feed              8 bytes
    streams, keys, notes, check       int64: how many streams, bytes of keys and of notes, CRC-32 of all that follows
    start                             int64, of each stream: its first sample, counted over all shards
    steps                             int64: how many time steps
    key_stop                          int64: where its key ends
    note_stop                         int64: where its metadata ends
    keys, notes                       UTF-8 and JSON, end to end

All numbers are little-endian.

Guarantee: opening takes the time and memory of a few pages, however many streams there are. What is in a table lies
within the dataset.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.tables import Texts, encoded, stops_of
from stream_dataloader.stores.mds.shards import Column

__all__ = ["StreamTable", "write_lengths", "write_runs", "write_table"]

_MAGIC = b"SDMDST1\n"
_HEAD_BYTES = len(_MAGIC) + 4 * 8

#: The samples' numbers, and the bytes of their values in a column.
Parts = Iterator[tuple[int, memoryview]]


class StreamTable(Texts):
    """A table, mapped.

    Args:
        path: The file.
        most: How many samples the dataset has; None where a stream is one of them.

    Attributes:
        starts: `(streams,)` int64.
        steps: `(streams,)` int64.
        check: Its checksum.
    """

    def __init__(self, path: str, most: int | None) -> None:
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < _HEAD_BYTES:
                    raise StoreError(f"{path} is damaged: a table of streams has {_HEAD_BYTES} bytes at least")
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise StoreError(f"{path} is missing: the store is unfinished or damaged; write it anew") from None
        count, keys, notes, self.check = np.frombuffer(mapped, "<i8", 4, len(_MAGIC)).tolist()
        whole = min(count, keys, notes) >= 0 and size == _HEAD_BYTES + 32 * count + keys + notes
        if not whole or mapped[: len(_MAGIC)] != _MAGIC or zlib.crc32(memoryview(mapped)[_HEAD_BYTES:]) != self.check:
            raise StoreError(f"{path} is damaged: it is no table of streams, or its checksum is another")
        rows = np.frombuffer(mapped, "<i8", 4 * count, _HEAD_BYTES).reshape(4, count)
        self.starts, self.steps, *stops = rows
        texts = memoryview(mapped)[_HEAD_BYTES + 32 * count :]
        super().__init__(texts[:keys], stops[0], texts[keys:], stops[1])
        outside = rows.min(initial=0) < 0 or (np.diff(stops) < 0).any()
        if outside or (most is not None and (self.starts + self.steps).max(initial=0) > most):
            raise StoreError(f"{path} is damaged: a stream lies outside of the dataset's {most} samples")


def write_table(
    path: str,
    starts: Sequence[int] | NDArray[np.int64],
    steps: Sequence[int] | NDArray[np.int64],
    keys: Sequence[str],
    notes: Iterable[Mapping[str, Any]] = (),
) -> int:
    """Write a table; `notes` are of all streams, or none at all. Returns its checksum."""
    texts, jsons = encoded(keys, notes or [{}] * len(keys))
    rows = np.array([starts, steps, stops_of(texts), stops_of(jsons)], "<i8")
    body = b"".join([rows.tobytes(), *texts, *jsons])
    sizes = [len(texts), sum(map(len, texts)), sum(map(len, jsons)), zlib.crc32(body)]
    with open(path, "wb") as file:
        file.write(_MAGIC + np.array(sizes, "<i8").tobytes() + body)
        file.flush()
        os.fsync(file.fileno())
    return sizes[3]


def write_runs(path: str, parts: Parts, column: Column, total: int) -> None:
    """Write a table of the runs of samples, of `total`, whose values in a column are the same."""
    starts: list[int] = []
    keys: dict[str, None] = {}
    before: bytes | None = None
    for sample, part in parts:
        if before == (before := bytes(part)):
            continue
        try:
            value = column.encoding.decode(part)
        except ValueError as error:
            raise StoreError(f"sample {sample} has no key: {error}") from error
        key = value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
        keys[f"{key}@{sample}" if key in keys else key] = None  # one that comes again is another stream
        starts.append(sample)
    write_table(path, starts, np.diff([*starts, total]) if starts else [], list(keys))


def write_lengths(path: str, parts: Parts, column: Column) -> None:
    """Write a table of samples, and how many time steps each has."""
    steps = []
    for sample, part in parts:
        try:
            steps.append(len(column.encoding.rows(part)))
        except (TypeError, ValueError) as error:  # or a single number
            raise StoreError(f"sample {sample}: the column {column.name!r} has {error}") from error
    write_table(path, range(len(steps)), steps, [str(sample) for sample in range(len(steps))])
