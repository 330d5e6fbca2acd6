"""What a file holds, told by its headers and its first packets: a row of `inspect`.

Guarantee: nothing is decoded, and what is wrong is told, not raised.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

_MOST_PACKETS = 3000  # of a video: 10 key frames or more, in most
_HEAD_BYTES = 1 << 16


@dataclass
class Probe:
    """What is known of a source."""

    key: str
    kind: str
    codec: str = ""  # the dtype of an array
    size: str = ""  # width and height, the number of channels, or the shape of a time step
    rate: float | None = None  # frames or samples a second
    frames: int | None = None  # or samples, rows, images
    exact: bool = True  # they were counted, by a header or here; else they follow from the duration
    duration_seconds: float | None = None
    keyframe_interval: int | None = None  # frames from one key frame to the next
    disk_bytes: int = 0
    problems: list[str] = field(default_factory=list)


def probe(kind: str, source: str, key: str, factory: Any) -> Probe:
    """Look at one source."""
    found = Probe(key, kind)
    try:
        if kind != "images":
            found.disk_bytes = os.path.getsize(source)
        _PROBES[kind](found, source, factory)
    except (OSError, ValueError, TypeError, ImportError) as error:
        found.problems.append(" ".join(str(error).split()) or type(error).__name__)
    else:
        if found.frames == 0:
            found.problems.append("there is nothing in it")
    return found


@contextmanager
def _opened(found: Probe, path: str, kind: Literal["video", "audio"]) -> Iterator[tuple[Any, Any]]:
    """A file and its stream, of which the headers are noted."""
    from stream_dataloader.streams._media import container as media

    with media.open_container(path) as container:
        stream = media.choose_stream(container, kind, 0)
        codec = stream.codec_context
        found.codec = codec.name
        found.size = f"{codec.width}x{codec.height}" if kind == "video" else f"{codec.channels} ch"
        if stream.duration is not None:
            found.duration_seconds = float(stream.duration * stream.time_base)
        elif container.duration is not None:
            found.duration_seconds = container.duration / 1e6
        yield container, stream


def _video(found: Probe, path: str, _: Any) -> None:
    import av.error

    from stream_dataloader.streams._media.container import frame_rate

    keys: list[bool] = []
    with _opened(found, path, "video") as (container, stream):
        found.rate = float(frame_rate(stream))
        known = stream.frames
        try:
            for packet in container.demux(stream):
                if packet.size and not packet.is_discard:
                    keys.append(packet.is_keyframe)
                if len(keys) > _MOST_PACKETS:
                    break
        except av.error.FFmpegError as error:
            found.problems.append(f"it cannot be read behind frame {len(keys)} ({error.strerror})")
    intervals = np.diff(np.flatnonzero(keys[:_MOST_PACKETS]))
    if len(intervals):
        found.keyframe_interval = round(float(np.median(intervals)))
    if len(keys) <= _MOST_PACKETS:
        found.frames = len(keys)
        found.duration_seconds = found.duration_seconds or len(keys) / found.rate
    else:
        found.exact = bool(known)
        found.frames = known or _count(found)
        if not len(intervals):
            found.problems.append(f"no second key frame within {_MOST_PACKETS} frames: to begin within it takes long")
    _look_for_a_cut(found, path)


def _audio(found: Probe, path: str, _: Any) -> None:
    from stream_dataloader.streams.audio.headers import declared_samples

    with _opened(found, path, "audio") as (container, stream):
        found.rate = float(stream.codec_context.sample_rate)
        found.frames = declared_samples(path, container, stream)
    found.exact = found.frames is not None
    if found.frames is None:
        found.frames = _count(found)
    else:
        found.duration_seconds = found.frames / found.rate
    _look_for_a_cut(found, path)


def _count(found: Probe) -> int | None:
    """How many frames or samples there must be."""
    if found.duration_seconds is None or found.rate is None:
        return None
    return round(found.duration_seconds * found.rate)


def _look_for_a_cut(found: Probe, path: str) -> None:
    from stream_dataloader.streams._media.extent import missing

    if (what := missing(path)) is not None:
        found.problems.append(f"it is cut off: {what}")


def _text(found: Probe, path: str, factory: Any) -> None:
    from stream_dataloader.streams.text.bytes import is_compressed

    found.frames = factory.length(path)
    if is_compressed(path):
        found.codec = path.rpartition(".")[2]
        return
    found.codec = factory.encoding
    errors = factory.errors.replace("raise", "strict")
    with open(path, "rb") as file:
        head = file.read(_HEAD_BYTES)
    codecs.getincrementaldecoder(factory.encoding)(errors).decode(head)


def _array(found: Probe, path: str, factory: Any) -> None:
    found.frames = factory.length(path)
    if path.endswith(".npy"):
        array = np.load(path, mmap_mode="r")
        found.codec = str(array.dtype)
        found.size = "x".join(map(str, array.shape[1:]))


def _images(found: Probe, folder: str, factory: Any) -> None:
    files = factory._paths(folder)
    if files:
        with _opened(found, files[0], "video"):
            found.duration_seconds = None
    found.frames = len(files)
    found.disk_bytes = sum(map(os.path.getsize, files))


_PROBES: dict[str, Callable[[Probe, str, Any], None]] = {
    "video": _video,
    "audio": _audio,
    "text": _text,
    "array": _array,
    "images": _images,
}
