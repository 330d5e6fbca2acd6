"""The parts of one iteration whose workers are threads of this process.

Guarantee: what a worker fails with is raised at its own step, after all steps before it, and names what was being read.
No thread can be ended from outside: one that does not come to an end in time is left alone, which is told.
"""

from __future__ import annotations

import threading
import time as clock
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from stream_dataloader._assembly.part import Part
from stream_dataloader._assembly.slots import Slot
from stream_dataloader._notices import log_warned
from stream_dataloader._reading.activity import ActivityBoard
from stream_dataloader._workers.exchange import Exchange, Failure
from stream_dataloader._workers.feed import LONGEST_START_SECONDS, Feed
from stream_dataloader.errors import WorkerDeathError, WorkerTimeoutError, shorten

_FAREWELL_SECONDS = 4.0  # to all threads together, as to processes
_HURRIED_SECONDS = 0.1  # the same, if the user wants to leave now, or it is known already that they hang


class Job:
    """What one worker does in one iteration, as others see it.

    Attributes:
        begun: The worker has come to it: it has been started, and has left what it did before.
        done: All of its streams are closed.
    """

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.done = threading.Event()


class ThreadFeed:
    """A `Feed` of threads.

    Args:
        exchange: Where they put what they read.
        jobs: What each does.
        slot: Leases a step's slot.
        left_alone: Called when threads are left that have not come to an end: they may still write to their slots.
        patience: How long to wait for a part, in seconds; 0 has no limit.
        board: What they are doing.
        sources: Those of each member.
    """

    def __init__(
        self,
        exchange: Exchange,
        jobs: Sequence[Job],
        slot: Callable[[int], Slot | None],
        left_alone: Callable[[], None],
        patience: float,
        board: ActivityBoard,
        sources: Sequence[Sequence[Any]],
    ) -> None:
        self._exchange = exchange
        self._jobs = jobs
        self.slot = slot  # see `Feed`
        self._left_alone = left_alone
        self._patience = patience
        self._board = board
        self._sources = sources
        self._farewell_seconds = _FAREWELL_SECONDS
        self._tells = True
        self._begin = clock.monotonic()

    def receive(self, step: int) -> Sequence[Part]:
        """See `Feed`."""
        try:
            found = self._exchange.take() if not self._patience else self._take_in_time(step)
        except BaseException:  # Ctrl-C, or a timeout
            self._farewell_seconds, self._tells = _HURRIED_SECONDS, False
            raise
        if not isinstance(found, Failure):
            return found or ()
        if isinstance(found.error, Exception):
            raise found.error
        raise self._death(step, found)

    def _take_in_time(self, step: int) -> list[Part] | Failure:
        """The next parts; a timeout counts only if no worker starts or got further meanwhile."""
        while True:
            before, missing = self._board.working.copy(), self._missing()
            found = self._exchange.take(self._patience)
            if found is not None:
                return found
            starting = missing and clock.monotonic() - self._begin < LONGEST_START_SECONDS
            if not starting and not (self._board.working != before).any():
                raise self._lateness(step)

    def _missing(self) -> list[int]:
        return [number for number, job in enumerate(self._jobs) if not job.begun.is_set()]

    def _lateness(self, step: int) -> WorkerTimeoutError:
        missing = self._missing()
        busy = [n for n, job in enumerate(self._jobs) if not job.done.is_set() and n not in missing]
        late = [n for n in busy if self._board.is_reading(n)] or busy
        states = [f"worker {n} is {self._doing(n)}" for n in late]
        states += [f"worker {n} has not started (worker_init_fn)" for n in missing]
        return WorkerTimeoutError(
            f"no worker delivered in time, within {self._patience:g} s, at step {step}: {'; '.join(states)}; "
            "raise timeout=, or find out why it hangs. A thread cannot be ended: it is left alone until it comes back"
        )

    def _death(self, step: int, failure: Failure) -> WorkerDeathError:
        """What to tell of a thread that something other than an error has ended."""
        number, error = failure
        how = f"exited with status {error.code}" if isinstance(error, SystemExit) else f"was ended by {shorten(error)}"
        self._farewell_seconds = _HURRIED_SECONDS
        return WorkerDeathError(
            f"worker {number} (a thread) {how} {self._doing(number)}; batch {step} was being put together. Something "
            "in it called sys.exit, or raised what is no Exception",
            suspects=self._board.suspects(number),
        )

    def _doing(self, worker: int) -> str:
        return self._board.describe(worker, self._sources)

    @property
    def elsewhere(self) -> list[Feed]:
        """See `Feed`."""
        return [self]

    def close(self) -> None:
        """See `Feed`. Waits until all streams are closed, for a while."""
        if self._exchange.closed:
            return
        self._exchange.close()
        deadline = clock.monotonic() + self._farewell_seconds
        try:
            for job in self._jobs:
                job.done.wait(max(deadline - clock.monotonic(), 0))
        finally:  # the user may be impatient
            stuck = [number for number, job in enumerate(self._jobs) if not job.done.is_set()]
            if stuck:
                self._left_alone()
        if stuck and self._tells:
            text = (
                f"{'; '.join(f'worker {n} (a thread) is still {self._doing(n)}' for n in stuck)}, "
                f"{self._farewell_seconds:g} s after the epoch was left; a thread cannot be ended: it is left alone, "
                "and closes its streams when it comes back"
            )
            log_warned(text)
            warnings.warn(text, RuntimeWarning, stacklevel=2)
