"""Packs streams into an MDS dataset, by several processes at once.

Each process writes shards of its own, one stream behind the other: a time step is a sample, and a column more has its
stream's key, so that others find the streams, too. What is not yet a whole shard lies in a tail. ::

    layout.json             what items look like, said by the process that had the first one
    shard.3.00000.mds       the first shard of worker 3
    part.3.jsonl            the entries of worker 3's shards, a line each
    tail.3.00001            the samples of its next shard, each behind its size (uint32, little-endian)
    streams.mdst            see `streams`
    index.json              last of all; layout.json, parts and tails are deleted then

Guarantee: what `sync` was called for is in a shard whose entry is in a part, or in a tail, and found again by `finish`,
whatever became of the process. Samples of streams that broke off are not in the dataset.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from stream_dataloader._items.layout import DTYPES_OF_NUMPY, Layout
from stream_dataloader._items.structure import Misfit, Node, leaf_paths
from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.files import read_json, write_once
from stream_dataloader.stores._base.leaves import LAYOUT, check_not_empty
from stream_dataloader.stores._base.packing import StreamRecord
from stream_dataloader.stores._base.structure import classes_of, from_json, to_json
from stream_dataloader.stores.mds.codecs import unpack
from stream_dataloader.stores.mds.encodings import ARRAY_DTYPES
from stream_dataloader.stores.mds.fetch import checked
from stream_dataloader.stores.mds.index import INDEX, ShardFile, write_index
from stream_dataloader.stores.mds.streams import StreamTable, write_table
from stream_dataloader.stores.mds.writer import ShardWriter

__all__ = ["MdsPacker"]

_TABLE = "streams.mdst"
_OURS = re.compile(r"(part|tail|shard)\.\d")
_PART = re.compile(r"part\.(\d+)\.jsonl")


class MdsPacker:
    """See `packing.Packer`.

    Args:
        folder: Where to write.
        metadata: Of the whole store, as JSON can hold it.
        compression: See `MdsWriter`.
        hashes: See `MdsWriter`.
        size_limit: See `MdsWriter`.
        encodings: Of columns whose encoding is not to be that of their values, such as `{"image": "png"}`. A column's
            name is the keys that lead to its leaf, with dots between them; that of items that are one leaf is "data".
        key_column: The name of the column that has the streams' keys.

    Raises:
        ValueError: An option has another value.
        ImportError: A package is missing for the compression or a hash.
    """

    def __init__(
        self,
        folder: str,
        *,
        metadata: Mapping[str, Any] | None = None,
        compression: str | None = None,
        hashes: Sequence[str] = ("sha1",),
        size_limit: int | str | None = 1 << 26,
        encodings: Mapping[str, str] | None = None,
        key_column: str = "__key__",
    ) -> None:
        self.folder = folder
        self._metadata = {} if metadata is None else dict(metadata)
        json.dumps(self._metadata)
        self._options: dict[str, Any] = {"compression": compression, "hashes": hashes, "size_limit": size_limit}
        self.encodings = dict(encodings or {})
        self.key_column = key_column
        ShardWriter(folder, {key_column: "str", **self.encodings}, **self._options)

    def part(self, worker: int) -> _Part:
        """See `Packer`."""
        return _Part(self, worker)

    def path(self, name: str) -> str:
        """The path of a file."""
        return os.path.join(self.folder, name)

    def agreed(self) -> dict[str, Any] | None:
        """What the process that had the first item said of items; None if there was no item."""
        path = self.path(LAYOUT)
        return dict(read_json(path, dict)) if os.path.exists(path) else None

    def writer(self, agreed: Mapping[str, Any]) -> ShardWriter:
        """Writes shards as it was agreed on."""
        return ShardWriter(self.folder, agreed["encodings"], bools=agreed["bools"], **self._options)

    def finish(self, records: Sequence[StreamRecord]) -> None:
        """See `Packer`. If it was interrupted behind index.json, only what is left over remains to be deleted."""
        if not self._is_finished(records):
            self._finish(records)
        index = read_json(self.path(INDEX), dict)
        files = {
            file["basename"] for shard in index["shards"] for file in (shard["raw_data"], shard["zip_data"]) if file
        }
        for name in os.listdir(self.folder):
            if name == LAYOUT or (_OURS.match(name) and name not in files):
                os.unlink(self.path(name))

    def _is_finished(self, records: Sequence[StreamRecord]) -> bool:
        """Whether an interrupted run has finished the store of these records."""
        with suppress(StoreError):
            table = StreamTable(self.path(_TABLE), None)
            return os.path.exists(self.path(INDEX)) and table.steps.tolist() == [record.steps for record in records]
        return False

    def _finish(self, records: Sequence[StreamRecord]) -> None:
        note: dict[str, Any] = {"key": self.key_column, "metadata": self._metadata}
        entries: list[dict[str, Any]] = []
        starts = np.zeros(len(records), np.int64)
        if (agreed := self.agreed()) is not None:
            note |= {"items": {name: agreed[name] for name in ("structure", "columns")}, "bools": agreed["bools"]}
            for worker in sorted(int(found[1]) for name in os.listdir(self.folder) if (found := _PART.fullmatch(name))):
                written = _Written(self, worker, self.writer(agreed))
                here = [at for at, one in enumerate(records) if one.steps and one.place["worker"] == worker]
                places = [(records[at].place["first"], records[at].steps) for at in here]
                count = sum(entry["samples"] for entry in entries)
                kept = np.zeros(sum(entry["samples"] for entry in written.entries), bool)
                for first, steps in places:
                    kept[first : first + steps] = True
                before = count + np.cumsum([0, *kept])
                starts[here] = [before[first] for first, _ in places]
                entries += written.only(kept)
        columns = (
            zip(*((one.steps, one.key, one.metadata) for one in records), strict=True) if records else ((), (), ())
        )
        note["table"] = {"basename": _TABLE, "check": write_table(self.path(_TABLE), starts, *columns)}
        write_index(self.folder, entries, note)


class _Part:
    """See `packing.PartPacker`."""

    def __init__(self, packer: MdsPacker, worker: int) -> None:
        self._packer = packer
        self._worker = worker
        self._layout: Layout | None = None
        self._columns: list[str] = []
        self._shards = self._count = 0  # samples in all shards, and in the one that is collected
        self._in_tail = 0
        self._tail: BinaryIO | None = None

    def write(self, number: int, key: str, items: Iterator[Any]) -> tuple[int, Any]:
        """See `PartPacker`. What is written of a stream that breaks off, `finish` leaves out."""
        del number
        steps, first = 0, self._count
        text = key.encode("utf-8", "backslashreplace").decode()
        for item in items:
            if self._layout is None:
                self._layout = self._adopt(item)
            try:
                leaves = self._layout.read(item)
                sample = self._writer.encode(
                    {self._packer.key_column: text, **dict(zip(self._columns, leaves, strict=True))}
                )
            except Misfit as error:
                raise ValueError(f"step {steps}: {error}, as all steps of a store must be alike") from error
            except (TypeError, ValueError) as error:
                raise type(error)(f"step {steps}: {error}") from error
            if self._writer.is_full(sample):
                self._flush()
            self._writer.add(sample)
            self._count += 1
            steps += 1
        return steps, {"worker": self._worker, "first": first}

    def _adopt(self, item: Any) -> Layout:
        """Have the columns of the store's first item, whichever process has it."""
        layout, leaves = Layout.of(item, windowed=False)
        check_not_empty(layout, item)
        packer = self._packer
        columns = _column_names(layout.structure, packer.key_column)
        encodings, bools = {packer.key_column: "str"}, []
        for name, path, spec, leaf in zip(columns, layout.paths, layout.specs, leaves, strict=True):
            encodings[name] = packer.encodings.get(name) or _encoding_for(path, spec.dtype, spec.shape, leaf)
            if spec.dtype == torch.bool and name not in packer.encodings:
                bools.append(name)
        if unknown := sorted(packer.encodings.keys() - encodings.keys()):
            raise ValueError(f"encodings names {unknown}, and items have the columns {columns}")
        content = {"structure": to_json(layout.structure), "columns": columns, "encodings": encodings, "bools": bools}
        write_once(packer.path(LAYOUT), content)
        agreed = packer.agreed()
        assert agreed is not None
        structure = from_json(agreed["structure"], packer.path(LAYOUT), classes_of(layout.structure))
        if structure != layout.structure:
            raise ValueError(f"an item has the leaves {layout.paths}, and the store's first has {agreed['columns']}")
        self._columns = columns
        self._writer = packer.writer(agreed)
        self._lines = open(packer.path(f"part.{self._worker}.jsonl"), "ab")  # noqa: SIM115
        return layout

    def _tail_path(self) -> str:
        return self._packer.path(f"tail.{self._worker}.{self._shards:05}")

    def _flush(self) -> None:
        """Write a shard, enter it, and delete the tail, in this order."""
        entry = self._writer.write(f"shard.{self._worker}.{self._shards:05}")
        self._lines.write(json.dumps(entry).encode() + b"\n")
        self._lines.flush()
        os.fsync(self._lines.fileno())
        if self._tail is not None:
            self._tail.close()
            os.unlink(self._tail_path())
        self._tail, self._in_tail = None, 0
        self._shards += 1

    def sync(self) -> None:
        """See `PartPacker`."""
        if self._layout is None or len(self._writer.samples) == self._in_tail:
            return
        if self._tail is None:
            self._tail = open(self._tail_path(), "wb")  # noqa: SIM115
        for sample in self._writer.samples[self._in_tail :]:
            self._tail.write(len(sample).to_bytes(4, "little") + sample)
        self._tail.flush()
        os.fsync(self._tail.fileno())
        self._in_tail = len(self._writer.samples)

    def close(self) -> None:
        """See `PartPacker`."""
        if self._layout is not None:
            if self._writer.samples:
                self._flush()
            self._lines.close()
            self._layout = None


class _Written:
    """What a worker has written, whatever became of it.

    Args:
        packer: The store's.
        worker: Its number.
        writer: Writes shards.

    Attributes:
        entries: Of its shards.
    """

    def __init__(self, packer: MdsPacker, worker: int, writer: ShardWriter) -> None:
        self._packer = packer
        self._worker = worker
        self._writer = writer
        self.entries: list[dict[str, Any]] = []
        with open(packer.path(f"part.{worker}.jsonl"), "rb") as lines:
            for line in lines:
                with suppress(ValueError):  # the last one may be cut off
                    self.entries.append(json.loads(line))
        number = len(self.entries)
        with suppress(FileNotFoundError), open(packer.path(f"tail.{worker}.{number:05}"), "rb") as file:
            while len(size := file.read(4)) == 4:
                sample = file.read(length := int.from_bytes(size, "little"))
                if len(sample) == length:
                    writer.add(sample)
        if writer.samples:
            self.entries.append(writer.write(f"shard.{worker}.{number:05}"))

    def only(self, kept: NDArray[np.bool_]) -> list[dict[str, Any]]:
        """The entries of shards that hold some of the samples; a shard that has others too is written without them."""
        found, first = [], 0
        for number, entry in enumerate(self.entries):
            here = kept[first : first + entry["samples"]]
            first += entry["samples"]
            if not here.all() and here.any():
                raw = self._raw(entry)
                offsets = np.frombuffer(raw, "<u4", entry["samples"] + 1, 4).tolist()
                for sample in np.flatnonzero(here).tolist():
                    self._writer.add(bytes(raw[offsets[sample] : offsets[sample + 1]]))
                found.append(self._writer.write(f"shard.{self._worker}.{number:05}.kept"))
            elif here.any():
                found.append(entry)
        return found

    def _raw(self, entry: Mapping[str, Any]) -> Any:
        """A shard's bytes, unpacked."""
        source = ShardFile(**(entry["zip_data"] or entry["raw_data"]))
        path = self._packer.path(source.basename)
        data = checked(source, path, path)
        if entry["compression"] is None:
            return data
        return unpack(entry["compression"], data, entry["raw_data"]["bytes"], path)


def _column_names(structure: Node, key_column: str) -> list[str]:
    """A name for each leaf: the keys that lead to it, with dots between them."""
    names = _dotted(structure)
    if len(set(names)) < len(names) or key_column in names:
        names = leaf_paths(structure)
    return names


def _dotted(node: Node, before: str = "") -> list[str]:
    if node.type is None:
        return [before or "data"]
    return [
        name
        for key, child in zip(node.keys, node.children, strict=True)
        for name in _dotted(child, f"{before}.{key}" if before else str(key))
    ]


def _encoding_for(path: str, dtype: torch.dtype | None, shape: tuple[int, ...], leaf: Any) -> str:
    """How to encode a leaf.

    Raises:
        TypeError: MDS has no encoding for it.
    """
    if dtype is None:
        kind = {str: "str", bytes: "bytes", list: "json", type(None): "json"}.get(type(leaf))
        if kind is None:
            raise TypeError(f"{path} is a {type(leaf).__name__}, which MDS does not hold; turn it into numbers or text")
        return kind
    name = "uint8" if dtype == torch.bool else DTYPES_OF_NUMPY[dtype].name if dtype in DTYPES_OF_NUMPY else ""
    if name not in ARRAY_DTYPES.values() or 0 in shape:
        raise TypeError(
            f"{path} is {str(dtype).removeprefix('torch.')} {shape}, which MDS does not hold; it has "
            f"{', '.join(ARRAY_DTYPES.values())} with at least one number: convert it, with transform="
        )
    if not shape:
        return "int" if type(leaf) is int else name
    return f"ndarray:{name}:{','.join(map(str, shape))}"
