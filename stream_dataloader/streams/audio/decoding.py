"""Decoder of an audio track, from its beginning or from any sample.

Guarantee: the samples after a seek are, bit for bit, those of reading from the beginning::

    codec             state from earlier data          to start at a sample
    PCM, FLAC, ALAC   none                             seek, if time stamps count samples
    MP3               511 bytes and two frames         read all packets before, decode the last 128
    all others        noise and filters                decode all packets before

Samples are counted without the decoder's priming and without the padding that the file declares.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any

import av.error
import numpy as np

from stream_dataloader.streams._media.container import choose_stream, open_container
from stream_dataloader.streams._media.section import OnCorrupt, closed_on_error
from stream_dataloader.streams.audio.headers import FrameClock, check_audio_not_cut
from stream_dataloader.streams.audio.resample import Converter, Samples, as_float, layout_name

__all__ = ["AudioDecoder"]

#: Containers whose time stamps count samples.
_COUNTING_FORMATS = ("wav", "w64", "aiff", "au", "caf", "flac")

#: Codecs whose decoder may begin at any packet.
_STATELESS_FORMATS = (*_COUNTING_FORMATS, "mov,mp4,m4a,3gp,3g2,mj2")
_STATELESS_CODECS = ("flac", "alac", "pcm_")

#: Codecs whose checksums FFmpeg checks only with an option.
_CHECKS = {"flac": "crccheck+explode", "wavpack": "crccheck", "tta": "crccheck"}

#: An MP3 frame may need 255 bytes of the frames before it, each of which may hold as few as 3 of these bytes.
_MP3_PREROLL_PACKETS = 128

#: A nearer sample is reached by decoding up to it, which is faster than a seek.
_SEEK_SECONDS = 1.0

#: The longest piece of silence that replaces missing samples.
_SILENCE_SAMPLES = 65536


class AudioDecoder:
    """Decoder of one audio track to float32 pieces with the rate and channels of its first frame."""

    def __init__(self, path: Any, stream: int, on_corrupt: OnCorrupt) -> None:
        self._path = path
        self._index = stream
        self._on_corrupt = on_corrupt
        self._open()
        with closed_on_error(self):
            # The first frame has values that the codec's parameters may lack.
            first = self._first if self._first is not None else self._stream.codec_context
            self.rate, self.channels = int(first.sample_rate), int(first.layout.nb_channels)
            if self.rate < 1 or self.channels < 1:
                raise ValueError(f"{self._path}: nothing in its audio track {self._index} can be decoded")
            self._own = self.rate, first.layout.name, self.channels
            self.layout = layout_name(self.channels, first.layout.name)
            self.start_seconds = self._clock.origin_seconds  # of sample 0

    def _open(self) -> None:
        self._container = open_container(self._path)
        with closed_on_error(self._container):
            self._stream = choose_stream(self._container, "audio", self._index)
            if checks := _CHECKS.get(self._stream.codec_context.name):
                self._stream.codec_context.options = {"err_detect": checks}
            self._packets = self._container.demux(self._stream)
            self._clock = FrameClock(Fraction(self._stream.time_base or 0))
            self._frame_bytes: dict[bytes, int] = {}  # of MPEG audio, by the header
            self._frames = self._decoded(self._packets)
            self._first = next(self._frames, None)

    def seek(self, start: int) -> int:
        """Go to sample `start`, or to one before it; return its number."""
        # With damaged data left out, the n-th sample is found by decoding from the beginning.
        if start <= _SEEK_SECONDS * self.rate or self._on_corrupt != "raise" or self._clock.origin is None:
            return 0
        try:
            sought = self._sought(start, self._clock.origin)
        except (av.error.FFmpegError, ValueError):  # reading from the beginning reports the damage at its place
            sought = None
        if sought is None:
            self._container.close()
            self._open()
            return 0
        position, self._first, self._frames = sought
        return position

    def check_not_cut(self, decoded_seconds: float) -> None:
        """Check at the end that the file had audio, and as much as it declares."""
        check_audio_not_cut(str(self._path), self._container, self._stream, self._clock, decoded_seconds)
        if not decoded_seconds and self._container.format.name not in _COUNTING_FORMATS:
            raise ValueError(f"{self._path}: its audio track {self._index} has no sample that can be decoded")

    def pieces(self) -> Iterator[Samples]:
        """Yield consecutive pieces `(C, n)`, beginning with the sample that `seek` returned."""
        if self._first is None:
            return
        latest = self._own  # the kind of the frame before
        converter: Converter | None = None
        missing = 0  # number of missing samples by the time stamps; if negative, samples still to cut
        for frame in itertools.chain((self._first,), self._frames):
            if wrong := self._clock.add(frame):
                what = "are missing" if wrong > 0 else "were given already"
                self._corrupt(
                    f"the next {abs(wrong) / self.rate:.3f} s {what} by the time stamps", self._clock.wrong_at
                )
                if wrong < 0 or self._on_corrupt == "keep":
                    missing += wrong
                    yield from self._silence(missing)
                    missing = min(0, missing)
            try:
                piece = as_float(frame)
            except ValueError as error:
                raise ValueError(f"{self._place()}: {error}") from error
            made: Iterable[Samples] = ()
            kind = frame.sample_rate, frame.layout.name, len(piece)
            if kind != latest:  # rate or channels change in mid-stream, as in broadcasts
                if converter is not None:
                    made = converter.end()
                layouts = layout_name(kind[2], kind[1]), self.layout
                rates, channels = (kind[0], self.rate), (kind[2], self.channels)
                converter = None if kind == self._own else Converter(rates, layouts, channels)
                latest = kind
            for samples in itertools.chain(made, (piece,) if converter is None else converter.push(piece)):
                cut = min(-missing, samples.shape[1])
                missing += cut
                yield samples[:, cut:] if cut else samples
        if converter is not None:
            yield from converter.end()

    def _silence(self, count: int) -> Iterator[Samples]:
        for begin in range(0, count, _SILENCE_SAMPLES):
            yield np.zeros((self.channels, min(count - begin, _SILENCE_SAMPLES)), np.float32)

    def _sought(self, start: int, origin: int) -> tuple[int, Any, Iterator[Any]] | None:
        """Seek; return a sample at or before `start`, its frame, and the frames after it, or None if this is unsure."""
        ticks_a_sample = 1 / (self._stream.time_base * self.rate)
        if ticks_a_sample.denominator != 1:
            return None  # time stamps are coarser than samples
        target = origin + start * int(ticks_a_sample)
        container, codec = self._container.format.name, self._stream.codec_context.name
        if container in _STATELESS_FORMATS and codec.startswith(_STATELESS_CODECS):
            self._container.seek(target, stream=self._stream)
            self._packets = self._container.demux(self._stream)
            self._clock.jump()
            frames = self._decoded(self._packets)
        elif container == "mp3" and codec.startswith("mp3"):
            frames = self._mp3_frames(target)
        else:
            return None
        first = next(frames, None)
        if first is None or first.pts is None:
            return None
        position = (first.pts - origin) / ticks_a_sample
        return (int(position), first, frames) if position.denominator == 1 and position <= start else None

    def _mp3_frames(self, target: int) -> Iterator[Any]:
        """Yield the frames from shortly before a time stamp, or none if this is unsure."""
        recent: deque[Any] = deque(maxlen=_MP3_PREROLL_PACKETS)
        while not recent or recent[-1].pts + recent[-1].duration <= target:
            packet = self._next_packet(self._packets)
            if packet is None or packet.pts is None or (recent and packet.duration != recent[-1].duration):
                return  # the end, or another rate
            recent.append(packet)
        if len(recent) < _MP3_PREROLL_PACKETS:
            return
        self._stream.codec_context.flush_buffers()
        last = recent.pop()
        for packet in recent:
            try:
                self._stream.decode(packet)
            except av.error.FFmpegError:  # it needs bytes of a packet before these
                continue
        self._clock.jump()
        yield from self._decoded(itertools.chain((last,), self._packets))

    def _next_packet(self, packets: Iterator[Any]) -> Any:
        try:
            packet = next(packets, None)
        except av.error.FFmpegError as error:
            if self._on_corrupt == "raise":
                what = f"the file cannot be read on ({error.strerror})"
                raise ValueError(f"{self._place()}: {what}; it is cut off or damaged") from error
            return None
        if self._container.format.name == "mp3" and packet is not None and packet.size > 3:
            # The header alone decides the size of a frame (ISO/IEC 11172-3, 2.4.1.3).
            header = bytes(memoryview(packet)[1:3])
            if packet.size < self._frame_bytes.setdefault(header, packet.size):
                self._corrupt(f"it is cut off within a frame, after {packet.size} bytes")
        return packet

    def _decoded(self, packets: Iterator[Any]) -> Iterator[Any]:
        """Yield decoded frames. Data that cannot be decoded raise an error, or are left out."""
        while (packet := self._next_packet(packets)) is not None:
            if not packet.size and packet.pts is not None:
                continue  # a new header, as NUT has for FLAC; the decoder would take it for the end
            # In other containers the flag may only mean that the last packet is short.
            if packet.is_corrupt and self._container.format.name == "mpegts":
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
                    if self._clock.origin is None:
                        self._clock.origin = frame.pts
                    yield frame

    def _place(self, read: float | None = None) -> str:
        read = self._clock.seconds_read() if read is None else read
        return str(self._path) if read is None else f"{self._path}, at {read:.3f} s"

    def _corrupt(self, what: str, read: float | None = None) -> None:
        if self._on_corrupt == "raise":
            what = f"{self._place(read)}: {what}"
            try:
                check_audio_not_cut(str(self._path), self._container, self._stream)
            except ValueError as cut:
                raise ValueError(f"{what}; {cut}") from cut
            raise ValueError(f"{what}; repair the file, or give on_corrupt='keep' or 'drop'")

    def close(self) -> None:
        self._container.close()
