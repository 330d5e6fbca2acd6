"""What is in a packed LMDB store, and in which files.

A store is a folder. It is whole as soon as it has its name: it is written under another one. ::

    store.json     what there is, and the checksum of each other file; its own is `check`
    streams.bin    see `_base/tables`, as for keys.bin and notes.bin; `start` is the number of a stream's first value in
                   its database, and there are two more rows: the database, and CRC-32 of its values' checksums
    0.lmdb ...     databases, a file each, as LMDB 0.9 writes them (data version 1)

A database's keys are numbers from 0, 8 bytes, big-endian, so that they are in order. A value holds a window of steps::

    checksum, uint32 | how many steps, uint32 | body

Numbers are little-endian. The checksum is the CRC-32 (zlib) of the number of steps, of what is left of the body behind
its last whole 4,096 bytes, and of the sums (uint64, modulo 2^64) of each whole 4,096 bytes, taken as uint64: such sums
take as long as to read memory once, and a CRC-32 of all of it several times as long.

The body of codec `"none"` has the steps of each leaf, one leaf after the other, without gaps; that of `"zstd"` is the
same as one zstd frame. In that of `"jpeg"`, a leaf that is an image is the sizes of all steps' JPEG files, uint32 each,
and then the files. All windows of a stream but the last have the same number of steps.

Guarantee: a header that was read is consistent.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.files import inside
from stream_dataloader.stores._base.header import HEADER, damage_told, read_header, write_header
from stream_dataloader.stores._base.leaves import LeafSpec, items_json
from stream_dataloader.stores._base.packed import PackedHeader, check_sizes, header_fields

__all__ = ["CODECS", "OWN_ROWS", "VERSION", "DatabaseSpec", "Header", "check_table", "load_header", "save_header"]

KIND, VERSION = "lmdb store", 1
CODECS = ("none", "zstd", "jpeg")

#: The rows of streams.bin that other stores do not have: database, CRC-32 of its values' checksums.
OWN_ROWS = 2


@dataclass(frozen=True)
class DatabaseSpec:
    """One database of a store.

    Attributes:
        file: Its name in the store.
        size: Of its file in bytes.
        entries: How many values it has.
        crc: See `pages.Tree`.
    """

    file: str
    size: int
    entries: int
    crc: int


@dataclass(frozen=True, kw_only=True)
class Header(PackedHeader):
    """What a store holds.

    Attributes:
        window: Steps of a value.
        codec: One of `CODECS`.
        databases: The files with the values.
    """

    window: int
    codec: str
    databases: tuple[DatabaseSpec, ...]


def save_header(
    folder: str,
    structure: Any,
    leaves: Sequence[LeafSpec],
    databases: Sequence[DatabaseSpec],
    **content: Any,
) -> None:
    """Write store.json, the last thing that is written; `structure` is as JSON has it, None if there is no item."""
    told = {"databases": [vars(database) for database in databases], **items_json(structure, leaves)}
    write_header(folder, KIND, VERSION, content | told)


def load_header(folder: str, classes: dict[str, type]) -> Header:
    """Read store.json.

    Args:
        folder: The store.
        classes: See `structure.from_json`.

    Raises:
        StoreError: It is missing, damaged, of another version, or of another kind of store.
    """
    path = os.path.join(folder, HEADER)
    content = read_header(folder, KIND, VERSION, "an LMDB store")
    with damage_told(path):
        header = Header(
            **header_fields(content, path, classes),
            window=content["window"],
            codec=content["codec"],
            databases=tuple(DatabaseSpec(**database) for database in content["databases"]),
        )
        check_sizes(header.window, *(size for found in header.databases for size in (found.size, found.entries)))
        if header.window < 1:
            raise ValueError("a window of no steps")
        if header.codec not in CODECS:
            raise ValueError(f"codec {header.codec!r}")
        for database in header.databases:
            inside(folder, database.file, path)
    return header


def check_table(table: NDArray[np.int64], header: Header, path: str) -> None:
    """Refuse a table that leads beyond the databases.

    Raises:
        StoreError: Some stream lies outside of them.
    """
    start, steps, database = table[0], table[1], table[4]
    if not len(start) or not steps.any():
        return
    entries = np.array([found.entries for found in header.databases] or [0])
    if not (database.min() >= 0 and database.max() < len(entries) and steps.min() >= 0 and start.min() >= 0) or (
        (start + -(-steps // header.window) > entries[database]).any()
    ):
        raise StoreError(f"{path} is damaged: streams lie outside of the store's databases; pack it anew")
