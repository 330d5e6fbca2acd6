"""Clean-up that signal handlers cannot interrupt: when an object is collected, and while processes start.

Python discards errors that callbacks of weak references and `__del__` raise, even a KeyboardInterrupt. An interrupted
start of workers would stay half done.

Guarantees: no Python code runs when an object is collected; work that C code cannot do is done by a thread. Signal
handlers do not run in the middle of a start; they run after it.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import errno
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

from stream_dataloader._engine.descriptors import limits_named

T = TypeVar("T")
Key = TypeVar("Key", bound=Hashable)


class _Call(weakref.ref[Any]):
    """Weak reference with a function, which is called without an argument once the object is gone."""

    __slots__ = ("call",)
    call: Callable[[], Any]


_call = operator.methodcaller("call")
_kept: dict[int, tuple[_Call, _Call]] = {}
_numbers = itertools.count()


def when_gone(watched: object, call: Callable[[], Any]) -> Callable[[], Any]:
    """Call a C function once an object is gone; return a function that cancels this."""
    refs, number = (_Call(watched, _call), _Call(watched, _call)), next(_numbers)
    forget = functools.partial(_kept.pop, number, None)
    refs[0].call, refs[1].call = call, forget
    _kept[number] = refs
    return forget


def in_thread(function: Callable[[], Any]) -> Callable[[], Any]:
    """Return a C function, as `when_gone` needs, that calls a function in a new thread."""
    return functools.partial(_thread.start_new_thread, _start_thread, (function,))


def _start_thread(function: Callable[[], Any]) -> None:
    """Start a thread that `threading` knows; a raw thread would stay on its list for ever."""
    start_thread(function, "stream-ending")


def start_thread(run: Callable[[], Any], name: str) -> threading.Thread:
    """Start a thread that does not keep the program from exiting.

    An interrupted `Thread.start` would leave a thread that never runs on `threading`'s list, and what it refers to.
    """
    with interrupts_held(), limits_named(f"a thread, {name!r}"):
        thread = threading.Thread(target=run, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # which does not tell why; the usual reason is the limit of processes
            raise OSError(errno.EAGAIN, str(error)) from error
    return thread


class Ending:
    """Clean-up that runs once its owner is gone, in a thread of its own, or earlier by `now`.

    Args:
        owner: The owner.
        end: The clean-up, which must not refer to the owner. If it is interrupted, it is called again.
    """

    def __init__(self, owner: object, end: Callable[[], Any]) -> None:
        self._end = end
        self._process = os.getpid()
        self._turn = threading.RLock()
        self._over = False
        self._forget: Callable[[], Any] = _nothing  # until the next line is complete, which may be interrupted
        self._forget = when_gone(owner, in_thread(self.now))
        # Exit functions run in reverse order. Registering late lets this one run while threads can still reach ranks.
        if not _ahead:
            atexit.unregister(_end_all)
            atexit.register(_end_all)
        _ahead.add(self)

    def now(self) -> None:
        """Run the clean-up now, or wait until it has run; do nothing in a process that was forked since."""
        if self._process != os.getpid():
            return
        with self._turn:
            if not self._over:
                self._end()
                self._over, self._end = True, _nothing  # replaced to drop the objects that `end` refers to
                self._forget()
                _ahead.discard(self)


def _nothing() -> None:
    pass


_ahead: set[Ending] = set()
_program_ends = False


def program_ends() -> bool:
    """Return whether the program is exiting and its clean-ups run or have run."""
    return _program_ends


def _end_all() -> None:
    """Run all clean-ups while threads can still be started and joined."""
    global _program_ends
    _program_ends = True
    for ending in tuple(_ahead):
        ending.now()


class WeakItems(Generic[Key]):
    """A set with weak references to its objects."""

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
    """A mapping with weak references to its values."""

    def __init__(self) -> None:
        self._refs: dict[Key, weakref.ref[Any]] = {}
        self._room = 64  # entries before dead ones are removed

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
def interrupts_held(start_method: str | None = None) -> Iterator[None]:
    """Return a context in which signal handlers wait: they are called at its end.

    Args:
        start_method: How multiprocessing starts processes inside. They ignore Ctrl-C: they begin with SIGINT blocked.
    """
    if start_method in ("spawn", "forkserver"):
        resource_tracker.ensure_running()  # started before SIGINT is blocked, as its start would unblock the signal
    if start_method == "forkserver":
        forkserver.ensure_running()  # started before SIGINT is blocked, as other code's children must get Ctrl-C
    interrupts: Interrupts = []
    handlers, before = _handlers(), None
    try:
        # The handlers are replaced, not blocked: a signal that this thread blocks would be handled by another thread.
        for number, handler in handlers.items():
            signal.signal(number, functools.partial(_hold, interrupts, handler))
        if start_method is not None:
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        yield
    finally:
        try:
            _restore(handlers, before)
        finally:
            _deliver(interrupts)


def _restore(handlers: dict[int, Callable[..., Any]], mask: set[Any] | None) -> None:
    """Restore all handlers, even if one that is back already raises meanwhile."""
    try:
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        while handlers:
            number = next(iter(handlers))
            signal.signal(number, handlers[number])
            del handlers[number]
    finally:
        if handlers:
            _restore(handlers, mask)


def _handlers() -> dict[int, Callable[..., Any]]:
    """Return the Python handlers that a signal from outside may run; only the main thread has any."""
    if threading.get_ident() != threading.main_thread().ident:  # `current_thread` would add a raw thread to a list
        return {}
    found = {number: signal.getsignal(number) for number in signal.valid_signals() if number != signal.SIGCHLD}
    return {number: handler for number, handler in found.items() if callable(handler)}


def _hold(interrupts: Interrupts, handler: Callable[..., Any], *signalled: Any) -> None:
    interrupts.append(lambda: handler(*signalled))


def _deliver(interrupts: Interrupts) -> None:
    """Run the held calls, all of them, even if the first raises."""
    while interrupts:
        try:
            interrupts.pop(0)()
        finally:
            _deliver(interrupts)
