"""`States`: tensors of some lanes in the structure of a model's state, with the dimension of the lanes in each.

Guarantee: the dimension of the lanes is never guessed. It is given, or only one dimension fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from stream_dataloader._engine.items.structure import (
    Node,
    Parts,
    children_of,
    flatten,
    leaf_paths,
    step_to,
    types_of,
    unflatten,
)
from stream_dataloader.errors import StateError

Lanes = npt.NDArray[np.int64]


class States(NamedTuple):
    """Structure of a state, its tensors with the lanes side by side, and the dimension of the lanes in each."""

    node: Node
    leaves: Sequence[torch.Tensor]
    dims: Sequence[int]

    @property
    def tree(self) -> Any:
        return unflatten(self.node, iter(self.leaves))

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shape of each tensor, with 1 for the lanes."""
        return [_with_lanes(leaf, dim, 1) for leaf, dim in zip(self.leaves, self.dims, strict=True)]

    def map(self, function: Callable[[torch.Tensor, int], torch.Tensor]) -> States:
        """Apply `function(tensor, dimension of the lanes)` to each tensor, and return the new states."""
        return States(self.node, list(map(function, self.leaves, self.dims)), self.dims)

    def to(self, device: torch.device) -> States:
        return self.map(lambda leaf, _: leaf.to(device, non_blocking=True))

    def columns(self, rows: npt.NDArray[np.int64]) -> States:
        index = torch.from_numpy(rows)
        return self.map(lambda leaf, dim: leaf.index_select(dim, index.to(leaf.device, non_blocking=True)))

    def zeros(self, lanes: int) -> States:
        return self.map(lambda leaf, dim: leaf.new_zeros(_with_lanes(leaf, dim, lanes)))

    def expanded(self, lanes: int) -> States:
        """Repeat the state of one lane for `lanes` lanes. The result is contiguous, as cuDNN's networks require."""
        return self.map(lambda leaf, dim: leaf.expand(_with_lanes(leaf, dim, lanes)).contiguous())

    def blended(self, mask: torch.Tensor, others: Sequence[torch.Tensor]) -> States:
        """Replace lanes by `others` (of all lanes, or of one) where `mask` `(B,)` is set; dtype and device stay."""
        leaves = [
            torch.where(along(dim, mask.to(leaf.device, non_blocking=True), leaf), other.to(leaf), leaf)
            for leaf, other, dim in zip(self.leaves, others, self.dims, strict=True)
        ]
        return States(self.node, leaves, self.dims)

    def check_like(self, known: States, what: str) -> None:
        """Raise unless structure and shapes are the known ones, apart from the number of lanes."""
        check_same(known.node, self.node, "the state here", what)
        if (own := self.shapes) != (shapes := known.shapes):
            i = next(i for i in range(len(own)) if own[i] != shapes[i])
            name = names_of(self.node)[i]
            text = f"{what} has {name} of shape {own[i]}, but here it is {shapes[i]} (1 for the lanes)"
            raise StateError(text + _grown(own[i], shapes[i]))

    def __repr__(self) -> str:
        """Show names and shapes of the tensors, with B for the lanes."""
        named = zip(names_of(self.node), self.dims, self.shapes, strict=True)
        return ", ".join(
            f"{name} ({', '.join('B' if i == dim else str(size) for i, size in enumerate(shape))})"
            for name, dim, shape in named
        )


def _grown(now: Sequence[int], before: Sequence[int]) -> str:
    """Return a remedy if a memory grows in one dimension, or an empty text."""
    longer = [i for i, (one, other) in enumerate(zip(now, before, strict=False)) if one > other]
    if len(now) != len(before) or len(longer) != 1 or sum(map(int.__ne__, now, before)) > 1:
        return ""
    return (
        f"; recurrent.LaneCache keeps a memory that grows in dimension {longer[0]} at a fixed size, with an attention "
        "mask, and recurrent.LaneMemory keeps any value"
    )


def _with_lanes(leaf: torch.Tensor, dim: int, lanes: int) -> tuple[int, ...]:
    return tuple(lanes if i == dim else size for i, size in enumerate(leaf.shape))


def take_apart(value: Any, name: str = "state") -> tuple[Node, list[torch.Tensor]]:
    """Return the structure of a state and its tensors; `unflatten` is the inverse."""
    node, leaves = flatten(value, _parts)
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
            kind = f"tensor of layout {leaf.layout}" if isinstance(leaf, torch.Tensor) else type(leaf).__name__
            what = f"{leaf_paths(node, name)[i]} is a {kind}"
            raise TypeError(f"{what}; a state holds dense tensors, or nested containers of them")
    return node, leaves


def _parts(value: Any) -> Parts | None:
    if type(value) is list:
        return list, tuple(range(len(value))), value
    return (type(None), (), []) if value is None else children_of(value)


def names_of(node: Node) -> list[str]:
    """Return each tensor's name as a user would write it: `state[0]`, `state['conv']`."""
    return leaf_paths(node, "state")


def _nesting(node: Node) -> str:
    return types_of(node).replace("leaf", "tensor")


def _spread(value: Any, node: Node, name: str) -> list[Any]:
    """Return one value for each tensor, given one for all of them or a structure of values."""
    if value is None or isinstance(value, int):
        return [value] * len(leaf_paths(node))
    parts = _parts(value)
    if parts is None or parts[0] is not node.type or set(parts[1]) != set(node.keys):
        what = f"{name} is {value!r}, but the state there is {_nesting(node)} with {list(node.keys)}"
        raise ValueError(f"{what}; give one number, or numbers in the structure of the state")
    kind, keys, values = parts
    by_key, below = dict(zip(keys, values, strict=True)), zip(node.keys, node.children, strict=True)
    return [one for key, child in below for one in _spread(by_key[key], child, name + step_to(kind, key))]


def map_tensors(function: Callable[..., torch.Tensor], value: Any, *others: Any) -> Any:
    """Apply `function` to each tensor of `value` and the tensors of `others` at the same place."""
    node, leaves = take_apart(value)
    beside = [leaves]
    for other in others:
        other_node, other_leaves = take_apart(other)
        check_same(node, other_node, "the state", "the other one")
        beside.append(other_leaves)
    return unflatten(node, iter([function(*own) for own in zip(*beside, strict=True)]))


def check_same(expected: Node, found: Node, of: str, other: str) -> None:
    """Raise unless two structures are the same."""
    if expected != found:
        names, others = names_of(expected), names_of(found)
        odd = [name for name in (*names, *others) if (name in names) != (name in others)]
        if odd and expected.type is found.type:
            where, lacks = (of, other) if odd[0] in names else (other, of)
            remedy = "give it a tensor from the first (zeros where it is empty), or None always"
            raise StateError(f"{odd[0]} is a tensor in {where}, and None or missing in {lacks}; {remedy}")
        known, here = (f"{_nesting(node)} of {names_of(node)}" for node in (expected, found))
        raise StateError(f"{of} is {known}, and {other} {here}; a carried state keeps its structure")


def along(dim: int, values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Reshape values `(B,)` so that they broadcast along dimension `dim` of a tensor."""
    return values.reshape([-1 if i == dim % like.ndim else 1 for i in range(like.ndim)])


def states_of(state: Any, lanes: int, batch_dim: Any, known: States | None = None) -> States:
    """Return the states in a model's result for a number of lanes, checked against `known`, its result before."""
    node, leaves = take_apart(state)
    if not leaves:
        raise ValueError("the state holds no tensor, so there is nothing to carry; pass the state from the model")
    if known is None:
        return States(node, leaves, dims_of(node, leaves, lanes, batch_dim, "state"))
    check_same(known.node, node, "the state kept", "the one returned")
    for i, (leaf, dim) in enumerate(zip(leaves, known.dims, strict=True)):
        if leaf.ndim <= dim or leaf.shape[dim] != lanes:
            what = f"{names_of(node)[i]} is {tuple(leaf.shape)}, but the batch has {lanes} lanes"
            raise StateError(f"{what} in dimension {dim}; return the state of the batch's own lanes")
    found = States(node, leaves, known.dims)
    if any(leaf.shape != one.shape for leaf, one in zip(leaves, known.leaves, strict=True)):  # other lanes, or an error
        found.check_like(known, "the state returned")
    return found


def dims_of(node: Node, leaves: Sequence[torch.Tensor], lanes: int, batch_dim: Any, what: str) -> list[int]:
    """Return the dimension of the lanes in each tensor of `what`, given the user's `batch_dim`."""
    numbers = _spread(batch_dim, node, "batch_dim")
    named = zip(leaf_paths(node, what), leaves, numbers, strict=True)
    return [_dim_of(name, leaf, lanes, number) for name, leaf, number in named]


def _dim_of(name: str, leaf: torch.Tensor, lanes: int, number: int | None) -> int:
    shape = tuple(leaf.shape)
    candidates = [i for i, size in enumerate(shape) if size == lanes]
    if number is not None:
        if not -leaf.ndim <= number < leaf.ndim or number % leaf.ndim not in candidates:
            fitting = f"; dimension {candidates[0]} has" if len(candidates) == 1 else ""
            many = f"{lanes} lane{'s' * (lanes != 1)}"
            raise ValueError(f"{name} is {shape}, without {many} in dimension {number} (batch_dim){fitting}")
        return number % leaf.ndim
    if not candidates:
        more = "; pass a function of the batch to give each lane its own initial state" if lanes == 1 else ""
        raise ValueError(f"{name} is {shape}, but no dimension has the size {lanes}, a row for each lane{more}")
    if len(candidates) > 1:
        what = f"{name} is {shape}, and its {lanes} lanes may be dimension {' or '.join(map(str, candidates))}"
        raise ValueError(f"{what}; choose one with batch_dim=: 1 for torch.nn.LSTM and GRU, 0 for cells")
    return candidates[0]
