"""Live cameras and network video, by PyAV or OpenCV, as endless streams.

Guarantee: each frame has its time of arrival and the number of frames left out before it.
"""

from __future__ import annotations

import functools
import math
import os
import stat
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

import numpy as np

from stream_dataloader._engine.hints import hinted
from stream_dataloader.streams._media.items import PictureItems
from stream_dataloader.streams._media.opencv import check_opencv, import_opencv
from stream_dataloader.streams._media.picture import ArrayConverter, AvConverter, FrameOptions
from stream_dataloader.streams._media.section import check_numbers, closed_on_error
from stream_dataloader.streams.camera.live import Frame, LiveReader, av_frames, opencv_frames

__all__ = ["CameraStream"]

#: Values of an item beside its picture.
_NUMBERS: dict[str, type[Any]] = {
    **dict.fromkeys(("time_seconds", "pts_seconds"), np.float64),
    **dict.fromkeys(("dropped", "lost", "connection"), np.int64),
}


@hinted
@dataclass(frozen=True, kw_only=True)
class CameraStream(FrameOptions):
    """Factory of streams from live cameras and network video.

    A source is a camera's index (0, 1, ...), its device (`"/dev/video0"`), or a URL that FFmpeg
    reads: `rtsp://`, `http(s)://` (MPEG-TS, MJPEG, ...), `udp://`, `rtmp://`, ... Give the dataset
    `deterministic=False`, because cameras cannot be paused, and use as many workers as cameras. A worker
    with several cameras reads them in turn, `time_steps` frames each, so `buffer_frames` must not be less.

    An item is a dict:

    - `frame`: `(3, H, W)` uint8, or as the options say
    - `time_seconds`: float64, time of arrival by `time.time`
    - `pts_seconds`: float64, the stream's own time stamp; NaN if it has none (MJPEG, OpenCV)
    - `dropped`: int64, number of frames dropped since the item before because the reader was too slow
    - `lost`: int64, number of frames that did not arrive, by gaps in the time stamps, or were damaged
    - `connection`: int64, number of reconnections so far

    Attributes:
        size: `(height, width)` in pixels; None keeps the size of the first frame.
        layout: `"CHW"`, channels first, or `"HWC"`.
        color: `"rgb"`, or `"gray"`: one channel.
        dtype: `"uint8"`, 0 to 255, or `"float32"`, 0 to 1.
        fit: `"stretch"`, `"letterbox"` or `"crop"`; see `PictureOptions`.
        conversion: `"accurate"` or `"swscale"`, as for `VideoStream`; PyAV only.
        backend: `"av"` or `"opencv"`; None is PyAV for URLs and OpenCV for devices.
        items: `"dict"`, see above, or `"frame"`: the frame alone.
        fps: Largest number of frames per second, evenly spaced; others do not count as `dropped`. None: all.
        keep: If frames arrive too fast, `"latest"` drops the oldest, and `"all"` makes the sender
            wait if it can (TCP).
        buffer_frames: Largest number of decoded frames that wait to be read.
        on_corrupt: `"keep"` delivers damaged frames, `"drop"` counts them as `lost`; PyAV only.
        timeout_seconds: Longest wait for a connection or a frame.
        reconnect_tries: Number of consecutive tries to reconnect a lost camera; None: no limit.
        reconnect_seconds: First and longest wait before a try; each wait is twice the one before.
        options: Options of FFmpeg, such as `{"rtsp_transport": "udp"}` (tcp by default); PyAV only.

    Raises:
        ImportError: The backend is OpenCV, which is not installed.
        ValueError: An option has an invalid value.
    """

    backend: Literal["av", "opencv"] | None = None
    items: Literal["dict", "frame"] = "dict"
    fps: float | None = None
    keep: Literal["latest", "all"] = "latest"
    buffer_frames: int = 4
    on_corrupt: Literal["keep", "drop"] = "keep"
    timeout_seconds: float = 5.0
    reconnect_tries: int | None = 10
    reconnect_seconds: tuple[float, float] = (0.5, 30.0)
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fps is not None and not 0 < self.fps < math.inf:
            raise ValueError(f"fps is {self.fps}; it must be above 0, or None for all frames")
        if not 0 < self.timeout_seconds < math.inf:
            raise ValueError(f"timeout_seconds is {self.timeout_seconds}; it must be above 0")
        check_numbers(self, buffer_frames=("give 1 or more", 1))
        if self.reconnect_tries is not None:
            check_numbers(self, reconnect_tries=("give 0 or more, or None for no limit", 0))
        waits = tuple(self.reconnect_seconds)
        if len(waits) != 2 or not 0 < waits[0] <= waits[1]:
            raise ValueError(f"reconnect_seconds is {waits}; give (first wait, longest wait), both above 0")
        if self.options and self.backend == "opencv":
            raise ValueError("options are for PyAV, and backend is 'opencv'; leave one of them out")
        if self.conversion == "swscale" and self.backend == "opencv":
            raise ValueError('conversion is for PyAV, and backend is "opencv"; leave one of them out')
        if self.backend == "opencv":
            check_opencv('CameraStream(backend="opencv")')

    def __call__(self, source: Any, *, start: int = 0) -> _Live:  # noqa: ARG002 - frames of the past are gone
        """Connect to one camera, and wait for its first frame.

        Raises:
            OSError: The camera cannot be reached, or no frame arrived in time.
            ValueError: The source is a file.
            TypeError: The source is neither an index nor an address.
        """
        address, name, is_url = _address(source)
        converter: AvConverter | ArrayConverter
        if self.backend == "opencv" or (self.backend is None and not is_url):
            import_opencv("CameraStream with an index or a device, unless backend is 'av',")
            converter, connect = ArrayConverter(self.picture), functools.partial(opencv_frames, address)
        else:
            path = f"/dev/video{address}" if isinstance(address, int) else address
            converter, connect = AvConverter(self.picture), functools.partial(av_frames, path)
        reader = LiveReader(name, connect, self)
        with closed_on_error(reader):
            reader.wait()
        return _Live(reader, converter, self.items == "dict")


class _Live(PictureItems):
    """Stream of frames as they arrive."""

    def __init__(self, reader: LiveReader, converter: AvConverter | ArrayConverter, dicts: bool) -> None:
        super().__init__(reader.frames(), converter, at_once=1)
        self._dicts = dicts
        self.close = weakref.finalize(self, reader.close)

    def beside(self, frame: Any, moment: Frame) -> dict[str, Any]:  # noqa: ARG002 - of other kinds of pictures
        return {name: kind(getattr(moment, name)) for name, kind in _NUMBERS.items()} if self._dicts else {}


def _address(source: Any) -> tuple[int | str, str, bool]:
    """Return a camera's index, device or URL, its name without a password, and whether it is a URL."""
    if isinstance(source, (int, np.integer)) and not isinstance(source, bool):
        if source < 0:
            raise ValueError(f"a camera's index is 0 or more, and this is {source}")
        return int(source), f"camera {source}", False
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(f"a camera is an index, a device or a URL, and this is {source!r}")
    address = os.fspath(source)
    if "://" in address:
        password = urlsplit(address).password
        return address, address.replace(f":{password}@", ":***@") if password else address, True
    if not stat.S_ISCHR(os.stat(address).st_mode):
        raise ValueError(f"{address} is no camera; files are read by VideoStream")
    return address, address, False
