"""Requests of lanes for sources, and their decision in order of time, without torch, clock or lock.

A *time* is `step * lanes + lane`. A lane makes a *request* at its time: *now* if it is out of data, or *ahead* as
a reservation. Requests are decided in order of time, and the n-th draw is the n-th source of the epoch's order::

    step           0       1       2                requests, in order   drawn
    lane 0 (w 0)   a a a   a b b   b d d            (0, lane 0)         a
    lane 1 (w 1)   c c c   c c c   c c e            (0, lane 1)         c ...

Guarantee: the outcome is a function of the requests alone, so it is the same for any number of workers.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import numpy as np

from stream_dataloader._engine.memory.fields import Carver
from stream_dataloader._engine.schedule.draws import Draws
from stream_dataloader._engine.schedule.rules import NEVER, PENDING, Rules


class Ledger:
    """The requests of one epoch, kept in memory that several processes may share.

    A lane's requests are numbered from 0 and decided in that order. At most `lookahead + 1` of them may be undecided,
    or not yet looked up, so each lane has that many places, which are used in turn::

        a place     2 * time + ahead, once it is made        -2 - draw, once it is decided

    Taking out and looking up a request need no lock, as its place has one writer at a time.

    Attributes:
        cursors: Draws given so far, by local group, for the `Draws` that decide.
    """

    def __init__(self, carve: Carver, rules: Rules) -> None:
        self._places = rules.lookahead + 1
        self.cursors: memoryview[int] = carve(rules.lanes).data  # by local group; there are no more groups than lanes
        self._shown, self._decided = carve(rules.lanes), carve(rules.lanes)  # numbers of requests
        self._requests = carve(rules.lanes * self._places).data  # several times faster to read a number from
        self._taken = [0] * rules.lanes  # requests made so far by lanes that are read here, shown or not

    def start(self, cursors: Sequence[int]) -> None:
        """Begin with cursors other than 0."""
        for local, cursor in enumerate(cursors):
            self.cursors[local] = cursor

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

    def decide(self, horizon: int, draws: Draws) -> None:
        """Decide, in order, the shown requests up to time `horizon`; the caller holds the lock.

        Args:
            draws: Makes the decisions, with `cursors`.
        """
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
            draw = draws.decide(lane, bool(request & 1))
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
