"""Where decoding has got to by the frames' time stamps, and what is missing by them.

Guarantee: a gap is reported only if it is longer than time stamps are inexact by, so a file without a fault has none.
"""

from __future__ import annotations

from typing import Any

__all__ = ["FrameClock"]


class FrameClock:
    """Follows frames as they are decoded; `tick_seconds` is the unit of time stamps."""

    def __init__(self, tick_seconds: float) -> None:
        self._tick_seconds = tick_seconds
        self._end: float | None = None  # of what was read, by time stamps
        self.longest_seconds = 0.0  # the longest frame
        self.origin: int | None = None  # the first frame's time stamp

    @property
    def origin_seconds(self) -> float:
        """The first frame's time stamp in seconds; 0 if it has none."""
        return (self.origin or 0) * self._tick_seconds

    def jump(self) -> None:
        """The next frame does not follow the one before: the reader has sought."""
        self._end = None

    def add(self, frame: Any) -> None:
        """Count a frame."""
        seconds = frame.samples / int(frame.sample_rate)
        self.longest_seconds = max(self.longest_seconds, seconds)
        if frame.pts is not None:
            self._end = frame.pts * self._tick_seconds + seconds
        elif self._end is not None:  # a frame without a time stamp follows directly
            self._end += seconds

    def gap_before(self, frame: Any) -> float:
        """Seconds that are missing between the frame before and this one; 0 if time stamps do not show it."""
        if self._end is None or frame.pts is None:
            return 0.0
        inexact = 2 * self._tick_seconds
        gap: float = frame.pts * self._tick_seconds - self._end
        frame_seconds = frame.samples / int(frame.sample_rate)
        if gap <= max(inexact, frame_seconds / 2):
            return 0.0
        # Packets are lost as a whole. A whole number of frames is more exact than coarse time stamps.
        whole: float = round(gap / frame_seconds) * frame_seconds
        return whole if abs(whole - gap) <= inexact else gap

    def seconds_read(self) -> float | None:
        """From the first frame to the end of the last one; None without time stamps."""
        return None if self._end is None or self.origin is None else self._end - self.origin_seconds
