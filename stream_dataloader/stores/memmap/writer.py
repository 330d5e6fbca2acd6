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

from stream_dataloader._items.layout import Layout, Spec
from stream_dataloader._items.structure import Misfit
from stream_dataloader.stores._base.files import read_json
from stream_dataloader.stores._base.packing import StreamRecord
from stream_dataloader.stores.memmap.header import (
    KEYS,
    NOTES,
    ROWS,
    STREAMS,
    LeafSpec,
    crc_of,
    leaf_file,
    leaf_spec,
    write_header,
)
from stream_dataloader.stores.memmap.structure import classes_of, from_json, to_json

__all__ = ["MemmapPacker"]

_LAYOUT, _ROOM = "layout.json", "room"

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
        structure, specs = _read_layout(self._folder) or (None, ())
        places = [record.place or {"start": 0, "crcs": [0] * len(specs)} for record in records]
        texts = {
            KEYS: [record.key.encode("utf-8", "backslashreplace") for record in records],
            NOTES: [json.dumps(record.metadata).encode() if record.metadata else b"" for record in records],
        }
        table = np.zeros((len(ROWS) + len(specs), len(records)), "<i8")
        if records:
            table[0] = [place["start"] for place in places]
            table[1] = [record.steps for record in records]
            table[2] = np.cumsum([len(key) for key in texts[KEYS]])
            table[3] = np.cumsum([len(note) for note in texts[NOTES]])
            table[len(ROWS) :] = np.array([place["crcs"] for place in places]).T
        steps = int((table[0] + table[1]).max(initial=0))
        for leaf, spec in enumerate(specs):
            os.truncate(os.path.join(self._folder, leaf_file(leaf)), steps * spec.step_bytes)
        contents = {STREAMS: table.tobytes(), KEYS: b"".join(texts[KEYS]), NOTES: b"".join(texts[NOTES])}
        for name, content in contents.items():
            with open(os.path.join(self._folder, name), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        checksums = {name: (crc_of(content), len(content)) for name, content in contents.items()}
        write_header(self._folder, structure, specs, checksums, len(records), steps, self._metadata)
        for name in (_LAYOUT, _ROOM):
            if os.path.exists(path := os.path.join(self._folder, name)):
                os.unlink(path)


class _Part:
    """See `packing.PartPacker`."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._layout: Layout | None = None
        self._specs: tuple[LeafSpec, ...] = ()
        self._files: list[int] = []

    def write(self, number: int, key: str, items: Iterator[Any]) -> tuple[int, Any]:
        """See `PartPacker`."""
        del number, key
        collected: list[_Collected] = []
        steps = 0
        try:
            for item in items:
                for one, leaf in zip(self._collected(item, collected), self._read(item, steps), strict=True):
                    one.add(leaf)
                steps += 1
            if not steps:
                return 0, None
            start = self._take_room(steps)
            for one, spec, file in zip(collected, self._specs, self._files, strict=True):
                one.write(file, start * spec.step_bytes)
            return steps, {"start": start, "crcs": [one.crc for one in collected]}
        finally:
            for one in collected:
                one.close()

    def _collected(self, item: Any, collected: list[_Collected]) -> list[_Collected]:
        if self._layout is None:
            self._adopt(item)
        if not collected:
            collected += [_Collected(spec, self._folder) for spec in self._specs]
        return collected

    def _adopt(self, item: Any) -> None:
        """Have the layout of the store's first item, whichever process has it, and open the leaves' files."""
        layout, _ = Layout.of(item, windowed=False)
        objects = [path for path, spec in zip(layout.paths, layout.specs, strict=True) if spec.dtype is None]
        if objects:
            raise TypeError(
                f"{', '.join(objects)}: a memory-mapped store holds numbers, and this is an object such as a string; "
                "leave it out or turn it into numbers, with transform="
            )
        _write_layout(self._folder, layout)
        found = _read_layout(self._folder)
        assert found is not None
        structure, self._specs = found
        node = from_json(structure, os.path.join(self._folder, _LAYOUT), classes_of(layout.structure))
        self._layout = Layout(node, tuple(Spec(spec.dtype, spec.shape) for spec in self._specs), windowed=False)
        self._files = [
            os.open(os.path.join(self._folder, leaf_file(leaf)), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
            for leaf in range(len(self._specs))
        ]

    def _read(self, item: Any, step: int) -> Sequence[Any]:
        assert self._layout is not None
        try:
            return self._layout.read(item)
        except Misfit as error:
            raise ValueError(f"step {step}: {error}, as all steps of a store must be alike") from error

    def _take_room(self, steps: int) -> int:
        """Room at the end of all leaves; returns its first step."""
        with open(os.open(os.path.join(self._folder, _ROOM), os.O_RDWR | os.O_CREAT, 0o666), "rb+", 0) as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            before = int.from_bytes(file.read(8), "little")
            for descriptor, spec in zip(self._files, self._specs, strict=True):
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
        self._layout = None
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


def _write_layout(folder: str, layout: Layout) -> None:
    """Say what items look like, unless another process has."""
    content = {
        "structure": to_json(layout.structure),
        "leaves": [{"dtype": str(spec.dtype).removeprefix("torch."), "shape": spec.shape} for spec in layout.specs],
    }
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
        json.dump(content, file)
    try:
        os.link(file.name, os.path.join(folder, _LAYOUT))  # whole, or there already
    except FileExistsError:
        pass
    finally:
        os.unlink(file.name)


def _read_layout(folder: str) -> tuple[Any, tuple[LeafSpec, ...]] | None:
    """An item's structure, as JSON, and its leaves; None if there was no item."""
    if not os.path.exists(path := os.path.join(folder, _LAYOUT)):
        return None
    found = read_json(path, dict)
    return found["structure"], tuple(leaf_spec(leaf) for leaf in found["leaves"])
