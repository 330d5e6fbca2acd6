"""End of a media file according to its headers, to detect files that were cut off, and files joined by `cat`.

FFmpeg reads most cut files as if they simply ended, and of many formats only the first of joined files. Known are::

    a size of the whole          AVI, WAV, RF64, W64, AIFF, AU, Matroska, WebM, ASF
    the last chunk               CAF, PNG and APNG; GIF's trailer; the end of the last JPEG of Motion JPEG
    the last element             Matroska and WebM of unknown size, as of a live recording
    the place of the footer      MXF
    sizes of all frames          TTA, Y4M
    the box or tag at the end    MP4 and its fragments, FLV: unless it is cut just between two
    the packet at the end        MPEG-TS: the same
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import BinaryIO

from stream_dataloader.streams._media.ends import (
    EBML,
    MOST_BOXES,
    TAGS_BYTES,
    asf_end,
    caf_end,
    cut_element,
    flv_end,
    is_cut_jpeg,
    matroska_end,
    mxf_footer,
    part_of_a_frame,
    png_end,
    tta_end,
)
from stream_dataloader.streams._media.opencv import JPEG_START

__all__ = ["missing", "riff_end", "runs_over", "sample_bytes", "second_file", "surplus"]

_OPEN_RIFF_BYTES = 0x7FFF0000  # programs that write to a pipe put this size, or a larger one
_ASF = bytes.fromhex("3026b2758e66cf11a6d900aa0062ce6c")
_PNG = b"\x89PNG\r\n\x1a\n"
_Y4M = b"YUV4MPEG2 "
_W64 = b"riff.\x91\xcf\x11\xa5\xd6(\xdb\x04\xc1\x00\x00"
_WRAPS_BYTES = 1 << 32
_MP4_BOXES = (
    *(b"ftyp", b"styp", b"moov", b"moof", b"mdat", b"sidx", b"ssix", b"mfra", b"free", b"skip", b"wide", b"pnot"),
    *(b"uuid", b"meta", b"udta", b"emsg", b"prft"),
)


def missing(path: str) -> str | None:
    """Return the evidence that a file was cut off, or None."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        head = file.read(4096)
        end = _own_end(file, head, size)
        if end is not None and end > size + 1:  # a byte of padding may be left out
            return f"it has {size} bytes, and its header declares {end}"
        if head[:4] == b"GIF8" and not _ends_with_trailer(file, size):
            return f"its {size} bytes end before the trailer of a GIF"
        if head[4:8] in _MP4_BOXES:
            return _missing_of_mp4(file, size)
        if head.startswith(JPEG_START) and is_cut_jpeg(file, size):
            return f"its {size} bytes end within a JPEG"
        if (footer := mxf_footer(head)) >= size:
            return f"it has {size} bytes, and its footer begins at byte {footer}"
        if end is None and head.startswith(EBML.to_bytes(4, "big")) and (last := cut_element(file, size)) is not None:
            return f"its {size} bytes end within an element of Matroska, which begins at byte {last}"
        if head.startswith(_Y4M) and (rest := part_of_a_frame(file, head, size)):
            return f"its {size} bytes end within a frame of Y4M, {rest} bytes after the last whole one"
        if _is_cut_transport(file, head, size):
            return f"its {size} bytes end within a packet of a transport stream"
    return None


def runs_over(path: str) -> bool:
    """Return True for a WAV file whose 32-bit size overflowed: the file is 4 or 8 GiB longer than its header says."""
    size = os.path.getsize(path)
    if size <= _WRAPS_BYTES:
        return False
    with open(path, "rb") as file:
        head = file.read(12)
    declared = int.from_bytes(head[4:8], "little")
    return head[:4] == b"RIFF" and head[8:] == b"WAVE" and (size - 8 - declared) % _WRAPS_BYTES <= TAGS_BYTES


def surplus(path: str) -> str | None:
    """Return the evidence that sound continues after the end that the header declares, or None.

    FFmpeg stops where most headers say that the sound ends.
    """
    if runs_over(path):  # `open_container` makes FFmpeg read such a file to its end
        return None
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        head = file.read(64)
        end = None if head[8:12] == b"AVI " else _sound_end(file, head, size)
    if end is None or size <= end + TAGS_BYTES:
        return None
    return f"it has {size} bytes, and its header declares {end}"


def sample_bytes(path: str) -> int | None:
    """Return the number of bytes of samples in the data chunk of a W64 or CAF file, or None for other files.

    It is also None if the chunk does not say. FFmpeg itself takes everything that follows for samples, even chunks of
    names and markers after a data chunk of known size.
    """
    with open(path, "rb") as file:
        head = file.read(16)
        if head != _W64 and head[:4] != b"caff":
            return None
        position, own, name = (40, 24, 16) if head == _W64 else (8, 0, 4)
        for _ in range(MOST_BOXES):
            file.seek(position)
            chunk = file.read(name + 8)
            if len(chunk) < name + 8:
                break
            size = int.from_bytes(chunk[name:], "little" if own else "big", signed=True)
            if chunk[:4] == b"data":
                return size - (own or 4) if size > 0 else None  # CAF's data begin with a count of edits
            if size < own:
                break
            position += (size + 7) // 8 * 8 if own else name + 8 + size
    return None


def second_file(path: str) -> int | None:
    """Return the place where another file was appended that FFmpeg does not read, or None."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        head = file.read(4096)
        if head[4:8] in _MP4_BOXES:
            return _second_movie(file, size)
        if head[8:12] == b"AVI " or matroska_end(head) is not None:  # FFmpeg reads on
            return None
        if (end := _own_end(file, head, size)) is None or end >= size:
            return None
        file.seek(end)
        behind = file.read(5)
    padding = next((i for i in range(2) if behind[i : i + 4] == head[:4]), None)
    return None if padding is None else end + padding


def _own_end(file: BinaryIO, head: bytes, size: int) -> int | None:
    """Return the end of a file, without what was appended to it; None if it is not known."""
    if head[:16] == _ASF:
        return asf_end(head)
    if head[:3] == b"FLV":
        return flv_end(file, int.from_bytes(head[5:9], "big"), size)
    if head[:8] == _PNG:
        return png_end(file, size)
    if head[:4] == b"TTA1":
        return tta_end(file, head)
    return _sound_end(file, head, size) or matroska_end(head)


def _sound_end(file: BinaryIO, head: bytes, size: int) -> int | None:
    """Return the end of a CAF, AIFF, AU or RIFF file, or None if its header does not say."""
    if head[:4] == b"caff":
        return caf_end(file, size)
    if head[:4] == b"FORM" and head[8:12] in (b"AIFF", b"AIFC"):
        length = int.from_bytes(head[4:8], "big")
        return length + 8 if 0 < length < _OPEN_RIFF_BYTES else None
    if head[:4] == b".snd":
        begin, length = int.from_bytes(head[4:8], "big"), int.from_bytes(head[8:12], "big")
        return begin + length if 0 < length < _OPEN_RIFF_BYTES else None
    return riff_end(head)


def riff_end(head: bytes) -> int | None:
    """Return the end of a WAV, RF64, W64 or AVI file (of its first part, beyond 1 GiB), or None if it does not say."""
    if head[:4] == b"RF64" and head[8:16] == b"WAVEds64":  # EBU Tech 3306
        return int.from_bytes(head[20:28], "little") + 8
    if head[:16] == _W64:
        return int.from_bytes(head[16:24], "little")
    size = int.from_bytes(head[4:8], "little") if head[:4] == b"RIFF" and head[8:12] in (b"AVI ", b"WAVE") else 0
    return size + 8 if 0 < size < _OPEN_RIFF_BYTES else None


def _ends_with_trailer(file: BinaryIO, size: int) -> bool:
    file.seek(max(0, size - TAGS_BYTES))
    return file.read().rstrip(b"\0").endswith(b";")


def _boxes(file: BinaryIO, size: int) -> Iterator[tuple[int, bytes, int]]:
    """Yield position, header and length of the boxes of an MP4 file (ISO/IEC 14496-12)."""
    position = 0
    for _ in range(MOST_BOXES):
        if position >= size:
            return
        file.seek(position)
        box = file.read(16)
        length = int.from_bytes(box[:4], "big")
        if length == 1 and len(box) == 16:
            length = int.from_bytes(box[8:], "big")
        yield position, box, length
        position += length


def _second_movie(file: BinaryIO, size: int) -> int | None:
    """Return the place where a second file was appended to an MP4 file, or None."""
    begin, movies = 0, 0
    for position, box, length in _boxes(file, size):
        kind = box[4:8]
        if length < 8 or kind not in _MP4_BOXES or kind == b"moof":
            return None
        begin = position if kind == b"ftyp" else begin
        movies += kind == b"moov"
        if movies > 1:
            return begin
    return None


def _missing_of_mp4(file: BinaryIO, size: int) -> str | None:
    """Return the evidence that an MP4 file was cut off: its boxes, two for each fragment."""
    last = b""
    for position, box, length in _boxes(file, size):
        last = box[4:8]
        if length == 0 and last == b"mdat":  # to the end
            return None
        if len(box) < 8 and any(box):
            return f"its {size} bytes end within a box's header"
        if length < 8 or last not in _MP4_BOXES:  # other data were appended
            return None
        if position + length > size:
            name, end = last.decode("latin-1"), position + length
            return f"it has {size} bytes, and the box {name!r} at byte {position} lasts to byte {end}"
    return f"its {size} bytes end before the data of its last fragment" if last == b"moof" else None


def _is_cut_transport(file: BinaryIO, head: bytes, size: int) -> bool:
    for length, offset in ((188, 0), (192, 4), (204, 0)):
        if len(head) > offset + 4 * length and all(head[offset + i * length] == 0x47 for i in range(5)):
            part = size % length
            file.seek(size - part - 2 * length)
            tail = file.read()
            # Otherwise the file was damaged earlier, or other data were appended.
            in_step = tail[offset] == 0x47 and tail[offset + length] == 0x47
            return part > 0 and in_step and (part <= offset or tail[offset + 2 * length] == 0x47)
    return False
