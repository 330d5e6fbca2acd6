"""Check of chunks that Blosc packed, before it unpacks them.

Guarantee: Blosc reads no memory behind a chunk, which it would deliver as data, and allocates no more than the array's
chunks hold: it trusts the header of a chunk for both. This holds in files, in shards and in archives alike.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numcodecs.abc
import zarr
from zarr.abc.codec import BytesBytesCodec

__all__ = ["with_checks"]

_NAMES = ("blosc", "numcodecs.blosc")
_HEADER_BYTES = 16

#: A filter may make values wider before they are packed: bytes become float64.
_WIDEST = 8


def with_checks(array: Any) -> Any:
    """Return an array of the package `zarr` that checks each chunk which Blosc is to unpack."""
    metadata = array.metadata
    largest = _WIDEST * math.prod(array.chunks) * array.dtype.itemsize
    if metadata.zarr_format == 2:
        filters = None if metadata.filters is None else tuple(_checked(one, largest) for one in metadata.filters)
        checked = dataclasses.replace(metadata, filters=filters, compressor=_checked(metadata.compressor, largest))
    else:
        checked = dataclasses.replace(metadata, codecs=_codecs_with_checks(metadata.codecs, largest))
    return zarr.Array(zarr.AsyncArray(metadata=checked, store_path=array.store_path))


def _check(packed: int, header: bytes, largest: int) -> None:
    """Compare a chunk with the sizes in its header (`blosc.h`: bytes 4 to 7 unpacked, 12 to 15 packed)."""
    unpacked, size = (int.from_bytes(header[first : first + 4], "little") for first in (4, 12))
    if packed < max(size, _HEADER_BYTES):
        raise ValueError(f"a chunk of Blosc is cut off: it has {packed:,} bytes of {size:,}")
    if unpacked > largest:
        raise ValueError(f"a chunk of Blosc claims {unpacked:,} bytes, and the array's have at most {largest:,}")


class _CheckedBlosc(numcodecs.abc.Codec):  # type: ignore[misc]
    """Blosc of format 2, which checks a chunk first."""

    codec_id = "blosc"

    def __init__(self, blosc: Any, largest: int) -> None:
        self._blosc, self._largest = blosc, largest

    def encode(self, buf: Any) -> Any:
        return self._blosc.encode(buf)

    def decode(self, buf: Any, out: Any = None) -> Any:
        view = memoryview(buf).cast("B")
        _check(len(view), bytes(view[:_HEADER_BYTES]), self._largest)
        return self._blosc.decode(buf, out)

    def get_config(self) -> Any:
        return self._blosc.get_config()


def _checked(codec: Any, largest: int) -> Any:
    return _CheckedBlosc(codec, largest) if getattr(codec, "codec_id", None) in _NAMES else codec


@dataclass(frozen=True)
class _BloscCheck(BytesBytesCodec):
    """Codec of format 3 that is put behind Blosc: it is asked first when a chunk is unpacked, and changes nothing."""

    largest: int
    is_fixed_size = True

    async def decode(self, chunks_and_specs: Iterable[tuple[Any, Any]]) -> Iterable[Any]:
        chunks = [chunk for chunk, _ in chunks_and_specs]
        for chunk in chunks:
            if chunk is not None:
                _check(len(chunk), chunk[:_HEADER_BYTES].to_bytes(), self.largest)
        return chunks

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: Any) -> int:
        del chunk_spec
        return input_byte_length


def _codecs_with_checks(codecs: Iterable[Any], largest: int) -> tuple[Any, ...]:
    found: list[Any] = []
    for codec in codecs:
        is_shard = hasattr(codec, "index_codecs")  # its chunks have codecs of their own
        found.append(_shard_with_checks(codec, largest) if is_shard else codec)
        if codec.to_dict().get("name") in _NAMES:
            found.append(_BloscCheck(largest))
    return tuple(found)


def _shard_with_checks(shard: Any, largest: int) -> Any:
    return dataclasses.replace(shard, codecs=_codecs_with_checks(shard.codecs, largest))
