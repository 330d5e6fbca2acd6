"""`Delivery`: progress of an epoch as the user sees it, with a record after each of the last batches.

Guarantee: a record belongs to a delivered batch, also while batches are fetched ahead of their use.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar

from stream_dataloader.errors import IteratorError

_KEPT_RECORDS = 64  # trainers fetch ahead, so states of this many earlier batches remain available


class HasStep(Protocol):
    """A record between two batches; `step` counts those before it."""

    @property
    def step(self) -> int: ...


Record = TypeVar("Record", bound=HasStep)


class Delivery(Generic[Record]):
    """Delivered batches of an epoch.

    Attributes:
        last: The newest record.
        finished: Whether the end was seen.
        is_ahead: Whether the last batch was fetched and not handed out yet.
    """

    last: Record

    def __init__(self, first: Record) -> None:
        self.finished = self.is_ahead = self._end_held = False
        self._records: deque[Record] = deque(maxlen=_KEPT_RECORDS)
        self.keep(first)

    def keep(self, record: Record) -> None:
        """Add a record after the next batch."""
        self.last = record
        self._records.append(record)
        self.step = record.step  # set last: Ctrl-C may come between any two lines, and `step` must have a record

    def take_back(self) -> None:
        """Drop the newest record: its batch was read, but could not be handed out."""
        self.last = self._records[-2]
        self.step = self.last.step  # set before the record goes, as in `keep`
        self._records.pop()

    def ending(self) -> Exception:
        """Return the exception of an iterator that is asked again after it was closed."""
        if self.finished:
            return StopIteration()
        # Not the end: a loop that catches the error and asks again would take its part of the epoch for the whole.
        return IteratorError(
            f"an error or an interrupt ended this iterator after {self.step} batches, before its epoch was over; to go "
            "on there, call loader.load_state_dict(loader.state_dict()) and iter(loader); iter(loader) alone begins "
            "the next epoch"
        )

    def hold(self, batch: bool, end: bool) -> None:
        """Set whether the last batch, and the epoch's end, were fetched and not handed out yet."""
        self.is_ahead, self._end_held = batch, end

    @property
    def end_is_ahead(self) -> bool:
        return self.finished and self._end_held

    @property
    def over(self) -> bool:
        """Whether the epoch is over for the user, too."""
        return self.finished and not self._end_held

    def record(self, step: int | None = None) -> Record:
        """Return the record of the user's current place in the epoch, or of the place before batch `step`.

        Raises:
            ValueError: The record is no longer kept, or the batch was not delivered.
        """
        if step is None:
            step = self.step - self.is_ahead
        record: Record
        records = tuple(self._records)  # another thread may be reading on
        for record in reversed(records):
            if record.step == step:
                return record
        raise ValueError(
            f"the state after {step} batches is not kept, only those after {records[0].step} to {self.step}; save it "
            "sooner, or use the batch's own state_dict()"
        )
