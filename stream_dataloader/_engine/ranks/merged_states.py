"""Merging of the states of ranks' loaders into one.

Guarantee: only states of the same moment of the same run are merged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stream_dataloader._engine.schedule.saved_state import common, groups_in
from stream_dataloader.errors import StateError


def merge_places(listed: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the states of all ranks' loaders or samplers into one state of all virtual ranks.

    Raises:
        StateError: One is no state, they are not of the same moment of one run, or a virtual rank is missing.
    """
    if any(_has_members(state) for state in listed):
        whole = _put_together([{**state, "members": None} for state in listed], common=dict)
        members = zip(*(state["members"] for state in listed), strict=True)
        return whole | {"members": [merge_places(own) for own in members]}
    whole = _put_together(listed, common)
    if len(found := groups_in(whole)) < whole["groups"]:
        missing = [group for group in range(whole["groups"]) if group not in found]
        raise StateError(
            f"virtual ranks {missing} of {whole['groups']} are missing in the states; pass the states of all ranks"
        )
    return whole


def _has_members(state: Any) -> bool:
    """Return whether it is a state of `side_by_side`."""
    return isinstance(state, Mapping) and "members" in state


def _put_together(
    states: Sequence[Mapping[str, Any]], common: Callable[[Mapping[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """Join the entries of states, which must agree on the entries that `common` selects."""
    whole: dict[str, Any] = {}
    for i, state in enumerate(states):
        own, first = common(state), common(whole or state)
        for name in own | first:
            if own.get(name) != first.get(name):
                raise StateError(
                    f"state {i} has {name} {own.get(name)!r}, and state 0 {first.get(name)!r}; merge states that all "
                    "ranks of one run saved after the same batch"
                )
        whole = {**state, **whole}
    return whole
