"""index.json: which shards an MDS dataset has, and what columns.

Source: `streaming/base/format/base/reader.py`, `mds/reader.py` and `base/stream.py` of mosaicml-streaming 0.13. ::

    {"version": 2, "shards": [
        {"version": 2, "format": "mds", "samples": 22,
         "size_limit": 1000, "compression": "zstd", "hashes": ["sha1"],
         "column_names": ["t", "x"],
         "column_encodings": ["str", "ndarray:uint8:4,4"],
         "column_sizes": [null, 16],
         "raw_data": {"basename": "shard.00000.mds", "bytes": 970, "hashes": {"sha1": "77..."}},
         "zip_data": ...}, ...]}

What this package writes has one key more, with a checksum of all, and what packed stores need.

Guarantee: an index that was read is consistent, and names no file outside of the dataset.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.codecs import check_compression
from stream_dataloader.stores._base.files import damage_named, inside, read_json
from stream_dataloader.streams.cache.file_cache import is_url

__all__ = ["INDEX", "DatasetIndex", "ShardEntry", "ShardFile", "in_folder", "read_index", "write_index"]

INDEX = "index.json"

_NOTE = "stream_dataloader"
_MOST_SHARD_BYTES = 1 << 32  # places in it are uint32


class ShardFile(NamedTuple):
    """A shard as a file; hashes of its bytes have their names."""

    basename: str
    bytes: int
    hashes: Mapping[str, str]


class ShardEntry(NamedTuple):
    """What the index says of a shard; `zip` is its compressed file, if there is one."""

    samples: int
    raw: ShardFile
    zip: ShardFile | None
    compression: str | None


class DatasetIndex(NamedTuple):
    """What the index says of columns and shards; `note` is of this package."""

    names: list[str]
    encodings: list[str]
    sizes: list[int | None]
    shards: list[ShardEntry]
    note: Mapping[str, Any]
    digest: str


def in_folder(folder: str, name: str) -> str:
    """The path of a file in a folder, or its URL; of chained URLs the first names the folder."""
    if not is_url(folder):
        return os.path.join(folder, name)
    first, chain, rest = folder.partition("::")
    return f"{first.rstrip('/')}/{name}{chain}{rest}"


def _digest(content: Mapping[str, Any]) -> str:
    note = {key: value for key, value in content.get(_NOTE, {}).items() if key != "check"}
    text = json.dumps({**content, _NOTE: note}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def write_index(folder: str, shards: Sequence[Mapping[str, Any]], note: Mapping[str, Any]) -> None:
    """Write index.json, the last thing that is written: it is whole, or not there."""
    content: dict[str, Any] = {"version": 2, "shards": list(shards), _NOTE: dict(note)}
    content[_NOTE]["check"] = _digest(content)
    unfinished = os.path.join(folder, f".{INDEX}")
    with open(unfinished, "w", encoding="utf-8") as file:
        json.dump(content, file, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, os.path.join(folder, INDEX))


def read_index(path: str, name: str) -> DatasetIndex:
    """Read an index from a local file, which errors call `name`."""
    content = read_json(path, dict)
    with damage_named(name):
        if content["version"] != 2 or not isinstance(content["shards"], list):
            raise StoreError(f"{name} is of version {shorten(content['version'])}, and version 2 is read")
        note, digest = content.get(_NOTE, {}), _digest(content)
        renamed = any(isinstance(value, dict) and "check" in value for key, value in content.items() if key != _NOTE)
        if renamed or note.get("check", None if note else digest) != digest:
            raise StoreError(f"{name} is damaged: its checksum is another; write the dataset anew")
        shards: list[ShardEntry] = []
        columns: list[list[Any]] = [[], [], []]
        for number, entry in enumerate(content["shards"]):
            with damage_named(where := f"{name}, shard {number}"):
                here = [list(entry[f"column_{kind}"]) for kind in ("names", "encodings", "sizes")]
                if number and here != columns:
                    raise ValueError(f"its columns {shorten(here)} are not those of the others")
                columns = here
                names, encodings, sizes = here
                texts = all(isinstance(text, str) for text in (*names, *encodings))
                if not texts or not len(names) == len(encodings) == len(sizes) == len(set(names)) > 0:
                    raise ValueError(f"its columns are {shorten(here)}")
                _check_counts(*(size or 0 for size in sizes))
                shards.append(_shard(entry, where))
    return DatasetIndex(columns[0], columns[1], columns[2], shards, note, digest)


def _check_counts(*counts: Any) -> None:
    for count in counts:
        if type(count) is not int or not 0 <= count < _MOST_SHARD_BYTES:
            raise ValueError(f"{shorten(count)} where a number below {_MOST_SHARD_BYTES:,} should be")


def _shard(found: Any, where: str) -> ShardEntry:
    samples, compression, zipped = found["samples"], found["compression"], None
    if (found["version"], found["format"]) != (2, "mds"):
        raise ValueError(f"it is of format {shorten(found['format'])}, version {shorten(found['version'])}")
    raw = _file(found["raw_data"], where)
    _check_counts(samples, raw.bytes - 8 - 4 * samples)
    if compression is not None:
        check_compression(compression)
        zipped = _file(found["zip_data"], where)
    return ShardEntry(samples, raw, zipped, compression)


def _file(found: Mapping[str, Any], where: str) -> ShardFile:
    inside("", found["basename"], where)
    _check_counts(found["bytes"])
    return ShardFile(found["basename"], found["bytes"], dict(found["hashes"] or {}))
