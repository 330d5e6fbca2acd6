"""Checks of packed chunks, before a codec unpacks them.

Guarantee: Blosc reads no memory behind a chunk, which it would deliver as data, because it trusts the chunk's header.
Blosc, LZ4, gzip, zlib, and Zstandard whose frames tell their size, allocate no more than the array's chunks hold.
This holds in files, in shards and in archives alike.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numcodecs.abc
import zarr
from numcodecs.compat import ndarray_copy
from zarr.abc.codec import BytesBytesCodec

__all__ = ["with_checks"]

#: Codecs whose chunks begin with their size, and those of the package zlib with its `wbits`.
_TELLING, _DEFLATED = ("blosc", "lz4", "zstd"), {"gzip": 31, "zlib": 15}

#: Bytes of a chunk that `_check` looks at: a header of Blosc, or the longest of a frame of Zstandard.
_HEADER_BYTES = 18

#: A filter may make values wider before they are packed: bytes become float64.
_WIDEST = 8


def with_checks(array: Any) -> Any:
    """Return an array of the package `zarr` that checks each chunk before it is unpacked."""
    metadata = array.metadata
    largest = _WIDEST * math.prod(array.chunks) * array.dtype.itemsize
    if metadata.zarr_format == 2:
        filters = None if metadata.filters is None else tuple(_checked(one, largest) for one in metadata.filters)
        checked = dataclasses.replace(metadata, filters=filters, compressor=_checked(metadata.compressor, largest))
    else:
        checked = dataclasses.replace(metadata, codecs=_codecs_with_checks(metadata.codecs, largest))
    return zarr.Array(zarr.AsyncArray(metadata=checked, store_path=array.store_path))


def _check(kind: str, packed: int, header: bytes, largest: int) -> None:
    """Compare a chunk with the sizes in its header."""

    def number(first: int, size: int = 4) -> int:
        return int.from_bytes(header[first : first + size], "little")

    if kind == "blosc":  # see `blosc.h`
        if packed < max(number(12), 16):
            raise ValueError(f"a chunk of blosc is cut off: it has {packed:,} bytes of {number(12):,}")
        unpacked = number(4)
    elif kind == "lz4":  # the size that numcodecs writes
        unpacked = number(0)
    else:  # RFC 8878, 3.1.1.1
        described = number(4, 1)
        is_single = bool(described & 32)
        size = (int(is_single), 2, 4, 8)[described >> 6]
        unpacked = number(5 + (not is_single) + (0, 1, 2, 4)[described & 3], size) + 256 * (size == 2)
    if unpacked > largest:
        raise _too_large(kind, f"{unpacked:,}", largest)


def _too_large(kind: str, size: str, largest: int) -> ValueError:
    return ValueError(f"a chunk of {kind} unpacks to {size} bytes, and the array's have at most {largest:,}")


def _inflated(kind: str, packed: Any, largest: int) -> bytes:
    """Unpack one stream of zlib, or the members of gzip, to at most `largest` bytes."""
    found = b""
    while packed:
        inflating = zlib.decompressobj(_DEFLATED[kind])
        found += inflating.decompress(packed, largest + 1 - len(found))
        if len(found) > largest:
            raise _too_large(kind, f"more than {largest:,}", largest)
        if not inflating.eof:
            raise ValueError(f"a chunk of {kind} is cut off")
        packed = inflating.unused_data if kind == "gzip" else b""
    return found


class _Checked(numcodecs.abc.Codec):  # type: ignore[misc]
    """Codec of format 2 that checks a chunk first."""

    codec_id = ""

    def __init__(self, codec: Any, largest: int) -> None:
        self.codec_id, self._codec, self._largest = codec.codec_id, codec, largest

    def encode(self, buf: Any) -> Any:
        return self._codec.encode(buf)

    def decode(self, buf: Any, out: Any = None) -> Any:
        packed = memoryview(buf).cast("B")
        if self.codec_id in _DEFLATED:
            return ndarray_copy(_inflated(self.codec_id, packed, self._largest), out)
        _check(self.codec_id, len(packed), bytes(packed[:_HEADER_BYTES]), self._largest)
        return self._codec.decode(buf, out)

    def get_config(self) -> Any:
        return self._codec.get_config()


def _checked(codec: Any, largest: int) -> Any:
    known = getattr(codec, "codec_id", None) in (*_TELLING, *_DEFLATED)
    return _Checked(codec, largest) if known else codec


@dataclass(frozen=True)
class _Check(BytesBytesCodec):
    """Codec of format 3 that is put behind another one: it is asked first when a chunk is unpacked, and checks it."""

    kind: str
    largest: int
    is_fixed_size = True

    async def decode(self, chunks_and_specs: Iterable[tuple[Any, Any]]) -> Iterable[Any]:
        chunks = [chunk for chunk, _ in chunks_and_specs]
        for chunk in chunks:
            if chunk is not None:
                _check(self.kind, len(chunk), chunk[:_HEADER_BYTES].to_bytes(), self.largest)
        return chunks

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: Any) -> int:
        del chunk_spec
        return input_byte_length


@dataclass(frozen=True)
class _Inflate(BytesBytesCodec):
    """Codec of format 3 in place of gzip or zlib."""

    kind: str
    largest: int
    is_fixed_size = False

    async def _decode_single(self, chunk_data: Any, chunk_spec: Any) -> Any:
        found = await asyncio.to_thread(_inflated, self.kind, chunk_data.to_bytes(), self.largest)
        return chunk_spec.prototype.buffer.from_bytes(found)

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: Any) -> int:
        raise NotImplementedError


def _codecs_with_checks(codecs: Iterable[Any], largest: int) -> tuple[Any, ...]:
    found: list[Any] = []
    for codec in codecs:
        kind = str(codec.to_dict().get("name")).removeprefix("numcodecs.")
        if hasattr(codec, "index_codecs"):  # a shard, whose chunks have codecs of their own
            found.append(dataclasses.replace(codec, codecs=_codecs_with_checks(codec.codecs, largest)))
        elif kind in _DEFLATED:
            found.append(_Inflate(kind, largest))
        else:
            found += [codec, _Check(kind, largest)] if kind in _TELLING else [codec]
    return tuple(found)
