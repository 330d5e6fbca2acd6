"""Makes shards of samples: a sample's bytes, and the file that many of them make.

Source: `streaming/base/format/base/writer.py` and `mds/writer.py` of mosaicml-streaming 0.13.

Guarantee: what a sample may not hold is an error when it is encoded, and changes nothing. A shard whose entry was
returned is on the disk.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stream_dataloader.errors import shorten
from stream_dataloader.stores.mds.compression import check_compression, check_hash, extension_of, hash_of, pack
from stream_dataloader.stores.mds.kinds import encoding_of

__all__ = ["SampleEncoder", "ShardBuilder"]

_UNITS = {"": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}
_MOST_SHARD_BYTES = (1 << 32) - 1  # places in it are uint32


class SampleEncoder:
    """Turns samples into bytes.

    Args:
        columns: The encoding of each column.

    Raises:
        ValueError: There is no such encoding, or no column.
    """

    def __init__(self, columns: Mapping[str, str], bools: Sequence[str] = ()) -> None:
        if not columns:
            raise ValueError("columns is empty; name at least one, and its encoding")
        self.names = sorted(columns)
        self.kinds = [columns[name] for name in self.names]
        self._encodings = []
        for name, kind in zip(self.names, self.kinds, strict=True):
            try:
                self._encodings.append(encoding_of(kind, allow_pickle=True))
            except ValueError as error:
                raise ValueError(f"column {name!r}: {error}") from None
        for name in bools:
            self._encodings[self.names.index(name)].as_bool()  # type: ignore[attr-defined]
        self.sizes = [encoding.size for encoding in self._encodings]

    def encode(self, sample: Mapping[str, Any]) -> bytes:
        """A sample's bytes. Bytes are taken as they are, whatever the column's encoding.

        Raises:
            ValueError, TypeError: It lacks a column, or has a value that its encoding does not take.
        """
        sizes, parts = [], []
        for name, kind, encoding in zip(self.names, self.kinds, self._encodings, strict=True):
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
                raise ValueError(f"column {name!r}, encoding {kind!r}: {len(part)} bytes instead of {encoding.size}")
            parts.append(part)
        return np.array(sizes, "<u4").tobytes() + b"".join(parts)


class ShardBuilder:
    """Collects samples, and writes them as a shard.

    Args:
        folder: Where.
        encoder: Of the samples.
        compression: How to compress, or None.
        hashes: Which to make of each file.
        size_limit: How many bytes a shard has at most, unless one sample has more; None: one shard.

    Attributes:
        samples: That are collected.
        files: Names of all files that were written.

    Raises:
        ValueError: There is no such compression or hash, or the limit is none.
    """

    def __init__(
        self,
        folder: str,
        encoder: SampleEncoder,
        compression: str | None,
        hashes: Sequence[str] | None,
        size_limit: int | str | None,
    ) -> None:
        if compression is not None:
            check_compression(compression)
            pack(compression, b"")  # is its package there?
        for name in hashes or ():
            check_hash(name)
        self._folder = folder
        self._compression = compression
        self._hashes = sorted(set(hashes or ()))
        self._limit = None if size_limit is None else _size_of(size_limit)
        self._config = {
            "version": 2,
            "format": "mds",
            "compression": compression,
            "hashes": self._hashes,
            "size_limit": self._limit,
            "column_names": encoder.names,
            "column_encodings": encoder.kinds,
            "column_sizes": encoder.sizes,
        }
        self._config_bytes = json.dumps(self._config, sort_keys=True).encode()
        self.samples: list[bytes] = []
        self._size = 0
        self.files: list[str] = []

    def is_full(self, sample: bytes) -> bool:
        """Whether the shard has to be written before a sample is added."""
        size = self._size + 8 + len(self._config_bytes) + 4 * (len(self.samples) + 1) + len(sample)
        limit = _MOST_SHARD_BYTES if self._limit is None else self._limit
        return bool(self.samples) and size > limit

    def add(self, sample: bytes) -> None:
        """Collect a sample."""
        self.samples.append(sample)
        self._size += len(sample)

    def drop(self, count: int) -> None:
        """Forget all samples but the first ones."""
        self._size -= sum(map(len, self.samples[count:]))
        del self.samples[count:]

    def write(self, name: str) -> dict[str, Any]:
        """Write what was collected as a shard, and begin another one.

        Args:
            name: Of the file, before `.mds`.

        Returns:
            Its entry in the index.

        Raises:
            ValueError: A sample is too large.
        """
        head = 8 + 4 * len(self.samples) + len(self._config_bytes)
        offsets = head + np.cumsum([0, *map(len, self.samples)])
        if offsets[-1] > _MOST_SHARD_BYTES:
            raise ValueError(f"a sample has {self._size:,} bytes, and a shard has {_MOST_SHARD_BYTES:,} at most")
        count = len(self.samples).to_bytes(4, "little")
        raw = b"".join([count, offsets.astype("<u4").tobytes(), self._config_bytes, *self.samples])
        basename, zipped = f"{name}.mds", None
        entry = {"samples": len(self.samples), "raw_data": self._told(basename, raw)}
        if self._compression is not None:
            basename, raw = f"{basename}.{extension_of(self._compression)}", pack(self._compression, raw)
            zipped = self._told(basename, raw)
        self.files.append(basename)
        with open(os.path.join(self._folder, basename), "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        self.samples, self._size = [], 0
        return entry | {"zip_data": zipped} | self._config

    def _told(self, basename: str, data: bytes) -> dict[str, Any]:
        return {
            "basename": basename,
            "bytes": len(data),
            "hashes": {name: hash_of(name, data) for name in self._hashes},
        }


def _size_of(limit: int | str) -> int:
    """A limit in bytes, which may be text like "64mb"."""
    found = limit
    if isinstance(limit, str):
        parts = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?b?)\s*", limit.lower())
        unit = _UNITS.get("" if parts is None or parts[2] == "b" else parts[2])
        if parts is None or unit is None:
            raise ValueError(f"size_limit is {limit!r}; give a number of bytes, or '100kb', '64mb', '1gb'")
        found = int(float(parts[1]) * unit)
    if isinstance(found, bool) or not isinstance(found, int) or not 0 < found <= _MOST_SHARD_BYTES:
        raise ValueError(f"size_limit is {limit!r}; give 1 to {_MOST_SHARD_BYTES:,} bytes, or None for one shard")
    return found
