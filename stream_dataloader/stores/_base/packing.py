"""Interface of formats that streams are packed into by several processes.

Guarantee: all processes write items of one structure.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from stream_dataloader._engine.items.layout import DTYPES_OF_NUMPY, Layout, Leaves, Spec, as_tensor
from stream_dataloader._engine.items.structure import Misfit, Node
from stream_dataloader.errors import shorten
from stream_dataloader.stores._base.files import read_json, write_once
from stream_dataloader.stores._base.leaves import (
    Block,
    LeafSpec,
    classes_of,
    from_json,
    leaf_spec,
    leaves_json,
    to_json,
)

__all__ = ["Packer", "PartPacker", "Rows", "StreamRecord", "agreed", "leaves_of", "said_in"]


class StreamRecord(NamedTuple):
    """A packed stream; `place` is the result of `PartPacker.write`."""

    number: int
    key: str
    steps: int
    place: Any
    metadata: Mapping[str, Any] = {}


class PartPacker(Protocol):
    """Writer of streams in one worker, one after the other.

    If it has `syncs_beside = True`, another thread calls `sync` while the next stream is written.
    `sync_seconds` is the shortest time between two calls; by default, one second.
    """

    def write(self, number: int, key: str, items: Iterable[Any]) -> tuple[int, Any]:
        """Write a stream; return its number of steps, and its place as data that JSON can hold.

        If `items` raises, no step of it may be in the store. After the first item,
        `items.read_into(out)` writes to arrays, if `items.reads_into`.
        """
        ...

    def sync(self) -> Any:
        """Wait until everything written is on the disk. `Packer.finish` gets the result."""
        ...

    def close(self) -> Any:
        """Finish the part like `sync`, and close its files."""
        ...


class Packer(Protocol):
    """Packer of a format, created with the folder and options, and pickled for workers.

    The folder may hold files of an interrupted run, and may hold a stream twice.
    """

    def part(self, worker: int) -> PartPacker:
        """Return a part of the store; no other part has its number."""
        ...

    def finish(self, records: Sequence[StreamRecord], synced: Sequence[Any]) -> Sequence[str]:
        """Make the folder a store after all parts are closed; return its files, the index last.

        It is called again after an interrupt. Other files may have been removed by then.
        """
        ...


def _beside(folder: str) -> str:
    return f"{folder}.items.json"


def agreed(folder: str, layout: Layout, **said: Any) -> tuple[Node, dict[str, Any]]:
    """Save the layout of items unless a process has done so; return the saved structure and all that was saved."""
    path = _beside(folder)
    write_once(path, {"structure": to_json(layout.structure), **said})
    found: dict[str, Any] = read_json(path, dict)
    return from_json(found["structure"], path, classes_of(layout.structure)), found


def said_in(folder: str) -> dict[str, Any]:
    """Return everything that was saved about items, or an empty dict."""
    path = _beside(folder)
    return read_json(path, dict) if os.path.exists(path) else {}


def first_layout(item: Any) -> Layout:
    """Return the layout of a first item, which must have leaves."""
    layout, _ = Layout.of(item, windowed=False)
    if not layout.specs:
        raise TypeError(f"an item is {shorten(item)}, which has nothing to keep")
    return layout


def leaves_of(layout: Layout, item: Any, step: int) -> Leaves:
    """Return an item's leaves as arrays."""
    try:
        return layout.read(item)
    except Misfit as error:
        raise ValueError(f"step {step}: {error}, but all steps of a store must be alike") from error


class Rows:
    """Blocks of the items that a part writes, which must be numbers."""

    layout: Layout

    def __init__(self, folder: str, kind: str) -> None:
        self._folder, self._kind = folder, kind
        self.leaves: Sequence[LeafSpec] = ()

    def blocks(self, items: Iterable[Any], room: Callable[[], Block]) -> Iterator[tuple[Block, int]]:
        """Fill blocks that `room` returns; yield each with its number of steps."""
        count = 0
        reader: Any = items
        for step, item in enumerate(items):
            if not self.leaves:
                self._adopt(item)
            block = room()
            for rows, leaf in zip(block, leaves_of(self.layout, item, step), strict=True):
                rows[count] = leaf
            count += 1
            if count == len(block[0]):
                yield block, count
                count = 0
            if not step and getattr(items, "reads_into", False):
                while more := reader.read_into(self._tree(left := [rows[count:] for rows in room()]), len(left[0])):
                    count += more
                    if more == len(left[0]):
                        yield room(), count
                        count = 0
                break
        if count:
            yield room(), count

    def _adopt(self, item: Any) -> None:
        layout = first_layout(item)
        objects = [path for path, spec in zip(layout.paths, layout.specs, strict=True) if spec.dtype is None]
        if objects:
            what = f"{self._kind} holds numbers, but this is an object such as a string"
            raise TypeError(f"{', '.join(objects)}: {what}; leave it out, with transform=")
        structure, said = agreed(self._folder, layout, leaves=leaves_json(layout.specs))
        leaves = tuple(map(leaf_spec, said["leaves"]))
        self.layout = Layout(structure, tuple(Spec(leaf.dtype, leaf.shape) for leaf in leaves), windowed=False)
        self.leaves = leaves

    def _tree(self, rows: Block) -> Any:
        return self.layout.build(
            leaf if spec.dtype in DTYPES_OF_NUMPY else as_tensor(leaf, spec.dtype)
            for leaf, spec in zip(rows, self.leaves, strict=True)
        )
