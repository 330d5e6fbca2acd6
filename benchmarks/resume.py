"""Time from a saved state to the next batch, at 10, 50 and 90 % of an epoch.

Eight lanes read eight streams of 20,000 items, each of which costs 20 microseconds, with two workers:

- `ours, start=`: the factory opens a stream at any item.
- `ours, forward`: the streams can only be read from their first item on, so the items before are read again.
- `StatefulDataLoader`: torchdata's, over an iterable dataset that knows nothing of states, so the loader reads and
  drops all batches before. Each worker cuts windows of its own four streams.
- `StatefulDataLoader, own state`: the same dataset with a `state_dict` that its author wrote, for comparison.

The time is that from building the loader to its first batch, start of the workers and all. Contenders take turns;
see `interleaved`. Run it as `python benchmarks/resume.py [--quick] [--json PATH]`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from interleaved import Result, figure, ratio, take_turns
from program import run
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from stream_dataloader import StreamDataLoader, StreamDataset

LANES, WORKERS, TIME_STEPS = 8, 2, 50
LENGTH = 20_000
ITEM_SECONDS = 20e-6
PLACES = (10, 50, 90)  # percent of the epoch
MOST_FLAT, LEAST_AGAINST_REPLAY = 1.5, 20
Array = np.ndarray[Any, Any]


def read(length: int, start: int = 0) -> Iterator[Array]:
    """Items that take some time."""
    for position in range(start, length):
        ready = time.perf_counter() + ITEM_SECONDS
        while time.perf_counter() < ready:
            pass
        yield np.full(16, position, np.float32)


def read_forward(length: int) -> Iterator[Array]:
    """The same, to be read from the first item on only."""
    return read(length)


class Windows(IterableDataset[Array]):
    """Windows `(T, lanes, 16)` of each worker's own streams."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Array]:
        return self._windows(0)

    def _windows(self, first: int) -> Iterator[Array]:
        worker = get_worker_info()
        assert worker is not None
        streams = [read(self.length, first) for _ in range(LANES // worker.num_workers)]
        for _ in range(first, self.length, TIME_STEPS):
            yield np.stack([np.stack([next(stream) for _ in range(TIME_STEPS)]) for stream in streams], 1)


class StatefulWindows(Windows):
    """The same, with a state."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self._position = self._first = 0

    def __iter__(self) -> Iterator[Array]:
        first, self._first = self._first, 0
        self._position = first
        for window in self._windows(first):
            self._position += TIME_STEPS
            yield window

    def state_dict(self) -> dict[str, int]:
        """Return the place."""
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there."""
        self._first = state["position"]


def ours(open_stream: Callable[..., Any], length: int) -> StreamDataLoader:
    """Our loader."""
    dataset = StreamDataset([length] * LANES, open_stream, LANES, time_steps=TIME_STEPS, seed=0)
    return StreamDataLoader(dataset, WORKERS)


def torchdata(kind: type[Windows], length: int) -> StatefulDataLoader[Array]:
    """torchdata's, which yields a worker's windows at a time: as many batches a step as there are workers."""
    return StatefulDataLoader(kind(length), batch_size=None, num_workers=WORKERS)


def first_position(batch: Any) -> int:
    """Return the first position in a batch, from its items."""
    return int((batch.data if hasattr(batch, "data") and hasattr(batch, "mask") else batch)[0, 0, 0])


def states(make: Callable[[], Any], batches_a_step: int, steps: int) -> dict[int, Any]:
    """The state at each place, as saved on the way through an epoch."""
    wanted = {max(1, steps * place // 100) * batches_a_step: place for place in PLACES}
    loader, found = make(), dict[int, Any]()
    for number, _ in enumerate(loader, 1):
        if number in wanted:
            found[wanted[number]] = loader.state_dict()
        if len(found) == len(PLACES):
            break
    return found


def seconds_to_first_batch(make: Callable[[], Any], state: Any, expected: int) -> float:
    """Load a state into a new loader, and take a batch."""
    begin = time.perf_counter()
    loader = make()
    loader.load_state_dict(state)
    iterator = iter(loader)
    batch = next(iterator)
    seconds = time.perf_counter() - begin
    assert first_position(batch) == expected, f"went on at {first_position(batch)}, and should at {expected}"
    return seconds


def measure(quick: bool) -> list[Result]:
    """All contenders at all places."""
    logging.getLogger("torchdata").setLevel(logging.ERROR)  # it warns, rightly, that it reads all batches again
    steps, seconds = LENGTH // TIME_STEPS, "seconds from a saved state to the first batch"
    makes: Mapping[str, tuple[Callable[[], Any], int]] = {
        "ours, start=": (partial(ours, read, LENGTH), 1),
        "ours, forward": (partial(ours, read_forward, LENGTH), 1),
        "StatefulDataLoader": (partial(torchdata, Windows, LENGTH), WORKERS),
        "StatefulDataLoader, own state": (partial(torchdata, StatefulWindows, LENGTH), WORKERS),
    }
    contenders: dict[str, Callable[[], float]] = {}
    for name, (make, batches_a_step) in makes.items():
        for place, state in states(make, batches_a_step, steps).items():
            expected = max(1, steps * place // 100) * TIME_STEPS
            contenders[f"{name}, {place} %"] = partial(seconds_to_first_batch, make, state, expected)
    taken = take_turns(contenders, 2 if quick else 9, seconds, warm_up=not quick)
    against = "ratios"
    flat = partial(ratio, against, rounds=taken)
    return [
        *[figure(seconds, name, values, "s") for name, values in taken.items()],
        flat("ours, start=: 90 % / 10 %", above="ours, start=, 90 %", below="ours, start=, 10 %", target=MOST_FLAT),
        flat(
            "StatefulDataLoader / ours, start=: 90 %",
            above="StatefulDataLoader, 90 %",
            below="ours, start=, 90 %",
            target=LEAST_AGAINST_REPLAY,
            at_most=False,
        ),
        flat(
            "StatefulDataLoader / ours, forward: 90 %",
            above="StatefulDataLoader, 90 %",
            below="ours, forward, 90 %",
            at_most=False,
        ),
    ]


if __name__ == "__main__":
    run(__doc__, {"resume": measure})
