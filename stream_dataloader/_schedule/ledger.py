"""Which lane reads which source, and when: pure functions, no torch, clock or lock.

Logical time orders everything. A *time* is `step * lanes + lane`: when lane 0 works on step 0, then lane 1
on step 0, and so on. A lane that needs a source takes out a *ticket* at its time, *now* if it is out of
data, or *ahead* as a reservation. Tickets are decided in order of time; the n-th one granted gets the n-th
source of the epoch's order. Who waits how long in real time changes nothing::

    step           0       1       2                tickets, in order   granted
    lane 0 (w 0)   a a a   a b b   b d d            (0, lane 0)         a
    lane 1 (w 1)   c c c   c c c   c c e            (0, lane 1)         c ...

Guarantee: the outcome is a function of the tickets alone, so it is the same for any number of workers.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from stream_dataloader._schedule.groups import Groups
from stream_dataloader._schedule.order import Order
from stream_dataloader._schedule.rules import NEVER, NONE, PENDING, IntArray, Rules


class Ledger:
    """The tickets of one epoch, kept in a flat int64 array that several processes may share.

    Plain state and transitions; whoever calls `grant` must keep others out, see `source_queue`. A lane's
    tickets are numbered from 0 and decided in that order; at most `lookahead + 1` may be undecided or not
    yet looked up at a time.
    """

    def __init__(self, memory: IntArray, rules: Rules) -> None:
        lanes, self._slots = rules.lanes, rules.lookahead + 1
        self._rules = rules
        parts = iter(np.split(memory[lanes : self.size(rules)], np.cumsum([lanes] * 2 + [lanes * self._slots] * 2)))
        self._cursors = memory[:lanes]  # by group hosted; there are no more groups than lanes
        self._taken, self._decided = next(parts), next(parts)
        self._time = next(parts).reshape(lanes, self._slots)
        self._ahead = next(parts).reshape(lanes, self._slots)
        self._grant = next(parts).reshape(lanes, self._slots)

    @staticmethod
    def size(rules: Rules) -> int:
        """Number of int64 values a ledger takes; all zero is an empty one."""
        return rules.lanes * (3 + 3 * (rules.lookahead + 1))

    def start(self, cursors: Sequence[int]) -> None:
        """Begin with cursors other than 0."""
        self._cursors[: len(cursors)] = cursors

    def take(self, lane: int, time: int, ahead: bool) -> int:
        """Take out a lane's next ticket and return its number."""
        ticket = int(self._taken[lane])
        slot = ticket % self._slots
        self._time[lane, slot], self._ahead[lane, slot] = time, ahead
        self._taken[lane] = ticket + 1
        return ticket

    def grant(self, horizon: int) -> None:
        """Decide, in order, the tickets up to time `horizon`, which no earlier ticket can come before any more."""
        lanes = np.arange(self._rules.lanes)
        while True:
            head = self._time[lanes, self._decided % self._slots]
            head = np.where(self._taken > self._decided, head, NEVER)
            lane = int(head.argmin())
            if head[lane] > min(horizon, NEVER - 1):
                return
            slot = int(self._decided[lane]) % self._slots
            self._grant[lane, slot] = self._rules.decide(lane, self._cursors, bool(self._ahead[lane, slot]))
            self._decided[lane] += 1

    def has_undecided(self) -> bool:
        """Whether there is any ticket that was not decided."""
        return bool((self._taken > self._decided).any())

    def time(self, lane: int, ticket: int) -> int:
        """When a ticket was taken out."""
        return int(self._time[lane, ticket % self._slots])

    def decision(self, lane: int, ticket: int) -> int:
        """The number of a ticket's grant, `NONE` or `PENDING`."""
        return int(self._grant[lane, ticket % self._slots]) if ticket < self._decided[lane] else PENDING


def steps_of_groups(rules: Rules, epoch: int, lengths: IntArray, order: Order | None = None) -> list[int]:
    """For how many steps each group, of all ranks, has something new to read; with `"drop"`, has for all of its lanes.

    The same on every rank.

    Args:
        lengths: `(num_sources,)`, items of each source: time steps, or windows if `time_steps` is None.
        order: In which they are handed out, if lengths do not decide that.
    """
    assert rules.padding_mode != "cycle"
    order = order or Order(rules, epoch, lengths)
    alone = [
        replace(rules, lanes=rules.lanes_of_a_group, groups=Groups(rules.groups.total, group, 1))
        for group in range(rules.groups.total)
    ]
    return [_steps_of(group, order, lengths) for group in alone]


def count_steps(rules: Rules, steps: Sequence[int]) -> int:
    """How many batches an epoch has, if groups have so many steps."""
    return min(steps) if rules.padding_mode == "drop" else max(steps)


def _steps_of(rules: Rules, order: Order, lengths: IntArray) -> int:
    """The same for one group: replays the assignment lane after lane, in order of time, each ticket decided at once."""
    window = rules.time_steps or 1
    reserved: list[deque[int] | None] = [deque() if rules.lookahead else None for _ in range(rules.lanes)]
    cell = [0] * rules.lanes  # the time step, counted over the epoch, that a lane fills next
    times = list(range(rules.lanes))  # when each lane is out of data next: a heap
    cursors, last_fresh, first_idle = [0], 0, NEVER

    def draw(ahead: bool) -> int:
        return rules.decide(0, cursors, ahead)

    def next_grant(lane: int) -> int:
        ahead = reserved[lane]
        if ahead is None:
            return draw(ahead=False)
        if not ahead:  # the lane starts
            ahead.extend(draw(ahead=True) for _ in range(rules.lookahead))
        grant = ahead.popleft()
        if grant == NONE:
            reserved[lane] = None
            return draw(ahead=False)
        ahead.append(draw(ahead=True))
        return grant

    while times:
        step, lane = divmod(heapq.heappop(times), rules.lanes)
        grant = next_grant(lane)
        if grant == NONE:
            first_idle = min(first_idle, -(-cell[lane] // window))
            continue
        source, _, _, fresh = order[grant]
        if not fresh:  # the lane will read nothing new any more
            continue
        length = int(lengths[source])
        if length:
            cell[lane] += length
            last_fresh = max(last_fresh, -(-cell[lane] // window))
            if rules.windows == "aligned":
                cell[lane] = -(-cell[lane] // window) * window
            step = cell[lane] // window
        heapq.heappush(times, step * rules.lanes + lane)
    return min(first_idle, last_fresh) if rules.padding_mode == "drop" else last_fresh
