"""One stream of a store.

Guarantee: a stream goes to any of its steps at once, writes windows into the batch where its format can, and hands out
items that stay as they are when it is closed.
"""

from __future__ import annotations

from typing import Any, Protocol

from stream_dataloader._items.structure import flatten, unflatten

__all__ = ["Steps", "StoreStream"]


class Steps(Protocol):
    """The time steps of one stream of a store, by their numbers; what a format has to offer.

    Used by one thread at a time. An error names the store, the stream and the step.
    """

    def __len__(self) -> int:
        """How many there are."""
        ...

    def item(self, index: int) -> Any:
        """One of them, as a copy: nothing of the store stays open for it."""
        ...

    def read(self, start: int, out: Any) -> None:
        """Write steps `[start, start + n)`, all of which exist, to `out`.

        Args:
            start: The first of them.
            out: The structure of an item; its leaves are arrays `(n, ...)`, tensors where NumPy lacks the dtype.
        """
        ...

    def close(self) -> None:
        """Close what is open; may be called twice."""
        ...


class StoreStream:
    """Reads the steps `[start, stop)` of a stream; see `protocols.ReadsInto` and `protocols.SeeksItems`."""

    def __init__(self, steps: Steps, first: int, start: int, stop: int) -> None:
        self._steps: Steps | None = steps
        self._first = first
        self._position = first + start
        self._stop = stop

    @property
    def remaining(self) -> int:
        """How many items are still to come."""
        return self._stop - self._position

    def __iter__(self) -> StoreStream:
        return self

    def __next__(self) -> Any:
        if self._position >= self._stop or self._steps is None:
            raise StopIteration
        item = self._steps.item(self._position)
        self._position += 1
        return item

    def seek_item(self, item: int) -> None:
        """Go to an item, counted from the source's first.

        Raises:
            ValueError: The source has fewer.
        """
        if not 0 <= item <= self._stop - self._first:
            raise ValueError(f"item {item} was asked for, and the source has {self._stop - self._first}")
        self._position = self._first + item

    def read_into(self, out: Any) -> int:
        """Write the next items to `out`; returns how many."""
        structure, leaves = flatten(out)
        count = min(len(leaves[0]), self._stop - self._position)
        if not count or self._steps is None:
            return 0
        if count < len(leaves[0]):
            out = unflatten(structure, iter([leaf[:count] for leaf in leaves]))
        self._steps.read(self._position, out)
        self._position += count
        return count

    def close(self) -> None:
        """Close what is open; items that were yielded stay."""
        steps, self._steps = self._steps, None
        self._position = self._stop
        if steps is not None:
            steps.close()
