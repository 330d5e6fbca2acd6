"""Files that are open once a process, and shared by the streams that read them.

Guarantee: how many are open is bounded: one for each that some stream reads, and a few that none reads. What one
process has opened, another one never uses: before a `fork` what is idle is closed, and the child opens its own.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

__all__ = ["Handles", "Lease"]

KeyT = TypeVar("KeyT", bound=Hashable)
HandleT = TypeVar("HandleT")

_MOST_IDLE = 16


class Handles(Generic[KeyT, HandleT]):
    """Opens each of some files once. Sent to another process, it has nothing open there.

    Args:
        open_: Opens one; what it raises, `lease` raises. What it returns has a `close`.
        most_idle: How many stay open that nobody reads.
    """

    def __init__(self, open_: Callable[[KeyT], HandleT], most_idle: int = _MOST_IDLE) -> None:
        self._open = open_
        self._most_idle = most_idle
        self._forget([])
        _ALL.add(self)

    def _forget(self, inherited: list[_Entry[KeyT, HandleT]]) -> None:
        """Begin anew, in this process; what another has open stays as it is, and is not closed here."""
        self._inherited = inherited
        self._lock = threading.RLock()  # a stream that dies gives its file back, at any moment
        self._entries: dict[KeyT, _Entry[KeyT, HandleT]] = {}  # the one that was used last comes last

    def lease(self, key: KeyT) -> Lease[KeyT, HandleT]:
        """Open a file, unless it is open; to be closed."""
        with self._lock:
            if (entry := self._entries.get(key)) is None:
                entry = _Entry(key, self._open(key))
            entry.users += 1
            self._entries.pop(key, None)
            self._entries[key] = entry
        return Lease(self, entry)

    def release(self, entry: _Entry[KeyT, HandleT]) -> None:
        """One stream less reads it."""
        with self._lock:
            entry.users -= 1
            if self._entries.get(entry.key) is entry:
                self._close_idle(self._most_idle)
            elif not entry.users and entry not in self._inherited:
                entry.handle.close()

    def close(self) -> None:
        """Close all that nobody reads now, and the others when nobody does any more."""
        with self._lock:
            self._close_idle(0)
            self._entries.clear()

    def _close_idle(self, most: int) -> None:
        idle = [entry for entry in self._entries.values() if not entry.users]
        for entry in idle[: max(0, len(idle) - most)]:
            if self._entries.pop(entry.key, None) is not None:
                entry.handle.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._open, self._most_idle)

    def before_fork(self) -> None:
        """Have the child inherit as little as can be."""
        with self._lock:
            self._close_idle(0)

    def after_fork(self) -> None:
        """In the child; the lock may be that of a thread which is not here."""
        self._forget([*self._inherited, *self._entries.values()])


@dataclass(eq=False)
class _Entry(Generic[KeyT, HandleT]):
    """A file that is open, and how many read it."""

    key: KeyT
    handle: Any
    users: int = 0


class Lease(Generic[KeyT, HandleT]):
    """One stream's share of an open file; given back when it is closed, or dies.

    Attributes:
        handle: The open file.
    """

    def __init__(self, handles: Handles[KeyT, HandleT], entry: _Entry[KeyT, HandleT]) -> None:
        self.handle: HandleT = entry.handle
        self._release = weakref.finalize(self, handles.release, entry)
        self._release.atexit = False

    def close(self) -> None:
        """Give it back; may be called twice."""
        self._release()


_ALL: weakref.WeakSet[Handles[Any, Any]] = weakref.WeakSet()


def _before_fork() -> None:
    for handles in list(_ALL):
        handles.before_fork()


def _after_fork() -> None:
    for handles in list(_ALL):
        handles.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
