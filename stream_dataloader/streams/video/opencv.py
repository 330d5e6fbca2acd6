"""Videos by OpenCV's decoder, for machines where it is faster, or the only one that opens a file.

Guarantee: the items are those that `VideoStream` yields with PyAV, except for small differences in scaling and colour.
OpenCV's seeking is not exact, so the frames before the first one wanted are decoded and dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import av.error

from stream_dataloader.streams._media.container import check_not_cut, choose_stream, ffmpeg_path, open_container
from stream_dataloader.streams._media.opencv import import_opencv
from stream_dataloader.streams._media.picture import UPRIGHT, ArrayConverter, Picture, orientation
from stream_dataloader.streams.cache.file_cache import LocalFile
from stream_dataloader.streams.video.selection import Selection

__all__ = ["CapturedVideo"]

cv2 = import_opencv('VideoStream(backend="opencv")')


class CapturedVideo:
    """A video that OpenCV reads; a `protocols.ReadsInto`.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no video.
    """

    def __init__(self, picture: Picture, selection: Selection, start: int, local: LocalFile) -> None:
        section = selection.section
        self._path = section.path
        self._step = selection.frame_step
        with open_container(self._path) as container:  # PyAV says what is wrong with a file; OpenCV does not
            video = choose_stream(container, "video", 0)
            index = video.index_entries if container.format.name.startswith("mov,") else ()
            self._declared = min(video.frames, len(index) or video.frames)  # an edit list may cut some off
            upright = UPRIGHT
            with suppress(av.error.FFmpegError):
                for frame in container.decode(video):
                    if frame.interlaced_frame:
                        raise ValueError(f'{self._path} is interlaced, which OpenCV garbles; use backend="av"')
                    upright = orientation(frame)
                    break
        self._capture = cv2.VideoCapture(ffmpeg_path(self._path), cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, 1])
        if not self._capture.isOpened():
            raise ValueError(f'{self._path} cannot be opened by OpenCV; use backend="av"')
        self._capture.set(cv2.CAP_PROP_ORIENTATION_AUTO, 0)  # OpenCV turns pictures, but does not mirror them
        self._first = section.start
        self._stop = section.stop
        self._local = local
        self._number = 0  # of the frame that is read next
        self._wanted = section.start + start * self._step
        self._converter = ArrayConverter(picture, upright)

    def _next(self) -> Any:
        """The next picture wanted; None at the end."""
        if self._stop is not None and self._wanted >= self._stop:
            return None
        while self._number < self._wanted:
            if not self._capture.grab():
                return self._ended()
            if self._number == self._first:  # the source's first frame decides the size, if none was asked for
                self._converter.empty(self._capture.retrieve()[1])
            self._number += 1
        read, image = self._capture.read()
        if not read:
            return self._ended()
        self._number += 1
        self._wanted += self._step
        return image

    def _ended(self) -> None:
        check_not_cut(self._path)
        if self._number < self._declared:
            raise ValueError(
                f"{self._path} is cut off or damaged: it ended after {self._number} frames, and its header declares "
                f"{self._declared}"
            )
        if not self._number:
            raise ValueError(f'{self._path} has no frame that OpenCV can decode; use backend="av", or leave it out')
        if self._number < self._first or (self._stop is not None and self._number < self._stop):
            until = "its end" if self._stop is None else self._stop
            raise ValueError(
                f"frames {self._first} to {until} of {self._path} were asked for, and it has {self._number}"
            )

    def __iter__(self) -> Iterator[Any]:
        while (image := self._next()) is not None:
            picture = self._converter.empty(image)
            self._converter.write(image, picture)
            yield picture

    def read_into(self, out: Any) -> int:
        """Write the next frames to `out`; see `protocols.ReadsInto`."""
        for count in range(len(out)):
            try:
                image = self._next()
            except ValueError:
                if not count:
                    raise
                return count  # the next call finds the same end
            if image is None:
                return count
            self._converter.write(image, out[count])
        return len(out)

    def close(self) -> None:
        """Close the file."""
        self._capture.release()
        self._local.close()
