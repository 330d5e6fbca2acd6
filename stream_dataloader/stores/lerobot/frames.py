"""The cameras of an episode: which frame belongs to which row, and one camera's pictures, in order.

A video holds several episodes end to end. An episode's rows say when their frames are shown, counted from where the
episode begins in the video; the file's packets say when each frame is shown. So frames are found without decoding::

    file's frames      0     1     2     3     4     5     6     7         (shown at n / fps, or nearly)
    episode                        |<- begin         end ->|
    rows' timestamps               0.0   0.1   0.2   0.3

Guarantee: the frame of a row is the one shown nearest to the row's time, within the tolerance, in the episode's own
part of the video, and another one for each row; or there is an error. Each frame is decoded once.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.files import inside
from stream_dataloader.stores.lerobot.episodes import EpisodeVideo
from stream_dataloader.streams._media.picture import ArrayConverter, Picture
from stream_dataloader.streams._media.section import Section
from stream_dataloader.streams._media.still import decoded_image
from stream_dataloader.streams.cache.file_cache import open_local
from stream_dataloader.streams.video.frame_index import frame_index
from stream_dataloader.streams.video.frames import FrameReader
from stream_dataloader.streams.video.stream import OpenVideo, VideoStream

__all__ = ["Camera", "frames_of_rows", "image_pictures", "video_pictures"]


class Camera:
    """The pictures of an episode by row; reading on costs no seek.

    Args:
        name: For errors.
        pictures: Opens those from a row on: an iterable, with `read_into` and `close`.
    """

    def __init__(self, name: str, pictures: Callable[[int], Any]) -> None:
        self._name = name
        self._pictures = pictures
        self._opened: Any = None
        self._items: Iterator[Any] = iter(())
        self._row = 0

    def item(self, row: int) -> Any:
        """The picture of a row."""
        try:
            self._at(row)
            picture = next(self._items)
        except (OSError, ValueError, StopIteration) as error:
            raise self._error(row, error) from error
        self._row += 1
        return picture

    def read(self, row: int, out: Any) -> None:
        """Write the pictures of rows `[row, row + len(out))` to `out`."""
        done = 0
        while done < len(out):
            try:
                count = self._at(row + done).read_into(out[done:])
                if not count:
                    raise ValueError("it ends here")
            except (OSError, ValueError, StopIteration) as error:
                raise self._error(row + done, error) from error
            done += count
            self._row += count

    def _at(self, row: int) -> Any:
        if self._opened is None or self._row != row:
            self.close()
            self._opened = self._pictures(row)
            self._items = iter(self._opened)
            self._row = row
        return self._opened

    def _error(self, row: int, error: BaseException) -> Exception:
        self.close()
        what = str(error).split("; use on_corrupt", maxsplit=1)[0] or "it ends here"
        return _kind(error)(f"{self._name}, step {row}: {what}; download it anew, or leave the episode out")

    def close(self) -> None:
        """Close the file; the next picture opens it again."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()


def _kind(error: BaseException) -> type[Exception]:
    """What becomes of an error: the dataset is damaged, unless the disk is."""
    return OSError if isinstance(error, OSError) and not isinstance(error, FileNotFoundError) else StoreError


class _Shown(NamedTuple):
    """When the frames of a video are shown: in the stream's time base, and in seconds."""

    ticks: NDArray[np.int64]
    seconds: NDArray[np.float64]


def _shown(path: str) -> _Shown:
    status = os.stat(path)
    return _remembered(os.path.abspath(path), status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=16)
def _remembered(path: str, _size: int, _changed: int) -> _Shown:
    ticks = frame_index(path).times
    if ticks is None:
        raise StoreError(f"{path} does not tell when its frames are shown; encode it anew")
    with closing(FrameReader(path)) as reader:
        base = reader.stream.time_base
    return _Shown(ticks, ticks * base.numerator / base.denominator)


def frames_of_rows(
    seconds: NDArray[np.float64], video: EpisodeVideo, timestamps: NDArray[Any], fps: float, tolerance: float, name: str
) -> NDArray[np.int64]:
    """Which frame of a video, whose frames are shown at `seconds`, each row of an episode has: numbers, ascending."""
    rows = len(timestamps)
    slack = 0.5 / fps
    first, stop = map(int, np.searchsorted(seconds, (video.begin - slack, video.end - slack)))
    if stop - first < rows:
        until = "on" if video.end == np.inf else f"to {video.end:.3f} s"
        raise StoreError(
            f"{name}: its video has {stop - first} frames (from {video.begin:.3f} s {until} of {video.path}), and its "
            f"table {rows} rows: it is damaged or unfinished; download it anew"
        )
    wanted = video.begin + timestamps.astype(np.float64)
    after = np.clip(np.searchsorted(seconds, wanted), 1, len(seconds) - 1) if len(seconds) > 1 else np.ones(rows, int)
    before = after - 1
    later = seconds[np.minimum(after, len(seconds) - 1)] - wanted < wanted - seconds[before]
    frames = np.where(later, np.minimum(after, len(seconds) - 1), before)
    away = np.abs(seconds[frames] - wanted)
    if len(far := np.flatnonzero(~(away <= tolerance))):  # also if it is NaN
        row = int(far[0])
        raise StoreError(
            f"{name}, step {row}: it is at {wanted[row]:.4f} s of {video.path}, and the nearest frame is shown at "
            f"{seconds[frames[row]]:.4f} s, further away than {tolerance:.4f} s; a larger tolerance_s would take it"
        )
    if frames[0] < first or frames[-1] >= stop or (np.diff(frames) <= 0).any():
        raise StoreError(
            f"{name}: {rows} rows take frames {frames[0]} to {frames[-1]} of {video.path}, not each another one of the "
            f"episode's own, {first} to {stop - 1}; their timestamps are wrong"
        )
    return frames.astype(np.int64)


class _RowFrames(NamedTuple):
    """The frames of an episode's rows; as `video.selection.Selection` has them."""

    section: Section
    frames_of: NDArray[np.int64]
    ticks: NDArray[np.int64]

    def frames(self, reader: FrameReader, start: int = 0) -> Generator[tuple[Any, Any], None, None]:
        """From row `start` on, each with its time stamp."""
        rows = list(zip(self.frames_of[start:].tolist(), self.ticks[start:].tolist(), strict=True))
        if not rows:
            return
        wanted = iter(rows)
        number, ticks = next(wanted)
        for found, frame in enumerate(reader.frames(number), number):
            if found < number:
                continue
            if frame.pts != ticks:
                raise ValueError(f"frame {found} of {self.section.path} is shown at {frame.pts}, not at {ticks}")
            yield frame, ticks
            following = next(wanted, None)
            if following is None:
                return
            number, ticks = following


def video_pictures(
    options: VideoStream, video: EpisodeVideo, timestamps: NDArray[Any], fps: float, tolerance: float, name: str
) -> Callable[[int], Any]:
    """Find the frames of an episode; what is returned opens them from a row on."""
    try:
        shown = _shown(video.path)
    except (OSError, ValueError) as error:
        raise _kind(error)(f"{name}: {error}; download it anew") from error
    frames = frames_of_rows(shown.seconds, video, timestamps, fps, tolerance, name)
    chosen = _RowFrames(Section(video.path), frames, shown.ticks[frames])
    return lambda row: OpenVideo(options, chosen, row, open_local(video.path))


class _ImagePictures:
    """A camera's pictures in a table, encoded, from some row on."""

    def __init__(self, images: Iterator[dict[str, Any]], folder: str, picture: Picture, row: int, name: str) -> None:
        self._images = images
        self._folder = folder
        self._name = name
        self._converter = ArrayConverter(picture)
        for passed in range(row):
            image = next(images)
            if not passed and picture.size is None:  # the size is the first one's
                self._converter.empty(self._decoded(image))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        image = self._decoded(next(self._images))
        out = self._converter.empty(image)
        self._converter.write(image, out)
        return out

    def read_into(self, out: Any) -> int:
        """Write the next one to `out`."""
        self._converter.write(self._decoded(next(self._images)), out[0])
        return 1

    def _decoded(self, encoded: dict[str, Any]) -> Any:
        data, path = encoded.get("bytes"), encoded.get("path")
        if data is None and path is not None:
            with open(inside(self._folder, path, self._name), "rb") as file:
                data = file.read()
        if not isinstance(data, bytes) or not data:
            raise ValueError("there is no picture")
        return decoded_image(data, "the picture")

    def close(self) -> None:
        self._images.close()  # type: ignore[attr-defined]


def image_pictures(
    images: Callable[[], Iterator[dict[str, Any]]], folder: str, picture: Picture, name: str
) -> Callable[[int], Any]:
    """Pictures that lie in a table, encoded; what is returned opens them from a row on."""
    return lambda row: _ImagePictures(images(), folder, picture, row, name)
