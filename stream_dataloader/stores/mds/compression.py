"""Compressed shards and their hashes.

Source: `streaming/base/compression.py` and `hashing.py` of mosaicml-streaming 0.13. A compression is `"zstd"`, `"gz"`,
`"bz2"`, `"br"` or `"snappy"`, with `":level"` behind all but the last. Hashes are those of hashlib and of xxhash.

Guarantee: unpacking gives exactly as many bytes as it must, or is an error, and never makes many more than that.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import importlib
import io
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from stream_dataloader.errors import StoreError, shorten

__all__ = ["check_compression", "check_hash", "extension_of", "hash_of", "pack", "unpack", "wrong_hash"]

_PIECE_BYTES = 1 << 20

#: How much zstd data its decoder gets at once: repeated bytes shrink to a 32,000th.
_ZSTD_BYTES = 1 << 9

#: Levels, the one that is taken if none is named, and the package.
_KINDS: dict[str, tuple[range, int, str]] = {
    "br": (range(12), 11, "brotli"),
    "bz2": (range(1, 10), 9, "bz2"),
    "gz": (range(10), 9, "gzip"),
    "snappy": (range(0), 0, "snappy"),
    "zstd": (range(1, 23), 3, "zstandard"),
}
_XXHASHES = ("xxh32", "xxh64", "xxh3_64", "xxh3_128", "xxh128")


def _package(name: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{what} needs the package {name}: pip install 'stream-dataloader[mds]'") from error


def check_compression(name: Any) -> tuple[str, int]:
    """Kind and level of a compression.

    Raises:
        ValueError: There is none of that name.
    """
    kind, _, level = name.partition(":") if isinstance(name, str) else ("", "", "")
    levels, usual, _ = _KINDS.get(kind, (range(0), 0, ""))
    if kind not in _KINDS or (level and (not level.isdecimal() or int(level) not in levels)):
        known = [f"{kind}[:{levels[0]}...{levels[-1]}]" if levels else kind for kind, (levels, _, _) in _KINDS.items()]
        raise ValueError(f"there is no compression {shorten(name)}; use one of {', '.join(known)}, or None")
    return kind, int(level) if level else usual


def extension_of(name: str) -> str:
    """What compressed files' names end with."""
    return check_compression(name)[0]


def pack(name: str, data: bytes) -> bytes:
    """Compress some bytes.

    Raises:
        ImportError: The package for it is not installed.
    """
    kind, level = check_compression(name)
    what = f"compressing with {name!r}"
    packed: bytes
    if kind == "gz":
        packed = gzip.compress(data, level, mtime=0)
    elif kind == "bz2":
        packed = bz2.compress(data, level)
    elif kind == "br":
        packed = _package("brotli", what).compress(data, quality=level)
    elif kind == "snappy":
        packed = _package("snappy", what).compress(data)
    else:
        module, _ = _zstd(what)
        packed = (
            module.compress(data, level)
            if module.__name__ == "compression.zstd"
            else module.ZstdCompressor(level=level).compress(data)
        )
    return packed


def _zstd(what: str) -> tuple[Any, Callable[[], Any]]:
    """The module, and what makes a decoder of one frame."""
    try:
        module: Any = importlib.import_module("compression.zstd")
    except ImportError:
        module = _package("zstandard", what)
        return module, module.ZstdDecompressor().decompressobj
    return module, module.ZstdDecompressor


def unpack(name: str, data: bytes, size: int, what: str) -> Iterator[bytes]:
    """What some bytes were before they were compressed, in pieces.

    Args:
        name: How they are compressed.
        data: The bytes.
        size: How many bytes must come out.
        what: The file, for errors.

    Raises:
        StoreError: They are damaged, or were another number of bytes.
        ImportError: The package for it is not installed.
    """
    found = 0
    try:
        for piece in _pieces(check_compression(name)[0], data, size, f"{what}, compressed with {name!r},"):
            found += len(piece)
            if found > size:
                break
            yield piece
    except ImportError:
        raise
    except Exception as error:  # each package has an error of its own
        raise StoreError(f"{what} cannot be unpacked ({name}): {error}; fetch or write it anew") from error
    if found != size:
        more = "more" if found > size else f"{found:,}"
        raise StoreError(f"{what} is damaged: it should unpack to {size:,} bytes, and has {more}; write it anew")


def _pieces(kind: str, data: bytes, size: int, what: str) -> Iterator[bytes]:
    if kind == "snappy":
        snappy = _package("snappy", what)
        claimed = _varint(data)
        if claimed != size:
            raise ValueError(f"it says that it unpacks to {claimed:,} bytes")
        yield snappy.decompress(data)
    elif kind == "br":
        yield from _brotli(_package("brotli", what), data)
    elif kind == "zstd":
        _, decoder = _zstd(what)
        yield from _frames(decoder, data)
    else:
        stream = io.BytesIO(data)
        with gzip.GzipFile(fileobj=stream) if kind == "gz" else bz2.BZ2File(stream) as file:
            while piece := file.read(_PIECE_BYTES):
                yield piece


def _varint(data: bytes) -> int:
    """The size that snappy data begins with."""
    found = 0
    for place, byte in enumerate(data[:5]):
        found |= (byte & 127) << 7 * place
        if byte < 128:
            return found
    raise ValueError("no size at its beginning")


def _brotli(brotli: ModuleType, data: bytes) -> Iterator[bytes]:
    decoder = brotli.Decompressor()
    if not hasattr(decoder, "can_accept_more_data"):  # before 1.2 it has no limit: at least it gets little at once
        for at in range(0, len(data), 64):
            yield decoder.process(data[at : at + 64])
    else:
        rest = data
        while not decoder.is_finished():
            piece = decoder.process(rest, output_buffer_limit=_PIECE_BYTES)
            if not piece and not rest:
                break
            rest = b""
            yield piece
    if not decoder.is_finished():
        raise EOFError("the data ends too early")


def _frames(decoder: Callable[[], Any], data: bytes) -> Iterator[bytes]:
    """The frames of zstd data, one after the other."""
    at = 0
    while at < len(data):
        frame = decoder()
        while not frame.eof:
            if at >= len(data):
                raise EOFError("the data ends too early")
            piece, at = data[at : at + _ZSTD_BYTES], at + _ZSTD_BYTES
            yield frame.decompress(piece)
        at = min(at, len(data)) - len(frame.unused_data)


def check_hash(name: Any) -> None:
    """Refuse what is no hash.

    Raises:
        ValueError: There is none of that name.
        ImportError: The package for it is not installed.
    """
    if _hasher(name) is None:
        raise ValueError(f"there is no hash {shorten(name)}; use those of hashlib, or {', '.join(_XXHASHES)}")


def _hasher(name: Any) -> Callable[[], Any] | None:
    if name in _XXHASHES:
        return getattr(_package("xxhash", f"the hash {name!r}"), name, None)
    known = isinstance(name, str) and name in hashlib.algorithms_available and not name.startswith("shake_")
    return (lambda: hashlib.new(name, usedforsecurity=False)) if known else None


def hash_of(name: str, data: Any) -> str:
    """A hash of some bytes, as hexadecimal digits."""
    check_hash(name)
    hasher = _hasher(name)
    assert hasher is not None
    found = hasher()
    whole = memoryview(data)
    for at in range(0, len(whole), _PIECE_BYTES):
        found.update(whole[at : at + _PIECE_BYTES])
    return str(found.hexdigest())


def wrong_hash(hashes: Mapping[str, str], data: Any) -> str:
    """How some bytes differ from what hashes of them say; empty if they do not. One that is not known here is left out.

    Raises:
        ImportError: The package for all of the hashes is not installed.
        ValueError: None of the hashes is known.
    """
    unknown: list[Exception] = []
    for name, wanted in hashes.items():
        try:
            found = hash_of(name, data)
        except (ImportError, ValueError) as error:
            unknown.append(error)
            continue
        if found != wanted:
            return f"its {name} is {found}, and should be {wanted}"
    if unknown and len(unknown) == len(hashes):
        raise unknown[0]
    return ""
