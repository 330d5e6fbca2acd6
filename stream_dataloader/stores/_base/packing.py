"""How streams are packed into a format, by several processes.

Guarantee: all processes write items of one structure.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from stream_dataloader._items.layout import DTYPES_OF_NUMPY, Layout, Leaves, Spec, as_tensor
from stream_dataloader._items.structure import Misfit, Node
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
    """A stream that was packed; `place` is what `PartPacker.write` returned."""

    number: int
    key: str
    steps: int
    place: Any
    metadata: Mapping[str, Any] = {}


class PartPacker(Protocol):
    """Writes streams in one worker, one after the other.

    If it has `syncs_beside = True`, another thread syncs it while the next stream is written.
    `sync_seconds` is how often at most, if that is not once a second.
    """

    def write(self, number: int, key: str, items: Iterable[Any]) -> tuple[int, Any]:
        """Write a stream; returns how many steps there were, and where, as JSON can hold it.

        If `items` raise, nothing of them must be in the store. Behind the first,
        `items.read_into(out)` writes to arrays, if `items.reads_into`.
        """
        ...

    def sync(self) -> Any:
        """Have the disk hold what was written; `Packer.finish` is given the result."""
        ...

    def close(self) -> Any:
        """Finish the part, as `sync` does, and close its files."""
        ...


class Packer(Protocol):
    """How a format is packed: made of the folder and options, and sent to workers.

    The folder may hold what an interrupted run has written, and a stream twice.
    """

    def part(self, worker: int) -> PartPacker:
        """A part of the store; no other has its number."""
        ...

    def finish(self, records: Sequence[StreamRecord], synced: Sequence[Any]) -> Sequence[str]:
        """Make the folder a store, when all parts are closed; returns its files, the index last.

        If interrupted it is called again; other files may be gone then.
        """
        ...


def _beside(folder: str) -> str:
    return f"{folder}.items.json"


def agreed(folder: str, layout: Layout, **said: Any) -> tuple[Node, dict[str, Any]]:
    """Say what items look like, unless it was said; returns what was."""
    path = _beside(folder)
    write_once(path, {"structure": to_json(layout.structure), **said})
    found: dict[str, Any] = read_json(path, dict)
    return from_json(found["structure"], path, classes_of(layout.structure)), found


def said_in(folder: str) -> dict[str, Any]:
    """What was said of items; empty if there was none."""
    path = _beside(folder)
    return read_json(path, dict) if os.path.exists(path) else {}


def first_layout(item: Any) -> Layout:
    """The layout of a first item, which must have leaves."""
    layout, _ = Layout.of(item, windowed=False)
    if not layout.specs:
        raise TypeError(f"an item is {shorten(item)}, in which there is nothing to keep")
    return layout


def leaves_of(layout: Layout, item: Any, step: int) -> Leaves:
    """An item's leaves, as arrays."""
    try:
        return layout.read(item)
    except Misfit as error:
        raise ValueError(f"step {step}: {error}, as all steps of a store must be alike") from error


class Rows:
    """Makes blocks of the items that a part writes, which are numbers."""

    layout: Layout

    def __init__(self, folder: str, kind: str) -> None:
        self._folder, self._kind = folder, kind
        self.leaves: Sequence[LeafSpec] = ()

    def blocks(self, items: Iterable[Any], room: Callable[[], Block]) -> Iterator[tuple[Block, int]]:
        """Blocks of `room`, and how many steps each has."""
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
            what = f"{self._kind} holds numbers, and this is an object such as a string"
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
