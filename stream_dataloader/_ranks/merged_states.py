"""The states of ranks become one, and one becomes the ranks'.

Guarantee: only states of one moment of one run are put together, and only a whole is split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from stream_dataloader._schedule.rules import Groups
from stream_dataloader._schedule.saved_state import common, groups_in, key_of
from stream_dataloader.errors import StateError


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """One state of all virtual ranks, out of each rank's own, saved after the same batch.

    Each rank of any number that divides the groups can load it, and takes its own groups from it.

    Args:
        states: What each rank's `state_dict()` returned, in any order.

    Raises:
        StateError: One is no state, they are not of one moment of one run, or a group is missing.

    Example:
        >>> from stream_dataloader import StreamDataset, StreamDataLoader
        >>> def loader(rank, world_size):
        ...     dataset = StreamDataset(["abcd", "ef", "g", "hij"], iter, 4 // world_size, time_steps=2, seed=0)
        ...     return StreamDataLoader(dataset, virtual_ranks=4, rank=rank, world_size=world_size)
        >>> whole = merge_states([loader(0, 2).state_dict(), loader(1, 2).state_dict()])
        >>> loader(3, 4).load_state_dict(whole)
    """
    listed = list(states)
    if not listed:
        raise StateError("there is no state to merge; pass the state_dict() of each rank")
    if any(_has_members(state) for state in listed):
        whole = _put_together([{**state, "members": None} for state in listed], common=dict)
        members = zip(*(state["members"] for state in listed), strict=True)
        return whole | {"members": [merge_states(own) for own in members]}
    whole = _put_together(listed, common)
    if len(found := groups_in(whole)) < whole["groups"]:
        missing = [group for group in range(whole["groups"]) if group not in found]
        raise StateError(
            f"the states hold no virtual rank {missing} of {whole['groups']}; pass the states of all ranks"
        )
    return whole


def _has_members(state: Any) -> bool:
    """Whether it is a state of `side_by_side`."""
    return isinstance(state, Mapping) and "members" in state


def _put_together(
    states: Sequence[Mapping[str, Any]], common: Callable[[Mapping[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """All that states have, of which they must share what is `common` to those of one moment."""
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


def split_state(state: Mapping[str, Any], world_size: int) -> list[dict[str, Any]]:
    """The states of the ranks of another world size, out of one that `merge_states` made.

    Not needed for loading, as a rank takes its own from the whole; for ranks that are to be sent theirs.

    Raises:
        StateError: It is no state, not of all groups, or that many ranks cannot share the groups evenly.
    """
    if _has_members(state):
        split = [split_state(own, world_size) for own in state["members"]]
        return [{**state, "members": list(own)} for own in zip(*split, strict=True)]
    whole = merge_states([state])
    try:
        ranks = [Groups.of_rank(whole["groups"], rank, world_size) for rank in range(max(world_size, 1))]
    except ValueError as error:
        raise StateError(str(error)) from None
    shared = common(whole)
    return [shared | {key_of(group): whole[key_of(group)] for group in own.hosted} for own in ranks]
