"""Random loaders that are killed or stopped and gone on with, for `reliability`.

Guarantee: everything about a run but the moment of a kill follows from its seed. What is compared is every
field of every batch, bit for bit, with a run in the main process alone.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
import torch

from stream_dataloader import StreamDataLoader, StreamDataset, get_stream_info
from stream_dataloader.streams import ArrayStream
from stream_dataloader.testing import batch_key

Array = np.ndarray[Any, Any]
Source = tuple[int, int]  # index, number of items

MOST_BATCHES = 40  # of an epoch without end


@dataclass(frozen=True)
class Finding:
    """What a run found, all else being right.

    Attributes:
        cells: Text for the table, by heading.
        counts: Numbers to be added up over all runs.
        figures: Other numbers.
    """

    cells: dict[str, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)


# streams --------------------------------------------------------------------------------------------------------------


def numbers(source: Source, start: int = 0) -> Iterator[Array]:
    """Items that tell source, position and a random draw that depends on both; can be opened anywhere."""
    index, length = source
    for position in range(start, length):
        if (7 * index + position) % 5 == 0:
            time.sleep(1e-3 * (index % 3))
        info = get_stream_info()
        assert info is not None
        yield np.array([index, position, info.rng_at(position).integers(1 << 40)])


def forward(source: Source) -> Iterator[Array]:
    """The same, to be read forward only."""
    return numbers(source)


def named(source: Source) -> Iterator[dict[str, Any]]:
    """Items with a string among their leaves, which does not go through the ring."""
    for item in numbers(source):
        yield {"name": "-".join(map(str, item)), "of": torch.from_numpy(item).to(torch.bfloat16)}


def large(source: Source) -> Iterator[Array]:
    """Items of 300 KB, which torch's queue sends by descriptor."""
    for item in numbers(source):
        yield np.broadcast_to(item, (12_500, 3))


def ragged(source: Source) -> Iterator[Array]:
    """Windows that the stream cuts itself, of 1 to 3 steps."""
    for item in numbers(source):
        yield np.broadcast_to(item, (1 + int(item[2] % 3), 3))


def breaking(source: Source) -> Iterator[Array]:
    """Breaks now and then, to be skipped."""
    for item in numbers(source):
        if item[2] % 8 == 0:
            raise OSError("it broke")
        yield item


class Stateful:
    """A stream with a state of its own, a running sum."""

    def __init__(self, source: Source) -> None:
        self._source, self._position, self._sum = source, 0, 0

    def __iter__(self) -> Iterator[Array]:
        while self._position < self._source[1]:
            self._position += 1
            self._sum += self._position * self._source[0]
            yield np.array([self._source[0], self._position - 1, self._sum])

    def state_dict(self) -> dict[str, int]:
        """Where it stands."""
        return {"position": self._position, "sum": self._sum}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go there."""
        self._position, self._sum = state["position"], state["sum"]


STREAMS: dict[str, Callable[[Any], Iterable[Any]]] = {
    **{stream.__name__: stream for stream in (numbers, forward, named, large, ragged, breaking)},
    "stateful": Stateful,
    "rows": ArrayStream(),
}


# cases ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One random dataset."""

    kind: str
    lengths: list[int] = field(repr=False)
    lanes: int
    options: dict[str, Any]
    collated: bool

    @classmethod
    def draw(cls, rng: random.Random, modes: Iterable[str], fewest_lanes: int = 1) -> Case:
        """Draw one."""
        kind, mode = rng.choice(list(STREAMS)), rng.choice(list(modes))
        lanes = rng.randint(fewest_lanes, 8)
        fewest = max(lanes, 2) if mode == "drop" else 1
        longest = rng.choice((3, 12, 40)) if kind != "large" else 4
        lengths = [rng.randint(0, longest) for _ in range(rng.randint(fewest, 30))]
        if mode == "cycle":
            lengths[0] = max(1, lengths[0])
        options = {
            "padding_mode": mode,
            "time_steps": None if kind == "ragged" else rng.randint(1, 5),
            "windows": "aligned" if kind == "ragged" else rng.choice(("aligned", "packed")),
            "shuffle": rng.random() < 0.5,
            "lookahead": rng.randint(0, 3),
            "on_error": "skip" if kind == "breaking" else "raise",
        }
        return cls(kind, lengths, lanes, options, collated=rng.random() < 0.15)

    def loader(self, num_workers: int, *, seed: int = 3, **options: Any) -> StreamDataLoader:
        """A loader of it."""
        if self.kind == "rows":
            table = np.arange(120, dtype=np.int32).reshape(40, 3)
            sources: list[Any] = [(table + index, 0, length) for index, length in enumerate(self.lengths)]
        else:
            sources = list(enumerate(self.lengths))
        if self.collated:
            options["collate_fn"] = list
        dataset = StreamDataset(sources, STREAMS[self.kind], self.lanes, seed=seed, **self.options)
        return StreamDataLoader(dataset, num_workers, **options)

    def expected(self, epoch: int) -> tuple[list[Any], list[int]]:
        """The batches, and the sources that are skipped, of a run without workers and without a break."""
        loader = self.loader(0)
        loader.set_epoch(epoch)
        return [batch_key(batch) for batch in itertools.islice(loader, self.limit)], skipped(loader)

    @property
    def limit(self) -> int | None:
        """How many batches are looked at; None for all."""
        return MOST_BATCHES if self.options["padding_mode"] == "cycle" else None


def skipped(loader: StreamDataLoader) -> list[int]:
    """The sources that a loader had to skip."""
    return sorted(failure.source_index for failure in loader.failures)


def random_options(rng: random.Random) -> dict[str, Any]:
    """Options of a loader with workers."""
    options: dict[str, Any] = {
        "transport": rng.choice(("queue", "shared_memory")),
        "prefetch_factor": rng.choice((None, 1, 2, 4)),
        "persistent_workers": rng.random() < 0.3,
    }
    if rng.random() < 0.02:
        options["multiprocessing_context"] = rng.choice(("spawn", "forkserver"))
    return options


def compare(found: list[Any], expected: list[Any], about: str) -> None:
    """Raise an error if two runs differ; says where."""
    for i, (one, other) in enumerate(itertools.zip_longest(found, expected)):
        if one != other:
            names = [n for n in one if one[n] != other[n]] if isinstance(one, dict) and isinstance(other, dict) else ""
            raise AssertionError(f"{about}: {len(found)} batches of {len(expected)}; batch {i} differs: {names}")


# runs -----------------------------------------------------------------------------------------------------------------


class Restarts(logging.Handler):
    """Counts restarts."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += "; restart" in record.getMessage()


@contextlib.contextmanager
def counting_restarts() -> Iterator[Restarts]:
    """Count the restarts meanwhile, and keep what is said of them off the screen."""
    log, restarts = logging.getLogger("stream_dataloader"), Restarts()
    log.addHandler(restarts)
    try:
        yield restarts
    finally:
        log.removeHandler(restarts)


def kill_one(rng: random.Random) -> bool:
    """Kill one of this process's workers; False if there is none."""
    alive = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it ends meanwhile
            helper = process.ppid() == os.getpid() and re.search("forkserver|resource_tracker", str(process.cmdline()))
            if not helper and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    with contextlib.suppress(psutil.Error):
        if alive:
            rng.choice(alive).kill()
            return True
    return False


def run_kill(seed: int) -> Finding:
    """One random loader, one of whose workers is killed at a random step or moment."""
    rng = random.Random(seed)
    case = Case.draw(rng, ("zeros", "data", "drop"), fewest_lanes=2)
    epoch, options, workers = rng.randrange(3), random_options(rng), rng.randint(2, min(5, case.lanes))
    expected, failures = case.expected(epoch)
    at_step = rng.randrange(len(expected) + 1) if rng.random() < 0.5 else None
    seconds, hit = 0.0, list[bool]()
    about = f"{case}, {workers} workers, {options}"
    for kill in (False, True):  # the first run tells how long one takes
        loader = case.loader(workers, max_restarts=3, **options)
        loader.set_epoch(epoch)
        timer = threading.Timer(rng.uniform(0, seconds), lambda: hit.append(kill_one(rng)))
        found, begin = list[Any](), time.monotonic()
        with counting_restarts() as restarts:
            if kill and at_step is None:
                timer.start()
            iterator = iter(loader)
            for step in itertools.count():
                if kill and step == at_step:
                    hit.append(kill_one(rng))
                batch = next(iterator, None)
                if batch is None:
                    break
                found.append(batch_key(batch))
            timer.cancel()
        seconds = time.monotonic() - begin
        how = f"killed at {'a moment' if at_step is None else f'step {at_step}'}" if kill else "not killed"
        compare(found, expected, f"{about}, {how}, {restarts.count} restarts")
        assert skipped(loader) == failures, f"{about}, {how}: skipped {skipped(loader)}, and should {failures}"
        del iterator
    return Finding(counts={"killed": sum(hit), "with new workers then": restarts.count})


def run_restore(seed: int) -> Finding:
    """One random loader that is stopped at random steps and gone on with by others, with 0 to 4 workers each."""
    rng = random.Random(seed)
    case, epoch = Case.draw(rng, ("zeros", "data", "drop", "cycle")), rng.randrange(3)
    expected, failures = case.expected(epoch)
    found, state, told = list[Any](), None, list[str]()
    skips: list[int] = []
    legs = rng.choice((2, 2, 3))
    for leg in range(legs):
        workers = rng.randint(0, min(4, case.lanes))
        loader = case.loader(workers, seed=3 + leg, **(random_options(rng) if workers else {}))
        if state is None:
            loader.set_epoch(epoch)
        else:
            loader.load_state_dict(json.loads(json.dumps(state)))
        left = len(expected) - len(found)
        taken = rng.randint(0, left) if leg < legs - 1 else case.limit and left
        told.append(f"{taken} with {workers} workers")
        iterator = iter(loader)
        found += [batch_key(batch) for batch in itertools.islice(iterator, taken)]
        skips += skipped(loader)
        state = loader.state_dict()
        del iterator
    about = f"{case}: {', '.join(told)}"
    compare(found, expected, about)
    assert sorted(skips) == failures, f"{about}: skipped {sorted(skips)}, and should {failures}"
    return Finding()
