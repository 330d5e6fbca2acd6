"""The decoded frames of one video, from any frame on.

Guarantee: `frames(start=n)` yields the very frames that `frames()` yields behind its first n, in any container.

How it gets there: the time stamp of frame n is looked up (`frame_index`), the container seeks to before it, and
what it then reads is checked, since not every container lands where it should (MPEG-TS lands late), or knows the
times of what it lands on (MPEG program streams)::

    key frames    K . . . . . K . . . . . K . . . . .
    wanted                            n
    good                      ^ from here, decode up to n      late, or no key frame of the index: try again from
    late                                  ^                    further back; at last read the file from its beginning,
                                                               and decode from the last key frame before n

Frames are decoded with one thread: the workers are the parallelism.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import av.error

from stream_dataloader.streams._media.container import check_not_cut, choose_stream, open_container, ticks_of_untimed
from stream_dataloader.streams._media.section import OnCorrupt, closed_on_error
from stream_dataloader.streams.video.frame_index import FrameIndex, frame_index

__all__ = ["FrameReader"]

_MOST_FAILURES = 100  # in a row, to read a packet
_TO_A_KEY_FRAME = 3  # packets, from one that is marked, where files were joined
_BACK_SECONDS = (0.0, 1.0, 4.0, 16.0, 64.0)  # further and further, where seeking lands late


class FrameReader:
    """Reads one video's frames, `av.VideoFrame`, in the order they are shown. Frames are valid until the next one.

    Args:
        path: The file.
        stream: Which of its video streams.
        on_corrupt: What to do about frames that the decoder finds damaged: `"raise"`; `"keep"` what it made of
            them; `"drop"` them. What cannot be decoded at all is left out by the latter two.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no video, or has no such stream.

    Attributes:
        stream: PyAV's stream.
        on_corrupt: As above.
    """

    def __init__(self, path: str, stream: int = 0, on_corrupt: OnCorrupt = "raise") -> None:
        self._path, self._index, self.on_corrupt = path, stream, on_corrupt
        self._open()

    def _open(self) -> None:
        self._begun = False
        self._container = open_container(self._path)
        with closed_on_error(self._container):
            self.stream: Any = choose_stream(self._container, "video", self._index)
            self._ticks = ticks_of_untimed(self._container, self.stream)

    def close(self) -> None:
        """Close the file."""
        self._container.close()

    @functools.cached_property
    def _known(self) -> FrameIndex:
        return frame_index(self._path, self._index)

    def count(self) -> int | None:
        """The number of frames; None if the container does not tell."""
        times = self._known.times
        return None if times is None else len(times)

    def time_of(self, frame: int) -> int | None:
        """The time stamp of a frame in the stream's time base; None if there is no such frame, or no way to tell."""
        times = self._known.times
        return int(times[frame]) if times is not None and frame < len(times) else None

    def frame_at(self, seconds: float) -> int:
        """The number of the first frame shown `seconds` after the first one, or later.

        Raises:
            ValueError: The container does not tell when frames are shown.
        """
        times = self._known.times
        if times is None:
            raise ValueError(f"{self._path} does not tell when its frames are shown; give frames, not seconds")
        if not len(times):
            return 0
        return bisect.bisect_left(times, int(times[0]) + seconds / float(self.stream.time_base))

    def seconds(self, frame: Any) -> float:
        """When a frame is shown, in the container's own time; NaN if it does not tell."""
        return math.nan if frame.pts is None else float(frame.pts * self.stream.time_base)

    def frames(self, start: int = 0) -> Iterator[Any]:
        """The frames from number `start` on.

        Raises:
            ValueError: A frame cannot be decoded, or the file is cut.
        """
        if start == 0:
            if self._begun:
                self._reopen()
            self._begun = True
            return self._decoded(self._packets_from_key())
        time = self.time_of(start)
        if time is None and self.count() is not None and self.on_corrupt == "raise":
            return iter(())
        # with frames left out, only reading tells which is the n-th
        if time is None or self._ticks is not None or self.on_corrupt != "raise":
            return itertools.islice(self.frames(), start, None)
        return self._frames_at(time, start)

    def _frames_at(self, time: int, start: int) -> Iterator[Any]:
        frames = (frame for frame in self.frames_from(time) if frame.pts is None or frame.pts >= time)
        first = next(frames, None)
        if first is not None and first.pts == time:
            yield first
            yield from frames
        else:  # the decoder's time stamps are not the packets'
            self._begun = True
            yield from itertools.islice(self.frames(), start, None)

    def frames_from(self, time: int) -> Iterator[Any]:
        """The frames from a key frame on that is shown at `time` (in the stream's time base) or before.

        Raises:
            ValueError: A frame cannot be decoded, or the file is cut.
        """
        for back in _BACK_SECONDS if self._ticks is None else ():
            target = time - int(back / self.stream.time_base)
            if target <= (self.stream.start_time or 0):
                break
            try:
                self._begun = True
                self._container.seek(target, stream=self.stream, backward=True)
            except av.error.FFmpegError:
                break
            packets = self._packets_from_key()
            first = next(packets, None)
            # a wrong time stamp is worse than a late landing: every frame from there on would be taken for another
            if first is None or first.pts is None or first.pts > time:
                continue
            if self._known.has_key(first):
                return self._decoded(itertools.chain([first], packets), sought=True)
        return self._frames_from_key_before(time)

    def _frames_from_key_before(self, time: int) -> Iterator[Any]:
        """Read the packets from the beginning, as the index was made, and decode from the last key frame before."""
        key = self._known.key_before(time) if self._ticks is None else None
        if key is not None:
            self._reopen()
            self._begun = True
            packets = itertools.dropwhile(
                lambda packet: packet is not None and not (packet.is_keyframe and packet.pts == key), self._packets()
            )
            first = next(packets, None)
            if first is not None:
                return self._decoded(itertools.chain([first], packets), sought=True)
        self._begun = True
        return self.frames()

    def _reopen(self) -> None:
        self._container.close()
        self._open()

    def _packets_from_key(self) -> Iterator[Any]:
        """Packets from a key frame on: nothing before it can be decoded."""
        return itertools.dropwhile(lambda packet: packet is not None and not packet.is_keyframe, self._packets())

    def _packets(self) -> Iterator[Any]:
        """Packets, and None at the end, which makes the decoder give out its last frames."""
        failed = 0
        while failed < _MOST_FAILURES:
            try:
                for packet in self._container.demux(self.stream):
                    if packet.size:
                        failed = 0
                        yield packet
                break
            except av.error.FFmpegError as error:
                self._refuse(f"cannot be read further ({error.strerror})", error)
                failed += 1
        yield None

    def _decoded(self, packets: Iterator[Any], *, sought: bool = False) -> Iterator[Any]:
        """Decode packets, the first of which is a key frame's."""
        raising, first_time, count, expected, shown, last = self.on_corrupt == "raise", None, 0, 0, 0, None
        gaps = _Gaps() if self._container.format.name == "mpegts" else None
        for packet in packets:
            if gaps is not None and gaps.has_one_before(packet):
                self._refuse(f"packets are lost or damaged{_after(last)}", None)
            if packet is not None:
                count += 1
                first_time = packet.pts if first_time is None else first_time
                untimed = packet.pts is None or first_time is None
                expected += not packet.is_discard and (untimed or packet.pts >= first_time)
            try:
                frames = self.stream.decode(packet)
            except av.error.FFmpegError as error:
                if not isinstance(error, av.error.EOFError):
                    self._refuse(f"a frame cannot be decoded ({error.strerror}){_after(last)}", error)
                continue
            for frame in frames:
                if self._ticks is not None:
                    frame.pts = round(shown * self._ticks)
                elif frame.pts is not None and first_time is not None and frame.pts < first_time:
                    continue  # shown before the key frame, made from frames before it
                if frame.is_corrupt and self.on_corrupt != "keep":
                    if raising:
                        self._refuse(f"the frame at {self.seconds(frame)} s is damaged", None)
                    continue
                shown, last = shown + 1, self.seconds(frame)
                yield frame
        if raising:
            check_not_cut(self._path)
            declared = self._declared()
            if not sought and shown < expected:
                self._refuse(f"{expected - shown} of {expected} frames could not be decoded", None)
            if not sought and declared and count < declared:
                raise ValueError(
                    f"{self._path} is cut off: it ended after {count} frames, and its header declares {declared}; use "
                    'on_corrupt="drop" for what there is'
                )
            if not sought and not shown:
                raise ValueError(
                    f"{self._path}: its video stream {self._index} has no frame that can be decoded; the file is "
                    'damaged or cut off; leave it out, or use on_corrupt="drop", which takes it for an empty one'
                )

    def _declared(self) -> int:
        """The number of frames by the header, without what an edit list cuts off; 0 if it does not tell."""
        declared: int = self.stream.frames
        if self._container.format.name.startswith("mov,") and self.stream.index_entries:
            return min(declared, len(self.stream.index_entries))
        return declared

    def _refuse(self, what: str, error: Exception | None) -> None:
        if self.on_corrupt == "raise":
            remedy = 'use on_corrupt="keep" or "drop" to go on, or on_error="skip" to leave the video'
            raise ValueError(f"{self._path}: {what}; {remedy}") from error


class _Gaps:
    """Finds out where packets of a transport stream were lost.

    FFmpeg marks a packet near each break in the numbering. Where two files were joined there is one too, and no
    harm: a key frame follows within two packets.
    """

    def __init__(self) -> None:
        self._left = 0

    def has_one_before(self, packet: Any) -> bool:
        """Whether something was lost before this packet, or the end if it is None."""
        if packet is None:
            return self._left > 0
        if packet.is_keyframe:
            self._left = 0
        if self._left:
            self._left -= 1
            return self._left == 0
        self._left = _TO_A_KEY_FRAME if packet.is_corrupt else 0
        return False


def _after(seconds: float | None) -> str:
    return "" if seconds is None else f", after {seconds:.3f} s"
