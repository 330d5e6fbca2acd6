"""Helpers of the contracts: read the items of streams as copies, and compare them.

Guarantee: a returned item keeps its content, even if the stream reuses its memory.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from stream_dataloader._engine.items.layout import as_array, spec_of
from stream_dataloader._engine.items.structure import flatten
from stream_dataloader._engine.kept_fields import map_leaves
from stream_dataloader.testing.resume import leaf_key


def iterated(stream: Any) -> Iterator[Any]:
    for item in stream:
        yield map_leaves(item, copied)


def items_of(stream: Any) -> list[Any]:
    """Return all items, and close the stream."""
    try:
        return list(iterated(stream))
    finally:
        close(stream)


def copied(leaf: Any) -> Any:
    """Return a copy of a leaf, since a stream may reuse its memory."""
    if isinstance(leaf, torch.Tensor):
        return as_array(leaf).copy() if leaf.dtype is not torch.bfloat16 else leaf.detach().clone()
    return np.array(leaf) if isinstance(leaf, (np.ndarray, np.generic, int, float, bool)) else leaf


def close(stream: Any) -> None:
    if callable(close := getattr(stream, "close", None)):
        close()


def assert_same(found: list[Any], expected: list[Any], source: Any, what: str) -> None:
    """Compare items of a source with those it should have."""
    for position, (one, other) in enumerate(zip(found, expected, strict=False)):
        same = map_leaves(one, leaf_key) == map_leaves(other, leaf_key)
        assert same, f"{source!r}, {what}: its item {position} differs"
    assert len(found) == len(expected), f"{source!r}, {what}: {len(found)} items, expected {len(expected)}"


def shapes_of(item: Any) -> Any:
    """Return the dtype and shape of each leaf, or its type if it has none."""
    return map_leaves(item, lambda leaf: (str(leaf.dtype), tuple(leaf.shape)) if hasattr(leaf, "shape") else type(leaf))


def has_objects(item: Any) -> bool:
    """Return True if a leaf is an object such as a string."""
    return any(spec_of(leaf).dtype is None for leaf in flatten(item)[1])


def _rows_of(item: Any, count: int) -> Any:
    """Return memory for `count + 1` items like this one, with all bits set."""

    def room(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return torch.full((count + 1, *leaf.shape), float("nan"), dtype=leaf.dtype, device=leaf.device)
        rows: Any = np.empty((count + 1, *leaf.shape), leaf.dtype)
        rows.reshape(-1).view(np.uint8)[:] = 255
        return rows

    return map_leaves(item, room)


def written(stream: Any, item: Any, room: int, source: Any) -> list[Any]:
    """Return the next items as `read_into` writes them, and check that it writes nothing else."""
    out, before = _rows_of(item, room), _rows_of(item, room)
    count: int = stream.read_into(map_leaves(out, lambda leaf: leaf[:room]))
    assert 0 <= count <= room, f"{source!r}: read_into returned {count}, with room for {room}"
    rest, rest_before = (map_leaves(rows, lambda leaf: leaf_key(leaf[count:])) for rows in (out, before))
    assert rest == rest_before, f"{source!r}: read_into wrote more than the {count} items it returned"

    def row(t: int) -> Any:
        return map_leaves(out, lambda rows: copied(rows[t]))

    return list(map(row, range(count)))


def marks_of(stream: Any, start: int, stop: int, most: int) -> list[int]:
    """Return the items that begin a sequence; the stream is asked again after each `most` items."""
    iterator, found = iterated(stream), []
    for begin in range(start, stop, most) if hasattr(stream, "starts_within") else ():
        end = min(begin + most, stop)
        for _ in itertools.islice(iterator, end - begin):
            pass
        found += (marks := list(stream.starts_within(begin, end)))
        assert all(begin <= mark < end for mark in marks), f"of items {begin} to {end} it marks {marks}"
    close(iterator)
    close(stream)
    return found


def held() -> tuple[int, int]:
    """Return the number of open descriptors and of running threads."""
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    return descriptors, threading.active_count()
