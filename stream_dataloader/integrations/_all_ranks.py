"""States of all ranks in one checkpoint, as trainers write checkpoints on one rank only.

Guarantee: a rank loads its own state; or, if there were another number of ranks, takes its groups from all of theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from stream_dataloader._ranks.place import is_started
from stream_dataloader._schedule.saved_state import merge_states

Value = TypeVar("Value")


def gathered(value: Value) -> list[Value]:
    """A value of each process, by rank; all ranks call it."""
    if not is_started():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def own_state(states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """What this rank is to load of all ranks' states, also if they were another number."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if is_started() else (0, 1)
    return states[rank] if len(states) == world_size else merge_states(states)
