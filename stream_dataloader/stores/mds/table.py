"""Which samples are which stream: a table, kept in a file of its own.

A packed store has it beside its shards. Of other datasets it is made when it is first needed, and kept in the cache. ::

    "SDMDST1", line feed              8 bytes
    streams, keys, notes, check       int64: how many streams, bytes of keys and of notes, CRC-32 of all that follows
    start                             int64, of each stream: its first sample, counted over all shards
    steps                             int64: how many time steps
    key_stop                          int64: where its key ends
    note_stop                         int64: where its metadata ends
    keys, notes                       UTF-8 and JSON, end to end

All numbers are little-endian.

Guarantee: opening takes the time and memory of a few pages, however many streams there are; what is in a table lies
within the dataset.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.tables import Texts, encoded, stops_of

__all__ = ["StreamTable", "write_table"]

_MAGIC = b"SDMDST1\n"
_HEAD_BYTES = len(_MAGIC) + 4 * 8


def write_table(
    path: str,
    starts: Sequence[int] | NDArray[np.int64],
    steps: Sequence[int] | NDArray[np.int64],
    keys: Sequence[str],
    notes: Sequence[Mapping[str, Any]] = (),
) -> tuple[int, int]:
    """Write a table.

    Args:
        path: The file.
        starts: First samples.
        steps: Numbers of time steps.
        keys: Names.
        notes: Metadata, as JSON can hold it; none at all, or of all streams.

    Returns:
        Its size in bytes, and its checksum.
    """
    texts, jsons = encoded(keys, notes or [{}] * len(keys))
    rows = [starts, steps, stops_of(texts), stops_of(jsons)]
    body = b"".join([np.array(rows, "<i8").tobytes(), *texts, *jsons])
    sizes = [len(texts), sum(map(len, texts)), sum(map(len, jsons)), zlib.crc32(body)]
    with open(path, "wb") as file:
        file.write(_MAGIC + np.array(sizes, "<i8").tobytes() + body)
        file.flush()
        os.fsync(file.fileno())
    return _HEAD_BYTES + len(body), sizes[3]


class StreamTable(Texts):
    """A table, mapped.

    Args:
        path: The file.
        most: How many samples the dataset has; None where a stream is one of them.

    Attributes:
        starts: `(streams,)` int64.
        steps: `(streams,)` int64.
        check: Its checksum.

    Raises:
        StoreError: It is missing or damaged.
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
        outside = count and (rows.min() < 0 or (most is not None and (self.starts + self.steps).max() > most))
        if outside or any((np.diff(ends) < 0).any() for ends in stops):
            raise StoreError(f"{path} is damaged: a stream lies outside of the dataset's {most} samples")
        if count and (int(stops[0][-1]), int(stops[1][-1])) != (keys, notes):
            raise StoreError(f"{path} is damaged: names of streams end elsewhere than they should")
