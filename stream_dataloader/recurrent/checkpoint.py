"""Carried states as plain data: what `state_dict` gives, and how ranks of another number share it.

::

    rank 0 of 2, lanes 0 1 2        merge_states        rank 0 of 3, lanes 0 1
    rank 1 of 2, lanes 0 1 2    ──►  lanes 0 ... 5  ──►  rank 1 of 3, lanes 0 1
                                                        rank 2 of 3, lanes 0 1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from stream_dataloader._items.plain import from_plain, to_plain
from stream_dataloader.errors import StateError
from stream_dataloader.recurrent.order import ROWS, LaneOrder, named
from stream_dataloader.recurrent.states import Lanes, States
from stream_dataloader.recurrent.store import Piece

if TYPE_CHECKING:
    from stream_dataloader.dataloader import StreamDataLoader

VERSION = 1
_NAMES = ("rank", "world_size", "lanes", "source", "position")
#: What a state has besides, by what carried it.
_CONTENT = {"RecurrentState": ("structure", "dims", "leaves"), "LaneMemory": ("values",)}


class OwnLanes(NamedTuple):
    """A rank's lanes in a state.

    Attributes:
        lanes: Their numbers.
        rows: The rows of the state that are theirs.
        last: What each was made of last, in `ROWS`.
        new: Lanes that the state has not: each begins with a stream.
    """

    lanes: Lanes
    rows: Lanes
    last: npt.NDArray[np.int64]
    new: Lanes

    def order(self) -> LaneOrder:
        """The order in which the lanes' batches have to come."""
        order = LaneOrder.of(self.lanes, self.last)
        order.begin(self.new)
        return order


def _moved(own: OwnLanes, loader: StreamDataLoader[Any]) -> OwnLanes:
    """The lanes of a loader that go on with a rank's, and those of its lanes that are new."""
    kept = loader._kept_lanes
    if kept is None:
        raise StateError("the loader has loaded no state; load its state first, saved as of the same batch")
    if len(own.lanes) and own.lanes[-1] >= kept.saved:
        what = f"the carried state has {named(own.lanes)}, and the loader's had {kept.saved} lanes on this rank"
        raise StateError(
            f"{what}; load both as of the same batch, and give rank= and world_size= here where the loader has them"
        )
    row_of = {lane: row for row, lane in enumerate(own.lanes.tolist())}
    pairs = [(lane, row_of[before]) for lane, before in enumerate(kept.lanes) if before in row_of]
    lanes, found = np.array(pairs, np.int64).reshape(-1, 2).T
    return OwnLanes(lanes, own.rows[found], own.last[:, found], np.flatnonzero(np.array(kept.lanes) < 0))


def head_of(lanes: Lanes, order: LaneOrder, place: tuple[int, int]) -> dict[str, Any]:
    """What a state says of lanes, whatever is kept for them: numbers."""
    rank, world_size = place
    known = order.last(lanes).tolist()
    rows = dict(zip(ROWS, known, strict=True))
    return {"version": VERSION, "rank": rank, "world_size": world_size, "lanes": lanes.tolist(), **rows}


def tensors_to_plain(piece: Piece | None) -> dict[str, Any]:
    """The states of lanes as tensors of their own, with their structure."""
    return {
        "structure": None if piece is None else to_plain(piece.states.node),
        "dims": [] if piece is None else list(piece.states.dims),
        "leaves": [] if piece is None else [leaf.detach().clone() for leaf in piece.states.leaves],
    }


def tensors_from_plain(state: Mapping[str, Any]) -> States:
    """The states of all lanes in a state of a `RecurrentState`."""
    leaves, lanes = list(state["leaves"]), len(state["lanes"])
    sizes = [tuple(leaf.shape)[dim] for leaf, dim in zip(leaves, state["dims"], strict=True)]
    if any(size != lanes for size in sizes):
        raise StateError(f"the state names {lanes} lanes, and its tensors have {sizes}; it was changed since")
    return States(from_plain(state["structure"]), leaves, list(state["dims"]))


def check_state(state: Any, owner: str | None = None) -> str:
    """Raise unless it is a state, or one of another kind than `owner` carries; return what carried it."""
    what = owner or "a RecurrentState or LaneMemory"
    if not isinstance(state, Mapping) or "version" not in state:
        raise StateError(f"this is no state of {what}, but a {type(state).__name__}; pass a state_dict()")
    if state["version"] != VERSION:
        raise StateError(f"the state is of version {state['version']}, and this library reads version {VERSION}")
    kind = "LaneMemory" if "values" in state else "RecurrentState"
    if owner is not None and kind != owner:
        raise StateError(f"the state is one of a {kind}, and this is a {owner}; load each with what saved it")
    if missing := [name for name in (*_NAMES, *_CONTENT[kind]) if name not in state]:
        raise StateError(f"the state has no {missing[0]!r}; pass all that state_dict() of a {kind} returned")
    return kind


def of_rank(
    state: Any, owner: str, place: tuple[int, int], loader: StreamDataLoader[Any] | None = None
) -> OwnLanes | None:
    """A rank's lanes in a state; None if it has none.

    Args:
        owner: The name of the class that loads it.
        place: Which rank it is, and how many there are.
        loader: The loader, if it has loaded its state with another number of lanes.

    Raises:
        StateError: It is no state of such an owner, or has not this rank's lanes; or the loader has loaded no state, or
            one of other lanes.
    """
    check_state(state, owner)
    if not state["lanes"]:
        return None
    own = _of_place(state, *place)
    return own if loader is None else _moved(own, loader)


def _of_place(state: Mapping[str, Any], rank: int, world_size: int) -> OwnLanes:
    count, none = len(state["lanes"]), np.empty(0, np.int64)
    if not count == len(state["source"]) == len(state["position"]) == len(state.get("values", state["lanes"])):
        raise StateError(f"the state names {count} lanes, and has not as many values; it was changed since")
    lanes, last = np.array(state["lanes"], np.int64), np.array([_row(state, name) for name in ROWS], np.int64)
    if (state["rank"], state["world_size"]) == (rank, world_size):
        return OwnLanes(lanes, np.arange(count), last, none)
    if state["world_size"] != 1:
        what = f"the state is that of rank {state['rank']} of {state['world_size']}"
        here = f"and this is rank {rank} of {world_size}"
        raise StateError(f"{what}, {here}; load all ranks' together: merge_states([...])")
    if state["lanes"] != list(range(count)) or count % world_size:
        what = f"the state has {count} lanes, {named(state['lanes'])}"
        raise StateError(f"{what}, which {world_size} ranks cannot share evenly; have another number of ranks")
    own = np.arange(rank * count // world_size, (rank + 1) * count // world_size)
    return OwnLanes(np.arange(len(own)), own, last[:, own], none)


def _row(state: Mapping[str, Any], name: str) -> Sequence[int]:
    """What a state knows of its lanes; the first ones did not say which batch they were of."""
    return state[name] if name in state else [-1] * len(state["lanes"])


def merge_carried(listed: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One carried state of all ranks, out of each rank's own.

    Raises:
        StateError: One is no state; a rank is missing or there twice; or ranks have other lanes or models.
    """
    kinds = list(map(check_state, listed))
    for state in listed:
        check_state(state, kinds[0])
    listed = sorted(listed, key=lambda state: int(state["rank"]))
    first, found = listed[0], [state["rank"] for state in listed]
    if found != list(range(first["world_size"])) or any(s["world_size"] != first["world_size"] for s in listed):
        sizes = sorted({state["world_size"] for state in listed})
        what = f"the states are those of ranks {found} of {sizes}; pass each rank's own once"
        raise StateError(f"{what}; give {kinds[0]} rank= and world_size= where the loader has them")
    count = len(first["lanes"])
    for state in listed:
        for name in ("structure", "dims"):
            if state.get(name) != first.get(name):
                raise StateError(f"rank {state['rank']} has {name} {state[name]}, and rank 0 {first[name]}")
        if list(state["lanes"]) != list(range(count)):
            what = f"rank {state['rank']} has {named(state['lanes'])}, and rank 0 {named(first['lanes'])}"
            raise StateError(f"{what}; merge states that were saved after the same batch")
    if kinds[0] == "LaneMemory":
        content = {"values": [value for state in listed for value in state["values"]]}
    else:
        leaves = zip(*(state["leaves"] for state in listed), strict=True)
        content = {"leaves": [_joined(own, dim) for own, dim in zip(leaves, first["dims"], strict=True)]}
    return {
        **first,
        "rank": 0,
        "world_size": 1,
        "lanes": list(range(count * len(listed))),
        **{name: [value for state in listed for value in _row(state, name)] for name in ROWS},
        **content,
    }


def _joined(leaves: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    shapes = [tuple(leaf.shape) for leaf in leaves]
    if len({(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}) > 1:
        raise StateError(f"the ranks' states have shapes {shapes}; merge those of one model")
    return torch.cat([leaf.to(leaves[0].device) for leaf in leaves], dim)
