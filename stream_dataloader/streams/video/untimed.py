"""Times of the frames of a video whose container does not tell when frames are shown.

AVI and ASF have times of decoding, in the order of the packets. The n-th frame shown takes the time of the n-th packet
that has a frame, so that repeated frames, for which AVI has empty packets, keep their place beside the sound::

    packets     I0   P2   B1   -    P3      "-" is empty: the picture before it stays
    decoded at  0    1    2    3    4
    shown       0    1    2         4

Bare streams have no times at all: their frames are shown at a steady rate.
"""

from __future__ import annotations

from collections import deque
from fractions import Fraction
from typing import Any

from stream_dataloader.streams._media.container import ticks_of_untimed
from stream_dataloader.streams.video.pictures import inspector

__all__ = ["UntimedClock"]


class UntimedClock:
    """Gives each frame a time in the track's time base. Packets are added in order, before their frames are shown."""

    def __init__(self, ticks: Fraction, stream: Any, *, decoding_times: bool) -> None:
        self._ticks = ticks
        self._look = inspector(stream)
        self._decoding_times = decoding_times
        self._times: deque[Fraction] = deque()
        self._next = Fraction(0)  # time of the next frame if no packet tells it

    @classmethod
    def of(cls, container: Any, stream: Any) -> UntimedClock | None:
        """Return the clock of a track, or None if its container tells when frames are shown."""
        ticks = ticks_of_untimed(container, stream)
        return None if ticks is None else cls(ticks, stream, decoding_times=container.format.name in ("avi", "asf"))

    def add(self, packet: Any) -> None:
        """Add a packet that has data."""
        if not self._decoding_times or packet.dts is None:
            return
        told = None if self._look is None else self._look.look(packet)
        if told is not None and told.found and told.frames is None:
            self._look = None  # from here on, only decoding would tell
        frames = 1 if told is None or not told.found or told.frames is None else told.frames
        self._times.extend(packet.dts + self._ticks * frame for frame in range(frames))

    def next(self) -> int:
        """Return the time of the next frame shown."""
        time = self._times.popleft() if self._times else self._next
        self._next = time + self._ticks
        return round(time)
