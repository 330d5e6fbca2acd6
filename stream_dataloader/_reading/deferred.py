"""What `iter()` returns: an iterator that begins an epoch with its first `next`, for one thread at a time.

Guarantees: an iterator that nothing was read from has started no worker, and has taken neither an epoch number nor a
loaded state. Of iterators that share a `Turn` only the newest that has begun is read; the ones before raise, unless
they had ended. A second thread that reads at the same moment gets an error, and so does a forked process.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeAlias, TypeVar

from stream_dataloader.errors import IteratorError

Batch = TypeVar("Batch")

#: The iterator over an epoch's batches, and what ends it.
Begun: TypeAlias = tuple[Iterator[Batch], Callable[[], None]]

_NEWER_HAS_BEGUN = (
    "a newer iter() of this StreamDataLoader has begun, or a state was loaded, which ended this iteration; to read "
    "twice at once, build a StreamDataLoader for each"
)


class Turn:
    """Whose turn it is to read: one iterator's, in one thread.

    Attributes:
        lock: Held while one is read; a thread may take it twice.
        asked: How many iterators were asked for.
        newest: The number of the newest that has begun.
        holding: The number of the last that held the lock to be read.
        reader: A reference to the one that may read.
    """

    def __init__(self) -> None:
        self._make_locks()
        self.asked = self.newest = self.holding = 0
        self.reader: Callable[[], Deferred[Any] | None] = type(None)

    def renew(self) -> None:
        """In a process that was forked, have the lock free, though another thread held it."""
        if self._of != os.getpid():
            self._make_locks()

    def _make_locks(self) -> None:
        self.lock: Any = threading.RLock()
        self._of = os.getpid()
        self._gate = threading.RLock()  # held by a thread that waits for the lock, in front of whoever reads
        self.waiting: deque[None] = deque()  # an entry for each such thread

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Hold the lock, before a thread that reads in a loop takes it again."""
        self.renew()
        if self.lock._is_owned():  # it waits for nothing, and another thread at the gate may wait for it
            yield
            return
        self.waiting.append(None)
        try:
            with self._gate, self.lock:
                yield
        finally:
            self.waiting.pop()

    def let_others_first(self) -> None:
        """Wait for threads that wait for the lock."""
        if not self.lock._is_owned():
            with self._gate:
                pass

    def end(self) -> None:
        """Let nobody read on who has begun."""
        self.reader = type(None)


class Deferred(Generic[Batch]):
    """Begins when the first batch is asked for.

    Args:
        begin: Begins an epoch; asked again if it failed.
        turn: Shared by iterators of which a new one ends the old, once that has its batch.
    """

    def __init__(self, begin: Callable[[], Begun[Batch]], turn: Turn | None = None) -> None:
        self._begin, self._turn = begin, turn or Turn()
        self._turn.asked += 1
        self._number = self._turn.asked
        self._batches: Iterator[Batch] | None = None
        self._end: Callable[[], None] | None = None  # None before it begins, and once it has ended
        self._owner = 0  # the process in which it has begun

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        turn = self._turn
        if turn.waiting:
            turn.let_others_first()
        if self._owner != os.getpid():
            self._take_first_turn()
        elif not turn.lock.acquire(False):
            if turn.holding > self._number:
                raise IteratorError(_NEWER_HAS_BEGUN)
            raise RuntimeError(
                "another thread is reading from this iterator, or from a newer one; let one thread read, and hand "
                "batches to others in a queue.Queue, or guard next() with a threading.Lock"
            )
        turn.holding = self._number
        try:
            if self._batches is None:
                self._batches = self._first()
            elif self._end is not None and turn.reader() is not self:
                raise IteratorError(_NEWER_HAS_BEGUN)
            return next(self._batches)
        except StopIteration:
            self._leave()
            raise
        finally:
            turn.lock.release()

    def begin(self) -> None:
        """Begin now; the first batch is waited for when it is asked for."""
        self._take_first_turn()
        try:
            if self._batches is None:
                self._batches = self._first()
        finally:
            self._turn.lock.release()

    def _take_first_turn(self) -> None:
        if self._is_foreign():
            raise IteratorError(
                f"this iterator was begun in process {self._owner}, and this is process {os.getpid()}, which was "
                "forked meanwhile: it cannot read on; call iter() here for an epoch of its own"
            )
        with self._turn.taken():
            self._turn.lock.acquire()

    def _is_foreign(self) -> bool:
        return self._batches is not None and self._owner not in (0, os.getpid())

    def _first(self) -> Iterator[Batch]:
        """Begin."""
        turn = self._turn
        if self._number < turn.newest:
            raise IteratorError(_NEWER_HAS_BEGUN)
        self._owner = os.getpid()  # from now on, who comes meanwhile hears so
        try:
            batches, self._end = self._begin()
        except BaseException:
            self._owner = 0
            raise
        turn.newest, turn.reader = self._number, weakref.ref(self)
        return batches

    def _leave(self) -> None:
        """Nothing more of it is wanted."""
        end, self._end, self._batches = self._end, None, iter(())
        if end is not None and self._turn.reader() is self:  # else it was ended as the newer one began
            self._turn.end()
            end()

    def close(self) -> None:
        """Leave the epoch, or never begin one."""
        if not self._is_foreign():
            with self._turn.taken():
                self._leave()
