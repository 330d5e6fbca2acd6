"""Length of a file's audio, from its headers and from its frames' time stamps.

Guarantee: a file that was cut off is detected by its declared length, by the end of its index (MP4), segment (Matroska)
or last page (Ogg), or by its track's duration.
"""

from __future__ import annotations

import os
import re
from fractions import Fraction
from typing import Any

from stream_dataloader.streams._media.container import check_not_cut
from stream_dataloader.streams._media.extent import riff_end, sample_bytes

__all__ = ["FrameClock", "check_audio_not_cut", "declared_samples"]

#: Containers whose headers count samples and are right unless they say zero.
_COUNTING = ("wav", "w64", "caf", "aiff", "au", "flac")
_OGG_PAGE_BYTES = 65307  # the longest page: 27 + 255 + 255 * 255 (RFC 3533, 6)
_PRIMING_SECONDS = 0.1  # counted by some muxers, but not decoded: Opus has up to 80 ms (RFC 7845, 4.6)
_TOLERATED_SECONDS = 0.02  # allowed difference of time stamps and samples: half a frame of video at 25 a second
_LONGEST_OVERLAP_SECONDS = 1  # a clock that jumps back further was reset


class FrameClock:
    """Comparison of frames' time stamps, in units of `tick_seconds`, with the number of samples read.

    Time stamps are not compared with the frame before: small errors would add up, and sound would drift away from the
    picture.
    """

    def __init__(self, tick_seconds: Fraction) -> None:
        self._tick_seconds = tick_seconds
        self._end: Fraction | None = None  # end of the samples read so far; None after a seek
        self._rate = 0  # rate of the first frame
        self.longest_seconds = 0.0  # duration of the longest frame
        self.origin: int | None = None  # the first frame's time stamp
        self.wrong_at: float | None = None  # start of the last gap or overlap

    @property
    def origin_seconds(self) -> float:
        """Time stamp of the first frame in seconds; 0 if it has none."""
        return (self.origin or 0) * float(self._tick_seconds)

    def jump(self) -> None:
        """Forget the samples read so far, because the reader has jumped to another place."""
        self._end = None

    def add(self, frame: Any) -> int:
        """Count a frame; return the number of samples missing before it, at the first frame's rate.

        A negative number counts samples that the frame repeats.
        """
        seconds, before = Fraction(frame.samples, int(frame.sample_rate)), self._end
        self._rate = self._rate or int(frame.sample_rate)
        self.longest_seconds = max(self.longest_seconds, float(seconds))
        if frame.pts is None:  # the frame follows directly
            self._end = None if before is None else before + seconds
            return 0
        time = frame.pts * self._tick_seconds
        error = Fraction(0) if before is None else time - before
        # A clock that starts again, as in joined files, says nothing about repeated samples.
        if before is None or error < -_LONGEST_OVERLAP_SECONDS or (error < 0 and frame.pts <= (self.origin or 0)):
            self._end = time + seconds
            return 0
        inexact = 2 * self._tick_seconds
        if abs(error) <= max(inexact, min(self.longest_seconds / 2, _TOLERATED_SECONDS)):
            self._end = before + seconds
            return 0
        self.wrong_at = float(before) - self.origin_seconds
        # Packets are lost as a whole, so the size of frames is more exact than coarse time stamps.
        whole = round(error / seconds) * seconds
        wrong = round((whole if whole and abs(whole - error) <= inexact else error) * self._rate)
        self._end = before + Fraction(wrong, self._rate) + seconds
        return wrong

    def seconds_read(self) -> float | None:
        """Return the seconds from the first frame to the end of the last one, or None without time stamps."""
        return None if self._end is None or self.origin is None else float(self._end) - self.origin_seconds


def declared_samples(path: str, container: Any, stream: Any) -> int | None:
    """Return the number of samples at the track's rate, or None if no header has the exact number."""
    duration, time_base, context = stream.duration, stream.time_base, stream.codec_context
    if container.format.name not in _COUNTING or not duration or not time_base:
        return None
    if container.format.name == "wav" and os.path.getsize(path) >= 1 << 32:
        return None  # its 32-bit sizes may have overflowed
    with open(path, "rb") as file:
        if container.format.name == "wav" and riff_end(file.read(64)) is None:
            return None
    if not (context.name.startswith("pcm_") or context.name == "flac"):
        return None
    if container.format.name in ("w64", "caf") and context.name.startswith("pcm_"):
        if (size := sample_bytes(path)) is None:
            return None
        bits = re.search(r"\d+", context.name)  # none in the names of A-law and mu-law
        return size // (int(bits[0]) // 8 if bits else 1) // int(context.layout.nb_channels)
    samples = Fraction(duration) * time_base * context.sample_rate
    return int(samples) if samples.denominator == 1 else None


def check_audio_not_cut(
    path: str, container: Any, stream: Any, clock: FrameClock | None = None, decoded_seconds: float = 0.0
) -> None:
    """Raise if audio is shorter than its file declares."""
    check_not_cut(path)
    name = container.format.name
    if name == "ogg" and (last := _ogg_end(path)) is not None and last > (size := os.path.getsize(path)):
        raise ValueError(f"{path} is cut off: it has {size} bytes, and its last page ends at {last}")
    found = None if clock is None else clock.seconds_read()
    if clock is None or found is None:
        return
    rate = stream.codec_context.sample_rate
    if (declared := _end_seconds(container, stream)) is not None:
        # The first is larger in joined files, the other in files that start late.
        found = max(decoded_seconds, clock.origin_seconds + found)
        tolerated = 2 * clock.longest_seconds + _PRIMING_SECONDS
    elif (samples := declared_samples(path, container, stream)) is not None:
        declared, tolerated = samples / rate, 0.5 / rate
        if name == "flac" and decoded_seconds - declared > tolerated:  # joined: the length would be that of the first
            what = f"its audio lasts {decoded_seconds:.3f} s, and its header declares {declared:.3f} s"
            raise ValueError(f"{path} is longer than its header says: {what}; decode it, and encode it again")
    elif name == "mp3" and stream.duration and _has_xing_header(path):
        declared, tolerated = float(stream.duration * stream.time_base), 3 * 1152 / rate
    else:
        return
    if declared - found > tolerated:
        what = f"its audio was read up to {found:.3f} s, and its header declares {declared:.3f} s"
        raise ValueError(f"{path} is cut off or damaged: {what}; repair it, or give on_corrupt='keep' or 'drop'")


def _end_seconds(container: Any, stream: Any) -> float | None:
    """Return the end of the audio according to the file's metadata."""
    name = container.format.name
    if name == "ogg" and stream.duration:
        return float(stream.duration * stream.time_base)
    if name == "matroska,webm":
        found = re.fullmatch(r"(\d+):(\d\d):(\d\d(?:\.\d+)?)", stream.metadata.get("DURATION", ""))
        return 3600 * int(found[1]) + 60 * int(found[2]) + float(found[3]) if found else None
    return None


def _ogg_end(path: str) -> int | None:
    """Return the byte after the last page of an Ogg file (RFC 3533)."""
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - 2 * _OGG_PAGE_BYTES))
        begin, tail = file.tell(), file.read()
    page = tail.rfind(b"OggS\0")
    if page < 0:
        return None
    lacing = tail[page + 27 :]
    segments = tail[page + 26] if page + 26 < len(tail) else 0
    return begin + page + 27 + segments + sum(lacing[:segments])


def _has_xing_header(path: str) -> bool:
    """Return True if an MP3 declares its number of frames. Otherwise FFmpeg guesses it."""
    with open(path, "rb") as file:
        head = file.read(10)
        tag = 0
        if head[:3] == b"ID3" and len(head) == 10:
            tag = 10 + sum((byte & 127) << 7 * (3 - i) for i, byte in enumerate(head[6:]))
        file.seek(tag)
        frame = file.read(4096)
    return any(name in frame for name in (b"Xing", b"Info", b"VBRI"))
