"""`Delivery`: how far an epoch was handed to the user, and where it stood after each of the last batches.

Guarantee: a record is that of a delivered batch, also while batches are fetched ahead of their use.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar

_KEPT_RECORDS = 64  # trainers fetch ahead: the state can be had as of so many batches ago


class HasStep(Protocol):
    """A record between two batches; `step` counts those before it."""

    @property
    def step(self) -> int: ...


Record = TypeVar("Record", bound=HasStep)


class Delivery(Generic[Record]):
    """What an epoch has delivered.

    Attributes:
        last: The newest record.
        finished: The end was seen.
        is_ahead: The last batch was fetched and not handed out yet.
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
        self.step = record.step  # last, as Ctrl-C may come between any two lines: the step's record is there

    def hold(self, batch: bool, end: bool) -> None:
        """Set what was fetched and not handed out yet: the last batch, the epoch's end."""
        self.is_ahead, self._end_held = batch, end

    @property
    def end_is_ahead(self) -> bool:
        return self.finished and self._end_held

    @property
    def over(self) -> bool:
        """The epoch is over for the user too."""
        return self.finished and not self._end_held

    def record(self, step: int | None = None) -> Record:
        """Return where the epoch stands for the user, or stood before batch `step`.

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
            f"the state after {step} batches is not known: those after {records[0].step} to {self.step} are; save it "
            "sooner, or ask the batch for it"
        )
