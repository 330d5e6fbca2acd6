"""Samples of an audio stream from any place on, whatever its container, codec, sample format, rate and channels.

Guarantee: the samples read from sample n on are, bit for bit, those that reading from the beginning gives there.
How a place is reached depends on what the decoder remembers of the past::

    PCM, FLAC, ALAC   nothing                        a seek, where time stamps count samples
    MP3               511 bytes and two frames       the packets before are not decoded, but for the last 128
    all others        noise generators, filters      all that comes before is decoded: 500 to 1500 times as fast
                      that never quite forget        as it plays

Samples are counted as they are presented: without the decoder's priming, without the padding of the last packet
where the file marks it. The first one has number 0, whatever its time stamp.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import av.error
import numpy as np

from stream_dataloader.streams._media.container import choose_stream, open_container
from stream_dataloader.streams._media.section import OnCorrupt, closed_on_error, whole_number
from stream_dataloader.streams.audio.headers import ReadAudio, check_audio_not_cut
from stream_dataloader.streams.audio.resample import Converter, Samples, as_float, layout_name, output_length, restart

__all__ = ["SampleReader", "check_numbers"]

_HIGHEST_RATE = 768_000
_STATELESS_FORMATS = ("wav", "w64", "aiff", "au", "caf", "flac", "mov,mp4,m4a,3gp,3g2,mj2")
_STATELESS_CODECS = ("flac", "alac", "pcm_")
_CHECKS = {"flac": "crccheck+explode", "wavpack": "crccheck", "tta": "crccheck"}  # their checksums, else ignored
_MP3_PREROLL_PACKETS = 128  # the reservoir is 255 bytes where a frame may add as few as 3
_SEEK_SECONDS = 1.0  # what comes before is decoded faster than found
_SILENCE_SAMPLES = 65536  # at once


def check_numbers(options: Any, **others: str) -> None:
    """Have a dataclass's `rate`, `channels` and `stream` be ints, as `SampleReader` takes them.

    Args:
        options: The dataclass, which may be frozen. None is let be where it is the default.
        **others: More options, to be 1 or more, by name; and what None means, where it may be.

    Raises:
        TypeError: One is no whole number.
        ValueError: One is too low or too high.
    """
    rates = f"give 1 to {_HIGHEST_RATE} samples a second, or None for the file's"
    for name, remedy, least, most in (
        *((name, f"give 1 or more{none}", 1, math.inf) for name, none in others.items()),
        ("rate", rates, 1, _HIGHEST_RATE),
        ("channels", "give 1 or more, or None for the file's", 1, math.inf),
        ("stream", "streams are numbered from 0", 0, math.inf),
    ):
        value = getattr(options, name)
        if value is not None or getattr(type(options), name, 0) is not None:
            object.__setattr__(options, name, whole_number(name, value, remedy, least, most))


class SampleReader:
    """Reads one audio stream of a file into a buffer, which windows are cut from.

    Args:
        path: The file.
        rate: Samples a second to resample to; None leaves the stream's own.
        channels: How many to mix up or down to; None leaves the stream's own.
        start: Where to begin, at the output rate: the number of a sample, or seconds as a float.
        offset: How many samples behind that the first one wanted is.
        stream: Which of the file's audio streams.
        on_corrupt: What is done about data that cannot be decoded, or is missing by the time stamps. `"raise"`: an
            error; `"keep"`: silence takes its place, and damaged frames are as the decoder makes them; `"drop"`: it
            is left out. The latter two decode from the beginning, and take what there is of a file that is cut.

    Attributes:
        rate: Samples a second of what is read.
        channels: How many of what is read.
        start: `start`, as the number of a sample.
        start_seconds: The time stamp of sample 0.
        length: Number of samples in all, at the output rate; None until the end was reached.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no media file, has no such stream, or cannot be decoded or mixed that way.
    """

    def __init__(
        self,
        path: Any,
        *,
        rate: int | None = None,
        channels: int | None = None,
        start: int | float = 0,
        offset: int = 0,
        stream: int = 0,
        on_corrupt: OnCorrupt = "raise",
    ) -> None:
        self._path, self._index, self._on_corrupt = path, stream, on_corrupt
        self._open()
        with closed_on_error(self):
            self._begin(rate, channels, start, offset)

    def _open(self) -> None:
        self._container = open_container(self._path)
        with closed_on_error(self._container):
            self._stream = choose_stream(self._container, "audio", self._index)
        if checks := _CHECKS.get(self._stream.codec_context.name):
            self._stream.codec_context.options = {"err_detect": checks}
        self._packets = self._container.demux(self._stream)
        self._origin: int | None = None  # the time stamp of the first frame
        self._end: tuple[int, int, int] | None = None  # the last time stamp, samples read from there on, and their rate
        self._longest = 0.0  # frame, in seconds
        self._tick_seconds = float(self._stream.time_base or 0)
        self._frames = self._decoded(self._packets)
        self._first = next(self._frames, None)  # tells what the codec's parameters may not

    def _begin(self, rate: int | None, channels: int | None, start: int | float, offset: int) -> None:
        first = self._first if self._first is not None else self._stream.codec_context
        self._input_rate, self._input_channels = int(first.sample_rate), int(first.layout.nb_channels)
        if self._input_rate < 1 or self._input_channels < 1:
            raise ValueError(f"{self._path}: nothing in its audio stream {self._index} can be decoded")
        self._layout = layout_name(first.layout)
        self.rate, self.channels = rate or self._input_rate, channels or self._input_channels
        self.start_seconds = (self._origin or 0) * self._tick_seconds
        self.start = round(start * self.rate) if isinstance(start, float) else int(start)
        self.length: int | None = None
        self._ratio = Fraction(self.rate, self._input_rate)
        self._converter = self._converter_to(self.rate, self.channels)
        input_start, self._skipped = restart(self.start + offset, self._ratio)
        self._pieces = self._pieces_from(input_start)
        self._buffer: Samples = np.empty((self.channels, 1 << 15), np.float32)
        self._head = self._tail = 0
        self._error: Exception | None = None

    def _converter_to(self, rate: int, channels: int) -> Converter:
        try:
            mono_to_layout = layout_name(_Channels(channels))
            rates, counts = (self._input_rate, rate), (self._input_channels, channels)
            return Converter(rates, (self._layout, mono_to_layout), counts)
        except ValueError as error:
            raise ValueError(f"{self._path}: {error}") from error

    def _pieces_from(self, start: int) -> Iterator[Samples]:
        """Decoded pieces from an input sample on, each following on the one before."""
        position = 0
        if start > _SEEK_SECONDS * self._input_rate and self._on_corrupt == "raise" and self._origin is not None:
            sought = self._sought(start)
            if sought is None:  # begin again
                self._container.close()
                self._open()
            else:
                position, self._first, self._frames = sought
        if self._first is not None:
            for piece in self._joined(itertools.chain((self._first,), self._frames)):
                skipped = min(max(0, start - position), piece.shape[1])
                position += piece.shape[1]
                if skipped < piece.shape[1]:
                    yield piece[:, skipped:]
        if self._on_corrupt == "raise":
            read = self._read_in_all(position / self._input_rate)
            check_audio_not_cut(str(self._path), self._container, self._stream, read)
        self.length = output_length(position, self._ratio)

    def _sought(self, start: int) -> tuple[int, Any, Iterator[Any]] | None:
        """The number of an input sample before one, the frame that it begins, and those behind; None if unsure."""
        ticks_a_sample = 1 / (self._stream.time_base * self._input_rate)
        if ticks_a_sample.denominator != 1:
            return None  # time stamps do not tell samples apart
        origin = self._origin or 0
        target = origin + start * int(ticks_a_sample)
        container, codec = self._container.format.name, self._stream.codec_context.name
        frames: Iterator[Any] = iter(())
        if container in _STATELESS_FORMATS and codec.startswith(_STATELESS_CODECS):
            try:
                self._container.seek(target, stream=self._stream)
            except av.error.FFmpegError:
                return None
            self._packets, self._end = self._container.demux(self._stream), None
            frames = self._decoded(self._packets)
        elif container == "mp3" and codec.startswith("mp3"):
            frames = self._mp3_frames(target)
        try:
            first = next(frames, None)
        except ValueError:
            return None  # it may be the seek's fault
        if first is None or first.pts is None:
            return None
        position = (first.pts - origin) / ticks_a_sample
        if position.denominator != 1 or position > start:
            return None
        return int(position), first, frames

    def _mp3_frames(self, target: int) -> Iterator[Any]:
        """Frames from shortly before a time stamp on, decoded as if those before had been; none if unsure."""
        recent: deque[Any] = deque(maxlen=_MP3_PREROLL_PACKETS)
        while not recent or recent[-1].pts + recent[-1].duration <= target:
            packet = self._next_packet(self._packets)
            if packet is None or packet.pts is None or (recent and packet.duration != recent[-1].duration):
                return  # its end, or another rate
            recent.append(packet)
        if len(recent) < _MP3_PREROLL_PACKETS:
            return
        self._stream.codec_context.flush_buffers()
        last = recent.pop()
        for packet in recent:
            try:
                self._stream.decode(packet)
            except av.error.FFmpegError:  # it goes on with data of a packet before the first of these
                continue
        self._end = None
        yield from self._decoded(itertools.chain((last,), self._packets))

    def _next_packet(self, packets: Iterator[Any]) -> Any:
        try:
            return next(packets, None)
        except av.error.FFmpegError as error:
            if self._on_corrupt == "raise":
                raise ValueError(
                    f"{self._place()}: the file cannot be read on ({error.strerror}); it is cut off or damaged"
                ) from error
            return None

    def _decoded(self, packets: Iterator[Any]) -> Iterator[Any]:
        """Frames; what cannot be decoded is an error, or is left out."""
        while (packet := self._next_packet(packets)) is not None:
            if not packet.size and packet.pts is not None:
                continue  # no end of the stream, but a new header for NUT's FLAC
            if packet.is_corrupt and self._container.format.name == "mpegts":  # elsewhere a short last packet is
                self._corrupt("a packet is lost or damaged")
            try:
                frames = self._stream.decode(packet)
            except av.error.FFmpegError as error:
                self._corrupt(f"a packet of {packet.size} bytes cannot be decoded ({error.strerror})")
                continue
            for frame in frames:
                if frame.is_corrupt:
                    self._corrupt("a frame is damaged")
                    if self._on_corrupt == "drop":
                        continue
                if frame.samples:
                    self._origin = frame.pts if self._origin is None else self._origin
                    yield frame

    def _joined(self, frames: Iterator[Any]) -> Iterator[Samples]:
        """Frames as float32 `(C, n)` at the first one's rate and layout, and what is done about gaps."""
        alike: tuple[int, str, int] | None = None
        converter: Converter | None = None
        for frame in frames:
            if (gap := self._gap_before(frame)) > 0:
                self._corrupt(f"the next {gap:.3f} s are missing by the time stamps")
                left = round(gap * self._input_rate) if self._on_corrupt == "keep" else 0
                while left:
                    yield np.zeros((self._input_channels, min(left, _SILENCE_SAMPLES)), np.float32)
                    left -= min(left, _SILENCE_SAMPLES)
            self._longest = max(self._longest, frame.samples / int(frame.sample_rate))
            if frame.pts is not None:
                self._end = frame.pts, frame.samples, int(frame.sample_rate)
            elif self._end is not None:  # it is taken to follow, until the next time stamp
                self._end = self._end[0], self._end[1] + frame.samples, self._end[2]
            try:
                piece = as_float(frame)
            except ValueError as error:
                raise ValueError(f"{self._place()}: {error}") from error
            kind = int(frame.sample_rate), layout_name(frame.layout), len(piece)
            if kind != alike:
                if converter is not None:
                    yield from converter.end()
                first = self._input_rate, self._layout, self._input_channels
                (rate, layout, channels), converter = kind, None
                if kind != first:
                    converter = Converter((rate, first[0]), (layout, first[1]), (channels, first[2]))
                alike = kind
            if converter is None:
                yield piece
            else:
                yield from converter.push(piece)
        if converter is not None:
            yield from converter.end()

    def _gap_before(self, frame: Any) -> float:
        """Seconds that are missing between the frame before and this one; 0 within what time stamps are inexact by."""
        if self._end is None or frame.pts is None:
            return 0.0
        pts, samples, rate = self._end
        inexact = 2 * self._tick_seconds
        gap: float = (frame.pts - pts) * self._tick_seconds - samples / rate
        frame_seconds = frame.samples / int(frame.sample_rate)
        if gap <= max(inexact, frame_seconds / 2):
            return 0.0
        whole: float = round(gap / frame_seconds) * frame_seconds  # lost are whole frames
        return whole if abs(whole - gap) <= inexact else gap

    @property
    def says_how_many(self) -> bool:
        """Whether the format tells the number of samples, so that none at all may be right."""
        return self._container.format.name in _STATELESS_FORMATS[:6]

    def _seconds_read(self) -> float | None:
        """From the first frame to the end of the last one by the time stamps, if they have any."""
        if self._end is None or self._origin is None:
            return None
        pts, samples, rate = self._end
        return (pts - self._origin) * self._tick_seconds + samples / rate

    def _read_in_all(self, decoded_seconds: float) -> ReadAudio | None:
        length = self._seconds_read()
        if length is None or self._origin is None:
            return None
        return ReadAudio(length, max(decoded_seconds, self._origin * self._tick_seconds + length), self._longest)

    def _place(self) -> str:
        seconds = self._seconds_read()
        return f"{self._path}" if seconds is None else f"{self._path}, at {seconds:.3f} s"

    def _corrupt(self, what: str) -> None:
        if self._on_corrupt == "raise":
            place = f"{self._place()}: {what}"
            try:
                check_audio_not_cut(str(self._path), self._container, self._stream, None)
            except ValueError as cut:
                raise ValueError(f"{place}; {cut}") from cut
            raise ValueError(f"{place}; repair the file, or give on_corrupt='keep' (silence there) or 'drop'")

    @property
    def samples(self) -> Samples:
        """What is in the buffer: `(channels, n)`, not to be kept."""
        return self._buffer[:, self._head : self._tail]

    def __len__(self) -> int:
        """How many samples are in the buffer."""
        return self._tail - self._head

    def fill(self, wanted: int) -> None:
        """Read until there are so many samples in the buffer, or to the end.

        Raises:
            ValueError, OSError: What comes next cannot be read; what came before is in the buffer.
        """
        while len(self) < wanted and self.length is None:
            if self._error is not None:
                raise self._error
            try:
                piece = next(self._pieces, None)
            except Exception as error:
                self._error = error
                made = self._converter.flush()
            else:
                made = self._converter.end() if piece is None else self._converter.push(piece)
            for samples in made:
                self._append(samples)

    def _append(self, samples: Samples) -> None:
        count = samples.shape[1]
        skipped = min(self._skipped, count)
        self._skipped -= skipped
        count -= skipped
        if self._tail + count > self._buffer.shape[1]:
            held = self._tail - self._head
            into = self._buffer
            if 2 * (held + count) > into.shape[1]:
                into = np.empty((self.channels, 4 * (held + count)), np.float32)
            into[:, :held] = self._buffer[:, self._head : self._tail]
            self._buffer, self._head, self._tail = into, 0, held
        self._buffer[:, self._tail : self._tail + count] = samples[:, skipped:]
        self._tail += count

    def drop(self, count: int) -> None:
        """Leave out the next samples, whether they were read or not."""
        there = min(count, self._tail - self._head)
        self._head += there
        self._skipped += count - there

    def close(self) -> None:
        """Close the file; also a second time."""
        self._container.close()


class _Channels:
    """So many channels, in no known layout."""

    def __init__(self, count: int) -> None:
        self.nb_channels, self.name = count, f"{count} channels"
