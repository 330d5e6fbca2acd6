"""Where decoding has got to by the frames' time stamps, and what is missing by them.

Guarantee: a gap is reported only if it is longer than time stamps are inexact by, so a file without a fault has none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["FrameClock"]


class _Read(NamedTuple):
    """Samples that were read since the last time stamp."""

    pts: int
    samples: int
    rate: int


class FrameClock:
    """Follows frames as they are decoded.

    Args:
        tick_seconds: The unit of time stamps.

    Attributes:
        origin: The first frame's time stamp; None if it has none, or before it.
        longest_seconds: The longest frame.
    """

    def __init__(self, tick_seconds: float) -> None:
        self._tick_seconds = tick_seconds
        self._last: _Read | None = None
        self.longest_seconds = 0.0
        self.origin: int | None = None

    @property
    def origin_seconds(self) -> float:
        """The first frame's time stamp in seconds; 0 if it has none."""
        return (self.origin or 0) * self._tick_seconds

    def jump(self) -> None:
        """The next frame does not follow the one before: the reader has sought."""
        self._last = None

    def add(self, frame: Any) -> None:
        """Count a frame."""
        rate = int(frame.sample_rate)
        self.longest_seconds = max(self.longest_seconds, frame.samples / rate)
        if frame.pts is not None:
            self._last = _Read(frame.pts, frame.samples, rate)
        elif self._last is not None:  # a frame without a time stamp follows directly
            self._last = self._last._replace(samples=self._last.samples + frame.samples)

    def gap_before(self, frame: Any) -> float:
        """Seconds that are missing between the frame before and this one; 0 if time stamps cannot tell."""
        if self._last is None or frame.pts is None:
            return 0.0
        pts, samples, rate = self._last
        inexact = 2 * self._tick_seconds
        gap: float = (frame.pts - pts) * self._tick_seconds - samples / rate
        frame_seconds = frame.samples / int(frame.sample_rate)
        if gap <= max(inexact, frame_seconds / 2):
            return 0.0
        # Packets are lost as a whole. A whole number of frames is more exact than coarse time stamps (Matroska's are
        # milliseconds), and keeps what follows in its place.
        whole: float = round(gap / frame_seconds) * frame_seconds
        return whole if abs(whole - gap) <= inexact else gap

    def seconds_read(self) -> float | None:
        """From the first frame to the end of the last one; None without time stamps."""
        if self._last is None or self.origin is None:
            return None
        pts, samples, rate = self._last
        return (pts - self.origin) * self._tick_seconds + samples / rate
