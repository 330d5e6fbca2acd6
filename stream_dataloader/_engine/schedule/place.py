"""`Place`: where reading stands between two batches, from which it can go on with any workers, ranks and lanes.

The same record is what a saved state holds as plain data (`saved_state.py`), what follows from it under other options
(`changes.py`), what workers are told to begin at, and what a replay returns.

Guarantee: a plain value. It says nothing about workers or ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from stream_dataloader._engine.schedule.mix import Replaced
from stream_dataloader._engine.schedule.rules import NONE, Rules


class LanePlace(NamedTuple):
    """Place of a lane between two steps.

    Attributes:
        draw: Number of its open stream's draw; `NONE` if there is none. The three that follow are about that stream.
        items: Items read of the stream.
        position: Time steps read of the stream.
        first_window: Time steps of the stream's first window, 0 before it was read.
        draws_without_item: Sources that the lane took since it read an item.
        idle: Whether no source is left for the lane.
        reserved: Draws of its reservations, `NONE` for one that was refused; None if it reserves no more.
        stream: The stream's own `state_dict()`, if it has one.
    """

    draw: int = NONE
    items: int = 0
    position: int = 0
    first_window: int = 0
    draws_without_item: int = 0
    idle: int = 0
    reserved: tuple[int, ...] | None = None
    stream: Any = None

    @property
    def progress(self) -> tuple[int, ...]:
        """The numbers that workers report: whether a stream is open, and the five fields after the draw."""
        return int(self.draw != NONE), *self[1:6]

    def back(self, items: int) -> LanePlace:
        """Return the place some items before in its stream, whose own state there is not known."""
        if not items:
            return self
        return self._replace(items=self.items - items, position=self.position - items, stream=None)


class EpochPlace(NamedTuple):
    """A place among epochs of n batches of an endless run.

    Attributes:
        number: The epoch's number.
        delivered: Number of its batches before the place.
    """

    number: int
    delivered: int


_NO_STREAMS: Mapping[int, LanePlace] = {}


class Place(NamedTuple):
    """A place between two batches.

    At an epoch's beginning only `epoch` and `counted` are given.

    Attributes:
        epoch: Number of the epoch; of the run, if epochs are n batches of an endless run.
        step: Number of its steps before the place.
        cursors: Draws given so far, by local group.
        returned: Draws among them that were not delivered, so they are given again first.
        lanes: Place of each lane; empty at the beginning.
        waiting: Places of streams whose lanes are gone, by draw; other lanes go on with them.
        growth: The passes in which the list grew, each with the number of sources before; None unless the epoch began
            under other options.
        past: Earlier weights of the epoch, see `Mix`.
        counted: The place among epochs of n batches; None if the epoch is not part of a run.
    """

    epoch: int
    step: int = 0
    cursors: tuple[int, ...] = ()
    returned: tuple[int, ...] = ()
    lanes: tuple[LanePlace, ...] = ()
    waiting: Mapping[int, LanePlace] = _NO_STREAMS
    growth: tuple[tuple[int, int], ...] | None = None
    past: tuple[Replaced, ...] = ()
    counted: EpochPlace | None = None

    @property
    def number(self) -> int:
        """Number of the epoch, as users count epochs."""
        return self.epoch if self.counted is None else self.counted.number

    @property
    def delivered(self) -> int:
        """Number of that epoch's batches before the place."""
        return self.step if self.counted is None else self.counted.delivered

    @property
    def has_changed(self) -> bool:
        """Whether the epoch began under other options."""
        return self.growth is not None

    def cursors_by(self, rules: Rules) -> tuple[int, ...]:
        """Return the cursors, also at the beginning."""
        return self.cursors or (0,) * rules.groups.count

    def lanes_by(self, rules: Rules) -> tuple[LanePlace, ...]:
        """Return the place of each lane, also at the beginning."""
        return self.lanes or (LanePlace(reserved=none_reserved(rules)),) * rules.lanes


def none_reserved(rules: Rules) -> tuple[int, ...] | None:
    """Return the reservations of a lane before it takes its first source."""
    return () if rules.lookahead else None


def uncounted_lane(place: Place) -> int | None:
    """Return the first lane whose position counts windows, not time steps; None if there is none."""
    for number, lane in enumerate(place.lanes):
        # A stream that has yielded windows, but whose first one has no length: they were not looked into.
        if lane.draw != NONE and lane.position and not lane.first_window:
            return number
    return None
