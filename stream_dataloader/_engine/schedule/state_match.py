"""Comparison of a saved state with the sources and options that it is loaded for.

Guarantee: a state of other sources or options is refused with an error that names both sides, and a remedy that works.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from stream_dataloader._engine.schedule.changes import CHANGES
from stream_dataloader._engine.schedule.mix import Mix
from stream_dataloader._engine.schedule.rules import Rules
from stream_dataloader._engine.schedule.state_check import MOST_GROUPS, check_shared, is_same, number
from stream_dataloader._engine.schedule.weights_check import plain_weights
from stream_dataloader.errors import StateError, shorten

VERSION = 1

#: Options that a state and the dataset it is loaded for must agree on.
COMPARED = (
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


def plain_mix(mix: Mix) -> dict[str, Any]:
    """Return a mix, without its past, as plain data."""
    lists = {name: list(getattr(mix, name)) for name in ("sizes", "shuffles", "schedules")}
    return {**lists, "weights": plain_weights(mix.weights), "exhausted": mix.exhausted}


def groups_of(state: Any) -> int:
    """Return the number of groups of a state.

    Raises:
        StateError: It is no state.
    """
    if not isinstance(state, Mapping) or "version" not in state:
        raise StateError(f"this is no state of a StreamDataLoader, but a {type(state).__name__}; pass a state_dict()")
    if not is_same(state["version"], VERSION):
        raise StateError(f"the state has version {shorten(state['version'])}, and this library reads {VERSION}")
    if "groups" not in state:
        raise StateError("the state is not whole: it has no groups; pass what state_dict() returned, all of it")
    return number("groups", state["groups"], 1, MOST_GROUPS)


def sizes_in(state: Mapping[str, Any]) -> list[int]:
    """Return the numbers of sources, or sections, that each dataset had when a state was saved.

    Raises:
        StateError: They are no numbers.
    """
    mix = state.get("mix")
    if mix is None:
        return [number("num_sources", state.get("num_sources"))]
    sizes = mix.get("sizes") if isinstance(mix, Mapping) else None
    if not isinstance(sizes, (list, tuple)):
        raise StateError(f"the state's numbers of sources are {shorten(sizes)}; pass what state_dict() returned")
    return [number("number of sources of a dataset", size, 1) for size in sizes]


def check_match(state: Any, rules: Rules, identity: SourceIdentity, changes: Collection[str] | None) -> None:
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
        _compare(state["mix"], plain_mix(rules.mix), changes, _meant_of_mix(state, rules.mix, changes or ()))
    sizes = {"batch_size": state["lanes_of_a_group"] * groups.count, "sections": state.get("sections")}
    options = {"batch_size": rules.lanes, "sections": identity.sections}
    wanted = options | {name: getattr(rules, name) for name in COMPARED}
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
    if "sources" in changes and _shrinks(before, now):
        raise StateError(f"{before} sources became {now}; a list can only become longer")
    return {CHANGES[name] for name in changes}


def _meant_of_mix(state: Mapping[str, Any], mix: Mix, changes: Collection[str]) -> set[str]:
    """Return the options of a mix that may differ."""
    before, now = sizes_in(state), list(mix.sizes)
    if "sources" in changes and _shrinks(before, now):
        raise StateError(f"the datasets had {before} sources and have {now}; lists can only become longer")
    return {*changes, *(["sizes"] if "sources" in changes and len(before) == len(now) else ())}


def _shrinks(before: Any, now: Any) -> bool:
    """Return whether a list has fewer sources than before."""
    if isinstance(now, int):
        return bool(before > now)
    return len(before) != len(now) or any(map(operator.gt, before, now))


def _compare(
    saved: Mapping[str, Any],
    here: Mapping[str, Any],
    changes: Collection[str] | None,
    meant: Collection[str] | None,
) -> None:
    for name, value in here.items():
        if saved[name] != value and name not in (meant or ()):
            is_list = name in ("num_sources", "sizes")
            word = "sources" if is_list else next((word for word, known in CHANGES.items() if known == name), None)
            # A remedy that `_meant` refuses would send the reader from one error to the next.
            is_refused = _shrinks(saved[name], value) if is_list else None in (saved[name], value)
            if is_refused or changes is None:
                word = None
            or_so = "" if word is None else f', say that it is meant: load_state_dict(state, changes=["{word}"]),'
            raise StateError(
                f"the state was saved with {_KNOWN_AS.get(name, name)} {saved[name]!r}, and the dataset has {value!r}; "
                f"build it as it was{or_so} or start the epoch anew"
            )
