"""What `iter()` returns: an iterator that begins an epoch with its first `next`, for one thread at a time.

Guarantees: an iterator that nothing was read from has started no worker, and has taken neither an epoch number nor a
loaded state. If a second thread reads at the same moment, it gets an error, and the first thread gets its batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from threading import RLock as Turn

Batch = TypeVar("Batch")


class Deferred(Generic[Batch]):
    """Begins when the first batch is asked for.

    Args:
        begin: Begins an epoch and returns the iterator over its batches; asked again if it failed.
        turn: Held while it is read. Iterators of which a new one ends the old share one: the new one waits until the
            old one has its batch.
    """

    def __init__(self, begin: Callable[[], Iterator[Batch]], turn: Turn | None = None) -> None:
        self._begin, self._turn = begin, turn or threading.RLock()
        self._batches: Iterator[Batch] | None = None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if not self._turn.acquire(blocking=self._batches is None):
            raise RuntimeError(
                "another thread is reading from this iterator, or from a newer one; let one thread read, and hand "
                "batches to others in a queue.Queue, or guard next() with a threading.Lock"
            )
        try:
            if self._batches is None:
                self._batches = self._begin()
            return next(self._batches)
        finally:
            self._turn.release()

    def close(self) -> None:
        """Leave the epoch, or never begin one."""
        with self._turn:
            if (close := getattr(self._batches, "close", None)) is not None:
                close()
            self._batches = self._batches or iter(())
