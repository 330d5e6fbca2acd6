"""Cameras of an episode: the frame of each row, and its picture.

Rows have the times of their frames, counted from the start of the episode::

    file's frames     0    1    2    3    4    5    6    7    (at n / fps, or nearly)
    episode                     |<- begin     end ->|
    rows' timestamps            0.0  0.1  0.2  0.3

Guarantee: a row gets the frame of its episode that is nearest to its time, within the tolerance,
and no two rows share a frame; otherwise an error is raised. Each frame is decoded once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.files import inside
from stream_dataloader.stores.lerobot.tables import EpisodeVideo
from stream_dataloader.streams._media.items import PictureItems
from stream_dataloader.streams._media.opencv import decoded_image
from stream_dataloader.streams._media.picture import ArrayConverter, Picture
from stream_dataloader.streams._media.section import Section
from stream_dataloader.streams.cache import open_local
from stream_dataloader.streams.video.frame_index import frame_index, path_and_version
from stream_dataloader.streams.video.frames import FrameReader
from stream_dataloader.streams.video.stream import OpenVideo, VideoStream

__all__ = ["Camera", "frames_of_rows", "image_pictures", "video_pictures"]


class Camera:
    """Pictures of an episode by row."""

    def __init__(self, name: str, pictures: Callable[[int], Any]) -> None:
        self._name = name
        self._pictures = pictures
        self._opened: Any = None
        self._items: Iterator[Any] = iter(())
        self._row = 0

    def row(self, row: int) -> Any:
        with self._named(row):
            self._open_at(row)
            picture = next(self._items)
        self._row += 1
        return picture

    def read(self, row: int, out: Any) -> None:
        done = 0
        while done < len(out):
            with self._named(row + done):
                self._open_at(row + done)
                count = self._opened.read_into(out[done:])
                if not count:
                    raise ValueError("it ends here")
            done += count
            self._row += count

    def _open_at(self, row: int) -> None:
        if self._opened is None or self._row != row:
            self.close()
            self._opened = self._pictures(row)
            self._items = iter(self._opened)
            self._row = row

    @contextmanager
    def _named(self, row: int) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, StopIteration) as error:
            self.close()
            what = str(error).split("; use on_corrupt", maxsplit=1)[0] or "it ends here"
            raise _kind(error)(f"{self._name}, step {row}: {what}; download it again") from error

    def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()


def _kind(error: BaseException) -> type[Exception]:
    """Return the type of error to raise: `StoreError`, unless the disk failed."""
    if isinstance(error, FileNotFoundError):
        return StoreError
    return OSError if isinstance(error, OSError) else StoreError


@functools.lru_cache(maxsize=16)
def _shown(path: str, _version: tuple[int, int, int]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    ticks = frame_index(path).times
    if ticks is None:
        raise StoreError(f"{path} does not tell when its frames are shown; encode it again")
    with closing(FrameReader(path)) as reader:
        base = reader.stream.time_base
    return ticks, ticks * base.numerator / base.denominator


def frames_of_rows(
    seconds: NDArray[np.float64],
    video: EpisodeVideo,
    timestamps: NDArray[Any],
    fps: float,
    tolerance: float,
    name: str,
) -> NDArray[np.int64]:
    """Return the number of each row's frame, given the times of all frames."""
    rows = len(timestamps)
    slack = 0.5 / fps
    borders = video.begin - slack, video.end - slack
    first, stop = map(int, np.searchsorted(seconds, borders))
    if stop - first < rows:
        where = f"from {video.begin:.3f} s to {video.end:.3f} s of {video.path}"
        raise StoreError(f"{name}: its video has {stop - first} frames ({where}), and its table {rows} rows")
    wanted = video.begin + timestamps.astype(np.float64)
    after = np.clip(np.searchsorted(seconds, wanted), 0, len(seconds) - 1)
    before = np.maximum(after - 1, 0)
    later = seconds[after] - wanted < wanted - seconds[before]
    frames = np.where(later, after, before)
    away = np.abs(seconds[frames] - wanted)
    if len(far := np.flatnonzero(~(away <= tolerance))):  # also true for NaN
        row = int(far[0])
        nearest = f"the nearest frame at {seconds[frames[row]]:.4f} s; tolerance_s is {tolerance:.4f} s"
        raise StoreError(f"{name}, step {row}: it is at {wanted[row]:.4f} s of {video.path}, {nearest}")
    if frames[0] < first or frames[-1] >= stop or (np.diff(frames) <= 0).any():
        what = f"{name}: its timestamps take frames {frames[0]} to {frames[-1]} of {video.path}"
        raise StoreError(f"{what}, not each another one of its own, {first} to {stop - 1}")
    return frames.astype(np.int64)


class _RowFrames(NamedTuple):
    """Frames of an episode's rows; takes the place of a `Selection`."""

    section: Section
    frames_of: NDArray[np.int64]
    ticks: NDArray[np.int64]

    def frames(self, reader: FrameReader, start: int = 0) -> Generator[tuple[Any, Any], None, None]:
        numbers, ticks = self.frames_of[start:].tolist(), self.ticks[start:].tolist()
        if not numbers:
            return
        row = 0
        for number, frame in enumerate(reader.frames(numbers[0]), numbers[0]):
            if number < numbers[row]:
                continue
            if frame.pts != ticks[row]:
                what = f"frame {number} of {self.section.path}"
                raise ValueError(f"{what} is shown at {frame.pts}, not at {ticks[row]}")
            yield frame, ticks[row]
            row += 1
            if row == len(numbers):
                return


def video_pictures(
    options: VideoStream,
    video: EpisodeVideo,
    timestamps: NDArray[Any],
    fps: float,
    tolerance: float,
    name: str,
) -> Callable[[int], Any]:
    """Return a function that opens an episode's frames from a row on."""
    try:
        ticks, seconds = _shown(*path_and_version(video.path))
    except (OSError, ValueError) as error:
        raise _kind(error)(f"{name}: {error}; download it again") from error
    frames = frames_of_rows(seconds, video, timestamps, fps, tolerance, name)
    chosen = _RowFrames(Section(video.path), frames, ticks[frames])
    return lambda row: OpenVideo(options, chosen, row, open_local(video.path))


class _Images(PictureItems):
    def close(self) -> None:
        self._frames.close()  # type: ignore[attr-defined]


def image_pictures(
    images: Callable[[], Iterator[dict[str, Any]]],
    folder: str,
    picture: Picture,
    name: str,
) -> Callable[[int], Any]:
    """Return a function like that of `video_pictures`, for pictures in a table."""

    def decoded(encoded: dict[str, Any]) -> Any:
        data, path = encoded.get("bytes"), encoded.get("path")
        if data is None and path is not None:
            with open(inside(folder, path, name), "rb") as file:
                data = file.read()
        if not isinstance(data, bytes) or not data:
            raise ValueError("there is no picture")
        is_gray = picture.color == "gray"
        image = decoded_image(data, "the picture", gray=is_gray, deep=picture.deep, limits=picture.limits)
        if picture.deep and image.dtype != np.uint16:
            raise ValueError(f"it is a depth map of {image.dtype}, not of 16 bits")
        return image

    def frames(row: int, converter: ArrayConverter) -> Iterator[tuple[Any, None]]:
        for number, encoded in enumerate(images()):
            if number >= row:
                yield decoded(encoded), None
            elif not number and picture.size is None:
                converter.empty(decoded(encoded))

    def opened(row: int) -> _Images:
        converter = ArrayConverter(picture)
        return _Images(frames(row, converter), converter)

    return opened
