"""Writing of a memory-mapped store, by several processes at once.

Guarantee: written data are never moved. A killed process leaves at most a gap.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.stores._base.files import sync_folder
from stream_dataloader.stores._base.leaves import Block, leaf_spec
from stream_dataloader.stores._base.packing import Rows, StreamRecord, said_in
from stream_dataloader.stores.memmap.packed import finish_store
from stream_dataloader.stores.memmap.store import KIND, leaf_file
from stream_dataloader.streams.cache.own_folder import no_locks

__all__ = ["MemmapPacker"]

#: Bytes of a stream that are collected in memory.
_MOST_COLLECTED_BYTES = 128 << 20
_BLOCK_BYTES, _MOST_ROWS = 1 << 22, 1 << 16


class MemmapPacker:
    """See `packing.Packer`.

    Args:
        folder: Folder to write to.
        metadata: Metadata of the whole store for JSON.
    """

    def __init__(self, folder: str, *, metadata: Mapping[str, Any] | None = None) -> None:
        self._folder = folder
        self._metadata = dict(metadata or {})

    def part(self, worker: int) -> _Part:
        del worker  # all write to the same files
        return _Part(self._folder)

    def finish(self, records: Sequence[StreamRecord], synced: Sequence[Any] = ()) -> list[str]:
        del synced
        specs = [leaf_spec(leaf) for leaf in said_in(self._folder).get("leaves", ())]
        places = [record.place or {"start": 0, "crcs": [0] * len(specs)} for record in records]
        starts = [place["start"] for place in places]
        crcs = np.array([place["crcs"] for place in places], "<i8").reshape(len(records), len(specs)).T
        steps = max((start + record.steps for start, record in zip(starts, records, strict=True)), default=0)
        files = [leaf_file(leaf) for leaf in range(len(specs))]
        for name, spec in zip(files, specs, strict=True):
            path, size = os.path.join(self._folder, name), steps * spec.step_bytes
            if os.path.getsize(path) != size:  # a file that is not changed counts as already sent
                os.truncate(path, size)
        return finish_store(self._folder, KIND, records, starts, crcs, files, steps=steps, metadata=self._metadata)


class _Part:
    """See `packing.PartPacker`."""

    syncs_beside = True

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._rows = Rows(folder, "a memory-mapped store")
        self._collected = _Collected(folder, self._rows)
        self._files: list[BinaryIO] = []  # one for each leaf

    def write(self, number: int, key: str, items: Iterable[Any]) -> tuple[int, Any]:
        del number, key
        collected = self._collected
        collected.clear()
        for _, count in self._rows.blocks(items, collected.room):
            collected.add(count)
        if not collected.steps:
            return 0, None
        start = self._take_room(collected.steps)
        for leaf, (file, spec) in enumerate(zip(self._files, self._rows.leaves, strict=True)):
            file.seek(start * spec.step_bytes)
            file.writelines(collected.chunks(leaf))
            file.flush()
        return collected.steps, {"start": start, "crcs": collected.crcs}

    def _take_room(self, steps: int) -> int:
        """Reserve room at the end of all leaves; return its first step."""
        sizes = [leaf.step_bytes for leaf in self._rows.leaves]
        if not self._files:
            for leaf in range(len(sizes)):
                file = os.open(os.path.join(self._folder, leaf_file(leaf)), os.O_RDWR | os.O_CREAT, 0o666)
                self._files.append(open(file, "r+b"))  # noqa: SIM115
        try:
            fcntl.lockf(self._files[0], fcntl.LOCK_EX)
        except OSError as error:
            raise no_locks(os.path.join(self._folder, leaf_file(0)), error) from error
        try:
            before = 0
            for opened, size in zip(self._files, sizes, strict=True):
                if size:  # the leaf that is enlarged last has the number of steps with room in all leaves
                    before = os.fstat(opened.fileno()).st_size // size
            for opened, size in zip(self._files, sizes, strict=True):
                if size:
                    _allocate(opened.fileno(), before * size, steps * size)
        finally:
            fcntl.lockf(self._files[0], fcntl.LOCK_UN)
        return before

    def sync(self) -> None:
        for file in self._files:
            os.fsync(file.fileno())
        sync_folder(self._folder)

    def close(self) -> None:
        try:
            self.sync()
        finally:
            self._collected.clear()
            while self._files:
                self._files.pop().close()


class _Collected:
    """Steps of one stream, collected until their number is known; `crcs` are those of its leaves."""

    def __init__(self, folder: str, rows: Rows) -> None:
        self._folder, self._rows = folder, rows
        self._blocks: list[Block] = []  # reused, because new memory costs a page fault for each page
        self._files: list[BinaryIO] = []  # one for each leaf
        self.clear()

    def clear(self) -> None:
        self.steps = 0
        self.crcs: list[int] = []
        self._full = self._count = 0  # number of full blocks, and of steps in the next block
        while self._files:
            self._files.pop().close()

    def room(self) -> Block:
        if self._full == len(self._blocks):
            leaves = self._rows.leaves
            step_bytes = max(1, sum(leaf.step_bytes for leaf in leaves))
            rows = max(1, min(_BLOCK_BYTES // step_bytes, _MOST_ROWS))
            if self._full and self._full * rows * step_bytes >= _MOST_COLLECTED_BYTES:
                self._spill()
            else:
                self._blocks.append([np.empty((rows, *leaf.shape), leaf.stored) for leaf in leaves])
        return self._blocks[self._full]

    def add(self, count: int) -> None:
        block = self._blocks[self._full]
        before = self.crcs or [0] * len(block)
        self.crcs = [zlib.crc32(_bytes_of(rows[:count]), crc) for rows, crc in zip(block, before, strict=True)]
        self.steps += count
        if count == len(block[0]):
            self._full += 1
        else:
            self._count = count

    def _spill(self) -> None:
        for leaf in range(len(self._rows.leaves)):
            if leaf == len(self._files):
                self._files.append(tempfile.TemporaryFile(dir=self._folder))  # noqa: SIM115
            for block in self._blocks:
                self._files[leaf].write(_bytes_of(block[leaf]))
        self._full = 0

    def chunks(self, leaf: int) -> Iterator[bytes | memoryview]:
        if self._files:
            self._files[leaf].seek(0)
            while chunk := self._files[leaf].read(_BLOCK_BYTES):
                yield chunk
        for block in self._blocks[: self._full]:
            yield _bytes_of(block[leaf])
        if self._count:
            yield _bytes_of(self._blocks[self._full][leaf][: self._count])


def _bytes_of(rows: NDArray[Any]) -> memoryview:
    return memoryview(rows.reshape(-1).view(np.uint8).data)


def _allocate(file: int, offset: int, size: int) -> None:
    """Allocate room on the disk now, so that a full disk is noticed here."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, offset, size)
    else:
        os.ftruncate(file, offset + size)
