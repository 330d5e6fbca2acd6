"""Threads that use the store, so that the main thread stays interruptible."""

from __future__ import annotations

import atexit
import threading
import time as clock
import weakref
from collections.abc import Callable
from typing import Any

from stream_dataloader._engine.memory.endings import start_thread
from stream_dataloader._engine.ranks.store import StoreConnection
from stream_dataloader.errors import RankError

#: Seconds to notify other ranks when this one leaves, and for its threads to end.
SHUTDOWN_SECONDS = 2.0
_CONNECT_SECONDS = 30.0
_LOOK_SECONDS = 1.0

_started: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def start_store_thread(task: Callable[[], None], name: str) -> threading.Thread:
    """Start a thread that uses a store; the program's exit waits a moment for it."""
    thread = start_thread(task, name)
    _started.add(thread)
    return thread


@atexit.register
def _join_threads() -> None:
    """Join the threads at exit: a store's call that returns during Python's shutdown aborts the process (pybind11)."""
    deadline = clock.monotonic() + SHUTDOWN_SECONDS
    for thread in list(_started):
        thread.join(max(0.0, deadline - clock.monotonic()))


def _over() -> StoreConnection:
    raise RankError("the epoch is over")


class StoreThread:
    """A thread that uses the store for the main thread, which can be interrupted while it waits."""

    def __init__(self, connect: Callable[[], StoreConnection]) -> None:
        self._connect = connect
        self._connection: StoreConnection | None = None
        self._wanted = threading.Condition()
        self._tasks: list[tuple[Callable[[StoreConnection], Any], list[Any]]] = []
        self._over = False
        self._broken = False  # whether the last call to the store failed
        self.thread = start_store_thread(self._run, "rank-agreement")

    def _run(self) -> None:
        while True:
            with self._wanted:
                while not self._tasks and not self._over:
                    self._wanted.wait()
                if not self._tasks:
                    if self._connection is not None and not self._broken:
                        self._connection.give_back()
                    self._connection = None  # this object may live on, and must not keep the connection open
                    self._connect = _over
                    return
                task, answer = self._tasks.pop(0)
            try:
                self._connection = self._connection or self._connect()
                answer[:] = [task(self._connection), None]
            except BaseException as error:  # raised in the main thread by `call`
                self._broken = not isinstance(error, RankError)
                answer[:] = [None, error]
            with self._wanted:
                self._wanted.notify_all()

    def call(self, task: Callable[[StoreConnection], Any], patience: float, connect: float = _CONNECT_SECONDS) -> Any:
        """Run `task` on the connection in the thread, and return its result.

        Raises:
            RankError: The task raised it. One without ranks: the store failed, or did not answer in `patience` seconds.
        """
        answer: list[Any] = []
        begin = clock.monotonic()
        with self._wanted:
            self._tasks.append((task, answer))
            self._wanted.notify_all()
            while not self._wanted.wait_for(lambda: answer, _LOOK_SECONDS):
                heard = max(begin, self._connection.heard) if self._connection else begin + connect
                if clock.monotonic() - heard > patience:
                    what = "the store of torch.distributed, through which ranks agree, did not answer within"
                    raise RankError(f"{what} {patience:g} s; its host is cut off or stuck")
        value, error = answer
        if isinstance(error, RankError):
            raise error
        if isinstance(error, RuntimeError):  # torch's
            what = f"the store of torch.distributed, through which ranks agree, failed ({str(error).splitlines()[0]})"
            raise RankError(f"{what}; rank 0, or the agent that keeps it, cannot be reached") from error
        if error is not None:
            raise error
        return value

    def post(self, task: Callable[[StoreConnection], Any]) -> None:
        """Queue a task without waiting for it."""
        with self._wanted:
            self._tasks.append((task, []))
            self._wanted.notify_all()

    def close(self) -> None:
        """End the thread once its tasks are done."""
        with self._wanted:
            self._over = True
            if self._connection is not None:
                self._connection.closed.set()
            self._wanted.notify_all()
