"""States of all ranks in one checkpoint, since trainers write checkpoints on one rank only."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from stream_dataloader._engine.merging import merge_states
from stream_dataloader._engine.ranks.own_rank import is_started
from stream_dataloader.dataloader import StreamDataLoader
from stream_dataloader.errors import StateError
from stream_dataloader.recurrent.cache import LaneCache
from stream_dataloader.recurrent.memory import LaneMemory
from stream_dataloader.recurrent.state import RecurrentState
from stream_dataloader.recurrent.values import move

Value = TypeVar("Value")
State = dict[str, Any]
CARRIERS = (RecurrentState, LaneCache, LaneMemory)
Carrier: TypeAlias = RecurrentState | LaneCache | LaneMemory[Any]


def gathered(value: Value) -> list[Value]:
    """Gather a value of each process, ordered by rank. All ranks must call this."""
    if not is_started():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def own_state(states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the state that this rank loads, given those of all ranks; the number of ranks may have changed."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if is_started() else (0, 1)
    return states[rank] if len(states) == world_size else merge_states(states)


def place_of(loader: StreamDataLoader[Any], ahead: int = 0) -> Callable[[], State] | None:
    """Return a function that makes the state of `ahead` batches ago, or None if the loader had not begun then."""
    epoch = loader._position.epoch
    if epoch is None:
        return None
    record = epoch.record()
    if ahead:
        try:
            record = epoch.record(record.step - ahead)
        except ValueError:  # in the iteration before: the shorter loader of several was restarted
            return None
    return functools.partial(loader._position.state_of, epoch, record)


class Carried:
    """The carriers of a model: one, several, or none."""

    def __init__(self, carry: Carrier | Iterable[Carrier] | None) -> None:
        self._all = [carry] if isinstance(carry, CARRIERS) else list(carry or ())
        for one in self._all:
            if not isinstance(one, CARRIERS):
                names = " or ".join(kind.__name__ for kind in CARRIERS)
                raise TypeError(f"carry must be a {names}, or a list of them, not a {type(one).__name__}")

    def __bool__(self) -> bool:
        return bool(self._all)

    def state_dict(self) -> list[dict[str, Any]]:
        """Return this rank's states in host memory."""
        return [move(carry.state_dict(), torch.device("cpu")) for carry in self._all]

    def snapshot(self) -> Carried:
        return Carried([carry._snapshot() for carry in self._all])

    def load(self, ranks: Sequence[Sequence[Mapping[str, Any]]], loader: StreamDataLoader[Any] | None = None) -> None:
        """Load the states that `state_dict` gave on each rank. Model-parallel ranks may have saved the same state.

        Args:
            ranks: The states of all ranks.
            loader: The loader, if it has loaded its own state of the same batch. It knows the lanes that continue.
        """
        if any(len(states) != len(self._all) for states in ranks):
            what = f"the checkpoint has {len(ranks[0])} carried states, but carry= has {len(self._all)}"
            raise StateError(f"{what}; pass the same as carry=, in the same order")
        for carry, states in zip(self._all, zip(*ranks, strict=True), strict=True):
            by_rank = {state["rank"]: state for state in states}
            own = by_rank.get(carry._place[0])
            is_own = own is not None and own["world_size"] == carry._place[1]
            carry.load_state_dict(own if own is not None and is_own else merge_states(by_rank.values()), loader=loader)

    def reset(self) -> None:
        for carry in self._all:
            carry.reset()
