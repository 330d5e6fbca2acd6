"""Packs streams into an MDS dataset, by several processes at once.

Each process writes shards of its own, one stream behind the other: a time step is a sample, and a column more has its
stream's key, so that others find the streams, too. ::

    layout.json             what items look like, said by the process that had the first one
    shard.3.00000.mds       the first shard of worker 3
    streams.mdst            see `streams`
    index.json              last of all; layout.json is deleted then

Guarantee: of the shards that are written from one `sync` to the next, all streams are packed, or none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from stream_dataloader._items.layout import DTYPES_OF_NUMPY, Layout
from stream_dataloader._items.structure import Misfit, Node, leaf_paths
from stream_dataloader.stores._base.files import read_json, write_once
from stream_dataloader.stores._base.leaves import LAYOUT, check_not_empty
from stream_dataloader.stores._base.packing import StreamRecord
from stream_dataloader.stores._base.structure import classes_of, from_json, to_json
from stream_dataloader.stores.mds.encodings import ARRAY_DTYPES
from stream_dataloader.stores.mds.index import INDEX, write_index
from stream_dataloader.stores.mds.streams import write_table
from stream_dataloader.stores.mds.writer import ShardWriter

__all__ = ["MdsPacker"]

_TABLE = "streams.mdst"


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
        self._options: dict[str, Any] = {
            "compression": compression,
            "hashes": hashes,
            "size_limit": size_limit,
        }
        self._encodings = dict(encodings or {})
        self.key_column = key_column
        ShardWriter(folder, {key_column: "str", **self._encodings}, **self._options)

    def part(self, worker: int) -> _Part:
        """See `Packer`."""
        return _Part(self, worker)

    def writer(self, name: str, agreed: Mapping[str, Any]) -> ShardWriter:
        """Writes shards as it was agreed on."""
        return ShardWriter(self.folder, agreed["encodings"], name=name, bools=agreed["bools"], **self._options)

    def agree(self, item: Any) -> tuple[Layout, list[str], dict[str, Any]]:
        """What an item looks like, the names of its columns, and what the process that had the first item said."""
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
        path = os.path.join(self.folder, LAYOUT)
        said = {"columns": columns, "encodings": encodings, "bools": bools}
        write_once(path, {"structure": to_json(layout.structure), **said})
        agreed: dict[str, Any] = read_json(path, dict)
        if from_json(agreed["structure"], path, classes_of(layout.structure)) != layout.structure:
            raise ValueError(f"an item has the leaves {layout.paths}, and the store's first has {agreed['columns']}")
        return layout, columns, agreed

    def finish(self, records: Sequence[StreamRecord], synced: Sequence[Any]) -> None:
        """See `Packer`."""
        layout = os.path.join(self.folder, LAYOUT)
        entries, first_of, total = [], {}, 0
        for group in filter(None, synced):
            first_of[group["group"]] = total
            entries += group["shards"]
            total += sum(entry["samples"] for entry in group["shards"])
        if not os.path.exists(os.path.join(self.folder, INDEX)):
            note: dict[str, Any] = {"key": self.key_column, "metadata": self._metadata}
            if os.path.exists(layout):
                agreed = read_json(layout, dict)
                note["items"] = {name: agreed[name] for name in ("structure", "columns")}
                note["bools"] = agreed["bools"]
            check = write_table(
                os.path.join(self.folder, _TABLE),
                [first_of[one.place["group"]] + one.place["first"] if one.steps else 0 for one in records],
                [one.steps for one in records],
                [one.key for one in records],
                [one.metadata for one in records],
            )
            note["table"] = {"basename": _TABLE, "check": check}
            write_index(self.folder, entries, note)
        files = {(entry["zip_data"] or entry["raw_data"])["basename"] for entry in entries}
        for name in {*os.listdir(self.folder)} - {*files, INDEX, _TABLE}:
            os.unlink(os.path.join(self.folder, name))


class _Part:
    """See `packing.PartPacker`. To sync it ends a shard, so that is done now and then."""

    sync_seconds = 30.0

    def __init__(self, packer: MdsPacker, worker: int) -> None:
        self._packer = packer
        self._worker = worker
        self._layout: Layout | None = None
        self._columns: list[str] = []
        self._syncs = self._count = 0  # and samples since the last one
        self._entered = 0  # shards that were synced

    def write(self, number: int, key: str, items: Iterable[Any]) -> tuple[int, Any]:
        """See `PartPacker`."""
        del number
        steps, writer = 0, None
        text = key.encode("utf-8", "backslashreplace").decode()
        try:
            for item in items:
                if self._layout is None:
                    self._layout, columns, agreed = self._packer.agree(item)
                    self._columns = [self._packer.key_column, *columns]
                    self._writer = self._packer.writer(f"shard.{self._worker}", agreed)
                if writer is None:
                    writer = self._writer
                    writer.begin()
                try:
                    leaves = self._layout.read(item)
                    sample = writer.encode(dict(zip(self._columns, (text, *leaves), strict=True)))
                except Misfit as error:
                    raise ValueError(f"step {steps}: {error}, as all steps of a store must be alike") from error
                except (TypeError, ValueError) as error:
                    raise type(error)(f"step {steps}: {error}") from error
                writer.add(sample)
                steps += 1
        except BaseException:
            if writer is not None:
                writer.take_back()
            raise
        place = {"group": self._group, "first": self._count}
        self._count += steps
        return steps, place

    @property
    def _group(self) -> str:
        return f"{self._worker}.{self._syncs}"

    def sync(self) -> Any:
        """See `PartPacker`."""
        if self._layout is None:
            return None
        self._writer.flush()
        synced = {"group": self._group, "shards": self._writer.entries[self._entered :]}
        self._entered += len(synced["shards"])
        self._syncs, self._count = self._syncs + 1, 0
        return synced

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
