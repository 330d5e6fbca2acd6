"""Where a loader's parts come from: this process, or torch's worker processes.

A `Feed` yields the parts of one iteration: each worker's in order of step, those of different workers in any
order.

Guarantee: a worker that ends, or does not deliver, is an error that says which worker, how, and what it was reading.
"""

from __future__ import annotations

import functools
import threading
import time as clock
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from stream_dataloader._assembly.part import Part, unpack
from stream_dataloader._assembly.slots import Slot
from stream_dataloader._reading.activity import ActivityBoard
from stream_dataloader._reading.reader import PartReader
from stream_dataloader._workers.processes import Crew
from stream_dataloader._workers.sealed import Arrived
from stream_dataloader._workers.torch_quirks import DeathNotice, is_timeout
from stream_dataloader.errors import ItemError, WorkerDeathError, WorkerError, WorkerTimeoutError, shorten

LONGEST_START_SECONDS = 300.0  # of a worker: user code may import much
_DEATH_SECONDS = 1.0  # a connection to a worker that was killed may break before its end is known


class Feed(Protocol):
    """The parts of one iteration."""

    def receive(self, step: int) -> Sequence[Part]:
        """The next parts of any worker that has not ended; waits for them while `step` is being put together.

        Raises:
            WorkerError: A worker died, or none delivered in time.
        """

    def slot(self, step: int) -> Slot | None:
        """The slot that a step's parts were put into, if there is one; asked for once a step."""

    def close(self) -> None:
        """No part is wanted any more."""


class LocalFeed:
    """All lanes, read in this process."""

    def __init__(self, reader: PartReader) -> None:
        self._reader = reader

    def receive(self, step: int) -> Sequence[Part]:  # noqa: ARG002
        """See `Feed`."""
        return (next(self._reader),)

    def slot(self, step: int) -> Slot | None:  # noqa: ARG002
        """See `Feed`."""
        return None

    def close(self) -> None:
        """See `Feed`."""
        self._reader.close()


class WorkerFeed:
    """One iteration over the parts of a pool's workers.

    Args:
        iterator: torch's iterator.
        crew: The workers.
        method: How they were started.
        slot: Leases a step's slot.
        announce_end: Announces its end to them.
        replace: Called when the workers are no more: the pool needs others.
        patience: torch's timeout for a message, in seconds; 0 has no limit.
        board: What they are doing.
        sources: Those of each member.
    """

    def __init__(
        self,
        iterator: Iterator[Arrived],
        crew: Crew,
        method: str,
        slot: Callable[[int], Slot | None],
        announce_end: Callable[[], None],
        replace: Callable[[], None],
        patience: float,
        board: ActivityBoard,
        sources: Sequence[Sequence[Any]],
    ) -> None:
        self._iterator: Iterator[Arrived] | None = iterator
        self._crew = crew
        self._method = method
        self._slot = slot
        self._announce_end = announce_end
        self._replace = replace
        self._patience = patience
        self._board = board
        self._sources = sources
        self._begin = clock.monotonic()

    def slot(self, step: int) -> Slot | None:
        """See `Feed`."""
        return self._slot(step)

    def receive(self, step: int) -> Sequence[Part]:
        """See `Feed`."""
        crew = self._crew
        crew.waiting = threading.current_thread() is threading.main_thread()
        try:
            if crew.casualty:
                raise RuntimeError("a worker died while nobody waited for it")
            message = self._next_message()
        except StopIteration:
            raise WorkerError(f"the workers ended before the epoch did, at step {step}: a bug in the loader") from None
        except KeyboardInterrupt:
            self._dismiss()  # the user wants to leave now, and a worker may be in the middle of something long
            raise
        except (RuntimeError, DeathNotice) as error:
            late = is_timeout(error)
            if died := crew.died(or_ended=not late):
                raise self._death(step, died) from error.with_traceback(None)
            if late:
                raise self._lateness(step) from error.with_traceback(None)
            raise
        finally:
            crew.waiting = False
        try:
            return unpack(message.read())
        except Exception as error:
            # large items are fetched from the worker, which may have died
            if isinstance(error, (OSError, EOFError)) and (died := self._died_soon()):
                raise self._death(step, died) from error
            raise ItemError(
                f"what a worker sent cannot be unpickled here, at step {step}: {shorten(error)}; yield arrays, "
                "numbers, strings or other plain objects"
            ) from error

    def _lateness(self, step: int) -> WorkerTimeoutError:
        """Dismiss the workers, and say what those that are late do."""
        crew = self._crew
        late = [worker for worker in crew.workers if self._board.is_reading(worker)] or crew.workers
        states = [f"worker {w} is {self._doing(w)}" for w in late]
        states += [f"worker {w} has not started (imports, worker_init_fn)" for w in crew.missing]
        self._dismiss()
        return WorkerTimeoutError(
            f"no worker delivered in time, within {self._patience:g} s, at step {step}: {'; '.join(states)}; "
            "raise timeout=, or find out why it hangs"
        )

    def _died_soon(self) -> dict[int, str]:
        deadline = clock.monotonic() + _DEATH_SECONDS
        while not (died := self._crew.died(or_ended=True)) and clock.monotonic() < deadline:
            clock.sleep(0.01)
        return died

    def _death(self, step: int, died: dict[int, str]) -> WorkerDeathError:
        """Dismiss the workers, and say who died."""
        deaths = "; ".join(f"{how} {self._doing(w) if w >= 0 else 'while it started'}" for w, how in died.items())
        suspects = [self._board.suspects(worker) for worker in died if worker >= 0]
        advice = self._crew.advice(died, self._method)
        self._dismiss()
        return WorkerDeathError(
            f"{deaths}; batch {step} was being put together. {advice}; max_restarts= goes on with new workers",
            suspects=frozenset().union(*suspects),
        )

    def _next_message(self) -> Arrived:
        """What torch yields next; a timeout counts only if no worker started or got further meanwhile."""
        assert self._iterator is not None
        if not self._patience:
            return next(self._iterator)
        while True:
            before, missing = self._board.working.copy(), self._crew.missing
            try:
                return next(self._iterator)
            except RuntimeError as error:  # a message may carry several steps, and each has its time
                if not is_timeout(error) or self._crew.died():
                    raise
                starting = missing and clock.monotonic() - self._begin < LONGEST_START_SECONDS
                if not starting and not (self._board.working != before).any():
                    raise

    def _doing(self, worker: int) -> str:
        return self._board.describe(worker, self._sources, functools.partial(shorten, limit=80))

    def _dismiss(self) -> None:
        self._crew.kill()
        self._replace()

    def close(self) -> None:
        """See `Feed`. Workers that are not kept end."""
        self._announce_end()
        with self._crew.leaving():
            self._iterator = None  # the last reference, unless workers are persistent: torch ends them
