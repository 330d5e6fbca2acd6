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
    if rules.num_sources > saved.num_sources and not rules.endless_mix:  # lists of an endless mix grow on their own
        joins = 0
        if _joins_next(saved):
            end = _end_of_draws(place, saved, given, 'with padding_mode="cycle" a longer list holds')
            joins = end[0] + 1 - place.epoch
        growth = *growth, (joins, saved.num_sources)
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


def past_mixes(saved: Rules, mix: Mix, place: Place, given: Mapping[int, int]) -> tuple[Replaced, ...]:
    """Return the earlier weights and sizes of an epoch that goes on with those of `mix`.

    Args:
        saved: The rules before.
        place: A place in the epoch.
        given: Number of draws to each group that the state holds.

    Raises:
        StateError: They are other ones, and not all groups are known or the epoch would not end.
    """
    before = saved.mix
    if before is None or (before.weights, before.sizes) == (mix.weights, mix.sizes):
        return () if before is None else before.past
    end = _end_of_draws(place, saved, given, "other weights, or longer lists of interleaved datasets, hold")
    order = DrawOrder(before, saved.seed if saved.shuffle else None, end[0], endless=saved.endless_mix)
    past, begin = before.past, (place.epoch, 0)
    # Sources that were added earlier may join only at a pass that is still to come.
    sizes = next((one.sizes for one in past if one[:2] > end), before.sizes)
    replaced = Replaced(*end, order.counts_before(end[1]), before.weights, sizes)
    if before.weights != mix.weights:
        past = _with(past, replaced, begin)
        past = tuple([one._replace(weights=mix.weights) if one[:2] > end else one for one in past])
    if before.sizes != mix.sizes:
        at_next = Replaced(end[0] + 1, 0, (0,) * len(mix.sizes), mix.weights, before.sizes)
        past = _with(past, at_next if _joins_next(saved) else replaced, begin)
    ends = mix.exhausted == "repeat" and not saved.endless_mix
    if ends and (never := replace(mix, past=past).never_in_full()) is not None:
        raise StateError(
            f"datasets[{never}] has weight 0 from draw {mix.weights[-1][0]:,} on, and the epoch, which goes on at draw "
            f"{end[1]:,}, would not end before it was drawn once in full; give it a weight, or start the epoch anew"
        )
    return past


def _with(past: tuple[Replaced, ...], new: Replaced, begin: tuple[int, int]) -> tuple[Replaced, ...]:
    """Add what was replaced at a draw, unless nothing was drawn by it."""
    return past if new[:2] in (begin, *(one[:2] for one in past)) else tuple(sorted((*past, new)))


def _joins_next(rules: Rules) -> bool:
    """Return whether new sources join at the next pass over all sources."""
    return rules.padding_mode == "cycle" and not rules.endless_mix


def _end_of_draws(place: Place, saved: Rules, given: Mapping[int, int], what: str) -> tuple[int, int]:
    """Return the epoch, or pass, of the last draw of any group, and the draw behind it.

    Args:
        given: Number of draws of each group that the state holds.
        what: What holds from there on.

    Raises:
        StateError: The state does not hold all groups.
    """
    groups = saved.groups
    if len(given) < groups.total:
        raise StateError(
            f"the state holds virtual ranks {sorted(given)} of {groups.total}, and {what} from the first draw that "
            "none of them has made; load all ranks' states: merge_states([...])"
        )
    order, ends = Order(saved, place, None), []
    for group, count in given.items():
        turn, index = order.in_pass(max(count - 1, 0), group)
        if saved.padding_mode != "cycle" and turn:  # it reads again
            turn, index = 0, groups.share(group, saved.draws) - 1
        ends.append((place.epoch + turn, index * groups.total + group + 1 if count else 0))
    return max(ends)
