"""The workers of one loader as threads of this process: one copy of the program, and batches that nobody sends.

They read as worker processes do, into the same kind of slots. What differs: their tickets and parts are in ordinary
memory (`source_queue`, `exchange`), and nobody can end them.

Guarantees: a thread opens, reads and closes its streams itself. Memory that a thread may still write to is given to no
other iteration. A thread that is needed no more ends.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, TypeAlias

from stream_dataloader._assembly.slot_writer import PooledSlots
from stream_dataloader._memory.endings import Ending
from stream_dataloader._reading.activity import ActivityBoard
from stream_dataloader._reading.begin import read_here
from stream_dataloader._reading.reader import PartReader
from stream_dataloader._reading.share import Reading, Recovery, Start
from stream_dataloader._schedule.rules import Reader
from stream_dataloader._workers.exchange import Exchange, deliver
from stream_dataloader._workers.memory import BatchMemory
from stream_dataloader._workers.settings import WorkerSettings
from stream_dataloader._workers.tally import Tally
from stream_dataloader._workers.thread_feed import Job, ThreadFeed
from stream_dataloader.dataset import StreamDataset

WorkerInit: TypeAlias = Callable[[int], Any] | None


class ThreadPool:
    """The threads of one loader; of the process that built it alone. See `WorkerPool`, which has processes.

    Args:
        members: What they read: the dataset of each member of the batch.
        readers: Who reads which lanes.
        num_workers: How many there are.
        settings: What they are started with.
        tally: Where to count what is done.

    Attributes:
        owner: The process that built it.
        memory: Where batches are put together.
    """

    def __init__(
        self,
        members: Sequence[StreamDataset],
        readers: Sequence[Reader],
        num_workers: int,
        settings: WorkerSettings,
        tally: Tally,
    ) -> None:
        self.owner = os.getpid()
        self._threads: list[_Thread] = []
        self._sessions = 0
        self._exchanges: list[Exchange] = []  # that of the iteration that was started last
        self._members = members
        self._readers = readers
        self._num_workers = num_workers
        self._settings = settings
        self._tally = tally
        self._ahead = settings.prefetch_factor or 2
        self.memory = BatchMemory(
            readers[-1].lanes.stop,
            self._ahead + 2,  # the parts that wait, and those that are read and taken
            settings,
            tally,
            otherwise="put together in new memory each time",
        )
        self._ending = Ending(self, functools.partial(_leave, self._threads, self._exchanges))

    def start(self, starts: Sequence[Start], *, whole_windows: bool, recovery: Recovery) -> ThreadFeed:  # noqa: ARG002
        """Start an iteration; the one before must be closed. See `WorkerPool.start`."""
        if any(not exchange.closed for exchange in self._exchanges):  # Ctrl-C came before anybody had it
            _leave(self._threads, self._exchanges)
            self.memory.forget()
        if self.memory.unfit:
            self.memory.forget()
        self._sessions += 1
        pool = self.memory.ready()
        slots = None if pool is None else PooledSlots(pool, self._sessions, whole_windows=whole_windows)
        exchange = Exchange(self._num_workers, self._ahead)
        self._exchanges[:] = [exchange]
        board = ActivityBoard(self._readers, shared=False)
        readers: list[Callable[[], PartReader]] = []
        for number in sorted({reader.member for reader in self._readers if reader.worker_id < self._num_workers}):
            plan, meters = self._members[number].plan(), self._tally.meters
            reading = Reading(plan, starts[number], self._readers, board, meters, number, whole_windows, slots)
            readers += read_here(reading, lambda: exchange.closed)
        jobs = [Job() for _ in readers]
        feed = ThreadFeed(
            exchange,
            jobs,
            functools.partial(self.memory.slot, self.memory.leases, self._sessions, whole_windows),
            self._leave_alone,
            self._settings.timeout,
            board,
            [member.sources for member in self._members],
        )
        try:
            while len(self._threads) < self._num_workers:
                thread = _Thread(len(self._threads))
                self._threads.append(thread)
                thread.start(self._settings.worker_init_fn)
            for thread, job, reader in zip(self._threads, jobs, readers, strict=True):
                thread.read(job, exchange, reader)
        except BaseException:  # Ctrl-C, or the system refuses another thread
            exchange.close()
            self._leave_alone()
            raise
        if not self._settings.persistent_workers:
            self._dismiss()
        return feed

    def _dismiss(self) -> None:
        """Have no threads: those there are end after what they do."""
        _dismiss(self._threads)

    def _leave_alone(self) -> None:
        """Have other threads and other memory than those that have not come to an end."""
        self._dismiss()
        self.memory.forget()

    def died(self) -> dict[int, str]:
        """No thread dies by itself."""
        return {}


def _dismiss(threads: list[_Thread]) -> None:
    while threads:
        threads[-1].dismiss()
        threads.pop()


def _leave(threads: list[_Thread], exchanges: list[Exchange]) -> None:
    for exchange in exchanges:
        exchange.close()
    _dismiss(threads)


_Task: TypeAlias = tuple[Job, Exchange, Callable[[], PartReader]]


class _Thread:
    """A worker. It holds nothing of the loader, which may go while it runs.

    Args:
        number: Its number.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()

    def start(self, init: WorkerInit) -> None:
        """Start it; `init` is the loader's `worker_init_fn`."""
        args, name = (self._number, init, self._tasks), f"stream-worker-{self._number}"
        threading.Thread(target=_work, args=args, name=name, daemon=True).start()

    def read(self, job: Job, exchange: Exchange, begin: Callable[[], PartReader]) -> None:
        """Have it read in one iteration, after what it does now."""
        self._tasks.put((job, exchange, begin))

    def dismiss(self) -> None:
        """Have it end after what it does now."""
        self._tasks.put(None)


def _work(number: int, init: WorkerInit, tasks: SimpleQueue[_Task | None]) -> None:
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
