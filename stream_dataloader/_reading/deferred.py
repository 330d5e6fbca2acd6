"""What `iter()` returns: an iterator that begins an epoch with its first `next`, for one thread at a time.

Guarantees: an iterator that nothing was read from has started no worker, and has taken neither an epoch number nor a
loaded state. If a second thread reads at the same moment, it gets an error, and the first thread gets its batch. A
process that was forked meanwhile gets an error too, and whatever it does there changes nothing for the first one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from stream_dataloader.errors import ForkedIteratorError

Batch = TypeVar("Batch")


class Turn:
    """A lock that a thread may take twice. A forked process has it free, though another thread held it."""

    def __init__(self) -> None:
        self._of, self._lock = os.getpid(), threading.RLock()

    def take(self, *, blocking: bool = True) -> bool:
        """Whether it is this thread's turn now."""
        if self._of != os.getpid():
            Turn.__init__(self)
        return self._lock.acquire(blocking=blocking)

    def end(self) -> None:
        """Give back what `take` gave."""
        self._lock.release()

    def __enter__(self) -> None:
        self.take()

    def __exit__(self, *_: object) -> None:
        self.end()


class Deferred(Generic[Batch]):
    """Begins when the first batch is asked for.

    Args:
        begin: Begins an epoch and returns the iterator over its batches; asked again if it failed.
        turn: Held while it is read. Iterators of which a new one ends the old share one: the new one waits until the
            old one has its batch.
    """

    def __init__(self, begin: Callable[[], Iterator[Batch]], turn: Turn | None = None) -> None:
        self._begin, self._turn = begin, turn or Turn()
        self._batches: Iterator[Batch] | None = None
        self._owner = 0  # the process in which it has begun

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._is_foreign():
            raise ForkedIteratorError(
                f"this iterator was begun in process {self._owner}, and this is process {os.getpid()}, which was "
                "forked meanwhile: it cannot read on; call iter() here for an epoch of its own"
            )
        if not self._turn.take(blocking=not self._owner):
            raise RuntimeError(
                "another thread is reading from this iterator, or from a newer one; let one thread read, and hand "
                "batches to others in a queue.Queue, or guard next() with a threading.Lock"
            )
        try:
            if self._batches is None:
                self._owner = os.getpid()  # from now on, who comes meanwhile hears so
                try:
                    self._batches = self._begin()
                except BaseException:
                    self._owner = 0
                    raise
            return next(self._batches)
        finally:
            self._turn.end()

    def _is_foreign(self) -> bool:
        return self._batches is not None and self._owner != os.getpid()

    def close(self) -> None:
        """Leave the epoch, or never begin one."""
        if self._is_foreign():
            return
        with self._turn:
            if (close := getattr(self._batches, "close", None)) is not None:
                close()
            self._batches = self._batches or iter(())
