"""Place of an epoch between two steps, from which it can be resumed after any batch.

Workers run ahead of delivery. Each part reports which sources its lanes took and how far they have read; `Progress`
follows as parts are delivered. It keeps little: a cursor, and each lane's stream and reservations.

Guarantee: following costs next to nothing, as the workers' reports stay packed until a state is asked for.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from stream_dataloader._engine.schedule.mix import Replaced
from stream_dataloader._engine.schedule.requests import Returned, next_draw
from stream_dataloader._engine.schedule.rules import NONE, Rules


class LaneState(NamedTuple):
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

    def back(self, items: int) -> LaneState:
        """Return the place some items before in its stream, whose own state there is not known."""
        if not items:
            return self
        return self._replace(items=self.items - items, position=self.position - items, stream=None)


_WIDTH = 6  # numbers of a lane's progress


def pack_progress(lanes: Iterable[Sequence[int]]) -> bytes:
    """Pack the progress of some lanes into bytes; see `LaneState.progress`."""
    return array("q", [number for lane in lanes for number in lane]).tobytes()


class Changed(NamedTuple):
    """Extra state of an epoch that began under other options.

    Attributes:
        waiting: Places of streams whose lanes are gone, by draw; other lanes go on with them.
        growth: The passes in which the list grew, each with the number of sources before.
    """

    waiting: Mapping[int, LaneState]
    growth: tuple[tuple[int, int], ...]


class Snapshot(NamedTuple):
    """Place of an epoch between two steps.

    Attributes:
        step: The next step.
        cursors: Draws given so far, by local group.
        returned: Draws among them that were not delivered, so they are given again first.
        lanes: State of each lane.
        changed: None, unless the epoch began under other options.
        past: Earlier weights of the epoch, see `Mix`.
    """

    step: int
    cursors: tuple[int, ...]
    returned: tuple[int, ...]
    lanes: tuple[LaneState, ...]
    changed: Changed | None = None
    past: tuple[Replaced, ...] = ()

    @property
    def waiting(self) -> Mapping[int, LaneState]:
        """Places of streams whose lanes are gone, see `Changed`."""
        return {} if self.changed is None else self.changed.waiting


class LaneReports(NamedTuple):
    """Report of a worker on its lanes, sent with the part of a step.

    Attributes:
        taken: The sources that its lanes took, in order: lane and draw.
        progress: Progress of each of its lanes, see `pack_progress`.
        streams: States of streams that have their own `state_dict`, by lane.
    """

    taken: tuple[tuple[int, int], ...]
    progress: bytes
    streams: Mapping[int, Any]


class PackedSnapshot(NamedTuple):
    """A `Snapshot` that costs next to nothing to keep at each step.

    Attributes:
        last_draws: Number of each lane's last draw, even if its stream has ended.
        reserved: Draws of each lane's reservations, see `LaneState`.
        progress: Progress of lanes, see `pack_progress`: the bytes of each part, for its own lanes.
        streams: States of open streams, by lane; also of some that have ended.
    """

    step: int
    cursors: tuple[int, ...]
    returned: tuple[int, ...]
    last_draws: tuple[int, ...]
    reserved: tuple[tuple[int, ...] | None, ...]
    progress: tuple[bytes, ...]
    streams: Mapping[int, Any]
    changed: Changed | None
    past: tuple[Replaced, ...]

    def unpack_changed(self, rules: Rules) -> Snapshot | None:
        """Unpack the snapshot if the epoch began under other options; None otherwise."""
        return None if self.changed is None else self.unpack(rules)

    def unpack(self, rules: Rules) -> Snapshot:
        """Unpack the snapshot of an epoch that is read by `rules`."""
        # The first part's bytes cover all lanes until the parts of the first step have arrived.
        numbers = array("q", b"".join(self.progress))
        none_yet = none_reserved(rules)
        lanes = []
        for lane in range(rules.lanes):
            is_open, items, position, first_window, draws, idle = numbers[lane * _WIDTH : (lane + 1) * _WIDTH]
            # First come, first served, a lane's reservations are among the returned draws. If the lane also kept them,
            # their sources would be read twice.
            reserved = self.reserved[lane] if rules.deterministic or idle else none_yet
            draw, stream = (self.last_draws[lane], self.streams.get(lane)) if is_open else (NONE, None)
            lanes.append(LaneState(draw, items, position, first_window, draws, idle, reserved, stream))
        return Snapshot(self.step, self.cursors, self.returned, tuple(lanes), self.changed, self.past)


def uncounted_lane(place: Snapshot) -> int | None:
    """Return the first lane whose position counts windows, not time steps; None if there is none."""
    for lane, state in enumerate(place.lanes):
        # A stream that has yielded windows, but whose first one has no length: they were not looked into.
        if state.draw != NONE and state.position and not state.first_window:
            return lane
    return None


def beginning(rules: Rules) -> Snapshot:
    """Return the place before the first step."""
    lane = LaneState(reserved=none_reserved(rules))
    return Snapshot(0, (0,) * rules.groups.count, (), (lane,) * rules.lanes)


def none_reserved(rules: Rules) -> tuple[int, ...] | None:
    """Return the reservations of a lane before it takes its first source."""
    return () if rules.lookahead else None


class Progress:
    """Follows an epoch as it is delivered.

    Attributes:
        step: Number of steps delivered.
        last: The epoch's current place.
    """

    def __init__(self, rules: Rules, epoch: int, start: Snapshot | None, parts: int) -> None:
        self.epoch = epoch
        self._rules = rules
        start = start or beginning(rules)
        self.step = start.step
        self._changed, self._past = start.changed, start.past
        self._again = Returned(rules, start.cursors, start.returned)
        self._cursors = list(self._again.first if rules.deterministic else start.cursors)
        # First come, first served: draws below the cursor that were not delivered. A dict keeps their order.
        self._missing = dict.fromkeys(start.returned)
        self._last_draws = tuple([lane.draw for lane in start.lanes])
        self._reserved = tuple([lane.reserved for lane in start.lanes])
        self._streams = {i: lane.stream for i, lane in enumerate(start.lanes) if lane.stream is not None}
        self._lanes = [pack_progress([lane.progress for lane in start.lanes]), *[b""] * (parts - 1)]
        self._keep()

    def _keep(self) -> None:
        cursors, returned = tuple(self._cursors), tuple(self._missing)
        if returned and self._rules.deterministic:
            cursors, returned = self._again.rest(cursors)
        how = self._last_draws, self._reserved, tuple(self._lanes), self._streams, self._changed, self._past
        self.last = PackedSnapshot(self.step, cursors, returned, *how)

    def advance(self, reports: Sequence[LaneReports | None], steps: int = 1) -> None:
        """Follow one more step; `steps=0`: it made no batch."""
        self.step += steps
        for i, report in enumerate(reports):
            if report is None:
                continue
            self._lanes[i] = report.progress
            if report.taken:
                self._take(report.taken)
            if report.streams or self._streams:
                # A new dict, because snapshots that are kept refer to the old one.
                self._streams = {**self._streams, **report.streams}
        self._keep()

    def _take(self, taken: Iterable[tuple[int, int]]) -> None:
        rules, last_draws, reserved = self._rules, list(self._last_draws), list(self._reserved)
        for lane, draw in taken:
            if rules.deterministic:
                decide = functools.partial(self._again.decide, lane, self._cursors)
                expected, reserved[lane] = next_draw(reserved[lane], rules.lookahead, decide)
                assert draw == expected, f"lane {lane} took draw {draw}, and {expected} was its turn"
            elif draw != NONE:
                self._note(draw)
            last_draws[lane] = draw
        self._last_draws, self._reserved = tuple(last_draws), tuple(reserved)

    def _note(self, draw: int) -> None:
        """Note that a source was taken; those before it may still be missing."""
        total = self._rules.groups.total
        count, group = divmod(draw, total)
        local = group - self._rules.groups.first
        cursor = self._cursors[local]
        if count >= cursor:
            self._missing.update(dict.fromkeys(range(cursor * total + group, draw, total)))
            self._cursors[local] = count + 1
        else:
            self._missing.pop(draw, None)
