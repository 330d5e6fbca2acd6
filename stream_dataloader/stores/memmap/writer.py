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
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.stores._base.files import sync_folder
from stream_dataloader.stores._base.leaves import ItemSpecs, LeafSpec, read_layout
from stream_dataloader.stores._base.packed import finish_store, is_finished
from stream_dataloader.stores._base.packing import StreamRecord
from stream_dataloader.stores.memmap.store import KIND, leaf_file

__all__ = ["MemmapPacker"]

_ROOM = "room"

#: Of a stream of more bytes, this much is collected in memory, and the rest in a file.
_MOST_COLLECTED_BYTES = 128 << 20
_BLOCK_BYTES, _MOST_ROWS = 1 << 22, 1 << 16


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
        if is_finished(self._folder):
            return
        _, specs = read_layout(self._folder) or (None, ())
        places = [record.place or {"start": 0, "crcs": [0] * len(specs)} for record in records]
        starts = [place["start"] for place in places]
        crcs = np.array([place["crcs"] for place in places], "<i8").reshape(len(records), len(specs)).T
        steps = max((start + record.steps for start, record in zip(starts, records, strict=True)), default=0)
        files = [leaf_file(leaf) for leaf in range(len(specs))]
        for name, spec in zip(files, specs, strict=True):
            os.truncate(os.path.join(self._folder, name), steps * spec.step_bytes)
        finish_store(self._folder, KIND, records, starts, crcs, files, steps=steps, metadata=self._metadata)


class _Part:
    """See `packing.PartPacker`."""

    syncs_beside = True

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._items: ItemSpecs | None = None
        self._files: list[int] = []
        self._room = -1
        self._free: list[_Block] = []  # to be used again: fresh memory costs a fault a page

    def write(self, number: int, key: str, items: Iterable[Any]) -> tuple[int, Any]:
        """See `PartPacker`."""
        del number, key
        collected: _Collected | None = None
        reader: Any = items
        try:
            for item in items:
                specs = self._adopt(item) if self._items is None else self._items
                if collected is None:
                    collected = _Collected(specs.leaves, self._folder, self._free)
                collected.add(specs.read(item, collected.steps))
                if collected.steps == 1 and getattr(items, "reads_into", False):
                    while count := reader.read_into(specs.build(room := collected.room()), len(room[0])):
                        collected.added(count)
                    break
            if collected is None or self._items is None:
                return 0, None
            leaves = self._items.leaves
            start = self._take_room(leaves, collected.steps)
            for leaf, (spec, file) in enumerate(zip(leaves, self._files, strict=True)):
                collected.write(leaf, file, start * spec.step_bytes)
            return collected.steps, {"start": start, "crcs": collected.crcs}
        finally:
            if collected is not None:
                collected.close()

    def _adopt(self, item: Any) -> ItemSpecs:
        """Have the layout of the store's first item, whichever process has it, and open the leaves' files."""
        specs = ItemSpecs(self._folder, item, "a memory-mapped store")
        names = [*map(leaf_file, range(len(specs.leaves))), _ROOM]
        *self._files, self._room = [
            os.open(os.path.join(self._folder, name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666) for name in names
        ]
        self._items = specs
        return specs

    def _take_room(self, specs: Sequence[LeafSpec], steps: int) -> int:
        """Room at the end of all leaves; returns its first step."""
        fcntl.lockf(self._room, fcntl.LOCK_EX)
        try:
            before = int.from_bytes(os.pread(self._room, 8, 0), "little")
            for descriptor, spec in zip(self._files, specs, strict=True):
                if spec.step_bytes:
                    _allocate(descriptor, before * spec.step_bytes, steps * spec.step_bytes)
            os.pwrite(self._room, (before + steps).to_bytes(8, "little"), 0)
        finally:
            fcntl.lockf(self._room, fcntl.LOCK_UN)
        return before

    def sync(self) -> None:
        """See `PartPacker`."""
        if self._items is not None:
            for file in (*self._files, self._room):  # after a power failure, room that was taken must not be free
                os.fsync(file)
            sync_folder(self._folder)

    def close(self) -> None:
        """See `PartPacker`."""
        if self._items is not None:
            try:
                self.sync()
            finally:
                for file in (*self._files, self._room):
                    os.close(file)
                self._items, self._files, self._room = None, [], -1
        self._free.clear()


#: Some time steps: an array `(steps, ...)` for each leaf.
_Block = list[NDArray[Any]]


class _Collected:
    """The steps of one stream, until their number is known: blocks in memory, and in a file what is too much for it.

    Args:
        specs: The leaves.
        folder: Where the file is made.
        free: Blocks to use; those that are done with are put there.

    Attributes:
        steps: How many there are.
        crcs: The checksum of each leaf; whole once all were written.
    """

    def __init__(self, specs: Sequence[LeafSpec], folder: str, free: list[_Block]) -> None:
        self._specs = specs
        self._folder = folder
        self._free = free
        self._step_bytes = sum(spec.step_bytes for spec in specs)
        self._rows = max(1, min(_BLOCK_BYTES // max(1, self._step_bytes), _MOST_ROWS))
        self._full: list[_Block] = []
        self._block = self._new()
        self._count = 0  # steps in the block
        self._spilled: list[BinaryIO] = []  # one a leaf
        self.steps = 0
        self.crcs = [0] * len(specs)

    def _new(self) -> _Block:
        return (
            self._free.pop()
            if self._free
            else [np.empty((self._rows, *spec.shape), spec.stored) for spec in self._specs]
        )

    def add(self, leaves: Sequence[Any]) -> None:
        """Take in a step."""
        for rows, leaf in zip(self._block, leaves, strict=True):
            rows[self._count] = leaf
        self.added(1)

    def room(self) -> list[NDArray[Any]]:
        """Where the next steps may be written, at least one."""
        return [rows[self._count :] for rows in self._block]

    def added(self, count: int) -> None:
        """So many steps were written to `room`."""
        self.steps += count
        self._count += count
        if self._count < self._rows:
            return
        self._sum()
        if (len(self._full) + 1) * self._rows * self._step_bytes < _MOST_COLLECTED_BYTES:
            self._full.append(self._block)
            self._block = self._new()
        else:
            self._spill()
        self._count = 0

    def _sum(self) -> None:
        """Take the block's steps into the checksums."""
        for leaf, rows in enumerate(self._block):
            self.crcs[leaf] = zlib.crc32(_bytes_of(rows[: self._count]), self.crcs[leaf])

    def _spill(self) -> None:
        """Move the block to the file."""
        while len(self._spilled) < len(self._specs):
            self._spilled.append(tempfile.TemporaryFile(dir=self._folder, buffering=0))  # noqa: SIM115
        for file, rows in zip(self._spilled, self._block, strict=True):
            _write_all(file.fileno(), _bytes_of(rows), file.seek(0, os.SEEK_END))

    def write(self, leaf: int, file: int, offset: int) -> None:
        """Write a leaf's steps to a place of a file; the last thing that is done, leaf by leaf."""
        if not leaf:
            self._sum()
        for full in self._full:
            offset = _write_all(file, _bytes_of(full[leaf]), offset)
        if self._spilled:
            place = 0
            while block := os.pread(self._spilled[leaf].fileno(), _BLOCK_BYTES, place):
                place += len(block)
                offset = _write_all(file, memoryview(block), offset)
        _write_all(file, _bytes_of(self._block[leaf][: self._count]), offset)

    def close(self) -> None:
        """Give the memory back."""
        self._free += [*self._full, self._block]
        self._full = []
        for file in self._spilled:
            file.close()


def _bytes_of(rows: NDArray[Any]) -> memoryview:
    return memoryview(rows.reshape(-1).view(np.uint8).data)


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
