"""States of all ranks in one checkpoint, as trainers write checkpoints on one rank only."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from stream_dataloader._merging import merge_states
from stream_dataloader._ranks.place import is_started
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


def place_of(loader: StreamDataLoader[Any], ahead: int = 0) -> Callable[[], State] | None:
    """Where a loader stood so many batches ago; None if it has not begun, or not then."""
    epoch = loader._position.epoch
    if epoch is None:
        return None
    record = epoch.record()
    if ahead:
        try:
            record = epoch.record(record.step - ahead)
        except ValueError:  # an iteration before it: the shorter loader of several began anew
            return None
    return functools.partial(loader._position.state_of, epoch, record)


class Carried:
    """What a model carries: one carrier, several, or none."""

    def __init__(self, carry: Carrier | Iterable[Carrier] | None) -> None:
        self._all = [carry] if isinstance(carry, CARRIERS) else list(carry or ())
        for one in self._all:
            if not isinstance(one, CARRIERS):
                names = " or ".join(kind.__name__ for kind in CARRIERS)
                raise TypeError(f"carry must be a {names}, or a list of them, and has a {type(one).__name__}")

    def __bool__(self) -> bool:
        return bool(self._all)

    def state_dict(self) -> list[dict[str, Any]]:
        """This rank's, in host memory."""
        return [move(carry.state_dict(), torch.device("cpu")) for carry in self._all]

    def snapshot(self) -> Carried:
        return Carried([carry.snapshot() for carry in self._all])

    def load(self, ranks: Sequence[Sequence[Mapping[str, Any]]], loader: StreamDataLoader[Any] | None = None) -> None:
        """Load what `state_dict` gave on each rank; model-parallel ones may be there several times.

        Args:
            ranks: The states of all ranks.
            loader: The loader, if it has loaded its own state as of the same batch: it knows which lanes go on.
        """
        if any(len(states) != len(self._all) for states in ranks):
            what = f"the checkpoint has {len(ranks[0])} carried states, and here are {len(self._all)}"
            raise StateError(f"{what}; pass the same as carry=, in the same order")
        for carry, states in zip(self._all, zip(*ranks, strict=True), strict=True):
            by_rank = {state["rank"]: state for state in states}
            own = by_rank.get(carry.place[0])
            is_own = own is not None and own["world_size"] == carry.place[1]
            carry.load_state_dict(own if own is not None and is_own else merge_states(by_rank.values()), loader=loader)

    def reset(self) -> None:
        for carry in self._all:
            carry.reset()
