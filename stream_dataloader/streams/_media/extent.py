"""Where a media file should end, by the sizes that its format writes down.

FFmpeg reads most files that were cut off as if they simply ended. Guarantee: `missing` looks at headers only, and
refuses no file that ends where its own headers say. It accepts files that leave their sizes open (live recordings) and
files of other formats. Which cuts can be found::

    by a size of the whole       AVI, Matroska, WebM, W64, CAF, ASF (WMV, WMA)
    by the chunk it ends in      MP4 and its fragments, MXF, FLV, VOC, GIF, Y4M: unless it is cut just between two
    by the packet it ends in     DV, MPEG-TS, MPEG audio, bare MJPEG: the same
    not at all                   bare H.264, H.265, MPEG video: the decoder may find the last picture damaged, or not
"""

from __future__ import annotations

import os
import struct
from typing import BinaryIO

from stream_dataloader.streams._media.chunks import missing_chunk, read_at

__all__ = ["missing"]

_SEGMENT, _EBML = 0x18538067, 0x1A45DFA3  # Matroska, RFC 9559
_W64_RIFF = b"riff\x2e\x91\xcf\x11\xa5\xd6\x28\xdb\x04\xc1\x00\x00"
_DV_SCALE = {0x00: 1, 0x04: 2, 0x14: 4, 0x18: 2}  # of frames of 120,000 or 144,000 bytes, by STYPE (SMPTE 314M, 370M)
_MPEG_TAIL_BYTES = 1 << 14
_JPEG_TAIL_BYTES = 1 << 22


def missing(path: str) -> str | None:
    """What tells that a file was cut; None if nothing does."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        head = file.read(4096)
        for declared in (_riff_end, _matroska_end, _w64_end):
            end = declared(head)
            if end is not None and end > size:
                return f"it has {size} bytes, and its header declares {end}"
        if (found := missing_chunk(file, head, size)) is not None:
            return found or None
        for ends_within, what in _TAILS.items():
            if ends_within(file, head, size):
                return f"its {size} bytes end within a {what}"
    return None


def _riff_end(head: bytes) -> int | None:
    """Of a RIFF file (AVI); a first part of several, beyond 1 GiB."""
    if head[:4] != b"RIFF" or head[8:11] != b"AVI":
        return None
    (size,) = struct.unpack("<I", head[4:8])
    return int(size) + 8 if 0 < size < 0xFFFFFFFF else None


def _matroska_end(head: bytes) -> int | None:
    """Of a Matroska file: its EBML header, then the segment that holds everything."""
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


def _w64_end(head: bytes) -> int | None:
    """Of a Sony Wave64 file."""
    if head[:16] != _W64_RIFF or len(head) < 24:
        return None
    (size,) = struct.unpack_from("<Q", head, 16)
    return int(size) if size < 1 << 62 else None


def _dv(_file: BinaryIO, head: bytes, size: int) -> bool:
    if head[:3] != b"\x1f\x07\x00" or len(head) < 452 or head[80] >> 5 != 1:
        return False
    scale = _DV_SCALE.get(head[80 * 5 + 48 + 3] & 0x1F, 1)
    return size % (scale * (144_000 if head[3] & 0x80 else 120_000)) != 0


def _transport(file: BinaryIO, head: bytes, size: int) -> bool:
    for length, offset in ((188, 0), (192, 4), (204, 0)):
        if len(head) > offset + 4 * length and all(head[offset + i * length] == 0x47 for i in range(5)):
            part = size % length
            tail = read_at(file, size - part - 2 * length, 2 * length + part)
            # If the last packets are out of step, the file was damaged earlier, or something was appended.
            in_step = tail[offset] == 0x47 and tail[offset + length] == 0x47
            return part > 0 and in_step and (part <= offset or tail[offset + 2 * length] == 0x47)
    return False


def _jpegs(file: BinaryIO, head: bytes, size: int) -> bool:
    if head[:3] != b"\xff\xd8\xff":
        return False
    tail = read_at(file, max(0, size - _JPEG_TAIL_BYTES), _JPEG_TAIL_BYTES)
    return tail.rfind(b"\xff\xd9") < max(0, tail.rfind(b"\xff\xd8\xff"))


def _mpeg_audio(file: BinaryIO, head: bytes, size: int) -> bool:
    if head[:3] != b"ID3" and not _mpeg_frame_bytes(head[:4]):
        return False
    if any(name in head for name in (b"Xing", b"Info", b"VBRI")):  # it says how many frames there are
        return False
    tail = read_at(file, max(0, size - _MPEG_TAIL_BYTES), _MPEG_TAIL_BYTES)
    for start in range(min(len(tail), 4096)):
        position, frames = start, 0
        while length := _mpeg_frame_bytes(tail[position : position + 4]):
            position, frames = position + length, frames + 1
            if position >= len(tail):
                break
        if frames > 2:  # more than two headers in step are no chance
            return position > len(tail)
    return False


_MPEG_KBITS = {  # by version 1 or not, and layer
    (True, 1): (0, *range(32, 449, 32)),
    (True, 2): (0, 32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (True, 3): (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (False, 1): (0, 32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (False, 2): (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (False, 3): (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}


def _mpeg_frame_bytes(header: bytes) -> int:
    """How long a frame of MPEG audio is (ISO/IEC 11172-3, 2.4.1.3); 0 if this is none, or does not tell."""
    if len(header) < 4 or header[0] != 0xFF or header[1] < 0xE0:
        return 0
    version, layer = header[1] >> 3 & 3, 4 - (header[1] >> 1 & 3)
    kbits, rate = header[2] >> 4, header[2] >> 2 & 3
    if version == 1 or layer == 4 or kbits in (0, 15) or rate == 3:
        return 0
    bits_a_second = 1000 * _MPEG_KBITS[version == 3, layer][kbits]
    hertz = (44100, 48000, 32000)[rate] >> {3: 0, 2: 1, 0: 2}[version]
    padding = header[2] >> 1 & 1
    if layer == 1:
        return int(4 * (12 * bits_a_second // hertz + padding))
    return int((72 if layer == 3 and version != 3 else 144) * bits_a_second // hertz + padding)


_TAILS = {
    _dv: "frame of DV",
    _transport: "packet of a transport stream",
    _jpegs: "picture of JPEG",
    _mpeg_audio: "frame of MPEG audio",
}
