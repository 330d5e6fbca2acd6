"""Requests of lanes for sources, and their decision in order of time, without torch, clock or lock.

A *time* is `step * lanes + lane`. A lane makes a *request* at its time: *now* if it is out of data, or *ahead* as
a reservation. Requests are decided in order of time, and the n-th draw is the n-th source of the epoch's order::

    step           0       1       2                requests, in order   drawn
    lane 0 (w 0)   a a a   a b b   b d d            (0, lane 0)         a
    lane 1 (w 1)   c c c   c c c   c c e            (0, lane 1)         c ...

A lane takes its next source by one rule::

    lookahead = 2       held            the lane takes
    it starts           -               reserves a b c, takes a
    next                b c             reserves d,     takes b
    d is refused        c (d)           reserves e,     takes c        refused: no source, for good
    next                (d) (e)         takes d, which was refused: from now on it takes each source when it needs it

Guarantee: the outcome is a function of the requests alone, so it is the same for any number of workers.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import numpy as np

from stream_dataloader._engine.memory.fields import Carver
from stream_dataloader._engine.schedule.rules import NEVER, NONE, PENDING, Rules

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


class Returned:
    """Draws that are given again before all others, each by its group.

    Attributes:
        first: Start of the count of decisions, by local group: the cursor minus the draws to be given again.
    """

    def __init__(self, rules: Rules, cursors: Sequence[int], returned: Sequence[int]) -> None:
        self._rules, self._cursors, self._any = rules, cursors, bool(returned)
        self.first = list(cursors)
        if returned:
            self._again = returned_by_group(rules, returned)
            for local, again in enumerate(self._again):
                self.first[local] -= len(again)

    def decide(self, lane: int, cursors: list[int], ahead: bool) -> int:
        """Decide a lane's request: return its draw, or `NONE`; see `Rules.decide`."""
        number = self._rules.decide(lane, cursors, ahead)
        return self.draw(number) if self._any and number != NONE else number

    def draw(self, number: int) -> int:
        """Return the draw for a number that is counted from `first`."""
        if not self._any:
            return number
        count, group = divmod(number, self._rules.groups.total)
        local = group - self._rules.groups.first
        place, again = count - self.first[local], self._again[local]
        return again[place] if 0 <= place < len(again) else number

    def rest(self, counted: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the cursors and the draws that are still to be given again, after the numbers `counted`."""
        if not self._any:
            return tuple(counted), ()
        left = zip(self._again, self.first, counted, strict=True)
        returned = tuple([draw for again, first, count in left for draw in again[count - first :]])
        return tuple(map(max, self._cursors, counted)), returned


def returned_by_group(rules: Rules, returned: Sequence[int]) -> list[list[int]]:
    """Sort draws by the group hosted here that they belong to, keeping their order."""
    by_group: list[list[int]] = [[] for _ in range(rules.groups.count)]
    for draw in returned:
        by_group[draw % rules.groups.total - rules.groups.first].append(draw)
    return by_group


class Ledger:
    """The requests of one epoch, kept in memory that several processes may share.

    A lane's requests are numbered from 0 and decided in that order. At most `lookahead + 1` of them may be undecided,
    or not yet looked up, so each lane has that many places, which are used in turn::

        a place     2 * time + ahead, once it is made        -2 - draw, once it is decided

    Taking out and looking up a request need no lock, as its place has one writer at a time.
    """

    def __init__(self, carve: Carver, rules: Rules) -> None:
        self._places, self._rules = rules.lookahead + 1, rules
        self._cursors = carve(rules.lanes).data  # by local group; there are no more groups than lanes
        self._shown, self._decided = carve(rules.lanes), carve(rules.lanes)  # numbers of requests
        self._requests = carve(rules.lanes * self._places).data  # several times faster to read a number from
        self._taken = [0] * rules.lanes  # requests made so far by lanes that are read here, shown or not

    def start(self, cursors: Sequence[int]) -> None:
        """Begin with cursors other than 0."""
        for local, cursor in enumerate(cursors):
            self._cursors[local] = cursor

    def take(self, lane: int, time: int, ahead: bool) -> int:
        """Make a lane's next request and return its number; it is not decided before it is shown."""
        request = self._taken[lane]
        self._requests[lane * self._places + request % self._places] = 2 * time + ahead
        self._taken[lane] = request + 1
        return request

    def show(self, lanes: Iterable[int]) -> None:
        """Release the requests that lanes made for decision; the caller holds the lock."""
        for lane in lanes:
            self._shown[lane] = self._taken[lane]

    def decide(self, horizon: int) -> None:
        """Decide, in order, the shown requests up to time `horizon`; the caller holds the lock."""
        requests, places, shown, decided = self._requests, self._places, self._shown, self._decided
        # A time belongs to one lane, whose requests are decided in their own order. So requests at the horizon itself
        # can be decided, too.
        behind = 2 * min(horizon, NEVER - 1) + 2
        waiting = np.flatnonzero(shown > decided).tolist()
        heads = [(requests[lane * places + int(decided[lane]) % places], lane) for lane in waiting]
        heapq.heapify(heads)
        # Requests are decided one at a time, because each decision moves a cursor that the next one depends on.
        while heads and heads[0][0] < behind:
            request, lane = heads[0]
            number = int(decided[lane])
            draw = self._rules.decide(lane, self._cursors, bool(request & 1))
            requests[lane * places + number % places] = -2 - draw
            decided[lane] = number + 1
            if number + 1 < shown[lane]:
                heapq.heapreplace(heads, (requests[lane * places + (number + 1) % places], lane))
            else:
                heapq.heappop(heads)

    def has_undecided(self) -> bool:
        """Return whether any shown request is undecided."""
        return self._shown.tobytes() != self._decided.tobytes()  # several times faster than comparing arrays

    def decision(self, lane: int, request: int) -> int:
        """Return the number of a request's draw, `NONE` or `PENDING`."""
        word = self._requests[lane * self._places + request % self._places]
        return -2 - word if word < 0 else PENDING
