"""Index of the times of a video's frames, read from its packets and cached.

Guarantee: the n-th entry is the time stamp of the n-th frame that decoding an intact file gives. The index is read from
packets if three things hold: their bits say how many frames each holds (`pictures`), decoding times rise, and each key
frame is shown after all frames before it. Otherwise the file is decoded once. If the times of its frames do not rise,
only their number is known.
"""

from __future__ import annotations

import functools
import itertools
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import av
import av.error
import numpy as np
from numpy.typing import NDArray

from stream_dataloader.streams._media.container import choose_stream, open_container
from stream_dataloader.streams._media.section import file_version
from stream_dataloader.streams.cache import FileCache, keep_tables, kept_tables, open_local
from stream_dataloader.streams.video.first_key import from_first_key, is_key_picture
from stream_dataloader.streams.video.pictures import Shown, inspector
from stream_dataloader.streams.video.untimed import UntimedClock

__all__ = ["FrameIndex", "FrameTimes", "frame_index", "index_by_decoding", "path_and_version", "segment_videos"]

#: Time stamps of all frames in the order of display; None if the container has none, or if they do not rise.
FrameTimes = NDArray[np.int64] | None

_RULES = 4  # version of the rules for an index: a cached index with another version is not used


class FrameIndex(NamedTuple):
    """Times and number of a video's frames, and the key frames at which decoding may begin.

    `keys` has rows of time stamp and fingerprint, sorted. A fingerprint of -1 matches no packet. `total` is None if
    nothing is known.
    """

    times: FrameTimes
    keys: NDArray[np.int64]
    total: int | None

    def key_before(self, time: int) -> int | None:
        """Return the time stamp of the last key frame that is shown at or before a time."""
        found = int(np.searchsorted(self.keys[:, 0], time, side="right"))
        return int(self.keys[found - 1, 0]) if found else None

    def has_key(self, packet: Any) -> bool:
        """Return True if a packet is a key frame of this index."""
        first, behind = np.searchsorted(self.keys[:, 0], (packet.pts, packet.pts + 1))
        return bool((self.keys[first:behind, 1] == _fingerprint(packet)).any())


_NOTHING_KNOWN = FrameIndex(None, np.empty((0, 2), np.int64), None)


def frame_index(path: str, stream: int = 0) -> FrameIndex:
    """Return the index of one of a file's video tracks."""
    return _remembered(*path_and_version(path), stream)


def index_by_decoding(path: str, stream: int = 0) -> FrameIndex:
    """Make the index again by decoding all frames, because packets and frames disagreed."""
    name = _kept_name(*path_and_version(path), stream)
    found = _decoded(path, stream)
    _keep(name, found)
    _remembered.cache_clear()
    return found


def path_and_version(path: str) -> tuple[str, tuple[int, int, int]]:
    """Return a file's absolute path, and what changes with the file."""
    return os.path.abspath(path), file_version(os.stat(path))


def _kept_name(path: str, version: tuple[int, int, int], stream: int) -> str:
    decoders = ".".join(map(str, av.library_versions["libavcodec"]))
    return f"{path}\0{version}\0{stream}\0{_RULES}\0{decoders}"


@functools.lru_cache(maxsize=64)
def _remembered(path: str, version: tuple[int, int, int], stream: int) -> FrameIndex:
    name = _kept_name(path, version, stream)
    if (known := kept_tables("probes", name)) is not None and "keys" in known:
        total = known.get("total")
        return FrameIndex(known.get("times"), known["keys"], None if total is None else int(total))
    found = _scan(path, stream)
    _keep(name, found)
    return found


def _keep(name: str, found: FrameIndex) -> None:
    keep_tables("probes", name, {field: value for field, value in found._asdict().items() if value is not None})


def _fingerprint(packet: Any) -> int:
    """Return a number made from the size and the checksum of a packet."""
    return (int(packet.size) & 0x7FFFFFFF) << 32 | zlib.crc32(packet)


def _scan(path: str, stream: int) -> FrameIndex:
    """Read all packets from the first key frame on."""
    packets = _Packets()
    with open_container(path) as container:
        video = choose_stream(container, "video", stream)
        untimed = UntimedClock.of(container, video)
        # In program streams FFmpeg's times depend on the place where it begins to read.
        exact = container.format.name != "mpeg"
        look = inspector(video)
        sure = look is not None
        try:
            found = from_first_key(path, stream, _readings(container, video, path, stream))
            for packet in found if look is not None else ():
                assert look is not None
                if not (sure := packets.add(packet, look.look(packet), timed=untimed is None)):
                    break
                if untimed is not None:
                    untimed.add(packet)
        except av.error.FFmpegError:  # the index ends here; reading the frames reports the damage
            pass
        sure = sure and look is not None and not look.waits
    if not sure:
        return _decoded(path, stream)
    return packets.index(untimed, exact=exact)


def _readings(container: Any, video: Any, path: str, stream: int) -> Callable[[], Iterator[Any]]:
    """Return a function that reads the packets of an open container, and at its second call those of the file anew."""

    def packets() -> Iterator[Any]:
        yield (packet for packet in container.demux(video) if packet.size)
        with open_container(path) as again:
            yield (packet for packet in again.demux(choose_stream(again, "video", stream)) if packet.size)

    return functools.partial(next, packets())


class _Packets:
    """Collector of the times of frames from packets in order, as long as these are certain."""

    def __init__(self) -> None:
        self._times: list[int] = []
        self._keys: list[tuple[int, int]] = []
        self._first_key: int | None = None
        self._latest: int | None = None  # latest time at which a frame so far is shown
        self._decoded_at: int | None = None
        self._count = 0

    def add(self, packet: Any, shown: Shown, *, timed: bool) -> bool:
        """Add a packet; return whether the times are still certain."""
        frames, key, found = shown
        if not found:  # a damaged packet counts as a frame; reading the frames reports it
            frames = 1
        if frames is None:
            return False
        if not timed:
            self._count += frames
            return True
        if frames > 1 or (frames and packet.pts is None):
            return False
        if packet.dts is not None:
            if self._decoded_at is not None and packet.dts < self._decoded_at:
                return False  # the clock jumps back: files were joined
            self._decoded_at = packet.dts
        if self._first_key is None:
            if packet.is_keyframe and not key:
                return False
            self._first_key = packet.pts
        if not frames:
            return True
        if key:
            if self._latest is not None and packet.pts <= self._latest:
                return False
            self._keys.append((packet.pts, _fingerprint(packet)))
        self._latest = packet.pts if self._latest is None else max(packet.pts, self._latest)
        if not packet.is_discard and packet.pts >= self._first_key:  # an edit list cuts off frames that others refer to
            self._times.append(packet.pts)
        return True

    def index(self, untimed: UntimedClock | None, *, exact: bool) -> FrameIndex:
        if untimed is not None:
            times = np.array([untimed.next() for _ in range(self._count)], np.int64)
            return FrameIndex(times if _rise(times) else None, _NOTHING_KNOWN.keys, self._count)
        times = np.sort(np.array(self._times, np.int64))
        if not _rise(times):
            return FrameIndex(None, _NOTHING_KNOWN.keys, len(times))
        keys = self._keys
        if not exact:
            alike = Counter(fingerprint for _, fingerprint in keys)
            keys = [(time, fingerprint if alike[fingerprint] == 1 else -1) for time, fingerprint in keys]
        return FrameIndex(times, np.array(keys, np.int64).reshape(-1, 2), len(times))


def _rise(times: NDArray[np.int64]) -> bool:
    return bool((np.diff(times) > 0).all())


def _decoded(path: str, stream: int) -> FrameIndex:
    """Decode all frames for the index. Of a damaged file nothing is known."""
    times: list[int | None] = []
    fingerprints: dict[int, int] = {}
    keys: list[tuple[int, int]] = []
    with open_container(path) as container:
        video = choose_stream(container, "video", stream)
        untimed = UntimedClock.of(container, video)
        first_key: Any = None
        try:
            packets = from_first_key(path, stream, _readings(container, video, path, stream))
            for packet in itertools.chain(packets, (None,)):
                first_key = packet if first_key is None else first_key
                if untimed is not None and packet is not None:
                    untimed.add(packet)
                if packet is not None and packet.is_keyframe and packet.pts is not None:
                    fingerprints[packet.pts] = _fingerprint(packet)
                for frame in video.decode(packet) if first_key is not None else ():
                    if frame.is_corrupt:
                        return _NOTHING_KNOWN
                    time = frame.pts if untimed is None else untimed.next()
                    if not times and None not in (time, first_key.pts) and time < first_key.pts and untimed is None:
                        continue  # the frame refers to frames before the first key frame
                    times.append(time)
                    if is_key_picture(frame) and time in fingerprints:
                        keys.append((time, fingerprints[time]))
        except av.error.EOFError:
            pass
        except av.error.FFmpegError:
            return _NOTHING_KNOWN
    if None in times or not _rise(shown := np.array(times, np.int64)):
        return FrameIndex(None, _NOTHING_KNOWN.keys, len(times))
    if untimed is not None:
        return FrameIndex(shown, _NOTHING_KNOWN.keys, len(times))
    return FrameIndex(shown, np.array(keys, np.int64).reshape(-1, 2), len(times))


def segment_videos(
    paths: Iterable[Any], *, max_frames: int, track: int = 0, progress: bool = True, cache: FileCache | None = None
) -> list[tuple[str, int, int]]:
    """Cut long videos into sections of at most `max_frames` frames, of nearly equal length.

    Args:
        paths: The files.
        max_frames: Largest number of frames of a section.
        track: Number of the files' video track, from 0.
        progress: Show a progress bar.
        cache: Cache for files from URLs; None is the cache that all streams share.

    Returns:
        `(path, start, stop)` for each section, in order: sources for `VideoStream`.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file is not a video, or its frames cannot be counted; or `max_frames` is not positive.
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
            return frame_index(local.path, track).times

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        found: Iterable[FrameTimes] = pool.map(times_of, paths)
        if progress:
            found = tqdm(found, total=len(paths), desc="counting frames", unit="video")
        for path, times in zip(paths, found, strict=True):
            if times is None:
                raise ValueError(
                    f"{path} does not tell when its frames are shown, or its clock jumps back; leave it whole"
                )
            pieces = -(-len(times) // max_frames)
            borders = [len(times) * piece // pieces for piece in range(pieces + 1)] if pieces else []
            sections += [(path, start, stop) for start, stop in itertools.pairwise(borders)]
    return sections
