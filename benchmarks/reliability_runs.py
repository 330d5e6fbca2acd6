"""Random loaders that are killed, or stopped and gone on with, for `reliability`.

Guarantee: all of a run but the exact moment of a kill follows from its seed.
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
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil
from reliability_cases import Case, random_options, skipped


@dataclass(frozen=True)
class Finding:
    """A fault that a run found.

    Attributes:
        cells: Text for the table, by heading.
        counts: Numbers to be added up over all runs.
        figures: Other numbers.
    """

    cells: dict[str, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)


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
                found.append(case.key(batch))
            timer.cancel()
        seconds = time.monotonic() - begin
        how = f"killed at {'a moment' if at_step is None else f'step {at_step}'}" if kill else "not killed"
        case.compare(found, expected, f"{about}, {how}, {restarts.count} restarts")
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
        batches = [case.key(batch) for batch in itertools.islice(iterator, taken)]
        found += batches
        skips += skipped(loader)
        state = loader.state_dict()
        del iterator
        if taken is not None and len(batches) < taken:  # not deterministic, and fewer than expected: the epoch is over
            break
    about = f"{case}: {', '.join(told)}"
    case.compare(found, expected, about)
    assert sorted(skips) == failures, f"{about}: skipped {sorted(skips)}, and should {failures}"
    return Finding()
