"""When each frame of a video is shown: found by reading its packets without decoding them, and remembered.

Guarantee: the n-th entry is the time stamp of the n-th frame that a decoder yields from an intact file, whatever
the container and however irregular the times. What was found is kept in memory and on disk under the file's path,
size and time of change, so that a changed file is looked at anew.

Counting packets takes 4 to 6 microseconds a frame, 100 times less than decoding; `stream.frames` is 0 for
Matroska and MPEG-TS, and wrong for truncated files.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import av.error
import numpy as np
from numpy.typing import NDArray

from stream_dataloader.streams._media.container import choose_stream, open_container, ticks_of_untimed
from stream_dataloader.streams.cache.file_cache import FileCache, cache_directory, open_local

__all__ = ["FrameTimes", "frame_times", "segment_videos"]

_VERSION = 2  # of the files; raise it when what they hold changes
_KNOWN, _UNKNOWN = b"+", b"-"  # what such a file begins with: time stamps follow, or there are none

#: Time stamps of all frames in the order they are shown, in units of the stream's time base; None if the
#: container does not tell.
FrameTimes = NDArray[np.int64] | None


def frame_times(path: str, stream: int = 0) -> FrameTimes:
    """The time stamps of a video's frames.

    Args:
        path: The file.
        stream: Which of its video streams.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no video, or has no such stream.
    """
    status = os.stat(path)
    return _remembered(os.path.abspath(path), status.st_size, status.st_mtime_ns, stream)


@functools.lru_cache(maxsize=64)
def _remembered(path: str, size: int, changed: int, stream: int) -> FrameTimes:
    key = f"{_VERSION}\0{path}\0{size}\0{changed}\0{stream}".encode("utf-8", "surrogateescape")
    file = Path(cache_directory("probes")) / f"{hashlib.blake2b(key, digest_size=16).hexdigest()}.times"
    try:
        kept = file.read_bytes()
        if kept[:1] not in (_UNKNOWN, _KNOWN) or len(kept) % 8 != 1:
            raise ValueError("damaged")
    except (OSError, ValueError):
        found = _scan(path, stream)
        kept = _UNKNOWN if found is None else _KNOWN + found.astype("<i8").tobytes()
        _keep(file, kept)
    return None if kept[:1] == _UNKNOWN else np.frombuffer(kept, "<i8", offset=1).astype(np.int64)


def _keep(file: Path, content: bytes) -> None:
    """Write all of it under another name first. A cache that cannot be written to is no error."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, suffix=".tmp", delete=False) as unfinished:
            try:
                unfinished.write(content)
                unfinished.flush()
                os.replace(unfinished.name, file)
            except OSError:
                os.unlink(unfinished.name)
    except OSError:
        pass


def _scan(path: str, stream: int) -> FrameTimes:
    """Read all packets. Frames before the first key frame cannot be decoded and do not count."""
    found: list[int] = []
    first_key: int | None = None
    with open_container(path) as container:
        video = choose_stream(container, "video", stream)
        ticks = ticks_of_untimed(container, video)
        try:
            for packet in container.demux(video):
                if not packet.size:
                    continue
                time = packet.pts if ticks is None else round(len(found) * ticks)
                if time is None:
                    return None
                if first_key is None and packet.is_keyframe:
                    first_key = time
                if not packet.is_discard:  # decoded for others, but cut off by an edit list
                    found.append(time)
        except av.error.FFmpegError:  # as far as it can be read; reading the frames tells the rest
            pass
    times = np.sort(np.array(found, np.int64))
    if first_key is not None and ticks is None:
        times = times[times >= first_key]
    return times if (np.diff(times) > 0).all() else None


def segment_videos(
    paths: Iterable[Any], *, max_frames: int, stream: int = 0, progress: bool = True, cache: FileCache | None = None
) -> list[tuple[str, int, int]]:
    """Cut long videos into sections of at most `max_frames` frames, of nearly the same length, to be used as sources.

    Many sections keep all lanes busy to the end where a few files are much longer than the others. Frames are
    counted once and remembered; several files are counted at a time.

    Args:
        paths: The files.
        max_frames: The most frames of a section.
        stream: Which of their video streams, from 0.
        progress: Show a progress bar.
        cache: Where files that are given as URLs are kept; None is the cache of all streams.

    Returns:
        `(path, start, stop)` for each section, in order; what `VideoStream` takes as sources.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file is no video, has no such stream, or cannot be counted; or `max_frames` is not positive.
    """
    from tqdm import tqdm

    if max_frames < 1:
        raise ValueError(f"max_frames is {max_frames}; give 1 or more")
    if isinstance(paths, (str, os.PathLike)):
        raise TypeError(f"paths is {paths!r}, a single path; give a list of them")
    paths = [os.fspath(path) for path in paths]
    sections: list[tuple[str, int, int]] = []

    def times_of(path: str) -> FrameTimes:
        with open_local(path, cache) as local:
            return frame_times(local.path, stream)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        found: Iterable[FrameTimes] = pool.map(times_of, paths)
        if progress:
            found = tqdm(found, total=len(paths), desc="counting frames", unit="video")
        for path, times in zip(paths, found, strict=True):
            if times is None:
                raise ValueError(
                    f"{path} does not tell when its frames are shown, so they cannot be counted; leave it whole"
                )
            pieces = -(-len(times) // max_frames)
            borders = [len(times) * piece // pieces for piece in range(pieces + 1)] if pieces else []
            sections += [(path, start, stop) for start, stop in itertools.pairwise(borders)]
    return sections
