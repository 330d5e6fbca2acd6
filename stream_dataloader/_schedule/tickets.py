"""Which lane reads which source, and when: the tickets of an epoch, without torch, clock or lock.

A *time* is `step * lanes + lane`. A lane takes out a *ticket* at its time: *now* if it is out of data, or *ahead* as
a reservation. Tickets are decided in order of time, and the n-th grant gets the n-th source of the epoch's order::

    step           0       1       2                tickets, in order   granted
    lane 0 (w 0)   a a a   a b b   b d d            (0, lane 0)         a
    lane 1 (w 1)   c c c   c c c   c c e            (0, lane 1)         c ...

There is one rule by which a lane takes its next source::

    lookahead = 2       held            the lane takes
    it starts           -               reserves a b c, takes a
    next                b c             reserves d,     takes b
    d is refused        c (d)           reserves e,     takes c        refused: no source, for good
    next                (d) (e)         takes d, which was refused: from now on it takes each source when it needs it

Guarantee: the outcome is a function of the tickets alone, so it is the same for any number of workers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from stream_dataloader._memory.fields import Carver
from stream_dataloader._schedule.rules import NEVER, NONE, PENDING, Rules

#: The tickets that a lane holds, in order; none at the epoch's beginning. None: it takes no more tickets ahead.
Held: TypeAlias = tuple[int, ...] | None


def next_grant(
    held: Held, lookahead: int, take: Callable[[bool], int], wait: Callable[[int], int] = int
) -> tuple[int, Held]:
    """The grant that a lane takes next, `NONE` if it gets none; and the tickets that it holds then.

    Where a ticket is decided as soon as it is taken out, it is its own grant. Only where others may come before it is
    it a number below `PENDING`, and its grant is waited for.

    Args:
        held: The tickets that it holds.
        lookahead: How many it holds as long as it takes some ahead.
        take: Takes out a ticket, ahead or now.
        wait: Waits for the grant of a ticket that is not decided yet.
    """
    if held is not None:
        first, *rest = *held, *map(take, itertools.repeat(True, 1 if held else lookahead + 1))
        grant = first if first > PENDING else wait(first)
        if grant != NONE:
            return grant, tuple(rest)
    now = take(False)  # those still held are refused, too
    return now if now > PENDING else wait(now), None


class Ledger:
    """The tickets of one epoch, kept in memory that several processes may share; the caller holds the lock.

    A lane's tickets are numbered from 0 and decided in that order. At most `lookahead + 1` of them may be undecided, or
    not yet looked up, so each lane has that many places, which are used in turn.
    """

    def __init__(self, carve: Carver, rules: Rules) -> None:
        lanes, self._places = rules.lanes, rules.lookahead + 1
        self._rules = rules
        self._cursors = carve(lanes)  # by group hosted; there are no more groups than lanes
        self._taken, self._decided = carve(lanes), carve(lanes)  # numbers of tickets
        # Of each lane's last tickets: when it was taken out, whether ahead, and what it was granted.
        self._time = carve(lanes, self._places)
        self._ahead = carve(lanes, self._places)
        self._grant = carve(lanes, self._places)

    def start(self, cursors: Sequence[int]) -> None:
        """Begin with cursors other than 0."""
        self._cursors[: len(cursors)] = cursors

    def take(self, lane: int, time: int, ahead: bool) -> int:
        """Take out a lane's next ticket and return its number."""
        ticket = int(self._taken[lane])
        place = ticket % self._places
        self._time[lane, place], self._ahead[lane, place] = time, ahead
        self._taken[lane] = ticket + 1
        return ticket

    def grant(self, horizon: int) -> None:
        """Decide, in order, the tickets up to time `horizon`, before which no more tickets will be taken out."""
        lanes = np.arange(self._rules.lanes)
        # One ticket at a time: each decision moves a cursor that the next decision depends on.
        while True:
            head = self._time[lanes, self._decided % self._places]
            head = np.where(self._taken > self._decided, head, NEVER)
            lane = int(head.argmin())
            if head[lane] > min(horizon, NEVER - 1):
                return
            place = int(self._decided[lane]) % self._places
            self._grant[lane, place] = self._rules.decide(lane, self._cursors, bool(self._ahead[lane, place]))
            self._decided[lane] += 1

    def has_undecided(self) -> bool:
        """Whether there is any ticket that was not decided."""
        return self._taken.tobytes() != self._decided.tobytes()  # several times faster than to compare arrays

    def time(self, lane: int, ticket: int) -> int:
        """When a ticket was taken out."""
        return int(self._time[lane, ticket % self._places])

    def decision(self, lane: int, ticket: int) -> int:
        """The number of a ticket's grant, `NONE` or `PENDING`."""
        return int(self._grant[lane, ticket % self._places]) if ticket < self._decided[lane] else PENDING
