"""Cost of a start: from `iter()` to the first batch, and with a long list of sources.

- `first`: seconds from `iter()` to the first batch of 4 workers, against torch's own `DataLoader`, for each start
  method. Each run is a process of its own, in which a second loader is timed, too: the server of `forkserver` runs by
  then. `spawn` has each worker import torch anew, on both sides.
- `kept`: milliseconds with 4 workers that are kept: from the `iter()` of another epoch to its first batch, and from
  `load_state_dict` to it in units of what a fresh loader takes. The least of all rounds, as much as can be known on a
  machine that does other things too.
- `sources`: seconds from building the dataset to the first answer of a worker, for a million paths and for a thousand.
  The target is twice those for a thousand, plus one pickling of the list.

Run it as `python benchmarks/startup.py [--quick] [--json PATH] [--only SECTION]`.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from interleaved import Result, figure, ratio, run_in_turns, take_turns
from program import run
from torch.utils.data import DataLoader, IterableDataset

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.errors import OpenError

WORKERS = 4
METHODS = ("fork", "forkserver", "spawn")
OURS, TORCH = "stream_dataloader", "torch DataLoader"

# the first batch ------------------------------------------------------------------------------------------------------


class Numbers(IterableDataset[int]):
    """Numbers, for torch's workers."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def ours(method: str) -> Iterable[Any]:
    """This package's loader."""
    dataset = StreamDataset([10] * 2 * WORKERS, range, 2 * WORKERS, time_steps=2)
    return StreamDataLoader(dataset, WORKERS, multiprocessing_context=method)


def torch_itself(method: str) -> Iterable[Any]:
    """Torch's own `DataLoader`."""
    return DataLoader(Numbers(), batch_size=None, num_workers=WORKERS, multiprocessing_context=method)


CONTENDERS: dict[str, Callable[[str], Iterable[Any]]] = {OURS: ours, TORCH: torch_itself}


def seconds_to_first(contender: str, method: str) -> float:
    """From `iter()` to the first batch, in this process."""
    loader = CONTENDERS[contender](method)
    begun = time.perf_counter()
    next(iter(loader))
    return time.perf_counter() - begun


def started_afresh(contender: str, method: str) -> list[float]:
    """The same for two loaders, one after the other, in a process that did nothing before."""
    folder, calls = str(Path(__file__).parent), ["startup.seconds_to_first(*sys.argv[2:])"] * 2
    code = f"import sys; sys.path.insert(0, sys.argv[1]); import startup; print({', '.join(calls)})"
    command = [sys.executable, "-W", "ignore", "-c", code, folder, contender, method]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    return [float(word) for word in done.stdout.split()]


def measure_first_batch(quick: bool) -> Iterator[Result]:
    """Seconds, and ours in units of torch's."""
    for method in METHODS[: 1 if quick else 3]:
        section = f"from iter() to the first batch, {WORKERS} workers, {method}"
        runs = {name: partial(started_afresh, name, method) for name in CONTENDERS}
        rounds = run_in_turns(runs, 1 if quick else 5, f"first batch, {method}", warm_up=not quick)
        for i, what in enumerate(("first loader", "second loader")):
            of = {name: [seconds[i] for seconds in rounds[name]] for name in runs}
            yield from (figure(section, f"{name}, {what}", of[name], "s") for name in runs)
            yield ratio(section, f"ours / torch, {what}", of, OURS, TORCH)


# workers that are kept -----------------------------------------------------------------------------------------------

MOST_MILLISECONDS, MOST_OF_FRESH = 1.0, 0.2


def small_items(count: int) -> Iterator[np.ndarray[Any, Any]]:
    """A stream that costs little."""
    for position in range(count):
        yield np.full(64, position, np.float32)


def loader_of(*, kept: bool) -> StreamDataLoader:
    """A loader with epochs of some batches."""
    dataset = StreamDataset([12] * 4 * WORKERS, small_items, 2 * WORKERS, time_steps=4, shuffle=True, seed=0)
    return StreamDataLoader(dataset, WORKERS, persistent_workers=kept, multiprocessing_context="fork")


def measure_kept(quick: bool) -> Iterator[Result]:
    """The start of another epoch, and of a loaded state."""
    section = f"{WORKERS} workers that are kept, least of all rounds"
    loader = loader_of(kept=True)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    for _ in iterator:
        pass

    def to_first(read: StreamDataLoader, saved: dict[str, Any] | None = None) -> float:
        begun = time.perf_counter()
        if saved is not None:
            read.load_state_dict(saved)
        iterator = iter(read)
        next(iterator)
        seconds = time.perf_counter() - begun
        for _ in iterator:
            pass
        return seconds

    contenders = {
        "another epoch": lambda: to_first(loader),
        "a loaded state": lambda: to_first(loader, state),
        "a loaded state, fresh loader": lambda: to_first(loader_of(kept=False), state),
    }
    rounds = take_turns(contenders, 8 if quick else 100, "workers that are kept", warm_up=not quick)
    least = {name: min(values) for name, values in rounds.items()}
    for name, values in rounds.items():
        limit = MOST_MILLISECONDS if name == "another epoch" else None
        yield Result(section, name, 1e3 * least[name], "ms", (1e3 * min(values), 1e3 * max(values)), limit)
    kept, fresh = (least[name] for name in [*least][1:])
    yield Result(
        section, "a loaded state: kept / fresh", kept / fresh, "x", (kept / fresh, kept / fresh), MOST_OF_FRESH
    )


# many sources ---------------------------------------------------------------------------------------------------------


def paths(count: int) -> list[str]:
    """A list of paths as a data set has them."""
    return [f"/data/recordings/day_{i % 365:03d}/camera_{i % 17:02d}/{i:09d}.mp4" for i in range(count)]


def no_such_file(path: str) -> list[int]:
    """Fails at once, so that nothing but the start is measured."""
    raise FileNotFoundError(path)


def start(sources: list[str], method: str) -> float:
    """Build a dataset and a loader with two workers, and wait for the first to answer; the seconds it took."""
    begun = time.perf_counter()
    loader = StreamDataLoader(StreamDataset(sources, no_such_file, 2, time_steps=1), 2, multiprocessing_context=method)
    try:
        next(iter(loader))
    except OpenError:
        return time.perf_counter() - begun
    raise AssertionError("the factory fails")


def seconds(call: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def measure_sources(quick: bool) -> Iterator[Result]:
    """Seconds, and how they stand to the limit."""
    few, many, pickling = paths(1_000), paths(1_000_000), "one pickling of the list"
    contenders: dict[str, Callable[[], object]] = {pickling: partial(pickle.dumps, many)}
    for method in METHODS[::2]:
        for sources in (few, many):
            contenders[f"{method}, {len(sources):,} sources"] = partial(start, sources, method)
    runs = {name: partial(seconds, call) for name, call in contenders.items()}
    times = take_turns(runs, 1 if quick else 5, "a million sources", warm_up=not quick)
    section = "from building the dataset to the first answer: 2 workers, least of all rounds"
    for name, values in times.items():
        yield Result(section, name, min(values), "s", (min(values), max(values)))
    for method in METHODS[::2]:
        short, long = (times[f"{method}, {len(sources):,} sources"] for sources in (few, many))
        each = [b / (2 * a + once) for a, b, once in zip(short, long, times[pickling], strict=True)]
        least = min(long) / (2 * min(short) + min(times[pickling]))
        name = f"{method}: a million / (2 x a thousand + one pickling)"
        yield Result(section, name, least, "x", (min(*each, least), max(*each, least)), 1.0)


if __name__ == "__main__":
    run(__doc__, {"first": measure_first_batch, "kept": measure_kept, "sources": measure_sources})
