"""What packets tell: how many frames there should be, where some are missing, and where decoding may begin."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

__all__ = ["PacketGaps", "Tally", "is_gradual_refresh"]

#: Where two files were joined, a key frame comes at most this many packets after the mark.
_TO_A_KEY_FRAME = 3

_SLICE, _IDR, _SEI = 1, 5, 6  # nal_unit_type (ITU-T H.264, table 7-1)
_RECOVERY_POINT = 6  # payloadType (annex D.1.1)


class Tally:
    """How much of a video was read, from its first key frame on."""

    def __init__(self, tick_seconds: Fraction) -> None:
        self._tick_seconds = tick_seconds
        self.packets = 0
        self.expected = 0  # frames that these packets should give
        self.frames = 0  # that were handed out
        self.first_time: int | None = None  # of the first packet, a key frame's
        self._last_time: int | None = None  # of the last frame that was handed out

    def add_packet(self, packet: Any) -> None:
        """Count a packet, and the frame that it should give."""
        self.packets += 1
        if self.first_time is None:
            self.first_time = packet.pts
        if packet.is_discard:  # an edit list cuts its frame off
            return
        untimed = packet.pts is None or self.first_time is None
        self.expected += untimed or packet.pts >= self.first_time

    def add_frame(self, time: int | None) -> None:
        """Count a frame that is handed out."""
        self.frames += 1
        self._last_time = time

    @property
    def place(self) -> str:
        """Where reading has got to, for messages."""
        if not self.frames:
            return ""
        seconds = math.nan if self._last_time is None else float(self._last_time * self._tick_seconds)
        return f", after {seconds:.3f} s"


class PacketGaps:
    """Finds out where packets of a transport stream were lost.

    FFmpeg marks a packet near each break in their numbers, also where two files were joined: a key frame follows there.
    """

    def __init__(self) -> None:
        self._left = 0

    def has_one_before(self, packet: Any) -> bool:
        """Whether something was lost before this packet, or before the end if it is None."""
        if packet is None:
            return self._left > 0
        if packet.is_keyframe:
            self._left = 0
        if self._left:
            self._left -= 1
            return self._left == 0
        self._left = _TO_A_KEY_FRAME if packet.is_corrupt else 0
        return False


def is_gradual_refresh(packet: Any) -> bool:
    """Whether a key frame of H.264 only begins a refresh (x264's `intra-refresh`) that takes several frames."""
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
    while len(data) > 4:
        length = int.from_bytes(data[:4], "big")
        if not 0 < length <= len(data) - 4:
            return
        yield data[4 : 4 + length]
        data = data[4 + length :]


def _frames_to_recover(unit: bytes) -> bool:
    """Whether a unit holds a recovery point that is some frames away (7.3.2.3.1 and D.1.8)."""
    # The third byte of 00 00 03 only prevents a false start code (7.4.1).
    payload = unit.replace(b"\0\0\3", b"\0\0")[1:]
    while len(payload) > 2:
        kind, payload = _number(payload)
        size, payload = _number(payload)
        if kind == _RECOVERY_POINT and payload:
            # recovery_frame_cnt is an Exp-Golomb code (9.1), in which the single bit 1 stands for 0.
            return not payload[0] & 0x80
        payload = payload[size:]
    return False


def _number(data: bytes) -> tuple[int, bytes]:
    """The sum of bytes of 255 and of the one behind them; and the rest."""
    full = len(data) - len(data.lstrip(b"\xff"))
    return 255 * full + sum(data[full : full + 1]), data[full + 1 :]
