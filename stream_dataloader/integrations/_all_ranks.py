"""States of all ranks in one checkpoint, as Accelerate and transformers write checkpoints on one rank only.

Guarantee: a rank loads its own state; or, if there were another number of ranks, takes its groups from all of theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from accelerate.state import PartialState
from accelerate.utils import gather_object

from stream_dataloader._schedule.saved_state import merge_states

State = TypeVar("State")


def gather_states(state: State) -> list[State]:
    """The states of all ranks, by rank; all ranks call it."""
    states: list[State] = gather_object([state])
    return states


def own_state(states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """What this rank is to load of all ranks' states, also if they were another number."""
    here = PartialState()
    return states[here.process_index] if len(states) == here.num_processes else merge_states(states)
