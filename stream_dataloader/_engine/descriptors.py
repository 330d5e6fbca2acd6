"""Protection of descriptors 0, 1 and 2, the program's standard streams, if it was started without them.

The system gives each new file the lowest free descriptor. If 2 is free, a C library's warnings go to the file that got
it: to memory with batches, to a socket, to a store. So free ones of the three are occupied while others are created::

    started with 2>&-     0 1 - 3 ...     above_standard()     0 1 x 3 ...     memfd_create() -> 4

A placeholder is an `O_PATH` descriptor. Reading and writing it fail as for a closed one (EBADF).

Worker processes, which run code of users, keep the null device there: output of libraries is lost, as before, and
programs that streams start are safe, too.

Guarantees: descriptors created within `above_standard` are 3 or higher, even if several threads create them. In a
process that was started within `standard_for_children`, 0, 1 and 2 are open before code of users is imported.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_FIRST_OTHER = 3
_CLOSED_BY_EXEC = getattr(os, "O_CLOEXEC", 0)
_FLAGS = getattr(os, "O_PATH", os.O_RDONLY) | _CLOSED_BY_EXEC

_turn = threading.RLock()  # reentrant, as a signal handler may create a descriptor while the lock is held
_users = 0
_placeholders: list[int] = []

#: What to do if the system refuses something, by the error's number.
_REMEDIES = {
    errno.EMFILE: "raise the limit of open files (ulimit -n), or use fewer workers",
    errno.ENFILE: "raise the system's limit of open files, or use fewer workers",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f), which also holds for memory that processes share",
    errno.ENOMEM: "raise the limit of memory (ulimit -v, or that of the container or job), or read smaller batches",
    errno.EAGAIN: "raise the limit of processes (ulimit -u, or that of the container), or use fewer workers",
}


@contextmanager
def limits_named(what: str) -> Iterator[None]:
    """Return a context in which an OSError of a limit says what was asked of the system, and how to raise the limit."""
    try:
        yield
    except OSError as error:
        if (remedy := _REMEDIES.get(error.errno or 0)) is None or isinstance(error.__cause__, OSError):
            raise
        raise OSError(error.errno, f"{error.strerror}: the system refuses {what}; {remedy}") from error


@contextmanager
def above_standard() -> Iterator[None]:
    """Return a context in which new descriptors are 3 or higher."""
    hold_standard()
    try:
        yield
    finally:
        _release()


def hold_standard() -> None:
    """Make all descriptors that this process creates from now on 3 or higher."""
    global _users
    with _turn:
        _users += 1
        if os.name == "posix" and not has_standard():
            while (descriptor := os.open("/", _FLAGS)) < _FIRST_OTHER:
                _placeholders.append(descriptor)
            os.close(descriptor)


@contextmanager
def standard_for_children() -> Iterator[None]:
    """Return a context to start processes, which inherit the null device in place of closed standard streams."""
    with above_standard():
        _open_placeholders()
        yield


def open_standard() -> None:
    """Open the null device for closed ones of 0, 1 and 2, also for programs that are started from here."""
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
    """Return whether 0, 1 and 2 are open."""
    try:
        for descriptor in range(_FIRST_OTHER):
            os.fstat(descriptor)
    except OSError:
        return False
    return True


def _renew_lock() -> None:
    """Make a new lock in a forked process, where a thread of the parent may have held the old one."""
    global _turn
    _turn = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)
