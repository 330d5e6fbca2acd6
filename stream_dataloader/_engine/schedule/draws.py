"""`Draws`: the rule by which lanes get the sources of an epoch, one draw after the other.

The n-th draw is the n-th source of the epoch's order. One class decides which lane takes which source: for a reader
that is alone, the ledger of several readers, the follower of delivered batches, and the replay from lengths.

A lane takes its next source by one rule::

    lookahead = 2       held            the lane takes
    it starts           -               reserves a b c, takes a
    next                b c             reserves d,     takes b
    d is refused        c (d)           reserves e,     takes c        refused: no source, for good
    next                (d) (e)         takes d, which was refused: from now on it takes each source when it needs it

Guarantee: the outcome depends on the place, and on the order in which lanes make requests, alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TypeAlias

from stream_dataloader._engine.schedule.place import Place
from stream_dataloader._engine.schedule.rules import NONE, PENDING, Rules

#: Reservations are refused once at most this many sources per lane are left. Otherwise a source near the end could wait
#: for a lane with a long stream, while other lanes idle.
TAIL_SOURCES_PER_LANE = 2

#: The requests that a lane holds, in order; empty at the epoch's beginning. None: it takes no more requests ahead.
Held: TypeAlias = tuple[int, ...] | None


def next_draw(
    held: Held, lookahead: int, take: Callable[[bool], int], wait: Callable[[int], int] = int
) -> tuple[int, Held]:
    """Return the draw that a lane takes next, `NONE` if it gets none, and the requests that it holds afterwards.

    Args:
        held: The requests that it holds: each is its draw, or a number below `PENDING` that must be waited for.
        lookahead: Number of requests that it holds as long as it takes requests ahead.
        take: Makes a request, ahead or now.
        wait: Waits for the draw of a request that is not decided yet.
    """
    if held is not None:
        while len(held) <= lookahead:
            held = *held, take(True)
        first = held[0]
        draw = first if first > PENDING else wait(first)
        if draw != NONE:
            return draw, held[1:]
    now = take(False)  # requests that are still held were refused, too: once one is refused, all later ones are
    return now if now > PENDING else wait(now), None


def returned_by_group(rules: Rules, returned: Sequence[int]) -> list[list[int]]:
    """Sort draws by the group hosted here that they belong to, keeping their order."""
    by_group: list[list[int]] = [[] for _ in range(rules.groups.count)]
    for draw in returned:
        by_group[draw % rules.groups.total - rules.groups.first].append(draw)
    return by_group


class Draws:
    """The draws of the groups hosted here, from a place on.

    Args:
        cursors: Memory for the cursors, if several readers share them. It is not written to here: the reader that joins
            first copies `first` into it (`Ledger.start`).
        note: Called with a lane and each decision of one of its requests: a draw or `NONE`.

    Attributes:
        first: Start of the count of decisions, by local group: the cursor minus the draws to be given again.
        cursors: The count of decisions, by local group.
        held: The requests that each lane holds, for `take`.
    """

    def __init__(
        self,
        rules: Rules,
        place: Place,
        cursors: memoryview[int] | None = None,
        note: Callable[[int, int], None] | None = None,
    ) -> None:
        self._rules, self._note = rules, note
        self._reached = place.cursors_by(rules)
        self._again = returned_by_group(rules, place.returned) if place.returned else []
        self.first = list(self._reached)
        for local, again in enumerate(self._again):
            self.first[local] -= len(again)
        self.cursors: list[int] | memoryview[int] = list(self.first) if cursors is None else cursors
        self.held: list[Held] = [lane.reserved for lane in place.lanes_by(rules)]

    def decide(self, lane: int, ahead: bool) -> int:
        """Decide the next request in the order of a lane's group: return its draw, or `NONE`.

        The n-th draw of a group has the number `n * groups + group`. `NONE` means that a reservation is refused, or,
        for a request that is needed now, that no source is left and the lane idles.
        """
        rules, cursors = self._rules, self.cursors
        local = lane // rules.lanes_of_a_group
        cursor = cursors[local]
        left = rules.shares[local] - cursor
        if ahead:
            # The last sources are left to the lanes that need one first. A source that was reserved near the end could
            # wait behind a long stream while other lanes idle.
            refused = rules.padding_mode != "cycle" and left <= TAIL_SOURCES_PER_LANE * rules.lanes_of_a_group
        else:
            # With these two modes the order has no end: later draws are sources that are read again.
            refused = left <= 0 and rules.padding_mode not in ("data", "cycle")
        if refused:
            draw = NONE
        else:
            cursors[local] = cursor + 1
            draw = cursor * rules.groups.total + rules.groups.first + local
            # Draws that were not delivered before the place are given again before all others.
            if self._again and 0 <= (nth := cursor - self.first[local]) < len(self._again[local]):
                draw = self._again[local][nth]
        if self._note is not None:
            self._note(lane, draw)
        return draw

    @cached_property
    def _deciders(self) -> list[Callable[[bool], int]]:
        return [partial(self.decide, lane) for lane in range(self._rules.lanes)]

    def take(self, lane: int) -> int:
        """Take a lane's next source: return its draw, or `NONE`, after the reservations that precede it."""
        draw, self.held[lane] = next_draw(self.held[lane], self._rules.lookahead, self._deciders[lane])
        return draw

    def to_save(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return `cursors` and `returned` of the current `Place`."""
        if not self._again:
            return tuple(self.cursors), ()
        left = zip(self._again, self.first, self.cursors, strict=True)
        returned = tuple([draw for again, first, cursor in left for draw in again[cursor - first :]])
        return tuple(map(max, self._reached, self.cursors)), returned
