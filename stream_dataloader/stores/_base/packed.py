"""What packed stores of our own have in common, in whatever files their steps lie: the header, and the index.

Guarantee: a header that was read is consistent. An index knows all streams by a few mapped pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from stream_dataloader._items.structure import Node
from stream_dataloader.stores._base.leaves import LeafSpec, structure_of
from stream_dataloader.stores._base.tables import Tables, checksums_of

__all__ = ["PackedHeader", "PackedIndex", "check_sizes", "header_fields"]

_MOST_STEPS = 1 << 56


@dataclass(frozen=True, kw_only=True)
class PackedHeader:
    """What every packed store holds.

    Attributes:
        streams: How many streams.
        structure: Of an item; None if there is no item.
        leaves: An item's leaves, in the structure's order.
        checksums: CRC-32 of streams.bin, keys.bin and notes.bin, and their sizes in bytes.
        metadata: The user's, of the whole store.
        fingerprint: Of all of this, and so of all that the store holds.
    """

    streams: int
    structure: Node | None
    leaves: tuple[LeafSpec, ...]
    checksums: Mapping[str, tuple[int, int]]
    metadata: Mapping[str, Any]
    fingerprint: str


Header = TypeVar("Header", bound=PackedHeader)


def header_fields(content: Mapping[str, Any], path: str, classes: dict[str, type]) -> dict[str, Any]:
    """The fields of `PackedHeader`, as a header that was read says them; called within `damage_told`.

    Args:
        content: What the file says.
        path: The file, for errors.
        classes: See `structure.from_json`.

    Raises:
        StoreError: It tells no structure.
        KeyError, TypeError, ValueError: It lacks something, or has something else in its place.
    """
    node, leaves = structure_of(content, path, classes)
    check_sizes(content["streams"], *(size for leaf in leaves for size in leaf.shape))
    return {
        "streams": content["streams"],
        "structure": node,
        "leaves": leaves,
        "checksums": checksums_of(content["checksums"]),
        "metadata": content["metadata"],
        "fingerprint": content["check"],
    }


def check_sizes(*sizes: Any) -> None:
    """Refuse what is no number of things.

    Raises:
        ValueError: Some size is none, or one that no disk can hold.
    """
    if not all(isinstance(size, int) and 0 <= size < _MOST_STEPS for size in sizes):
        raise ValueError(f"sizes {list(sizes)}")


class PackedIndex(Generic[Header]):
    """The header and the tables of a store; inherited by fork, mapped anew otherwise.

    Args:
        path: The store.
        header: Its own.
        own_rows: How many rows of the table are the format's own.
        check: Whether to compare the tables with their checksums.

    Attributes:
        table: See `Tables`.

    Raises:
        StoreError: A table is missing or damaged.
    """

    def __init__(self, path: str, header: Header, own_rows: int, *, check: bool) -> None:
        self.header = header
        self.fingerprint = header.fingerprint
        self.tables = Tables(path, header.streams, own_rows, header.checksums, check=check)
        self.table = self.tables.table

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Steps of each stream."""
        lengths: NDArray[np.int64] = self.table[1]
        return lengths

    def __len__(self) -> int:
        return self.header.streams

    def key(self, number: int) -> str:
        """A stream's name."""
        return self.tables.key(number)
