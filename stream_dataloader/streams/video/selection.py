"""Selection of the frames of a video that are its items: a section, every n-th, or those at a steady rate.

::

    frames shown at       0   1   2  3      4           5   6
    frame_step=2          0       2         4               6
    at a steady rate      0   1   1  2  3   4   4   4   5   6      each moment takes the frame shown at that time

Guarantee: item n is the same frame however it is reached.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

from stream_dataloader.streams._media.container import ticks_a_frame
from stream_dataloader.streams._media.section import Section
from stream_dataloader.streams.video.frames import FrameReader

__all__ = ["Selection"]

_SLACK = 0.05  # seconds that a section may exceed the video, because its end may be a rounded duration

#: Largest number of items that one frame may become. A wrong time stamp would make a stream without end.
_MOST_REPEATS = 1 << 24


class Selection(NamedTuple):
    """Frames that are wanted: every `frame_step`-th of a section, or those at `fps`."""

    section: Section
    frame_step: int = 1
    fps: Fraction | None = None

    def frames(self, reader: FrameReader, start: int = 0) -> Generator[tuple[Any, Any], None, None]:
        """Yield the wanted frames from item `start` on, each with its moment."""
        first, stop = self._frame_numbers(reader)
        if self.fps is not None:
            item = None
            for item in self._at_rate(reader, first, stop, start):
                yield item
            if item is None and start and reader.on_corrupt == "raise":
                self._check_start(start, self.length(reader))
            return
        number = first + start * self.frame_step
        if stop is not None and number >= stop:
            self._check_start(start, -((first - stop) // self.frame_step))
            return
        read = number
        for read, frame in enumerate(reader.frames(number), number + 1):
            if (read - 1 - number) % self.frame_step == 0:
                yield frame, frame.pts
            if read == stop:
                return
        if read == number:  # no frame was read: the video ends here, or before
            count = reader.count()
            read = sum(1 for _ in reader.frames()) if count is None else count
            if reader.on_corrupt == "raise" and first <= read:
                self._check_start(start, -((first - read) // self.frame_step))
        self._check_end(reader, first, stop, read)

    def length(self, reader: FrameReader) -> int | None:
        count = reader.count()
        if count is None:
            return None
        first, stop = self._frame_numbers(reader)
        self._check_end(reader, first, stop, count)
        stop = count if stop is None else stop
        if self.fps is None or first == stop:
            return max(0, -((first - stop) // self.frame_step))
        origin, last, end = reader.time_of(first), reader.time_of(count - 1), reader.time_of(stop)
        if origin is None or last is None:
            return None
        behind = last + ticks_a_frame(reader.stream) if end is None else Fraction(end)
        return math.ceil((behind - origin) / self._ticks_an_item(reader))

    def _frame_numbers(self, reader: FrameReader) -> tuple[int, int | None]:
        first, stop = self.section.start, self.section.stop
        if isinstance(first, float):
            first = reader.frame_at(first) if first else 0
        if isinstance(stop, float):
            self._check_seconds(reader, stop)
            stop = reader.frame_at(stop)
        return first, stop

    def _check_seconds(self, reader: FrameReader, stop: float) -> None:
        """Check that the video lasts until the section's end."""
        count = reader.count()
        begin, last = (reader.time_of(0), reader.time_of(count - 1)) if count else (None, None)
        if begin is None or last is None:
            return
        seconds = float((last + ticks_a_frame(reader.stream) - begin) * reader.stream.time_base)
        if stop > seconds + _SLACK:
            asked = f"seconds {self.section.start} to {stop} of {self.section.path} were asked for"
            raise ValueError(f"{asked}, of {seconds:.3f}")

    def _check_start(self, start: int, items: int | None) -> None:
        if items is not None and start > max(0, items):
            raise ValueError(f"{self.section.path} has {max(0, items)} items, and start is {start}")

    def _check_end(self, reader: FrameReader, first: int, stop: int | None, count: int) -> None:
        """Check that a video with `count` frames read contains the section."""
        if count < first or (stop is not None and count < stop):
            total = reader.count()
            until = "its end" if stop is None else stop
            has = count if total is None else total
            raise ValueError(f"frames {first} to {until} of {self.section.path} were asked for, and it has {has}")

    def _ticks_an_item(self, reader: FrameReader) -> Fraction:
        assert self.fps is not None
        return self.frame_step / (self.fps * Fraction(reader.stream.time_base))

    def _at_rate(self, reader: FrameReader, first: int, stop: int | None, start: int) -> Iterator[tuple[Any, Any]]:
        """Yield the frame shown at each moment, and the moment, from item `start` on."""
        if stop is not None and first >= stop:
            return
        end = None if stop is None else reader.time_of(stop)
        count = reader.count()
        if count is not None and reader.on_corrupt == "raise":
            self._check_end(reader, first, stop, count)
        origin = reader.time_of(first) if first or start else None
        if origin is None or reader.on_corrupt != "raise":  # read from the beginning, or from the first frame
            frames = reader.frames(first)
            chosen = self._shown(reader, frames, None, end, 0)
            yield from itertools.islice(chosen, start, None)
        else:
            if end is not None and origin + start * self._ticks_an_item(reader) >= end:
                return
            moment = math.floor(origin + start * self._ticks_an_item(reader))
            frames = (frame for frame in reader.frames_from(moment) if frame.pts >= origin)
            yield from self._shown(reader, frames, origin, end, start)

    def _shown(
        self, reader: FrameReader, frames: Iterator[Any], origin: int | None, end: int | None, item: int
    ) -> Iterator[tuple[Any, Any]]:
        shown, ticks = None, self._ticks_an_item(reader)
        for frame in frames:
            if frame.pts is None:
                raise ValueError(f"{self.section.path} does not tell when its frames are shown; leave fps out")
            origin = frame.pts if origin is None else origin
            if shown is not None and frame.pts < shown.pts:
                where = f"{self.section.path}: its clock jumps back, from {reader.seconds(shown):.3f} s to "
                raise ValueError(f"{where}{reader.seconds(frame):.3f} s, so fps cannot be kept; leave fps out")
            if end is not None and frame.pts >= end:
                break
            if shown is not None:
                self._check_repeats(reader, shown, frame.pts)
            while shown is not None and origin + item * ticks < frame.pts:
                yield shown, origin + item * ticks
                item += 1
            shown = frame
        if shown is None or origin is None:
            self._check_end(reader, self.section.start, None, 0)
            return
        if end is None:
            end = shown.pts + ticks_a_frame(reader.stream)
        self._check_repeats(reader, shown, end)
        while origin + item * ticks < end:
            yield shown, origin + item * ticks
            item += 1

    def _check_repeats(self, reader: FrameReader, shown: Any, end: int | Fraction) -> None:
        if end - shown.pts > _MOST_REPEATS * self._ticks_an_item(reader):
            seconds = float(end * reader.stream.time_base)
            where = f"{self.section.path}: its clock jumps from {reader.seconds(shown):.3f} s to {seconds:.3f} s"
            raise ValueError(f"{where}, and fps would repeat a frame {_MOST_REPEATS:,} times or more; leave fps out")
