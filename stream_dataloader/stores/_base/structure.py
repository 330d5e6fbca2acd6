"""An item's structure as JSON: nested dicts, tuples, named tuples and dataclasses, with leaves counted from 0.

Guarantee: what is read back equals what was written, or is an error; no module is imported because a file says so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from stream_dataloader._items.structure import LEAF, Node, children_of
from stream_dataloader.errors import StoreError

__all__ = ["classes_of", "from_json", "to_json"]

_KEYS = (str, int, bool, float, type(None))


def to_json(node: Node) -> Any:
    """The structure: null is a leaf.

    Raises:
        TypeError: A key that JSON cannot hold.
    """
    if node.type is None:
        return None
    children = [to_json(child) for child in node.children]
    if node.type is tuple:
        return {"tuple": children}
    wrong = next((key for key in node.keys if type(key) not in _KEYS), None)
    if wrong is not None:
        raise TypeError(f"an item's dict has the key {wrong!r}; a store keeps strings and numbers, so rename it")
    named = {"keys": list(node.keys), "children": children}
    if node.type is dict:
        return {"dict": named | {"order": node.order}}
    return {"class": named | {"module": node.type.__module__, "name": node.type.__qualname__}}


def classes_of(node: Node) -> dict[str, type]:
    """Named tuples and dataclasses in a structure, by name."""
    if node.type is None:
        return {}
    found = {} if node.type in (dict, tuple) else {f"{node.type.__module__}.{node.type.__qualname__}": node.type}
    for child in node.children:
        found |= classes_of(child)
    return found


def from_json(found: Any, name: str, classes: dict[str, type]) -> Node:
    """The structure that `to_json` wrote.

    Args:
        found: What it wrote.
        name: The file, for errors.
        classes: Classes that are known already; others have to be in modules that are imported.

    Raises:
        StoreError: It is no structure, or a class is missing.
    """
    try:
        return _node(found, name, classes)
    except (KeyError, TypeError, AttributeError, RecursionError, IndexError) as error:
        raise StoreError(f"{name} tells no structure of items ({error!r}); the store is damaged") from None


def _node(found: Any, name: str, classes: dict[str, type]) -> Node:
    if found is None:
        return LEAF
    ((kind, inside),) = found.items()
    children = tuple(_node(child, name, classes) for child in (inside if kind == "tuple" else inside["children"]))
    keys = tuple(range(len(children)) if kind == "tuple" else inside["keys"])
    if kind not in ("tuple", "dict", "class") or len(keys) != len(children):
        raise KeyError(kind)
    if kind == "tuple":
        return Node("builtins.tuple", keys, children, tuple)
    if kind == "dict":
        order = inside["order"]
        if order is not None and sorted(order) != list(range(len(keys))):
            raise KeyError("order")
        return Node("builtins.dict", keys, children, dict, None if order is None else tuple(order))
    full = f"{inside['module']}.{inside['name']}"
    found_class = classes.get(full) or _imported(inside["module"], inside["name"])
    if found_class is None:
        raise StoreError(f"{name}: items are made of {full}, which is not imported; import it before opening the store")
    if tuple(_fields(found_class)) != keys:
        raise StoreError(f"{name}: items are made of {full} with {list(keys)}, and it has {list(_fields(found_class))}")
    return Node(full, keys, children, found_class)


def _imported(module: str, name: str) -> type | None:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None


def _fields(kind: Any) -> Iterator[str]:
    """The names of what a named tuple or dataclass is made of; none of any other class."""
    if issubclass(kind, tuple):
        yield from getattr(kind, "_fields", ())
        return
    bare = object.__new__(kind)
    for name in getattr(kind, "__dataclass_fields__", ()):
        object.__setattr__(bare, name, None)
    yield from (children_of(bare) or (kind, (), []))[1]
