"""The workers of one loader, processes or threads, as the loader sees them.

Guarantees: the end of a process is noticed, with its cause. Workers are ended once, by the first thread that asks, and
a process that does not end in time is killed. Workers do not refer to the pool, which may be collected before them.
"""

from __future__ import annotations

import os
import threading
import time as clock
from collections.abc import Iterable, Sequence
from multiprocessing import process as multiprocessing_process
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from stream_dataloader._engine.memory.endings import WeakItems
from stream_dataloader._engine.reading.activity import WorkerStatus
from stream_dataloader._engine.reading.session_row import state_of
from stream_dataloader._engine.schedule.rules import Reader
from stream_dataloader._engine.workers import torch_quirks
from stream_dataloader._engine.workers.batch_counts import BatchCounts
from stream_dataloader._engine.workers.channel import CLOSE, EXIT
from stream_dataloader._engine.workers.process import advice, how_it_ended
from stream_dataloader._engine.workers.settings import WorkerSettings
from stream_dataloader.dataset import StreamDataset

SHUTDOWN_SECONDS = 4.0  # for all workers together, to end or to close their streams


class Assignment(NamedTuple):
    """Work of the workers: the dataset, the readers and the settings."""

    dataset: StreamDataset
    readers: Sequence[Reader]
    settings: WorkerSettings
    counts: BatchCounts


class Workers:
    """The current workers.

    Attributes:
        method: Start method: "thread", "ray", or multiprocessing's name for it.
        mail: The loader's ends of the channels.
        behind: For each reader, the number of sessions that it was told to begin and has not ended.
        ready: Workers that have started.
        spoiled: Whether they must be replaced.
        is_read: Whether a session was started and not closed.
        hurries: Whether not to wait for them: they hang, or the user wants to leave now.
        left: Whether they are ending, or have ended.
    """

    def __init__(self, work: Assignment, status: WorkerStatus, method: str, mail: Any) -> None:
        self.method = method
        self.threads = method == "thread"
        self.readers = range(len(work.readers))
        self.mail = mail
        self.processes: list[BaseProcess] = []
        self.status = status
        self.behind = [0] * len(work.readers)
        self.ready: set[int] = set()
        self.spoiled = False
        self.is_read = False
        self.hurries = False
        self.left = False
        self._over = False
        self.shutdown_seconds = SHUTDOWN_SECONDS
        self._turn = threading.RLock()

    def order(self, what: Any) -> None:
        for reader in self.readers:
            self.mail.send(reader, what)

    def add(self, process: BaseProcess) -> None:
        """Add a process that was started."""
        self.mail.watch(process)
        _processes.add(process)

    def died(self) -> dict[int, str]:
        """Return the worker processes that ended, -1 for one that was starting, with their causes."""
        if self.threads or self.left:
            return {}
        found: dict[int, str] = {}
        for number, process in enumerate(self.processes):
            if process.pid is None:
                found[-1] = "a worker died"
            elif (code := process.exitcode) is not None:
                come = number in self.ready
                who = f"worker {number}" if come else "a worker"
                found[number if come else -1] = f"{who} (pid {process.pid}) {how_it_ended(code)}"
        return found

    def is_stopped(self, worker: int) -> bool:
        """Return whether a worker that has started is stopped by a signal."""
        return not self.threads and state_of(self.processes[worker].pid or 0) in (b"T", b"t")

    def doing(self, worker: int, sources: Sequence[Any]) -> str:
        """Describe a worker's activity, in words that follow its name."""
        return self.status.describe(worker, sources)

    def suspects(self, worker: int) -> frozenset[tuple[int, int]]:
        """Return the sources that may have killed a worker."""
        return self.status.suspects(worker)

    def advice(self, died: Iterable[int]) -> str:
        """Return the probable cause of workers' deaths, and a remedy."""
        return advice(self.processes, self.status, died, self.method)

    def why_missing(self, worker: int) -> str:  # noqa: ARG002
        """Describe a worker that has not started, in words that follow its name."""
        return "has not started (imports, worker_init_fn)"

    def leave(self) -> None:
        """End the workers; wait a limited time for processes, then kill them."""
        with self._turn:
            if self._over:
                return
            self.left = True  # set first, so that a thread that waits in `receive` learns of it
            try:
                self.order(CLOSE)
                self.order(EXIT)
                if not self.hurries:
                    deadline = clock.monotonic() + SHUTDOWN_SECONDS
                    for process in self.processes:
                        if process.pid is not None:
                            process.join(max(deadline - clock.monotonic(), 0))
            finally:  # even if Ctrl-C interrupts the wait, no process may stay behind
                for process in self.processes:
                    if process.pid is not None and process.exitcode is None:
                        process.kill()
            for process in self.processes:
                if process.pid is not None:
                    process.join()
                torch_quirks.forget(process)
            self._over = True


#: Worker processes of this process.
_processes: WeakItems[BaseProcess] = WeakItems()


def _leave_to_parent() -> None:
    """Forget the workers in a forked process, where Python's exit would otherwise end the parent's workers."""
    multiprocessing_process._children.difference_update(_processes)  # type: ignore[attr-defined]
    _processes.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
