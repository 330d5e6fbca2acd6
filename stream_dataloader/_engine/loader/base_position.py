"""`BasePosition`: base class for the positions of a loader and of a loader of loaders.

Guarantee: a state describes what was delivered, not what workers have read ahead; at an epoch's end, the next epoch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from stream_dataloader._engine.loader.delivery import Delivery
from stream_dataloader._engine.reading.deferred import Turn
from stream_dataloader._engine.schedule.epochs import Epochs
from stream_dataloader.errors import StreamError

EpochT = TypeVar("EpochT", bound=Delivery[Any])


class KeptLanes(NamedTuple):
    """The lanes of a loaded state, as they go on here.

    Attributes:
        saved: Number of lanes of this rank's groups when the state was saved.
        lanes: For each lane here its number in the state; -1 for a new lane.
    """

    saved: int
    lanes: list[int]


class BasePosition(ABC, Generic[EpochT]):
    """Position of a loader, from one epoch to the next.

    Args:
        length: Number of batches of an epoch of an endless run; None: epochs follow each other.

    Attributes:
        epoch: The epoch that was begun last; None once another was set or loaded.
        kept_lanes: The lanes of the state that was loaded last; None before any was loaded.
        loaded: The loaded state, with the options that the user changed on purpose; kept until the next epoch begins,
            as it may turn out to be another rank's.
        failures: Errors of streams that were skipped.
    """

    def __init__(self, length: int | None) -> None:
        self._epochs = Epochs(length)
        self.epoch: EpochT | None = None
        self.kept_lanes: KeptLanes | None = None
        self.loaded: tuple[Mapping[str, Any], Collection[str]] | None = None
        self.failures: list[StreamError] = []

    @property
    def is_between_epochs(self) -> bool:
        return self.epoch is None or self.epoch.over

    @property
    def number(self) -> int:
        """The number of the epoch that began last."""
        return 0 if self._epochs.begun is None else self._epochs.begun.number

    @property
    def coming_number(self) -> int:
        self._follow_dataset()
        return self._epochs.coming().number

    def state_dict(self, step: int | None) -> dict[str, Any]:
        self._follow_dataset()
        epoch = self.epoch
        if epoch is not None and not self._epochs.was_left:
            record = epoch.record(step)
            # A state at the very end of an epoch would resume to an epoch without batches, and a trainer that waits for
            # one would find none. It is a state of the next epoch's beginning instead.
            if not (epoch.over and record.step == epoch.step):
                return self.state_of(epoch, record)
            step = None
        if step not in (None, self.coming_step):
            raise ValueError(
                f"the state after {step} batches is not known: epoch {self.coming_number} has not begun; it "
                f"begins with batch {self.coming_step}"
            )
        return self.coming_state()

    def _follow_dataset(self) -> None:
        """Take over an epoch number that was set on the dataset."""

    @property
    @abstractmethod
    def coming_step(self) -> int:
        """Number of steps of the coming epoch or run before its place."""

    @abstractmethod
    def coming_state(self) -> dict[str, Any]:
        """Return the state of what comes next."""

    @abstractmethod
    def state_of(self, epoch: EpochT, record: Any) -> dict[str, Any]:
        """Return the state at a place in an epoch; at its end, the state of the next epoch's beginning."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which goes on at the same place."""
        # An epoch belongs to workers that are running, which a copy does not share.
        return self.__dict__ | {"epoch": None, "_epochs": self._epochs.for_copy()}


def is_being_read(iteration: Any, turn: Turn) -> bool:
    """Return whether an iteration has an iterator that has not seen the end; None stands for one that is gone."""
    if iteration is None or turn.reader() is None:
        return False
    return not iteration.closed or iteration.epoch.end_is_ahead
