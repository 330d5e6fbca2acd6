"""Ends of the data in media files according to their headers, format by format; see `extent`."""

from __future__ import annotations

import mmap
import re
from typing import BinaryIO

from stream_dataloader.streams._media.opencv import JPEG_START, JPEG_TAIL, jpeg_end

__all__ = [
    "EBML",
    "MOST_BOXES",
    "TAGS_BYTES",
    "asf_end",
    "caf_end",
    "cut_element",
    "flv_end",
    "is_cut_jpeg",
    "matroska_end",
    "mxf_footer",
    "part_of_a_frame",
    "png_end",
    "tta_end",
]

_SEGMENT, EBML = 0x18538067, 0x1A45DFA3  # Matroska, RFC 9559
_ASF_FILE = bytes.fromhex("a1dcab8c47a9cf118ee400c00c205365")  # its File Properties Object
_FLV_TAGS = (8, 9, 18)
_MXF_HEADER = bytes.fromhex("060e2b34020501010d0102010102")  # of a header partition, all kinds
MOST_BOXES = 1_000_000  # a walk over boxes stops here, because it must be cheap
TAGS_BYTES = 1 << 16  # size of tags that programs append without declaring them

_PNG_SIGNATURE_BYTES = 8


def caf_end(file: BinaryIO, size: int) -> int:
    """Return the end of the chunks of a CAF file (Apple Core Audio Format)."""
    position = 8
    for _ in range(MOST_BOXES):
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


def asf_end(head: bytes) -> int | None:
    """Return the end of an ASF file (WMV, WMA), or None if it was written as a live stream."""
    begin = head.find(_ASF_FILE)
    if begin < 0 or len(head) < begin + 92 or head[begin + 88] & 1:
        return None
    return int.from_bytes(head[begin + 40 : begin + 48], "little") or None


def flv_end(file: BinaryIO, position: int, size: int) -> int | None:
    """Return the end of the tags of an FLV file (Adobe Flash Video File Format, 10.1), from the first one on."""
    position += 4  # the size of the tag before is behind each tag, and in front of the first one
    for _ in range(MOST_BOXES):
        file.seek(position)
        tag = file.read(4)
        if len(tag) < 4 or tag[0] & 31 not in _FLV_TAGS:
            return position - 4 if position > size else position  # some programs leave out the last size
        position += 15 + int.from_bytes(tag[1:], "big")
    return None


def png_end(file: BinaryIO, size: int) -> int | None:
    """Return the end of the chunks of a PNG or APNG file; one that is cut off has no IEND."""
    position = _PNG_SIGNATURE_BYTES
    for _ in range(MOST_BOXES):
        file.seek(position)
        chunk = file.read(8)
        position += 12 + int.from_bytes(chunk[:4], "big")
        if position > size or chunk[4:] == b"IEND":
            return position
    return None


def tta_end(file: BinaryIO, head: bytes) -> int | None:
    """Return the end of a TTA file: a header of 22 bytes, the sizes of its frames, a checksum, frames, and a tag."""
    rate, samples = (int.from_bytes(head[begin : begin + 4], "little") for begin in (10, 14))
    if not rate:
        return None
    frames = -(-samples // (256 * rate // 245))
    file.seek(22)
    sizes = file.read(4 * frames)
    end = 26 + 4 * frames + sum(memoryview(sizes[: len(sizes) // 4 * 4]).cast("I"))
    file.seek(end)
    tag = file.read(16)
    return end + 32 + int.from_bytes(tag[12:], "little") if tag[:8] == b"APETAGEX" else end


def part_of_a_frame(file: BinaryIO, head: bytes, size: int) -> int:
    """Return the number of bytes that a Y4M file has after its last whole frame; 0 if its frames are not known."""
    line, found, behind = head.partition(b"\n")
    options = {word[:1]: word[1:].decode("latin-1") for word in line.split()[1:]}
    kind = re.fullmatch(r"(420|422|444|444alpha|411|mono)(?:jpeg|mpeg2|paldv)?(?:p?(\d+))?", options.get(b"C", "420"))
    numbers = options.get(b"W", ""), options.get(b"H", "")
    if not found or kind is None or not all(number.isdecimal() for number in numbers) or behind[:6] != b"FRAME\n":
        return 0
    width, height = map(int, numbers)
    across, down = {"420": (2, 2), "422": (2, 1), "411": (4, 1)}.get(kind[1], (1, 1))
    others = {"mono": 0, "444alpha": 3}.get(kind[1], 2)
    values = width * height + others * -(-width // across) * -(-height // down)
    frame = 6 + values * (2 if int(kind[2] or 8) > 8 else 1)
    rest = (size - len(line) - 1) % frame
    file.seek(size - rest)  # a frame may have options of its own, which make it longer
    return rest if b"FRAME\n".startswith(file.read(6)[:rest]) else 0


def is_cut_jpeg(file: BinaryIO, size: int) -> bool:
    """Return whether a file of one JPEG, or of one after the other, ends within one."""
    file.seek(max(0, size - TAGS_BYTES))
    if file.read().rstrip(b"\0").endswith(JPEG_TAIL):
        return False
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        position: int | None = 0
        while position is not None and data[position : position + 3] == JPEG_START:
            position = jpeg_end(data, position)
    return position is None


def mxf_footer(head: bytes) -> int:
    """Return the place of an MXF file's footer (SMPTE ST 377-1, 7.1), or -1 if its header does not say."""
    if not head.startswith(_MXF_HEADER) or len(head) < 64:
        return -1
    length = head[16] & 127 if head[16] & 128 else 0  # number of further bytes of the length
    value = 17 + length
    return int.from_bytes(head[value + 24 : value + 32], "big") or -1


def _ebml_size(data: bytes) -> tuple[int, int | None]:
    """Return the number of bytes that the size at the beginning takes, and the size; None if it is unknown."""
    length = 9 - data[0].bit_length()  # the leading zeros of the first byte count the size's bytes (RFC 8794, 4.1)
    ones = (1 << 7 * length) - 1
    value = int.from_bytes(data[:length], "big") & ones
    return length, None if value == ones else value  # all ones: unknown (RFC 8794, 6.2)


def cut_element(file: BinaryIO, size: int) -> int | None:
    """Return the place of the element of a Matroska file that is cut off, or None."""
    position = 0
    for _ in range(MOST_BOXES):
        if position >= size:
            return None
        file.seek(position)
        head = file.read(12)
        name_bytes = 9 - head[0].bit_length()
        if name_bytes > 4:  # no element: other data were appended
            return None
        if len(head) <= name_bytes:
            return position
        length, value = _ebml_size(head[name_bytes:])
        end = position + name_bytes + length + (value or 0)  # unknown of a segment or a cluster, whose elements follow
        if end > size or len(head) < name_bytes + length:
            return position
        position = end
    return None


def matroska_end(head: bytes) -> int | None:
    """Return the end of a Matroska file, which is an EBML header and one segment with everything else."""
    position = 0
    for expected in (EBML, _SEGMENT):
        if len(head) < position + 12 or int.from_bytes(head[position : position + 4], "big") != expected:
            return None
        length, value = _ebml_size(head[position + 4 :])
        if length > 8 or value is None:
            return None
        position += 4 + length + value
    return position
