"""What is in a memory-mapped store, and in which files.

A store is a folder. It is whole as soon as it has its name: it is written under another one. ::

    store.json     what there is, and the checksum of each other file but the leaves; its own is `check`
    streams.bin    see `_base/tables`, as for keys.bin and notes.bin; `start` counts all streams' steps, and there are
                   more rows: CRC-32 (zlib) of a stream's bytes, a row for each leaf
    0.bin ...      a leaf's steps: C order, little-endian, nothing between them

Guarantee: a header that was read is consistent: sizes of files follow from it, and are not taken from anywhere else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.header import HEADER, damage_told, read_header, write_header
from stream_dataloader.stores._base.leaves import LeafSpec, items_json, leaf_names
from stream_dataloader.stores._base.packed import PackedHeader, check_sizes, header_fields

__all__ = ["VERSION", "Header", "check_table", "leaf_file", "load_header", "save_header"]

KIND, VERSION = "memmap store", 1


def leaf_file(leaf: int) -> str:
    """The name of a leaf's file."""
    return f"{leaf}.bin"


@dataclass(frozen=True, kw_only=True)
class Header(PackedHeader):
    """What a store holds.

    Attributes:
        steps: What there is room for in the leaves' files. After an interrupt it may be more than streams have.
    """

    steps: int

    @property
    def names(self) -> list[str]:
        """What the leaves are called: `['image']`, or `item` if an item is one leaf."""
        return leaf_names(self.structure)


def save_header(
    folder: str,
    structure: Any,
    leaves: Sequence[LeafSpec],
    checksums: Mapping[str, list[int]],
    streams: int,
    steps: int,
    metadata: Mapping[str, Any],
) -> None:
    """Write store.json, the last thing that is written; `structure` is as JSON has it, None if there is no item."""
    content = {
        "streams": streams,
        "steps": steps,
        **items_json(structure, leaves),
        "checksums": checksums,
        "metadata": metadata,
    }
    write_header(folder, KIND, VERSION, content)


def load_header(folder: str, classes: dict[str, type]) -> Header:
    """Read store.json.

    Args:
        folder: The store.
        classes: See `structure.from_json`.

    Raises:
        StoreError: It is missing, damaged, of another version, or of another kind of store.
    """
    path = os.path.join(folder, HEADER)
    content = read_header(folder, KIND, VERSION, "a memory-mapped store")
    with damage_told(path):
        header = Header(**header_fields(content, path, classes), steps=content["steps"])
        check_sizes(header.steps)
    return header


def check_table(table: NDArray[np.int64], header: Header, path: str) -> None:
    """Refuse a table that leads beyond the leaves' files.

    Raises:
        StoreError: Some stream lies outside of them.
    """
    start, steps = table[0], table[1]
    if len(start) and (steps.min() < 0 or start.min() < 0 or (start + steps).max() > header.steps):
        raise StoreError(f"{path} is damaged: streams lie outside of the store's {header.steps} steps; pack it anew")
