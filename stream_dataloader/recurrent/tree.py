"""Structures of tensors: a model's state is a tensor, or a tuple, list, dict or dataclass of states; or None.

Guarantee: `put_together` gives back what `take_apart` was given, of the same types. Dicts are equal in any order of
keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from stream_dataloader._items.structure import LEAF, Node, children_of, leaf_paths, step_to, types_of, unflatten
from stream_dataloader.errors import StateError

#: Stands for a None within a state: a layer without one.
NOTHING = Node("None", type=type(None))


def take_apart(value: Any, name: str = "state") -> tuple[Node, list[torch.Tensor]]:
    """The structure of a state and its tensors.

    Raises:
        TypeError: It holds something that is neither a tensor nor a container.
    """
    leaves: list[torch.Tensor] = []
    return _take_apart(value, name, leaves), leaves


def _take_apart(value: Any, name: str, leaves: list[torch.Tensor]) -> Node:
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        return LEAF
    if value is None:
        return NOTHING
    kind, keys, values = _children(value, name)
    order = None
    if kind is dict:
        ranked = sorted(range(len(keys)), key=lambda i: (str(keys[i]), type(keys[i]).__qualname__))
        if ranked != list(range(len(keys))):
            order = tuple(ranked.index(i) for i in range(len(keys)))
            keys, values = tuple(keys[i] for i in ranked), [values[i] for i in ranked]
    children = tuple(
        _take_apart(child, name + step_to(kind, key), leaves) for key, child in zip(keys, values, strict=True)
    )
    return Node(f"{kind.__module__}.{kind.__qualname__}", keys, children, kind, order)


def _children(value: Any, name: str) -> tuple[type, tuple[Any, ...], list[Any]]:
    if type(value) is list:
        return list, tuple(range(len(value))), value
    parts = children_of(value)
    if parts is None:
        raise TypeError(
            f"{name} is a {type(value).__name__}; a state may hold tensors with a dimension for lanes, None, and "
            "tuples, lists, dicts and dataclasses of them"
        )
    return parts


def put_together(node: Node, leaves: Iterator[Any]) -> Any:
    """A state of a structure's kind, made of tensors in the order that `take_apart` gives them."""
    if node.type is None:
        return next(leaves)
    if node.type is type(None):
        return None
    values = [put_together(child, leaves) for child in node.children]
    if node.type is list:
        return values
    return unflatten(Node("", node.keys, (LEAF,) * len(values), node.type, node.order), iter(values))  # one level of it


def names_of(node: Node, name: str = "state") -> list[str]:
    """How a user would write each tensor: `state[0]`, `state['conv']`."""
    return leaf_paths(node, name)


def shape_of(node: Node) -> str:
    """How containers are nested, for messages."""
    return types_of(node).replace("leaf", "tensor")


def spread(value: Any, node: Node, name: str) -> list[Any]:
    """One value a tensor, from a value for all of them, or from a structure of such values like the state's.

    Raises:
        ValueError: The structure is not the state's.
    """
    if value is None or isinstance(value, int):
        return [value] * len(names_of(node))
    kind, keys, values = _children(value, name)
    by_key = dict(zip(keys, values, strict=True))
    if kind is not node.type or set(by_key) != set(node.keys):
        raise ValueError(
            f"{name} is {value!r}, and the state there is {shape_of(node)} with {list(node.keys)}; give one number for "
            "all tensors, or numbers in the structure of the state"
        )
    parts = zip(node.keys, node.children, strict=True)
    return [one for key, child in parts for one in spread(by_key[key], child, name + step_to(kind, key))]


def map_tensors(function: Callable[..., torch.Tensor], value: Any, *others: Any) -> Any:
    """`value` with each tensor replaced by what `function` makes of it, and of the tensors of `others` beside it.

    Raises:
        StateError: The others are of another structure.
    """
    node, leaves = take_apart(value)
    beside: list[Sequence[torch.Tensor]] = [leaves]
    for other in others:
        other_node, other_leaves = take_apart(other)
        check_same(node, other_node, "the state", "the other one")
        beside.append(other_leaves)
    return put_together(node, iter(itertools.starmap(function, zip(*beside, strict=True))))


def check_same(expected: Node, found: Node, of: str, other: str) -> None:
    """Raise unless two structures are the same.

    Raises:
        StateError: They differ; the text shows both.
    """
    if expected != found:
        raise StateError(
            f"{of} is {shape_of(expected)} of {names_of(expected)}, and {other} {shape_of(found)} of "
            f"{names_of(found)}; a carried state keeps its structure"
        )


def along(dim: int, values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Values `(B,)` in a shape that broadcasts along dimension `dim` of a tensor."""
    return values.reshape([-1 if i == dim % like.ndim else 1 for i in range(like.ndim)])


def blended(
    mask: torch.Tensor, ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor], dims: Sequence[int]
) -> list[torch.Tensor]:
    """`ones` in some lanes, `others` in the rest, of the kind and on the device of `others`.

    Args:
        mask: `(B,)` bool: the lanes of `ones`.
        ones: They may be of one lane.
        others: Of all lanes.
        dims: The dimension of the lanes in each.
    """
    return [
        torch.where(along(dim, mask.to(other.device, non_blocking=True), other), one.to(other), other)
        for one, other, dim in zip(ones, others, dims, strict=True)
    ]


def expanded(leaves: Iterable[torch.Tensor], dims: Iterable[int], lanes: int) -> list[torch.Tensor]:
    """One lane's tensors for so many lanes. They are contiguous, as cuDNN's networks want them."""
    return [
        leaf.expand([lanes if i == dim else -1 for i in range(leaf.ndim)]).contiguous()
        for leaf, dim in zip(leaves, dims, strict=True)
    ]
