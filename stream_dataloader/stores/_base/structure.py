"""An item's structure as JSON: nested dicts, tuples, named tuples and dataclasses.

Guarantee: what is read back equals what was written; no module is imported because a file says so.
"""

from __future__ import annotations

import sys
from typing import Any

from stream_dataloader._items.structure import LEAF, Node, dataclass_fields
from stream_dataloader.errors import StoreError

__all__ = ["classes_of", "from_json", "to_json"]

_KEYS = (str, int, bool, float, type(None))


def to_json(node: Node) -> Any:
    """The structure: null is a leaf. A TypeError names a key that JSON cannot hold."""
    if node.type is None:
        return None
    children = [to_json(child) for child in node.children]
    if node.type is tuple:
        return {"tuple": children}
    wrong = next((key for key in node.keys if type(key) not in _KEYS), None)
    if wrong is not None:
        raise TypeError(f"an item's dict has the key {wrong!r}; a store keeps strings and numbers")
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
    """The structure that `to_json` wrote; other classes than `classes` have to be imported."""
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
    fields: Any = getattr(found_class, "_fields", None) or dataclass_fields(found_class) or ()
    if fields != keys:
        raise StoreError(f"{name}: items are made of {full} with {list(keys)}, and it has {list(fields)}")
    return Node(full, keys, children, found_class)


def _imported(module: str, name: str) -> type | None:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None
