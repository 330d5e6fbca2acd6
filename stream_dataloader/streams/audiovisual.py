"""Videos with their sound: each frame with the samples that belong to it.

Guarantee: picture and sound stay in step by the container's own time stamps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np

from stream_dataloader._engine.hints import hinted
from stream_dataloader.streams._media.container import frame_rate
from stream_dataloader.streams._media.section import OnCorrupt, check_numbers, closed_on_error
from stream_dataloader.streams.audio.resample import Samples
from stream_dataloader.streams.audio.stream import AudioStream, SampleReader
from stream_dataloader.streams.cache import LocalFile
from stream_dataloader.streams.video.selection import Selection
from stream_dataloader.streams.video.stream import OpenVideo, VideoStream

__all__ = ["AudioVisualStream"]


@hinted
@dataclass(frozen=True, kw_only=True)
class AudioVisualStream:
    """Factory of streams from videos with sound: dicts of a `frame` and its `audio`, float32 `(channels, samples)`.

    Sources are those of `VideoStream`. Before an audio track begins and after its end, samples are silence.

    Args:
        video: Options for the frames; `with_times` adds `pts_seconds` and `is_key`. A frame's samples
            begin at its time stamp, or at n / fps with `fps`.
        rate: Samples per second; None keeps the file's own rate.
        channels: 1 mixes to mono; None keeps the file's own channels.
        samples: Samples per frame. None takes the rounded number that fits between two frames, so some samples may be
            left out or repeated. Files of different rates need `samples`, or `fps` in `video`.
        track: Number of the file's audio track, from 0.

    Raises:
        ValueError: An option has an invalid value.
    """

    _yields_steps: ClassVar[bool] = True
    open_early: ClassVar[bool] = True  # because this holds for video and audio

    video: VideoStream = field(default_factory=VideoStream)
    rate: int | None = None
    channels: int | None = None
    samples: int | None = None
    track: int = 0

    def __post_init__(self) -> None:
        check_numbers(self, samples=("give 1 or more, or None for as many as fit between two frames", 1))
        self._audio()

    def _audio(self) -> AudioStream:
        """Options for the sound."""
        # Dropped samples would move all later sound away from its picture.
        corrupt: OnCorrupt = "raise" if self.video.on_corrupt == "raise" else "keep"
        return AudioStream(
            window=1,
            rate=self.rate,
            channels=self.channels,
            track=self.track,
            on_corrupt=corrupt,
            limits=self.video.limits,
        )

    def __call__(self, source: Any, *, start: int = 0) -> Any:
        """Open one video at item `start`, counted from the source's first item.

        Raises:
            OSError: The file cannot be read.
            ValueError: The file is not a video, lacks a track, or ends before the source's start.
        """
        local, selection = self.video.open(source)
        with closed_on_error(local):
            return _OpenAudioVisual(self, selection, start, local)

    def length(self, source: Any) -> int | None:
        """Return the number of items, which is the number of frames; see `VideoStream.length`."""
        return self.video.length(source)


class _OpenAudioVisual(OpenVideo):
    """Stream of an open video with its sound."""

    def __init__(self, options: AudioVisualStream, selection: Selection, start: int, local: LocalFile) -> None:
        super().__init__(options.video, selection, start, local)
        with closed_on_error(self):
            self._sound = _Sound(selection.section.path, options._audio())
        rate = selection.fps or frame_rate(self.reader.stream)
        a_frame = self._sound.rate * selection.frame_step / rate
        self._count = options.samples or max(1, round(a_frame))

    def beside(self, frame: Any, moment: Any) -> dict[str, Any]:
        """Return the samples that begin with the frame, and the frame's times."""
        seconds = Fraction(moment) * Fraction(self.reader.stream.time_base)
        return {"audio": self._sound.at(seconds, self._count), **super().beside(frame, moment)}

    def close(self) -> None:
        super().close()
        if hasattr(self, "_sound"):
            self._sound.close()


class _Sound:
    """Samples of a file by the container's time, read in ascending order."""

    def __init__(self, path: str, options: AudioStream) -> None:
        self._path, self._options = path, options
        self._reader = SampleReader(path, options)
        self._begun = False
        self.rate = self._reader.rate
        self._position = 0  # number of the reader's next sample

    def at(self, seconds: Fraction, count: int) -> Samples:
        first = math.floor((seconds - Fraction(self._reader.start_seconds)) * self.rate + Fraction(1, 2))
        if not self._begun and first > self.rate:  # worth a seek
            self._reader.close()
            self._reader, self._position = SampleReader(self._path, self._options, first), first
        self._begun = True
        found: Samples = np.zeros((self._reader.channels, count), np.float32)
        silent = min(count, max(0, -first))  # before the track begins
        if first > self._position:
            self._reader.drop(first - self._position)
            self._position = first
        wanted = count - silent
        held = self._reader.fill(wanted)
        if held < wanted and self._reader.error is not None:
            raise self._reader.error
        found[:, silent : silent + held] = self._reader.samples[:, :held]
        return found

    def close(self) -> None:
        self._reader.close()
