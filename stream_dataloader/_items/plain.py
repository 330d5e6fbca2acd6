"""Structures and layouts as plain data, for saved states.

Guarantee: what is read back equals what was written, or there is an error; nothing is imported for it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import torch

from stream_dataloader._items.layout import Layout, Spec
from stream_dataloader._items.structure import LEAF, Node
from stream_dataloader.errors import StateError

_BUILTIN: dict[str, type] = {"tuple": tuple, "list": list, "dict": dict, "None": type(None)}


def to_plain(node: Node) -> dict[str, Any] | None:
    """The structure as plain data; None for a tensor."""
    if node.type is None:
        return None
    name = next((name for name, kind in _BUILTIN.items() if kind is node.type), None)
    if name is None:
        name = f"{node.type.__module__}:{node.type.__qualname__}"
        if _found(name) is not node.type:
            what = f"the state holds a {node.type.__qualname__}, which cannot be found again as {name}"
            raise StateError(f"{what}; define the class at the top level of a module")
    return {
        "type": name,
        "keys": list(node.keys),
        "children": [to_plain(child) for child in node.children],
        "order": None if node.order is None else list(node.order),
    }


def from_plain(plain: Mapping[str, Any] | None) -> Node:
    """The structure that `to_plain` made plain data of."""
    if plain is None:
        return LEAF
    kind = _BUILTIN.get(plain["type"]) or _found(plain["type"])
    if kind is None:
        raise StateError(f"the state holds a {plain['type']}, which is not imported; import its module first")
    children = tuple(map(from_plain, plain["children"]))
    order = None if plain["order"] is None else tuple(plain["order"])
    return Node(f"{kind.__module__}.{kind.__qualname__}", tuple(plain["keys"]), children, kind, order)


def _found(name: str) -> type | None:
    """A class of a module that is imported already: a saved state imports nothing."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    is_container = isinstance(found, type) and (dataclasses.is_dataclass(found) or hasattr(found, "_fields"))
    return found if is_container else None


def _has_plain_keys(node: Node) -> bool:
    return all(isinstance(key, (str, int)) for key in node.keys) and all(map(_has_plain_keys, node.children))


def layout_to_plain(layout: Layout) -> dict[str, Any] | None:
    """A layout as plain data that json can hold; None where it cannot be found again."""
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


def layout_from_plain(plain: Mapping[str, Any] | None) -> Layout | None:
    """The layout of which this is the plain data; None if a type in it is not there."""
    if plain is None:
        return None
    try:
        structure = from_plain(plain["structure"])
    except StateError:
        return None
    specs = (Spec(dtype and getattr(torch, dtype), tuple(shape), timed) for dtype, shape, timed in plain["specs"])
    return Layout(structure, tuple(specs), plain["windowed"])
