"""Packs streams into an MDS dataset, by several processes at once.

Each process writes shards of its own, one stream behind the other: a time step is a sample, and a column more has its
stream's key, so that others find the streams, too. ::

    layout.json             what items look like, said by the process that had the first one
    shard.3.00000.mds       the first shard of worker 3
    part.3.jsonl            the entries of worker 3's shards, a line each
    streams.mdst            see `table`
    index.json              last of all; layout.json and parts are deleted then

Guarantee: what `sync` was called for is in a shard whose entry is in a part. Samples of streams that broke off are not
in the dataset.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stream_dataloader._items.layout import DTYPES_OF_NUMPY, Layout
from stream_dataloader._items.structure import Misfit, Node, leaf_paths
from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.codecs import unpack
from stream_dataloader.stores._base.files import read_json, write_once
from stream_dataloader.stores._base.leaves import LAYOUT, check_not_empty
from stream_dataloader.stores._base.packing import StreamRecord
from stream_dataloader.stores._base.structure import classes_of, from_json, to_json
from stream_dataloader.stores.mds.encodings import ARRAY_DTYPES
from stream_dataloader.stores.mds.index import INDEX, ShardFile, write_index
from stream_dataloader.stores.mds.shards import _checked as checked
from stream_dataloader.stores.mds.streams import write_table
from stream_dataloader.stores.mds.writer import ShardWriter

__all__ = ["MdsPacker"]

_TABLE = "streams.mdst"
_OURS = re.compile(r"(part|shard)\.\d")
_PART = re.compile(r"part\.(\d+)\.jsonl")


class MdsPacker:
    """See `packing.Packer`.

    Args:
        folder: Where to write.
        metadata: Of the whole store, as JSON can hold it.
        compression: See `MdsWriter`.
        hashes: See `MdsWriter`.
        size_limit: See `MdsWriter`. Each worker has shards of its own, and ends one every 30 s.
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
        self._encodings = dict(encodings or {})
        self.key_column = key_column
        ShardWriter(folder, {key_column: "str", **self._encodings}, **self._options)

    def part(self, worker: int) -> _Part:
        """See `Packer`."""
        return _Part(self, worker)

    def path(self, name: str) -> str:
        """The path of a file."""
        return os.path.join(self.folder, name)

    def writer(self, name: str, agreed: Mapping[str, Any]) -> ShardWriter:
        """Writes shards as it was agreed on."""
        return ShardWriter(self.folder, agreed["encodings"], name=name, bools=agreed["bools"], **self._options)

    def agree(self, item: Any) -> tuple[Layout, dict[str, Any]]:
        """What an item looks like, and what was said of items by the process that had the first one."""
        layout, leaves = Layout.of(item, windowed=False)
        check_not_empty(layout, item)
        columns = _column_names(layout.structure, self.key_column)
        encodings, bools = {self.key_column: "str"}, []
        for name, path, spec, leaf in zip(columns, layout.paths, layout.specs, leaves, strict=True):
            encodings[name] = self._encodings.get(name) or _encoding_for(path, spec.dtype, spec.shape, leaf)
            if spec.dtype == torch.bool and name not in self._encodings:
                bools.append(name)
        if unknown := sorted(self._encodings.keys() - encodings.keys()):
            raise ValueError(f"encodings names {unknown}, and items have the columns {columns}")
        content = {"structure": to_json(layout.structure), "columns": columns, "encodings": encodings, "bools": bools}
        write_once(self.path(LAYOUT), content)
        agreed: dict[str, Any] = read_json(self.path(LAYOUT), dict)
        structure = from_json(agreed["structure"], self.path(LAYOUT), classes_of(layout.structure))
        if structure != layout.structure:
            raise ValueError(f"an item has the leaves {layout.paths}, and the store's first has {agreed['columns']}")
        return layout, agreed | {"columns": columns}

    def finish(self, records: Sequence[StreamRecord]) -> None:
        """See `Packer`. If it was interrupted behind index.json, only what is left over remains to be deleted."""
        if not os.path.exists(self.path(INDEX)):
            self._finish(records)
        index = read_json(self.path(INDEX), dict)
        files = {
            file["basename"] for shard in index["shards"] for file in (shard["raw_data"], shard["zip_data"]) if file
        }
        for name in os.listdir(self.folder):
            if name == LAYOUT or (_OURS.match(name) and name not in files):
                os.unlink(self.path(name))

    def _finish(self, records: Sequence[StreamRecord]) -> None:
        note: dict[str, Any] = {"key": self.key_column, "metadata": self._metadata}
        entries: list[dict[str, Any]] = []
        starts = np.zeros(len(records), np.int64)
        if os.path.exists(path := self.path(LAYOUT)):
            agreed = read_json(path, dict)
            note |= {"items": {name: agreed[name] for name in ("structure", "columns")}, "bools": agreed["bools"]}
            total = 0
            for worker in sorted(int(found[1]) for name in os.listdir(self.folder) if (found := _PART.fullmatch(name))):
                here = [at for at, one in enumerate(records) if one.steps and one.place["worker"] == worker]
                written = self._entries(worker)
                kept = np.zeros(sum(entry["samples"] for entry in written), bool)
                for at in here:
                    first, stop = (place := records[at].place["first"]), place + records[at].steps
                    if stop > len(kept):
                        raise StoreError(f"{self.folder} lacks samples of a stream that was packed; pack anew")
                    kept[first:stop] = True
                before = total + np.cumsum([0, *kept])
                starts[here] = [before[records[at].place["first"]] for at in here]
                total = int(before[-1])
                entries += self._only(kept, written, self.writer(f"shard.{worker}.kept", agreed))
        columns = (
            zip(*((one.steps, one.key, one.metadata) for one in records), strict=True) if records else ((), (), ())
        )
        note["table"] = {"basename": _TABLE, "check": write_table(self.path(_TABLE), starts, *columns)}
        write_index(self.folder, entries, note)

    def _entries(self, worker: int) -> list[dict[str, Any]]:
        """The entries of a worker's shards."""
        found = []
        with open(self.path(f"part.{worker}.jsonl"), "rb") as lines:
            for line in lines:
                with suppress(ValueError):  # the last one may be cut off
                    found.append(json.loads(line))
        return found

    def _only(
        self, kept: NDArray[np.bool_], written: Sequence[dict[str, Any]], writer: ShardWriter
    ) -> list[dict[str, Any]]:
        """The entries of shards that hold some of the samples; a shard that has others too is written without them."""
        found, first = [], 0
        for entry in written:
            here = kept[first : first + entry["samples"]]
            first += entry["samples"]
            if here.all():
                found.append(entry)
            elif here.any():
                raw = self._raw(entry)
                offsets = np.frombuffer(raw, "<u4", entry["samples"] + 1, 4).tolist()
                for sample in np.flatnonzero(here).tolist():
                    writer.add(bytes(raw[offsets[sample] : offsets[sample + 1]]))
                writer.flush()
                found.append(writer.entries[-1])
        return found

    def _raw(self, entry: Mapping[str, Any]) -> Any:
        """A shard's bytes, unpacked."""
        source = ShardFile(**(entry["zip_data"] or entry["raw_data"]))
        path = self.path(source.basename)
        data = checked(source, path, path)
        if entry["compression"] is None:
            return data
        return unpack(entry["compression"], data, entry["raw_data"]["bytes"], path)


class _Part:
    """See `packing.PartPacker`. To sync it ends a shard, so that is done now and then."""

    sync_seconds = 30.0

    def __init__(self, packer: MdsPacker, worker: int) -> None:
        self._packer = packer
        self._worker = worker
        self._layout: Layout | None = None
        self._columns: list[str] = []
        self._count = self._entered = 0  # samples that were written, and shards whose entries were

    def write(self, number: int, key: str, items: Iterable[Any]) -> tuple[int, Any]:
        """See `PartPacker`. What is written of a stream that breaks off, `finish` leaves out."""
        del number
        steps, first = 0, self._count
        text = key.encode("utf-8", "backslashreplace").decode()
        for item in items:
            if self._layout is None:
                self._layout, agreed = self._packer.agree(item)
                self._columns = [self._packer.key_column, *agreed["columns"]]
                self._writer = self._packer.writer(f"shard.{self._worker}", agreed)
            try:
                leaves = self._layout.read(item)
                sample = self._writer.encode(dict(zip(self._columns, (text, *leaves), strict=True)))
            except Misfit as error:
                raise ValueError(f"step {steps}: {error}, as all steps of a store must be alike") from error
            except (TypeError, ValueError) as error:
                raise type(error)(f"step {steps}: {error}") from error
            self._writer.add(sample)
            self._count += 1
            steps += 1
        return steps, {"worker": self._worker, "first": first}

    def sync(self) -> None:
        """See `PartPacker`."""
        if self._layout is None:
            return
        self._writer.flush()
        new = self._writer.entries[self._entered :]
        self._entered += len(new)
        if new:
            with open(self._packer.path(f"part.{self._worker}.jsonl"), "ab") as lines:
                lines.write(b"".join(json.dumps(entry).encode() + b"\n" for entry in new))
                lines.flush()
                os.fsync(lines.fileno())

    close = sync


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
    """How to encode a leaf."""
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
