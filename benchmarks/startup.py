"""What a long list of sources costs at the start: a million paths against a thousand, under fork and spawn.

Measured are the seconds from building the dataset to the first answer of a worker, the least of all rounds. The target
is twice those for a thousand sources, plus one pickling of the list. Contenders take turns; see `interleaved`. Run it
as `python benchmarks/startup.py [--quick] [--json PATH]`.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from functools import partial

from interleaved import Result, take_turns
from program import run

from stream_dataloader import OpenError, StreamDataLoader, StreamDataset

METHODS = ("fork", "spawn")


def paths(count: int) -> list[str]:
    """A list of paths as a data set has them."""
    return [f"/data/recordings/day_{i % 365:03d}/camera_{i % 17:02d}/{i:09d}.mp4" for i in range(count)]


def no_such_file(path: str) -> list[int]:
    """Fails at once, so that nothing but the start is measured."""
    raise FileNotFoundError(path)


def start(sources: list[str], method: str) -> None:
    """Build a dataset and a loader with two workers, and wait for the first to answer."""
    loader = StreamDataLoader(StreamDataset(sources, no_such_file, 2, time_steps=1), 2, multiprocessing_context=method)
    try:
        next(iter(loader))
    except OpenError:
        return
    raise AssertionError("the factory fails")


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def measure_sources(quick: bool) -> Iterator[Result]:
    """Seconds, and how they stand to the limit."""
    few, many, pickling = paths(1_000), paths(1_000_000), "one pickling of the list"
    contenders: dict[str, Callable[[], object]] = {pickling: partial(pickle.dumps, many)}
    for method in METHODS:
        for sources in (few, many):
            contenders[f"{method}, {len(sources):,} sources"] = partial(start, sources, method)
    runs = {name: partial(seconds, call) for name, call in contenders.items()}
    times = take_turns(runs, 2 if quick else 5, "a million sources")
    section = "from building the dataset to the first answer: 2 workers, least of all rounds"
    for name, values in times.items():
        yield Result(section, name, min(values), "s", (min(values), max(values)))
    for method in METHODS:
        short, long = (times[f"{method}, {len(sources):,} sources"] for sources in (few, many))
        each = [b / (2 * a + once) for a, b, once in zip(short, long, times[pickling], strict=True)]
        least = min(long) / (2 * min(short) + min(times[pickling]))
        name = f"{method}: a million / (2 x a thousand + one pickling)"
        yield Result(section, name, least, "x", (min(*each, least), max(*each, least)), 1.0)


if __name__ == "__main__":
    run(__doc__, {"sources": measure_sources})
