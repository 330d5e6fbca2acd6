"""Where no handler of a signal may run: where objects go, and in the midst of the start of a process.

Python throws away what callbacks of weak references and `__del__` raise, a KeyboardInterrupt in them too. A start
of workers that is interrupted stays half done.

Guarantees: no Python code runs where an object goes. What C cannot do is done by a thread. No handler comes between two
halves of a start, and what it would have done is not lost.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import functools
import itertools
import operator
import os
import signal
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from multiprocessing import forkserver, resource_tracker
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Key = TypeVar("Key", bound=Hashable)


class _Call(weakref.ref[Any]):
    """Calls a function without an argument once its object is gone."""

    __slots__ = ("call",)
    call: Callable[[], Any]


_call = operator.methodcaller("call")
_kept: dict[int, tuple[_Call, _Call]] = {}
_numbers = itertools.count()


def when_gone(watched: object, call: Callable[[], Any]) -> Callable[[], Any]:
    """Have a function of C called once an object is gone; returns how to cancel."""
    refs, number = (_Call(watched, _call), _Call(watched, _call)), next(_numbers)
    forget = functools.partial(_kept.pop, number, None)
    refs[0].call, refs[1].call = call, forget
    _kept[number] = refs
    return forget


def in_thread(function: Callable[[], Any]) -> Callable[[], Any]:
    """What has a function called in a thread of its own: of C, for `when_gone`."""
    return functools.partial(_thread.start_new_thread, _start_thread, (function,))


def _start_thread(function: Callable[[], Any]) -> None:
    """Start a thread that `threading` knows; a thread without it would stay on its list."""
    threading.Thread(target=function, name="stream-ending", daemon=True).start()


class Ending:
    """Ends something once its owner is gone, in a thread of its own; or sooner, where that is asked for.

    Args:
        owner: Whose it is.
        end: Ends it; must not keep the owner. If that is interrupted, it is called again.
    """

    def __init__(self, owner: object, end: Callable[[], Any]) -> None:
        self._end = end
        self._process = os.getpid()
        self._turn = threading.RLock()
        self._over = False
        self._forget = when_gone(owner, in_thread(self.now))
        if not _ahead:  # here: what is registered last is done first, while there are threads to speak to other ranks
            atexit.unregister(_end_all)
            atexit.register(_end_all)
        _ahead.add(self)

    def now(self) -> None:
        """End it, or wait until it has ended; in a process that was forked since, nothing."""
        if self._process != os.getpid():
            return
        with self._turn:
            if not self._over:
                self._end()
                self._over, self._end = True, _nothing  # and all that it held
                self._forget()
                _ahead.discard(self)


def _nothing() -> None:
    pass


_ahead: set[Ending] = set()
_program_ends = False


def program_ends() -> bool:
    """Whether what there is has been, or is being, ended as the program ends."""
    return _program_ends


def _end_all() -> None:
    """End what there is while threads can be started and joined."""
    global _program_ends
    _program_ends = True
    for ending in tuple(_ahead):
        ending.now()


class WeakItems(Generic[Key]):
    """A set of objects that it does not keep."""

    def __init__(self) -> None:
        self._refs: dict[weakref.ref[Key], bool] = {}

    def add(self, item: Key) -> None:
        self._refs[weakref.ref(item, self._refs.pop)] = True

    def clear(self) -> None:
        self._refs.clear()

    def __contains__(self, item: Key) -> bool:
        return weakref.ref(item) in self._refs

    def __iter__(self) -> Iterator[Key]:
        return iter([item for ref in tuple(self._refs) if (item := ref()) is not None])


class WeakValues(Generic[Key, T]):
    """An object that it does not keep for each of several keys."""

    def __init__(self) -> None:
        self._refs: dict[Key, weakref.ref[Any]] = {}
        self._room = 64  # before those that are gone are left out

    def get(self, key: Key) -> T | None:
        ref = self._refs.get(key)
        return None if ref is None else ref()

    def __setitem__(self, key: Key, value: T) -> None:
        if len(self._refs) >= self._room:
            self._refs = {key: ref for key, ref in self._refs.items() if ref() is not None}
            self._room = max(64, 2 * len(self._refs))
        self._refs[key] = weakref.ref(value)


Interrupts = list[Callable[[], Any]]


@contextlib.contextmanager
def interrupts_held(method: str) -> Iterator[Interrupts]:
    """Start processes that do not hear Ctrl-C: they begin with SIGINT blocked.

    What handlers of signals would have done here is in the list that this yields.
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
