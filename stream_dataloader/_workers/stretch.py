"""An iterator over a stretch of a run: an epoch of n batches.

Guarantee: it takes no more of the run than its batches, and leaves the rest to the next one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stream_dataloader._workers.iteration import NEWER_HAS_BEGUN, Iteration
from stream_dataloader.errors import StaleIteratorError


class Stretch:
    """An iterator over the next batches of a run.

    Args:
        batches: Yields them.
        count: How many; None: as many as come.
        iteration: What they are read by, which is closed with the stretch; None if it outlives it.

    Attributes:
        stale: A newer iterator of the same loader has begun.
    """

    def __init__(self, batches: Iterator[Any], count: int | None, iteration: Iteration | None) -> None:
        self._batches: Iterator[Any] | None = batches
        self._left = -1 if count is None else count
        self._iteration = iteration
        self.stale = False

    @property
    def is_open(self) -> bool:
        """Its end was not seen, and no newer iterator has begun."""
        return self._batches is not None and not self.stale

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            raise StopIteration
        if self.stale:
            raise StaleIteratorError(NEWER_HAS_BEGUN)
        if not self._left:
            self.close()
            raise StopIteration
        try:
            batch = next(self._batches)
        except BaseException:
            self.close()
            raise
        self._left -= 1
        return batch

    def close(self) -> None:
        """Nothing more of it is wanted."""
        self._batches = None
        if self._iteration is not None:
            self._iteration.close()
