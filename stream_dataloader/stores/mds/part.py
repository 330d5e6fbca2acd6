"""What one of several processes writes while streams are packed into an MDS dataset.

A time step is a sample; a column more has its stream's key, so that others find the streams, too. What is not yet a
whole shard lies in a tail, each sample behind its size (uint32, little-endian). `packer` shows all files.

Guarantee: what `sync` was called for is in a shard whose entry is in the part's list, or in the tail.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import torch

from stream_dataloader._items.layout import DTYPES_OF_NUMPY, Layout
from stream_dataloader._items.structure import Misfit, Node, leaf_paths
from stream_dataloader.stores._base.files import read_json, write_once
from stream_dataloader.stores._base.leaves import LAYOUT, check_not_empty
from stream_dataloader.stores._base.structure import classes_of, from_json, to_json
from stream_dataloader.stores.mds.builder import SampleEncoder, ShardBuilder
from stream_dataloader.stores.mds.encodings import ARRAY_DTYPES

__all__ = ["MdsPart", "builder_of", "list_path", "read_agreed", "shard_name", "tail_path"]


class MdsPart:
    """See `packing.PartPacker`.

    Args:
        folder: The store's.
        worker: Its number.
        key_column: See `MdsPacker`.
        encodings: See `MdsPacker`.
        options: Of `ShardBuilder`.
    """

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
        check_not_empty(layout, item)
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
        agreed = read_agreed(self._folder)
        assert agreed is not None
        structure = from_json(agreed["structure"], os.path.join(self._folder, LAYOUT), classes_of(layout.structure))
        if structure != layout.structure:
            raise ValueError(f"an item has the leaves {layout.paths}, and the store's first has {agreed['columns']}")
        self._layout, self._columns = layout, columns
        self._builder = builder_of(self._folder, agreed, self._options)
        self._encoder = SampleEncoder(agreed["encodings"], agreed["bools"])
        self._lines = open(list_path(self._folder, self._worker), "ab")  # noqa: SIM115

    def _flush(self) -> None:
        """Write a shard, enter it, and delete the tail, in this order."""
        assert self._builder is not None
        assert self._lines is not None
        entry = self._builder.write(shard_name(self._worker, self._shards))
        self._lines.write(json.dumps(entry).encode() + b"\n")
        self._lines.flush()
        os.fsync(self._lines.fileno())
        if self._tail is not None:
            self._tail.close()
            os.unlink(tail_path(self._folder, self._worker, self._shards))
        self._tail, self._in_tail = None, 0
        self._shards += 1

    def sync(self) -> None:
        """See `PartPacker`."""
        samples = self._builder.samples if self._builder is not None else []
        if len(samples) == self._in_tail:
            return
        if self._tail is None:
            self._tail = open(tail_path(self._folder, self._worker, self._shards), "wb")  # noqa: SIM115
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


def shard_name(worker: int, shard: int) -> str:
    """A shard's name, before its suffix."""
    return f"shard.{worker}.{shard:05}"


def list_path(folder: str, worker: int) -> str:
    """The entries of a worker's shards."""
    return os.path.join(folder, f"part.{worker}.jsonl")


def tail_path(folder: str, worker: int, shard: int) -> str:
    """The samples that are to be a worker's next shard."""
    return os.path.join(folder, f"tail.{worker}.{shard:05}")


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


def read_agreed(folder: str) -> dict[str, Any] | None:
    """What the process that had the first item said of items; None if there was no item."""
    path = os.path.join(folder, LAYOUT)
    return dict(read_json(path, dict)) if os.path.exists(path) else None


def builder_of(folder: str, agreed: Mapping[str, Any], options: Mapping[str, Any]) -> ShardBuilder:
    """Writes shards as it was agreed on; `options` are those of `ShardBuilder`."""
    return ShardBuilder(folder, SampleEncoder(agreed["encodings"], agreed["bools"]), **options)
