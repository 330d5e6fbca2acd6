"""How many batches an epoch has, where the streams' lengths are known.

Guarantee: a pure function of lengths, order and rules; the same on every rank, and what the workers come to.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

from stream_dataloader._schedule.groups import Groups
from stream_dataloader._schedule.order import Order
from stream_dataloader._schedule.reservations import Reservations, next_grant
from stream_dataloader._schedule.rules import NEVER, NONE, IntArray, Rules
from stream_dataloader._schedule.sections import Lengths, lengths_in


def steps_of_groups(rules: Rules, epoch: int, lengths: Lengths, order: Order | None = None) -> list[int]:
    """For how many steps each group of all ranks has something new to read; with `"drop"`, for all of its lanes.

    The result is the same on every rank.

    Args:
        lengths: `(num_sources,)`, items of each source: time steps, or windows if `time_steps` is None; or the
            sections.
        order: The order in which sources are handed out; None makes that of the rules.
    """
    assert rules.padding_mode != "cycle"
    order = order or Order(rules, epoch, lengths)
    alone = [
        replace(rules, lanes=rules.lanes_of_a_group, groups=Groups(rules.groups.total, group, 1))
        for group in range(rules.groups.total)
    ]
    known = lengths_in(lengths, epoch)
    assert known is not None
    return [_steps_of(group, order, known) for group in alone]


def count_steps(rules: Rules, steps: Sequence[int]) -> int:
    """How many batches an epoch has, if groups have so many steps."""
    return min(steps) if rules.padding_mode == "drop" else max(steps)


def _steps_of(rules: Rules, order: Order, lengths: IntArray) -> int:
    """The same for one group: replays the assignment lane after lane, in order of time, each ticket decided at once."""
    window = rules.time_steps or 1
    reserved = [Reservations[int](rules.lookahead) for _ in range(rules.lanes)]
    cell = [0] * rules.lanes  # the time step, counted over the epoch, that a lane fills next
    times = list(range(rules.lanes))  # when each lane is out of data next: a heap
    cursors, last_fresh, first_idle = [0], 0, NEVER

    def draw(ahead: bool) -> int:
        return rules.decide(0, cursors, ahead)

    while times:
        step, lane = divmod(heapq.heappop(times), rules.lanes)
        grant = next_grant(reserved[lane], draw)
        if grant == NONE:
            first_idle = min(first_idle, -(-cell[lane] // window))
            continue
        source, _, _, fresh = order[grant]
        if not fresh:  # the lane reads nothing new from now on
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
