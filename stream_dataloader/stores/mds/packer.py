"""Packing of streams into an MDS dataset, by several processes at once.

Each process writes shards. A time step is a sample, and one column has the key of its stream. ::

    shard.3.00000.mds       the first shard of worker 3
    streams.mdst            the samples of each stream
    index.json              written last; see `index`

Guarantee: of the streams between two `sync`s all are packed, or none.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from stream_dataloader._engine.items.layout import DTYPES_OF_NUMPY, Layout
from stream_dataloader._engine.items.structure import Node, flatten, leaf_paths
from stream_dataloader.stores._base.packing import StreamRecord, agreed, first_layout, leaves_of, said_in
from stream_dataloader.stores.mds.encodings import ARRAY_DTYPES
from stream_dataloader.stores.mds.index import INDEX, write_index, write_table
from stream_dataloader.stores.mds.writer import ShardWriter

__all__ = ["MdsPacker"]

_TABLE = "streams.mdst"


class MdsPacker:
    """See `packing.Packer`.

    Args:
        folder: Folder to write to.
        metadata: Metadata of the whole store for JSON.
        compression: See `MdsWriter`.
        hashes: See `MdsWriter`.
        size_limit: See `MdsWriter`. Each worker ends a shard every 30 s.
        encodings: Encodings of columns that replace the default, such as `{"image": "png"}`. The name of
            a column is its leaf's keys, joined by dots, or "data" if an item is one leaf.
        key_column: Name of the column with the streams' keys.

    Raises:
        ValueError: An option has an invalid value.
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
        self._metadata = dict(metadata or {})
        self._options: Any = {"compression": compression, "hashes": hashes, "size_limit": size_limit}
        self._encodings = dict(encodings or {})
        self.key_column = key_column
        ShardWriter(folder, {key_column: "str", **self._encodings}, **self._options)

    def part(self, worker: int) -> _Part:
        return _Part(self, worker)

    def writer(self, item: Any, name: str) -> tuple[Layout, dict[str, Any], ShardWriter]:
        layout = first_layout(item)
        columns = _column_names(layout.structure, self.key_column)
        encodings, bools = {self.key_column: "str"}, []
        for column, path, spec, leaf in zip(columns, layout.paths, layout.specs, flatten(item)[1], strict=True):
            encodings[column] = self._encodings.get(column) or _encoding_for(path, spec.dtype, spec.shape, leaf)
            if spec.dtype == torch.bool and column not in self._encodings:
                bools.append(column)
        if unknown := sorted(self._encodings.keys() - encodings.keys()):
            raise ValueError(f"encodings names {unknown}, and items have the columns {columns}")
        structure, said = agreed(self._folder, layout, columns=columns, encodings=encodings, bools=bools)
        if structure != layout.structure:
            raise ValueError(f"an item has the leaves {layout.paths}, and the store's first has {said['columns']}")
        return layout, said, ShardWriter(self._folder, said["encodings"], name=name, **self._options)

    def finish(self, records: Sequence[StreamRecord], synced: Sequence[Any]) -> list[str]:
        entries, first_of, total = [], {}, 0
        for group in filter(None, synced):
            first_of[group["group"]] = total
            entries += group["shards"]
            total += sum(entry["samples"] for entry in group["shards"])
        check = write_table(
            os.path.join(self._folder, _TABLE),
            [first_of[one.place["group"]] + one.place["first"] if one.steps else 0 for one in records],
            [one.steps for one in records],
            [one.key for one in records],
            [one.metadata for one in records],
        )
        table = {"basename": _TABLE, "check": check}
        note: dict[str, Any] = {"key": self.key_column, "metadata": self._metadata, "table": table}
        if said := said_in(self._folder):
            note["items"] = {name: said[name] for name in ("structure", "columns")}
            note["bools"] = said["bools"]
        write_index(self._folder, entries, note)
        files = [(entry["zip_data"] or entry["raw_data"])["basename"] for entry in entries]
        return [*files, _TABLE, INDEX]


class _Part:
    """Part of a dataset, see `packing.PartPacker`. Each `sync` ends a shard."""

    sync_seconds = 30.0

    def __init__(self, packer: MdsPacker, worker: int) -> None:
        self._packer, self._worker = packer, worker
        self._writer: ShardWriter | None = None
        self._entered = self._count = 0  # number of synced shards, and of samples since the last sync

    def write(self, number: int, key: str, items: Iterable[Any]) -> tuple[int, Any]:
        del number
        steps, text = 0, key.encode("utf-8", "backslashreplace").decode()
        if self._writer is not None:
            self._writer.begin()
        try:
            for item in items:
                if self._writer is None:
                    self._layout, said, self._writer = self._packer.writer(item, f"shard.{self._worker}")
                    self._columns, self._bools = said["columns"], said["bools"]
                sample: dict[str, Any] = {self._packer.key_column: text}
                sample |= zip(self._columns, leaves_of(self._layout, item, steps), strict=True)
                for column in self._bools:
                    sample[column] = np.asarray(sample[column]).astype(np.uint8)
                try:
                    self._writer.add(self._writer.encode(sample))
                except (TypeError, ValueError) as error:
                    raise type(error)(f"step {steps}: {error}") from error
                steps += 1
        except BaseException:
            if self._writer is not None:
                self._writer.take_back()
            raise
        place = {"group": self._group, "first": self._count}
        self._count += steps
        return steps, place

    @property
    def _group(self) -> str:
        return f"{self._worker}.{self._entered}"

    def sync(self) -> Any:
        if self._writer is None:
            return None
        self._writer.flush()
        synced = {"group": self._group, "shards": self._writer.entries[self._entered :]}
        self._entered += len(synced["shards"])
        self._count = 0
        return synced

    close = sync


def _column_names(structure: Node, key_column: str) -> list[str]:
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
    if dtype is None:
        kind = {str: "str", bytes: "bytes", list: "json", type(None): "json"}.get(type(leaf))
        if kind is None:
            raise TypeError(f"{path} is a {type(leaf).__name__}, which MDS does not hold")
        return kind
    name = "uint8" if dtype == torch.bool else DTYPES_OF_NUMPY[dtype].name if dtype in DTYPES_OF_NUMPY else ""
    if name not in ARRAY_DTYPES.values() or 0 in shape:
        what = f"{path} is {str(dtype).removeprefix('torch.')} {shape}, which MDS does not hold"
        raise TypeError(f"{what}; convert it with transform=")
    if not shape:
        return "int" if type(leaf) is int else name
    return f"ndarray:{name}:{','.join(map(str, shape))}"
