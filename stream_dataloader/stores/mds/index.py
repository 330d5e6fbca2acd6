"""index.json of an MDS dataset, and tables, which describe its streams.

Source: `streaming/base/format/mds/reader.py` of mosaicml-streaming 0.13. ::

    {"version": 2, "shards": [
        {"version": 2, "format": "mds", "samples": 22,
         "size_limit": 1000, "compression": "zstd", "hashes": ["sha1"],
         "column_names": ["t", "x"],
         "column_encodings": ["str", "ndarray:uint8:4,4"],
         "column_sizes": [null, 16],
         "raw_data": {"basename": "shard.00000.mds", "bytes": 970, "hashes": {"sha1": "77..."}},
         "zip_data": ...}, ...]}

An index that this package writes has one more key, with a checksum and the data of packed stores.

A table lies beside the shards of a packed store, or in the cache. Numbers are int64, little-endian::

    "SDMDST1", line feed
    streams, keys, notes, check       number of streams, bytes of keys and of notes, CRC-32 of the rest
    start                             for each stream: its first sample
    steps                             number of time steps
    key_stop, note_stop               end of its key, and of its metadata
    keys, notes                       UTF-8 and JSON, end to end

Guarantee: an index that was read is consistent, and names no file outside of its folder.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.codecs import check_compression
from stream_dataloader.stores._base.files import damage_named, hashed, inside, read_json, write_synced
from stream_dataloader.stores.memmap.packed import Texts, encoded

__all__ = [
    "INDEX",
    "DatasetIndex",
    "ShardEntry",
    "ShardFile",
    "StreamTable",
    "read_index",
    "write_index",
    "write_table",
]

INDEX = "index.json"

_NOTE = "stream_dataloader"
_MOST_SHARD_BYTES = 1 << 32  # offsets in a shard are uint32

_MAGIC = b"SDMDST1\n"
_HEAD = struct.Struct("<8s4q")


class ShardFile(NamedTuple):
    """File of a shard, with the hashes of its bytes by name."""

    basename: str
    bytes: int
    hashes: Mapping[str, str]


class ShardEntry(NamedTuple):
    """Entry of the index for a shard; `zip` is its compressed file, or None."""

    samples: int
    raw: ShardFile
    zip: ShardFile | None
    compression: str | None


class DatasetIndex(NamedTuple):
    """Columns and shards of a dataset, from its index; `note` is this package's own key."""

    names: list[str]
    encodings: list[str]
    sizes: list[int | None]
    shards: list[ShardEntry]
    note: Mapping[str, Any]
    digest: str


def _digest(content: Mapping[str, Any]) -> str:
    note = {key: value for key, value in content.get(_NOTE, {}).items() if key != "check"}
    text = json.dumps({**content, _NOTE: note}, sort_keys=True)
    return hashed(text)


def write_index(folder: str, shards: Sequence[Mapping[str, Any]], note: Mapping[str, Any]) -> None:
    """Write index.json after all other files. It is complete, or does not exist."""
    content: dict[str, Any] = {"version": 2, "shards": list(shards), _NOTE: dict(note)}
    content[_NOTE]["check"] = _digest(content)
    unfinished = os.path.join(folder, f".{INDEX}")
    write_synced(unfinished, json.dumps(content, sort_keys=True).encode())
    os.replace(unfinished, os.path.join(folder, INDEX))


def read_index(path: str, name: str) -> DatasetIndex:
    """Read an index from a local file; `name` is its name in errors."""
    content = read_json(path, dict, name)
    with damage_named(name):
        if content["version"] != 2 or not isinstance(content["shards"], list):
            raise StoreError(f"{name} is of version {shorten(content['version'])}, not 2")
        note, digest = content.get(_NOTE, {}), _digest(content)
        others = (value for key, value in content.items() if key != _NOTE)
        renamed = any(isinstance(value, dict) and "check" in value for value in others)
        if renamed or note.get("check", None if note else digest) != digest:
            raise StoreError(f"{name} is damaged: its checksum is another; write the dataset again")
        shards: list[ShardEntry] = []
        columns: list[list[Any]] = [[], [], []]
        for number, entry in enumerate(content["shards"]):
            with damage_named(where := f"{name}, shard {number}"):
                here = [list(entry[f"column_{kind}"]) for kind in ("names", "encodings", "sizes")]
                if here != columns and number:
                    raise ValueError(f"its columns {shorten(here)} are not those of the others")
                columns = here
                shards.append(_shard(entry, where))
        names, encodings, sizes = columns
        texts = all(isinstance(text, str) for text in (*names, *encodings))
        if not texts or not len(names) == len(encodings) == len(sizes) == len(set(names)) >= bool(shards):
            raise ValueError(f"its columns are {shorten(columns)}")
        _check_counts(*(size or 0 for size in sizes))
    return DatasetIndex(names, encodings, sizes, shards, note, digest)


def _check_counts(*counts: Any) -> None:
    for count in counts:
        if type(count) is not int or not 0 <= count < _MOST_SHARD_BYTES:
            raise ValueError(f"{shorten(count)} where a number below {_MOST_SHARD_BYTES:,} should be")


def _shard(found: Any, where: str) -> ShardEntry:
    if (found["version"], found["format"]) != (2, "mds"):
        raise ValueError(f"it is {shorten(found['format'])}, version {shorten(found['version'])}")
    samples, compression, raw, zipped = found["samples"], found["compression"], _file(found["raw_data"], where), None
    _check_counts(samples, raw.bytes - 8 - 4 * samples)
    if compression is not None:
        check_compression(compression)
        zipped = _file(found["zip_data"], where)
    return ShardEntry(samples, raw, zipped, compression)


def _file(found: Mapping[str, Any], where: str) -> ShardFile:
    inside("", found["basename"], where)
    _check_counts(found["bytes"])
    return ShardFile(found["basename"], found["bytes"], dict(found["hashes"] or {}))


class StreamTable(Texts):
    """Memory-mapped table, whose streams must lie within `most` samples."""

    def __init__(self, path: str, most: int) -> None:
        with damage_named(path):  # NumPy refuses a file that is too short
            content = np.asarray(np.memmap(path, np.uint8, "r"))
            magic, count, keys, notes, self.check = _HEAD.unpack_from(content.data)
            body = content[_HEAD.size :]
            rows, texts = body[: 32 * count].view("<i8").reshape(4, count), body[32 * count :]
            self.starts, self.steps, *stops = rows
            if magic != _MAGIC or len(texts) != keys + notes or zlib.crc32(body.data) != self.check:
                raise ValueError("it is not a table of streams, or its checksum is wrong")
            super().__init__(texts[:keys], stops[0], texts[keys:], stops[1])
            outside = rows.min(initial=0) < 0 or (np.diff(stops) < 0).any()
            if outside or (self.starts + self.steps).max(initial=0) > most:
                raise ValueError(f"a stream lies outside of the dataset's {most} samples")


def write_table(
    path: str,
    starts: Sequence[int] | NDArray[np.int64],
    steps: Sequence[int] | NDArray[np.int64],
    keys: Sequence[str],
    notes: Iterable[Mapping[str, Any]],
) -> int:
    """Write a table; return its checksum."""
    texts, jsons, stops = encoded(keys, notes)
    body = np.array([starts, steps, *stops], "<i8").tobytes() + texts + jsons
    check = zlib.crc32(body)
    write_synced(path, _HEAD.pack(_MAGIC, len(keys), len(texts), len(jsons), check) + body)
    return check
