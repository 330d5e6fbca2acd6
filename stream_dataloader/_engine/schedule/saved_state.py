"""`Place` as plain data, which `state_dict` returns and `load_state_dict` takes.

Guarantee: a state says nothing about workers or ranks. A state of other sources or options is refused with an error
that names both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from stream_dataloader._engine.schedule.changes import past_mixes, with_changes
from stream_dataloader._engine.schedule.draws import returned_by_group
from stream_dataloader._engine.schedule.mix import Mix, Replaced
from stream_dataloader._engine.schedule.place import EpochPlace, LanePlace, Place
from stream_dataloader._engine.schedule.rules import NONE, Groups, Rules
from stream_dataloader._engine.schedule.state_check import check_group, check_shared, checksum, number
from stream_dataloader._engine.schedule.state_match import (
    COMPARED,
    VERSION,
    SourceIdentity,
    check_match,
    groups_of,
    plain_mix,
    sizes_in,
)
from stream_dataloader._engine.schedule.weights_check import plain_weights, weights_of_plain
from stream_dataloader.errors import StateError, shorten


def to_plain(
    rules: Rules,
    place: Place,
    identity: SourceIdentity,
    failures: Sequence[Iterable[int]],
    items: Mapping[str, Any] | None = None,
    *,
    batches_per_epoch: int | None = None,
) -> dict[str, Any]:
    """Return a state as plain data.

    Each group has its own key, whose value is a tuple, so that `torch.distributed.checkpoint` saves it as one object.

    Args:
        failures: The sources whose streams were skipped, by local group.
        items: The layout of items; None if it is not known, or the epoch has not begun.
    """
    groups, lanes = rules.groups, rules.lanes_of_a_group
    state: dict[str, Any] = {
        "version": VERSION,
        "seed": rules.seed,
        "groups": groups.total,
        "epoch": place.epoch,
        "step": place.step,
        **{name: getattr(rules, name) for name in (*COMPARED, "lanes_of_a_group")},
        **{name: value for name, value in identity._asdict().items() if (name, value) != ("sections", None)},
        **({} if rules.mix is None else {"mix": plain_mix(rules.mix)}),
    }
    if place.past:
        state["mix"]["past"] = [
            [*one[:2], list(one.counts), plain_weights(one.weights), list(one.sizes)] for one in place.past
        ]
    waiting, returned = place.waiting, returned_by_group(rules, place.returned)
    if place.growth is not None:
        state["growth"] = [list(one) for one in place.growth]

    def plain(draws: Iterable[int]) -> list[Any]:
        """Return draws as plain data; a stream that waits for a lane is saved with its place."""
        if not waiting:
            return list(draws)
        return [_plain_lane(waiting[draw], plain) if draw in waiting else draw for draw in draws]

    own_state: dict[str, tuple[Any, ...]] = {}
    for local, failed in enumerate(failures):
        reached: tuple[Any, ...] = ()
        if place.lanes:
            own = place.lanes[local * lanes : (local + 1) * lanes]
            again = plain(returned[local])
            # Another rank may host this group later and find no item left in it. It then needs the layout to pad.
            known = items if groups.total > 1 else None
            reached = (place.cursors[local], again, [_plain_lane(lane, plain) for lane in own], known)
        own_state[key_of(groups.first + local)] = (sorted(failed) or 0, *reached)
    # Each group has its own checksum, because ranks save and load their groups separately.
    if place.lanes:
        own_state = {name: (*group, checksum(state, group)) for name, group in own_state.items()}
    state |= own_state
    if batches_per_epoch is not None and place.counted is not None:
        state["epoch_place"] = {**place.counted._asdict(), "batches_per_epoch": batches_per_epoch}
    return state


def key_of(group: int) -> str:
    """Return a group's key in a state."""
    return f"group_{group}"


def _plain_lane(lane: LanePlace, plain: Callable[[Iterable[int]], list[Any]]) -> dict[str, Any]:
    draw, items, position, first_window, draws, idle, reserved, stream = lane
    after = [int(draw != NONE), items, position, first_window, draws, idle]
    found = {"after": after, "draw": draw, "reserved": None if reserved is None else plain(reserved)}
    if stream is not None:
        found["stream"] = stream
    return found


def _mix_of(state: Mapping[str, Any], mix: Mix) -> Mix:
    """Return the mix of a state, which has as many lists as this one."""
    plain, sizes = state["mix"], tuple(sizes_in(state))
    lists, past = len(mix.sizes), list[Replaced]()
    for saved_epoch, saved_draw, counts, weights, before in plain.get("past", ()):
        place = number("epoch of other weights", saved_epoch), number("draw of other weights", saved_draw)
        own = tuple([number("draws by other weights", count) for count in counts])
        until = tuple([number("sources of a dataset before", size, 1) for size in before])
        too_many = mix.exhausted == "leave_out" and any(map(int.__gt__, own, until))
        wrong = too_many or len(own) != lists or len(until) != lists or any(map(int.__gt__, until, sizes))
        if wrong or sum(own) != saved_draw or (past and place <= past[-1][:2]):
            raise StateError(f"the state's draws by other weights are {shorten([saved_epoch, saved_draw, counts])}")
        past.append(Replaced(*place, own, weights_of_plain(weights, lists), until))
    return replace(mix, weights=weights_of_plain(plain["weights"], lists), past=tuple(past), sizes=sizes)


#: Errors that reading raises if the data is no state, or only a part of one.
_NOT_WHOLE = KeyError, TypeError, IndexError, ValueError, AttributeError, OverflowError, RuntimeError


class LoadedState(NamedTuple):
    """Content of a state.

    Attributes:
        place: The place that was saved, for the present options.
        seed: The seed.
        failures: The sources whose streams were skipped, by local group.
        items: The layout of items, if the state has it.
        lanes_of_a_group: Number of lanes that each group had.
    """

    place: Place
    seed: int
    failures: list[set[int]]
    items: Mapping[str, Any] | None
    lanes_of_a_group: int


def _epoch_place_of(state: Mapping[str, Any]) -> EpochPlace | None:
    if "epoch_place" not in state:  # saved without `batches_per_epoch`
        return None
    saved = state["epoch_place"]
    return EpochPlace(number("epoch of n batches", saved["number"]), number("batches of it", saved["delivered"]))


def missing_groups(state: Mapping[str, Any], groups: Groups) -> list[int]:
    """List the local groups that a state does not hold."""
    return [group for group in groups.local if key_of(group) not in state]


def check_held(state: Mapping[str, Any]) -> None:
    """Refuse a state if the numbers of a group, of any rank, are not those that were saved."""
    try:
        check_shared(state)
        for group in groups_in(state):
            check_group(state, key_of(group))
    except _NOT_WHOLE as error:
        if isinstance(error, StateError):
            raise
        raise _not_whole(error) from error


def _not_whole(error: Exception) -> StateError:
    return StateError(f"the state is not whole: {error!r}; pass what state_dict() returned, all of it")


def from_plain(
    state: Any, rules: Rules, identity: SourceIdentity, changes: Collection[str] | None = None
) -> LoadedState:
    """Read the groups that are hosted here from a state, which may hold others too.

    Args:
        identity: Identity of the sources; if the list may have grown, of those that it had before.
        changes: Options that the user changed on purpose, see `CHANGES`; None: the user has no way to say so.

    Raises:
        StateError: It is no state, belongs to another dataset, or lacks a group; says how they differ.
    """
    try:
        check_match(state, rules, identity, changes)
        return _from_plain(state, rules)
    except _NOT_WHOLE as error:
        if isinstance(error, StateError):
            raise
        raise _not_whole(error) from error


def _from_plain(state: Mapping[str, Any], rules: Rules) -> LoadedState:
    groups = rules.groups
    if missing := missing_groups(state, groups):
        raise StateError(
            f"the state holds virtual ranks {groups_in(state)} of {groups.total}, and this rank hosts "
            f"{list(groups.local)}; {key_of(missing[0])} is missing; load the rank's own state, or all ranks' "
            "together: merge_states([...]); "
            f"to load a distributed checkpoint, build the loader with virtual_ranks={groups.total}"
        )
    mix = None if rules.mix is None else _mix_of(state, rules.mix)
    before = replace(rules, num_sources=state["num_sources"], mix=mix, seed=state["seed"])
    for local, group in enumerate(groups.local):
        # With these modes each source is handed out once, so a larger number is damage; others may repeat sources.
        ends = rules.padding_mode in ("zeros", "drop") and "growth" not in state
        check_group(state, key_of(group), *([before.shares[local]] if ends else []))
    own = [state[key_of(group)] for group in groups.local]
    # A state of an epoch's beginning has no places: its groups only hold the sources that were skipped before.
    failures, *places = zip(*(group[:4] for group in own), strict=True)
    items = next((group[4] for group in own if len(group) > 4), None)
    place = Place(state["epoch"], counted=_epoch_place_of(state))
    if places and state["step"]:
        cursors, returned, lanes = places
        waiting: dict[int, LanePlace] = {}
        again = tuple(_draw_of(draw, waiting) for draws in returned for draw in draws)
        states = tuple(_lane_of(lane, waiting) for own in lanes for lane in own)
        growth = tuple(map(tuple, state["growth"])) if "growth" in state else None
        width = int(state["lanes_of_a_group"]) * groups.count
        saved = replace(before, lanes=width, time_steps=state["time_steps"])
        given = {group: int(state[key_of(group)][1]) for group in groups_in(state)}
        place = Place(
            epoch=place.epoch,
            step=state["step"],
            cursors=tuple(cursors),
            returned=again,
            lanes=states,
            waiting=waiting,
            growth=growth,
            counted=place.counted,
        )
        past = () if rules.mix is None else past_mixes(saved, rules.mix, place, given)
        place, here = place._replace(past=past), rules.with_past(past)
        # A place under the same rules is exact as it is. Under others, lanes reserve anew and counts are converted.
        if replace(saved, mix=here.mix, seed=here.seed) != here or saved.draws != here.draws:
            place = with_changes(place, saved, here, given)
    # Older states only count skipped sources. Each gets a negative number, which no source has, to keep the count.
    skipped = [set(range(-failed, 0)) if isinstance(failed, int) else set(failed) for failed in failures]
    return LoadedState(place, state["seed"], skipped, items, state["lanes_of_a_group"])


def _draw_of(saved: Any, waiting: dict[int, LanePlace]) -> int:
    """Read a draw; the place of a stream that waits for a lane is noted in `waiting`."""
    if not isinstance(saved, Mapping):
        return int(saved)
    lane = _lane_of(saved, waiting)
    waiting[lane.draw] = lane
    return lane.draw


def _lane_of(lane: Mapping[str, Any], waiting: dict[int, LanePlace]) -> LanePlace:
    reserved = None if lane["reserved"] is None else tuple(_draw_of(draw, waiting) for draw in lane["reserved"])
    _, items, position, first_window, draws, idle = lane["after"]
    return LanePlace(lane["draw"], items, position, first_window, draws, idle, reserved, lane.get("stream"))


def groups_in(state: Mapping[str, Any]) -> list[int]:
    """List the groups that a state holds."""
    return [group for group in range(groups_of(state)) if key_of(group) in state]


def common(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that the states of all ranks share."""
    groups = {key_of(group) for group in groups_in(state)}
    return {name: value for name, value in state.items() if name not in groups}
