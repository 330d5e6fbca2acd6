"""Compressions and hashes of files, by their names in the index of an MDS dataset.

Source: `streaming/base/compression.py` and `hashing.py` of mosaicml-streaming 0.13.

Guarantee: unpacking gives exactly the expected number of bytes, or raises an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.files import package
from stream_dataloader.streams._media.limits import DEFAULT, Limits

__all__ = ["check_compression", "check_hashes", "hash_of", "pack", "unpack"]

#: The module of cramjam, its levels, and the default level.
_KINDS: dict[str, tuple[str, range, int]] = {
    "br": ("brotli", range(12), 11),
    "bz2": ("bzip2", range(1, 10), 9),
    "gz": ("gzip", range(10), 9),
    "snappy": ("snappy", range(0), 0),
    "zstd": ("zstd", range(1, 23), 3),
}
_XXHASHES = ("xxh32", "xxh64", "xxh3_64", "xxh3_128", "xxh128")


def check_compression(name: Any) -> tuple[str, int]:
    """Return the kind and level of a compression; raise if its name is unknown."""
    kind, _, level = name.partition(":") if isinstance(name, str) else ("", "", "")
    _, levels, usual = _KINDS.get(kind, ("", range(0), 0))
    if kind not in _KINDS or (level and (not level.isdecimal() or int(level) not in levels)):
        known = [f"{kind}[:{one[0]}...{one[-1]}]" if one else kind for kind, (_, one, _) in _KINDS.items()]
        raise ValueError(f"there is no compression {shorten(name)}; use {', '.join(known)} or None")
    return kind, int(level) if level else usual


def _codec(kind: str) -> Any:
    return getattr(package("cramjam", f"the compression {kind!r}"), _KINDS[kind][0])


def pack(name: str, data: bytes) -> bytes:
    """Compress some bytes."""
    kind, level = check_compression(name)
    codec = _codec(kind)
    return bytes(codec.compress_raw(data) if kind == "snappy" else codec.compress(data, level))


def unpack(name: str, data: bytes, size: int, what: str, limits: Limits | None = None) -> Any:
    """Unpack bytes of the file `what` to an array of `size` bytes."""
    kind, _ = check_compression(name)
    (limits or DEFAULT).check_unpacked(len(data), size, what)
    codec, out = _codec(kind), np.empty(size, np.uint8)
    try:
        found = (codec.decompress_raw_into if kind == "snappy" else codec.decompress_into)(data, out)
        if found != size:
            raise ValueError(f"there are {found:,}")
    except Exception as error:  # cramjam raises its own, also if `out` is too small
        raise StoreError(f"{what} cannot be unpacked ({name}) to {size:,} bytes: {error}") from error
    return out


def hash_of(name: str, data: Any) -> str:
    """Return a hash of some bytes, in hexadecimal."""
    if name in _XXHASHES:
        return str(getattr(package("xxhash", f"the hash {name!r}"), name)(data).hexdigest())
    if name not in hashlib.algorithms_available or name.startswith("shake_"):
        raise ValueError(f"there is no hash {shorten(name)}; use hashlib's, or {', '.join(_XXHASHES)}")
    return hashlib.new(name, data, usedforsecurity=False).hexdigest()


def check_hashes(hashes: Mapping[str, str], data: Any, what: str) -> None:
    """Raise if the bytes of the file `what` do not have these hashes."""
    for name, wanted in hashes.items():
        if (found := hash_of(name, data)) != wanted:
            told = f"its {name} is {found}, and should be {wanted}"
            raise StoreError(f"{what} is damaged: {told}; fetch or write it again")
