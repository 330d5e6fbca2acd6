"""One iteration over the parts of a loader's workers: waits for parts, gives credit, and explains failures.

Guarantees: if a worker ends, or does not deliver, an error says which one, how, and what it was reading. Parts sent
before a death are received before the error. After an interrupt or an error all workers are replaced, with the memory
they share.
"""

from __future__ import annotations

import threading
import time as clock
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from stream_dataloader._engine.assembly.part import Part, unpack
from stream_dataloader._engine.assembly.slots import MOST_STEPS_A_MESSAGE, Slot
from stream_dataloader._engine.memory.endings import program_ends
from stream_dataloader._engine.notices import log, warn
from stream_dataloader._engine.workers.channel import CLOSE, ENDED, FAILED, READY
from stream_dataloader._engine.workers.packet_socket import Unreadable
from stream_dataloader._engine.workers.workers import Assignment, Workers
from stream_dataloader.errors import ErrorReport, ItemError, WorkerDeathError, WorkerError, WorkerTimeoutError, shorten

LONGEST_START_SECONDS = 300.0  # for a worker to start, as user code may import much
_LOOK_SECONDS = 1.0  # between checks whether a worker ended unnoticed
REPORT_SECONDS = 10.0  # a longer wait is logged; each further report comes after twice the time
_HURRIED_SECONDS = 0.1  # for threads to close their streams if they are known to hang
_DEATH_SECONDS = 1.0  # a connection to a killed worker may break before the worker's end is known


class Failure(NamedTuple):
    """Error that ended a reader, in place of its next part."""

    reader: int
    error: Exception


class Session:
    """One iteration over the parts of a pool's workers.

    Attributes:
        slot: Returns the slot of a step that all workers are done with, if any.
    """

    def __init__(
        self,
        work: Assignment,
        workers: Workers,
        limit: int,
        slot: Callable[[int], Slot | None],
        stop_workers: Callable[[], None],
        discard: Callable[[], None],
    ) -> None:
        """Receive what workers read; `stop_workers` ends them, `discard` also forgets what they share."""
        self._work, self._workers, self.slot = work, workers, slot
        self._stop_workers, self._discard = stop_workers, discard
        self._settings = work.settings
        self._closed = False
        self._awaits_rows = False  # whether `receive` only waits for the end of an earlier session
        self._begin = self._further = clock.monotonic()  # `_further`: the last time a worker made progress
        self._seen: Any = None
        self._prefetch = self._settings.batches_ahead
        self._wishes = dict.fromkeys(workers.readers, 1)  # number of steps each reader would put into a message
        self._wish = 1  # the smallest of them
        self._limit = limit  # the step up to which all may read
        self._first: int | None = None  # the step that was received first

    def receive(self, step: int) -> Sequence[Part | Failure]:
        """Wait for the next parts of any worker, while `step` is being assembled.

        Raises:
            WorkerError: A worker died, or none delivered in time.
        """
        workers, begin, report = self._workers, clock.monotonic(), REPORT_SECONDS
        self._first = step if self._first is None else self._first
        if workers.left:
            raise self._ended(step)
        look = min(_LOOK_SECONDS, self._settings.timeout or _LOOK_SECONDS)
        try:
            while True:
                if (mail := workers.mail.get(look)) is not None:
                    if (found := self._opened(step, *mail)) is not None:
                        return found
                    continue
                if workers.left:
                    raise self._ended(step)
                if died := workers.died():
                    raise self._death(step, died)
                waited = clock.monotonic() - begin
                if waited > report:
                    report *= 2
                    log.warning("waited %.0f s for step %d: %s", waited, step, self._states(step))
                if self._is_late(waited):
                    raise self._lateness(step)
        except BaseException as error:
            if workers.left and isinstance(error, Exception):  # another thread has ended the workers in the meantime
                raise self._ended(step) from None
            # An interrupt may have lost parts between the socket and the FIFOs, so these workers cannot be used again.
            workers.spoiled = workers.hurries = True
            workers.shutdown_seconds = _HURRIED_SECONDS
            if not workers.threads:  # threads get their chance to close their streams in `close`
                self._discard()
            raise

    def _opened(self, step: int, reader: int, message: tuple[Any, ...]) -> Sequence[Part | Failure] | None:
        """Return the parts in a message; None if it has none for this session."""
        workers, kind = self._workers, message[0]
        if kind == ENDED:
            workers.behind[reader] -= 1
            return () if self._awaits_rows else None
        if kind == READY:
            workers.ready.add(reader)
            return None
        # The reader has not ended an earlier session yet, so the message belongs to that one.
        if workers.behind[reader] != 1 or self._closed:
            return None
        if kind == FAILED:
            workers.spoiled = True
            return (Failure(reader, self._error(step, reader, message[1])),)
        parts: Sequence[Part] = message[1] if workers.threads else unpack(message[1])
        if self._wishes.get(reader) != message[2] or parts[-1].end:
            self._wishes[reader] = MOST_STEPS_A_MESSAGE if parts[-1].end else message[2]
            self._wish = min(self._wishes.values())
        return parts

    def give_credit(self, step: int) -> None:
        """Let all readers read ahead of the step that is being assembled, by `prefetch_factor` messages.

        Credit for less than half a message is held back, as waking a worker costs more than a small step.
        """
        wish = self._wish
        limit = step + 1 + self._prefetch * wish
        if limit >= self._limit + (wish + 1) // 2:
            self._limit = limit
            self._workers.order(limit)

    def _error(self, step: int, reader: int, what: Any) -> Exception:
        """Create the error for a reader that failed."""
        if isinstance(what, ErrorReport):
            return what.unpack()
        if isinstance(what, Unreadable):
            error = what.error
            # Unpickling fetches large items from the worker, which may have died. Its death is then the better error.
            if isinstance(error, (OSError, EOFError)) and (died := self._died_soon()):
                return self._death(step, died)
            told = ItemError(
                f"a worker's message cannot be unpickled in the main process, at step {step}: {shorten(error)}; yield "
                "arrays, numbers, strings or other plain objects"
            )
            told.__cause__ = error
            return told
        if isinstance(what, Exception):
            return what
        self._workers.shutdown_seconds = _HURRIED_SECONDS
        how = f"exited with status {what.code}" if isinstance(what, SystemExit) else f"was ended by {shorten(what)}"
        return WorkerDeathError(
            f"worker {reader} (a thread) {how} {self._doing(reader)}; batch {step} was being assembled. "
            "The stream called sys.exit() or raised a BaseException",
            suspects=self._workers.status.suspects(reader),
        )

    def _died_soon(self) -> dict[int, str]:
        deadline = clock.monotonic() + _DEATH_SECONDS
        while not (died := self._workers.died()) and clock.monotonic() < deadline:
            clock.sleep(0.01)
        return died

    def _ended(self, step: int) -> WorkerError:
        # A daemon thread that raises while the program exits is cut off in the middle of printing its traceback. So let
        # the program exit first.
        if program_ends() and threading.current_thread().daemon:
            clock.sleep(_DEATH_SECONDS)
        return WorkerError(
            f"the program is ending, or another thread ended the workers, during the wait for batch {step}; close the "
            "iterator and join the thread that reads before the program ends"
        )

    def _death(self, step: int, died: dict[int, str]) -> WorkerDeathError:
        workers = self._workers
        deaths = "; ".join(f"{how} {self._doing(w) if w >= 0 else 'while it started'}" for w, how in died.items())
        suspects = [workers.suspects(worker) for worker in died if worker >= 0]
        what = workers.advice(died)
        return WorkerDeathError(
            f"{deaths}; batch {step} was being assembled. {what}; max_restarts= goes on with new workers",
            suspects=frozenset().union(*suspects),
        )

    # Waits

    def _is_late(self, waited: float) -> bool:
        """Return whether no worker made progress within `timeout`, which applies to each step of a message."""
        now, patience = clock.monotonic(), self._settings.timeout
        if (state := (self._workers.status.working.tobytes(), self._missing)) != self._seen:
            self._seen, self._further = state, now
        starting = self._missing and now - self._begin < LONGEST_START_SECONDS
        return bool(patience and not starting and min(waited, now - self._further) >= patience)

    @property
    def _missing(self) -> list[int]:
        return sorted({*range(self._settings.num_workers)} - self._workers.ready)

    def _lateness(self, step: int) -> WorkerTimeoutError:
        more = ". Threads cannot be killed: this one ends when its stream returns" if self._workers.threads else ""
        return WorkerTimeoutError(
            f"no worker delivered within timeout={self._settings.timeout:g} s, at step {step}: {self._states(step)}; "
            f"raise timeout=, or find out why it hangs{more}"
        )

    def _states(self, step: int) -> str:
        doing: dict[int, str] = {}
        for worker in self._workers.ready:
            stopped = self._workers.is_stopped(worker)
            if stopped or self._workers.status.is_reading(worker):
                doing[worker] = self._doing(worker) + ", and is stopped (SIGCONT continues it)" * stopped
        states = [
            f"worker {w} is {d}" for w, d in (doing or {w: self._doing(w) for w in sorted(self._workers.ready)}).items()
        ]
        states += [f"worker {worker} {self._workers.why_missing(worker)}" for worker in self._missing]
        if self._workers.method == "fork" and step == self._first:
            states.append('some libraries, such as polars, hang after a fork: try multiprocessing_context="forkserver"')
        return "; ".join(states)

    def _doing(self, worker: int) -> str:
        return self._workers.doing(worker, self._work.dataset.sources)

    # The end

    def close(self) -> None:
        """End the session: workers that are not kept end, and streams are closed."""
        if self._closed:
            return
        self._closed, workers = True, self._workers
        if workers.left:
            return
        # Marked as spoiled until all is done, so that an interrupt in between replaces the workers.
        before, workers.spoiled, workers.is_read = workers.spoiled, True, False
        workers.order(CLOSE)
        if workers.threads:
            before = not self._wait_for_threads() or before
        workers.spoiled = before
        if not self._settings.persistent_workers or workers.spoiled:
            self._stop_workers()

    def _wait_for_threads(self) -> bool:
        """Wait a limited time until threads have closed their streams; return False if one did not."""
        workers = self._workers
        deadline = clock.monotonic() + workers.shutdown_seconds
        while max(workers.behind) > 0:
            mail = workers.mail.get(max(deadline - clock.monotonic(), 0.0))
            if mail is None:
                break
            self._opened(0, *mail)
        stuck = [reader for reader in workers.readers if workers.behind[reader] > 0]
        if not stuck:
            return True
        text = (
            f"{'; '.join(f'worker {n} (a thread) is still {self._doing(n)}' for n in stuck)}, "
            f"{workers.shutdown_seconds:g} s after the epoch was left; threads cannot be killed: this one closes its "
            "streams and ends when its stream returns"
        )
        self._discard()
        if workers.shutdown_seconds > _HURRIED_SECONDS:
            warn(text, 2)
        return False
