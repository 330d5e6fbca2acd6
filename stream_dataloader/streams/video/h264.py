"""Whether decoding of H.264 may begin at a packet (ITU-T H.264, 7.3.1 and D.1.8).

FFmpeg marks packets at which a gradual refresh begins (x264's `intra-refresh`) as key frames, but pictures are complete
only some frames later.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["is_gradual_refresh"]

_SLICE, _IDR, _SEI = 1, 5, 6  # nal_unit_type (table 7-1)
_RECOVERY_POINT = 6  # payloadType (annex D.1.1)


def is_gradual_refresh(packet: Any) -> bool:
    """Whether a key frame's packet only begins a refresh that takes several frames."""
    for unit in _units(bytes(packet)):
        kind = unit[0] & 31
        if kind in (_SLICE, _IDR):
            return False
        if kind == _SEI and _frames_to_recover(unit):
            return True
    return False


def _units(data: bytes) -> Iterator[bytes]:
    """The NAL units. Each follows a start code, or, in MP4 and Matroska, a length of four bytes."""
    if data[:3] == b"\0\0\1" or data[:4] == b"\0\0\0\1":
        yield from (unit for unit in data.split(b"\0\0\1") if unit.strip(b"\0"))
        return
    position = 0
    while position + 4 < len(data):
        length = int.from_bytes(data[position : position + 4], "big")
        if not 0 < length <= len(data) - position - 4:
            return
        yield data[position + 4 : position + 4 + length]
        position += 4 + length


def _frames_to_recover(unit: bytes) -> bool:
    """Whether a unit of supplemental information holds a recovery point that is some frames away."""
    # The third byte of 00 00 03 only prevents a false start code (7.4.1, emulation_prevention_three_byte).
    payload, position = unit.replace(b"\0\0\3", b"\0\0"), 1
    while position + 2 < len(payload):
        kind = size = 0
        while position < len(payload) - 1 and payload[position] == 255:
            kind, position = kind + 255, position + 1
        kind, position = kind + payload[position], position + 1
        while position < len(payload) - 1 and payload[position] == 255:
            size, position = size + 255, position + 1
        size, position = size + payload[position], position + 1
        if kind == _RECOVERY_POINT and position < len(payload):
            # recovery_frame_cnt is an Exp-Golomb code (9.1), in which the single bit 1 stands for 0.
            return not payload[position] & 0x80
        position += size
    return False
