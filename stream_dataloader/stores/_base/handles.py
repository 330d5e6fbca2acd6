"""Files that are opened once per process, and shared by the streams that read them.

Guarantee: only the files that a stream reads and the few used last are open.
A child process opens its own. A machine fetches a part of a store once.
"""

from __future__ import annotations

import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any, Generic, TypeVar

from stream_dataloader._engine.descriptors import above_standard
from stream_dataloader._engine.memory.endings import start_thread
from stream_dataloader.streams.cache import LocalFile

__all__ = ["Handles", "Lease", "ShardReader", "Shards"]

KeyT = TypeVar("KeyT", bound=Hashable)
HandleT = TypeVar("HandleT")


class Handles(Generic[KeyT, HandleT]):
    """Shared open files; `open_` opens one. At most `most_idle` files stay open that no stream reads."""

    def __init__(self, open_: Callable[[KeyT], HandleT], most_idle: int = 16) -> None:
        self._open = open_
        self._most_idle = most_idle
        self.close()
        _ALL.add(self)

    def close(self) -> None:
        """Forget all files; each is closed once no stream reads it."""
        self._lock = threading.Lock()  # after a fork, the holder of the old lock may not exist
        self._shared: weakref.WeakValueDictionary[KeyT, _Shared] = weakref.WeakValueDictionary()
        self._latest: dict[KeyT, _Shared] = {}  # in order of use, the latest last

    def lease(self, key: KeyT) -> Lease[KeyT, HandleT]:
        """Return a lease of a file, and open the file if necessary. The caller must close the lease."""
        with self._lock:
            known, latest = self._shared, self._latest
            if (shared := known.get(key)) is None:
                with above_standard():
                    shared = known[key] = _Shared(self._open(key))
            latest.pop(key, None)
            latest[key] = shared
            while len(latest) > self._most_idle:
                del latest[next(iter(latest))]
            return Lease(shared)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._open, self._most_idle)


class _Shared:
    """An open file, which is closed when nothing refers to this object."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        weakref.finalize(self, _close, handle, os.getpid()).atexit = False


def _close(handle: Any, opened_by: int) -> None:
    if os.getpid() == opened_by:
        handle.close()
    else:
        _INHERITED.append(handle)


class Lease(Generic[KeyT, HandleT]):
    """One stream's share of an open file, which ends when it is closed or collected."""

    def __init__(self, shared: _Shared) -> None:
        self._shared: _Shared | None = shared
        self.handle: HandleT = shared.handle

    def close(self) -> None:
        """End the share; may be called twice."""
        self._shared = None


class Shards(Handles[int, HandleT], ABC):
    """Parts of a store by number. Idle parts in the cache are closed, so that the cache can delete them."""

    def __init__(self, most_idle: int = 0) -> None:
        super().__init__(self._opened, most_idle)

    @abstractmethod
    def file(self, number: int) -> LocalFile:
        """Return a part as a local file; wait until it is fetched."""

    @abstractmethod
    def _opened(self, number: int) -> HandleT: ...

    def is_here(self, number: int) -> bool:
        """Return True if a part need not be fetched or unpacked."""
        del number
        return False

    def open(self, number: int) -> Lease[int, HandleT]:
        """Return a lease of a part, which the caller must close; wait until the part is fetched."""
        with self.file(number):  # fetch it first, because only one part is opened at a time
            return self.lease(number)

    def ahead(self, number: int) -> list[LocalFile]:
        """Fetch a part in a thread. The part is held for as long as the returned list exists."""
        held: list[LocalFile] = []

        def fetch() -> None:
            with suppress(Exception):  # the reader will get the same error, and report its place
                held.append(self.file(number))

        start_thread(fetch, "stream_dataloader shard")
        return held


class ShardReader(Generic[HandleT]):
    """Reader of one stream's parts. Up to `ahead` more parts, but none after `last`, are fetched in advance."""

    def __init__(self, shards: Shards[HandleT], ahead: int, last: int) -> None:
        self._shards, self._most_ahead, self._last = shards, ahead, last
        self._open: tuple[int, Lease[int, HandleT]] | None = None
        self._ahead: dict[int, list[LocalFile]] = {}

    def at(self, number: int) -> HandleT:
        """Return a part, which stays open until another one is requested."""
        if self._open is None or self._open[0] != number:
            self._open = None
            self._open = number, self._shards.open(number)
            ahead, shards = self._ahead, self._shards
            wanted = range(number + 1, min(number + self._most_ahead, self._last) + 1)
            self._ahead = {
                one: ahead[one] if one in ahead else shards.ahead(one) for one in wanted if not shards.is_here(one)
            }
        return self._open[1].handle

    def close(self) -> None:
        self._open, self._ahead = None, {}


_ALL: weakref.WeakSet[Handles[Any, Any]] = weakref.WeakSet()

#: Open files of the parent process, kept alive in a child. Else HDF5 would close them there and free the parent's lock.
_INHERITED: list[Any] = []


def _close_all() -> None:
    for handles in list(_ALL):
        handles.close()


os.register_at_fork(before=_close_all, after_in_child=_close_all)
