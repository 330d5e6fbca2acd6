"""Writing of MDS datasets, which mosaicml-streaming reads like its own.

Source: `streaming/base/format/mds/writer.py` of mosaicml-streaming 0.13.

Guarantee: index.json is written after everything else is on the disk.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

import numpy as np

from stream_dataloader.errors import shorten
from stream_dataloader.stores._base.codecs import check_compression, hash_of, pack
from stream_dataloader.stores._base.files import write_synced
from stream_dataloader.stores.mds.encodings import encoding_of
from stream_dataloader.stores.mds.index import write_index
from stream_dataloader.streams._media.listing import entries_in

__all__ = ["MdsWriter", "ShardWriter"]

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_MOST_SHARD_BYTES = (1 << 32) - 1  # offsets in a shard are uint32


class ShardWriter:
    """Writer of samples as shards; `entries` are those of the index."""

    def __init__(
        self,
        folder: str,
        columns: Mapping[str, str],
        compression: str | None = None,
        hashes: Sequence[str] | None = None,
        size_limit: int | str | None = 1 << 26,
        name: str = "shard",
    ) -> None:
        if not columns:
            raise ValueError("columns is empty; name at least one, and its encoding")
        if compression is not None:
            pack(compression, b"")  # raises now if it is unknown, or its package is missing
        for one in hashes or ():
            hash_of(one, b"")
        self._folder, self._name = folder, name
        self._encodings = []
        for column in sorted(columns):
            try:
                self._encodings.append((column, columns[column], encoding_of(columns[column], allow_pickle=True)))
            except ValueError as error:
                raise ValueError(f"column {column!r}: {error}") from None
        self._config: dict[str, Any] = {
            "version": 2,
            "format": "mds",
            "compression": compression,
            "hashes": sorted(set(hashes or ())),
            "size_limit": None if size_limit is None else _size_of(size_limit),
            "column_names": [column for column, _, _ in self._encodings],
            "column_encodings": [kind for _, kind, _ in self._encodings],
            "column_sizes": [encoding.size for _, _, encoding in self._encodings],
        }
        self._config_bytes = json.dumps(self._config, sort_keys=True).encode()
        self._samples: list[bytes] = []
        self._size = 0
        self._before = self._whole = 0  # number of samples and shards of earlier streams
        self.entries: list[dict[str, Any]] = []

    def encode(self, sample: Mapping[str, Any]) -> bytes:
        sizes, parts = [], []
        for name, kind, encoding in self._encodings:
            if name not in sample:
                raise ValueError(f"a sample has no {name!r}; it has {shorten(list(sample))}")
            value = sample[name]
            try:
                part = bytes(value) if isinstance(value, (bytes, bytearray)) else encoding.encode(value)
            except (TypeError, ValueError, OverflowError, RecursionError) as error:
                kind_ = TypeError if isinstance(error, TypeError) else ValueError
                raise kind_(f"column {name!r}, encoding {kind!r}: {error}") from error
            if encoding.size is None:
                sizes.append(len(part))
            elif len(part) != encoding.size:
                raise ValueError(f"column {name!r}, encoding {kind!r}: {len(part)} bytes of {encoding.size}")
            parts.append(part)
        return np.array(sizes, "<u4").tobytes() + b"".join(parts)

    def begin(self) -> None:
        """Begin a stream, which `take_back` can undo."""
        self._before, self._whole = len(self._samples), len(self.entries)

    def take_back(self) -> None:
        del self.entries[self._whole :], self._samples[self._before :]
        self._size = sum(map(len, self._samples))

    def add(self, sample: bytes) -> None:
        if self._before and not self._has_room(sample):  # write samples of earlier streams by themselves
            self.flush(self._before)
            self._before, self._whole = 0, len(self.entries)
        if not self._has_room(sample):
            self.flush()
        self._samples.append(sample)
        self._size += len(sample)

    def _has_room(self, sample: bytes) -> bool:
        size = self._size + 8 + len(self._config_bytes) + 4 * (len(self._samples) + 1) + len(sample)
        return size <= (self._config["size_limit"] or _MOST_SHARD_BYTES)

    def flush(self, count: int | None = None) -> None:
        samples = self._samples[:count]
        if not samples:
            return
        head = 8 + 4 * len(samples) + len(self._config_bytes)
        offsets = head + np.cumsum([0, *map(len, samples)])
        if offsets[-1] > _MOST_SHARD_BYTES:
            raise ValueError(f"a sample has {self._size:,} bytes of {_MOST_SHARD_BYTES:,} at most")
        number = len(samples).to_bytes(4, "little")
        data = b"".join([number, offsets.astype("<u4").tobytes(), self._config_bytes, *samples])
        name = f"{self._name}.{len(self.entries):05}.mds"
        raw, zipped = self._described(name, data), None
        if (compression := self._config["compression"]) is not None:
            data = pack(compression, data)
            zipped = self._described(f"{name}.{check_compression(compression)[0]}", data)
        write_synced(os.path.join(self._folder, (zipped or raw)["basename"]), data)
        self.entries.append({"samples": len(samples), "raw_data": raw, "zip_data": zipped} | self._config)
        del self._samples[: len(samples)]
        self._size = sum(map(len, self._samples))

    def _described(self, basename: str, data: bytes) -> dict[str, Any]:
        hashes = {name: hash_of(name, data) for name in self._config["hashes"]}
        return {"basename": basename, "bytes": len(data), "hashes": hashes}


class MdsWriter:
    """Writer of an MDS dataset, sample by sample; a context manager.

    If it is left by an error, everything it wrote is deleted, and there is no dataset.

    Args:
        out: A folder, which must be empty, or is created.
        columns: The encoding of each column, such as `{"x": "ndarray:uint8:64,64,3", "label": "int"}`.
        compression: `"zstd"`, `"gz"`, `"bz2"`, `"br"`, maybe with `":level"`, or `"snappy"`.
        hashes: Hashes of each file, such as `["sha1"]` or `["xxh64"]`.
        size_limit: Largest size of a shard in bytes, before compression, or a text such as `"64mb"`; None: no limit.

    Raises:
        ValueError: An option has an invalid value.
        FileExistsError: The folder is not empty.
        ImportError: A package is missing for the compression or a hash.

    See `MdsStore` for an example.
    """

    def __init__(
        self,
        out: str | os.PathLike[str],
        *,
        columns: Mapping[str, str],
        compression: str | None = None,
        hashes: Sequence[str] | None = None,
        size_limit: int | str | None = 1 << 26,
    ) -> None:
        self.folder = os.path.expanduser(os.fspath(out))
        self._shards = ShardWriter(self.folder, columns, compression, hashes, size_limit)
        self._count = 0
        self._done = False
        os.makedirs(self.folder, exist_ok=True)
        if entries_in(self.folder):
            raise FileExistsError(f"{self.folder} is not empty; give another folder")

    def write(self, sample: Mapping[str, Any]) -> None:
        """Write a sample with a value for each column. Bytes are written unchanged.

        Raises:
            ValueError, TypeError: The sample lacks a column, or an encoding does not accept a value.
        """
        if self._done:
            raise ValueError("the writer is finished; open another one")
        try:
            encoded = self._shards.encode(sample)
        except (TypeError, ValueError) as error:
            raise type(error)(f"sample {self._count}: {error}") from error
        self._shards.add(encoded)
        self._count += 1

    def finish(self) -> None:
        """Write the remaining samples and index.json; called at the end of the context."""
        if self._done:
            return
        try:
            self._shards.flush()
            write_index(self.folder, self._shards.entries, {})
        except BaseException:
            self.abort()
            raise
        self._done = True

    def abort(self) -> None:
        """Delete everything that was written, and write no index."""
        if not self._done:
            self._done = True
            for entry in entries_in(self.folder):  # the folder was empty before
                with suppress(FileNotFoundError):
                    os.unlink(entry.path)

    def __enter__(self) -> MdsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is None:
            self.finish()
        else:
            self.abort()


def _size_of(limit: int | str) -> int:
    found: Any = limit
    if isinstance(limit, str) and (parts := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?)b?\s*", limit.lower())):
        found = int(float(parts[1]) * _UNITS[parts[2]])
    if type(found) is not int or not 0 < found <= _MOST_SHARD_BYTES:
        raise ValueError(f"size_limit is {limit!r}; give 1 to {_MOST_SHARD_BYTES:,} bytes, '64mb', or None")
    return found
