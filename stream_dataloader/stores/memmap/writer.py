"""Writes a memory-mapped store, by several processes at once.

Each process collects a stream's steps, takes as many steps' room at the end of all leaves, and writes them there.

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
from stream_dataloader.stores._base.leaves import Block, ItemSpecs, LeafSpec, blocks_of, read_layout
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

    def finish(self, records: Sequence[StreamRecord], synced: Sequence[Any] = ()) -> None:
        """See `Packer`."""
        del synced
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
        self._free: list[Block] = []  # to be used again: fresh memory costs a fault a page

    def write(self, number: int, key: str, items: Iterable[Any]) -> tuple[int, Any]:
        """See `PartPacker`."""
        del number, key
        collected = _Collected(self._folder, self._free)
        try:
            for _, count in blocks_of(items, self._adopt, collected.room):
                collected.add(count)
            if self._items is None or not collected.steps:
                return 0, None
            leaves = self._items.leaves
            start = self._take_room(leaves, collected.steps)
            for leaf, (spec, file) in enumerate(zip(leaves, self._files, strict=True)):
                collected.write(leaf, file, start * spec.step_bytes)
            return collected.steps, {"start": start, "crcs": collected.crcs}
        finally:
            collected.close()

    def _adopt(self, item: Any) -> ItemSpecs:
        """Have the layout of the store's first item, whichever process has it, and open the leaves' files."""
        if self._items is None:
            specs = ItemSpecs(self._folder, item, "a memory-mapped store")
            paths = [os.path.join(self._folder, name) for name in (*map(leaf_file, range(len(specs.leaves))), _ROOM)]
            *self._files, self._room = [os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666) for path in paths]
            self._items = specs
        return self._items

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


class _Collected:
    """The steps of one stream, until their number is known: blocks in memory, and in a file what is too much for it.

    Args:
        folder: Where the file is made.
        free: Blocks to use; those that are done with are put there.

    Attributes:
        steps: How many there are.
        crcs: The checksum of each leaf.
    """

    def __init__(self, folder: str, free: list[Block]) -> None:
        self._folder = folder
        self._free = free
        self._full: list[Block] = []
        self._block: Block | None = None
        self._count = 0  # steps in the block, which is the last one
        self._spilled: list[BinaryIO] = []  # one a leaf
        self.steps = 0
        self.crcs: list[int] = []

    def room(self, specs: ItemSpecs) -> Block:
        """Where the next steps are to be written."""
        if self._block is None:
            self._step_bytes = sum(spec.step_bytes for spec in specs.leaves)
            self._rows = max(1, min(_BLOCK_BYTES // max(1, self._step_bytes), _MOST_ROWS))
            self.crcs = self.crcs or [0] * len(specs.leaves)
            self._block = (
                self._free.pop()
                if self._free
                else [np.empty((self._rows, *spec.shape), spec.stored) for spec in specs.leaves]
            )
        return self._block

    def add(self, count: int) -> None:
        """So many steps were written to the room: all that there was, or the last ones."""
        assert self._block is not None
        self.steps += count
        self._count = count
        for leaf, rows in enumerate(self._block):
            self.crcs[leaf] = zlib.crc32(_bytes_of(rows[:count]), self.crcs[leaf])
        if count < self._rows:
            return
        self._count = 0
        if (len(self._full) + 1) * self._rows * self._step_bytes < _MOST_COLLECTED_BYTES:
            self._full.append(self._block)
            self._block = None
        else:
            self._spill(self._block)

    def _spill(self, block: Block) -> None:
        """Move a block to the file."""
        while len(self._spilled) < len(block):
            self._spilled.append(tempfile.TemporaryFile(dir=self._folder, buffering=0))  # noqa: SIM115
        for file, rows in zip(self._spilled, block, strict=True):
            _write_all(file.fileno(), _bytes_of(rows), file.seek(0, os.SEEK_END))

    def write(self, leaf: int, file: int, offset: int) -> None:
        """Write a leaf's steps to a place of a file."""
        for full in self._full:
            offset = _write_all(file, _bytes_of(full[leaf]), offset)
        if self._spilled:
            place = 0
            while block := os.pread(self._spilled[leaf].fileno(), _BLOCK_BYTES, place):
                place += len(block)
                offset = _write_all(file, memoryview(block), offset)
        if self._block is not None:
            _write_all(file, _bytes_of(self._block[leaf][: self._count]), offset)

    def close(self) -> None:
        """Give the memory back."""
        self._free += self._full if self._block is None else [*self._full, self._block]
        self._full, self._block = [], None
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
