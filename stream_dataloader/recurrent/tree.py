"""Structures of tensors: a model's state is a tensor, or a tuple, list, dict or dataclass of states; or None.

They are those of items (`_items/structure.py`), with lists and None as containers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stream_dataloader._items.structure import (
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


def take_apart(value: Any, name: str = "state") -> tuple[Node, list[torch.Tensor]]:
    """The structure of a state and its tensors, of which `unflatten` makes it again."""
    node, leaves = flatten(value, _parts)
    if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        pairs = zip(leaf_paths(node, name), leaves, strict=True)
        raise _no_state(*next((path, leaf) for path, leaf in pairs if not isinstance(leaf, torch.Tensor)))
    return node, leaves


def _parts(value: Any) -> Parts | None:
    if type(value) is list:
        return list, tuple(range(len(value))), value
    return (type(None), (), []) if value is None else children_of(value)


def _no_state(name: str, found: Any) -> TypeError:
    return TypeError(
        f"{name} is a {type(found).__name__}; a state may hold tensors with a dimension for lanes, None, and tuples, "
        "lists, dicts and dataclasses of them"
    )


def names_of(node: Node) -> list[str]:
    """How a user would write each tensor: `state[0]`, `state['conv']`."""
    return leaf_paths(node, "state")


def _shape_of(node: Node) -> str:
    """How containers are nested, for messages."""
    return types_of(node).replace("leaf", "tensor")


def spread(value: Any, node: Node, name: str) -> list[Any]:
    """One value a tensor, from a value for all of them, or from a structure of such values like the state's."""
    if value is None or isinstance(value, int):
        return [value] * len(leaf_paths(node))
    if (parts := _parts(value)) is None:
        raise _no_state(name, value)
    kind, keys, values = parts
    by_key = dict(zip(keys, values, strict=True))
    if kind is not node.type or set(by_key) != set(node.keys):
        raise ValueError(
            f"{name} is {value!r}, and the state there is {_shape_of(node)} with {list(node.keys)}; give one number "
            "for all tensors, or numbers in the structure of the state"
        )
    below = zip(node.keys, node.children, strict=True)
    return [one for key, child in below for one in spread(by_key[key], child, name + step_to(kind, key))]


def map_tensors(function: Callable[..., torch.Tensor], value: Any, *others: Any) -> Any:
    """`value` with each tensor replaced by what `function` makes of it, and of the tensors of `others` beside it."""
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
        raise StateError(
            f"{of} is {_shape_of(expected)} of {names_of(expected)}, and {other} {_shape_of(found)} of "
            f"{names_of(found)}; a carried state keeps its structure"
        )


def along(dim: int, values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Values `(B,)` in a shape that broadcasts along dimension `dim` of a tensor."""
    return values.reshape([-1 if i == dim % like.ndim else 1 for i in range(like.ndim)])
