"""Carried states as plain data: what `RecurrentState.state_dict` gives, and how ranks of another number share it.

::

    rank 0 of 2, lanes 0 1 2        merge_states        rank 0 of 3, lanes 0 1
    rank 1 of 2, lanes 0 1 2    ──►  lanes 0 ... 5  ──►  rank 1 of 3, lanes 0 1
                                                        rank 2 of 3, lanes 0 1
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from stream_dataloader._items.plain import from_plain, to_plain
from stream_dataloader.errors import StateError
from stream_dataloader.recurrent.order import ROWS, LaneOrder, named
from stream_dataloader.recurrent.states import Lanes, States
from stream_dataloader.recurrent.store import LaneStore

VERSION = 1
_NAMES = ("rank", "world_size", "lanes", "source", "position", "structure", "dims", "leaves")


class Carried(NamedTuple):
    """What a carry keeps: the lanes' states, and what each was made of last, in `ROWS`."""

    lanes: Lanes
    states: States
    last: npt.NDArray[np.int64]


def as_state(store: LaneStore, order: LaneOrder, rank: int, world_size: int) -> dict[str, Any]:
    """All that is kept, as a state: numbers, names and tensors of its own."""
    lanes = store.lanes
    piece = store.get(lanes)
    known = order.last(lanes).tolist()  # of no lane, if nothing is kept
    return {
        "version": VERSION,
        "rank": rank,
        "world_size": world_size,
        "lanes": lanes.tolist(),
        **dict(zip(ROWS, known, strict=True)),
        "structure": None if piece is None else to_plain(piece.states.node),
        "dims": [] if piece is None else list(piece.states.dims),
        "leaves": [] if piece is None else [leaf.detach().clone() for leaf in piece.states.leaves],
    }


def check_state(state: Any) -> None:
    """Raise unless it is a state."""
    if not isinstance(state, Mapping) or "version" not in state:
        raise StateError(f"this is no state of a RecurrentState, but a {type(state).__name__}; pass a state_dict()")
    if state["version"] != VERSION:
        raise StateError(f"the state is of version {state['version']}, and this library reads version {VERSION}")
    if missing := [name for name in _NAMES if name not in state]:
        raise StateError(f"the state has no {missing[0]!r}; pass all that state_dict() of a RecurrentState returned")


def of_rank(state: Any, rank: int, world_size: int) -> Carried | None:
    """What a state says of a rank's lanes."""
    check_state(state)
    if not state["lanes"]:
        return None
    carried = _carried(state)
    if (state["rank"], state["world_size"]) == (rank, world_size):
        return carried
    if state["world_size"] != 1:
        what = f"the state is that of rank {state['rank']} of {state['world_size']}"
        here = f"and this is rank {rank} of {world_size}"
        raise StateError(f"{what}, {here}; load all ranks' together: recurrent.merge_states([...])")
    count = len(state["lanes"])
    if state["lanes"] != list(range(count)) or count % world_size:
        what = f"the state has {count} lanes, {named(state['lanes'])}"
        raise StateError(f"{what}, which {world_size} ranks cannot share evenly; have another number of ranks")
    own = np.arange(rank * count // world_size, (rank + 1) * count // world_size)
    return Carried(np.arange(len(own)), carried.states.columns(own), carried.last[:, own])


def _carried(state: Mapping[str, Any]) -> Carried:
    lanes, leaves = np.array(state["lanes"], np.int64), list(state["leaves"])
    sizes = [tuple(leaf.shape)[dim] for leaf, dim in zip(leaves, state["dims"], strict=True)]
    if any(size != len(lanes) for size in sizes) or not len(lanes) == len(state["source"]) == len(state["position"]):
        raise StateError(f"the state names {len(lanes)} lanes, and its tensors have {sizes}; it was changed since")
    last = np.array([_row(state, name) for name in ROWS], np.int64)
    return Carried(lanes, States(from_plain(state["structure"]), leaves, list(state["dims"])), last)


def _row(state: Mapping[str, Any], name: str) -> Sequence[int]:
    """What a state knows of its lanes; the first ones did not say which batch they were of."""
    return state[name] if name in state else [-1] * len(state["lanes"])


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """One carried state of all ranks, out of each rank's own, saved after the same batch.

    A rank of any number loads it and takes its own lanes from it. Merge the loaders' states with
    `stream_dataloader.merge_states`, and keep the number of all ranks' lanes together.

    Args:
        states: What each rank's `RecurrentState.state_dict()` returned, in any order.

    Raises:
        StateError: One is no state; a rank is missing or there twice; or ranks have other lanes or models.

    Example:
        >>> from stream_dataloader.recurrent import RecurrentState
        >>> ranks = [RecurrentState(rank=rank, world_size=2).state_dict() for rank in range(2)]
        >>> merge_states(ranks)["world_size"]
        1
    """
    listed = list(states)
    if not listed:
        raise StateError("there is no state to merge; pass the state_dict() of each rank")
    for state in listed:
        check_state(state)
    listed.sort(key=lambda state: int(state["rank"]))
    first, found = listed[0], [state["rank"] for state in listed]
    if found != list(range(first["world_size"])) or any(s["world_size"] != first["world_size"] for s in listed):
        sizes = sorted({state["world_size"] for state in listed})
        what = f"the states are those of ranks {found} of {sizes}; pass each rank's own once"
        raise StateError(f"{what}; give RecurrentState rank= and world_size= where the loader has them")
    count = len(first["lanes"])
    for state in listed:
        for name in ("structure", "dims"):
            if state[name] != first[name]:
                raise StateError(f"rank {state['rank']} has {name} {state[name]}, and rank 0 {first[name]}")
        if list(state["lanes"]) != list(range(count)):
            what = f"rank {state['rank']} has {named(state['lanes'])}, and rank 0 {named(first['lanes'])}"
            raise StateError(f"{what}; merge states that were saved after the same batch")
    leaves = [_joined([state["leaves"][i] for state in listed], dim) for i, dim in enumerate(first["dims"])]
    return {
        **first,
        "rank": 0,
        "world_size": 1,
        "lanes": list(range(count * len(listed))),
        **{name: [value for state in listed for value in _row(state, name)] for name in ROWS},
        "leaves": leaves,
    }


def _joined(leaves: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    shapes = [tuple(leaf.shape) for leaf in leaves]
    if len({(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}) > 1:
        raise StateError(f"the ranks' states have shapes {shapes}; merge those of one model")
    return torch.cat([leaf.to(leaves[0].device) for leaf in leaves], dim)
