"""The structure of items: nested containers with leaves, taken apart and built again.

Leaves are ordered by sorted key. The order of keys in the first item is remembered for `unflatten`.

Guarantee: `collect` returns exactly the leaves that `unflatten` needs, or raises `Misfit`, which names both sides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch

#: The remedy for streams that do not fit beside each other.
ALIKE = 'make all streams alike, or let open_stream raise for those that differ, and skip them with on_error="skip"'

#: The remedy for items of one stream that do not fit.
ITEMS_ALIKE = "all items of a stream must share structure, dtypes and shapes; convert, resize or pad them in the stream"


#: The deepest nesting of an item's containers.
MOST_NESTED = 64


class Misfit(Exception):
    """An item does not fit; the text names the leaf, its value and the expected one."""


class StreamMisfit(Misfit):
    """A stream does not fit beside another one; either of them may be the odd one."""


def _name_of(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


@dataclasses.dataclass(frozen=True)
class Node:
    """One level of an item's structure.

    Types are compared by name, because a type that is defined in a function is a different object in each process, and
    after each call: the named tuples of pandas' `itertuples` are of another type in each stream.

    Attributes:
        name: The type's full name.
        keys: Names of the children; those of a dict are sorted.
        children: The children.
        type: The type to rebuild; None: a leaf.
        order: The order of a dict's keys in the first item, if it was not sorted.
    """

    name: str = ""
    keys: tuple[Any, ...] = ()
    children: tuple[Node, ...] = ()
    type: type | None = dataclasses.field(default=None, compare=False)
    order: tuple[int, ...] | None = dataclasses.field(default=None, compare=False)

    def is_of(self, kind: Any) -> bool:
        """Return whether items of a type have this level."""
        return kind is self.type or _name_of(kind) == self.name


LEAF = Node()


#: The type to rebuild a container as, its keys and its children.
Parts = tuple[type, tuple[Any, ...], list[Any]]


def children_of(item: Any) -> Parts | None:
    """Return the parts of a container; None for a leaf."""
    kind: Any = type(item)
    if isinstance(item, dict):  # a subclass becomes a plain dict, as its constructor may take other arguments
        return dict, tuple(item), [item[key] for key in item]
    if kind is tuple:
        return kind, tuple(range(len(item))), list(item)
    if isinstance(item, tuple) and hasattr(kind, "_fields"):
        return kind, tuple(kind._fields), list(item)
    if not hasattr(kind, "__dataclass_fields__"):  # returns early, as torch.compile cannot trace the call below
        return None
    names = dataclass_fields(kind)
    return None if names is None else (kind, names, [getattr(item, name) for name in names])


@lru_cache(maxsize=64)
def dataclass_fields(kind: Any) -> tuple[str, ...] | None:
    """Return the fields of a dataclass that can be rebuilt from them; None for any other type."""
    names = tuple(field.name for field in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else None
    try:
        object.__new__(kind)  # as `unflatten` does
    except TypeError:  # the class also derives from another builtin, such as list, or is abstract
        return None
    return names


def _sort_key(key: Any) -> tuple[str, str]:
    """Return a sort key for dict keys of any types, which need not be comparable; 1 and "1" differ by type name."""
    return str(key), type(key).__qualname__


def step_to(kind: type, key: Any) -> str:
    """Return the Python expression for a child of a container: `.label`, `['image']`, `[0]`."""
    return f".{key}" if kind is not dict and isinstance(key, str) else f"[{key!r}]"


def flatten(
    item: Any, children_of: Callable[[Any], Parts | None] = children_of, depth: int = 0
) -> tuple[Node, list[Any]]:
    """Return the structure of `item` and its leaves, unchanged; `children_of` decides what a container is.

    Raises:
        Misfit: It is nested too deeply.
    """
    parts = children_of(item)
    if parts is None:
        return LEAF, [item]
    if depth == MOST_NESTED:  # a RecursionError would end the epoch, while this error concerns the stream only
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
    node = Node(_name_of(kind), keys, tuple(child for child, _ in flat), kind, order)
    return node, [leaf for _, leaves in flat for leaf in leaves]


def sorted_keys(node: Node) -> Node:
    """Return the structure with all dicts' keys sorted."""
    return dataclasses.replace(node, children=tuple(map(sorted_keys, node.children)), order=None)


def has_dict(node: Node) -> bool:
    """Return whether it has a dict with several keys, whose order may differ between equal structures."""
    return (node.type is dict and len(node.keys) > 1) or any(map(has_dict, node.children))


def is_rebuilt(item: Any) -> bool:
    """Return whether `unflatten` gives back the exact type of `item`, and its order of keys."""
    kind, keys, values = children_of(item) or (type(item), (), [])
    if kind is dict and (type(item) is not dict or list(keys) != sorted(keys, key=_sort_key)):
        return False
    return all(map(is_rebuilt, values))


def collect(item: Any, node: Node, path: str, into: list[Any]) -> None:
    """Add the leaves of an item to a list; `path` is the item's own path."""
    if node.type is None:
        into.append(item)
        return
    if node.type is dict and isinstance(item, dict):
        if len(item) != len(node.keys) or not all(key in item for key in node.keys):
            raise Misfit(f"item{path} has keys {list(item)}, and had {_in_order(node)}")
        for key, child in zip(node.keys, node.children, strict=True):
            collect(item[key], child, path + step_to(dict, key), into)
        return
    parts = children_of(item) if node.is_of(type(item)) else None
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
    """Return the Python expression for each leaf: `item['image']`, `item.label`, `item[0]`."""
    if node.type is None:
        return [path]
    return [
        name
        for key, child in zip(node.keys, node.children, strict=True)
        for name in leaf_paths(child, path + step_to(node.type, key))
    ]


def types_of(node: Node) -> str:
    """Describe the nesting of containers: `dict(leaf, Pair(leaf, leaf))`."""
    if node.type is None:
        return "leaf"
    return f"{node.type.__name__}({', '.join(types_of(child) for child in node.children)})"


def unflatten(node: Node, leaves: Iterator[Any]) -> Any:
    """Put leaves, in the order of `flatten`, back into the structure."""
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
        return tuple.__new__(node.type, values)  # its own __new__ may take other arguments
    rebuilt = object.__new__(node.type)  # its __init__ may check the shapes of a single item
    for name, value in zip(node.keys, values, strict=True):
        object.__setattr__(rebuilt, name, value)
    return rebuilt


def describe(value: Any) -> str:
    """Describe dtypes and shapes, without reading data: `{['image']: uint8 (4, 2, 3), ['name']: list [4][2]}`.

    Reading data on a device would wait for the device.
    """
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
    """Yield leaves with their paths, in the order of the value's keys; `path` is the value's own path."""
    parts = children_of(value)
    if parts is None:
        yield path, value
        return
    kind, keys, children = parts
    for key, child in zip(keys, children, strict=True):
        yield from named_leaves(child, path + step_to(kind, key))
