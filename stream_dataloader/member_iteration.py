"""An iterator over batches of several datasets' lanes, and where it stands between two steps.

Guarantee: a member that never ends is read only for a step that is delivered, so that nothing of it is lost at the
epoch's end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from stream_dataloader._assembly.beside import Joiner
from stream_dataloader._workers.iteration import NEWER_HAS_BEGUN
from stream_dataloader.batch import StreamBatch
from stream_dataloader.dataloader import StreamDataLoader
from stream_dataloader.errors import StaleIteratorError

#: A member's state, or what makes it.
Saved: TypeAlias = "Mapping[str, Any] | Callable[[], Mapping[str, Any]]"


class Place(NamedTuple):
    """Where an epoch stands between two steps.

    Attributes:
        step: The step that comes next.
        over: Which members have nothing more to read in the epoch.
        saved: Each member's state.
    """

    step: int
    over: tuple[bool, ...]
    saved: tuple[Saved, ...]


class Members(Protocol):
    """What is iterated over: a loader of several datasets.

    Attributes:
        loaders: The loader of each member.
        ends_with: When an epoch ends.
        batches_per_epoch: How many batches it has, if no member ends.
        endless: Which members never end.
        joiner: Puts their batches side by side.
    """

    loaders: tuple[StreamDataLoader[Any], ...]
    ends_with: Literal["first", "longest"] | int
    batches_per_epoch: int | None
    endless: list[bool]
    joiner: Joiner

    def note(self, place: Place) -> None:
        """A batch is about to be delivered; this is the place after it."""

    def ended(self) -> None:
        """The epoch has ended."""

    def state_at(self, epoch: int, place: Place) -> dict[str, Any]:
        """The state at a place in an epoch, as plain data."""


class MemberIteration:
    """An iterator over the batches of one epoch.

    Attributes:
        stale: A newer iteration of the same loader has begun.
    """

    def __init__(self, loader: Members, epoch: int, place: Place) -> None:
        self._loader, self._epoch, self._place = loader, epoch, place
        self._batches: list[Iterator[Any]] = [iter(member) for member in loader.loaders]
        self._closed = self._at_end = self.stale = False

    def __iter__(self) -> Iterator[StreamBatch]:
        return self

    def __next__(self) -> StreamBatch:
        if self._at_end:  # an iterator that has ended stays so
            raise StopIteration
        if self.stale:
            raise StaleIteratorError(NEWER_HAS_BEGUN)
        if self._closed:
            raise StopIteration
        try:
            read, over = self._read()
        except BaseException:
            self.close()
            raise
        if read is None:
            self._at_end = True
            self.close()
            self._loader.ended()
            raise StopIteration
        saved = tuple(
            old if batch is None else batch.__dict__["_state"]
            for batch, old in zip(read, self._place.saved, strict=True)
        )
        step = self._place.step
        self._place = Place(step + 1, over, saved)
        try:
            batch = self._loader.joiner.join(read, step, self._epoch)
        except BaseException:
            self.close()
            raise
        batch.remember(functools.partial(self._loader.state_at, self._epoch, self._place))
        self._loader.note(self._place)
        return batch

    def _read(self) -> tuple[list[Any] | None, tuple[bool, ...]]:
        """Each member's next batch, None of one that has ended; None if the epoch ends."""
        endless, over = self._loader.endless, list(self._place.over)
        read: list[Any] = [None] * len(over)
        if self._place.step == self._loader.batches_per_epoch:
            return None, tuple(over)
        for number, batches in enumerate(self._batches):
            if not endless[number] and not over[number]:
                read[number] = next(batches, None)
                over[number] = read[number] is None
        if self._is_end([own for own, never in zip(over, endless, strict=True) if not never], over):
            return None, tuple(over)
        for number, batches in enumerate(self._batches):  # only now: what they read is not lost at the epoch's end
            if endless[number]:
                read[number] = next(batches)
        return read, tuple(over)

    def _is_end(self, ending: Sequence[bool], over: Sequence[bool]) -> bool:
        ends_with = self._loader.ends_with
        if isinstance(ends_with, int):
            return over[ends_with]
        return (any(ending) if ends_with == "first" else all(ending)) if ending else False

    def close(self) -> None:
        """End the iteration: workers that are not kept end, streams are closed."""
        self._closed = True
        for batches in self._batches:
            batches.close()  # type: ignore[attr-defined]
