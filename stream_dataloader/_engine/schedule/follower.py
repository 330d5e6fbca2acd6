"""`Follower`: the place of an epoch as its batches are delivered.

Workers run ahead of delivery. Each part reports which sources its lanes took and how far they have read; the follower
takes these in as parts are delivered. It keeps little: a cursor, and each lane's stream and reservations.

Guarantee: following costs next to nothing, as the workers' reports stay packed until a state is asked for.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from stream_dataloader._engine.schedule.draws import Draws
from stream_dataloader._engine.schedule.place import LanePlace, Place, none_reserved
from stream_dataloader._engine.schedule.rules import NONE, Rules

_WIDTH = 6  # numbers of a lane's progress


def pack_progress(lanes: Iterable[Sequence[int]]) -> bytes:
    """Pack the progress of some lanes into bytes; see `LanePlace.progress`."""
    return array("q", [number for lane in lanes for number in lane]).tobytes()


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


class PackedPlace(NamedTuple):
    """A `Place` that costs next to nothing to keep at each step.

    Attributes:
        base: Fields of the place that stay the same while the epoch is delivered; the others are not set.
        step: Number of steps before the place.
        cursors: Draws given so far, by local group.
        returned: Draws among them that are given again first.
        last_draws: Number of each lane's last draw, even if its stream has ended.
        reserved: Draws of each lane's reservations, see `LanePlace`.
        progress: Progress of lanes, see `pack_progress`: the bytes of each part, for its own lanes.
        streams: States of open streams, by lane; also of some that have ended.
    """

    base: Place
    step: int
    cursors: tuple[int, ...]
    returned: tuple[int, ...]
    last_draws: tuple[int, ...]
    reserved: tuple[tuple[int, ...] | None, ...]
    progress: tuple[bytes, ...]
    streams: Mapping[int, Any]

    def unpack(self) -> Place:
        """Unpack the place; before the first batch it is the epoch's beginning, whatever was read ahead."""
        if not self.step:
            return Place(self.base.epoch)
        # The first part's bytes cover all lanes until the parts of the first step have arrived.
        numbers = array("q", b"".join(self.progress))
        lanes = []
        for lane, (last_draw, reserved) in enumerate(zip(self.last_draws, self.reserved, strict=True)):
            is_open, items, position, first_window, draws, idle = numbers[lane * _WIDTH : (lane + 1) * _WIDTH]
            draw, stream = (last_draw, self.streams.get(lane)) if is_open else (NONE, None)
            lanes.append(LanePlace(draw, items, position, first_window, draws, idle, reserved, stream))
        return self.base._replace(step=self.step, cursors=self.cursors, returned=self.returned, lanes=tuple(lanes))


class Follower:
    """Follows an epoch as it is delivered.

    Attributes:
        last: The epoch's current place.
    """

    def __init__(self, rules: Rules, start: Place, parts: int) -> None:
        self._rules, self._base = rules, start._replace(cursors=(), returned=(), lanes=(), counted=None)
        self._step = start.step
        self._draws = Draws(rules, start)
        self._cursors = self._draws.cursors if rules.deterministic else list(start.cursors_by(rules))
        # First come, first served: draws below the cursor that were not delivered. A dict keeps their order.
        self._missing = dict.fromkeys(start.returned)
        lanes = start.lanes_by(rules)
        self._last_draws = tuple([lane.draw for lane in lanes])
        # First come, first served, a lane's reservations are among the returned draws. If the lane also kept them,
        # their sources would be read twice.
        keeps = rules.deterministic
        self._reserved = tuple([lane.reserved if keeps else none_reserved(rules) for lane in lanes])
        self._streams = {i: lane.stream for i, lane in enumerate(lanes) if lane.stream is not None}
        self._lanes = [pack_progress([lane.progress for lane in lanes]), *[b""] * (parts - 1)]
        self._keep()

    def _keep(self) -> None:
        cursors, returned = tuple(self._cursors), tuple(self._missing)
        if returned and self._rules.deterministic:
            cursors, returned = self._draws.to_save()
        how = self._last_draws, self._reserved, tuple(self._lanes), self._streams
        self.last = PackedPlace(self._base, self._step, cursors, returned, *how)

    def advance(self, reports: Sequence[LaneReports | None], steps: int = 1) -> None:
        """Follow one more step; `steps=0`: it made no batch."""
        self._step += steps
        for i, report in enumerate(reports):
            if report is None:
                continue
            self._lanes[i] = report.progress
            if report.taken:
                self._take(report.taken)
            if report.streams or self._streams:
                # A new dict, because places that are kept refer to the old one.
                self._streams = {**self._streams, **report.streams}
        self._keep()

    def _take(self, taken: Iterable[tuple[int, int]]) -> None:
        last_draws = list(self._last_draws)
        for lane, draw in taken:
            if self._rules.deterministic:
                expected = self._draws.take(lane)
                assert draw == expected, f"lane {lane} took draw {draw}, and {expected} was its turn"
            elif draw != NONE:
                self._note(draw)
            last_draws[lane] = draw
        self._last_draws = tuple(last_draws)
        if self._rules.deterministic:
            self._reserved = tuple(self._draws.held)

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
