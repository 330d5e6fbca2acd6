"""When each frame of a video is shown: read from its packets, and kept.

Guarantee: the n-th entry is the time stamp of the n-th frame that is decoded of an intact file.
"""

from __future__ import annotations

import functools
import itertools
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import av.error
import numpy as np
from numpy.typing import NDArray

from stream_dataloader.streams._media.container import choose_stream, open_container, ticks_of_untimed
from stream_dataloader.streams.cache import FileCache, keep_tables, kept_tables, open_local

__all__ = ["FrameIndex", "FrameTimes", "frame_index", "segment_videos"]

#: Time stamps of all frames in the order of display; None if the container has none.
FrameTimes = NDArray[np.int64] | None

_SLICE, _IDR, _SEI = 1, 5, 6  # nal_unit_type (ITU-T H.264, table 7-1)
_RECOVERY_POINT = 6  # payloadType (annex D.1.1)


class FrameIndex(NamedTuple):
    """The times of a video's frames, and the key frames from which decoding may begin.

    `keys` has rows of time stamp and fingerprint, sorted. A fingerprint of -1 matches no packet.
    """

    times: FrameTimes
    keys: NDArray[np.int64]

    def key_before(self, time: int) -> int | None:
        """The time stamp of the last key frame that is shown at a time or before."""
        found = int(np.searchsorted(self.keys[:, 0], time, side="right"))
        return int(self.keys[found - 1, 0]) if found else None

    def has_key(self, packet: Any) -> bool:
        """Whether a packet is a key frame of this index."""
        first, behind = np.searchsorted(self.keys[:, 0], (packet.pts, packet.pts + 1))
        return bool((self.keys[first:behind, 1] == _fingerprint(packet)).any())


_NOTHING_KNOWN = FrameIndex(None, np.empty((0, 2), np.int64))


def frame_index(path: str, stream: int = 0) -> FrameIndex:
    """The index of one of a file's video streams."""
    status = os.stat(path)
    return _remembered(os.path.abspath(path), status.st_size, status.st_mtime_ns, stream)


@functools.lru_cache(maxsize=64)
def _remembered(path: str, size: int, changed: int, stream: int) -> FrameIndex:
    name = f"{path}\0{size}\0{changed}\0{stream}"
    if (known := kept_tables("probes", name)) is not None and "keys" in known:
        return FrameIndex(known.get("times"), known["keys"])
    found = _scan(path, stream)
    keep_tables("probes", name, {"keys": found.keys, **({} if found.times is None else {"times": found.times})})
    return found


def _fingerprint(packet: Any) -> int:
    """Size and checksum of what a packet holds."""
    return (int(packet.size) & 0x7FFFFFFF) << 32 | zlib.crc32(packet)


def _scan(path: str, stream: int) -> FrameIndex:
    """Read all packets. Frames before the first key frame cannot be decoded."""
    found: list[int] = []
    keys: list[tuple[int, int]] = []
    first_key: int | None = None
    with open_container(path) as container:
        video = choose_stream(container, "video", stream)
        ticks = ticks_of_untimed(container, video)
        # In program streams FFmpeg's times depend on where it begins to read.
        exact = container.format.name != "mpeg"
        refreshed = video.codec_context.name == "h264"
        try:
            for packet in container.demux(video):
                if not packet.size:
                    continue
                time = packet.pts if ticks is None else round(len(found) * ticks)
                if time is None:
                    return _NOTHING_KNOWN
                if packet.is_keyframe:
                    first_key = time if first_key is None else first_key
                    if not (refreshed and _is_gradual_refresh(packet)):
                        keys.append((time, _fingerprint(packet)))
                if not packet.is_discard:  # an edit list cuts off frames that others refer to
                    found.append(time)
        except av.error.FFmpegError:  # the index ends here; reading the frames reports the damage
            pass
    times = np.sort(np.array(found, np.int64))
    if first_key is not None and ticks is None:
        times = times[times >= first_key]
    if not (np.diff(times) > 0).all():
        return _NOTHING_KNOWN
    if not exact:
        alike = Counter(fingerprint for _, fingerprint in keys)
        keys = [(time, fingerprint if alike[fingerprint] == 1 else -1) for time, fingerprint in keys]
    return FrameIndex(times, np.array(sorted(keys), np.int64).reshape(-1, 2))


def segment_videos(
    paths: Iterable[Any], *, max_frames: int, stream: int = 0, progress: bool = True, cache: FileCache | None = None
) -> list[tuple[str, int, int]]:
    """Cut long videos into sections of at most `max_frames` frames, of nearly equal length.

    Args:
        paths: The files.
        max_frames: The most frames of a section.
        stream: Which of the files' video streams, from 0.
        progress: Show a progress bar.
        cache: Where files from URLs are kept; None is the cache that all streams share.

    Returns:
        `(path, start, stop)` for each section, in order: sources for `VideoStream`.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file is no video, or cannot be counted; or `max_frames` is not positive.
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
            return frame_index(local.path, stream).times

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        found: Iterable[FrameTimes] = pool.map(times_of, paths)
        if progress:
            found = tqdm(found, total=len(paths), desc="counting frames", unit="video")
        for path, times in zip(paths, found, strict=True):
            if times is None:
                raise ValueError(f"{path} does not tell when its frames are shown; leave it whole")
            pieces = -(-len(times) // max_frames)
            borders = [len(times) * piece // pieces for piece in range(pieces + 1)] if pieces else []
            sections += [(path, start, stop) for start, stop in itertools.pairwise(borders)]
    return sections


def _is_gradual_refresh(packet: Any) -> bool:
    """Whether a key frame of H.264 begins a refresh of several frames."""
    for unit in _units(bytes(packet)):
        kind = unit[0] & 31
        if kind in (_SLICE, _IDR):
            return False
        if kind == _SEI and _frames_to_recover(unit):
            return True
    return False


def _units(data: bytes) -> Iterator[bytes]:
    """The NAL units, each behind a start code, or (MP4, Matroska) a length of four bytes."""
    if data[:3] == b"\0\0\1" or data[:4] == b"\0\0\0\1":
        yield from (unit for unit in data.split(b"\0\0\1") if unit.strip(b"\0"))
        return
    while len(data) > 4:
        length = int.from_bytes(data[:4], "big")
        if not 0 < length <= len(data) - 4:
            return
        yield data[4 : 4 + length]
        data = data[4 + length :]


def _frames_to_recover(unit: bytes) -> bool:
    """Whether a unit holds a recovery point frames away (7.3.2.3.1 and D.1.8)."""
    # The third byte of 00 00 03 only prevents a false start code (7.4.1).
    payload = unit.replace(b"\0\0\3", b"\0\0")[1:]
    while len(payload) > 2:
        kind, payload = _number(payload)
        size, payload = _number(payload)
        if kind == _RECOVERY_POINT and payload:
            # recovery_frame_cnt is an Exp-Golomb code (9.1), in which the single bit 1 stands for 0.
            return not payload[0] & 0x80
        payload = payload[size:]
    return False


def _number(data: bytes) -> tuple[int, bytes]:
    """The sum of bytes of 255 and of the one behind them; and the rest."""
    full = len(data) - len(data.lstrip(b"\xff"))
    return 255 * full + sum(data[full : full + 1]), data[full + 1 :]
