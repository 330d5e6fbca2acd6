"""Bytes of a text. Compressed text and text that is not UTF-8 can only be read forward.

Guarantee: `read_at` returns fewer bytes than requested only at the end, or before an error, which `check` raises.
"""

from __future__ import annotations

import codecs
import functools
import importlib
import os
import sys
import zlib
from collections.abc import Callable, Generator
from pathlib import PurePath
from typing import Any

from stream_dataloader.streams._media.section import check_file, closed_on_error
from stream_dataloader.streams.cache import FileCache, LocalFile, open_local

__all__ = ["TextBytes", "encoding_name", "in_utf8", "invalid", "is_compressed", "open_text"]

#: Largest number of bytes that is decoded at a time.
_PIECE_BYTES = 1 << 16

#: Compressed bytes that a decoder gets at a time. gzip shrinks repeated bytes to a 1,000th, zstd to a 32,000th.
_COMPRESSED_BYTES = {".gz": 1 << 13, ".zst": 1 << 9}

_ZSTD = b"\x28\xb5\x2f\xfd"
_HEAD_BYTES = 18  # the longest header of a zstd frame
_MOST_WINDOW_BYTES = 1 << 27  # default limit of zstd's decoders

#: Bytes before the last requested offset that stay readable in text that is read forward.
_KEPT_BYTES = 16

#: Byte order marks. Without one, the byte order is the machine's.
_MARKS = {
    "utf-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
    "utf-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
}


class TextBytes:
    """Bytes that are read by offset; this class reads those of a string."""

    name, place = "the string", "byte {}"  # names of the text and of an offset in errors
    size: int | None  # None: not known before the end
    error: Exception | None = None  # the error that cut a `read_at` short

    def __init__(self, data: bytes) -> None:
        self.size, self._string = len(data), data

    def read_at(self, offset: int, count: int) -> bytes:
        """Return `count` bytes from `offset` on, fewer only at the end or before an error."""
        return self._string[offset : offset + count]

    def check(self) -> None:
        """Raise the error that cut a `read_at` short, if any."""
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Close the file."""


class FileBytes(TextBytes):
    """Bytes of a file, up to the length that it had when it was opened."""

    def __init__(self, path: str, name: str, local: LocalFile) -> None:
        self.name = name
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115
        self._local = local
        self.size = self._size = os.fstat(self._file.fileno()).st_size

    def read_at(self, offset: int, count: int) -> bytes:
        stop, data = min(offset + count, self._size), b""
        while (place := offset + len(data)) < stop and self.error is None:
            try:
                data += (more := os.pread(self._file.fileno(), stop - place, place))
            except OSError as error:
                self.error = OSError(f"{self.name} could not be read at byte {place}: {error.strerror}")
            else:
                if not more:
                    what = f"{self.name} ends at byte {place}, and had {self._size} bytes when it was opened"
                    self.error = OSError(f"{what}; it must not be written to while it is read")
        return data

    def close(self) -> None:
        self._file.close()
        self._local.close()


class ForwardBytes(TextBytes):
    """Bytes of the pieces that a generator yields, which reads from `source`."""

    def __init__(self, name: str, place: str, pieces: Generator[bytes, None, None], source: Any) -> None:
        self.name, self.place, self.size = name, place, None
        self._pieces, self._source = pieces, source
        self._data = bytearray()
        self._begin = 0  # offset of the first byte of `_data`
        self._ended = False

    def read_at(self, offset: int, count: int) -> bytes:
        while self._begin + len(self._data) < offset + count and not self._ended:
            unused = min(offset - _KEPT_BYTES - self._begin, len(self._data))
            if unused > 0:
                del self._data[:unused]
                self._begin += unused
            try:
                piece = next(self._pieces, None)
            except (OSError, ValueError) as error:
                self.error, piece = error, None
            self._ended = piece is None
            self._data += piece or b""
        assert offset >= self._begin, "it is read forward"
        return bytes(self._data[offset - self._begin : offset - self._begin + count])

    def close(self) -> None:
        self._pieces.close()
        self._source.close()


def is_compressed(path: Any) -> bool:
    """Return True if the name of a file says that it is compressed."""
    return _suffix(path) in _COMPRESSED_BYTES


def _suffix(path: Any) -> str:
    return PurePath(os.fsdecode(path)).suffix.lower()


def open_text(path: Any, cache: FileCache | None = None) -> TextBytes:
    """Open a file; a `.gz` or `.zst` file is decompressed."""
    name = os.fsdecode(path)
    local = open_local(path, cache)
    with closed_on_error(local):
        here = check_file(local.path)
        if not is_compressed(path):
            return FileBytes(here, name, local)
        return ForwardBytes(name, "byte {} of its text", _decompressed(here, name, _decoder(name)), local)


def _decoder(name: str) -> Callable[[], Any]:
    """Return a function that makes a decoder for one frame of a file."""
    if _suffix(name) == ".gz":
        return functools.partial(zlib.decompressobj, 16 + zlib.MAX_WBITS)
    if sys.version_info >= (3, 14):
        return importlib.import_module("compression.zstd").ZstdDecompressor  # type: ignore[no-any-return]
    try:
        return importlib.import_module("zstandard").ZstdDecompressor().decompressobj  # type: ignore[no-any-return]
    except ImportError as error:
        raise ImportError(
            f"{name} is read with the package zstandard: pip install 'stream-dataloader[zstd]', or use Python 3.14"
        ) from error


def _decompressed(path: str, name: str, decoder: Callable[[], Any]) -> Generator[bytes, None, None]:
    """Yield the decompressed content of a file's frames. A file that ends within a frame is an error."""
    frame, compressed, head, place, count = None, b"", b"", 0, _COMPRESSED_BYTES[_suffix(name)]
    with open(path, "rb") as file:
        try:
            while compressed := compressed or file.read(count):
                if frame is None and not (compressed := compressed.lstrip(b"\0")):  # padding between frames
                    continue
                head = compressed[:_HEAD_BYTES] if frame is None else head + compressed[: _HEAD_BYTES - len(head)]
                frame = frame or decoder()
                piece = frame.decompress(compressed)
                place += len(piece)
                yield piece
                compressed, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
            if frame is not None:
                raise EOFError("the file ends before its compressed data does")
        except Exception as error:  # zlib, zstandard and zstd of the standard library each raise their own
            what = f"{name} cannot be decompressed behind byte {place} of its text: {error}"
            raise ValueError(f"{what}; {_remedy(head)}") from error


def _remedy(head: bytes) -> str:
    """Return a remedy for a frame that cannot be decompressed, given its first bytes.

    Source: RFC 8878, section 3.1.1.1.
    """
    head = head.ljust(_HEAD_BYTES, b"\0")
    if head.startswith(_ZSTD):
        described = head[4]
        is_single, at = bool(described & 32), 5
        id_bytes = (0, 1, 2, 4)[described & 3]
        if not is_single:
            log, eighths, at = 10 + (head[5] >> 3), head[5] & 7, 6
            window = (1 << log) + (1 << log) // 8 * eighths
            if window > _MOST_WINDOW_BYTES:
                unpack = f"unpack it once, with zstd -d --long={log + bool(eighths)}"
                return f"its window is {window:,} bytes, and {_MOST_WINDOW_BYTES:,} are read here: {unpack}"
        if number := int.from_bytes(head[at : at + id_bytes], "little"):
            return f"it was packed with dictionary {number}, which is not in the file: unpack it once, with zstd -d -D"
    return "it is damaged or was cut short: fetch it again"


def encoding_name(encoding: str) -> str:
    """Return the canonical name of an encoding."""
    try:
        b"a".decode(encoding, "replace")
        name = codecs.lookup(encoding).name
        codecs.getincrementaldecoder(encoding)
    except (LookupError, UnicodeError, TypeError) as error:
        raise ValueError(f"encoding is {encoding!r}, which is none of text to Python") from error
    return "utf-8" if name == "utf-8-sig" else name


def in_utf8(file: TextBytes, encoding: str, errors: str) -> TextBytes:
    """Return a text as UTF-8; it is decoded and encoded again if necessary."""
    if encoding == "utf-8":
        return file
    if encoding in ("utf-16", "utf-32") and not file.read_at(0, 4).startswith(_MARKS[encoding]):
        encoding += f"-{sys.byteorder[0]}e"
    return ForwardBytes(file.name, "byte {} of it in utf-8", _transcoded(file, encoding, errors), file)


def _transcoded(file: TextBytes, encoding: str, errors: str) -> Generator[bytes, None, None]:
    decoder, offset, data = codecs.getincrementaldecoder(encoding)(errors), 0, b"-"
    while data:
        data = file.read_at(offset, _PIECE_BYTES)
        if not data:
            file.check()
        before = decoder.getstate()
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            waiting = len(before[0])  # first bytes of a character, from the piece before
            decoder.setstate(before)
            yield decoder.decode(data[: max(error.start - waiting, 0)]).encode("utf-8", "surrogatepass")
            raise invalid(file, encoding, error, offset - waiting) from None
        yield text.encode("utf-8", "surrogatepass")
        offset += len(data)


def invalid(file: TextBytes, encoding: str, error: UnicodeDecodeError, begin: int) -> ValueError:
    """Return the error for invalid bytes in data that begin at an offset."""
    found = " ".join(f"{byte:02x}" for byte in error.object[error.start : error.end][:4])
    what = f"{file.name} is not valid {encoding} at {file.place.format(begin + error.start)} ({found}): {error.reason}"
    head = file.read_at(0, 8) if isinstance(file, FileBytes) else b""
    remedy = next((remedy for magic, remedy in _NOT_TEXT if head.startswith(magic)), None)
    return ValueError(f"{what}; {remedy or _REPAIR}")


_REPAIR = "repair it, give the encoding it has, or have errors='replace'"
_UNPACK = "it is compressed by {}: unpack it once"
_NOT_TEXT = (
    (b"\x1f\x8b", "it is compressed by gzip: give it the suffix .gz"),
    (_ZSTD, "it is compressed by zstd: give it the suffix .zst"),
    (b"BZh", _UNPACK.format("bzip2")),
    (b"\xfd7zXZ\0", _UNPACK.format("xz")),
    (b"PK\3\4", _UNPACK.format("zip")),
    (codecs.BOM_UTF32_LE, "its first bytes mark utf-32: give encoding='utf-32'"),
    (codecs.BOM_UTF32_BE, "its first bytes mark utf-32: give encoding='utf-32'"),
    (codecs.BOM_UTF16_LE, "its first bytes mark utf-16: give encoding='utf-16'"),
    (codecs.BOM_UTF16_BE, "its first bytes mark utf-16: give encoding='utf-16'"),
)
