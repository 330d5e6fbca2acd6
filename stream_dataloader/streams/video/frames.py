"""Decoded frames of one video, from any frame on.

Guarantee: `frames(start=n)` yields what `frames()` yields after its first n, in any container.

The reader seeks to a place before frame n, and checks what it then reads: MPEG-TS lands late, and MPEG program streams
do not know the times of the frames that they land on::

    key frames    K . . . . . K . . . . . K . . . . .
    wanted                            n
    good                      ^ from here, decode up to n
    late                                  ^                    or not a key frame of the index: try again from further
                                                               back; at last read the file from its beginning

The first decoded frame must be a key picture with the key frame's time, and each frame must have the index's time.
"""

from __future__ import annotations

import bisect
import errno
import functools
import itertools
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import av.error

from stream_dataloader.streams._media.container import check_not_cut, choose_stream, open_container
from stream_dataloader.streams._media.limits import DEFAULT, Limits
from stream_dataloader.streams._media.section import OnCorrupt, closed_on_error
from stream_dataloader.streams.video.device import DeviceDecoder
from stream_dataloader.streams.video.first_key import from_first_key, is_key_picture
from stream_dataloader.streams.video.frame_index import FrameIndex, frame_index, index_by_decoding
from stream_dataloader.streams.video.pictures import Inspector, Shown, inspector
from stream_dataloader.streams.video.untimed import UntimedClock

__all__ = ["FrameReader"]

#: Number of unreadable packets after which the rest of the file is given up.
_MOST_FAILURES = 100

#: Distance before the wanted frame that each try to seek aims at, because some containers land late.
_BACK_SECONDS = (0.0, 1.0, 4.0, 16.0, 64.0)

#: Largest number of packets from the mark of a joint of two files to the next key frame.
_TO_A_KEY_FRAME = 3


class FrameReader:
    """Reader of one video's frames, `av.VideoFrame`, in the order of display. A frame is valid until the next one."""

    def __init__(
        self,
        path: str,
        stream: int = 0,
        on_corrupt: OnCorrupt = "raise",
        device: str | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._path, self._limits = path, limits or DEFAULT
        self._index = stream
        self.on_corrupt = on_corrupt
        self._device = None if device is None else DeviceDecoder(path, stream, device)
        self._open()

    def _open(self) -> None:
        self._begun = False
        self._packets_read = 0  # number of packets read from the beginning
        self._container = open_container(self._path) if self._device is None else self._device.open()
        with closed_on_error(self._container):
            self.stream: Any = choose_stream(self._container, "video", self._index, self._limits)
            if self._device is not None:
                self._device.check(self.stream.codec_context)
            self._untimed = UntimedClock.of(self._container, self.stream)

    def close(self) -> None:
        self._container.close()
        if self._device is not None:
            self.stream = None  # releases its decoder and memory of the device

    @functools.cached_property
    def _known(self) -> FrameIndex:
        return frame_index(self._path, self._index)

    def count(self) -> int | None:
        """Return the number of frames, or None if it is not known."""
        return self._known.total

    def time_of(self, frame: int) -> int | None:
        """Return the time stamp of a frame in the track's time base, or None if it has none."""
        times = self._known.times
        return int(times[frame]) if times is not None and frame < len(times) else None

    def frame_at(self, seconds: float) -> int:
        """Return the number of the first frame shown at least `seconds` after the first one."""
        times = self._known.times
        if times is None:
            what = "does not tell when its frames are shown, or its clock jumps back"
            raise ValueError(f"{self._path} {what}; give frames, not seconds")
        if not len(times):
            return 0
        return bisect.bisect_left(times, int(times[0]) + seconds / float(self.stream.time_base))

    def seconds(self, frame: Any) -> float:
        return math.nan if frame.pts is None else float(frame.pts * self.stream.time_base)

    def frames(self, start: int = 0) -> Iterator[Any]:
        if start == 0:
            return self._decoded(from_first_key(self._path, self._index, self._packets_from_start))
        time, whole = self.time_of(start), self.on_corrupt == "raise"
        count = self.count()
        if count is not None and start >= count and whole:
            return iter(())
        if time is None or self._untimed is not None or not whole:
            return itertools.islice(self.frames(), start, None)
        frames = (frame for frame in self.frames_from(time) if frame.pts is None or frame.pts >= time)
        return self._as_known(frames, start)

    def _as_known(self, frames: Iterator[Any], start: int) -> Iterator[Any]:
        """Yield the frames from `start` on. If one differs from the index, make the index and the frames again."""
        times = self._known.times
        assert times is not None
        number = start
        for frame in frames:
            if number >= len(times) or frame.pts != times[number]:
                break
            yield frame
            number += 1
        else:
            if number == len(times):
                return
        self._known = index_by_decoding(self._path, self._index)
        frames = itertools.islice(self.frames(), start, None)
        given = [frame.pts for frame in itertools.islice(frames, number - start)]
        if given != times[start:number].tolist():
            self._refuse(f"frame {number} is not shown when its packets say")
        yield from frames

    def frames_from(self, time: int) -> Iterator[Any]:
        """Yield the frames from a key frame at or before `time`, in the track's time base."""
        key = self._known.key_before(time) if self._untimed is None else None
        if key is None:
            return self.frames()
        for back in _BACK_SECONDS:
            target = key - int(back / self.stream.time_base)
            if target <= (self.stream.start_time or 0):
                break
            try:
                self._begun = True
                self._container.seek(target, stream=self.stream, backward=True)
            except av.error.FFmpegError:
                break
            packets = itertools.dropwhile(lambda packet: packet is not None and not packet.is_keyframe, self._packets())
            first = next(packets, None)
            if first is None or first.pts is None or first.pts > time or not self._known.has_key(first):
                continue
            if (frames := self._from_sure_key(first, packets)) is not None:
                return frames
        return self._frames_from_key_at(key)

    def _frames_from_key_at(self, time: int) -> Iterator[Any]:
        """Read from the beginning, and decode from a key frame on."""
        packets = itertools.dropwhile(
            lambda packet: packet is not None and not (packet.is_keyframe and packet.pts == time),
            self._packets_from_start(),
        )
        first = next(packets, None)
        if first is not None and (frames := self._from_sure_key(first, packets)) is not None:
            return frames
        return self.frames()

    def _from_sure_key(self, key: Any, packets: Iterator[Any]) -> Iterator[Any] | None:
        """Decode from a packet on; return None unless the first frame is a key picture with the packet's time."""
        frames = self._decoded(itertools.chain([key], packets), sought=True)
        try:
            first = next(frames, None)
        except ValueError:  # reading from the beginning will tell whether the file is damaged
            return None
        if first is None or first.pts != key.pts or not is_key_picture(first):
            return None
        return itertools.chain([first], frames)

    def _packets_from_start(self) -> Iterator[Any]:
        """Yield all packets. The file is opened again if it was read before."""
        if self._begun:
            self.close()
            self._open()
        self._begun = True
        return self._packets()

    def _packets(self) -> Iterator[Any]:
        failed = 0
        while failed < _MOST_FAILURES:
            try:
                for packet in self._container.demux(self.stream):
                    if packet.size:
                        failed = 0
                        self._packets_read += 1
                        yield packet
                break
            except av.error.FFmpegError as error:
                self._refuse(f"cannot be read further ({error.strerror})", error)
                failed += 1
        yield None

    def _decoded(self, packets: Iterator[Any], *, sought: bool = False) -> Iterator[Any]:
        """Decode packets that begin with a key frame's."""
        counts = FrameCounts(self.stream.time_base, inspector(self.stream))
        gaps = PacketGaps() if self._container.format.name == "mpegts" else None
        for packet in packets:
            if gaps is not None and gaps.has_one_before(packet):
                self._refuse(f"packets are lost or damaged{counts.place}")
            if packet is not None:
                counts.add_packet(packet)
                if self._untimed is not None:
                    self._untimed.add(packet)
            try:
                frames = self.stream.decode(packet)
            except av.error.FFmpegError as error:
                if not isinstance(error, av.error.EOFError):
                    if self._device is not None:
                        self._device.check_able(error)
                    self._refuse(f"a frame cannot be decoded ({self._reason(error)}){counts.place}", error)
                continue
            for decoded in frames:
                frame = decoded
                if self._device is not None:
                    frame = self._device.frame(decoded, self.stream.codec_context)
                if self._is_wanted(frame, counts):
                    counts.add_frame(frame.pts)
                    yield frame
        if self._device is not None and counts.packets:
            self._device.check_able(None)
        if self.on_corrupt == "raise":
            self._check_complete(counts, sought=sought)

    def _reason(self, error: av.error.FFmpegError) -> str:
        if error.errno != errno.EINVAL:
            return str(error.strerror)
        return f"it is damaged, or has more than {self._limits.picture_pixels:,} pixels, see Limits(picture_pixels=)"

    def _is_wanted(self, frame: Any, counts: FrameCounts) -> bool:
        if self._untimed is not None:
            frame.pts = self._untimed.next()
        elif counts.is_leading(frame.pts):
            return False
        if frame.is_corrupt and self.on_corrupt != "keep":
            self._refuse(f"the frame at {self.seconds(frame)} s is damaged")
            return False
        return True

    def _check_complete(self, counts: FrameCounts, *, sought: bool) -> None:
        """Raise if a video lacks frames according to its packets or its header."""
        check_not_cut(self._path)
        if sought:
            return
        if counts.frames < counts.expected:
            self._refuse(f"{counts.expected - counts.frames} of {counts.expected} frames could not be decoded")
        declared = self.stream.frames
        if self._container.format.name.startswith(("mov,", "avi")) and self.stream.index_entries:
            # Frames that an edit list cuts off do not count, nor those of an AVI file that only repeat a picture.
            declared = min(declared, len(self.stream.index_entries))
        if declared and self._packets_read < declared:
            what = f"{self._path} is cut off: it has {self._packets_read} frames, and its header declares {declared}"
            raise ValueError(f'{what}; use on_corrupt="drop" for what there is')
        if not counts.frames:
            raise ValueError(f"{self._path}: its video track {self._index} has no frame that can be decoded")

    def _refuse(self, what: str, error: Exception | None = None) -> None:
        if self.on_corrupt == "raise":
            remedy = 'use on_corrupt="keep" or "drop" to go on, or on_error="skip" to leave the video'
            raise ValueError(f"{self._path}: {what}; {remedy}") from error


class FrameCounts:
    """Counts of the packets and frames of a video that were read, from its first key frame on."""

    def __init__(self, tick_seconds: Fraction, look: Inspector | None) -> None:
        self._tick_seconds = tick_seconds
        self._look = look
        self.packets = 0
        self._expected = 0
        self.frames = 0  # number of frames delivered
        self._first_time: int | None = None  # time of the first packet, a key frame's
        self._last_time: int | None = None  # time of the last frame delivered
        self._leads = True  # packets may still have frames that are shown before the first key frame

    def add_packet(self, packet: Any) -> None:
        """Count a packet and the frames in it."""
        self.packets += 1
        if self.packets == 1:
            self._first_time = packet.pts
        elif packet.is_keyframe:
            self._leads = False
        told = Shown(None) if self._look is None else self._look.look(packet)
        frames = told.frames if told.found else 1
        if frames is None:
            self._look = None  # from here on, only decoding would tell
            self._expected = 0
        if frames is None or packet.is_discard:  # an edit list cuts its frame off
            return
        untimed = packet.pts is None or self._first_time is None
        if untimed or not self._leads or packet.pts >= self._first_time:
            self._expected += frames

    @property
    def expected(self) -> int:
        """Number of frames that these packets certainly have."""
        return self._expected - (self._look is not None and self._look.waits)

    def is_leading(self, time: int | None) -> bool:
        """Return True if a frame follows the first key frame but is shown before it, so it refers to earlier frames."""
        return not self.frames and None not in (time, self._first_time) and time < self._first_time  # type: ignore[operator]

    def add_frame(self, time: int | None) -> None:
        self.frames += 1
        self._last_time = time

    @property
    def place(self) -> str:
        """Place of reading, for messages."""
        if not self.frames:
            return ""
        seconds = math.nan if self._last_time is None else float(self._last_time * self._tick_seconds)
        return f", after {seconds:.3f} s"


class PacketGaps:
    """Detector of lost packets in a transport stream.

    FFmpeg marks packets near a break in their numbers, and also at the joint of two files.
    """

    def __init__(self) -> None:
        self._left = 0

    def has_one_before(self, packet: Any) -> bool:
        """Return True if packets were lost before this one, or before the end if it is None."""
        if packet is None:
            return self._left > 0
        if packet.is_keyframe:
            self._left = 0
        if self._left:
            self._left -= 1
            return self._left == 0
        self._left = _TO_A_KEY_FRAME if packet.is_corrupt else 0
        return False
