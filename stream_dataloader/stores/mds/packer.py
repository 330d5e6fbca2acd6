"""Packs streams into an MDS dataset, by several processes at once.

Each process writes shards of its own, one stream behind the other. A time step is a sample; a column more has its
stream's key, so that others find the streams, too. What is not yet a whole shard lies in a tail. ::

    layout.json             what items look like, said by the process that had the first one
    shard.3.00000.mds       the first shard of worker 3
    part.3.jsonl            the entries of worker 3's shards, a line each
    tail.3.00001            the samples of its next shard, each behind its size
    streams.mdst            see `table`
    index.json              last of all; layout.json, parts and tails are deleted then

Guarantee: what `sync` was called for is found again by `finish`, whatever became of the process. Samples of streams
that broke off are not in the dataset.
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
from stream_dataloader.stores._base.leaves import LAYOUT
from stream_dataloader.stores._base.packing import StreamRecord
from stream_dataloader.stores._base.structure import classes_of, from_json, to_json
from stream_dataloader.stores.mds.compression import unpack
from stream_dataloader.stores.mds.encodings import ARRAY_DTYPES
from stream_dataloader.stores.mds.fetch import check_file
from stream_dataloader.stores.mds.index import INDEX, ShardFile, write_index
from stream_dataloader.stores.mds.table import StreamTable, write_table
from stream_dataloader.stores.mds.writer import SampleEncoder, ShardBuilder

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
        self._folder = folder
        self._metadata = {} if metadata is None else dict(metadata)
        json.dumps(self._metadata)
        self._options = {"compression": compression, "hashes": tuple(hashes), "size_limit": size_limit}
        self._encodings = dict(encodings or {})
        self._key_column = key_column
        ShardBuilder(folder, SampleEncoder({key_column: "str", **self._encodings}), **self._options)  # type: ignore[arg-type]

    def part(self, worker: int) -> _Part:
        """See `Packer`."""
        return _Part(self._folder, worker, self._key_column, self._encodings, self._options)

    def finish(self, records: Sequence[StreamRecord]) -> None:
        """See `Packer`. If it was interrupted behind index.json, only what is left over remains to be deleted."""
        if not self._is_finished(records):
            self._finish(records)
        index = read_json(os.path.join(self._folder, INDEX), dict)
        found = [file for shard in index["shards"] for file in (shard["raw_data"], shard["zip_data"]) if file]
        files = {file["basename"] for file in found}
        for name in os.listdir(self._folder):
            if name == LAYOUT or (_OURS.match(name) and name not in files):
                os.unlink(os.path.join(self._folder, name))

    def _is_finished(self, records: Sequence[StreamRecord]) -> bool:
        """Whether an interrupted run has finished the store of these records."""
        if not os.path.exists(os.path.join(self._folder, INDEX)):
            return False
        with suppress(StoreError):
            table = StreamTable(os.path.join(self._folder, _TABLE), None)
            return list(table.steps) == [record.steps for record in records]
        return False

    def _finish(self, records: Sequence[StreamRecord]) -> None:
        agreed = _read_layout(self._folder)
        workers = sorted(int(found[1]) for name in os.listdir(self._folder) if (found := _PART.fullmatch(name)))
        by_worker: dict[int, list[StreamRecord]] = {}
        for record in records:
            if record.steps:
                by_worker.setdefault(record.place["worker"], []).append(record)
        entries: list[dict[str, Any]] = []
        places: dict[int, NDArray[np.int64]] = {}  # of each worker's samples, in the dataset
        count = 0
        for worker in workers:
            assert agreed is not None
            written = _Written(self._folder, worker, _builder(self._folder, agreed, self._options))
            kept = np.zeros(sum(entry["samples"] for entry in written.entries), bool)
            for record in by_worker.get(worker, ()):
                kept[record.place["first"] : record.place["first"] + record.steps] = True
            places[worker] = count + np.cumsum([0, *kept])
            count += int(kept.sum())
            entries += written.only(kept)
        starts = [
            int(places[record.place["worker"]][record.place["first"]]) if record.steps else 0 for record in records
        ]
        _, check = write_table(
            os.path.join(self._folder, _TABLE),
            starts,
            [record.steps for record in records],
            [record.key for record in records],
            [record.metadata for record in records],
        )
        note = {"key": self._key_column, "table": {"basename": _TABLE, "check": check}, "metadata": self._metadata}
        if agreed is not None:
            note |= {"items": {name: agreed[name] for name in ("structure", "columns")}, "bools": agreed["bools"]}
        write_index(self._folder, entries, note)


def _builder(folder: str, agreed: Mapping[str, Any], options: Mapping[str, Any]) -> ShardBuilder:
    return ShardBuilder(folder, SampleEncoder(agreed["encodings"], agreed["bools"]), **options)


class _Part:
    """See `packing.PartPacker`."""

    def __init__(
        self, folder: str, worker: int, key_column: str, encodings: Mapping[str, str], options: Mapping[str, Any]
    ) -> None:
        self._folder = folder
        self._worker = worker
        self._key_column = key_column
        self._given = encodings
        self._options = options
        self._layout: Layout | None = None
        self._encoder: SampleEncoder | None = None
        self._columns: list[str] = []
        self._builder: ShardBuilder | None = None
        self._shards = 0
        self._count = 0  # samples in all shards, and in the one that is collected
        self._lines: BinaryIO | None = None
        self._tail: BinaryIO | None = None
        self._in_tail = 0

    def write(self, number: int, key: str, items: Iterator[Any]) -> tuple[int, Any]:
        """See `PartPacker`."""
        del number
        steps, first, shards = 0, self._count, self._shards
        text = key.encode("utf-8", "backslashreplace").decode()
        try:
            for item in items:
                self._add(item, steps, text)
                steps += 1
        except BaseException:
            if self._shards == shards and self._builder is not None:
                self._builder.drop(len(self._builder.samples) - steps)
                self._count = first
            raise  # what is in a shard already is left out by `finish`
        return steps, {"worker": self._worker, "first": first}

    def _add(self, item: Any, step: int, key: str) -> None:
        if self._layout is None:
            self._adopt(item)
        layout, encoder, builder = self._layout, self._encoder, self._builder
        assert layout is not None
        assert encoder is not None
        assert builder is not None
        try:
            leaves = layout.read(item)
        except Misfit as error:
            raise ValueError(f"step {step}: {error}, as all steps of a store must be alike") from error
        try:
            sample = encoder.encode({self._key_column: key, **dict(zip(self._columns, leaves, strict=True))})
        except (TypeError, ValueError) as error:
            raise type(error)(f"step {step}: {error}") from error
        if builder.is_full(sample):
            self._flush()
        builder.add(sample)
        self._count += 1

    def _adopt(self, item: Any) -> None:
        """Have the columns of the store's first item, whichever process has it."""
        layout, leaves = Layout.of(item, windowed=False)
        columns = _column_names(layout.structure, self._key_column)
        encodings, bools = {self._key_column: "str"}, []
        for name, path, spec, leaf in zip(columns, layout.paths, layout.specs, leaves, strict=True):
            encodings[name] = self._given.get(name) or _encoding_for(path, spec.dtype, spec.shape, leaf)
            if spec.dtype == torch.bool and name not in self._given:
                bools.append(name)
        if unknown := sorted(self._given.keys() - encodings.keys()):
            raise ValueError(f"encodings names {unknown}, and items have the columns {columns}")
        content = {"structure": to_json(layout.structure), "columns": columns, "encodings": encodings, "bools": bools}
        write_once(os.path.join(self._folder, LAYOUT), content)
        agreed = _read_layout(self._folder)
        assert agreed is not None
        structure = from_json(agreed["structure"], os.path.join(self._folder, LAYOUT), classes_of(layout.structure))
        if structure != layout.structure:
            raise ValueError(f"an item has the leaves {layout.paths}, and the store's first has {agreed['columns']}")
        self._layout, self._columns = layout, columns
        self._builder = _builder(self._folder, agreed, self._options)
        self._encoder = SampleEncoder(agreed["encodings"], agreed["bools"])
        self._lines = open(os.path.join(self._folder, f"part.{self._worker}.jsonl"), "ab")  # noqa: SIM115

    def _flush(self) -> None:
        """Write a shard, enter it, and delete the tail, in this order."""
        assert self._builder is not None
        assert self._lines is not None
        entry = self._builder.write(_shard_name(self._worker, self._shards))
        self._lines.write(json.dumps(entry).encode() + b"\n")
        self._lines.flush()
        os.fsync(self._lines.fileno())
        if self._tail is not None:
            self._tail.close()
            os.unlink(_tail_path(self._folder, self._worker, self._shards))
        self._tail, self._in_tail = None, 0
        self._shards += 1

    def sync(self) -> None:
        """See `PartPacker`."""
        samples = self._builder.samples if self._builder is not None else []
        if len(samples) == self._in_tail:
            return
        if self._tail is None:
            self._tail = open(_tail_path(self._folder, self._worker, self._shards), "wb")  # noqa: SIM115
        for sample in samples[self._in_tail :]:
            self._tail.write(len(sample).to_bytes(4, "little") + sample)
        self._tail.flush()
        os.fsync(self._tail.fileno())
        self._in_tail = len(samples)

    def close(self) -> None:
        """See `PartPacker`."""
        if self._builder is not None and self._builder.samples:
            self._flush()
        for file in (self._lines, self._tail):
            if file is not None:
                file.close()
        self._layout = self._builder = self._lines = self._tail = None


def _shard_name(worker: int, shard: int) -> str:
    return f"shard.{worker}.{shard:05}"


def _tail_path(folder: str, worker: int, shard: int) -> str:
    return os.path.join(folder, f"tail.{worker}.{shard:05}")


class _Written:
    """What a worker has written, whatever became of it.

    Args:
        folder: The store's.
        worker: Its number.
        builder: Writes shards.

    Attributes:
        entries: Of its shards.
    """

    def __init__(self, folder: str, worker: int, builder: ShardBuilder) -> None:
        self._folder = folder
        self._worker = worker
        self._builder = builder
        self.entries: list[dict[str, Any]] = []
        with open(os.path.join(folder, f"part.{worker}.jsonl"), "rb") as lines:
            for line in lines:
                with suppress(ValueError):  # the last one may be cut off
                    self.entries.append(json.loads(line))
        tail = _tail_path(folder, worker, len(self.entries))
        if os.path.exists(tail):
            with open(tail, "rb") as file:
                while len(size := file.read(4)) == 4:
                    sample = file.read(length := int.from_bytes(size, "little"))
                    if len(sample) == length:
                        builder.add(sample)
            if builder.samples:
                self.entries.append(builder.write(_shard_name(worker, len(self.entries))))

    def only(self, kept: NDArray[np.bool_]) -> list[dict[str, Any]]:
        """The entries of shards that hold some of the samples; a shard that has others too is written without them."""
        found, first = [], 0
        for number, entry in enumerate(self.entries):
            here = kept[first : first + entry["samples"]]
            first += entry["samples"]
            if here.all():
                found.append(entry)
            elif here.any():
                raw = self._raw(entry)
                offsets = np.frombuffer(raw, "<u4", entry["samples"] + 1, 4).tolist()
                for sample in np.flatnonzero(here).tolist():
                    self._builder.add(raw[offsets[sample] : offsets[sample + 1]])
                found.append(self._builder.write(f"{_shard_name(self._worker, number)}.kept"))
        return found

    def _raw(self, entry: Mapping[str, Any]) -> bytes:
        """A shard's bytes, unpacked."""
        source = ShardFile(**(entry["zip_data"] or entry["raw_data"]))
        path = os.path.join(self._folder, source.basename)
        data = check_file(source, path, path)
        if entry["compression"] is None:
            return data
        return b"".join(unpack(entry["compression"], data, entry["raw_data"]["bytes"], path))


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


def _read_layout(folder: str) -> dict[str, Any] | None:
    """What the process that had the first item said of items; None if there was no item."""
    path = os.path.join(folder, LAYOUT)
    return dict(read_json(path, dict)) if os.path.exists(path) else None
