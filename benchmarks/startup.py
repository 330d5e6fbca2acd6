"""What a start costs: from `iter()` to the first batch, and with a long list of sources.

- `first`: seconds from `iter()` to the first batch of 4 workers, against torch's own `DataLoader`, for each start
  method. Each run is a process of its own, in which a second loader is timed, too: the server of `forkserver` runs by
  then. `spawn` has each worker import torch anew, on both sides.
- `sources`: seconds from building the dataset to the first answer of a worker, for a million paths and for a thousand.
  The target is twice those for a thousand, plus one pickling of the list.

Run it as `python benchmarks/startup.py [--quick] [--json PATH] [--only SECTION]`.
"""

from __future__ import annotations

import argparse
import pickle
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from interleaved import Result, figure, print_table, ratio, run_in_turns, write_json
from torch.utils.data import DataLoader, IterableDataset

from stream_dataloader import OpenError, StreamDataLoader, StreamDataset

WORKERS = 4
METHODS = ("fork", "forkserver", "spawn")
OURS, TORCH = "stream_dataloader", "torch DataLoader"

# the first batch ------------------------------------------------------------------------------------------------------


class Numbers(IterableDataset[int]):
    """What torch's workers read."""

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
    command = [sys.executable, "-W", "ignore", __file__, "--start", contender, method]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    return [float(word) for word in done.stdout.split()]


def measure_first_batch(quick: bool) -> list[Result]:
    """Seconds, and ours in units of torch's."""
    results = []
    for method in METHODS[: 2 if quick else 3]:
        section = f"from iter() to the first batch, {WORKERS} workers, {method}"
        runs = {name: partial(started_afresh, name, method) for name in CONTENDERS}
        rounds = run_in_turns(runs, 1 if quick else 5)
        for i, what in enumerate(("first loader", "second loader")):
            of = {name: [seconds[i] for seconds in rounds[name]] for name in runs}
            results += [figure(section, f"{name}, {what}", of[name], "s") for name in runs]
            results.append(ratio(section, f"ours / torch, {what}", of, OURS, TORCH))
    return results


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


def pickling(sources: list[str]) -> float:
    """Seconds to pickle a list once."""
    begun = time.perf_counter()
    pickle.dumps(sources)
    return time.perf_counter() - begun


def measure_sources(quick: bool) -> list[Result]:
    """Seconds, of the fastest round: what slows it down is the machine."""
    few, many = paths(1_000), paths(1_000_000)
    results = []
    for method in METHODS[:1] if quick else ("fork", "spawn"):
        section = f"from building the dataset to a worker's first answer, {method}"
        runs = {"few": partial(start, few, method), "many": partial(start, many, method)}
        rounds = run_in_turns(runs | {"once": partial(pickling, many)}, 2 if quick else 5)
        least = {name: min(seconds) for name, seconds in rounds.items()}
        limit = 2 * least["few"] + least["once"]
        results.append(figure(section, "one pickling of the list", [least["once"]], "s"))
        results.append(figure(section, "1,000 sources", [least["few"]], "s"))
        results.append(figure(section, "1,000,000 sources", [least["many"]], "s", limit))
    return results


SECTIONS: dict[str, Callable[[bool], list[Result]]] = {"first": measure_first_batch, "sources": measure_sources}


def main() -> None:
    """Measure, print a table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer runs, and none of spawned workers")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the figures here")
    parser.add_argument("--only", choices=list(SECTIONS), help="measure one section")
    parser.add_argument("--start", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.start:
        print(*(seconds_to_first(*arguments.start) for _ in range(2)))
        return
    warnings.simplefilter("ignore")  # torch's, of more workers than cores
    results = []
    for name, measure in SECTIONS.items():
        if arguments.only in (None, name):
            results += (measured := measure(arguments.quick))
            print_table(measured)
    if arguments.json:
        write_json(arguments.json, results)


if __name__ == "__main__":
    main()
