"""What is in a memory-mapped store, and in which files.

A store is a folder. It is whole as soon as it has its name: it is written under another one. ::

    store.json     what there is, and the checksum of each other file but the leaves; its own is `check`
    streams.bin    a table, int64, little-endian, one row after the other, a column for each stream
                     start       first step, counted over all streams' steps
                     steps       how many
                     key_stop    where its key ends in keys.bin
                     note_stop   where its metadata ends in notes.bin
                     crc 0 ...   CRC-32 (zlib) of its bytes, a row for each leaf
    keys.bin       all streams' keys, UTF-8, end to end
    notes.bin      all streams' metadata, JSON, end to end
    0.bin ...      a leaf's steps: C order, little-endian, nothing between them

Guarantee: a header that was read is consistent: sizes of files follow from it, and are not taken from anywhere else.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stream_dataloader._items.layout import DTYPES_OF_NUMPY, storage_dtype
from stream_dataloader._items.structure import Node, leaf_paths
from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.files import read_json
from stream_dataloader.stores.memmap.structure import from_json

__all__ = [
    "HEADER",
    "ROWS",
    "Header",
    "LeafSpec",
    "check_table",
    "crc_of",
    "leaf_file",
    "leaf_spec",
    "read_header",
    "table_rows",
    "write_header",
]

KIND, VERSION = "stream_dataloader memmap store", 1
HEADER, STREAMS, KEYS, NOTES = "store.json", "streams.bin", "keys.bin", "notes.bin"

#: The rows of streams.bin before the checksums.
ROWS = ("start", "steps", "key_stop", "note_stop")

_MOST_STEPS = 1 << 56
_MOST_HEADER_BYTES = 1 << 26


def leaf_file(leaf: int) -> str:
    """The name of a leaf's file."""
    return f"{leaf}.bin"


@dataclass(frozen=True)
class LeafSpec:
    """One leaf of an item.

    Attributes:
        dtype: As torch calls it.
        shape: Of one time step.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def stored(self) -> np.dtype[Any]:
        """What its numbers are in the file; unsigned integers of the same bits where NumPy lacks the dtype."""
        found: np.dtype[Any] = storage_dtype(self.dtype).newbyteorder("<")
        return found

    @property
    def step_bytes(self) -> int:
        """What a time step takes."""
        return math.prod(self.shape) * self.stored.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"


@dataclass(frozen=True)
class Header:
    """What a store holds.

    Attributes:
        streams: How many streams.
        steps: What there is room for in the leaves' files. After an interrupt it may be more than streams have.
        structure: Of an item; None if there is no item.
        leaves: An item's leaves, in the structure's order.
        checksums: CRC-32 of streams.bin, keys.bin and notes.bin, and their sizes in bytes.
        metadata: The user's, of the whole store.
        fingerprint: Of all of this, and so of all that the store holds.
    """

    streams: int
    steps: int
    structure: Node | None
    leaves: tuple[LeafSpec, ...]
    checksums: Mapping[str, tuple[int, int]]
    metadata: Mapping[str, Any]
    fingerprint: str = ""

    @property
    def names(self) -> list[str]:
        """What the leaves are called: `['image']`, or `item` if an item is one leaf."""
        if self.structure is None:
            return []
        return [path.removeprefix("item") or path for path in leaf_paths(self.structure)]


def crc_of(data: Any, before: int = 0) -> int:
    """CRC-32 of some bytes, or of more that follow."""
    return zlib.crc32(data, before)


def write_header(
    folder: str,
    structure: Any,
    leaves: Sequence[LeafSpec],
    checksums: Mapping[str, tuple[int, int]],
    streams: int,
    steps: int,
    metadata: Mapping[str, Any],
) -> None:
    """Write store.json, the last thing that is written; `structure` is as JSON has it, None if there is no item."""
    content = {
        "kind": KIND,
        "version": VERSION,
        "streams": streams,
        "steps": steps,
        "structure": None if not leaves else [structure],
        "leaves": [{"dtype": str(leaf.dtype).removeprefix("torch."), "shape": list(leaf.shape)} for leaf in leaves],
        "checksums": {name: list(numbers) for name, numbers in checksums.items()},
        "metadata": metadata,
    }
    with open(os.path.join(folder, HEADER), "w", encoding="utf-8") as file:
        json.dump(content | {"check": _digest(content)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read_header(folder: str, classes: dict[str, type]) -> Header:
    """Read store.json.

    Args:
        folder: The store.
        classes: See `structure.from_json`.

    Raises:
        StoreError: It is missing, damaged, of another version, or of another kind of store.
    """
    path = os.path.join(folder, HEADER)
    content = read_json(path, dict, _MOST_HEADER_BYTES)
    if content.get("kind") != KIND:
        raise StoreError(f"{path} is not of a memory-mapped store: its kind is {content.get('kind')!r}")
    if content.get("version") != VERSION:
        raise StoreError(
            f"{path} is of version {content.get('version')!r}, and this release reads version {VERSION}; pack it anew, "
            "or use the release that wrote it"
        )
    check = content.pop("check", None)
    if check != _digest(content):
        raise StoreError(f"{path} is damaged: its checksum is another; pack the store anew")
    try:
        leaves = tuple(map(leaf_spec, content["leaves"]))
        structure = content["structure"]
        node = None if structure is None else from_json(structure[0], path, classes)
        header = Header(
            content["streams"],
            content["steps"],
            node,
            leaves,
            {name: (int(crc), int(size)) for name, (crc, size) in content["checksums"].items()},
            content["metadata"],
            check,
        )
        sizes = [header.streams, header.steps, *(size for leaf in leaves for size in leaf.shape)]
        if not all(isinstance(size, int) and 0 <= size < _MOST_STEPS for size in sizes):
            raise ValueError(f"sizes {sizes}")
        if len(header.names) != len(leaves) or header.checksums.keys() != {STREAMS, KEYS, NOTES}:
            raise ValueError(f"{len(leaves)} leaves, files {sorted(header.checksums)}")
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"{path} is damaged: {error}; pack the store anew") from None
    return header


def leaf_spec(found: Mapping[str, Any]) -> LeafSpec:
    """A leaf, as JSON has it.

    Raises:
        ValueError: No dtype has that name.
    """
    return LeafSpec(_dtype(found["dtype"]), tuple(map(int, found["shape"])))


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not (found in DTYPES_OF_NUMPY or found.itemsize in (1, 2, 4, 8)):
        raise ValueError(f"no dtype is called {name!r}")
    return found


def table_rows(header: Header) -> int:
    """How many rows streams.bin has."""
    return len(ROWS) + len(header.leaves)


def check_table(table: NDArray[np.int64], header: Header, path: str) -> None:
    """Refuse a table that leads beyond the files.

    Raises:
        StoreError: Some stream lies outside of them.
    """
    start, steps = table[0], table[1]
    if len(start) and (steps.min() < 0 or start.min() < 0 or (start + steps).max() > header.steps):
        raise StoreError(f"{path} is damaged: streams lie outside of the store's {header.steps} steps; pack it anew")
    for row, name in ((2, KEYS), (3, NOTES)):
        stops = table[row]
        if len(stops) and (stops[0] < 0 or (np.diff(stops) < 0).any() or stops[-1] > header.checksums[name][1]):
            raise StoreError(f"{path} is damaged: it points outside of {name}; pack it anew")
