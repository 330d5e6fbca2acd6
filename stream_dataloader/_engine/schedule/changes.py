"""Places in an epoch, carried over to other lanes, other windows or a longer list of sources.

::

    saved: 4 lanes           a b c d read;  e f reserved            to come: g h ...
    loaded with 2            a b go on;     then, as lanes are free:    c d from where they stood, e f g h ...
    loaded with 6            a b c d go on; the others take             e f

Sources that the list gained are handed out after the rest of the epoch; with `"cycle"` they join at the next pass.
Other weights hold from the first draw that no rank has made.

Guarantee: a pure function of the state; each item that is left is read once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from stream_dataloader._engine.schedule.draws import returned_by_group
from stream_dataloader._engine.schedule.mix import DrawOrder, Mix, Replaced
from stream_dataloader._engine.schedule.order import Order
from stream_dataloader._engine.schedule.place import LanePlace, Place, none_reserved
from stream_dataloader._engine.schedule.rules import NONE, Rules
from stream_dataloader.errors import StateError

#: Options that the user may change on purpose, each with its name in a state.
CHANGES = {"time_steps": "time_steps", "batch_size": "batch_size", "sources": "num_sources", "weights": "weights"}


def with_changes(place: Place, saved: Rules, rules: Rules, given: Mapping[int, int]) -> Place:
    """Return the place from which an epoch goes on under other rules.

    Open streams stay in their lanes. Those of removed lanes come next, in the order of these lanes. Streams that
    `"data"` was re-reading are dropped. Lanes take new reservations.

    Args:
        saved: The rules before.
        given: Number of draws of each group that the state holds.

    Raises:
        StateError: The list grew, and the state does not hold all groups.
    """
    growth = place.growth or ()
    if rules.num_sources > saved.num_sources:
        growth = *growth, (_pass_to_join(place, saved, given), saved.num_sources)
    order, returned = Order(saved, place, None), returned_by_group(rules, place.returned)
    states = [lane if lane.draw != NONE and order.is_fresh(lane.draw) else LanePlace() for lane in place.lanes]
    lanes: list[LanePlace] = []
    waiting = dict(place.waiting)
    again: list[int] = []
    width, before = rules.lanes_of_a_group, saved.lanes_of_a_group
    for local in range(rules.groups.count):
        own = states[local * before : (local + 1) * before]
        gone = {lane.draw: lane for lane in own[width:] if lane.draw != NONE}
        reserved = place.lanes[local * before : (local + 1) * before]
        held = sorted(draw for lane in reserved for draw in lane.reserved or () if draw != NONE)
        others = sorted((*held, *returned[local]), key=lambda draw: draw not in place.waiting)
        line = list(filter(order.is_fresh, (*gone, *others)))
        waiting, again = waiting | gone, again + line
        # A lane gives up after some draws without an item. The streams in `line` may have none left, although later
        # sources have some, so these draws do not count.
        draws = -len(line)
        for lane in (*own[:width], *[LanePlace()] * (width - len(own))):
            lanes.append(lane._replace(draws_without_item=draws, idle=0, reserved=none_reserved(rules)))
    cursors = place.cursors
    if rules.padding_mode == "data":
        cursors = tuple(map(min, cursors, saved.shares))
    return place._replace(cursors=cursors, returned=tuple(again), lanes=tuple(lanes), waiting=waiting, growth=growth)


def _pass_to_join(place: Place, saved: Rules, given: Mapping[int, int]) -> int:
    """Return the pass over the list in which new sources are: with `"cycle"` the first that no group has begun."""
    if saved.padding_mode != "cycle":
        return 0  # the only pass
    if len(given) < saved.groups.total:
        raise StateError(
            f"the state holds virtual ranks {sorted(given)} of {saved.groups.total}, and a longer list needs all with "
            'padding_mode="cycle"; load all ranks\' states: merge_states([...])'
        )
    order = Order(saved, place, None)
    return 1 + max(order.in_pass(max(count - 1, 0), group)[0] for group, count in given.items())


def past_weights(saved: Rules, mix: Mix, epoch: int, given: Mapping[int, int]) -> tuple[Replaced, ...]:
    """Return the earlier weights of an epoch that goes on with those of `mix`.

    Args:
        saved: The rules before.
        given: Number of draws to each group that the state holds.

    Raises:
        StateError: The weights are other ones, and not all groups are known or the epoch would not end.
    """
    before = saved.mix
    if before is None or before.weights == mix.weights:
        return () if before is None else before.past
    if len(given) < saved.groups.total:
        raise StateError(
            f"the state holds virtual ranks {sorted(given)} of {saved.groups.total}, and other weights hold from the "
            "first draw that none of them has made; load all ranks' states: merge_states([...])"
        )
    number, draw = max(_place_behind(saved, epoch, group, count) for group, count in given.items())
    if (number, draw) in [(one.epoch, one.draw) for one in before.past] or (number, draw) == (epoch, 0):
        return before.past  # nothing was drawn by those before
    order = DrawOrder(before, saved.seed if saved.shuffle else None, number, endless=saved.endless_mix)
    past = (*before.past, Replaced(number, draw, order.counts_before(draw), before.weights))
    ends = mix.exhausted == "repeat" and not saved.endless_mix
    if ends and (never := replace(mix, past=past).never_in_full()) is not None:
        raise StateError(
            f"datasets[{never}] has weight 0 from draw {mix.weights[-1][0]:,} on, and the epoch, which goes on at draw "
            f"{draw:,}, would not end before it was drawn once in full; give it a weight, or start the epoch anew"
        )
    return past


def _place_behind(rules: Rules, epoch: int, group: int, count: int) -> tuple[int, int]:
    """Return the epoch, or pass, of a group's last draw, and the draw behind it."""
    if not count:
        return epoch, 0
    total = rules.groups.total
    if rules.endless_mix:
        return epoch, (count - 1) * total + group + 1
    share = rules.groups.share(group, rules.draws)
    turn, index = divmod(count - 1, share)
    if rules.padding_mode != "cycle" and turn:  # it reads again
        turn, index = 0, share - 1
    return epoch + turn, index * total + group + 1
