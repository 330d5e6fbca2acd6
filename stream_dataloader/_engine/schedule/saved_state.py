"""`Place` as plain data, which `state_dict` returns and `load_state_dict` takes.

Guarantee: a state says nothing about workers or ranks. A state of other sources or options is refused with an error
that names both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from stream_dataloader._engine.schedule.changes import CHANGES, past_weights, with_changes
from stream_dataloader._engine.schedule.draws import returned_by_group
from stream_dataloader._engine.schedule.mix import Mix, Replaced
from stream_dataloader._engine.schedule.place import EpochPlace, LanePlace, Place
from stream_dataloader._engine.schedule.rules import NONE, Groups, Rules
from stream_dataloader._engine.schedule.state_check import MOST_GROUPS, check_group, check_shared, checksum, number
from stream_dataloader._engine.schedule.weights_check import plain_weights, weights_of_plain
from stream_dataloader.errors import StateError, shorten

VERSION = 1


class SourceIdentity(NamedTuple):
    """Identity of a list of sources.

    Attributes:
        fingerprint: Fingerprint of the sources.
        lengths: Fingerprint of their lengths, if known.
        sections: Description of the cut into sections; None if sources are read whole.
    """

    fingerprint: str
    lengths: str | None
    sections: str | None = None


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
        **{name: getattr(rules, name) for name in (*_COMPARED, "lanes_of_a_group")},
        **{name: value for name, value in identity._asdict().items() if (name, value) != ("sections", None)},
        **({} if rules.mix is None else {"mix": _plain_mix(rules.mix)}),
    }
    if place.past:
        state["mix"]["past"] = [[*one[:2], list(one.counts), plain_weights(one.weights)] for one in place.past]
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


def _plain_mix(mix: Mix) -> dict[str, Any]:
    """Return a mix, without its past, as plain data."""
    lists = {name: list(getattr(mix, name)) for name in ("sizes", "shuffles", "schedules")}
    return {**lists, "weights": plain_weights(mix.weights), "exhausted": mix.exhausted}


def _mix_of(plain: Mapping[str, Any], mix: Mix) -> Mix:
    """Return the mix of a state, which has the same lists as this one."""
    lists, past = len(mix.sizes), list[Replaced]()
    for saved_epoch, saved_draw, counts, weights in plain.get("past", ()):
        place = number("epoch of other weights", saved_epoch), number("draw of other weights", saved_draw)
        own = tuple([number("draws by other weights", count) for count in counts])
        too_many = mix.exhausted == "leave_out" and any(map(int.__gt__, own, mix.sizes))
        if len(own) != lists or sum(own) != saved_draw or too_many or (past and place <= past[-1][:2]):
            raise StateError(f"the state's draws by other weights are {shorten([saved_epoch, saved_draw, counts])}")
        past.append(Replaced(*place, own, weights_of_plain(weights, lists)))
    return replace(mix, weights=weights_of_plain(plain["weights"], lists), past=tuple(past))


#: Options that a state and the dataset it is loaded for must agree on.
_COMPARED = (
    *("time_steps", "windows", "padding_mode", "lookahead", "shuffle", "schedule", "deterministic"),
    "num_sources",
)

#: Words for them in errors where the user knows other names; also for the options of a mix of several lists.
_KNOWN_AS = {
    "num_sources": "the number of sources",
    "sizes": "the numbers of sources",
    "shuffles": "the datasets' shuffle",
    "schedules": "the datasets' schedule",
}


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


def groups_of(state: Any) -> int:
    """Return the number of groups of a state.

    Raises:
        StateError: It is no state.
    """
    if not isinstance(state, Mapping) or "version" not in state:
        raise StateError(f"this is no state of a StreamDataLoader, but a {type(state).__name__}; pass a state_dict()")
    # True equals 1, and is an int to isinstance. A damaged version must not pass for a known one.
    if type(state["version"]) is not int or state["version"] != VERSION:
        raise StateError(f"the state has version {shorten(state['version'])}, and this library reads {VERSION}")
    if "groups" not in state:
        raise StateError("the state is not whole: it has no groups; pass what state_dict() returned, all of it")
    return number("groups", state["groups"], 1, MOST_GROUPS)


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
        _check(state, rules, identity, changes)
        return _from_plain(state, rules)
    except _NOT_WHOLE as error:
        if isinstance(error, StateError):
            raise
        raise _not_whole(error) from error


def _check(state: Any, rules: Rules, identity: SourceIdentity, changes: Collection[str] | None) -> None:
    """Refuse a state of other sources or options."""
    groups = rules.groups
    check_shared(state)
    if groups_of(state) != groups.total:
        raise StateError(f"the state has {state['groups']} virtual ranks, and the loader has {groups.total}")
    if ("mix" in state) != (rules.mix is not None):
        one, several = "one dataset", "several datasets that are interleaved (mix)"
        saved, here = (several, one) if rules.mix is None else (one, several)
        raise StateError(f"the state was saved with {saved}, and this is {here}; build it as it was")
    if rules.mix is not None:
        _compare(state["mix"], _plain_mix(rules.mix), changes, changes)
    sizes = {"batch_size": state["lanes_of_a_group"] * groups.count, "sections": state.get("sections")}
    options = {"batch_size": rules.lanes, "sections": identity.sections}
    wanted = options | {name: getattr(rules, name) for name in _COMPARED}
    _compare({**sizes, **state}, wanted, changes, _meant(state, wanted, changes or ()))
    if state["fingerprint"] != identity.fingerprint:
        raise StateError(
            f"the state was saved with other sources (fingerprint {state['fingerprint']}, here "
            f"{identity.fingerprint}); pass the same list, or, if only paths have moved, or if sources hold what "
            "differs in each process (hash() of a text), the same fingerprint= to both datasets"
        )
    schedules = (rules.schedule,) if rules.mix is None else rules.mix.schedules
    # A single group without a schedule takes its sources in an order that does not depend on lengths. They may then
    # have been counted, or corrected, since the state was saved.
    lengths_decide = groups.total > 1 or any(schedule is not None for schedule in schedules)
    if state["lengths"] != identity.lengths and lengths_decide:
        raise StateError(
            f"the state was saved with other lengths (fingerprint {state['lengths']}, here {identity.lengths}), which "
            "decide which lane reads which source; pass the lengths that it was saved with"
        )


def _meant(state: Mapping[str, Any], here: Mapping[str, Any], changes: Collection[str]) -> set[str]:
    """Return the options that may differ."""
    before, now = state["time_steps"], here["time_steps"]
    # Without time_steps an item is a whole window, so that positions count other things, and cannot be converted.
    if "time_steps" in changes and None in (before, now) and before != now:
        raise StateError(f"time_steps was {before} and is {now}; only a number may change")
    before, now = state["num_sources"], here["num_sources"]
    if "sources" in changes and before > now:
        raise StateError(f"{before} sources became {now}; a list can only become longer")
    return {CHANGES[name] for name in changes}


def _from_plain(state: Mapping[str, Any], rules: Rules) -> LoadedState:
    groups = rules.groups
    if missing := missing_groups(state, groups):
        raise StateError(
            f"the state holds virtual ranks {groups_in(state)} of {groups.total}, and this rank hosts "
            f"{list(groups.local)}; {key_of(missing[0])} is missing; load the rank's own state, or all ranks' "
            "together: merge_states([...]); "
            f"to load a distributed checkpoint, build the loader with virtual_ranks={groups.total}"
        )
    mix = None if rules.mix is None else _mix_of(state["mix"], rules.mix)
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
        past = () if rules.mix is None else past_weights(saved, rules.mix, place.epoch, given)
        place = Place(
            epoch=place.epoch,
            step=state["step"],
            cursors=tuple(cursors),
            returned=again,
            lanes=states,
            waiting=waiting,
            growth=growth,
            past=past,
            counted=place.counted,
        )
        here = rules.with_past(past)
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


def _compare(
    saved: Mapping[str, Any],
    here: Mapping[str, Any],
    changes: Collection[str] | None,
    meant: Collection[str] | None,
) -> None:
    for name, value in here.items():
        if saved[name] != value and name not in (meant or ()):
            word = next((word for word, known in CHANGES.items() if known == name), None)
            # A remedy that `_meant` refuses would send the reader from one error to the next.
            is_refused = (name == "num_sources" and saved[name] > value) or None in (saved[name], value)
            if is_refused or changes is None:
                word = None
            or_so = "" if word is None else f', say that it is meant: load_state_dict(state, changes=["{word}"]),'
            raise StateError(
                f"the state was saved with {_KNOWN_AS.get(name, name)} {saved[name]!r}, and the dataset has {value!r}; "
                f"build it as it was{or_so} or start the epoch anew"
            )
