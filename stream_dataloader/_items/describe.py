"""Shapes instead of data: what an item or a batch is told as.

Guarantee: it reads no value of a tensor, so nothing waits for a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from stream_dataloader._items.structure import children_of, step_to


def describe(value: Any) -> str:
    """Shapes instead of data: `{['image']: uint8 (4, 2, 3), ['name']: list [4][2]}`."""
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
    """Leaves with the ways to them, in the order of the value's keys; `path` is the way to the value."""
    parts = children_of(value)
    if parts is None:
        yield path, value
        return
    kind, keys, children = parts
    for key, child in zip(keys, children, strict=True):
        yield from named_leaves(child, path + step_to(kind, key))
