"""Carried states as plain data: the result of `state_dict`, and its distribution to another number of ranks.

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

from stream_dataloader._engine.items.plain import from_plain, to_plain
from stream_dataloader.errors import StateError
from stream_dataloader.recurrent.order import ROWS, LaneOrder, named
from stream_dataloader.recurrent.states import Lanes, States
from stream_dataloader.recurrent.store import Piece

if TYPE_CHECKING:
    from stream_dataloader.dataloader import StreamDataLoader

VERSION = 1
_NAMES = ("rank", "world_size", "lanes", "source", "position")
#: Further keys of a state, by the class that saved it.
_CONTENT = {"RecurrentState": ("structure", "dims", "leaves"), "LaneMemory": ("values",)}


class OwnLanes(NamedTuple):
    """Lanes of a rank in a state.

    Attributes:
        lanes: Numbers of the lanes.
        rows: The state's row of each lane.
        last: The last item of each lane, as `ROWS` lists it.
        new: Lanes that are not in the state; each begins with a new stream.
    """

    lanes: Lanes
    rows: Lanes
    last: npt.NDArray[np.int64]
    new: Lanes

    def order(self) -> LaneOrder:
        """Return the check that the lanes' next batches continue from here."""
        order = LaneOrder.of(self.lanes, self.last)
        order.begin(self.new)
        return order


def _moved(own: OwnLanes, loader: StreamDataLoader[Any]) -> OwnLanes:
    """Return the loader's lanes that continue lanes of the state, and those that are new."""
    kept = loader._kept_lanes
    if kept is None:
        raise StateError("the loader has loaded no state; load its state first, saved after the same batch")
    if len(own.lanes) and own.lanes[-1] >= kept.saved:
        what = f"the carried state has {named(own.lanes)}, but the loader's state had {kept.saved} lanes on this rank"
        raise StateError(
            f"{what}; load states saved after the same batch, and pass rank= and world_size= if the loader has them"
        )
    row_of = {lane: row for row, lane in enumerate(own.lanes.tolist())}
    pairs = [(lane, row_of[before]) for lane, before in enumerate(kept.lanes) if before in row_of]
    lanes, found = np.array(pairs, np.int64).reshape(-1, 2).T
    return OwnLanes(lanes, own.rows[found], own.last[:, found], np.flatnonzero(np.array(kept.lanes) < 0))


def head_of(lanes: Lanes, order: LaneOrder, place: tuple[int, int]) -> dict[str, Any]:
    """Return the numbers that every carried state saves for its lanes."""
    rank, world_size = place
    known = order.last(lanes).tolist()
    rows = dict(zip(ROWS, known, strict=True))
    return {"version": VERSION, "rank": rank, "world_size": world_size, "lanes": lanes.tolist(), **rows}


def tensors_to_plain(piece: Piece | None) -> dict[str, Any]:
    """Return copies of the lanes' tensors, with the structure of the state."""
    return {
        "structure": None if piece is None else to_plain(piece.states.node),
        "dims": [] if piece is None else list(piece.states.dims),
        "leaves": [] if piece is None else [leaf.detach().clone() for leaf in piece.states.leaves],
    }


def tensors_from_plain(state: Mapping[str, Any]) -> States:
    """Read the states of all lanes from a saved state of a `RecurrentState`."""
    leaves, lanes = list(state["leaves"]), len(state["lanes"])
    sizes = [tuple(leaf.shape)[dim] for leaf, dim in zip(leaves, state["dims"], strict=True)]
    if any(size != lanes for size in sizes):
        raise StateError(f"the state names {lanes} lanes, but its tensors have {sizes}; it was changed since")
    return States(from_plain(state["structure"]), leaves, list(state["dims"]))


def check_state(state: Any, owner: str | None = None) -> str:
    """Raise unless `state` is a saved state, and one of class `owner` if given; return the class that saved it."""
    what = owner or "a RecurrentState or LaneMemory"
    if not isinstance(state, Mapping) or "version" not in state:
        raise StateError(f"this is not a state of {what}, but a {type(state).__name__}; pass a state_dict()")
    if state["version"] != VERSION:
        raise StateError(f"the state has version {state['version']}, but this library reads version {VERSION}")
    kind = "LaneMemory" if "values" in state else "RecurrentState"
    if owner is not None and kind != owner:
        raise StateError(f"the state is from a {kind}, but this is a {owner}; load it with the class that saved it")
    if missing := [name for name in (*_NAMES, *_CONTENT[kind]) if name not in state]:
        raise StateError(f"the state has no {missing[0]!r}; pass all that state_dict() of a {kind} returned")
    return kind


def of_rank(
    state: Any, owner: str, place: tuple[int, int], loader: StreamDataLoader[Any] | None = None
) -> OwnLanes | None:
    """Return a rank's lanes in a state, or None if the state has no lanes.

    Args:
        owner: Name of the class that loads the state.
        place: The rank, and the number of ranks.
        loader: The loader, if it has loaded its state with another number of lanes.

    Raises:
        StateError: This is not a state of such an owner, or it does not have this rank's lanes. Or the loader has
            loaded no state, or one with other lanes.
    """
    check_state(state, owner)
    if not state["lanes"]:
        return None
    own = _of_place(state, *place)
    return own if loader is None else _moved(own, loader)


def _of_place(state: Mapping[str, Any], rank: int, world_size: int) -> OwnLanes:
    count, none = len(state["lanes"]), np.empty(0, np.int64)
    if not count == len(state["source"]) == len(state["position"]) == len(state.get("values", state["lanes"])):
        raise StateError(f"the state names {count} lanes, but has another number of values; it was changed since")
    lanes, last = np.array(state["lanes"], np.int64), np.array([_row(state, name) for name in ROWS], np.int64)
    if (state["rank"], state["world_size"]) == (rank, world_size):
        return OwnLanes(lanes, np.arange(count), last, none)
    if state["world_size"] != 1:
        what = f"the state is from rank {state['rank']} of {state['world_size']}"
        here = f"but this is rank {rank} of {world_size}"
        raise StateError(f"{what}, {here}; load the states of all ranks together: merge_states([...])")
    if state["lanes"] != list(range(count)) or count % world_size:
        what = f"the state has {count} lanes, {named(state['lanes'])}"
        raise StateError(f"{what}, which {world_size} ranks cannot share evenly; use another number of ranks")
    own = np.arange(rank * count // world_size, (rank + 1) * count // world_size)
    return OwnLanes(np.arange(len(own)), own, last[:, own], none)


def _row(state: Mapping[str, Any], name: str) -> Sequence[int]:
    """Return a number for each lane of a state. The oldest states have no number of the batch."""
    return state[name] if name in state else [-1] * len(state["lanes"])


def merge_carried(listed: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the carried states of all ranks into one.

    Raises:
        StateError: One is not a state; a rank is missing or given twice; or the ranks' lanes or models differ.
    """
    kinds = list(map(check_state, listed))
    for state in listed:
        check_state(state, kinds[0])
    listed = sorted(listed, key=lambda state: int(state["rank"]))
    first, found = listed[0], [state["rank"] for state in listed]
    if found != list(range(first["world_size"])) or any(s["world_size"] != first["world_size"] for s in listed):
        sizes = sorted({state["world_size"] for state in listed})
        what = f"the states are from ranks {found} of {sizes}; pass the state of each rank once"
        raise StateError(f"{what}; give {kinds[0]} rank= and world_size= if the loader has them")
    count = len(first["lanes"])
    for state in listed:
        for name in ("structure", "dims"):
            if state.get(name) != first.get(name):
                raise StateError(f"rank {state['rank']} has {name} {state[name]}, but rank 0 has {first[name]}")
        if list(state["lanes"]) != list(range(count)):
            what = f"rank {state['rank']} has {named(state['lanes'])}, but rank 0 has {named(first['lanes'])}"
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
        raise StateError(f"the ranks' states have shapes {shapes}; merge states of one model")
    return torch.cat([leaf.to(leaves[0].device) for leaf in leaves], dim)
