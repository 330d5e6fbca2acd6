"""One iteration over the parts of a loader's workers: it waits for parts, gives credit, and tells what went wrong.

Guarantees: a worker that ends, or does not deliver, is an error that says which, how, and what it read. What was sent
before a death is received before. After an interrupt or an error all workers are replaced, with the memory they share.
"""

from __future__ import annotations

import math
import threading
import time as clock
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from stream_dataloader._assembly.part import Part, unpack
from stream_dataloader._assembly.slots import MOST_STEPS_A_MESSAGE, Slot
from stream_dataloader._memory.endings import program_ends
from stream_dataloader._notices import log, warn
from stream_dataloader._reading.sessions import state_of
from stream_dataloader._workers.channel import CLOSE, ENDED, FAILED, READY
from stream_dataloader._workers.packet_socket import Unreadable
from stream_dataloader._workers.process import advice
from stream_dataloader._workers.workers import Assignment, Workers
from stream_dataloader.errors import ErrorReport, ItemError, WorkerDeathError, WorkerError, WorkerTimeoutError, shorten

LONGEST_START_SECONDS = 300.0  # of a worker: user code may import much
_LOOK_SECONDS = 1.0  # between looks at workers of which no end was noticed
REPORT_SECONDS = 10.0  # of a wait before it is logged; then twice as long
_HURRIED_SECONDS = 0.1  # for threads to close their streams, if it is known already that they hang
_DEATH_SECONDS = 1.0  # a connection to a worker that was killed may break before its end is known


class Failure(NamedTuple):
    """What ended a reader, in the place of its next part."""

    reader: int
    error: Exception


class Session:
    """One iteration over the parts of a pool's workers.

    Attributes:
        slot: Gives the slot of a step that all workers are done with, if any.
    """

    def __init__(
        self,
        work: Assignment,
        workers: Workers,
        limit: int,
        slot: Callable[[int], Slot | None],
        dismiss: Callable[[], None],
        discard: Callable[[], None],
    ) -> None:
        """Receive what workers read; `dismiss` ends them, `discard` also forgets what they share."""
        self._work, self._workers, self.slot = work, workers, slot
        self._dismiss, self._discard = dismiss, discard
        self._settings = work.settings
        self._closed = False
        self._awaits_rows = False  # the end of a session before is awaited
        self._begin = self._further = clock.monotonic()  # when a worker was seen to have got further
        self._seen: Any = None
        self._prefetch = self._settings.batches_ahead
        self._wishes = dict.fromkeys(workers.readers, 1)  # how many steps a reader would put into a message
        self._wish = 1  # the smallest of them
        self._limits = dict.fromkeys(workers.readers, limit)  # up to where each may read

    def receive(self, step: int, seconds: float = math.inf) -> Sequence[Part | Failure]:
        """The next parts of any worker; waits for them while `step` is put together.

        There are none if none came within so many seconds.

        Raises:
            WorkerError: A worker died, or none delivered in time.
        """
        workers, begin, report = self._workers, clock.monotonic(), REPORT_SECONDS
        if workers.left:
            raise self._ended(step)
        look = min(_LOOK_SECONDS, self._settings.timeout or _LOOK_SECONDS, seconds)
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
                if waited >= seconds:
                    return ()
                if waited > report:
                    report *= 2
                    log.warning("step %d is waited for since %.0f s: %s", step, waited, self._states())
                if self._is_late(waited):
                    raise self._lateness(step)
        except BaseException as error:
            if workers.left and isinstance(error, Exception):  # another thread ended the workers meanwhile
                raise self._ended(step) from None
            workers.spoiled = workers.hurries = True
            workers.farewell_seconds = _HURRIED_SECONDS
            if not workers.threads:  # those that do not hang close their streams in `close`
                self._discard()
            raise

    def _opened(self, step: int, reader: int, message: tuple[Any, ...]) -> Sequence[Part | Failure] | None:
        """The parts in a message; None if there are none for this session."""
        workers, kind = self._workers, message[0]
        if kind == ENDED:
            workers.behind[reader] -= 1
            return () if self._awaits_rows else None
        if kind == READY:
            workers.ready.add(self._work.readers[reader].worker_id)
            return None
        if workers.behind[reader] != 1 or self._closed:  # of a session before
            return None
        if kind == FAILED:
            workers.spoiled = True
            return (Failure(reader, self._error(step, reader, message[1])),)
        parts: Sequence[Part] = message[1] if workers.threads else unpack(message[1])
        if self._wishes.get(reader) != message[2] or parts[-1].end:
            self._wishes[reader] = MOST_STEPS_A_MESSAGE if parts[-1].end else message[2]
            self._wish = min(self._wishes.values())
        return parts

    def give_credit(self, step: int, reader: int | None = None) -> None:
        """Have all readers, or one, read ahead of a step that is put together now: as many messages as are wanted.

        Credit that is for less than half a message waits: to wake a worker costs more than a small step.
        """
        wish = self._wish
        limit = step + 1 + self._prefetch * wish
        first = self._workers.readers[0] if reader is None else reader
        if limit >= self._limits[first] + (wish + 1) // 2:
            for number in self._workers.readers if reader is None else (reader,):
                self._limits[number] = limit
                self._workers.mail.send(number, limit)

    def _error(self, step: int, reader: int, what: Any) -> Exception:
        """The error that a reader failed with."""
        if isinstance(what, ErrorReport):
            return what.unpack()
        if isinstance(what, Unreadable):
            error = what.error
            # large items are fetched from the worker, which may have died
            if isinstance(error, (OSError, EOFError)) and (died := self._died_soon()):
                return self._death(step, died)
            told = ItemError(
                f"what a worker sent cannot be unpickled here, at step {step}: {shorten(error)}; yield arrays, "
                "numbers, strings or other plain objects"
            )
            told.__cause__ = error
            return told
        if isinstance(what, Exception):
            return what
        number = self._work.readers[reader].worker_id
        self._workers.farewell_seconds = _HURRIED_SECONDS
        how = f"exited with status {what.code}" if isinstance(what, SystemExit) else f"was ended by {shorten(what)}"
        return WorkerDeathError(
            f"worker {number} (a thread) {how} {self._doing(number)}; batch {step} was being put together. "
            "Something in it called sys.exit, or raised what is no Exception",
            suspects=self._workers.board.suspects(number),
        )

    def _died_soon(self) -> dict[int, str]:
        deadline = clock.monotonic() + _DEATH_SECONDS
        while not (died := self._workers.died()) and clock.monotonic() < deadline:
            clock.sleep(0.01)
        return died

    def _ended(self, step: int) -> WorkerError:
        if program_ends() and threading.current_thread().daemon:  # it may not live to print more than half of it
            clock.sleep(_DEATH_SECONDS)
        return WorkerError(
            f"the program is ending, or another thread ended the workers, while batch {step} was waited for; close the "
            "iterator and join the thread that reads before the program ends"
        )

    def _death(self, step: int, died: dict[int, str]) -> WorkerDeathError:
        workers, board = self._workers, self._workers.board
        deaths = "; ".join(f"{how} {self._doing(w) if w >= 0 else 'while it started'}" for w, how in died.items())
        suspects = [board.suspects(worker) for worker in died if worker >= 0]
        what = advice(workers.processes, board, died, workers.method)
        return WorkerDeathError(
            f"{deaths}; batch {step} was being put together. {what}; max_restarts= goes on with new workers",
            suspects=frozenset().union(*suspects),
        )

    # Waits

    def _is_late(self, waited: float) -> bool:
        """Whether no worker got further for too long; a message may carry several steps, and each has its time."""
        now, patience = clock.monotonic(), self._settings.timeout
        if (state := (self._workers.board.working.tobytes(), self._missing)) != self._seen:
            self._seen, self._further = state, now
        starting = self._missing and now - self._begin < LONGEST_START_SECONDS
        return bool(patience and not starting and min(waited, now - self._further) >= patience)

    @property
    def _missing(self) -> list[int]:
        return sorted({*range(self._settings.num_workers)} - self._workers.ready)

    def _lateness(self, step: int) -> WorkerTimeoutError:
        more = ". A thread cannot be ended: it is left alone until it comes back" if self._workers.threads else ""
        return WorkerTimeoutError(
            f"no worker delivered in time, within {self._settings.timeout:g} s, at step {step}: {self._states()}; "
            f"raise timeout=, or find out why it hangs{more}"
        )

    def _states(self) -> str:
        doing: dict[int, str] = {}
        for worker in self._workers.ready:
            stopped = not self._workers.threads and state_of(self._workers.processes[worker].pid or 0) in (b"T", b"t")
            if stopped or self._workers.board.is_reading(worker):
                doing[worker] = self._doing(worker) + ", and is stopped (SIGCONT continues it)" * stopped
        states = [
            f"worker {w} is {d}" for w, d in (doing or {w: self._doing(w) for w in sorted(self._workers.ready)}).items()
        ]
        states += [f"worker {worker} has not started (imports, worker_init_fn)" for worker in self._missing]
        return "; ".join(states)

    def _doing(self, worker: int) -> str:
        return self._workers.board.describe(worker, self._work.dataset.sources)

    # The end

    def close(self) -> None:
        """No part is wanted any more; workers that are not kept end, and streams are closed."""
        if self._closed:
            return
        self._closed, workers = True, self._workers
        if workers.left:
            return
        before, workers.spoiled, workers.is_read = workers.spoiled, True, False  # if this is interrupted
        workers.order(CLOSE)
        if workers.threads:
            before = not self._wait_for_threads() or before
        workers.spoiled = before
        if not self._settings.persistent_workers or workers.spoiled:
            self._dismiss()

    def _wait_for_threads(self) -> bool:
        """Wait until threads have closed their streams, for a while; False if one did not."""
        workers = self._workers
        deadline = clock.monotonic() + workers.farewell_seconds
        while max(workers.behind) > 0:
            mail = workers.mail.get(max(deadline - clock.monotonic(), 0.0))
            if mail is None:
                break
            self._opened(0, *mail)
        stuck = [reader for reader in workers.readers if workers.behind[reader] > 0]
        if not stuck:
            return True
        numbers = sorted({self._work.readers[reader].worker_id for reader in stuck})
        text = (
            f"{'; '.join(f'worker {n} (a thread) is still {self._doing(n)}' for n in numbers)}, "
            f"{workers.farewell_seconds:g} s after the epoch was left; a thread cannot be ended: it is left alone, "
            "and closes its streams when it comes back"
        )
        self._discard()
        if workers.farewell_seconds > _HURRIED_SECONDS:
            warn(text, 2)
        return False
