"""Packing of streams into databases, by several processes at once.

Each worker writes its own databases, so that no two workers write to the same one.

Guarantee: a stream that fails leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.files import package
from stream_dataloader.stores._base.leaves import Block, leaf_spec
from stream_dataloader.stores._base.packing import Rows, StreamRecord, said_in
from stream_dataloader.stores.lmdb.pages import mapped, read_tree
from stream_dataloader.stores.lmdb.store import KIND
from stream_dataloader.stores.lmdb.windows import Windows, steps_of_window
from stream_dataloader.stores.memmap.packed import finish_store

__all__ = ["LmdbPacker"]

#: First size of the map, which is doubled when it is full.
_FIRST_MAP_BYTES = 1 << 30
#: Bytes that are collected in memory, and then written in one transaction.
_MOST_PENDING_BYTES = 32 << 20


class LmdbPacker:
    """See `packing.Packer`.

    Args:
        folder: Folder to write to.
        window: Number of steps of a value; None: as many as make about 1 MB.
        codec: `"none"`: raw bytes. `"zstd"`: smaller where data repeat. `"jpeg"`: images, uint8
            with 1 or 3 channels first or last, lose some quality; other leaves are raw.
        quality: Quality of JPEG, 1 to 100.
        databases: Number of databases that each worker writes.
        metadata: Metadata of the whole store for JSON.

    Raises:
        ValueError: An option is out of its range.
        ImportError: A package is missing.
    """

    def __init__(
        self,
        folder: str,
        *,
        window: int | None = None,
        codec: str = "none",
        quality: int = 95,
        databases: int = 1,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        for name, value, most in (
            ("window", window, 1 << 20),
            ("quality", quality, 100),
            ("databases", databases, 999),
        ):
            if value is not None and not 1 <= value <= most:
                raise ValueError(f"{name} is {value}; use 1 to {most}")
        package("lmdb", "writing LMDB", "lmdb")
        Windows((), codec, quality)
        self._folder, self._databases, self._metadata = folder, databases, dict(metadata or {})
        self._window, self._codec, self._quality = window, codec, quality

    def part(self, worker: int) -> _Part:
        first = worker * self._databases
        return _Part(self._folder, range(first, first + self._databases), self._window, self._codec, self._quality)

    def finish(self, records: Sequence[StreamRecord], synced: Sequence[Any] = ()) -> list[str]:
        del synced
        places = [record.place or {"database": 0, "first": 0, "crc": 0} for record in records]
        numbers = sorted({record.place["database"] for record in records if record.place})
        databases = []
        for name in map(_file, numbers):
            path = os.path.join(self._folder, name)
            size = os.stat(path).st_size
            tree = read_tree(mapped(path, size).rows, path)
            databases.append({"file": name, "size": size, "entries": len(tree.values), "crc": tree.crc})
        rank = {number: i for i, number in enumerate(numbers)}
        own = [[rank.get(place["database"], 0) for place in places], [place["crc"] for place in places]]
        specs = [leaf_spec(leaf) for leaf in said_in(self._folder).get("leaves", ())]
        return finish_store(
            self._folder,
            KIND,
            records,
            [place["first"] for place in places],
            np.array(own, "<i8").reshape(2, -1),
            list(map(_file, numbers)),
            databases=databases,
            window=self._window or steps_of_window(specs),
            codec=self._codec,
            quality=self._quality if self._codec == "jpeg" else None,
            metadata=self._metadata,
        )


def _file(database: int) -> str:
    return f"{database}.lmdb"


class _Part:
    """See `packing.PartPacker`."""

    def __init__(self, folder: str, databases: range, window: int | None, codec: str, quality: int) -> None:
        self._window, self._codec, self._quality = window, codec, quality
        self._rows = Rows(folder, "an LMDB store")
        self._block: Block = []
        self._databases = databases
        self._writers = [_Writer(os.path.join(folder, _file(number))) for number in databases]

    def write(self, number: int, key: str, items: Iterable[Any]) -> tuple[int, Any]:
        del key
        turn = number % len(self._writers)
        writer = self._writers[turn]
        first, steps, crc = writer.count, 0, 0
        try:
            for block, count in self._rows.blocks(items, self._room):
                value, checksum = self._windows.encode(block, count)
                writer.put(value)
                crc = zlib.crc32(checksum.to_bytes(4, "little"), crc)
                steps += count
        except BaseException:
            writer.rewind(first)
            raise
        return steps, {"database": self._databases[turn], "first": first, "crc": crc} if steps else None

    def _room(self) -> Block:
        if not self._block:
            leaves = self._rows.leaves
            self._windows = Windows(leaves, self._codec, self._quality)
            if self._codec == "jpeg" and not any(self._windows.images):
                has = ", ".join(map(str, leaves))
                raise ValueError(f'codec="jpeg" is for images, uint8 with 1 or 3 channels, not {has}; use "zstd"')
            window = self._window or steps_of_window(leaves)
            self._block = [np.empty((window, *leaf.shape), leaf.stored) for leaf in leaves]
        return self._block

    def sync(self) -> None:
        for writer in self._writers:
            writer.flush()

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for writer in self._writers:
                stack.callback(writer.close)
            self.sync()


class _Writer:
    """Writer of one database. A commit waits for the disk."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._opened: Any = None
        self.count = 0
        self._written = 0  # number of values, including those of a stream that failed
        self._pending: list[bytes] = []  # the last values before `count`, not written yet
        self._pending_bytes = 0

    def put(self, value: bytes) -> None:
        self._pending.append(value)
        self._pending_bytes += len(value)
        self.count += 1
        if self._pending_bytes >= _MOST_PENDING_BYTES:
            self.flush()

    def rewind(self, count: int) -> None:
        del self._pending[max(0, len(self._pending) - (self.count - count)) :]
        self._pending_bytes = sum(map(len, self._pending))
        self.count = count

    def flush(self) -> None:
        lmdb = package("lmdb", "writing LMDB", "lmdb")
        while self._pending:
            try:
                if self._opened is None:
                    self._opened = lmdb.open(self._path, subdir=False, lock=False, map_size=_FIRST_MAP_BYTES)
                with self._opened.begin(write=True) as transaction:
                    for number, value in enumerate(self._pending, self.count - len(self._pending)):
                        transaction.put(number.to_bytes(8, "big"), value, append=number >= self._written)
            except lmdb.MapFullError:
                self._opened.set_mapsize(2 * self._opened.info()["map_size"])
            except lmdb.Error as error:
                raise self._failed(error) from error
            else:
                self._written = max(self._written, self.count)
                self._pending, self._pending_bytes = [], 0

    def _failed(self, error: Any) -> Exception:
        """Return the system's error if there was one, such as a full disk, else a StoreError."""
        if (code := error.code) <= 0:
            return StoreError(f"{self._path} cannot be written: {error}")
        if shutil.disk_usage(os.path.dirname(self._path)).free < self._pending_bytes:
            code = errno.ENOSPC  # LMDB reports this as "Input/output error"
        return OSError(code, f"{os.strerror(code)} ({error}); if the disk is full, make room", self._path)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
