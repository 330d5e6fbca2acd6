"""`fill_value`: the padding of each leaf, given as a number or array for all leaves, or as a structure of these.

Guarantee: a fill value either pads a leaf with exactly this value, or raises an error that names it and the leaf.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from stream_dataloader._engine.items.layout import Layout, Spec, as_array, storage_dtype
from stream_dataloader._engine.items.structure import Node, children_of, step_to
from stream_dataloader.errors import shorten

#: For each leaf an array of its `storage_dtype` that broadcasts to the leaf's shape; None for objects.
Fills = Sequence["np.ndarray[Any, Any] | None"]


def check_fill(fill_value: Any) -> None:
    """Refuse a fill value if a value in it is neither a number nor an array."""
    for path, value in _given(fill_value, "fill_value"):
        _tensor(path, value)


def _given(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    parts = children_of(value)
    if parts is None or (parts[0] is tuple and _is_array(value)):
        yield path, value
        return
    kind, keys, children = parts
    for key, child in zip(keys, children, strict=True):
        yield from _given(child, path + step_to(kind, key))


def _is_array(value: Any) -> bool:
    return bool(value) and all(isinstance(element, (int, float, complex)) for element in value)


def _tensor(path: str, value: Any) -> torch.Tensor:
    try:
        if isinstance(value, torch.Tensor):
            return value
        if not hasattr(value, "dtype"):  # torch would give a plain float the program's default dtype, not float64
            value = np.asarray(0 if value is None else value)
        return torch.as_tensor(value, device="cpu")
    except Exception as error:
        what = f"{path} is {shorten(value)}, a {type(value).__name__}"
        raise ValueError(f"{what}; pass a number, an array, or a dict of them") from error


class FillValue:
    """The user's fill value, converted for each layout."""

    def __init__(self, fill_value: Any) -> None:
        self._value = fill_value
        # Keyed by the id of a layout, because a layout's hash is computed anew each time. The entry keeps the layout.
        self._fills: dict[int, tuple[Layout, Fills]] = {}

    def of(self, layout: Layout) -> Fills:
        """Return the padding of each leaf; raise a `ValueError` if the fill value does not fit."""
        known = self._fills.get(id(layout))
        if known is None:
            values = _spread(self._value, layout.structure, "fill_value", "item")
            fills = [
                self._for_leaf(name, value, named, spec, path)
                for (name, value, named), spec, path in zip(values, layout.specs, layout.paths, strict=True)
            ]
            known = self._fills[id(layout)] = layout, fills
        return known[1]

    @staticmethod
    def _for_leaf(name: str, value: Any, named: bool, spec: Spec, path: str) -> np.ndarray[Any, Any] | None:
        if spec.dtype is None:
            if named and value is not None:
                raise ValueError(
                    f"{name} is {shorten(value)}, and {path} is {spec}, which is padded with None; leave it out"
                )
            return None
        # The default avoids torch, whose first calls take a worker a millisecond.
        if value is None or (type(value) is int and value == 0):
            return np.zeros((), storage_dtype(spec.dtype))
        given = _tensor(name, value)
        cast = _cast(given, spec.dtype)
        if cast is None:
            own = "use one that does" if named else "use one that does, or a dict with one for each leaf"
            raise ValueError(f"{name}={shorten(value)} does not fit {path}, which is {spec}; {own}")
        try:
            torch.broadcast_to(cast, spec.shape)
        except RuntimeError:
            shape = tuple(given.shape)
            raise ValueError(f"{name} of shape {shape} does not broadcast to {path}, which is {spec}") from None
        array: np.ndarray[Any, Any] = as_array(cast)
        return array


def _cast(given: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Cast a fill value to a leaf's dtype; return None if the dtype cannot hold it. Fractions are rounded."""
    if given.is_complex() and not dtype.is_complex:
        return None
    value = given.to(dtype)
    if dtype.is_complex or given.is_complex():
        return value
    if dtype.is_floating_point:  # a number that becomes infinite does not fit; nan and infinity themselves do
        wide = value.to(torch.float64)
        same = torch.isnan(wide) == torch.isnan(given.to(torch.float64))
        finite = torch.isinf(wide) == torch.isinf(given.to(torch.float64))
        return value if bool((same & finite).all()) else None
    return value if torch.equal(value.to(given.dtype), given) else None


def _spread(value: Any, node: Node, name: str, path: str, *, named: bool = False) -> Iterator[tuple[str, Any, bool]]:
    """Yield for each leaf of a structure the name of its fill value, the value, and whether a key named it."""
    if node.type is None:
        if isinstance(value, dict) or dataclasses.is_dataclass(value):
            raise ValueError(f"{name} is {shorten(value)}, and {path} has no keys; pass a number or an array")
        yield name, value, named
        return
    parts = children_of(value)
    # A tuple may be numbers for one array, or fill values for an item that is a tuple.
    for_tuple = parts is not None and issubclass(parts[0], tuple)
    if parts is None or (for_tuple and not issubclass(node.type, tuple)):  # one value for all leaves below
        for key, child in zip(node.keys, node.children, strict=True):
            yield from _spread(value, child, name, path + step_to(node.type, key), named=named)
        return
    _, keys, children = parts
    given = dict(zip(node.keys if for_tuple and len(keys) == len(node.keys) else keys, children, strict=True))
    if unknown := [key for key in given if key not in node.keys]:
        raise ValueError(f"{name} has the keys {unknown}, and {path} only has {list(node.keys)}; use keys of these")
    for key, child in zip(node.keys, node.children, strict=True):
        below = f"{name}[{key!r}]"
        yield from _spread(given.get(key), child, below, path + step_to(node.type, key), named=key in given)
