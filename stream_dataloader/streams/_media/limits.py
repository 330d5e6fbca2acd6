"""Limits on the decoded size of data, compared with the sizes in headers before memory is allocated."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stream_dataloader.errors import StoreError
from stream_dataloader.streams._media.section import whole_number

__all__ = ["DEFAULT", "Limits", "check_empty_rows", "may_unpack", "picture_size"]

#: Size that is always allowed, however few bytes it is unpacked from: zeros shrink to a thousandth without any attack.
_FREE_BYTES = 64 << 20

#: Largest number of rows without data. A header can claim any number for free, and the reader's epoch would never end.
_MOST_EMPTY_ROWS = 1 << 24

_SEGMENT, _FRAME = struct.Struct(">xBH").unpack_from, struct.Struct(">BHH")
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # frame headers of JPEG


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Largest sizes that data may have when they are decoded.

    Data beyond a limit raise an error that names the data, the size and the limit. The defaults are generous. Lower
    them for untrusted data, or raise one for data that need it: `VideoStream(limits=Limits(picture_pixels=10**9))`.

    Attributes:
        picture_pixels: Width times height of one picture, as its header says.
        unpacked_bytes: Unpacked bytes of one archive in a sample (`.npz`), one shard or one row group.
        unpacked_ratio: Unpacked bytes divided by stored bytes; 64 MiB are always allowed.
        sample_rate_ratio: Ratio of a file's own sample rate to the rate it is read at, or its inverse.
        chunk_bytes: Unpacked bytes of one chunk of HDF5 or Zarr.
        json_levels: Levels of nested JSON.

    Raises:
        TypeError, ValueError: A limit is not a whole number of at least 1.

    Example:
        >>> Limits(picture_pixels=1_000_000).check_picture(2000, 1000, "a.png")
        Traceback (most recent call last):
        stream_dataloader.errors.StoreError: a.png is 2000 x 1000, 2,000,000 pixels, and may have 1,000,000; \
raise Limits(picture_pixels=) if you trust it
    """

    picture_pixels: int = 1 << 27
    unpacked_bytes: int = 4 << 30
    unpacked_ratio: int = 200
    sample_rate_ratio: int = 256
    chunk_bytes: int = 512 << 20
    json_levels: int = 64

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            number = whole_number(field.name, getattr(self, field.name), "give a whole number from 1 on", 1)
            object.__setattr__(self, field.name, number)

    def check_picture(self, width: int, height: int, name: str) -> None:
        """Raise a StoreError if a picture has too many pixels."""
        if width * height > self.picture_pixels:
            what = f"{name} is {width} x {height}, {width * height:,} pixels"
            raise _exceeded(f"{what}, and may have {self.picture_pixels:,}", "picture_pixels")

    def check_encoded(self, data: bytes, name: str) -> None:
        """Raise a StoreError if the header of an encoded picture claims too many pixels."""
        if (size := picture_size(data)) is not None and size[0] * size[1] > self.picture_pixels:
            self.check_picture(*size, name)

    def check_unpacked(self, packed: int, unpacked: int, name: str) -> None:
        """Raise a StoreError if data unpack to too many bytes."""
        if unpacked > self.unpacked_bytes:
            what = f"{name} unpacks to {unpacked:,} bytes, and may to {self.unpacked_bytes:,}"
            raise _exceeded(what, "unpacked_bytes")
        if unpacked > _FREE_BYTES and unpacked > packed * self.unpacked_ratio:
            what = (
                f"{name} unpacks from {packed:,} bytes to {unpacked:,}, more than {self.unpacked_ratio} times as many"
            )
            raise _exceeded(what, "unpacked_ratio")

    def check_rates(self, own: int, wanted: int, name: str) -> None:
        """Raise a StoreError if two sample rates, in samples per second, are too far apart."""
        if max(own, wanted) > min(own, wanted) * self.sample_rate_ratio:
            what = f"{name} has {own:,} samples a second, and is read at {wanted:,}"
            raise _exceeded(f"{what}, more than {self.sample_rate_ratio} times away", "sample_rate_ratio")

    def check_chunk(self, size: int, name: str) -> None:
        """Raise a StoreError if a chunk unpacks to too many bytes."""
        if size > self.chunk_bytes:
            raise _exceeded(f"{name} has chunks of {size:,} bytes, and may of {self.chunk_bytes:,}", "chunk_bytes")

    def json(self, data: Any) -> Any:
        """Return what JSON holds; a ValueError if it is nested too deeply."""
        text = bytes(data)
        try:
            found = json.loads(text)
        except RecursionError:
            raise ValueError(f"it is nested more than {self.json_levels} levels deep") from None
        if text.count(b"[") + text.count(b"{") > self.json_levels:
            level, inner = [found], 0
            while level := [
                child
                for one in level
                if (kind := type(one)) is dict or kind is list
                for child in (one.values() if kind is dict else one)
            ]:
                inner += 1
                if inner > self.json_levels:
                    raise ValueError(f"it is nested more than {self.json_levels} levels deep")
        return found


def may_unpack(limits: Limits, packed: int, unpacked: float) -> bool:
    """Return True if `packed` bytes may unpack to `unpacked`; see `Limits.check_unpacked`."""
    return unpacked <= min(limits.unpacked_bytes, max(_FREE_BYTES, packed * limits.unpacked_ratio))


def check_empty_rows(rows: int, row_bytes: int, name: str) -> None:
    """Raise a StoreError if more rows without data are claimed than could be of use."""
    if not row_bytes and rows > _MOST_EMPTY_ROWS:
        raise StoreError(f"{name} has {rows:,} rows of 0 bytes, and may have {_MOST_EMPTY_ROWS:,} of them")


def _exceeded(what: str, name: str) -> StoreError:
    return StoreError(f"{what}; raise Limits({name}=) if you trust it")


DEFAULT = Limits()


def picture_size(data: bytes) -> tuple[int, int] | None:
    """Width and height in pixels by the header of an encoded picture; None if it is of no known format."""
    if data.startswith(b"\xff\xd8\xff"):
        return _size_of_jpeg(data)
    if data.startswith(b"\x89PNG"):
        return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    found = next((size_of for head, size_of in _OTHERS if data.startswith(head)), None)
    try:
        return None if found is None else found(data)
    except (struct.error, ValueError, LookupError):  # cut off: for the decoder to refuse
        return None


def _size_of_jpeg(data: bytes) -> tuple[int, int] | None:
    """Read the size of a JPEG from its frame header, one of its segments (ITU-T T.81, annex B)."""
    place, end, segment = 2, len(data) - 9, _SEGMENT
    while place < end:
        kind, length = segment(data, place)
        if kind in _FRAMES:
            _, height, width = _FRAME.unpack_from(data, place + 4)
            return width, height
        # FF before a marker is padding, and some markers have no length.
        place += 1 if kind == 0xFF else 2 if kind == 0x01 or 0xD0 <= kind <= 0xD8 else 2 + length
    return None


def _size_of_webp(data: bytes) -> tuple[int, int] | None:
    kind = data[12:16]
    if data[8:12] != b"WEBP":
        return None
    if kind == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    width, height = struct.unpack_from("<2H", data, 26)
    return width & 0x3FFF, height & 0x3FFF


def _size_of_bmp(data: bytes) -> tuple[int, int]:
    if int.from_bytes(data[14:18], "little") == 12:
        width, height = struct.unpack_from("<2H", data, 18)
    else:
        width, height = struct.unpack_from("<2i", data, 18)
    return abs(width), abs(height)


def _size_of_pnm(data: bytes) -> tuple[int, int] | None:
    """Read the size of a PNM image from words of text among comments; in PAM these words have names."""
    lines = [line.partition(b"#")[0] for line in data[2:4096].splitlines()]
    words = b" ".join(lines).split()
    if data.startswith(b"P7"):
        named = dict(zip(words[::2], words[1::2], strict=False))
        return int(named.get(b"WIDTH", 0)), int(named.get(b"HEIGHT", 0))
    return int(words[0]), int(words[1])


def _size_of_tiff(data: bytes) -> tuple[int, int]:
    """Read the size of a TIFF 6.0 or BigTIFF image from tags 256 and 257 of the first directory."""
    order = "<" if data[:2] == b"II" else ">"
    big = struct.unpack_from(f"{order}H", data, 2)[0] == 43
    (place,) = struct.unpack_from(f"{order}Q" if big else f"{order}I", data, 8 if big else 4)
    (count,) = struct.unpack_from(f"{order}Q" if big else f"{order}H", data, place)
    place, step = (place + 8, 20) if big else (place + 2, 12)
    found = {256: 0, 257: 0}
    for entry in range(min(count, 1 << 16)):
        tag, kind = struct.unpack_from(f"{order}2H", data, place + entry * step)
        if tag in found:
            value = {3: "H", 4: "I", 16: "Q"}.get(kind, "I")
            (found[tag],) = struct.unpack_from(order + value, data, place + entry * step + (12 if big else 8))
    return found[256], found[257]


def _size_of_boxes(data: bytes) -> tuple[int, int] | None:
    """Read the size from the largest `ispe` box of AVIF and HEIF (ISO/IEC 23008-12), or `ihdr` of JPEG 2000."""
    sizes, place = [(0, 0)], data.find(b"ispe")
    while place >= 0:
        sizes.append(struct.unpack_from(">2I", data, place + 8))
        place = data.find(b"ispe", place + 4)
    if (place := data.find(b"ihdr")) >= 0:
        height, width = struct.unpack_from(">2I", data, place + 4)
        sizes.append((width, height))
    return max(sizes, key=lambda size: size[0] * size[1])


def _size_of_codestream(data: bytes) -> tuple[int, int]:
    """Read the size of a bare JPEG 2000 code stream from the grid's end and start (ISO/IEC 15444-1, A.5.1)."""
    right, bottom, left, top = struct.unpack_from(">4I", data, 8)
    return right - left, bottom - top


def _size_of_radiance(data: bytes) -> tuple[int, int] | None:
    """Read the size of a Radiance image from a line such as `-Y 480 +X 640` after an empty line."""
    words = data.partition(b"\n\n")[2][:100].split()
    found = {words[at][1:]: int(words[at + 1]) for at in (0, 2)}
    return found[b"X"], found[b"Y"]


_OTHERS: list[tuple[bytes, Callable[[bytes], tuple[int, int] | None]]] = [
    (b"RIFF", _size_of_webp),
    (b"BM", _size_of_bmp),
    (b"GIF8", lambda data: struct.unpack_from("<2H", data, 6)),
    (b"II*\0", _size_of_tiff),
    (b"MM\0*", _size_of_tiff),
    (b"II+\0", _size_of_tiff),
    (b"MM\0+", _size_of_tiff),
    (b"\x59\xa6\x6a\x95", lambda data: struct.unpack_from(">2I", data, 4)),  # Sun raster
    (b"\xff\x4f\xff\x51", _size_of_codestream),
    (b"\0\0\0", _size_of_boxes),
    (b"#?RADIANCE", _size_of_radiance),
    (b"#?RGBE", _size_of_radiance),
    *((b"P%d" % kind, _size_of_pnm) for kind in range(1, 8)),
]
