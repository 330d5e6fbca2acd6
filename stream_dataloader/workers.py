"""Looks after worker processes: what they inherit, and how their end and the main process's reach each other.

- Ctrl-C is for the main process, which ends the workers: they start with SIGINT blocked.
- A worker whose main process died ends itself, also when it is stuck in user code.
- torch raises a worker's death out of a signal handler, in whatever code of the user's is running. Here that
  error surfaces in the loader's `next` and nowhere else.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from stream_dataloader.pickling import ByValue
from stream_dataloader.schedule import IntArray
from stream_dataloader.source_queue import is_alive

_WATCH_SECONDS = 1.0


@contextlib.contextmanager
def sigint_blocked() -> Iterator[None]:
    """Block SIGINT in this thread, and so in the processes started meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class WorkerInit:
    """The `worker_init_fn` of the loader's workers; runs the user's own, if there is one."""

    def __init__(self, user_init: Callable[[int], Any] | None) -> None:
        self._user_init = ByValue(user_init)

    def __call__(self, worker_id: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # forkserver does not pass on a blocked one
        watch_parent()
        if self._user_init.value is not None:
            self._user_init.value(worker_id)


def watch_parent() -> None:
    """Have this process end soon after the one that started it."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def describe_death(pid: int) -> str | None:
    """How a child process ended, or None if it runs; leaves it for its parent to be waited for."""
    try:
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # waited for already, or a forkserver's child
        return None if is_alive(pid) else "ended"
    if status is None:
        return None
    if status.si_code == os.CLD_EXITED:
        return f"exited with status {status.si_status}"
    return f"was killed by {signal.Signals(status.si_status).name}"


class Crew:
    """The worker processes of one loader, as the main process knows them.

    Attributes:
        waiting: The main thread is inside the loader's `next`.
        casualty: A worker died while it was not; the next `next` tells.
    """

    def __init__(self, pids: IntArray) -> None:
        self._pids = pids
        self.waiting = self.casualty = False

    def deaths(self) -> list[str]:
        """Who died of the workers that have started, and how."""
        found = ((worker, int(pid), describe_death(int(pid))) for worker, pid in enumerate(self._pids) if pid)
        return [f"worker {worker} (pid {pid}) {how}" for worker, pid, how in found if how]

    def kill(self) -> None:
        """End all workers at once, whatever they do."""
        for pid in self._pids:
            if pid and describe_death(int(pid)) is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)


_crews: weakref.WeakSet[Crew] = weakref.WeakSet()


class _ChildHandler:
    """Stands before torch's SIGCHLD handler, whose error it passes on only where a user expects one."""

    def __init__(self, torch_handler: Callable[[int, FrameType | None], Any]) -> None:
        self._torch_handler = torch_handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self._torch_handler(number, frame)
        except RuntimeError:
            struck = [crew for crew in _crews if crew.deaths()]
            for crew in struck:
                crew.casualty = True
            if not struck or any(crew.waiting for crew in struck):
                raise


def guard(crew: Crew) -> None:
    """Have deaths in the crew told by the loader's `next` alone; once torch's own handler is in place."""
    _crews.add(crew)
    if threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGCHLD)
        if callable(handler) and not isinstance(handler, _ChildHandler):
            signal.signal(signal.SIGCHLD, _ChildHandler(handler))
