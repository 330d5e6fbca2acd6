"""Packing videos, and streaming what was packed, against decoding: rows for `stores.py`.

Sixteen clips of 640x360 become frames of 360x240 uint8 RGB. Contenders take turns, see `interleaved`; ratios are of
frames a second.

- packing with two workers, until the store is whole and on the disk, against two processes that only decode and
  convert the same frames, handed one clip after the other;
- batches (10, 8, 3, 240, 360) of the store against the same of the clips, each by two workers.
"""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from interleaved import Result
from store_rows import bytes_of, in_turns, row_of
from video_clips import make_clips

from stream_dataloader import StreamDataLoader, StreamDataset, stores
from stream_dataloader.streams import VideoStream

__all__ = ["rows"]

SIZE, LANES, WORKERS, TIME_STEPS = (240, 360), 8, 2, 10
OPEN = VideoStream(size=SIZE)


def decode(path: str) -> int:
    """Read a clip; returns its number of frames."""
    return sum(1 for _ in OPEN(path))


def decode_alone(paths: list[str]) -> int:
    """Decode by two processes, one clip after the other."""
    with multiprocessing.get_context("fork").Pool(WORKERS) as pool:
        return sum(pool.imap_unordered(decode, paths))


def pack(paths: list[str]) -> tuple[int, int]:
    """Pack into a store that is removed; returns the number of frames and the store's bytes."""
    folder = tempfile.mkdtemp()
    try:
        report = stores.pack((paths, OPEN), f"{folder}/clips.store", num_workers=WORKERS, progress=False)
        return report.steps, report.bytes
    finally:
        shutil.rmtree(folder)


def stream(sources: Any, open_stream: Any) -> int:
    """Batches of an epoch; returns the number of frames."""
    dataset = StreamDataset(sources, open_stream, LANES, time_steps=TIME_STEPS)
    return sum(int(batch.mask.sum()) for batch in StreamDataLoader(dataset, WORKERS))


def _rate(run: Callable[[], int]) -> Callable[[], float]:
    def timed() -> float:
        begin = time.perf_counter()
        return run() / (time.perf_counter() - begin)

    return timed


def rows(quick: bool) -> Iterator[Result]:
    """A row for packing, and one for reading what was packed."""
    clips = make_clips(16, 40 if quick else 300)
    sizes: list[int] = []

    def pack_once() -> int:
        frames, size = pack(clips)
        sizes.append(size)
        return frames

    packing = in_turns({"pack": _rate(pack_once), "decode": _rate(lambda: decode_alone(clips))}, "packing", quick)
    note = f"{sum(map(bytes_of, clips)) / 1e6:.0f} MB of videos"
    yield row_of("packing 16 clips, against decoding alone", packing, "pack", "decode", 0.7, sizes[0], note)
    folder = tempfile.mkdtemp()
    try:
        stores.pack((clips, OPEN), f"{folder}/clips.store", num_workers=WORKERS, progress=False)
        packed = stores.open(f"{folder}/clips.store")
        streaming = in_turns(
            {"store": _rate(lambda: stream(*packed)), "videos": _rate(lambda: stream(clips, OPEN))}, "streaming", quick
        )
    finally:
        shutil.rmtree(folder)
    yield row_of("memory-mapped store, against decoding", streaming, "store", "videos", 10.0, sizes[0], note)
