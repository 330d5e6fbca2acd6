"""`merge_states`: merges the states of all ranks into one, for loaders, samplers and carried states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from stream_dataloader._engine.ranks.merged_states import merge_places
from stream_dataloader.errors import StateError


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the states of all ranks, saved after the same batch, into one state.

    Each rank, also of another number of ranks, loads the merged state and takes its own part from it. The states are
    those of loaders or samplers, where the number of ranks must divide the virtual ranks. Or they are states that
    models carry (`RecurrentState`, `LaneMemory` or `LaneCache`), where all ranks together must have as many lanes as
    before.

    Args:
        states: The `state_dict()` of each rank, in any order.

    Raises:
        StateError: One is no state, they are not of the same moment of one run, or a rank is missing or occurs twice.

    Example:
        >>> from stream_dataloader import StreamDataset, StreamDataLoader, merge_states
        >>> def loader(rank, world_size):
        ...     dataset = StreamDataset(["abcd", "ef", "g", "hij"], iter, 4 // world_size, time_steps=2, seed=0)
        ...     return StreamDataLoader(dataset, virtual_ranks=4, rank=rank, world_size=world_size)
        >>> whole = merge_states([loader(0, 2).state_dict(), loader(1, 2).state_dict()])
        >>> loader(3, 4).load_state_dict(whole)
    """
    listed = list(states)
    if not listed:
        raise StateError("there is no state to merge; pass the state_dict() of each rank")
    carried = [isinstance(state, Mapping) and "lanes" in state for state in listed]
    if not any(carried):
        return merge_places(listed)
    if not all(carried):
        one, other = carried.index(True), carried.index(False)
        what = f"state {one} is a carried state of a model, and state {other} is not"
        raise StateError(f"{what}; merge states of loaders and carried states separately")
    # Imported here, because loaders do not need it.
    from stream_dataloader.recurrent.checkpoint import merge_carried

    return merge_carried(listed)
