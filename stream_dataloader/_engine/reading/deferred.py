"""The iterator that `iter()` returns. It begins an epoch with its first `next`, and serves one thread at a time.

Guarantees: an unread iterator has started no worker, and has taken neither an epoch number nor a loaded state. Among
iterators that share a `Turn`, only the newest one that has begun can be read; older ones raise, unless they had ended.
A second thread that reads at the same moment gets an error, and so does a forked process.
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

#: The iterator over an epoch's batches, and the function that ends it.
Begun: TypeAlias = tuple[Iterator[Batch], Callable[[], None]]

_NEWER_HAS_BEGUN = (
    "a newer iter() of this StreamDataLoader has begun, or a state was loaded, which ended this iteration; for two "
    "iterations at the same time, build two StreamDataLoaders"
)


class Turn:
    """Right to read, which one iterator has at a time, in one thread.

    Attributes:
        lock: Held while an iterator is read; a thread may take it twice.
        asked: Number of iterators that were created.
        newest: Number of the newest iterator that has begun.
        holding: Number of the last iterator that held the lock to read.
        reader: A reference to the iterator that may read.
    """

    def __init__(self) -> None:
        self._make_locks()
        self.asked = self.newest = self.holding = 0
        self.reader: Callable[[], Deferred[Any] | None] = type(None)

    def renew(self) -> None:
        """Make new locks in a forked process, where a thread of the parent may have held the old ones for ever."""
        if self._of != os.getpid():
            self._make_locks()

    def _make_locks(self) -> None:
        self.lock: Any = threading.RLock()
        self._of = os.getpid()
        # A thread that reads in a loop releases the lock only for moments. A thread that waits for the lock holds this
        # gate, at which the reading thread stops; without it the waiting thread could starve.
        self._gate = threading.RLock()
        self.waiting: deque[None] = deque()  # an entry for each waiting thread

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Hold the lock, with precedence over a thread that reads in a loop."""
        self.renew()
        # A thread that owns the lock must not stop at the gate: another one may hold the gate and wait for this lock.
        if self.lock._is_owned():
            yield
            return
        self.waiting.append(None)
        try:
            with self._gate, self.lock:
                yield
        finally:
            self.waiting.pop()

    def let_others_first(self) -> None:
        """Let threads that wait for the lock take it first."""
        if not self.lock._is_owned():
            with self._gate:
                pass

    def end(self) -> None:
        """Make every iterator that has begun raise from now on."""
        self.reader = type(None)


def _ended_by_error() -> Exception:
    return IteratorError(
        "an error or an interrupt ended this iterator before its epoch was over; iterate anew, which begins the next "
        "epoch; a StreamDataLoader goes on there after loader.load_state_dict(loader.state_dict())"
    )


class UntilEnd(Generic[Batch]):
    """Iterator over what a generator yields. After an error, the generator alone would seem to have ended.

    Args:
        batches: The generator, or another iterator that cannot be read on after an error.
        ending: Returns the exception to raise if it is asked again after an error.
    """

    def __init__(self, batches: Iterator[Batch], ending: Callable[[], Exception] = _ended_by_error) -> None:
        self._batches, self._ending, self._failed = batches, ending, False

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._failed:
            raise self._ending()
        try:
            return next(self._batches)
        except StopIteration:
            raise
        except BaseException:
            self._failed = True
            raise

    def close(self) -> None:
        """Close the generator."""
        if callable(close := getattr(self._batches, "close", None)):
            close()


class Deferred(Generic[Batch]):
    """Iterator that begins its epoch when the first batch is requested.

    Args:
        begin: Begins an epoch; called again by the next `next` if it raised.
        turn: Shared by iterators that end each other: when one begins, it ends the one before.
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

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "an iterator over batches cannot be copied or pickled; copy the StreamDataLoader, which goes on behind the "
            "batch delivered last, or load its state_dict() into another one"
        )

    def begin(self) -> None:
        """Begin now, without waiting for the first batch."""
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
                "forked since and cannot read on; call iter() here for an epoch of its own"
            )
        with self._turn.taken():
            self._turn.lock.acquire()

    def _is_foreign(self) -> bool:
        return self._batches is not None and self._owner not in (0, os.getpid())

    def _first(self) -> Iterator[Batch]:
        """Begin the epoch and return its iterator."""
        turn = self._turn
        if self._number < turn.newest:
            raise IteratorError(_NEWER_HAS_BEGUN)
        # Set before the epoch begins, which may take long: a second thread that reads meanwhile gets an error at once.
        self._owner = os.getpid()
        try:
            batches, self._end = self._begin()
        except BaseException:
            self._owner = 0
            raise
        # A weak reference, so that an iterator that the user drops is collected, which ends its epoch.
        turn.newest, turn.reader = self._number, weakref.ref(self)
        return batches

    def go_on(self, batches: Iterator[Batch], end: Callable[[], None]) -> None:
        """Read on from what was begun anew; the caller holds the turn's lock."""
        self._batches, self._end = batches, end
        self._turn.reader = weakref.ref(self)

    def _leave(self) -> None:
        """End the epoch, unless a newer iterator has already done so."""
        end, self._end, self._batches = self._end, None, iter(())
        if end is not None and self._turn.reader() is self:
            self._turn.end()
            end()

    def close(self) -> None:
        """Leave the epoch, or never begin one."""
        if not self._is_foreign():
            with self._turn.taken():
                self._leave()
