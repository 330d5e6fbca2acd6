"""Ctrl-C around the start of processes.

Guarantee: Ctrl-C is not for the processes that are started meanwhile, and does not come between two halves of a start.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from typing import Any

__all__ = ["interrupts_held"]


@contextlib.contextmanager
def interrupts_held(method: str) -> Iterator[list[Callable[[], Any]]]:
    """Start processes that do not hear Ctrl-C: they begin with SIGINT blocked.

    What it would have done here is in the list that this yields; its first is to be called when all is in order again.

    Args:
        method: How processes are started.
    """
    if method != "fork":
        resource_tracker.ensure_running()  # which would unblock SIGINT
    if method == "forkserver":
        forkserver.ensure_running()  # others use it, who want their Ctrl-C
    interrupts: list[Callable[[], Any]] = []
    handler = signal.getsignal(signal.SIGINT)
    holds = threading.current_thread() is threading.main_thread() and callable(handler)
    if holds:  # blocking it in this thread has another one take it
        signal.signal(signal.SIGINT, lambda *signalled: interrupts.append(lambda: handler(*signalled)))  # type: ignore[operator,misc]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield interrupts
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if holds:
            signal.signal(signal.SIGINT, handler)
