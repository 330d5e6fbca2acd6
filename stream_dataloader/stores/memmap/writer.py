"""Writes a memory-mapped store, by several processes at once.

Each process collects a stream's steps, takes as many steps' room at the end of all leaves as the stream has, and writes
it there in one piece. So streams lie in the file in the order in which they were finished; the table says where.

Guarantee: what was written stays in its place. A process that is killed leaves a gap at most, as large as its stream.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from stream_dataloader.stores._base.leaves import LAYOUT, ItemSpecs, LeafSpec, read_layout
from stream_dataloader.stores._base.packing import StreamRecord
from stream_dataloader.stores._base.tables import crc_of, write_tables
from stream_dataloader.stores.memmap.header import leaf_file, save_header

__all__ = ["MemmapPacker"]

_ROOM = "room"

#: A stream of more bytes is collected in a file, not in memory.
_MOST_COLLECTED_BYTES = 64 << 20
_COPIED_AT_ONCE_BYTES = 1 << 24


class MemmapPacker:
    """See `packing.Packer`.

    Args:
        folder: Where to write.
        metadata: Of the whole store, as JSON can hold it.
    """

    def __init__(self, folder: str, *, metadata: Mapping[str, Any] | None = None) -> None:
        self._folder = folder
        self._metadata = {} if metadata is None else dict(metadata)
        json.dumps(self._metadata)

    def part(self, worker: int) -> _Part:
        """See `Packer`."""
        del worker  # all write to the same files
        return _Part(self._folder)

    def finish(self, records: Sequence[StreamRecord]) -> None:
        """See `Packer`."""
        structure, specs = read_layout(self._folder) or (None, ())
        places = [record.place or {"start": 0, "crcs": [0] * len(specs)} for record in records]
        starts = [place["start"] for place in places]
        crcs = np.array([place["crcs"] for place in places], "<i8").reshape(len(records), len(specs)).T
        table, checksums = write_tables(self._folder, records, starts, crcs)
        steps = int((table[0] + table[1]).max(initial=0))
        for leaf, spec in enumerate(specs):
            os.truncate(os.path.join(self._folder, leaf_file(leaf)), steps * spec.step_bytes)
        save_header(self._folder, structure, specs, checksums, len(records), steps, self._metadata)
        for name in (LAYOUT, _ROOM):
            if os.path.exists(path := os.path.join(self._folder, name)):
                os.unlink(path)


class _Part:
    """See `packing.PartPacker`."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._items: ItemSpecs | None = None
        self._files: list[int] = []

    def write(self, number: int, key: str, items: Iterator[Any]) -> tuple[int, Any]:
        """See `PartPacker`."""
        del number, key
        collected: list[_Collected] = []
        steps = 0
        try:
            for item in items:
                if self._items is None:
                    self._items = self._adopt(item)
                if not collected:
                    collected += [_Collected(spec, self._folder) for spec in self._items.leaves]
                for one, leaf in zip(collected, self._items.read(item, steps), strict=True):
                    one.add(leaf)
                steps += 1
            if not steps or self._items is None:
                return 0, None
            start = self._take_room(self._items.leaves, steps)
            for one, spec, file in zip(collected, self._items.leaves, self._files, strict=True):
                one.write(file, start * spec.step_bytes)
            return steps, {"start": start, "crcs": [one.crc for one in collected]}
        finally:
            for one in collected:
                one.close()

    def _adopt(self, item: Any) -> ItemSpecs:
        """Have the layout of the store's first item, whichever process has it, and open the leaves' files."""
        specs = ItemSpecs(self._folder, item, "a memory-mapped store")
        self._files = [
            os.open(os.path.join(self._folder, leaf_file(leaf)), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            for leaf in range(len(specs.leaves))
        ]
        return specs

    def _take_room(self, specs: Sequence[LeafSpec], steps: int) -> int:
        """Room at the end of all leaves; returns its first step."""
        with open(os.open(os.path.join(self._folder, _ROOM), os.O_RDWR | os.O_CREAT, 0o666), "rb+", 0) as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            before = int.from_bytes(file.read(8), "little")
            for descriptor, spec in zip(self._files, specs, strict=True):
                if spec.step_bytes:
                    _allocate(descriptor, before * spec.step_bytes, steps * spec.step_bytes)
            os.pwrite(file.fileno(), (before + steps).to_bytes(8, "little"), 0)
        return before

    def sync(self) -> None:
        """See `PartPacker`."""
        for file in self._files:
            os.fsync(file)

    def close(self) -> None:
        """See `PartPacker`."""
        files, self._files = self._files, []
        self._items = None
        for file in files:
            os.fsync(file)
            os.close(file)


class _Collected:
    """The steps of one leaf of one stream, until their number is known."""

    def __init__(self, spec: LeafSpec, folder: str) -> None:
        self._spec = spec
        self._folder = folder
        self._room = np.empty((16, *spec.shape), spec.stored)
        self._count = 0  # in the room
        self._spilled: BinaryIO | None = None
        self.crc = 0

    def add(self, leaf: Any) -> None:
        if self._count == len(self._room):
            if self._room.nbytes >= _MOST_COLLECTED_BYTES:
                self._spill()
            else:
                larger = np.empty((2 * len(self._room), *self._spec.shape), self._spec.stored)
                larger[: self._count] = self._room
                self._room = larger
        self._room[self._count] = leaf
        self._count += 1

    def _spill(self) -> None:
        if self._spilled is None:
            self._spilled = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
        self._spilled.write(self._rows())
        self._count = 0

    def _rows(self) -> memoryview:
        rows = self._room[: self._count].reshape(-1).view(np.uint8).data
        self.crc = crc_of(rows, self.crc)
        return rows

    def write(self, file: int, offset: int) -> None:
        """Write all of them to a place of a file."""
        if self._spilled is not None:
            self._spilled.seek(0)
            while block := self._spilled.read(_COPIED_AT_ONCE_BYTES):
                offset = _write_all(file, memoryview(block), offset)
        if self._count:
            _write_all(file, self._rows(), offset)

    def close(self) -> None:
        if self._spilled is not None:
            self._spilled.close()


def _write_all(file: int, block: memoryview, offset: int) -> int:
    while block:
        written = os.pwrite(file, block, offset)
        offset += written
        block = block[written:]
    return offset


def _allocate(file: int, offset: int, size: int) -> None:
    """Take room on the disk now, so that a full disk is an error before anything is written."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, offset, size)
    else:
        os.ftruncate(file, offset + size)
