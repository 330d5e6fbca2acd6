"""What the leaves of a packed store's items are, as files say it.

Guarantee: all processes that pack into one folder write items of one structure, that of the first item which any of
them had; another item is an error that names the leaf.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from stream_dataloader._items.layout import DTYPES_OF_NUMPY, Layout, Spec, as_tensor, storage_dtype
from stream_dataloader._items.structure import Misfit, Node, flatten, leaf_paths, unflatten
from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.files import read_json, write_once
from stream_dataloader.stores._base.structure import classes_of, from_json, to_json

__all__ = [
    "LAYOUT",
    "Block",
    "ItemSpecs",
    "LeafSpec",
    "blocks_of",
    "check_names",
    "check_not_empty",
    "chosen",
    "dtype_named",
    "items_json",
    "leaf_names",
    "owned",
    "read_layout",
    "structure_of",
]

Leaf = TypeVar("Leaf")

#: Some time steps: an array `(steps, ...)` for each leaf.
Block = list[NDArray[Any]]

#: Where a store that is being packed says what items look like.
LAYOUT = "layout.json"


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


def items_json(structure: Any, leaves: Sequence[LeafSpec]) -> dict[str, Any]:
    """What a header says of items, which `structure_of` reads; `structure` is JSON."""
    return {"structure": None if not leaves else [structure], "leaves": leaves_json(leaves)}


def leaves_json(leaves: Sequence[LeafSpec]) -> list[dict[str, Any]]:
    return [{"dtype": str(leaf.dtype).removeprefix("torch."), "shape": list(leaf.shape)} for leaf in leaves]


def leaf_spec(found: Mapping[str, Any]) -> LeafSpec:
    return LeafSpec(dtype_named(found["dtype"]), tuple(map(int, found["shape"])))


def dtype_named(name: str) -> torch.dtype:
    """The dtype of a name such as `uint8`; a ValueError if there is none whose numbers can be kept in a file."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not (found in DTYPES_OF_NUMPY or found.itemsize in (1, 2, 4, 8)):
        raise ValueError(f"no dtype is called {name!r}")
    return found


def structure_of(
    content: Mapping[str, Any], path: str, classes: dict[str, type]
) -> tuple[Node | None, tuple[LeafSpec, ...]]:
    """What a header says of items: their structure, None if there is no item, and their leaves.

    What is no such header is a StoreError, KeyError, TypeError or ValueError.
    """
    leaves = tuple(map(leaf_spec, content["leaves"]))
    structure = content["structure"]
    node = None if structure is None else from_json(structure[0], path, classes)
    if len(leaf_names(node)) != len(leaves):
        raise ValueError(f"{len(leaves)} leaves of {len(leaf_names(node))}")
    return node, leaves


def leaf_names(structure: Node | None) -> list[str]:
    """What the leaves are called: `['image']`, or `item` if an item is one leaf."""
    return [] if structure is None else [path.removeprefix("item") or path for path in leaf_paths(structure)]


def check_names(wanted: Sequence[str] | None, structure: Node | None, path: str) -> None:
    """Refuse names of which items have no entry."""
    names = structure.keys if structure is not None and structure.type is dict else ()
    if missing := [name for name in wanted or () if name not in names]:
        has = f"it has {list(names)}" if names else "its items are no dicts"
        raise StoreError(f"{path} has no leaf {missing}; {has}")


def chosen(
    wanted: Sequence[str] | None, structure: Node | None, leaves: Sequence[Leaf]
) -> tuple[Node | None, Sequence[Leaf]]:
    """The structure of items that have the entries that `wanted` names, and their leaves."""
    if wanted is None or structure is None:
        return structure, leaves
    by_name = unflatten(structure, iter(range(len(leaves))))
    node, places = flatten({name: by_name[name] for name in wanted})
    return node, [leaves[place] for place in places]


def owned(row: Any, dtype: torch.dtype) -> Any:
    """A copy of a step's leaf, as a tensor where NumPy lacks the dtype."""
    copy = np.array(row, row.dtype.newbyteorder("="))
    return copy[()] if dtype in DTYPES_OF_NUMPY else as_tensor(copy, dtype)


def check_not_empty(layout: Layout, item: Any) -> None:
    """Refuse an item without leaves, such as an empty dict: no format has a place for it.

    Raises:
        TypeError: It has none.
    """
    if not layout.specs:
        raise TypeError(f"an item is {shorten(item)}, in which there is nothing to keep; yield numbers, by transform=")


class ItemSpecs:
    """What a store's items look like: as the first item that any process has, of which a file in the folder tells.

    Args:
        folder: Of the store that is packed.
        item: One that is to be written.
        kind: The store, for errors.

    Raises:
        TypeError: A leaf is an object such as a string, or a dict has a key that JSON cannot hold.
    """

    def __init__(self, folder: str, item: Any, kind: str) -> None:
        layout, _ = Layout.of(item, windowed=False)
        check_not_empty(layout, item)
        objects = [path for path, spec in zip(layout.paths, layout.specs, strict=True) if spec.dtype is None]
        if objects:
            raise TypeError(
                f"{', '.join(objects)}: {kind} holds numbers, and this is an object such as a string; "
                "leave it out or turn it into numbers, with transform="
            )
        _write_layout(folder, layout)
        found = read_layout(folder)
        assert found is not None
        structure, self.leaves = found
        node = from_json(structure, os.path.join(folder, LAYOUT), classes_of(layout.structure))
        self._layout = Layout(node, tuple(Spec(spec.dtype, spec.shape) for spec in self.leaves), windowed=False)

    @property
    def names(self) -> list[str]:
        """See `leaf_names`."""
        return leaf_names(self._layout.structure)

    def build(self, leaves: Sequence[Any]) -> Any:
        """An item's structure over arrays `(n, ...)`, one a leaf; over tensors where NumPy lacks the dtype."""
        return self._layout.build(
            leaf if spec.dtype in DTYPES_OF_NUMPY else as_tensor(leaf, spec.dtype)
            for leaf, spec in zip(leaves, self.leaves, strict=True)
        )

    def read(self, item: Any, step: int) -> Sequence[Any]:
        """An item's leaves, as arrays.

        Raises:
            ValueError: It is another kind of item; names the step.
        """
        try:
            return self._layout.read(item)
        except Misfit as error:
            raise ValueError(f"step {step}: {error}, as all steps of a store must be alike") from error


def blocks_of(
    items: Iterable[Any], adopt: Callable[[Any], ItemSpecs], room: Callable[[ItemSpecs], Block]
) -> Iterator[tuple[Block, int]]:
    """A stream's steps in blocks, of which all but the last are full, and how many steps each has.

    Args:
        items: See `packing.PartPacker`.
        adopt: Says of the first item what all have to look like.
        room: A block to write to; the same one until it was yielded.
    """
    specs: ItemSpecs | None = None
    count = 0
    reader: Any = items
    for step, item in enumerate(items):
        specs = specs or adopt(item)
        block = room(specs)
        for rows, leaf in zip(block, specs.read(item, step), strict=True):
            rows[count] = leaf
        count += 1
        if count == len(block[0]):
            yield block, count
            count = 0
        if not step and getattr(items, "reads_into", False):
            while more := reader.read_into(specs.build(left := [rows[count:] for rows in room(specs)]), len(left[0])):
                count += more
                if more == len(left[0]):
                    yield room(specs), count
                    count = 0
            break
    if specs is not None and count:
        yield room(specs), count


def _write_layout(folder: str, layout: Layout) -> None:
    """Say what items look like, unless another process has."""
    specs = [LeafSpec(spec.dtype, spec.shape) for spec in layout.specs if spec.dtype is not None]
    content = {"structure": to_json(layout.structure), "leaves": leaves_json(specs)}
    write_once(os.path.join(folder, LAYOUT), content)


def read_layout(folder: str) -> tuple[Any, tuple[LeafSpec, ...]] | None:
    """An item's structure, as JSON, and its leaves; None if there was no item."""
    if not os.path.exists(path := os.path.join(folder, LAYOUT)):
        return None
    found = read_json(path, dict)
    return found["structure"], tuple(leaf_spec(leaf) for leaf in found["leaves"])
