"""Speed of streams that yield single small steps, against a bare loop over the same streams.

The bare loop calls `next` on eight streams in turn and assigns what they yield into new arrays `(T, B, ...)`. It keeps
no account of what was read, checks nothing, and pads nothing. The streams are generators that yield the same objects
over and over, so that the ratio is what the loader costs. With two workers the loop stays alone in the main process.

- `array`: `(64,)` float32. `tensor`: the same as tensors of torch.
- `dict`: of an array `(64,)`, a 0-d array and a bool, as an environment's steps are.
- `int`, `str`: a number, as from `ord`; a string of one character, which batches have in lists `[t][b]`.

Contenders take turns; see `interleaved`. Start-up is not counted. On a machine that does other things too, three
processes wait for each other longer than one does. So there is also a ratio by CPU time: that of all processes, shared
evenly by as many cores as there are workers. Run it as `python benchmarks/steps.py`.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from interleaved import Result, figure, ratio, run_in_turns
from program import run

from stream_dataloader import StreamDataLoader, StreamDataset

LANES, TIME_STEPS, FEATURES, WORKERS = 8, 64, 64, 2
OURS, ALONE = "stream_dataloader", "bare loop"
Streams = Sequence[Iterator[Any]]


class Work(NamedTuple):
    """Streams that are read.

    Attributes:
        open_stream: Opens an endless stream.
        bare: Reads batches of some streams without a loader.
        least: What the loader must reach without workers and with two, as a share of that; None: not asked for.
    """

    open_stream: Callable[[int], Iterator[Any]]
    bare: Callable[[Streams], Iterator[Any]]
    least: tuple[float, float] | None = None


# streams --------------------------------------------------------------------------------------------------------------


def endless(item: Any, _source: int) -> Iterator[Any]:
    """The same item over and over."""
    while True:
        yield item


def environment(_source: int) -> Iterator[Any]:
    """Steps as an environment yields them: each a new dict."""
    observation, reward = np.ones(FEATURES, np.float32), np.array(1.0, np.float32)
    while True:
        yield {"observation": observation, "reward": reward, "done": False}


# bare loops -----------------------------------------------------------------------------------------------------------


def into_array(shape: tuple[int, ...], dtype: type, streams: Streams) -> Iterator[Any]:
    """Batches of items that are arrays or numbers."""
    while True:
        batch: np.ndarray[Any, Any] = np.empty((TIME_STEPS, LANES, *shape), dtype)
        for t in range(TIME_STEPS):
            for b in range(LANES):
                batch[t, b] = next(streams[b])
        yield torch.from_numpy(batch)


def into_tensor(streams: Streams) -> Iterator[Any]:
    """Batches of items that are tensors."""
    while True:
        batch = torch.empty(TIME_STEPS, LANES, FEATURES)
        for t in range(TIME_STEPS):
            for b in range(LANES):
                batch[t, b] = next(streams[b])
        yield batch


def into_three(streams: Streams) -> Iterator[Any]:
    """Batches of steps of an environment."""
    while True:
        observations = np.empty((TIME_STEPS, LANES, FEATURES), np.float32)
        rewards, dones = np.empty((TIME_STEPS, LANES), np.float32), np.empty((TIME_STEPS, LANES), np.bool_)
        for t in range(TIME_STEPS):
            for b in range(LANES):
                step = next(streams[b])
                observations[t, b] = step["observation"]
                rewards[t, b] = step["reward"]
                dones[t, b] = step["done"]
        yield {name: torch.from_numpy(leaf) for name, leaf in zip("ord", (observations, rewards, dones), strict=True)}


def into_lists(streams: Streams) -> Iterator[Any]:
    """Batches of items that no tensor can hold."""
    while True:
        yield [[next(stream) for stream in streams] for _ in range(TIME_STEPS)]


WORKS = {
    "array": Work(
        partial(endless, np.ones(FEATURES, np.float32)), partial(into_array, (FEATURES,), np.float32), (0.4, 0.7)
    ),
    "dict": Work(environment, into_three, (0.4, 0.7)),
    "int": Work(partial(endless, ord("a")), partial(into_array, (), np.int64)),
    "str": Work(partial(endless, "a"), into_lists),
    "tensor": Work(partial(endless, torch.ones(FEATURES)), into_tensor),
}

# measuring ------------------------------------------------------------------------------------------------------------


def through_loader(work: Work, workers: int) -> Iterator[Any]:
    """Batches of the loader."""
    dataset = StreamDataset(range(LANES), work.open_stream, LANES, time_steps=TIME_STEPS, seed=0)
    return iter(StreamDataLoader(dataset, workers, multiprocessing_context="fork" if workers else None))


def alone(work: Work) -> Iterator[Any]:
    """Batches of the bare loop."""
    return work.bare([work.open_stream(source) for source in range(LANES)])


class Rate(NamedTuple):
    """Items a second: of time that passes, and of two cores that do nothing else."""

    passed: float
    of_two_cores: float


def cpu_seconds() -> float:
    """Return the CPU time of this process and its workers until now."""
    processes = [psutil.Process(child.pid) for child in multiprocessing.active_children()]
    return time.process_time() + float(sum(sum(process.cpu_times()[:2]) for process in processes))


def rate(batches: Callable[[], Iterator[Any]], cores: int, count: int) -> Rate:
    """From about the tenth batch on, when workers run and memory was used before."""
    while multiprocessing.active_children():  # workers of the round before
        time.sleep(0.01)
    iterator, items = batches(), count * TIME_STEPS * LANES
    for _ in itertools.islice(iterator, max(10, count // 5)):
        pass
    begin, begin_cpu = time.perf_counter(), cpu_seconds()
    for _ in itertools.islice(iterator, count):
        pass
    return Rate(items / (time.perf_counter() - begin), cores * items / (cpu_seconds() - begin_cpu))


def measure(name: str, work: Work, quick: bool) -> Iterator[Result]:
    """Items a second of both, without workers and with two."""
    torch.set_num_threads(1)
    rounds, count = (3, 80) if quick else (9, 400)
    for workers in (0, WORKERS):
        section = f"{name}, {workers} workers" if workers else f"{name}, in process"
        runs = {
            OURS: partial(rate, partial(through_loader, work, workers), max(workers, 1), (1 + workers) * count),
            ALONE: partial(rate, partial(alone, work), 1, count),
        }
        found = run_in_turns(runs, rounds, section, warm_up=not quick)
        passed, of_cores = ({run: [value[i] for value in values] for run, values in found.items()} for i in (0, 1))
        target = None if work.least is None else work.least[workers > 0]
        yield from (figure(section, who, values, "it/s") for who, values in passed.items())
        yield ratio(section, f"{OURS} / {ALONE}", passed, OURS, ALONE, target, at_most=False)
        yield ratio(section, "the same by CPU time", of_cores, OURS, ALONE)


if __name__ == "__main__":
    run(__doc__, {name: partial(measure, name, work) for name, work in WORKS.items()})
