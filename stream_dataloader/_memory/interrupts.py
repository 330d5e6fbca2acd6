"""Signals around the start of processes.

What runs at a fork throws exceptions away, and torch's own start leaves half of it behind when it is interrupted.

Guarantee: Ctrl-C is not for the processes that are started meanwhile, and no signal's handler comes between two halves
of a start; what it would have done is not lost.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from typing import Any

__all__ = ["deliver", "interrupts_held"]

Interrupts = list[Callable[[], Any]]


@contextlib.contextmanager
def interrupts_held(method: str) -> Iterator[Interrupts]:
    """Start processes that do not hear Ctrl-C: they begin with SIGINT blocked.

    What handlers of signals would have done here is in the list that this yields, for `deliver`.
    """
    if method != "fork":
        resource_tracker.ensure_running()  # which would unblock SIGINT
    if method == "forkserver":
        forkserver.ensure_running()  # others use it, who want their Ctrl-C
    interrupts: Interrupts = []
    handlers = _handlers()
    for number, handler in handlers.items():  # blocking them in this thread has another one take them
        signal.signal(number, functools.partial(_hold, interrupts, handler))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield interrupts
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _handlers() -> dict[int, Callable[..., Any]]:
    """The handlers in Python that a signal from outside may run; none but in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    found = {number: signal.getsignal(number) for number in signal.valid_signals() if number != signal.SIGCHLD}
    return {number: handler for number, handler in found.items() if callable(handler)}


def _hold(interrupts: Interrupts, handler: Callable[..., Any], *signalled: Any) -> None:
    interrupts.append(lambda: handler(*signalled))


def deliver(interrupts: Interrupts) -> None:
    """Do what was held, once all is in order again: all of it, whatever the first raises."""
    while interrupts:
        try:
            interrupts.pop(0)()
        finally:
            deliver(interrupts)
