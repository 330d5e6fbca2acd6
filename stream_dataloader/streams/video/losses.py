"""Counts what was read of a video, and finds where packets of a transport stream are missing.

Guarantee: a gap or a missing frame is found without decoding anything a second time.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

__all__ = ["PacketGaps", "Tally"]

#: Where two files were joined, a key frame comes at most this many packets after the mark.
_TO_A_KEY_FRAME = 3


class Tally:
    """How much of a video was read, from its first key frame on; `tick_seconds` is the unit of time stamps."""

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
        # A frame that is shown before the key frame refers to frames before that one: it is not handed out.
        untimed = packet.pts is None or self.first_time is None
        self.expected += untimed or packet.pts >= self.first_time

    def add_frame(self, time: int | None) -> None:
        """Count a frame that is handed out."""
        self.frames += 1
        self._last_time = time

    @property
    def place(self) -> str:
        """Where reading has got to, for messages; empty before the first frame."""
        if not self.frames:
            return ""
        seconds = math.nan if self._last_time is None else float(self._last_time * self._tick_seconds)
        return f", after {seconds:.3f} s"


class PacketGaps:
    """Finds out where packets of a transport stream were lost.

    FFmpeg marks a packet near each break in the stream's packet numbers, also where two files were joined: there a key
    frame follows within two packets.
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
