"""Whether anything is left of an epoch behind a place in it, where the lengths of streams are known.

Guarantee: this takes a look at the lanes, and at the sources left. The epoch is replayed only with `"drop"`, once a
lane has nothing in hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from stream_dataloader._schedule.order import Order
from stream_dataloader._schedule.rules import NONE, IntArray, Rules
from stream_dataloader._schedule.snapshot import LaneState, Snapshot


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
