"""Cost of a loader's counters: the same loaders, with counting removed from the code.

Guarantee: contenders take turns, see `interleaved`; both read the same, and only the counters differ. Run it as
`python benchmarks/counting.py [--quick] [--json PATH]`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
from interleaved import Result, figure, ratio, take_turns
from program import run

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader._engine.reading.activity import Meter
from stream_dataloader._engine.workers.batch_counts import BatchCounts

LANES = 8
COUNTERS = [(Meter, name) for name in ("step", "opened", "waited_for_draw", "waited_for_opening")] + [
    (BatchCounts, "batch")
]


@contextmanager
def uncounted() -> Iterator[None]:
    """Counters that do nothing, also in workers that are forked meanwhile."""
    patches = [mock.patch.object(kind, name, _nothing) for kind, name in COUNTERS]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def _nothing(*_: Any, **__: Any) -> int:
    return 0  # some return the nanoseconds that something took


class Windows:
    """A stream of ready windows."""

    def __init__(self, window: Any, count: int) -> None:
        self._window, self._count = window, count

    def __call__(self, source: int) -> Iterator[Any]:
        del source
        for _ in range(self._count):
            yield self._window


def seconds(window: Any, batches: int, workers: int, *, counted: bool) -> float:
    """Return the seconds of an epoch, from its second batch on."""
    dataset = StreamDataset(range(LANES), Windows(window, batches), LANES, windows="given")
    if counted:
        return _read(dataset, workers)
    with uncounted():
        return _read(dataset, workers)


def _read(dataset: StreamDataset, workers: int) -> float:
    batches = iter(StreamDataLoader(dataset, workers, multiprocessing_context="fork" if workers else None))
    next(batches)
    begin = time.perf_counter()
    for _ in batches:
        pass
    return time.perf_counter() - begin


def measure(quick: bool) -> Iterator[Result]:
    """The ratio of times, of each kind of loader."""
    rounds, batches = (3, 2000) if quick else (25, 4000)
    cases: list[tuple[str, Any, int, int]] = [
        ("(1, 64) uint8 windows, no workers", np.zeros((1, 64), np.uint8), batches, 0),
        ("(1, 64) uint8 windows, 2 workers", np.zeros((1, 64), np.uint8), 2 * batches, 2),
        ("(16, 128) float32 windows, 2 workers", np.zeros((16, 128), np.float32), batches, 2),
    ]
    for name, window, count, workers in cases:
        contenders: dict[str, Callable[[], float]] = {
            "counted": partial(seconds, window, count, workers, counted=True),
            "not counted": partial(seconds, window, count, workers, counted=False),
        }
        found = take_turns(contenders, rounds, name)
        section = "Counting: time with it / without"
        for contender, times in found.items():
            yield figure(section, f"{name}, {contender}", [1e6 * took / (count - 1) for took in times], "us")
        yield ratio(section, name, found, "counted", "not counted", 1.02)


if __name__ == "__main__":
    run(__doc__, {"counting": measure})
