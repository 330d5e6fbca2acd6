"""One stream of a store.

Guarantee: a stream goes to any step without reading others. Its items stay valid after it is closed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from stream_dataloader._engine.items.layout import as_array, spec_of
from stream_dataloader._engine.items.structure import flatten, unflatten
from stream_dataloader.errors import StoreError

__all__ = ["Steps", "StoreStream", "StreamNumbers", "cut", "put_row"]


class Steps(Protocol):
    """Time steps of one stream, used by one thread at a time.

    They may have an attribute `alike`, see `Handle.alike`.
    """

    def __len__(self) -> int: ...

    def item(self, index: int) -> Any:
        """Return one step as a copy, so that nothing of the store stays open for it."""
        ...

    def read(self, start: int, out: Any) -> None:
        """Write steps to an item made of arrays `(n, ...)`, or of tensors where NumPy lacks the dtype."""
        ...

    def close(self) -> None:
        """Close the stream's files; may be called twice."""
        ...


class StoreStream:
    """Iterator over steps; see `protocols.ReadsInto` and `protocols.SeeksItems`."""

    def __init__(self, steps: Steps, first: int, start: int, stop: int) -> None:
        self._steps: Steps | None = steps
        self._alike = getattr(steps, "alike", None)
        self._first = first
        self._position = first + start
        self._stop = stop

    @property
    def steps(self) -> int:
        """Number of items of the source."""
        return self._stop - self._first

    def __iter__(self) -> StoreStream:
        return self

    def __next__(self) -> Any:
        if self._position >= self._stop or self._steps is None:
            raise StopIteration
        item = self._steps.item(self._position)
        self._position += 1
        return item

    def item(self, position: int) -> Any:
        """Return the item at a position, counted from the source's first; where the stream stands does not change."""
        assert self._steps is not None
        return self._steps.item(self._first + position)

    def seek_item(self, item: int) -> None:
        """Go to an item, counted from the source's first."""
        if not 0 <= item <= self.steps:
            raise ValueError(f"item {item} was asked for, and the source has {self.steps}")
        self._position = self._first + item

    def read_into(self, out: Any) -> int:
        leaf = next(iter(out.values()), None) if type(out) is dict else out
        room = len(leaf if type(leaf) is np.ndarray else flatten(out)[1][0])
        count = min(room, self._stop - self._position)
        if not count or self._steps is None:
            return 0
        self._steps.read(self._position, out if count == room else cut(out, 0, count))
        self._position += count
        return count

    def close(self) -> None:
        """Close the stream's files. Items that were yielded stay valid."""
        steps, self._steps = self._steps, None
        self._position = self._stop
        if steps is not None:
            steps.close()


class StreamNumbers(Sequence[int]):
    """Numbers of a store's streams: 0, 1, 2, ..."""

    open_early: ClassVar[bool] = True

    def __init__(self, count: int, fingerprint: str) -> None:
        self._count = count
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        found = range(self._count)[index]
        return found if isinstance(found, int) else list(found)

    def __repr__(self) -> str:
        return f"StreamNumbers({self._count})"


def cut(out: Any, start: int, stop: int) -> Any:
    """Return rows `[start, stop)` of an item made of arrays."""
    structure, leaves = flatten(out)
    return unflatten(structure, iter([leaf[start:stop] for leaf in leaves]))


def put_row(value: Any, out: Any, row: int, name: str) -> None:
    """Write a step's value to a row of `out`; raise if it does not fit."""
    structure, leaves = flatten(value)
    wanted, rows = flatten(out)
    if structure != wanted:
        raise StoreError(f"{name} has another structure than steps before; choose columns")
    for leaf, target in zip(leaves, rows, strict=True):
        found, room = spec_of(leaf), spec_of(target)
        if (found.dtype, found.shape) != (room.dtype, room.shape[1:]):
            other = room._replace(shape=room.shape[1:])
            raise StoreError(f"{name} is {found}, and the steps before it are {other}; store all alike")
        as_array(target)[row] = as_array(leaf)
