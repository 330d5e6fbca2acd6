"""What a long list of sources costs at the start: a million paths against a thousand, under fork and spawn.

Prints the seconds from building the dataset to the first answer of a worker. The target is twice those for a
thousand sources, plus one pickling of the list.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable

from stream_dataloader import OpenError, StreamDataLoader, StreamDataset


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


def fastest(call: Callable[[], object], rounds: int = 5) -> float:
    """The least of several times, in seconds."""
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return min(times)


def main() -> None:
    """Measure and print."""
    few, many = paths(1_000), paths(1_000_000)
    once = fastest(lambda: pickle.dumps(many))
    print(f"one pickling of the list: {once:.3f} s")
    for method in ("fork", "spawn"):
        short, long = fastest(lambda m=method: start(few, m)), fastest(lambda m=method: start(many, m))  # type: ignore[misc]
        limit = 2 * short + once
        verdict = "met" if long <= limit else "MISSED"
        print(f"{method}: 1,000 sources {short:.3f} s, 1,000,000 {long:.3f} s, at most {limit:.3f} s: {verdict}")


if __name__ == "__main__":
    main()
