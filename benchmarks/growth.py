"""Growth of costs with lanes, leaves, workers, reserved streams, the length of an epoch, ranks and sources.

What a batch costs is the time of processors, of this process and its workers together, so that waiting does not count,
and a machine that does other things too matters little. Items are small: it is the loader's cost, not that of copies.

- `lanes`, `leaves`, `workers`: what a batch costs.
- `reserved`: what a short stream costs, where each lane reserves many and opens them ahead.
- `epoch`: what a batch, and a state, costs in epochs of few batches and of many.
- `ranks`: what a batch and the start cost one of many ranks, each with as many sources. Ranks are simulated: one reads.
- `sources`: seconds until the first batch, those of a state, and the memory taken, with up to 10 million sources.

Guarantee: each figure's exponent of growth is judged, which is 1 for what is linear: the slope of the upper half of its
sizes on logarithmic axes, as fixed costs hide the growth of small ones. Run it as
`python benchmarks/growth.py [--quick] [--json PATH] [--only SECTION]`.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import re
import resource
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from interleaved import Result, figure, run_in_turns
from program import Section, run
from reliability_epochs import written_bytes

from stream_dataloader import Sections, StreamDataLoader, StreamDataset

LINEAR, CONSTANT = 1.1, 0.2  # with some room for chance
LEAST_SECONDS = 0.2  # of processors, for a figure
WARM_UP = 10  # batches: more than workers read ahead


def growth(
    section: str,
    limits: dict[str, float],
    sizes: Sequence[int],
    measured: Callable[[int], Sequence[float]],
    rounds: int,
) -> Iterator[Result]:
    """Figures by size, and the exponents by which they grow; the sizes take turns.

    Args:
        limits: The largest exponent of each figure, by its unit and name.
        measured: The figures of a size.
    """

    def alone(size: int) -> Sequence[float]:
        while multiprocessing.active_children():  # workers of the size before
            time.sleep(0.01)
        return measured(size)

    found = run_in_turns({f"{size:,}": partial(alone, size) for size in sizes}, rounds, section, warm_up=False)
    upper = max(3, len(sizes) // 2)
    for number, (name, limit) in enumerate(limits.items()):
        unit, title = name.partition(" ")[0].rstrip(","), f"{section}: {name}"
        figures = {size: [outcome[number] for outcome in outcomes] for size, outcomes in found.items()}
        yield from (figure(title, size, values, unit) for size, values in figures.items())
        logs = np.log(np.maximum([*figures.values()][-upper:], 1e-9))
        exponents = np.polyfit(np.log(sizes[-upper:]), logs, 1)[0]
        yield figure(title, "exponent of growth", exponents.tolist(), "", limit)


# a batch --------------------------------------------------------------------------------------------------------------


def busy_seconds() -> float:
    """Of processors, by this process and its children, those that have ended too."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    alive = [os.getpid(), *(child.pid for child in psutil.Process().children())]
    clocks = [~pid << 3 | 2 for pid in alive]  # each process has one, see clock_getcpuclockid(3)
    return sum(map(time.clock_gettime, clocks)) + ended.ru_utime + ended.ru_stime


class Steps:
    """Streams of one small step again and again, of so many leaves."""

    def __init__(self, leaves: int = 1, *, open_early: bool = False) -> None:
        self.open_early = open_early
        item = np.zeros(16, np.float32)
        self._item: Any = item if leaves == 1 else {f"leaf {i}": item for i in range(leaves)}

    def __call__(self, length: int) -> Iterator[Any]:
        return (self._item for _ in range(length))

    def of_any(self, _source: object) -> Iterator[Any]:
        """The same for sources that say nothing of their lengths."""
        return self(64)


def microseconds(loader: Iterable[Any]) -> float:
    """Return the CPU time of a batch in microseconds, averaged over enough batches of one epoch."""
    batches, count, chunk = iter(loader), 0, 4
    for _ in range(WARM_UP):
        next(batches)
    begun = busy_seconds()
    spent = 0.0
    while spent < LEAST_SECONDS:
        for _ in range(chunk):
            next(batches)
        count, chunk = count + chunk, 2 * chunk
        spent = busy_seconds() - begun
    return 1e6 * spent / count


def batch_of(lanes: int = 8, workers: int = 0, leaves: int = 1, reserved: int | None = None) -> list[float]:
    """Microseconds of processors of a batch where each lane opens a short stream in every other batch."""
    steps = Steps(leaves, open_early=reserved is not None)
    dataset = StreamDataset([8] * lanes, steps, lanes, "cycle", time_steps=4, lookahead=reserved)
    return [microseconds(StreamDataLoader(dataset, workers))]


def measure_batches(quick: bool) -> Iterator[Result]:
    """By lanes, leaves, reserved streams and workers."""
    few, rounds = slice(0, None, 2 if quick else 1), 1 if quick else 3
    for workers in (0,) if quick else (0, 2):
        beside = f"{workers} workers"
        cost = partial(batch_of, workers=workers)
        yield from growth(f"a batch by lanes, {beside}", {"us": LINEAR}, [4**i for i in range(7)][few], cost, rounds)
        cost = partial(batch_of, 8, workers)
        yield from growth(
            f"a batch by leaves, {beside}", {"us": LINEAR}, [1, 3, 10, 20, 50, 70, 100][few], cost, rounds
        )
        cost = partial(batch_of, 8, workers, 1)
        sizes = [1, 4, 16, 32, 64, 128, 256][few]
        yield from growth(f"a batch by streams a lane holds open, {beside}", {"us": CONSTANT}, sizes, cost, rounds)
    yield from growth(
        "a batch of 32 lanes by workers", {"us": LINEAR}, [1, 2, 4, 8, 16, 32][few], partial(batch_of, 32), rounds
    )


def epoch_of(batches: int, workers: int) -> list[float]:
    """Microseconds of processors of a batch, and of a state, and its bytes, in an epoch of so many batches."""
    dataset = StreamDataset([8] * 4 * batches, Steps(), 8, time_steps=4, shuffle=True, seed=0)
    loader, states, state = StreamDataLoader(dataset, workers), list[float](), dict[str, Any]()
    begun = busy_seconds()
    for count, _ in enumerate(loader):
        if count % (batches // 10) == 0:
            before = time.process_time()
            state = loader.state_dict()
            states.append(time.process_time() - before)
    spent = busy_seconds() - begun - sum(states)
    return [1e6 * spent / batches, 1e6 * float(np.median(states)), len(json.dumps(state))]


def measure_epochs(quick: bool) -> Iterator[Result]:
    """By the number of batches; the start is seen in short ones."""
    limits = {"us, a batch": CONSTANT, "us, a state": CONSTANT, "bytes of a state": CONSTANT}
    sizes = [100, 1000, 3000] if quick else [100, 1000, 3000, 10_000, 30_000, 100_000]
    rounds = 1 if quick else 3
    for workers in (0,) if quick else (0, 2):
        cost = partial(epoch_of, workers=workers)
        yield from growth(f"an epoch by its batches, {workers} workers", limits, sizes, cost, rounds)


def rank_of(ranks: int, known: bool) -> list[float]:
    """Milliseconds of one of so many ranks until its first batch, and microseconds of a batch of its epoch."""
    lengths, begun = [16] * 1000 * ranks, busy_seconds()
    options: dict[str, Any] = {"lengths": lengths} if known else {}
    dataset = StreamDataset(lengths, Steps(), 8, time_steps=4, shuffle=True, seed=0, **options)
    loader = StreamDataLoader(dataset, rank=ranks - 1, world_size=ranks)
    batches = iter(loader)
    next(batches)
    first, begun = busy_seconds() - begun, busy_seconds()
    count = sum(1 for _ in batches)
    return [1e3 * first, 1e6 * (busy_seconds() - begun) / count]


def measure_ranks(quick: bool) -> Iterator[Result]:
    """By the number of ranks, of which each brings 1,000 sources."""
    limits = {"ms to the first batch": LINEAR, "us, a batch": CONSTANT}
    warnings.filterwarnings("ignore", "ranks cannot agree")
    sizes, rounds = [1, 4, 16] if quick else [1, 2, 4, 8, 16, 32, 64], 1 if quick else 3
    for known in (False, True):
        cost = partial(rank_of, known=known)
        yield from growth(f"ranks, lengths {'' if known else 'un'}known", limits, sizes, cost, rounds)


# sources --------------------------------------------------------------------------------------------------------------

#: Options of a dataset, by name.
DATASETS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "listed": lambda _: {},
    "paths": lambda _: {},
    "shuffled": lambda _: {"shuffle": True},
    "shuffled, with lengths": lambda lengths: {"shuffle": True, "lengths": lengths},
    "balanced": lambda lengths: {"shuffle": True, "schedule": "balanced", "lengths": lengths},
    "sections": lambda lengths: {"shuffle": True, "sections": Sections(32, jitter=True, lengths=lengths)},
}


def sources_of(count: int, kind: str, workers: int) -> list[float]:
    """Seconds to the first batch and of a state; MB that the main process took at the most, and that all hold."""
    sources: Any = range(count)
    if kind == "paths":
        sources = [f"/data/recordings/camera_{i % 17:02d}/{i:09d}.mp4" for i in range(count)]
    lengths, options = np.full(count, 64), DATASETS[kind]
    Path("/proc/self/clear_refs").write_text("5")  # the most memory is that from now on
    main = psutil.Process()
    resident, written = main.memory_info().rss, written_bytes(main.pid)
    begun = time.perf_counter()
    dataset = StreamDataset(sources, Steps().of_any, 8, time_steps=4, seed=0, **options(lengths))
    loader = StreamDataLoader(dataset, workers)
    batches = iter(loader)
    next(batches)
    first, begun = time.perf_counter() - begun, time.perf_counter()
    loader.state_dict()
    state = time.perf_counter() - begun
    most = int(re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[0]) << 10
    held = sum(written_bytes(process.pid) for process in (main, *main.children()))
    return [first, state, max(1.0, (most - resident) / 1e6), max(1.0, (held - written) / 1e6)]


def afresh(count: int, kind: str, workers: int) -> list[float]:
    """The same in a process that did nothing before."""
    multiprocessing.set_forkserver_preload(["growth"])  # imports torch once
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as pool:
        return pool.submit(sources_of, count, kind, workers).result()


def measure_sources(quick: bool) -> Iterator[Result]:
    """By the number of sources."""
    limits = {"s to the first batch": LINEAR, "s, a state": LINEAR, "MB at the most": LINEAR, "MB held": LINEAR}
    sizes, rounds = [10**power for power in range(4, 7 if quick else 8)], 1 if quick else 3
    kinds = list(DATASETS)[:: 3 if quick else 1]
    for kind, workers in itertools.product(kinds, (0,) if quick else (0, 2)):
        cost = partial(afresh, kind=kind, workers=workers)
        yield from growth(f"sources, {kind}, {workers} workers", limits, sizes, cost, rounds)


SECTIONS: dict[str, Section] = {
    "batches": measure_batches,
    "epochs": measure_epochs,
    "ranks": measure_ranks,
    "sources": measure_sources,
}

if __name__ == "__main__":
    run(__doc__, SECTIONS)
