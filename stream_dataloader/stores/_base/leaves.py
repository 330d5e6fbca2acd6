"""Layout of the items of a packed store, and its description in files.

Structures are nested dicts, tuples, named tuples and dataclasses.

Guarantee: a layout that is read equals the one that was written. No file can cause the import of a module.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stream_dataloader._engine.items.layout import DTYPES_OF_NUMPY, Spec, as_tensor, storage_dtype
from stream_dataloader._engine.items.structure import LEAF, Node, dataclass_fields, flatten, leaf_paths, unflatten
from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.files import damage_named

__all__ = [
    "Block",
    "LeafSpec",
    "chosen",
    "classes_of",
    "dtype_named",
    "entries_of",
    "from_json",
    "leaf_names",
    "leaf_spec",
    "leaves_json",
    "owned",
    "structure_of",
    "to_json",
]

_KEYS = (str, int, bool, float, type(None))

#: Several time steps: an array `(steps, ...)` for each leaf.
Block = list[NDArray[Any]]


@dataclass(frozen=True)
class LeafSpec:
    """Dtype and shape of one leaf of an item."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @functools.cached_property
    def stored(self) -> np.dtype[Any]:
        """Dtype in the file; an unsigned integer where NumPy lacks the dtype."""
        found: np.dtype[Any] = storage_dtype(self.dtype).newbyteorder("<")
        return found

    @functools.cached_property
    def step_bytes(self) -> int:
        return math.prod(self.shape) * self.stored.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"


def leaves_json(leaves: Iterable[LeafSpec | Spec]) -> list[dict[str, Any]]:
    """Return a description of the leaves for JSON, which `leaf_spec` reads."""
    return [{"dtype": str(leaf.dtype).removeprefix("torch."), "shape": list(leaf.shape)} for leaf in leaves]


def leaf_spec(found: Mapping[str, Any]) -> LeafSpec:
    """Read a leaf that `leaves_json` wrote; raise a ValueError if it has no dtype."""
    return LeafSpec(dtype_named(found["dtype"]), tuple(map(int, found["shape"])))


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype with a name such as `uint8`."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not (found in DTYPES_OF_NUMPY or found.itemsize in (1, 2, 4, 8)):
        raise ValueError(f"no dtype is called {name!r}")
    return found


def structure_of(
    content: Mapping[str, Any], path: str, classes: dict[str, type]
) -> tuple[Node | None, tuple[LeafSpec, ...]]:
    """Read the structure and the leaves of items from a header; the structure is None if there is no item."""
    leaves = tuple(map(leaf_spec, content["leaves"]))
    structure = content["structure"]
    node = None if structure is None else from_json(structure[0], path, classes)
    if len(leaf_names(node)) != len(leaves):
        raise ValueError(f"{len(leaves)} leaves of {len(leaf_names(node))}")
    return node, leaves


def leaf_names(structure: Node | None) -> list[str]:
    """Return the names of leaves: `['image']`, or `item` if an item is one leaf."""
    return [] if structure is None else [path.removeprefix("item") or path for path in leaf_paths(structure)]


def chosen(wanted: Sequence[str] | None, structure: Node | None, path: str) -> tuple[Node | None, Sequence[int]]:
    """Return the structure of items with only the entries `wanted`, and the indices of their leaves."""
    leaves = range(len(leaf_names(structure)))
    if wanted is None:
        return structure, leaves
    return flatten(entries_of(None if structure is None else unflatten(structure, iter(leaves)), wanted, path))


def entries_of(item: Any, wanted: Sequence[str], path: str, there: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the `wanted` entries of nested dicts, such as `"obs/image"`."""
    found: dict[str, Any] = {}
    for name in wanted:
        *above, last = [name] if isinstance(item, dict) and name in item else name.strip("/").split("/")
        entry, level = item, found
        for key in above:
            entry = entry.get(key) if isinstance(entry, dict) else None
            level = level.setdefault(key, {})
        if not isinstance(entry, dict) or last not in entry:
            has = f"it has {shorten(list(there or item), 300)}" if isinstance(item, dict) else "its items are no dicts"
            raise StoreError(f"{path} has no leaf {name!r}; {has}")
        level[last] = entry[last]
    return found


def owned(row: Any, dtype: torch.dtype) -> Any:
    """Return a copy of a step's leaf, as a tensor where NumPy lacks the dtype."""
    copy = np.array(row, row.dtype.newbyteorder("="))
    return copy[()] if dtype in DTYPES_OF_NUMPY else as_tensor(copy, dtype)


def to_json(node: Node) -> Any:
    """Convert a structure for JSON, with null for a leaf."""
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
    """Return the named tuples and dataclasses in a structure, by name."""
    if node.type is None:
        return {}
    found = {} if node.type in (dict, tuple) else {f"{node.type.__module__}.{node.type.__qualname__}": node.type}
    for child in node.children:
        found |= classes_of(child)
    return found


def from_json(found: Any, name: str, classes: dict[str, type]) -> Node:
    """Read a structure that `to_json` wrote; `classes` are the known classes by name."""
    with damage_named(name):
        return _node(found, name, classes)


def _node(found: Any, name: str, classes: dict[str, type]) -> Node:
    if found is None:
        return LEAF
    ((kind, inside),) = found.items()
    below = inside if kind == "tuple" else inside["children"]
    children = tuple(_node(child, name, classes) for child in below)
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
        raise StoreError(f"{name}: items are made of {full}; import that before opening the store")
    fields: Any = getattr(found_class, "_fields", None) or dataclass_fields(found_class) or ()
    if fields != keys:
        raise StoreError(f"{name}: items are made of {full} with {list(keys)}, and it has {list(fields)}")
    return Node(full, keys, children, found_class)


def _imported(module: str, name: str) -> type | None:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None
