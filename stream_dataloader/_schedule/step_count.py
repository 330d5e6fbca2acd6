"""How many batches an epoch has, and whether any is left behind a place in it, where the streams' lengths are known.

Guarantee: a pure function of lengths, order and rules; the same on every rank, and what the workers come to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from stream_dataloader._schedule.groups import Groups
from stream_dataloader._schedule.order import Order
from stream_dataloader._schedule.replay import Replay
from stream_dataloader._schedule.rules import NEVER, NONE, IntArray, Rules
from stream_dataloader._schedule.sections import Lengths, lengths_in
from stream_dataloader._schedule.snapshot import LaneState, Snapshot


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
    """The same for one group."""
    window = rules.time_steps or 1
    replay = Replay(replace(rules, time_steps=window, deterministic=True), order, lengths)
    ends = [0] * rules.lanes  # the cell behind each lane's last new item
    reading_new = set(range(rules.lanes))
    for lane, run in replay.sources_before(NEVER // rules.lanes):
        if run.fresh:
            ends[lane] = run.end
        else:  # the lane reads nothing new from now on
            reading_new.discard(lane)
            if not reading_new:
                break
    end = min(ends) if rules.padding_mode == "drop" else max(ends)
    return -(-end // window)


def has_rest(
    place: Snapshot,
    rules: Rules,
    order: Order,
    lengths: IntArray,
    count: Callable[[], int | None],
    starts: IntArray | None = None,
) -> bool:
    """Whether a batch comes behind `place`, for one rank that hosts all groups; True if that is not known.

    Args:
        order: That of the epoch, from its beginning.
        lengths: `(num_sources,)`, items of each source, or of each section.
        count: How many steps the epoch has, if that is known.
        starts: `(num_sources,)`, the first item of each section; None: sources are read whole.
    """
    if rules.padding_mode == "cycle":
        return True

    def items(grant: int) -> int:
        assignment = order[grant]
        return int(lengths[assignment.source]) if assignment.fresh else 0

    def first(grant: int) -> int:
        return 0 if starts is None else int(starts[order[grant].source])

    def in_hand(lane: LaneState) -> bool:
        reads_on = lane.grant != NONE and items(lane.grant) > lane.items - first(lane.grant)
        return reads_on or any(grant != NONE and items(grant) > 0 for grant in lane.reserved or ())

    if rules.padding_mode == "drop":  # ends where one lane idles
        if all(map(in_hand, place.lanes)):
            return True
        steps = count()
        return steps is None or place.step < steps
    return any(map(in_hand, place.lanes)) or any(items(grant) > 0 for grant in _not_granted(place, rules))


def _not_granted(place: Snapshot, rules: Rules) -> Iterator[int]:
    """Grants that are still to be given in the first pass."""
    yield from place.returned
    total, first = rules.groups.total, rules.groups.first
    for hosted, cursor in enumerate(place.cursors):
        group = first + hosted
        for number in range(cursor, rules.groups.share(group, rules.draws)):
            yield number * total + group
