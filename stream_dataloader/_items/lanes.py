"""Some lanes of a batch: which, and how they are taken out of its fields.

Guarantee: what is taken out is a view, not a copy.
"""

from __future__ import annotations

from typing import Any

import torch

from stream_dataloader._items.structure import flatten, unflatten


def split_evenly(lanes: int, count: int) -> list[slice]:
    """`count` runs of lanes whose lengths differ by one at most, the longer ones first.

    Raises:
        TypeError: `count` is no integer.
        ValueError: There are not that many lanes.
    """
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"the number of micro-batches must be an integer, and is {count!r}, a {type(count).__name__}")
    if not 1 <= count <= lanes:
        raise ValueError(f"a batch of {lanes} lanes can be split into 1 to {lanes} micro-batches, not into {count}")
    size, longer = divmod(lanes, count)
    begins = [i * size + min(i, longer) for i in range(count + 1)]
    return [slice(begins[i], begins[i + 1]) for i in range(count)]


def lanes_of_field(value: Any, rows: slice) -> Any:
    """Some lanes of a field, `(B,)` or `(T, B, ...)`; what is no tensor belongs to the whole batch."""
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return value
    return value[rows] if value.ndim == 1 else value[:, rows]


def lanes_of_data(data: Any, rows: slice) -> Any:
    """Some lanes of a batch's data: tensors `(T, B, ...)`, and lists `[t][b]` of objects."""
    structure, leaves = flatten(data)
    taken = ([step[rows] for step in leaf] if isinstance(leaf, list) else lanes_of_field(leaf, rows) for leaf in leaves)
    return unflatten(structure, taken)
