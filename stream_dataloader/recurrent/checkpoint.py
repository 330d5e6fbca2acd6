"""Carried states as plain data: the result of `state_dict`, and its distribution to another number of ranks.

::

    rank 0 of 2, lanes 0 1 2        merge_states        rank 0 of 3, lanes 0 1
    rank 1 of 2, lanes 0 1 2    ──►  lanes 0 ... 5  ──►  rank 1 of 3, lanes 0 1
                                                        rank 2 of 3, lanes 0 1
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from stream_dataloader._engine.items.plain import from_plain, to_plain
from stream_dataloader._engine.schedule.state_check import is_same, number
from stream_dataloader.errors import StateError, shorten
from stream_dataloader.recurrent.order import ROWS, LaneOrder, named
from stream_dataloader.recurrent.states import Lanes, States, take_apart
from stream_dataloader.recurrent.store import Piece

if TYPE_CHECKING:
    from stream_dataloader.dataloader import StreamDataLoader

VERSION = 1
_HEAD = ("rank", "world_size", "lanes", *ROWS)
#: Further keys of a state, by the class that saved it.
_CONTENT = {"RecurrentState": ("structure", "dims", "leaves"), "LaneMemory": ("values",)}
#: Least and largest numbers, where they differ from those of other rows. Memory is taken for each lane, and no loader
#: has that many; the seed of a stream is any 64 bits.
_RANGES = {"lanes": (0, 1 << 20), "stream": (-(1 << 63), (1 << 63) - 1)}


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


def state_of(lanes: Lanes, order: LaneOrder, place: tuple[int, int], content: dict[str, Any]) -> dict[str, Any]:
    """Return a carried state: the numbers that each saves for its lanes, and its content."""
    rank, world_size = place
    known = order.last(lanes).tolist()
    rows = dict(zip(ROWS, known, strict=True))
    head = {"version": VERSION, "rank": rank, "world_size": world_size, "lanes": lanes.tolist()}
    return _sealed({**head, **rows, **content})


def _sealed(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state with a checksum of everything but what is in its tensors."""
    return state | {"checksum": _checksum(state)}


def _checksum(state: Mapping[str, Any]) -> int:
    try:
        outline = repr([_outline(state.get(name)) for name in (*_HEAD, *_CONTENT["RecurrentState"], "values")])
    except RecursionError as error:
        raise StateError("the state is nested too deeply; it was changed since it was saved") from error
    return zlib.crc32(outline.encode("utf-8", "surrogateescape"))


def _outline(plain: Any) -> Any:
    """Return plain data with shapes in place of tensors, the same for each way to save it."""
    if isinstance(plain, torch.Tensor):
        return "tensor", list(plain.shape)
    if isinstance(plain, dict):
        return sorted((repr(key), _outline(value)) for key, value in plain.items())
    if isinstance(plain, (list, tuple)):
        return list(plain) if {*map(type, plain)} == {int} else list(map(_outline, plain))
    return plain


def tensors_to_plain(piece: Piece | None) -> dict[str, Any]:
    """Return copies of the lanes' tensors, with the structure of the state."""
    return {
        "structure": None if piece is None else to_plain(piece.states.node),
        "dims": [] if piece is None else list(piece.states.dims),
        "leaves": [] if piece is None else [leaf.detach().clone() for leaf in piece.states.leaves],
    }


def tensors_from_plain(state: Mapping[str, Any]) -> States:
    """Read the states of all lanes from a saved state of a `RecurrentState`.

    Raises:
        StateError: Its tensors do not fit its lanes or its structure.
    """
    lanes = len(state["lanes"])
    try:
        leaves, dims = state["leaves"], state["dims"]
        if not isinstance(leaves, (list, tuple)) or not isinstance(dims, (list, tuple)):
            raise TypeError("leaves and dims must be lists")
        for leaf, dim in zip(leaves, dims, strict=True):
            if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
                raise TypeError(f"a {type(leaf).__name__} is no dense tensor")
            number("dimension of the lanes", dim, 0, leaf.ndim - 1)
        sizes = [leaf.shape[dim] for leaf, dim in zip(leaves, dims, strict=True)]
        if any(size != lanes for size in sizes):
            raise StateError(f"the state names {lanes} lanes, but its tensors have {sizes}; it was changed since")
        states = States(from_plain(state["structure"]), list(leaves), list(dims))
        if take_apart(states.tree) != (states.node, states.leaves):
            raise ValueError(f"its structure does not fit {len(leaves)} tensors")
    except StateError:
        raise
    except Exception as error:  # of a structure that is of other types, or nested without end
        raise StateError(f"the state's tensors cannot be read: {shorten(error)}; it was changed since") from error
    return states


def check_state(state: Any, owner: str | None = None) -> str:
    """Raise unless `state` is a saved state, and one of class `owner` if given; return the class that saved it."""
    what = owner or "a RecurrentState or LaneMemory"
    if not isinstance(state, Mapping) or "version" not in state:
        raise StateError(f"this is not a state of {what}, but a {type(state).__name__}; pass a state_dict()")
    if not is_same(state["version"], VERSION):
        raise StateError(f"the state has version {shorten(state['version'])}, but this library reads version {VERSION}")
    kind = "LaneMemory" if "values" in state else "RecurrentState"
    if owner is not None and kind != owner:
        raise StateError(f"the state is from a {kind}, but this is a {owner}; load it with the class that saved it")
    if missing := [name for name in (*_HEAD, "checksum", *_CONTENT[kind]) if name not in state]:
        raise StateError(f"the state has no {missing[0]!r}; pass all that state_dict() of a {kind} returned")
    _check_numbers(state)
    if kind == "LaneMemory":
        if not isinstance(values := state["values"], list) or len(values) != len(state["lanes"]):
            raise _other_count(state, "values")
    elif state["lanes"]:
        tensors_from_plain(state)
    if not is_same(state["checksum"], _checksum(state)):
        raise StateError("the numbers of the state do not match their checksum: it is damaged, or was changed since")
    return kind


def _check_numbers(state: Mapping[str, Any]) -> None:
    """Refuse numbers that are impossible."""
    number("rank", state["rank"], 0, number("world_size", state["world_size"], 1) - 1)
    for name in ("lanes", *ROWS):
        if not isinstance(row := state[name], (list, tuple)):
            raise StateError(f"the state's {name} is {shorten(row)}, and must be a list with a number for each lane")
        if len(row) != len(state["lanes"]):
            raise _other_count(state, name)
        least, most = _RANGES.get(name, (-3, 1 << 62))
        if row and not ({*map(type, row)} == {int} and least <= min(row) and max(row) <= most):
            for one in row:
                number(name, one, least, most)
    if len(set(state["lanes"])) < len(state["lanes"]):
        raise StateError(f"the state has {named(state['lanes'])}, some twice; it was changed since")


def _other_count(state: Mapping[str, Any], name: str) -> StateError:
    return StateError(f"the state names {len(state['lanes'])} lanes, but has another number of {name}; it was changed")


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
    lanes, last = np.array(state["lanes"], np.int64), np.array([state[name] for name in ROWS], np.int64)
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


def merge_carried(listed: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the carried states of all ranks into one.

    Raises:
        StateError: One is not a state; a rank is missing or given twice; or the ranks' lanes or models differ.
    """
    kinds = list(map(check_state, listed))
    for state in listed:
        check_state(state, kinds[0])
    listed = sorted(listed, key=lambda state: state["rank"])
    first, found = listed[0], [state["rank"] for state in listed]
    if found != list(range(len(listed))) or any(s["world_size"] != len(listed) for s in listed):
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
    whole = {
        **first,
        "rank": 0,
        "world_size": 1,
        "lanes": list(range(count * len(listed))),
        **{name: [value for state in listed for value in state[name]] for name in ROWS},
        **content,
    }
    return _sealed(whole)


def _joined(leaves: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    shapes = [tuple(leaf.shape) for leaf in leaves]
    if len({(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}) > 1:
        raise StateError(f"the ranks' states have shapes {shapes}; merge states of one model")
    return torch.cat([leaf.to(leaves[0].device) for leaf in leaves], dim)
