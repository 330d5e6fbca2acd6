"""Videos decoded by a CUDA device, against bare decoders and against the CPU; part of `gpu.py`.

Sixteen clips of 640x360 (H.264 with B-frames) become frames of 360x240 uint8 RGB, in eight lanes, read by two workers.

- `bare`: two processes without a loader, each half of the clips, one after another; frames come to host memory and are
  not converted.
- `loader, device` and `loader, CPU`: `VideoStream` with and without `device=`.

Guarantee: workers, contexts and bare processes are there before time is taken. It has not run on a device yet.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import av
from av.codec.hwaccel import HWAccel
from interleaved import Result, figure, ratio, take_turns
from video_clips import make_clips

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.streams import VideoStream

SIZE, LANES, WORKERS, TIME_STEPS = (240, 360), 8, 2, 10
START = "forkserver"  # the process that measures has used CUDA
BARE, OURS, CPU = f"bare, {WORKERS} processes", "loader, device", "loader, CPU"


def bare(device: str | None, paths: list[str]) -> int:
    """Decode clips in this process; how many frames they have."""
    count, hardware = 0, None
    if device is not None:
        number = device.partition(":")[2] or None
        hardware = HWAccel("cuda", number, allow_software_fallback=False, options={"primary_ctx": "1"})
    for path in paths:
        with av.open(path, hwaccel=hardware) as container:
            count += sum(1 for _ in container.decode(video=0))
    return count


def loader_of(device: str | None, paths: list[str]) -> StreamDataLoader:
    """Windows of the clips."""
    dataset = StreamDataset(paths, VideoStream(size=SIZE, device=device), LANES, time_steps=TIME_STEPS)
    return StreamDataLoader(dataset, WORKERS, persistent_workers=True, multiprocessing_context=START)


def difference(device: str | None, paths: list[str]) -> float:
    """By how much a frame of the device differs from the CPU's at the most."""
    both = zip(loader_of(device, paths), loader_of(None, paths), strict=True)
    return max(float((one.data.int() - other.data.int()).abs().max()) for one, other in both)


def decoding(device: str | None, rounds: int, *, quick: bool) -> list[Result]:
    """Frames a second, and how true they are."""
    paths = make_clips(16, 150 if quick else 600)
    halves = [paths[i::WORKERS] for i in range(WORKERS)]

    def timed(run: Callable[[], int]) -> float:
        begin = time.perf_counter()
        frames = run()
        return frames / (time.perf_counter() - begin)

    def epoch(loader: StreamDataLoader) -> int:
        return sum(int(batch.host.mask.sum()) for batch in loader)

    with ProcessPoolExecutor(WORKERS, multiprocessing.get_context(START)) as pool:
        contenders: dict[str, Callable[[], int]] = {
            BARE: lambda: sum(pool.map(partial(bare, device), halves)),
            OURS: partial(epoch, loader_of(device, paths)),
            CPU: partial(epoch, loader_of(None, paths)),
        }
        found = take_turns({name: partial(timed, run) for name, run in contenders.items()}, rounds)
    section = f"{len(paths)} clips 640x360 to {SIZE[1]}x{SIZE[0]}, {LANES} lanes, {WORKERS} workers"
    results = [figure(section, name, values, "f/s") for name, values in found.items()]
    results += [
        ratio(section, f"{OURS} / {BARE}", found, OURS, BARE, 0.9, at_most=False),
        ratio(section, f"{OURS} / {CPU}", found, OURS, CPU, None, at_most=False),
        figure(section, "largest difference to the CPU's frames", [difference(device, paths[:2])], "", 0.0),
    ]
    return results
