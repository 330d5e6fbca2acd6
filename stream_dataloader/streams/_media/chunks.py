"""Walks over the chunks of a media file, by their headers only, to see whether the last one is complete.

A walk returns None for a file of another format, a message if the file was cut off, and `""` if it was not, or if that
is not known.
"""

from __future__ import annotations

import re
import struct
from typing import BinaryIO

__all__ = ["missing_chunk", "read_at"]

_ASF_HEADER = bytes.fromhex("3026b2758e66cf11a6d900aa0062ce6c")
_MXF_KEY, _MXF_PARTITION = bytes.fromhex("060e2b34"), bytes.fromhex("060e2b34020501010d0102010102")
_MOST_CHUNKS = 1_000_000  # a walk ends here, as it must be cheap
_Y4M = re.compile(rb"(420|422|444|411|mono)(alpha|jpeg|mpeg2|paldv)?(?:p?(9|10|12|14|16))?$")
_Y4M_SAMPLES = {b"420": (2, 2), b"422": (2, 1), b"444": (1, 1), b"411": (4, 1)}  # luma to one of chroma, each way
_MP4_BOXES = (
    *(b"ftyp", b"styp", b"moov", b"moof", b"mdat", b"sidx", b"ssix", b"mfra", b"free", b"skip", b"wide", b"pnot"),
    *(b"uuid", b"meta", b"udta", b"emsg", b"prft"),
)


def missing_chunk(file: BinaryIO, head: bytes, size: int) -> str | None:
    """What tells that a file was cut.

    Args:
        file: The file.
        head: Its first 4096 bytes.
        size: How long it is.

    Returns:
        Nothing, `""`, if its chunks end where it does; None if it has none.
    """
    for walk in (_gif, _y4m, _flv, _mp4, _asf, _caf, _voc, _mxf):
        if (found := walk(file, head, size)) is not None:
            return found
    return None


def read_at(file: BinaryIO, position: int, count: int) -> bytes:
    """So many bytes from a position on, or as many as there are."""
    file.seek(position)
    return file.read(count)


def _beyond(position: int, end: int, size: int, what: str) -> str:
    """Empty, if something that begins at a position lies within the file."""
    return f"it has {size} bytes, and {what} at byte {position} lasts to byte {end}" if end > size else ""


def _gif(file: BinaryIO, head: bytes, size: int) -> str | None:
    """GIF89a: blocks up to a trailer."""
    if head[:6] not in (b"GIF87a", b"GIF89a"):
        return None
    data = read_at(file, 0, size)
    try:
        position = 13 + (3 << (data[10] & 7) + 1 if data[10] & 0x80 else 0)
        while data[position] != 0x3B:
            if data[position] == 0x2C:  # an image: its own colours, and the code size of its data
                flags = data[position + 9]
                position += 11 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
            elif data[position] == 0x21:
                position += 2
            else:
                return ""
            while data[position]:
                position += 1 + data[position]
            position += 1
    except IndexError:
        return f"its {size} bytes end without the trailer of a GIF"
    return ""


def _y4m(file: BinaryIO, head: bytes, size: int) -> str | None:
    """YUV4MPEG2: a line, then frames of one size, each behind a line of its own."""
    if not head.startswith(b"YUV4MPEG2 ") or b"\n" not in head:
        return None
    position = head.index(b"\n") + 1
    told = {word[:1]: word[1:] for word in head[: position - 1].split()[1:]}
    kind = _Y4M.match(told.get(b"C", b"420"))
    if kind is None or not (told.get(b"W", b"").isdigit() and told.get(b"H", b"").isdigit()):
        return ""
    width, height = int(told[b"W"]), int(told[b"H"])
    samples = width * height
    if kind[1] != b"mono":
        across, down = _Y4M_SAMPLES[kind[1]]
        samples += 2 * -(-width // across) * -(-height // down) + (samples if kind[2] == b"alpha" else 0)
    frame_bytes = samples * (2 if kind[3] else 1)
    for _ in range(_MOST_CHUNKS):
        if position >= size:
            return ""
        line = read_at(file, position, 256)
        if b"\n" not in line:
            return f"its {size} bytes end within a frame's header"
        end = position + line.index(b"\n") + 1 + frame_bytes
        if end > size or not line.startswith(b"FRAME"):
            return _beyond(position, end, size, "the frame")
        position = end
    return ""


def _flv(file: BinaryIO, head: bytes, size: int) -> str | None:
    """FLV: tags, each followed by its size."""
    if head[:3] != b"FLV" or len(head) < 13:
        return None
    position = int.from_bytes(head[5:9], "big") + 4
    for _ in range(_MOST_CHUNKS):
        if position >= size:
            return ""
        tag = read_at(file, position, 11)
        if len(tag) == 11 and tag[0] & 0x1F not in (8, 9, 18):
            return ""
        length = int.from_bytes(tag[1:4], "big")
        end = position + 11 + length + 4
        if len(tag) < 11 or end > size:
            return _beyond(position, end, size, "the tag")
        position = end
    return ""


def _mp4(file: BinaryIO, head: bytes, size: int) -> str | None:
    """ISO/IEC 14496-12: boxes; of a fragment there are two, and an index of segments knows their sizes."""
    if head[4:8] not in _MP4_BOXES:
        return None
    position, last, fragmented, declared = 0, b"", False, 0
    for _ in range(_MOST_CHUNKS):
        if position >= size:
            break
        box = read_at(file, position, 16)
        length, last = int.from_bytes(box[:4], "big"), box[4:8]
        if length == 1 and len(box) == 16:
            length = int.from_bytes(box[8:], "big")
        if length == 0 and last == b"mdat":  # to the end
            return ""
        if len(box) < 8 and any(box):
            return f"its {size} bytes end within a box's header"
        if length < 8 or last not in _MP4_BOXES:  # something was appended
            return ""
        if position + length > size:
            return _beyond(position, position + length, size, f"the box {last.decode('latin-1')!r}")
        fragmented |= last == b"moof"
        if last == b"sidx":
            declared = max(declared, _segments_end(read_at(file, position, min(length, 1 << 20)), position + length))
        position += length
    if last == b"moof":
        return f"its {size} bytes end before the data of its last fragment"
    return f"it has {size} bytes, and its index declares {declared}" if declared > size else ""


def _segments_end(box: bytes, behind: int) -> int:
    """The byte behind what a segment index (8.16.3) refers to; 0 if it does not tell."""
    offset = struct.Struct(">20x4xI2xH" if box[8:9] == b"\0" else ">20x8xQ2xH")
    if len(box) < offset.size:
        return 0
    first, count = offset.unpack_from(box)
    references = box[offset.size : offset.size + 12 * count]
    sizes = (int.from_bytes(references[i : i + 4], "big") & 0x7FFFFFFF for i in range(0, len(references), 12))
    return behind + int(first) + sum(sizes)


def _asf(file: BinaryIO, head: bytes, size: int) -> str | None:
    """ASF: objects; a size of 0 is of a broadcast."""
    return _chunks(file, size, 0, 24, "object", "<16xQ") if head[:16] == _ASF_HEADER else None


def _caf(file: BinaryIO, head: bytes, size: int) -> str | None:
    """Core Audio: chunks; -1 lasts to the end."""
    return _chunks(file, size, 8, 12, "chunk", ">4xq", header_counts=False) if head[:4] == b"caff" else None


def _chunks(
    file: BinaryIO, size: int, position: int, header: int, name: str, layout: str, *, header_counts: bool = True
) -> str:
    """Chunks that begin with their size, one behind the other."""
    for _ in range(_MOST_CHUNKS):
        if position >= size:
            return ""
        found = read_at(file, position, header)
        if len(found) < header:
            return f"its {size} bytes end within the header of a {name}"
        (length,) = struct.unpack(layout, found)
        length += 0 if header_counts else header
        if length < header or length > 1 << 62:
            return ""
        if position + length > size:
            return _beyond(position, position + length, size, f"the {name}")
        position += length
    return ""


def _voc(file: BinaryIO, head: bytes, size: int) -> str | None:
    """Creative Voice: blocks up to one of type 0, which may be left out."""
    if head[:20] != b"Creative Voice File\x1a" or len(head) < 26:
        return None
    (position,) = struct.unpack_from("<H", head, 20)
    for _ in range(_MOST_CHUNKS):
        block = read_at(file, position, 4)
        if len(block) < 4 or block[0] == 0 or block[0] > 9:
            return ""
        end = position + 4 + int.from_bytes(block[1:], "little")
        if end > size:
            return _beyond(position, end, size, "the block")
        position = end
    return ""


def _mxf(file: BinaryIO, head: bytes, size: int) -> str | None:
    """MXF (SMPTE 377-1): key, length, value; the first partition knows where the footer begins."""
    if head[:14] != _MXF_PARTITION:
        return None
    value = 17 + (head[16] & 0x7F if head[16] & 0x80 else 0)
    footer = int.from_bytes(head[value + 24 : value + 32], "big")
    if footer >= size:
        return f"it has {size} bytes, and its header declares a footer at byte {footer}"
    position = 0
    for _ in range(_MOST_CHUNKS):
        if position >= size:
            return ""
        found = read_at(file, position, 25)
        if found[:4] != _MXF_KEY[: len(found)]:
            return ""
        length, begin = found[16] if len(found) > 16 else 0, 17
        if length & 0x80:
            begin += length & 0x7F
            length = int.from_bytes(found[17:begin], "big")
        end = position + begin + length
        if len(found) < 17 or end > size:
            return _beyond(position, end, size, "what is")
        position = end
    return ""
