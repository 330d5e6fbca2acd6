"""Tables of streams: of each its place, length, key and metadata.

::

    streams.bin    a table, int64, little-endian, row after row, a column for each stream
                     start       first step, or what else tells where it begins
                     steps       how many
                     key_stop    where its key ends in keys.bin
                     note_stop   where its metadata ends in notes.bin
                     ...         rows of the format's own
    keys.bin       all streams' keys, UTF-8, end to end
    notes.bin      all streams' metadata, JSON, end to end

Guarantee: opening takes the time and memory of a few pages, as the files are mapped.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.packing import StreamRecord

__all__ = ["KEYS", "NOTES", "ROWS", "STREAMS", "Texts", "encoded", "load_table", "stops_of", "write_tables"]

STREAMS, KEYS, NOTES = "streams.bin", "keys.bin", "notes.bin"

#: The rows of streams.bin before the format's own.
ROWS = ("start", "steps", "key_stop", "note_stop")


def write_tables(
    folder: str, records: Sequence[StreamRecord], starts: Sequence[int], own: NDArray[np.int64]
) -> dict[str, list[int]]:
    """Write the files; `own` are the format's rows. Returns each file's CRC-32 and size."""
    keys, notes = encoded([record.key for record in records], [record.metadata for record in records])
    table = np.zeros((len(ROWS) + len(own), len(records)), "<i8")
    if records:
        table[0] = starts
        table[1] = [record.steps for record in records]
        table[2], table[3] = stops_of(keys), stops_of(notes)
        table[len(ROWS) :] = own
    contents = {STREAMS: table.tobytes(), KEYS: b"".join(keys), NOTES: b"".join(notes)}
    for name, content in contents.items():
        with open(os.path.join(folder, name), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    return {name: [zlib.crc32(content), len(content)] for name, content in contents.items()}


def encoded(keys: Iterable[str], notes: Iterable[Mapping[str, Any]]) -> tuple[list[bytes], list[bytes]]:
    """Streams' keys and metadata as files have them: UTF-8, and JSON or nothing."""
    texts = [key.encode("utf-8", "backslashreplace") for key in keys]
    return texts, [json.dumps(note).encode() if note else b"" for note in notes]


def stops_of(texts: Sequence[bytes]) -> NDArray[np.int64]:
    """Where each text ends."""
    stops: NDArray[np.int64] = np.cumsum([len(text) for text in texts], dtype=np.int64)
    return stops


class Texts:
    """The keys and the metadata of all streams, end to end, and where each ends."""

    def __init__(self, keys: Any, key_stops: NDArray[np.int64], notes: Any, note_stops: NDArray[np.int64]) -> None:
        self._keys, self._notes = (keys, key_stops), (notes, note_stops)

    def key(self, number: int) -> str:
        """A stream's key."""
        return _part(*self._keys, number).decode("utf-8", "backslashreplace")

    def note(self, number: int) -> Mapping[str, Any]:
        """A stream's metadata."""
        text = _part(*self._notes, number)
        found: Mapping[str, Any] = json.loads(text) if text else {}
        return found


def _part(text: Any, stops: NDArray[np.int64], number: int) -> bytes:
    begin = int(stops[number - 1]) if number else 0
    return bytes(text[begin : int(stops[number])])


def load_table(path: str, checksum: Sequence[int], check: bool) -> Any:
    """One of the files, mapped; `checksum` is its CRC-32 and its size."""
    crc, size = checksum
    with open(path, "rb") as file:
        found = os.fstat(file.fileno()).st_size
        if found != size:
            raise StoreError(f"{path} is damaged: {found:,} bytes of {size:,}; pack the store anew")
        mapped: Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    if check and zlib.crc32(mapped) != crc:
        raise StoreError(f"{path} is damaged: checksum mismatch; pack the store anew")
    return mapped
