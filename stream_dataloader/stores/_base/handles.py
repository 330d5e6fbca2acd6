"""Files that are open once a process, and shared by the streams that read them.

Guarantee: those are open that some stream reads, and the few that were used last. A child opens its own.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

__all__ = ["Handles", "Lease"]

KeyT = TypeVar("KeyT", bound=Hashable)
HandleT = TypeVar("HandleT")


class Handles(Generic[KeyT, HandleT]):
    """Opens each of some files once; sent to another process, it has none open.

    Args:
        open_: Opens one; what it returns has a `close`.
        most_idle: How many stay open that nobody reads.
    """

    def __init__(self, open_: Callable[[KeyT], HandleT], most_idle: int = 16) -> None:
        self._open = open_
        self._most_idle = most_idle
        self.close()
        _ALL.add(self)

    def close(self) -> None:
        """Close all that nobody reads now, and the others when nobody does any more."""
        self._lock = threading.Lock()  # a fork may have lost who holds the old one
        self._shared: weakref.WeakValueDictionary[KeyT, _Shared] = weakref.WeakValueDictionary()
        self._latest: dict[KeyT, _Shared] = {}  # the one that was used last comes last

    def lease(self, key: KeyT) -> Lease[KeyT, HandleT]:
        """Open a file, unless it is open; to be closed."""
        with self._lock:
            known, latest = self._shared, self._latest
            if (shared := known.get(key)) is None:
                shared = known[key] = _Shared(self._open(key))
            latest.pop(key, None)
            latest[key] = shared
            while len(latest) > self._most_idle:
                del latest[next(iter(latest))]
            return Lease(shared)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._open, self._most_idle)


class _Shared:
    """A file that is open, until nothing refers to this."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        weakref.finalize(self, _close, handle, os.getpid()).atexit = False


def _close(handle: Any, opened_by: int) -> None:
    if os.getpid() == opened_by:
        handle.close()
    else:
        _INHERITED.append(handle)


class Lease(Generic[KeyT, HandleT]):
    """One stream's share of an open file; given back when it is closed, or dies.

    Attributes:
        handle: The open file.
    """

    def __init__(self, shared: _Shared) -> None:
        self._shared: _Shared | None = shared
        self.handle: HandleT = shared.handle

    def close(self) -> None:
        """Give it back; may be called twice."""
        self._shared = None


_ALL: weakref.WeakSet[Handles[Any, Any]] = weakref.WeakSet()

#: A parent's. HDF5 would close one that dies in a child, and free the parent's lock.
_INHERITED: list[Any] = []


def _close_all() -> None:
    for handles in list(_ALL):
        handles.close()


os.register_at_fork(before=_close_all, after_in_child=_close_all)
