"""What a file holds, told by its headers and its first packets: a row of `stream-dataloader inspect`.

Guarantee: nothing is decoded, and of a long video only so many packets are read; what is wrong is told, not raised.
"""

from __future__ import annotations

import codecs
import itertools
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_MOST_PACKETS = 3000  # of a video: 10 key frames or more, in most
_HEAD_BYTES = 1 << 16


@dataclass
class Probe:
    """What is known of a source.

    Attributes:
        key: What it is called.
        kind: One of `KINDS`.
        codec: How it is encoded; the dtype of an array.
        size: Width and height in pixels, the number of channels, or the shape of a time step.
        rate: Frames or samples a second.
        frames: Frames, samples, rows or images; None if that is not known.
        exact: They were counted, or a header counts them; else they are estimated from the duration.
        duration_seconds: How long it lasts.
        keyframe_interval: Frames from one key frame to the next, the median; None if there is no second one.
        disk_bytes: Size of the file, or of the images.
        problems: What is wrong.
    """

    key: str
    kind: str
    codec: str = ""
    size: str = ""
    rate: float | None = None
    frames: int | None = None
    exact: bool = True
    duration_seconds: float | None = None
    keyframe_interval: int | None = None
    disk_bytes: int = 0
    problems: list[str] = field(default_factory=list)


def probe(kind: str, source: str, key: str, factory: Any) -> Probe:
    """Look at one source.

    Args:
        kind: One of `KINDS`.
        source: Its path.
        key: What it is called.
        factory: Opens it.
    """
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


def _video(found: Probe, path: str, _: Any) -> None:
    import av.error

    from stream_dataloader.streams._media.container import choose_stream, frame_rate, open_container

    with open_container(path) as container:
        stream = choose_stream(container, "video", 0)
        found.codec, found.rate = stream.codec_context.name, float(frame_rate(stream))
        found.size = f"{stream.codec_context.width}x{stream.codec_context.height}"
        found.duration_seconds = _seconds(container, stream)
        count, keys, whole = 0, [], True
        try:
            for packet in container.demux(stream):
                if not packet.size or packet.is_discard:
                    continue
                if count == _MOST_PACKETS:
                    whole = False
                    break
                if packet.is_keyframe:
                    keys.append(count)
                count += 1
        except av.error.FFmpegError as error:
            found.problems.append(f"it cannot be read behind frame {count} ({error.strerror})")
        if len(keys) > 1:
            found.keyframe_interval = round(statistics.median(b - a for a, b in itertools.pairwise(keys)))
        found.frames = count
        if not whole:
            known, estimate = stream.frames, found.duration_seconds
            found.exact = bool(known)
            found.frames = known or (None if estimate is None else round(estimate * found.rate))
            if len(keys) < 2:
                found.problems.append(f"no second key frame within {count} frames: to begin within it takes long")
        elif found.duration_seconds is None:
            found.duration_seconds = count / found.rate
    _look_for_a_cut(found, path)


def _audio(found: Probe, path: str, _: Any) -> None:
    from stream_dataloader.streams._media.container import choose_stream, open_container
    from stream_dataloader.streams.audio.headers import declared_samples

    with open_container(path) as container:
        stream = choose_stream(container, "audio", 0)
        codec = stream.codec_context
        found.codec, found.size, found.rate = codec.name, f"{codec.channels} ch", float(codec.sample_rate)
        found.duration_seconds = _seconds(container, stream)
        found.frames = declared_samples(path, container, stream)
        found.exact = found.frames is not None
        if found.frames is not None:
            found.duration_seconds = found.frames / found.rate
        elif found.duration_seconds is not None:
            found.frames = round(found.duration_seconds * found.rate)
    _look_for_a_cut(found, path)


def _look_for_a_cut(found: Probe, path: str) -> None:
    from stream_dataloader.streams._media.extent import missing

    if (what := missing(path)) is not None:
        found.problems.append(f"it is cut off: {what}")


def _seconds(container: Any, stream: Any) -> float | None:
    if stream.duration is not None:
        return float(stream.duration * stream.time_base)
    return None if container.duration is None else container.duration / 1e6


def _text(found: Probe, path: str, factory: Any) -> None:
    from stream_dataloader.streams.text.bytes import is_compressed

    found.frames = factory.length(path)
    if is_compressed(path):
        found.codec = path.rpartition(".")[2]
        return
    found.codec = factory.encoding
    with open(path, "rb") as file:
        head = file.read(_HEAD_BYTES)
    codecs.getincrementaldecoder(factory.encoding)(factory.errors.replace("raise", "strict")).decode(head)


def _array(found: Probe, path: str, factory: Any) -> None:
    found.frames = factory.length(path)
    if path.endswith(".npy"):
        array = np.load(path, mmap_mode="r")
        found.codec, found.size = str(array.dtype), "x".join(map(str, array.shape[1:]))


def _images(found: Probe, folder: str, factory: Any) -> None:
    from stream_dataloader.streams._media.container import choose_stream, open_container

    files = factory._paths(folder)
    found.frames = len(files)
    found.disk_bytes = sum(map(os.path.getsize, files))
    if files:
        with open_container(files[0]) as container:
            codec = choose_stream(container, "video", 0).codec_context
            found.codec, found.size = codec.name, f"{codec.width}x{codec.height}"


_PROBES: dict[str, Callable[[Probe, str, Any], None]] = {
    "video": _video,
    "audio": _audio,
    "text": _text,
    "array": _array,
    "images": _images,
}
