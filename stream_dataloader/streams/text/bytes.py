"""The bytes of a text: of a file, of a compressed file, of a string.

Guarantee: bytes are read at the offset asked for, and a compressed file forward only. Fewer bytes are returned only at
the end, or before an error. The error is kept, so that what was read before it can be handed out first: `check` raises
it, with the file and the place.
"""

from __future__ import annotations

import gzip
import importlib
import os
import sys
import zlib
from collections.abc import Callable
from pathlib import PurePath
from typing import Any, Protocol

from stream_dataloader.streams._media.section import check_file, closed_on_error
from stream_dataloader.streams.cache.file_cache import FileCache, LocalFile, open_local

__all__ = ["CompressedBytes", "FileBytes", "StringBytes", "TextBytes", "is_compressed", "open_text"]

#: How much of a compressed file is decompressed at a time, at most.
_PIECE_BYTES = 1 << 16

#: How much zstd data its decoder gets at once. Repeated bytes shrink to a 32,000th, so this may become 16 MB.
_ZSTD_BYTES = 1 << 9

#: How much of a compressed file stays readable before the last offset asked for.
_KEPT_BYTES = 16


class TextBytes(Protocol):
    """Bytes that are read by offset."""

    @property
    def name(self) -> str:
        """What error messages call it."""

    @property
    def size(self) -> int | None:
        """How many bytes it has; None if that is not known before its end."""

    @property
    def key(self) -> tuple[Any, ...] | None:
        """Identifies the file as it is now; None if offsets in it cannot be used again."""

    @property
    def broken(self) -> bool:
        """Whether there was an error, which `check` raises."""

    def read_at(self, offset: int, count: int) -> bytes:
        """`count` bytes from `offset` on, fewer only at the end or before an error."""

    def check(self) -> None:
        """Raise the error that cut a `read_at` short, if there was one."""

    def close(self) -> None:
        """Close the file."""


def is_compressed(path: Any) -> bool:
    """Whether a file is compressed, going by its name."""
    return PurePath(os.fsdecode(path)).suffix.lower() in (".gz", ".zst")


def open_text(path: Any, cache: FileCache | None = None) -> TextBytes:
    """Open a file; what is in a `.gz` or `.zst` is read as if it were not compressed.

    Raises:
        OSError: It is missing, a directory or unreadable.
        ValueError: It is empty, or no regular file.
        ImportError: A `.zst` file cannot be read without another package.
    """
    name = os.fsdecode(path)
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise ValueError(f"{name} is a pipe or a device; give a regular file, which can be read again")
    local = open_local(path, cache)
    with closed_on_error(local):
        here = check_file(local.path)
        if not is_compressed(path):
            return FileBytes(here, name, local)
        return CompressedBytes(_open_gzip(here) if name.lower().endswith(".gz") else _open_zstd(here), name, local)


class StringBytes:
    """The bytes of a string; see `TextBytes`."""

    broken, key = False, None

    def __init__(self, data: bytes) -> None:
        self.name = "the string"
        self.size = len(data)
        self._data = data

    def read_at(self, offset: int, count: int) -> bytes:
        return self._data[offset : offset + count]

    def check(self) -> None:
        """Nothing goes wrong."""

    def close(self) -> None:
        """Nothing is open."""


class FileBytes:
    """A file, as long as it was when it was opened; see `TextBytes`."""

    def __init__(self, path: str, name: str, local: LocalFile) -> None:
        self.name = name
        self._error = ""
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115
        self._local = local
        status = os.fstat(self._file.fileno())
        self.size = status.st_size
        self.key = (path, status.st_size, status.st_mtime_ns)

    @property
    def broken(self) -> bool:
        return bool(self._error)

    def read_at(self, offset: int, count: int) -> bytes:
        count = min(count, self.size - offset)
        data = b""
        while len(data) < count and not self._error:
            place = offset + len(data)
            try:
                more = os.pread(self._file.fileno(), count - len(data), place)
            except OSError as error:
                self._error = f"{self.name} could not be read at byte {place}: {error.strerror}"
                break
            if not more:
                self._error = (
                    f"{self.name} ends at byte {place}, and had {self.size} bytes when it was opened; "
                    "it must not be written to while it is read"
                )
            data = data + more if data else more
        return data

    def check(self) -> None:
        if self._error:
            raise OSError(self._error)

    def close(self) -> None:
        self._file.close()
        self._local.close()


class CompressedBytes:
    """What is in a compressed file, read from its begin to its end; see `TextBytes`.

    Args:
        file: Its `read1(count)` returns at most that many bytes, none at the end.
        name: What error messages call it.
        local: Keeps it where it is.
    """

    size, key = None, None

    def __init__(self, file: Any, name: str, local: LocalFile) -> None:
        self.name = name
        self._file = file
        self._local = local
        self._data = bytearray()
        self._begin = 0  # offset of the first byte of `_data`
        self._ended = False
        self._error: Exception | None = None

    @property
    def broken(self) -> bool:
        return self._error is not None

    def read_at(self, offset: int, count: int) -> bytes:
        while self._begin + len(self._data) < offset + count and not self._ended:
            unused = min(offset - _KEPT_BYTES - self._begin, len(self._data))
            if unused > 0:
                del self._data[:unused]
                self._begin += unused
            self._read()
        assert offset >= self._begin, "a compressed file is read forward"
        first = offset - self._begin
        return bytes(self._data[first : first + count])

    def _read(self) -> None:
        try:
            data = self._file.read1(_PIECE_BYTES)
        except Exception as error:  # each module has its own
            if not isinstance(error, (OSError, EOFError, zlib.error, *_zstd_errors())):
                raise
            self._ended = True
            self._error = error
            return
        self._ended = not data
        self._data += data

    def check(self) -> None:
        if self._error is not None:
            place = self._begin + len(self._data)
            raise ValueError(
                f"{self.name} cannot be decompressed behind byte {place} of its text: {self._error}; "
                "it is damaged or was cut short: make or fetch it again"
            ) from self._error

    def close(self) -> None:
        self._file.close()
        self._local.close()


def _open_gzip(path: str) -> Any:
    return gzip.open(path, "rb")


def _open_zstd(path: str) -> Any:
    if sys.version_info >= (3, 14):
        return _Read1(importlib.import_module("compression.zstd").open(path, "rb"))
    try:
        import zstandard
    except ImportError as error:
        raise ImportError(
            f"{path} is read with the package zstandard: pip install 'stream-dataloader[zstd]', or use Python 3.14"
        ) from error
    return _Zstd(path, zstandard.ZstdDecompressor().decompressobj)


def _zstd_errors() -> tuple[type[Exception], ...]:
    modules = (sys.modules.get(name) for name in ("zstandard", "compression.zstd"))
    return tuple(module.ZstdError for module in modules if module is not None)


class _Read1:
    """Files whose `read` returns what there is before it raises."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.close = file.close
        self.read1 = getattr(file, "read1", file.read)


class _Zstd:
    """The frames of a zstd file, one after the other.

    zstandard's own reader takes the end of the file for the end of the text, also within a frame. Here that is an
    error, as with gzip.
    """

    def __init__(self, path: str, decoder: Callable[[], Any]) -> None:
        self._file = open(path, "rb")  # noqa: SIM115
        self._decoder = decoder
        self._frame: Any = None
        self._compressed = b""
        self._ready = memoryview(b"")  # it may be large: a view hands out a piece without moving the rest

    def read1(self, count: int) -> bytes | memoryview:
        while not self._ready:
            compressed = self._compressed or self._file.read(_ZSTD_BYTES)
            if not compressed:
                if self._frame is not None:
                    raise EOFError("the file ends before its zstd data does")
                return b""
            if self._frame is None:
                self._frame = self._decoder()
            self._ready = memoryview(b"")  # frees its memory before the next piece needs some
            self._ready = memoryview(self._frame.decompress(compressed))
            self._compressed = b""
            if self._frame.eof:
                self._compressed = self._frame.unused_data
                self._frame = None
        data, self._ready = self._ready[:count], self._ready[count:]
        return data

    def close(self) -> None:
        self._file.close()
