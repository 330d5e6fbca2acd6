"""Threads of one process against worker processes: frames, bytes, items a second, and memory.

- `video`: sixteen clips of 640x360 in eight lanes, as in `video.py`, by two threads and by two processes.
- `memory`: what each of them takes for that, over a process that has loaded the same libraries.
- `reading`: windows that streams copy into the batch themselves (`read_into`), large and small; and a stream that
  computes in Python and holds the interpreter's lock, by which threads are no faster than none.
- `opening`: 64 files opened by eight threads, of which at most so many open one at once; whether a limit would pay.

Contenders take turns, see `interleaved`; what a loader takes to start is counted for video only. Run it as
`python benchmarks/threads.py [--quick] [--json PATH] [--only SECTION]`; it makes its clips once.
"""

from __future__ import annotations

import itertools
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from typing import Any

import av
import numpy as np
import psutil
from interleaved import Result, figure, ratio, take_turns
from program import run
from video_clips import make_clips

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.streams import VideoStream

WORKERS, LANES = 2, 8
THREADS, PROCESSES, NONE = f"{WORKERS} threads", f"{WORKERS} processes", "no workers"
OPTIONS: dict[str, dict[str, Any]] = {
    THREADS: {"num_workers": WORKERS, "worker_method": "thread"},
    PROCESSES: {"num_workers": WORKERS},
    NONE: {},
}
START_METHODS = ("fork", "spawn")
Array = np.ndarray[Any, Any]


def clips(quick: bool) -> list[str]:
    """Paths of clips, made once."""
    return make_clips(16, 150 if quick else 600)


def video(paths: list[str]) -> StreamDataset:
    """Frames of 360x240 in windows of ten."""
    return StreamDataset(paths, VideoStream(size=(240, 360)), LANES, time_steps=10)


def frames_a_second(paths: list[str], options: dict[str, Any]) -> float:
    """Of one epoch, from its start on."""
    begin = time.perf_counter()
    frames = sum(int(batch.mask.sum()) for batch in StreamDataLoader(video(paths), **options))
    return frames / (time.perf_counter() - begin)


def decoding(quick: bool) -> list[Result]:
    """Frames a second, by threads and by processes."""
    paths = clips(quick)
    runs = {name: partial(frames_a_second, paths, given) for name, given in OPTIONS.items()}
    figures = take_turns(runs, 2 if quick else 5, "frames", warm_up=not quick)
    section = f"video: {len(paths)} clips 640x360 to 360x240, {LANES} lanes"
    return [
        *(figure(section, name, values, "f/s") for name, values in figures.items()),
        ratio(section, f"{THREADS} / {PROCESSES}", figures, THREADS, PROCESSES, 0.9, at_most=False),
    ]


def proportional_bytes(processes: list[psutil.Process]) -> int:
    """Memory of processes; what several share counts in parts."""
    return sum(process.memory_full_info().pss for process in processes)


def taken(paths: list[str], options: dict[str, Any]) -> float:
    """Return the megabytes of a loader in the middle of an epoch, in this process and those it starts."""
    here = psutil.Process()
    stream = VideoStream(size=(240, 360))(paths[0])
    next(iter(stream))  # loads the libraries
    stream.close()
    before = proportional_bytes([here])
    batches = iter(StreamDataLoader(video(paths), **options))
    for _held in itertools.islice(batches, 10):  # one at a time, as a trainer holds them
        time.sleep(0.05)
    after = proportional_bytes([here, *here.children(recursive=True)])
    return (after - before) / 1e6


def taken_afresh(paths: list[str], options: dict[str, Any]) -> float:
    """The same in a process that did nothing before."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        return executor.submit(taken, paths, options).result()


def memory(quick: bool) -> list[Result]:
    """Megabytes that two threads and two processes take."""
    paths, rounds = clips(quick), 1 if quick else 3
    started = {f"{PROCESSES}, {method}": method for method in START_METHODS}
    given = {THREADS: OPTIONS[THREADS]}
    given |= {name: OPTIONS[PROCESSES] | {"multiprocessing_context": method} for name, method in started.items()}
    runs = {name: partial(taken_afresh, paths, options) for name, options in given.items()}
    figures = take_turns(runs, rounds, "memory", warm_up=False)  # each is a process that did nothing before
    section = "video: memory that the loader takes, proportional set size of all processes"
    return [
        *(figure(section, name, values, "MB") for name, values in figures.items()),
        *(
            ratio(section, f"{THREADS} / {name}", figures, THREADS, name, 1 / 3 if method == "spawn" else None)
            for name, method in started.items()
        ),
    ]


class Copying:
    """A stream that writes into the batch: frames of an array in memory, over and over."""

    def __init__(self, frames: Array, steps: int) -> None:
        self.frames, self.left = frames, steps

    def __iter__(self) -> Iterator[Array]:
        while self.left:
            self.left -= 1
            yield self.frames[0]

    def read_into(self, out: Array) -> int:
        """See `ReadsInto`."""
        count = min(len(out), self.left)
        out[:count] = self.frames[:count]
        self.left -= count
        return count


def computed(size: int, steps: int) -> Iterator[Array]:
    """A stream that does all it does in Python."""
    for step in range(steps):
        yield np.full(size, sum(range(step % 100, 400)), np.float32)


def batches_a_second(dataset: StreamDataset, options: dict[str, Any]) -> float:
    """Of one epoch, once it has begun."""
    batches = iter(StreamDataLoader(dataset, **options))
    next(batches)
    begin = time.perf_counter()
    count = sum(1 for _ in batches)
    return count / (time.perf_counter() - begin)


def reading(quick: bool) -> list[Result]:
    """Batches a second of streams that copy, and of one that computes."""
    results, rounds, scale = [], 2 if quick else 7, 1 if quick else 4
    large, small = np.zeros((8, 640, 480), np.uint8), np.zeros((64, 64), np.float32)
    works: list[tuple[str, Callable[[int], Any], int, int]] = [
        ("arrays: read_into, 20 MB a batch", partial(Copying, large), 8, 8 * 60 * scale),
        ("arrays: read_into, 131 kB a batch", partial(Copying, small), 64, 64 * 400 * scale),
        ("python: 131 kB a batch", partial(computed, 64), 64, 64 * 10 * scale),
    ]
    for section, stream, time_steps, steps in works:
        dataset = StreamDataset([steps] * LANES, stream, LANES, time_steps=time_steps)
        runs = {n: partial(batches_a_second, dataset, given) for n, given in OPTIONS.items()}
        figures = take_turns(runs, rounds, section, warm_up=not quick)
        results += [
            *(figure(section, name, values, "b/s") for name, values in figures.items()),
            ratio(section, f"{THREADS} / {PROCESSES}", figures, THREADS, PROCESSES),
            ratio(section, f"{THREADS} / {NONE}", figures, THREADS, NONE),
        ]
    return results


def opening(quick: bool) -> list[Result]:
    """Milliseconds until eight threads have opened all files, and have a frame of each."""
    paths, rounds = clips(quick), 3 if quick else 7

    def opened(limit: threading.Semaphore, path: str) -> None:
        with limit:
            container = av.open(path)
        with container:
            container.streams.video[0].codec_context.thread_count = 1
            next(container.decode(video=0))

    def by_eight(most: int) -> float:
        with ThreadPoolExecutor(8) as threads:
            begin = time.perf_counter()
            list(threads.map(partial(opened, threading.Semaphore(most)), paths * 4))
            return 1e3 * (time.perf_counter() - begin)

    runs = {f"at most {most} at once": partial(by_eight, most) for most in (1, 2, 4, 8)}
    figures = take_turns(runs, rounds, "opening")
    section = f"opening: {4 * len(paths)} files by 8 threads"
    return [
        *(figure(section, name, values, "ms") for name, values in figures.items()),
        *(
            ratio(section, f"{name} / without a limit", figures, name, "at most 8 at once")
            for name in list(figures)[:3]
        ),
    ]


if __name__ == "__main__":
    run(__doc__, {"video": decoding, "memory": memory, "reading": reading, "opening": opening})
