"""Contents of a file, known from its headers and its first packets: a row of `inspect`.

Guarantee: nothing is decoded, and problems are listed, not raised.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import av.error
import numpy as np

from stream_dataloader.cli.arguments import Target
from stream_dataloader.stores._packing.run import size_text
from stream_dataloader.streams._media import container as media
from stream_dataloader.streams._media.extent import missing, surplus
from stream_dataloader.streams.audio.headers import declared_samples
from stream_dataloader.streams.text.bytes import is_compressed
from stream_dataloader.streams.video.pictures import Shown, inspector

_MOST_PACKETS = 3000  # 10 key frames or more, in most videos
_HEAD_BYTES = 1 << 16


@dataclass
class Probe:
    """Known facts about a source."""

    key: str
    kind: str
    codec: str = ""  # the dtype of an array
    size: str = ""  # size of a picture, number of channels, or shape of a step
    rate: float | None = None  # frames or samples a second
    frames: int | None = None  # or samples, rows, images
    exact: bool = True  # `frames` was counted, in a header or here
    duration_seconds: float | None = None
    keyframe_interval: int | None = None  # in frames
    disk_bytes: int = 0
    problems: list[str] = field(default_factory=list)

    def row(self) -> list[str]:
        duration = ""
        if self.duration_seconds is not None:  # as people write it: 1:02:03.5
            minutes, seconds = divmod(round(self.duration_seconds, 1), 60)
            hours, minutes = divmod(int(minutes), 60)
            duration = f"{hours}:{minutes:02}" if hours else f"{minutes}"
            duration += f":{seconds:04.1f}"
        return [
            self.key,
            self.codec,
            self.size,
            "" if self.rate is None else f"{self.rate:g}",
            "" if self.frames is None else f"{'' if self.exact else '~'}{self.frames:,}",
            duration,
            str(self.keyframe_interval or ""),
            size_text(self.disk_bytes),
            "problem" if self.problems else "",
        ]

    def estimate(self, known: int | None) -> None:
        """Set the number of frames. If it is not known, estimate it from the duration."""
        self.exact = bool(known)
        self.frames = known
        if not known and self.duration_seconds is not None and self.rate is not None:
            self.frames = round(self.duration_seconds * self.rate)


def probe(target: Target, number: int) -> Probe:
    """Inspect one source."""
    kind, source = target.kind, target.sources[number]
    found = Probe(target.name(number), kind)
    try:
        if kind != "images":
            found.disk_bytes = os.path.getsize(source)
        _PROBES[kind](found, source, target.open_stream)
        if kind in ("video", "audio") and (what := missing(source)) is not None:
            found.problems.append(f"it is cut off: {what}")
        if kind == "audio" and (what := surplus(source)) is not None:
            found.problems.append(f"it is longer than its header says: {what}")
    except (OSError, ValueError, TypeError, ImportError) as error:
        found.problems.append(" ".join(str(error).split()) or type(error).__name__)
    else:
        if found.frames == 0:
            found.problems.append("there is nothing in it")
    return found


@contextmanager
def _opened(found: Probe, path: str, kind: Literal["video", "audio"]) -> Iterator[tuple[Any, Any]]:
    with media.open_container(path) as container:
        stream = media.choose_stream(container, kind, 0)
        codec = stream.codec_context
        found.codec = codec.name
        found.size = f"{codec.width}x{codec.height}" if kind == "video" else f"{codec.channels} ch"
        if media.runs_over(path):  # the file is longer than its header says
            found.duration_seconds = 8 * os.path.getsize(path) / codec.bit_rate
        elif stream.duration is not None:
            found.duration_seconds = float(stream.duration * stream.time_base)
        elif container.duration is not None:
            found.duration_seconds = container.duration / 1e6
        yield container, stream


def _video(found: Probe, path: str, _: Any) -> None:
    keys: list[bool] = []  # one entry a frame: a packet may hold half a frame, or none
    with _opened(found, path, "video") as (container, stream):
        found.rate = float(media.frame_rate(stream))
        look = inspector(stream)
        sure = look is not None
        try:
            for packet in container.demux(stream):
                if packet.size and not packet.is_discard:
                    shown = Shown(1, packet.is_keyframe) if look is None else look.look(packet)
                    sure = sure and shown.frames is not None
                    keys += [shown.key] * (1 if shown.frames is None else shown.frames)
                if len(keys) > _MOST_PACKETS:
                    break
        except av.error.FFmpegError as error:
            what = f"it cannot be read after frame {len(keys)} ({error.strerror})"
            found.problems.append(what)
        declared = stream.frames
    intervals = np.diff(np.flatnonzero(keys[:_MOST_PACKETS]))
    if len(intervals):
        found.keyframe_interval = round(float(np.median(intervals)))
    if len(keys) <= _MOST_PACKETS:
        found.frames, found.exact = len(keys), sure
        found.duration_seconds = found.duration_seconds or len(keys) / found.rate
        return
    found.estimate(declared)
    if not len(intervals):
        what = f"no second key frame within {_MOST_PACKETS} frames"
        found.problems.append(f"{what}: starting in the middle is slow")


def _audio(found: Probe, path: str, _: Any) -> None:
    with _opened(found, path, "audio") as (container, stream):
        found.rate = float(stream.codec_context.sample_rate)
        found.estimate(declared_samples(path, container, stream))
    if found.exact and found.frames is not None:
        found.duration_seconds = found.frames / found.rate


def _text(found: Probe, path: str, factory: Any) -> None:
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


_PROBES = {"video": _video, "audio": _audio, "text": _text, "array": _array, "images": _images}
