"""End of a media file according to its headers, to detect files that were cut off, and files joined by `cat`.

FFmpeg reads most cut files as if they simply ended, and of many formats only the first of joined files. Known are::

    a size of the whole          AVI, WAV, RF64, W64, AIFF, AU, Matroska, WebM, ASF
    the last chunk               CAF, PNG and APNG; GIF's trailer
    the box or tag at the end    MP4 and its fragments, FLV: unless it is cut just between two
    the packet at the end        MPEG-TS: the same
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import BinaryIO

__all__ = ["missing", "riff_end", "runs_over", "sample_bytes", "second_file", "surplus"]

_SEGMENT, _EBML = 0x18538067, 0x1A45DFA3  # Matroska, RFC 9559
_OPEN_RIFF_BYTES = 0x7FFF0000  # programs that write to a pipe put this size, or a larger one
_ASF = bytes.fromhex("3026b2758e66cf11a6d900aa0062ce6c")
_ASF_FILE = bytes.fromhex("a1dcab8c47a9cf118ee400c00c205365")  # its File Properties Object
_FLV_TAGS = (8, 9, 18)
_PNG = b"\x89PNG\r\n\x1a\n"
_W64 = b"riff.\x91\xcf\x11\xa5\xd6(\xdb\x04\xc1\x00\x00"
_WRAPS_BYTES = 1 << 32
_TAGS_BYTES = 1 << 16  # size of tags that programs append without declaring them
_MOST_BOXES = 1_000_000  # a walk over boxes stops here, because it must be cheap
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
    return head[:4] == b"RIFF" and head[8:] == b"WAVE" and (size - 8 - declared) % _WRAPS_BYTES <= _TAGS_BYTES


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
    if end is None or size <= end + _TAGS_BYTES:
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
        for _ in range(_MOST_BOXES):
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
        if head[8:12] == b"AVI " or _matroska_end(head) is not None:  # FFmpeg reads on
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
        return _asf_end(head)
    if head[:3] == b"FLV":
        return _flv_end(file, int.from_bytes(head[5:9], "big"), size)
    if head[:8] == _PNG:
        return _png_end(file, size)
    return _sound_end(file, head, size) or _matroska_end(head)


def _sound_end(file: BinaryIO, head: bytes, size: int) -> int | None:
    """Return the end of a CAF, AIFF, AU or RIFF file, or None if its header does not say."""
    if head[:4] == b"caff":
        return _caf_end(file, size)
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


def _caf_end(file: BinaryIO, size: int) -> int:
    """Return the end of the chunks of a CAF file (Apple Core Audio Format)."""
    position = 8
    for _ in range(_MOST_BOXES):
        file.seek(position)
        chunk = file.read(12)
        if len(chunk) < 12 or chunk[:4] == b"caff" or not (position == 8 or chunk[:4].isalnum()):  # appended data
            return position
        length = int.from_bytes(chunk[4:], "big", signed=True)
        if length < 0:  # the data last to the end
            return size
        position += 12 + length
        if position > size:
            break
    return position


def _asf_end(head: bytes) -> int | None:
    """Return the end of an ASF file (WMV, WMA), or None if it was written as a live stream."""
    begin = head.find(_ASF_FILE)
    if begin < 0 or len(head) < begin + 92 or head[begin + 88] & 1:
        return None
    return int.from_bytes(head[begin + 40 : begin + 48], "little") or None


def _flv_end(file: BinaryIO, position: int, size: int) -> int | None:
    """Return the end of the tags of an FLV file (Adobe Flash Video File Format, 10.1), from the first one on."""
    position += 4  # the size of the tag before is behind each tag, and in front of the first one
    for _ in range(_MOST_BOXES):
        file.seek(position)
        tag = file.read(4)
        if len(tag) < 4 or tag[0] & 31 not in _FLV_TAGS:
            return position - 4 if position > size else position  # some programs leave out the last size
        position += 15 + int.from_bytes(tag[1:], "big")
    return None


def _png_end(file: BinaryIO, size: int) -> int | None:
    """Return the end of the chunks of a PNG or APNG file; one that is cut off has no IEND."""
    position = len(_PNG)
    for _ in range(_MOST_BOXES):
        file.seek(position)
        chunk = file.read(8)
        position += 12 + int.from_bytes(chunk[:4], "big")
        if position > size or chunk[4:] == b"IEND":
            return position
    return None


def _ends_with_trailer(file: BinaryIO, size: int) -> bool:
    file.seek(max(0, size - _TAGS_BYTES))
    return file.read().rstrip(b"\0").endswith(b";")


def _matroska_end(head: bytes) -> int | None:
    """Return the end of a Matroska file, which is an EBML header and one segment with everything else."""
    position = 0
    for expected in (_EBML, _SEGMENT):
        if len(head) < position + 12 or int.from_bytes(head[position : position + 4], "big") != expected:
            return None
        first = head[position + 4]
        length = 9 - first.bit_length()  # the leading zeros of the first byte count the size's bytes (RFC 8794, 4.1)
        if length > 8:
            return None
        value = int.from_bytes(head[position + 4 : position + 4 + length], "big") & ((1 << 7 * length) - 1)
        position += 4 + length
        if value == (1 << 7 * length) - 1:  # all ones: the size is unknown (RFC 8794, 6.2)
            return None
        position += value
    return position


def _boxes(file: BinaryIO, size: int) -> Iterator[tuple[int, bytes, int]]:
    """Yield position, header and length of the boxes of an MP4 file (ISO/IEC 14496-12)."""
    position = 0
    for _ in range(_MOST_BOXES):
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
