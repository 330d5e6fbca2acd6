"""What torch's DataLoader does that its interface does not say: texts of errors, a signal handler, patience.

Each of these may change with a release of torch; `tests/workers/test_torch_quirks.py` has a test for each, which fails
against a torch that has changed.
"""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader

#: How long torch waits for each worker, one after the other, when one of its iterators goes.
JOIN_SECONDS = 5.0


def is_timeout(error: Exception) -> bool:
    """Whether an error of torch's says that no message came within its `timeout`, and not that a worker died."""
    return "timed out" in str(error)


def dead_worker(error: RuntimeError) -> int:
    """The process id of the worker of whose death an error of torch's tells; 0 if it tells of none."""
    found = re.search(r"pid\D*(\d+)", str(error))
    return int(found[1]) if found else 0


class DeathNotice(Exception):
    """A signal handler tells that a worker died, in whatever code is running.

    torch raises a RuntimeError there. `threading.Condition.notify`, which every request to a worker goes through,
    swallows those: the loader would wait for a worker that is dead.
    """


def tells_of_death(error: Exception) -> bool:
    """Whether a signal handler raised an error, in whatever code was running, as a worker died."""
    torchs = isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker (pid")
    return torchs or isinstance(error, DeathNotice)


def iterator_of(dataloader: DataLoader[Any], *, kept: bool) -> Iterator[Any]:
    """An iterator of torch's; if it cannot be had as a worker died, one that says so where messages are awaited.

    Args:
        dataloader: torch's.
        kept: Its workers are those of the iteration before.
    """
    try:
        return iter(dataloader)
    except (BrokenPipeError, ConnectionResetError, EOFError) as error:  # a worker died before it knew its task
        return _Broken(error)
    except RuntimeError as error:  # one that was kept died, or did not answer
        if not kept:
            raise
        return _Broken(error)


def messages_of(iterator: Iterator[Any]) -> Any:
    """The queue that an iterator of torch's gets workers' messages from; None if it has none."""
    return getattr(iterator, "_worker_result_queue", None)


class _Broken(Iterator[Any]):
    """Stands for an iterator of torch's that could not be had, and raises why where parts are awaited."""

    def __init__(self, reason: Exception) -> None:
        self._reason = str(reason)

    def __next__(self) -> Any:
        raise RuntimeError(self._reason)


class _ChildHandler:
    """Stands before torch's SIGCHLD handler: looks after loaders' workers itself, and passes on what is about others.

    torch takes every worker that exits with status 0 for one that is done.
    """

    def __init__(
        self,
        torch_handler: Callable[[int, FrameType | None], Any],
        wanted: Callable[[int], bool],
        died: Callable[[], int],
    ) -> None:
        self._torch_handler = torch_handler
        self._wanted = wanted
        self._died = died

    def __call__(self, number: int, frame: FrameType | None) -> None:
        pid = self._died()
        try:
            self._torch_handler(number, frame)
        except RuntimeError as error:
            if self._wanted(dead_worker(error)):
                raise
        if pid:
            raise DeathNotice(f"worker (pid {pid}) died")


def guard_handler(wanted: Callable[[int], bool], died: Callable[[], int] = lambda: 0) -> None:
    """Keep torch from raising a worker's death in whatever code is running; once torch's handler is in place.

    torch sets its handler once, with the first worker of the process, so this one stays in front of it.

    Args:
        wanted: Whether torch is to raise the death of a process there all the same, by its id.
        died: Called when a process has ended; the id of one of whose death to raise a `DeathNotice` there, or 0.
    """
    if threading.current_thread() is threading.main_thread():  # handlers can be set, and run, in no other
        handler = signal.getsignal(signal.SIGCHLD)
        if callable(handler) and not isinstance(handler, _ChildHandler):
            signal.signal(signal.SIGCHLD, _ChildHandler(handler, wanted, died))
