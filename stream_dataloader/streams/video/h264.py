"""What a packet of H.264 says about where decoding may begin (ITU-T H.264, 7.3.1 and D.1.8).

Encoders that refresh pictures gradually (x264's `intra-refresh`) have no picture that stands for itself behind the
first. FFmpeg marks the packets at which a refresh begins as key frames; pictures are whole only some frames on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["is_gradual_refresh"]

_SLICE, _IDR, _SEI = 1, 5, 6
_RECOVERY_POINT = 6


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
    """The NAL units, behind start codes or, as MP4 and Matroska have them, behind lengths of four bytes."""
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
            return not payload[position] & 0x80  # an Exp-Golomb code: 0 is a single one
        position += size
    return False
