"""Signals at random moments, for `reliability`: what a signal's handler raises must arrive where batches are read.

A thread sends this process a signal, whose handler raises, while epochs are read, left, saved and begun. Each signal
is sent once the one before has arrived. It is lost if its handler has run and an epoch is over without an error: Python
throws away what is raised in a weak reference's callback or in a `__del__`. So an epoch that ends just before the
handler runs is no loss: epochs are read until it has run.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

from reliability_cases import numbers
from reliability_runs import Finding

from stream_dataloader import StreamDataLoader, StreamDataset

#: How epochs are read, and how many signals are sent.
INTERRUPTS = {
    "0": 500,
    "1 fork": 500,
    "2 fork": 500,
    "2 fork kept": 500,
    "2 thread": 500,
    "2 forkserver": 50,
    "2 spawn": 25,
}

_LONGEST_SECONDS = {"spawn": 4.0, "forkserver": 1.0}  # between two signals: as long as some epochs take
_MOST_SECONDS = 0.05


class Arrived(BaseException):
    """Raised by the handler; no other code handles it."""


class Shooter:
    """Sends this process signals, each after the one before was answered for.

    Args:
        seed: Of the moments.
        longest_seconds: Between two signals.
    """

    def __init__(self, seed: int, longest_seconds: float) -> None:
        self._random = random.Random(seed)
        self._longest_seconds = longest_seconds
        self._ready = threading.Semaphore(0)
        self._over = False
        self.handled = 0
        self._threads = ThreadPoolExecutor(1)

    def __enter__(self) -> Shooter:
        self._before = signal.signal(signal.SIGTERM, self._handle)
        self._shooting = self._threads.submit(self._shoot)
        return self

    def __exit__(self, *raised: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._over = True
        self._ready.release()
        self._threads.shutdown()
        signal.signal(signal.SIGTERM, self._before)
        self._shooting.result()  # raises what the thread did

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.handled += 1
        raise Arrived

    def _shoot(self) -> None:
        while self._ready.acquire() and not self._over:
            time.sleep(self._random.random() ** 2 * self._longest_seconds)
            signal.raise_signal(signal.SIGTERM)

    def survives(self, work: Callable[[], Any]) -> bool:
        """Do some work again and again until a signal has come; whether it arrived here."""
        before = self.handled
        self._ready.release()
        try:
            while self.handled == before:
                work()
        except Arrived:
            return True
        return False


def epochs(loader: StreamDataLoader, seed: int) -> Iterator[None]:
    """Read epochs: with and without work, to the end and not, holding batches and not, with states on the way."""
    draws = random.Random(seed)
    while True:
        work, leave, hold = draws.random() < 0.5, draws.random() < 0.5, draws.randrange(4)
        held: list[Any] = []
        for batch in loader:
            held = [*held, batch][-hold:] if hold else []
            if work:
                sum(range(draws.randrange(3000)))
            if draws.random() < 0.1:
                loader.state_dict()
            if leave and draws.random() < 0.1:
                break
        yield


def interrupt(how: str, count: int, alive: Callable[[], None], seed: int = 0) -> Finding:
    """Read epochs while signals come.

    Args:
        how: One of `INTERRUPTS`.
        count: How many signals.
        alive: Called after each signal.
        seed: Of the moments.

    Raises:
        AssertionError: One was lost.
    """
    workers, *more = how.split()
    method = more[0] if more else None
    threads = method == "thread"
    loader: StreamDataLoader = StreamDataLoader(
        StreamDataset([(i, 24) for i in range(8)], numbers, 4, time_steps=2, shuffle=True, seed=0),
        int(workers),
        persistent_workers="kept" in more,
        multiprocessing_context=None if threads else method,
        worker_method="thread" if threads else "process",
    )
    lost = 0
    with Shooter(seed, _LONGEST_SECONDS.get(method or "", _MOST_SECONDS)) as shooter:
        read = epochs(loader, seed)
        for signalled in range(count):
            if not shooter.survives(read.__next__):
                lost += 1
            else:
                read = epochs(loader, seed + signalled)  # what has raised is over
            alive()
    assert not lost, f"{lost} of {count} signals were lost"
    return Finding({"signals": f"{count}", "lost": f"{lost}"}, figures={"signals": count, "lost": lost})
