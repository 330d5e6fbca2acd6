"""What a model's states look like: their structure, where the lanes are in each tensor, and its shape otherwise.

Guarantee: the dimension of the lanes is never guessed. It is told, or it is the only one that can be meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from stream_dataloader._items.structure import Node, leaf_paths
from stream_dataloader.errors import StateError
from stream_dataloader.recurrent.tree import check_same, names_of, spread


class Layout(NamedTuple):
    """What the model's states look like: their structure, and each tensor's dimension of lanes and shape, 1 there."""

    node: Node
    dims: Sequence[int]
    shapes: Sequence[tuple[int, ...]]


def described(layout: Layout) -> str:
    """Names and shapes of the tensors, with B for the lanes."""
    named = zip(names_of(layout.node), layout.dims, layout.shapes, strict=True)
    return ", ".join(
        f"{name} ({', '.join('B' if i == dim else str(size) for i, size in enumerate(shape))})"
        for name, dim, shape in named
    )


def layout_of(node: Node, leaves: Sequence[torch.Tensor], dims: Sequence[int]) -> Layout:
    """That of states, given where their lanes are."""
    shapes = [
        tuple(1 if i == dim else size for i, size in enumerate(leaf.shape))
        for leaf, dim in zip(leaves, dims, strict=True)
    ]
    return Layout(node, dims, shapes)


def compare(known: Layout, found: Layout, what: str) -> None:
    """Raise unless states are of one kind."""
    if known.node != found.node:
        raise StateError(
            f"{what} {names_of(found.node)}, and here the state is {names_of(known.node)}; use the model that it was "
            "made by"
        )
    for i, (one, other) in enumerate(zip(known.shapes, found.shapes, strict=True)):
        if one != other:
            raise StateError(
                f"{what} {names_of(known.node)[i]} of shape {other}, and here it is {one} (1 for the lanes); use the "
                "model that it was made by"
            )


def layout_for(known: Layout | None, node: Node, leaves: Sequence[torch.Tensor], lanes: int, batch_dim: Any) -> Layout:
    """The layout of states that a model returned, if they are of the kind seen before.

    Args:
        known: What was seen before.
        node: The structure of the states.
        leaves: Their tensors.
        lanes: How many lanes they are of.
        batch_dim: As for `dims_of`.

    Raises:
        ValueError: They are of another kind, or it is not clear where the lanes are.
    """
    if not leaves:
        raise ValueError("the state holds no tensor, so there is nothing to carry; pass what the model returned")
    if known is None:
        return layout_of(node, leaves, dims_of(node, leaves, lanes, batch_dim, "state"))
    check_same(known.node, node, "the state kept", "the one returned")
    for i, (leaf, dim) in enumerate(zip(leaves, known.dims, strict=True)):
        if leaf.ndim <= dim or leaf.shape[dim] != lanes:
            raise StateError(
                f"{names_of(node)[i]} is {tuple(leaf.shape)}, and the batch has {lanes} lanes, which are dimension "
                f"{dim}; return the state of the batch's own lanes"
            )
    compare(known, layout_of(node, leaves, known.dims), "the model returned")
    return known


def dims_of(node: Node, leaves: Sequence[torch.Tensor], lanes: int, batch_dim: Any, what: str) -> list[int]:
    """The dimension of the lanes in each tensor.

    Args:
        node: The structure of the tensors.
        leaves: The tensors.
        lanes: How many lanes they have.
        batch_dim: One number, or a structure of them; None where it is to be found out.
        what: Names the structure.

    Raises:
        ValueError: A tensor has not so many lanes there; or several of its dimensions may be meant.
    """
    numbers = spread(batch_dim, node, "batch_dim")
    return [
        _dim_of(name, leaf, lanes, number)
        for name, leaf, number in zip(leaf_paths(node, what), leaves, numbers, strict=True)
    ]


def _dim_of(name: str, leaf: torch.Tensor, lanes: int, number: int | None) -> int:
    shape = tuple(leaf.shape)
    candidates = [i for i, size in enumerate(shape) if size == lanes]
    if number is not None:
        if not -leaf.ndim <= number < leaf.ndim or number % leaf.ndim not in candidates:
            fitting = f"; dimension {candidates[0]} has" if len(candidates) == 1 else ""
            raise ValueError(
                f"{name} is {shape}, which has not {lanes} lane{'s' * (lanes != 1)} in dimension {number} "
                f"(batch_dim){fitting}"
            )
        return number % leaf.ndim
    if not candidates:
        raise ValueError(
            f"{name} is {shape}, and no dimension has the size {lanes}, one for each lane; a state has a row a lane"
            + (", and an initial one has 1 there: use a function of the batch for more" if lanes == 1 else "")
        )
    if len(candidates) > 1:
        raise ValueError(
            f"{name} is {shape}, and the lanes, {lanes} of them, may be dimension {' or '.join(map(str, candidates))}; "
            "say which with batch_dim=: 1 for torch.nn.LSTM and GRU, 0 for cells and convolutions"
        )
    return candidates[0]
