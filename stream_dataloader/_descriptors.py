"""Descriptors 0, 1 and 2 are the program's standard streams, also where it was started without them.

The lowest free descriptor is taken for each new file. Where 2 is free, a C library's warning goes to whatever took it:
to memory with batches, to a socket, to a store. So free ones of the three are taken while others are created::

    started with 2>&-     0 1 - 3 ...     above_standard()     0 1 x 3 ...     memfd_create() -> 4

A placeholder is an `O_PATH` descriptor, for which reading and writing fail as for one that is closed (EBADF).

Worker processes, which run code of users, have the null device there for good: what libraries write is lost, as before,
and programs that streams start are safe, too.

Guarantees: what is created within `above_standard` is 3 or higher, also if several threads create something. In a
process that was started within `standard_for_children`, 0, 1 and 2 are open before code of users is imported.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_FIRST_OTHER = 3
_CLOSED_BY_EXEC = getattr(os, "O_CLOEXEC", 0)
_FLAGS = getattr(os, "O_PATH", os.O_RDONLY) | _CLOSED_BY_EXEC

_turn = threading.RLock()  # a signal handler may create something while it is held
_users = 0
_placeholders: list[int] = []


@contextmanager
def above_standard() -> Iterator[None]:
    """Create descriptors that are none of 0, 1 and 2."""
    hold_standard()
    try:
        yield
    finally:
        _release()


def hold_standard() -> None:
    """Have all descriptors that this process creates from now on be 3 or higher."""
    global _users
    with _turn:
        _users += 1
        if os.name == "posix" and not has_standard():
            while (descriptor := os.open("/", _FLAGS)) < _FIRST_OTHER:
                _placeholders.append(descriptor)
            os.close(descriptor)


@contextmanager
def standard_for_children() -> Iterator[None]:
    """Start processes: they inherit the null device in place of standard streams that are closed here."""
    with above_standard():
        _open_placeholders()
        yield


def open_standard() -> None:
    """Have those of 0, 1 and 2 that are closed be the null device, here and in programs that are started from here."""
    hold_standard()
    _open_placeholders()


def _open_placeholders() -> None:
    with _turn:
        if _placeholders:
            null = os.open(os.devnull, os.O_RDWR | _CLOSED_BY_EXEC)
            for descriptor in _placeholders:
                os.dup2(null, descriptor, inheritable=True)
            os.close(null)


def _release() -> None:
    global _users
    with _turn:
        _users -= 1
        while _placeholders and not _users:
            os.close(_placeholders.pop())


def has_standard() -> bool:
    """Whether 0, 1 and 2 are open."""
    try:
        for descriptor in range(_FIRST_OTHER):
            os.fstat(descriptor)
    except OSError:
        return False
    return True


def _renew_lock() -> None:
    """Another thread may have held it, which is not in the process that was forked."""
    global _turn
    _turn = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)
