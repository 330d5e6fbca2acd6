"""One step's value, written to its row of a batch.

Guarantee: what has another structure, dtype or shape than the row is an error, and never broadcast, cut or rounded.
"""

from __future__ import annotations

from typing import Any

from stream_dataloader._items.layout import as_array, spec_of
from stream_dataloader._items.structure import flatten
from stream_dataloader.errors import StoreError

__all__ = ["put_row"]


def put_row(value: Any, out: Any, row: int, name: str) -> None:
    """Write a value.

    Args:
        value: Of one time step: a leaf, or a structure of them.
        out: The same structure; its leaves are arrays `(n, ...)`.
        row: Which of the n.
        name: What errors call the value.

    Raises:
        StoreError: It does not fit; says what it is, and what the steps before it are.
    """
    structure, leaves = flatten(value)
    wanted, rows = flatten(out)
    if structure != wanted:
        raise StoreError(f"{name} has another structure than the steps before it; store all alike, or choose columns")
    for leaf, target in zip(leaves, rows, strict=True):
        found, room = spec_of(leaf), spec_of(target)
        if (found.dtype, found.shape) != (room.dtype, room.shape[1:]):
            other = room._replace(shape=room.shape[1:])
            raise StoreError(f"{name} is {found}, and the steps before it are {other}; store all alike")
        as_array(target)[row] = as_array(leaf)
