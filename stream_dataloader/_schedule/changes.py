"""Places in an epoch, carried over to other lanes, other windows or a longer list of sources.

::

    saved: 4 lanes           a b c d read;  e f reserved            to come: g h ...
    loaded with 2            a b go on;     then, as lanes are free:    c d from where they stood, e f g h ...
    loaded with 6            a b c d go on; the others take             e f

Sources that the list gained are handed out after the rest of the epoch; with `"cycle"` they join at the next pass.

Guarantee: a pure function of the state; each item that is left is read once.
"""

from __future__ import annotations

from collections.abc import Mapping

from stream_dataloader._schedule.order import Order
from stream_dataloader._schedule.rules import NONE, Rules
from stream_dataloader._schedule.snapshot import Changed, LaneState, Snapshot, none_reserved
from stream_dataloader._schedule.tickets import returned_by_group
from stream_dataloader.errors import StateError

#: Options that the user may change on purpose, each with its name in a state.
CHANGES = {"time_steps": "time_steps", "batch_size": "batch_size", "sources": "num_sources"}


def with_changes(place: Snapshot, saved: Rules, rules: Rules, epoch: int, given: Mapping[int, int]) -> Snapshot:
    """Return the place from which an epoch goes on under other rules.

    Open streams stay in their lanes. Those of removed lanes come next, in the order of these lanes. Streams that
    `"data"` was re-reading are dropped. Lanes take new reservations.

    Args:
        saved: The rules before.
        given: Number of grants of each group that the state holds.

    Raises:
        StateError: The list grew, and the state does not hold all groups.
    """
    growth = () if place.changed is None else place.changed.growth
    if rules.num_sources > saved.num_sources:
        growth = *growth, (_pass_to_join(place, saved, epoch, given), saved.num_sources)
    order, returned = Order(saved, epoch, None, place), returned_by_group(rules, place.returned)
    states = [lane if lane.grant != NONE and order.is_fresh(lane.grant) else LaneState() for lane in place.lanes]
    lanes: list[LaneState] = []
    waiting = dict(place.waiting)
    again: list[int] = []
    width, before = rules.lanes_of_a_group, saved.lanes_of_a_group
    for hosted in range(rules.groups.count):
        own = states[hosted * before : (hosted + 1) * before]
        gone = {lane.grant: lane for lane in own[width:] if lane.grant != NONE}
        reserved = place.lanes[hosted * before : (hosted + 1) * before]
        held = sorted(grant for lane in reserved for grant in lane.reserved or () if grant != NONE)
        others = sorted((*held, *returned[hosted]), key=lambda grant: grant not in place.waiting)
        line = list(filter(order.is_fresh, (*gone, *others)))
        waiting, again = waiting | gone, again + line
        # A lane gives up after some draws without an item. The streams in `line` may have none left, although later
        # sources have some, so these draws do not count.
        draws = -len(line)
        for lane in (*own[:width], *[LaneState()] * (width - len(own))):
            lanes.append(lane._replace(draws_without_item=draws, idle=0, reserved=none_reserved(rules)))
    cursors = place.cursors
    if rules.padding_mode == "data":
        cursors = tuple(map(min, cursors, saved.shares))
    return Snapshot(place.step, cursors, tuple(again), tuple(lanes), Changed(waiting, growth))


def _pass_to_join(place: Snapshot, saved: Rules, epoch: int, given: Mapping[int, int]) -> int:
    """Return the pass over the list in which new sources are: with `"cycle"` the first that no group has begun."""
    if saved.padding_mode != "cycle":
        return 0  # the only pass
    if len(given) < saved.groups.total:
        raise StateError(
            f"the state holds virtual ranks {sorted(given)} of {saved.groups.total}, and a longer list needs all with "
            'padding_mode="cycle"; load all ranks\' states: merge_states([...])'
        )
    order = Order(saved, epoch, None, place)
    return 1 + max(order.in_pass(max(count - 1, 0), group)[0] for group, count in given.items())
