"""index.json: which shards an MDS dataset has, and what columns.

Source: `streaming/base/format/base/reader.py`, `mds/reader.py` and `base/stream.py` of mosaicml-streaming 0.13. ::

    {"version": 2, "shards": [
        {"version": 2, "format": "mds", "samples": 22, "size_limit": 1000, "compression": "zstd", "hashes": ["sha1"],
         "column_names": ["t", "x"], "column_encodings": ["str", "ndarray:uint8:4,4"], "column_sizes": [null, 16],
         "raw_data": {"basename": "shard.00000.mds", "bytes": 970, "hashes": {"sha1": "77..."}},
         "zip_data": {"basename": "shard.00000.mds.zstd", "bytes": 391, "hashes": {"sha1": "6e..."}}}, ...]}

What this package writes has one key more, `stream_dataloader`, which others pass over: a checksum of the whole index,
and of packed stores what is needed to give items back as they were.

Guarantee: an index that was read is consistent: no file outside of the dataset, no size that a shard cannot have.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.files import inside, read_json
from stream_dataloader.stores.mds.compression import check_compression
from stream_dataloader.streams.cache.file_cache import is_url

__all__ = ["INDEX", "DatasetIndex", "ShardEntry", "ShardFile", "in_folder", "read_index", "write_index"]

INDEX = "index.json"

_NOTE = "stream_dataloader"
_MOST_INDEX_BYTES = 1 << 30
_MOST_SHARD_BYTES = 1 << 32  # places in it are uint32


@dataclass(frozen=True)
class ShardFile:
    """A shard as a file.

    Attributes:
        basename: Its name.
        bytes: Its size.
        hashes: Hashes of its bytes, by their names.
    """

    basename: str
    bytes: int
    hashes: Mapping[str, str]


@dataclass(frozen=True)
class ShardEntry:
    """What the index says of a shard.

    Attributes:
        samples: How many it holds.
        raw: The shard.
        zip: The compressed shard, None if there is none.
        compression: How that is compressed.
    """

    samples: int
    raw: ShardFile
    zip: ShardFile | None
    compression: str | None


@dataclass(frozen=True)
class DatasetIndex:
    """What the index says.

    Attributes:
        names: Of the columns, in the order in which samples have them.
        encodings: Of the columns.
        sizes: Of the columns' values in bytes; None where they differ.
        shards: All shards.
        note: What this package wrote besides.
        digest: Of all this.
    """

    names: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int | None, ...]
    shards: tuple[ShardEntry, ...]
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


def write_index(folder: str, shards: Sequence[Mapping[str, Any]], note: Mapping[str, Any] | None = None) -> None:
    """Write index.json, the last thing that is written: it is whole, or not there.

    Args:
        folder: Where the shards are.
        shards: Their entries.
        note: What else is to be known.
    """
    content: dict[str, Any] = {"version": 2, "shards": list(shards), _NOTE: dict(note or {})}
    content[_NOTE]["check"] = _digest(content)
    with tempfile.NamedTemporaryFile("w", dir=folder, prefix=".index", delete=False) as file:
        try:
            json.dump(content, file, sort_keys=True)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o666 & ~_umask())
            os.replace(file.name, os.path.join(folder, INDEX))
        except BaseException:
            os.unlink(file.name)
            raise


def _umask() -> int:
    found = os.umask(0o022)
    os.umask(found)
    return found


def read_index(path: str, name: str, folder: str) -> DatasetIndex:
    """Read an index.

    Args:
        path: The local file.
        name: What errors call it.
        folder: The dataset's, in which all files must lie.

    Raises:
        StoreError: It is damaged, of another version, or of a dataset that is not MDS.
    """
    content = read_json(path, dict, _MOST_INDEX_BYTES)
    if content.get("version") != 2 or not isinstance(content.get("shards"), list):
        raise StoreError(
            f"{name} is of version {shorten(content.get('version'))}, and version 2 is read, with a list of shards"
        )
    note = content.get(_NOTE, {})
    digest = _digest(content) if isinstance(note, dict) else ""
    renamed = any(isinstance(value, dict) and "check" in value for key, value in content.items() if key != _NOTE)
    if not isinstance(note, dict) or renamed or note.get("check", digest if not note else None) != digest:
        raise StoreError(f"{name} is damaged: its checksum is another; write the dataset anew")
    found = content["shards"]
    shards = tuple(_shard(shard, f"{name}, shard {number}", folder) for number, shard in enumerate(found))
    columns = [_columns(shard, f"{name}, shard {number}") for number, shard in enumerate(found)]
    odd = next((number for number, kinds in enumerate(columns) if kinds != columns[0]), None)
    if odd is not None:
        raise StoreError(
            f"{name}, shard {odd}: its columns are {dict(zip(*columns[odd][:2], strict=True))}, and of shard 0 "
            f"{dict(zip(*columns[0][:2], strict=True))}; all shards of a dataset must have the same"
        )
    names, encodings, sizes = columns[0] if columns else ((), (), ())
    return DatasetIndex(names, encodings, sizes, shards, note, digest)


def _columns(shard: Mapping[str, Any], name: str) -> tuple[tuple[str, ...], tuple[str, ...], tuple[int | None, ...]]:
    names, encodings, sizes = (shard.get(f"column_{kind}") for kind in ("names", "encodings", "sizes"))
    if (
        not (isinstance(names, list) and isinstance(encodings, list) and isinstance(sizes, list))
        or not len(names) == len(encodings) == len(sizes)
        or not all(isinstance(text, str) for text in (*names, *encodings))
        or not all(size is None or _is_count(size) for size in sizes)
        or len(set(names)) < len(names)
        or not names
    ):
        raise StoreError(f"{name}: its columns are {shorten((names, encodings, sizes))}; write the dataset anew")
    return tuple(names), tuple(encodings), tuple(sizes)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST_SHARD_BYTES


def _shard(found: Any, name: str, folder: str) -> ShardEntry:
    if not isinstance(found, dict):
        raise StoreError(f"{name} is {shorten(found)}; write the dataset anew")
    if found.get("version") != 2 or found.get("format") != "mds":
        raise StoreError(
            f"{name} is of format {shorten(found.get('format'))}, version {shorten(found.get('version'))}; "
            "'mds' of version 2 is read: write it with MDSWriter or MdsWriter"
        )
    samples: Any = found.get("samples")
    compression = found.get("compression")
    if not _is_count(samples):
        raise StoreError(f"{name} has {shorten(samples)} samples; write the dataset anew")
    raw, zipped = (_file(found.get(key), f"{name}, {key}", folder) for key in ("raw_data", "zip_data"))
    if raw is None or raw.bytes < 8 + 4 * samples:
        raise StoreError(f"{name} has {samples:,} samples in {0 if raw is None else raw.bytes:,} bytes; write it anew")
    if (compression is None) != (zipped is None):
        raise StoreError(f"{name} has the compression {shorten(compression)} and the file {zipped}; write it anew")
    if compression is not None:
        try:
            check_compression(compression)
        except ValueError as error:
            raise StoreError(f"{name}: {error}") from None
    return ShardEntry(samples, raw, zipped, compression)


def _file(found: Any, name: str, folder: str) -> ShardFile | None:
    if found is None:
        return None
    if not isinstance(found, dict):
        raise StoreError(f"{name} is {shorten(found)}; write the dataset anew")
    basename, hashes = found.get("basename"), found.get("hashes") or {}
    size: Any = found.get("bytes")
    inside(folder, basename, name)
    if not _is_count(size) or not isinstance(hashes, dict) or not all(isinstance(one, str) for one in hashes.values()):
        raise StoreError(f"{name} has {shorten(size)} bytes and the hashes {shorten(hashes)}; write the dataset anew")
    return ShardFile(str(basename), size, hashes)
