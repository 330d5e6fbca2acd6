"""The workers of one loader as threads of this process, so that nobody sends batches.

Guarantees: a thread opens, reads and closes its streams itself. What it fails with is raised at its own step. One that
does not come to an end in time is left alone, with a warning: memory that it may still write to is given to no other
iteration. A thread that is needed no more ends.
"""

from __future__ import annotations

import functools
import math
import threading
import time as clock
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeAlias

from stream_dataloader._assembly.part import Part
from stream_dataloader._assembly.slot_pool import PooledSlots
from stream_dataloader._assembly.slots import Slot, Slots
from stream_dataloader._memory.endings import Ending
from stream_dataloader._notices import warn
from stream_dataloader._reading.activity import ActivityBoard
from stream_dataloader._reading.plan import Reading, Recovery, Start
from stream_dataloader._reading.reader import PartReader, read_here
from stream_dataloader._workers.exchange import Exchange, Failure, deliver
from stream_dataloader._workers.feed import Assignment, Crew, Feed, Pool
from stream_dataloader.errors import WorkerDeathError, shorten

_FAREWELL_SECONDS = 4.0  # to all threads together, as to processes
_HURRIED_SECONDS = 0.1  # the same, if the user wants to leave now, or it is known already that they hang


class Job(NamedTuple):
    """What one worker does in one iteration, as others see it."""

    begun: threading.Event  # it has been started, and has left what it did before
    done: threading.Event  # all of its streams are closed


_Task: TypeAlias = tuple[Job, Exchange, Callable[[], PartReader]]
_Tasks: TypeAlias = "SimpleQueue[_Task | None]"


class ThreadPool(Pool):
    """The threads of one loader. What they hold has nothing of it: it may go while they run."""

    def __init__(self, work: Assignment) -> None:
        self._ahead = work.settings.prefetch_factor or 2
        # the parts that wait, and those that are read and taken
        super().__init__(work, self._ahead + 2, "put together in new memory each time", shared=False)
        self._threads: list[_Tasks] = []  # what each is to do; None is the end
        self._sessions = 0
        self._exchanges: list[Exchange] = []  # that of the iteration that was started last
        self._ending = Ending(self, functools.partial(_leave, self._threads, self._exchanges))

    def start(self, starts: Sequence[Start], recovery: Recovery) -> Feed:  # noqa: ARG002
        work, count = self.work, self.work.settings.num_workers
        if any(not exchange.closed for exchange in self._exchanges):  # Ctrl-C came before anybody had it
            _leave(self._threads, self._exchanges)
            self.leases = None
        if self._slots_are_unfit:
            self.leases = None
        self._sessions += 1
        pool = self._ready_slots()
        slots = Slots if pool is None else functools.partial(PooledSlots, pool, self._sessions)
        taken = None if work.settings.patience is None else work.tally.meters.taken
        exchange = Exchange(count, self._ahead, taken)
        self._exchanges[:] = [exchange]
        # Threads that were left alone have the board before.
        self.board = work.tally.board = ActivityBoard(work.readers, shared=False)
        readers: list[Callable[[], PartReader]] = []
        for number in sorted({reader.member for reader in work.readers if reader.worker_id < count}):
            plan, meters = work.members[number].plan(), work.tally.meters
            reading = Reading(plan, starts[number], work.readers, self.board, meters, number, slots)
            readers += read_here(reading, lambda: exchange.closed)
        jobs = [Job(threading.Event(), threading.Event()) for _ in readers]
        slot = functools.partial(self._slot, self.leases, self._sessions)
        feed = ThreadFeed(exchange, jobs, slot, self)
        try:
            while len(self._threads) < count:
                self._threads.append(SimpleQueue())
                _start(len(self._threads) - 1, work.settings.worker_init_fn, self._threads[-1])
            for tasks, job, reader in zip(self._threads, jobs, readers, strict=True):
                tasks.put((job, exchange, reader))
        except BaseException:  # Ctrl-C, or the system refuses another thread
            exchange.close()
            self.leave_alone()
            raise
        if not work.settings.persistent_workers:
            self.dismiss()
        return feed

    def dismiss(self) -> None:
        """Have no threads: those there are end after what they do."""
        _dismiss(self._threads)

    def leave_alone(self) -> None:
        """Have other threads and other memory than those that have not come to an end."""
        self.dismiss()
        self.leases = None


def _dismiss(threads: list[_Tasks]) -> None:
    while threads:
        threads[-1].put(None)
        threads.pop()


def _leave(threads: list[_Tasks], exchanges: list[Exchange]) -> None:
    for exchange in exchanges:
        exchange.close()
    _dismiss(threads)


def _start(number: int, init: Callable[[int], Any] | None, tasks: _Tasks) -> None:
    threading.Thread(target=_work, args=(number, init, tasks), name=f"stream-worker-{number}", daemon=True).start()


def _work(number: int, init: Callable[[int], Any] | None, tasks: _Tasks) -> None:
    while (task := tasks.get()) is not None:
        job, exchange, begin = task
        try:
            if not exchange.closed:
                if init is not None:
                    init(number)
                    init = None  # once is enough for a thread that is kept
                job.begun.set()
                deliver(number, begin(), exchange)
        except BaseException as error:
            exchange.fail(number, error)
        finally:
            job.begun.set()
            job.done.set()
        del task, exchange, begin


class ThreadFeed(Crew):
    """One iteration over the parts of a pool's threads; see `Feed`."""

    def __init__(
        self, exchange: Exchange, jobs: Sequence[Job], slot: Callable[[int], Slot | None], pool: ThreadPool
    ) -> None:
        super().__init__(pool.board, pool.work)
        self._exchange = exchange
        self._jobs = jobs
        self.slot = slot
        self._pool = pool
        self._farewell_seconds = _FAREWELL_SECONDS
        self._tells = True
        self.await_session()

    @property
    def missing(self) -> list[int]:
        return [number for number, job in enumerate(self._jobs) if not job.begun.is_set()]

    @property
    def workers(self) -> list[int]:
        return [number for number, job in enumerate(self._jobs) if job.begun.is_set() and not job.done.is_set()]

    @property
    def elsewhere(self) -> list[Feed]:
        return [self]

    def receive(self, step: int, seconds: float = math.inf) -> Sequence[Part]:
        self.step, self.allowed, begin = step, seconds, clock.monotonic()
        try:
            while (found := self._exchange.take(self.look_seconds)) is None:
                if self.gives_up(clock.monotonic() - begin):
                    if self.is_over:
                        return ()
                    raise self.lateness(". A thread cannot be ended: it is left alone until it comes back")
        except BaseException:  # Ctrl-C, or a timeout
            self._farewell_seconds, self._tells = _HURRIED_SECONDS, False
            raise
        if not isinstance(found, Failure):
            return found
        if isinstance(found.error, Exception):
            raise found.error
        raise self._death(step, found)

    def _death(self, step: int, failure: Failure) -> WorkerDeathError:
        number, error = failure
        how = f"exited with status {error.code}" if isinstance(error, SystemExit) else f"was ended by {shorten(error)}"
        self._farewell_seconds = _HURRIED_SECONDS
        return WorkerDeathError(
            f"worker {number} (a thread) {how} {self.doing(number)}; batch {step} was being put together. "
            "Something in it called sys.exit, or raised what is no Exception",
            suspects=self.board.suspects(number),
        )

    def close(self) -> None:
        """Wait until all streams are closed, for a while."""
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
                self._pool.leave_alone()
        if stuck and self._tells:
            text = (
                f"{'; '.join(f'worker {n} (a thread) is still {self.doing(n)}' for n in stuck)}, "
                f"{self._farewell_seconds:g} s after the epoch was left; a thread cannot be ended: it is left alone, "
                "and closes its streams when it comes back"
            )
            warn(text, 2)
