"""The structure of items: which containers hold which leaves, and how to take them apart and build them again.

Leaves have one order, in dicts that of the sorted keys. That in the first item is remembered for `unflatten`.

Guarantee: `collect` gives exactly the leaves that `unflatten` needs, or raises `Misfit`, which names both sides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch

#: What to do about streams that do not fit beside each other.
ALIKE = 'make all streams alike, or have open_stream raise for those that are not, which on_error="skip" skips'


#: How deep containers of an item may be nested.
MOST_NESTED = 64


class Misfit(Exception):
    """An item does not fit; the text says which leaf, what it is and what it should be."""


class StreamMisfit(Misfit):
    """A stream does not fit beside another one; either of them may be the odd one."""


@dataclasses.dataclass(frozen=True)
class Node:
    """One level of an item's structure; `keys` name the children, `type` rebuilds it.

    Types are compared by name: one that is defined in a function is another object in each process.
    """

    name: str = ""
    keys: tuple[Any, ...] = ()  # of a dict: sorted
    children: tuple[Node, ...] = ()
    type: type | None = dataclasses.field(default=None, compare=False)  # None: a leaf
    order: tuple[int, ...] | None = dataclasses.field(default=None, compare=False)  # of a dict's keys, if not sorted


LEAF = Node()


#: What a container is rebuilt as, its keys and its children.
Parts = tuple[type, tuple[Any, ...], list[Any]]


def children_of(item: Any) -> Parts | None:
    """The parts of a container; None for a leaf."""
    kind: Any = type(item)
    if isinstance(item, dict):  # also a subclass, as a plain dict: its constructor may take anything
        return dict, tuple(item), [item[key] for key in item]
    if kind is tuple:
        return kind, tuple(range(len(item))), list(item)
    if isinstance(item, tuple) and hasattr(kind, "_fields"):
        return kind, tuple(kind._fields), list(item)
    if not hasattr(kind, "__dataclass_fields__"):  # in a compiled model, no call that torch cannot see through
        return None
    names = dataclass_fields(kind)
    return None if names is None else (kind, names, [getattr(item, name) for name in names])


@lru_cache(maxsize=64)
def dataclass_fields(kind: Any) -> tuple[str, ...] | None:
    """The fields of a dataclass that can be rebuilt of them; None for any other type."""
    names = tuple(field.name for field in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else None
    try:
        object.__new__(kind)  # as `unflatten` will
    except TypeError:  # also a list, say, or abstract
        return None
    return names


def _sort_key(key: Any) -> tuple[str, str]:
    """Orders keys of any types, which need not be comparable; 1 and "1" differ by their types' names."""
    return str(key), type(key).__qualname__


def step_to(kind: type, key: Any) -> str:
    """How a user would write the way from a container to a child: `.label`, `['image']`, `[0]`."""
    return f".{key}" if kind is not dict and isinstance(key, str) else f"[{key!r}]"


def flatten(
    item: Any, children_of: Callable[[Any], Parts | None] = children_of, depth: int = 0
) -> tuple[Node, list[Any]]:
    """The structure of `item` and its leaves, as they are; `children_of` says what a container is.

    Raises:
        Misfit: It is nested too deeply.
    """
    parts = children_of(item)
    if parts is None:
        return LEAF, [item]
    if depth == MOST_NESTED:  # Python's own limit would end the epoch wherever it is met, and not the stream
        raise Misfit(f"the item is nested more than {MOST_NESTED} deep")
    kind, keys, values = parts
    order = None
    if kind is dict:
        ranked = sorted(keys, key=_sort_key)
        if ranked != list(keys):
            place = {key: i for i, key in enumerate(ranked)}
            order = tuple(place[key] for key in keys)
            by_key = dict(zip(keys, values, strict=True))
            keys, values = tuple(ranked), [by_key[key] for key in ranked]
    flat = [flatten(value, children_of, depth + 1) for value in values]
    node = Node(f"{kind.__module__}.{kind.__qualname__}", keys, tuple(child for child, _ in flat), kind, order)
    return node, [leaf for _, leaves in flat for leaf in leaves]


def sorted_keys(node: Node) -> Node:
    """The structure with all dicts' keys sorted."""
    return dataclasses.replace(node, children=tuple(map(sorted_keys, node.children)), order=None)


def has_dict(node: Node) -> bool:
    """Whether the keys of a dict in it have an order."""
    return (node.type is dict and len(node.keys) > 1) or any(map(has_dict, node.children))


def is_rebuilt(item: Any) -> bool:
    """Whether `unflatten` gives back what `item` is: type, and order of keys."""
    kind, keys, values = children_of(item) or (type(item), (), [])
    if kind is dict and (type(item) is not dict or list(keys) != sorted(keys, key=_sort_key)):
        return False
    return all(map(is_rebuilt, values))


def collect(item: Any, node: Node, path: str, into: list[Any]) -> None:
    """Add the leaves of an item to a list; `path` is the way to it."""
    if node.type is None:
        into.append(item)
        return
    if node.type is dict and isinstance(item, dict):
        if len(item) != len(node.keys) or not all(key in item for key in node.keys):
            raise Misfit(f"item{path} has keys {list(item)}, and had {_in_order(node)}")
        for key, child in zip(node.keys, node.children, strict=True):
            collect(item[key], child, path + step_to(dict, key), into)
        return
    parts = children_of(item) if type(item) is node.type else None
    if parts is None:
        raise Misfit(f"item{path} is a {type(item).__name__}, and was a {node.type.__name__}")
    _, keys, values = parts
    if keys != node.keys:
        raise Misfit(f"item{path} has keys {list(keys)}, and had {list(node.keys)}")
    for key, value, child in zip(node.keys, values, node.children, strict=True):
        collect(value, child, path + step_to(node.type, key), into)


def _in_order(node: Node) -> list[Any]:
    return list(node.keys) if node.order is None else [node.keys[i] for i in node.order]


def leaf_paths(node: Node, path: str = "item") -> list[str]:
    """How a user would write each leaf: `item['image']`, `item.label`, `item[0]`."""
    if node.type is None:
        return [path]
    return [
        name
        for key, child in zip(node.keys, node.children, strict=True)
        for name in leaf_paths(child, path + step_to(node.type, key))
    ]


def types_of(node: Node) -> str:
    """How containers are nested: `dict(leaf, Pair(leaf, leaf))`."""
    if node.type is None:
        return "leaf"
    return f"{node.type.__name__}({', '.join(types_of(child) for child in node.children)})"


def unflatten(node: Node, leaves: Iterator[Any]) -> Any:
    """Put leaves, in the order that `flatten` gives them, back into the structure."""
    if node.type is None:
        return next(leaves)
    values = [unflatten(child, leaves) for child in node.children]
    if node.type is dict:
        if node.order is not None:
            return {node.keys[i]: values[i] for i in node.order}
        return dict(zip(node.keys, values, strict=True))
    if node.type is list:
        return values
    if node.type is type(None):
        return None
    if issubclass(node.type, tuple):
        return tuple.__new__(node.type, values)  # not its own __new__, which may take other arguments
    rebuilt = object.__new__(node.type)  # not __init__, which may check the shapes of one item
    for name, value in zip(node.keys, values, strict=True):
        object.__setattr__(rebuilt, name, value)
    return rebuilt


def describe(value: Any) -> str:
    """Shapes, as data would wait for a device: `{['image']: uint8 (4, 2, 3), ['name']: list [4][2]}`."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if type(value) is list:
        inner = f"[{len(value[0])}]" if value and type(value[0]) is list else ""
        return f"list [{len(value)}]{inner}"
    named = list(named_leaves(value))
    if named and named[0][0] == "":
        return type(value).__name__
    return "{" + ", ".join(f"{path}: {describe(leaf)}" for path, leaf in named) + "}"


def named_leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves with the ways to them, in the order of the value's keys; `path` is the way to the value."""
    parts = children_of(value)
    if parts is None:
        yield path, value
        return
    kind, keys, children = parts
    for key, child in zip(keys, children, strict=True):
        yield from named_leaves(child, path + step_to(kind, key))
