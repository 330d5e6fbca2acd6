"""What the leaves of a packed store's items are, as files say it."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stream_dataloader._items.layout import DTYPES_OF_NUMPY, Spec, as_tensor, storage_dtype
from stream_dataloader._items.structure import Node, flatten, leaf_paths, unflatten
from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.structure import from_json

__all__ = [
    "Block",
    "LeafSpec",
    "chosen",
    "dtype_named",
    "leaf_names",
    "leaf_spec",
    "leaves_json",
    "owned",
    "structure_of",
]

#: Some time steps: an array `(steps, ...)` for each leaf.
Block = list[NDArray[Any]]


@dataclass(frozen=True)
class LeafSpec:
    """One leaf of an item, of one time step."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @functools.cached_property
    def stored(self) -> np.dtype[Any]:
        """What its numbers are in the file; unsigned integers where NumPy lacks the dtype."""
        found: np.dtype[Any] = storage_dtype(self.dtype).newbyteorder("<")
        return found

    @functools.cached_property
    def step_bytes(self) -> int:
        return math.prod(self.shape) * self.stored.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"


def leaves_json(leaves: Iterable[LeafSpec | Spec]) -> list[dict[str, Any]]:
    return [{"dtype": str(leaf.dtype).removeprefix("torch."), "shape": list(leaf.shape)} for leaf in leaves]


def leaf_spec(found: Mapping[str, Any]) -> LeafSpec:
    return LeafSpec(dtype_named(found["dtype"]), tuple(map(int, found["shape"])))


def dtype_named(name: str) -> torch.dtype:
    """The dtype of a name such as `uint8`; a ValueError if no file can hold its numbers."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not (found in DTYPES_OF_NUMPY or found.itemsize in (1, 2, 4, 8)):
        raise ValueError(f"no dtype is called {name!r}")
    return found


def structure_of(
    content: Mapping[str, Any], path: str, classes: dict[str, type]
) -> tuple[Node | None, tuple[LeafSpec, ...]]:
    """What a header says of items: their structure, None if there is no item, and their leaves."""
    leaves = tuple(map(leaf_spec, content["leaves"]))
    structure = content["structure"]
    node = None if structure is None else from_json(structure[0], path, classes)
    if len(leaf_names(node)) != len(leaves):
        raise ValueError(f"{len(leaves)} leaves of {len(leaf_names(node))}")
    return node, leaves


def leaf_names(structure: Node | None) -> list[str]:
    """What the leaves are called: `['image']`, or `item` if an item is one leaf."""
    return [] if structure is None else [path.removeprefix("item") or path for path in leaf_paths(structure)]


def chosen(wanted: Sequence[str] | None, structure: Node | None, path: str) -> tuple[Node | None, Sequence[int]]:
    """The structure of items that have the entries `wanted`, such as `"obs/image"`, and which leaves these are."""
    leaves = range(len(leaf_names(structure)))
    if wanted is None:
        return structure, leaves
    whole = None if structure is None else unflatten(structure, iter(leaves))
    found: dict[str, Any] = {}
    for name in wanted:
        *above, last = [name] if isinstance(whole, dict) and name in whole else name.split("/")
        entry, level = whole, found
        for key in above:
            entry = entry.get(key) if isinstance(entry, dict) else None
            level = level.setdefault(key, {})
        if not isinstance(entry, dict) or last not in entry:
            has = f"it has {list(whole)}" if isinstance(whole, dict) else "its items are no dicts"
            raise StoreError(f"{path} has no leaf {name!r}; {has}")
        level[last] = entry[last]
    return flatten(found)


def owned(row: Any, dtype: torch.dtype) -> Any:
    """A copy of a step's leaf, as a tensor where NumPy lacks the dtype."""
    copy = np.array(row, row.dtype.newbyteorder("="))
    return copy[()] if dtype in DTYPES_OF_NUMPY else as_tensor(copy, dtype)
