"""Videos as streams of frames, with PyAV.

Guarantee: item n is the same picture however it is reached. Damage is reported.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real
from types import NoneType
from typing import Any, ClassVar

from stream_dataloader._engine.hints import hinted
from stream_dataloader.errors import DeviceError
from stream_dataloader.streams._media.items import PictureItems
from stream_dataloader.streams._media.limits import DEFAULT
from stream_dataloader.streams._media.picture import AvConverter, FrameOptions
from stream_dataloader.streams._media.section import (
    OnCorrupt,
    Section,
    check_numbers,
    closed_on_error,
    is_section,
    section_of,
    whole_number,
)
from stream_dataloader.streams.cache import FileCache, LocalFile, open_local
from stream_dataloader.streams.video.device import device_of, tell_fallback
from stream_dataloader.streams.video.frames import FrameReader
from stream_dataloader.streams.video.selection import Selection

__all__ = ["OpenVideo", "VideoStream"]


@hinted
@dataclass(frozen=True, kw_only=True)
class VideoStream(FrameOptions):
    """Factory of streams from videos: each frame is an item.

    A source is a path, or `(path, start, stop)` for a section of a video. All files that FFmpeg reads work.
    Frames are turned upright, and converted to RGB by the video's own matrix and range.

    Args:
        size: `(height, width)`; None keeps the size of the first frame.
        layout: `"CHW"` or `"HWC"`.
        color: `"rgb"` or `"gray"`.
        dtype: uint8, 0 to 255, or float32, 0 to 1.
        fit: `"stretch"`, `"letterbox"` or `"crop"`; see `PictureOptions`.
        frame_step: Yield every n-th frame.
        conversion: Conversion from YUV to RGB: `"accurate"`, each value the nearest one; or `"swscale"`, the pixels of
            PyAV's `to_ndarray(format="rgb24")`, bit for bit.
        fps: Resample by time stamps: item n is the frame shown n / fps seconds after the first.
        start: The first frame: an int is its number, a float is seconds after the video's first frame.
        stop: The end (not included), given like `start`; None is the video's end.
        track: Number of the file's video track, from 0.
        with_times: Yield dicts of `frame`, `pts_seconds` (float64, the container's) and `is_key` (bool).
        on_corrupt: Action for damaged frames: `"raise"` an error, `"keep"` them as decoded, or
            `"drop"` them. Only `"raise"` can seek; the others read the undamaged rest of a file.
        device: Decoder: `"cpu"` or None; or `"cuda"` or `"cuda:1"`, an NVIDIA GPU's decoder, into
            host memory, with `on_corrupt="raise"`. Experimental: not yet run on a GPU.
        device_fallback: If the device cannot decode a video, decode it by the CPU and warn once.
        cache: Cache for files from URLs.
        limits: Largest number of pixels of a frame; see `Limits`. None: the defaults.

    Raises:
        ValueError: An option has an invalid value.

    Example:
        >>> from stream_dataloader import StreamDataLoader, StreamDataset
        >>> from stream_dataloader.cli.demo import default_clips
        >>> clips = default_clips()
        >>> dataset = StreamDataset(clips, VideoStream(size=(120, 160)), batch_size=4, time_steps=16)
        >>> next(iter(StreamDataLoader(dataset))).data.shape
        torch.Size([16, 4, 3, 120, 160])
    """

    open_early: ClassVar[bool] = True  # streams share nothing but an index in a locked cache

    frame_step: int = 1
    fps: float | Fraction | None = None
    start: int | float = 0
    stop: int | float | None = None
    track: int = 0
    with_times: bool = False
    on_corrupt: OnCorrupt = "raise"
    device: Any = None
    device_fallback: bool = False
    cache: FileCache | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, frame_step=("give 1 for every frame, or more", 1), track=("tracks are numbered from 0", 0))
        if self.fps is not None and not (isinstance(self.fps, Real) and 0 < self.fps < math.inf):
            raise ValueError(f"fps is {self.fps!r}; give a rate above 0, or None for the video's own frames")
        _, start, stop = section_of(("", self.start, self.stop))
        object.__setattr__(self, "start", start)
        object.__setattr__(self, "stop", stop)
        if not isinstance(self.cache, (FileCache, NoneType)):
            raise TypeError(f"cache is {self.cache!r}; give a FileCache, or None")
        object.__setattr__(self, "device", device_of(self.device))
        if self.device is not None and self.on_corrupt != "raise":
            raise ValueError(f"on_corrupt is {self.on_corrupt!r}, and a device does not tell what is damaged")

    def __call__(self, source: Any, *, start: int = 0) -> Any:
        """Open one video at item `start`, counted from the source's first item.

        Raises:
            OSError: The file cannot be read.
            ValueError: The file is not a video, or lacks the track.
        """
        whole_number("start", start, "give the number of the first item wanted", 0)
        local, selection = self.open(source)
        with closed_on_error(local):
            return OpenVideo(self, selection, start, local)

    def length(self, source: Any) -> int | None:
        """Return the number of items, counted from packets, or None if it is not known."""
        if self.on_corrupt != "raise":
            return None
        local, selection = self.open(source)
        with local, closing(FrameReader(local.path, self.track)) as reader:
            return selection.length(reader)

    def open(self, source: Any) -> tuple[LocalFile, Selection]:
        """Return the local file, and the selection of its frames that are the source's items."""
        section = section_of(source)
        if not is_section(source):
            section = Section(section.path, self.start, self.stop)
        local = open_local(section.path, self.cache)
        section = section._replace(path=local.path)
        return local, Selection(section, self.frame_step, None if self.fps is None else Fraction(self.fps))


class OpenVideo(PictureItems):
    """Stream of an open video; `selection` is a `Selection`, or an object with `section` and `frames`."""

    def __init__(self, options: VideoStream, selection: Any, start: int, local: LocalFile) -> None:
        self._local = local
        self._options, self._selection = options, selection
        self.reader = self._opened()
        chosen = selection.frames(self.reader, start)
        by_device = options.device is not None and options.device_fallback
        self._chosen = self._or_by_cpu(chosen, start) if by_device else chosen
        aspect = float(self.reader.stream.sample_aspect_ratio or 1)
        super().__init__(self._chosen, AvConverter(options.picture, aspect))
        if options.size is None and start:
            self._set_size()

    def _opened(self, *, by_cpu: bool = False) -> FrameReader:
        options, path = self._options, self._selection.section.path
        device = None if by_cpu else options.device
        try:
            reader = FrameReader(path, options.track, options.on_corrupt, device, options.limits)
        except DeviceError as error:
            if not options.device_fallback:
                raise
            tell_fallback(error)
            return self._opened(by_cpu=True)
        with closed_on_error(reader):
            context = reader.stream.codec_context
            (options.limits or DEFAULT).check_picture(context.width or 0, context.height or 0, str(path))
        return reader

    def _or_by_cpu(self, frames: Iterator[Any], start: int) -> Generator[tuple[Any, Any], None, None]:
        read = 0
        try:
            for item in frames:
                yield item
                read += 1
            return
        except DeviceError as error:
            tell_fallback(error)
        self.reader.close()
        self.reader = self._opened(by_cpu=True)
        yield from self._selection.frames(self.reader, start + read)

    def _set_size(self) -> None:
        """Set the size to that of the source's first frame, wherever reading begins."""
        with closing(self._opened(by_cpu=True)) as reader:
            for frame, _ in self._selection.frames(reader):
                self._converter.empty(frame)
                break

    def beside(self, frame: Any, moment: Any) -> dict[str, Any]:  # noqa: ARG002 - of `AudioVisualStream`
        """Return the time of the frame, and whether it is a key frame, if `with_times` is set."""
        if not self._options.with_times:
            return {}
        return {"pts_seconds": self.reader.seconds(frame), "is_key": bool(frame.key_frame)}

    def close(self) -> None:
        self._chosen.close()
        self.reader.close()
        self._local.close()
