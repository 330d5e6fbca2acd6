"""The worker processes, as the main process knows them.

Guarantee: what a worker told before it died is heard before its death. Ctrl-C does not reach workers, nor comes between
two halves of a start.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

from stream_dataloader._memory.interrupts import deliver, interrupts_held
from stream_dataloader._memory.pickling import ByValue, dumps_by_value
from stream_dataloader.stores._packing.worker import Job, Tasks, run_worker

__all__ = ["Crew", "Worker", "context_of", "described"]

_GRACE_SECONDS = 1.0


def context_of(given: BaseContext | str | None) -> BaseContext:
    """How processes are started.

    Raises:
        ValueError: There is no such way.
    """
    if given is None or isinstance(given, str):
        try:
            return multiprocessing.get_context(given)
        except ValueError:
            known = ", ".join(map(repr, multiprocessing.get_all_start_methods()))
            raise ValueError(f"multiprocessing_context is {given!r}; use one of {known}, or None") from None
    return given


class Worker:
    """One worker process."""

    def __init__(self, number: int, process: BaseProcess, connection: Connection) -> None:
        self.number = number
        self.process = process
        self.connection = connection
        self.is_ready = False
        self.is_leaving = False
        self.packed = 0
        self.seconds = 0.0
        self.began = 0.0


class Crew:
    """Starts workers, hands them streams, and hears what they tell.

    Args:
        context: How processes are started.
        job: What they do.
        folder_lock: See `run_worker`.
        descriptors: Those that a forked worker must not keep.
    """

    def __init__(self, context: BaseContext, job: Job, folder_lock: str, descriptors: tuple[int, ...]) -> None:
        self._context = context
        self._job = ByValue(job, "what is packed, open_stream or transform")
        self._folder_lock = folder_lock
        self._descriptors = descriptors
        self._started = 0
        self.workers: list[Worker] = []

    def start(self, part: int) -> None:
        """Start another worker, for a part of its own."""
        method = self._context.get_start_method()
        ours, theirs = self._context.Pipe()
        number, self._started = self._started, self._started + 1
        inherited = self._descriptors if method == "fork" else ()
        process: BaseProcess = self._context.Process(  # type: ignore[attr-defined]
            target=run_worker,
            args=(self._job, part, number, theirs, self._folder_lock, inherited),
            name=f"pack-{number}",
            daemon=True,
        )
        try:
            with interrupts_held(method) as interrupts:
                process.start()
                self.workers.append(Worker(number, process, ours))
            if interrupts:
                deliver(interrupts)
        except BaseException:
            if not self.workers or self.workers[-1].connection is not ours:
                ours.close()
            raise
        finally:
            theirs.close()

    def give(self, worker: Worker, tasks: Tasks | None) -> None:
        """Hand streams to a worker that has none, or, with None, let it go."""
        worker.is_leaving = tasks is None
        worker.began = time.perf_counter()
        with suppress(BrokenPipeError, ConnectionResetError):  # it is dead, as will be heard
            worker.connection.send_bytes(dumps_by_value(tasks))

    def hear(self, seconds: float) -> Iterator[tuple[Worker, tuple[Any, ...] | None]]:
        """What workers tell, waiting for it so long at most; None is a worker's end, the last of it."""
        by_sign: dict[Any, Worker] = {}
        for worker in self.workers:
            by_sign[worker.connection] = by_sign[worker.process.sentinel] = worker
        for worker in {id(one): one for one in (by_sign[sign] for sign in wait(list(by_sign), seconds))}.values():
            ended = worker.process.exitcode is not None
            try:
                while worker.connection.poll():
                    yield worker, pickle.loads(worker.connection.recv_bytes())
            except (EOFError, OSError):
                ended = True
            if ended:
                self._bury(worker)
                yield worker, None

    def _bury(self, worker: Worker) -> None:
        worker.process.join()
        worker.connection.close()
        self.workers.remove(worker)

    def stop(self, heard: Callable[[Worker, tuple[Any, ...] | None], Any]) -> None:
        """End all workers: they leave their streams, and those that take long over it are killed."""
        deadline = time.monotonic() + _GRACE_SECONDS
        try:
            for worker in self.workers:
                if not worker.is_leaving:
                    self.give(worker, None)
            while self.workers and (left := deadline - time.monotonic()) > 0:
                for worker, message in self.hear(left):
                    heard(worker, message)
        finally:
            for worker in self.workers:
                worker.process.kill()
            for worker in list(self.workers):
                self._bury(worker)


def described(exit_code: int | None) -> str:
    """How a process ended."""
    if exit_code is None:
        return "ended"
    return f"exited with status {exit_code}" if exit_code >= 0 else f"was killed by {signal.Signals(-exit_code).name}"
