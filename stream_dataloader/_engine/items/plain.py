"""Structures and layouts as plain data, for saved states and for other ranks.

Guarantee: reading gives the same structure that was written, or raises a StateError, and imports nothing.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import torch

from stream_dataloader._engine.items.layout import Layout, Spec
from stream_dataloader._engine.items.structure import LEAF, Node, dataclass_fields
from stream_dataloader.errors import StateError, shorten

_BUILTIN: dict[str, type] = {"tuple": tuple, "list": list, "dict": dict, "None": type(None)}


def to_plain(node: Node) -> dict[str, Any] | None:
    """Return the structure as plain data; None for a leaf."""
    if node.type is None:
        return None
    name = next((name for name, kind in _BUILTIN.items() if kind is node.type), None)
    if name is None:
        name = f"{node.type.__module__}:{node.type.__qualname__}"
        if _found(name) is not node.type:
            what = f"the state holds a {node.type.__qualname__}, which cannot be found by the name {name}"
            raise StateError(f"{what}; define the class at the top level of a module")
    return {
        "type": name,
        "keys": list(node.keys),
        "children": [to_plain(child) for child in node.children],
        "order": None if node.order is None else list(node.order),
    }


def from_plain(plain: Mapping[str, Any] | None) -> Node:
    """Return the structure from the plain data that `to_plain` made."""
    if plain is None:
        return LEAF
    name, keys, order = plain["type"], tuple(plain["keys"]), plain["order"]
    kind = _BUILTIN.get(name) or _found(name)
    if kind is None:
        raise StateError(f"the state holds a {name}, which is not imported; import its module first")
    children = tuple(map(from_plain, plain["children"]))
    if len(keys) != len(children) or (order is not None and sorted(order) != list(range(len(keys)))):
        raise StateError(f"the state holds a {name} with {len(keys)} keys, {len(children)} values and order {order}")
    if name not in _BUILTIN and keys != _fields_of(kind):
        raise StateError(f"the state holds a {name} with {list(keys)}, and the class has {list(_fields_of(kind))}")
    return Node(f"{kind.__module__}.{kind.__qualname__}", keys, children, kind, None if order is None else tuple(order))


def _found(name: str) -> type | None:
    """Find a class in a module that is already imported, as a saved state must not import anything."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        # `getattr` is not safe here: a module's own `__getattr__` may import other modules.
        found = getattr(found, "__dict__", {}).get(part)
    is_container = isinstance(found, type) and (dataclasses.is_dataclass(found) or hasattr(found, "_fields"))
    return found if is_container else None


def _fields_of(kind: Any) -> tuple[str, ...]:
    return tuple(getattr(kind, "_fields", None) or dataclass_fields(kind) or ())


def _has_plain_keys(node: Node) -> bool:
    return all(key is None or isinstance(key, (str, int, float)) for key in node.keys) and all(
        map(_has_plain_keys, node.children)
    )


def layout_to_plain(layout: Layout) -> dict[str, Any] | None:
    """Return a layout as plain data for JSON; None if its classes or keys could not be read back."""
    if not _has_plain_keys(layout.structure):
        return None
    try:
        structure = to_plain(layout.structure)
    except StateError:
        return None
    specs = [
        [spec.dtype and str(spec.dtype).removeprefix("torch."), list(spec.shape), spec.timed] for spec in layout.specs
    ]
    return {"structure": structure, "specs": specs, "windowed": layout.windowed}


def layout_from_plain(plain: Mapping[str, Any]) -> Layout:
    """Return the layout from plain data.

    Raises:
        StateError: The data describes no layout, or a type in it is not imported.
    """
    try:
        structure, specs = from_plain(plain["structure"]), [_spec(*spec) for spec in plain["specs"]]
        layout = Layout(structure, tuple(specs), bool(plain["windowed"]))
        if len(layout.paths) != len(specs):
            raise ValueError(f"{len(layout.paths)} leaves, and {len(specs)} descriptions of leaves")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if isinstance(error, StateError):
            raise
        raise StateError(f"the state's description of items cannot be read: {error!r}") from error
    return layout


def _spec(dtype: str | None, shape: list[int], timed: bool) -> Spec:
    found = None if dtype is None else getattr(torch, dtype, None)
    if (dtype is not None and not isinstance(found, torch.dtype)) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"no leaf is a {shorten(dtype)} {shorten(shape)}")
    return Spec(found, tuple(shape), bool(timed))
