"""Videos by OpenCV's decoder, for machines where it is faster, or the only one that opens a file.

Guarantee: the items are those that `VideoStream` yields with PyAV, except for small differences in scaling and colour.
OpenCV's seeking is not exact, so the frames before the first one wanted are decoded and dropped.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import av.error

from stream_dataloader.streams._media.container import check_not_cut, choose_stream, ffmpeg_path, open_container
from stream_dataloader.streams._media.opencv import import_opencv
from stream_dataloader.streams._media.picture import UPRIGHT, ArrayConverter, Picture, orientation

__all__ = ["CaptureReader"]

cv2 = import_opencv('VideoStream(backend="opencv")')


class CaptureReader:
    """Reads one video's frames by OpenCV, once, in the order of display; otherwise as `FrameReader`."""

    on_corrupt = "raise"

    def __init__(self, path: str) -> None:
        self._path = path
        with open_container(path) as container:  # PyAV says what is wrong with a file; OpenCV does not
            video = choose_stream(container, "video", 0)
            index = video.index_entries if container.format.name.startswith("mov,") else ()
            self._declared = min(video.frames, len(index) or video.frames)  # an edit list may cut some off
            self._upright = UPRIGHT
            with suppress(av.error.FFmpegError):
                for frame in container.decode(video):
                    if frame.interlaced_frame:
                        raise ValueError(f'{path} is interlaced, which OpenCV garbles; use backend="av"')
                    self._upright = orientation(frame)
                    break
        self._capture = cv2.VideoCapture(ffmpeg_path(path), cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, 1])
        if not self._capture.isOpened():
            raise ValueError(f'{path} cannot be opened by OpenCV; use backend="av"')
        self._capture.set(cv2.CAP_PROP_ORIENTATION_AUTO, 0)  # OpenCV turns pictures, but does not mirror them
        self._number = 0  # of the frame that is read next

    def converter(self, picture: Picture) -> ArrayConverter:
        """What writes the frames."""
        return _Converter(picture, self._upright)

    def frames(self, start: int = 0) -> Iterator[_Frame]:
        """The frames from number `start` on, each valid until the next is read."""
        while self._capture.grab():
            self._number += 1
            if self._number > start:
                yield _Frame(self._capture)
        check_not_cut(self._path)
        if self._number < self._declared:
            raise ValueError(
                f"{self._path} is cut off or damaged: it ended after {self._number} frames, and its header declares "
                f"{self._declared}"
            )
        if not self._number:
            raise ValueError(f'{self._path} has no frame that OpenCV can decode; use backend="av", or leave it out')

    def count(self) -> int:
        """The number of frames, once all were read."""
        return self._number

    def close(self) -> None:
        """Close the file."""
        self._capture.release()


class _Frame:
    """A frame that was decoded, and is only converted to BGR if it is wanted."""

    pts = None

    def __init__(self, capture: Any) -> None:
        self._capture = capture

    @functools.cached_property
    def image(self) -> Any:
        return self._capture.retrieve()[1]


class _Converter(ArrayConverter):
    def empty(self, frame: Any) -> Any:
        return super().empty(frame.image)

    def write(self, frame: Any, out: Any) -> None:
        super().write(frame.image, out)
