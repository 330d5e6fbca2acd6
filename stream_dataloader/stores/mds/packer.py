"""Packs streams into an MDS dataset, by several processes at once.

Each process writes shards of its own, one stream behind the other; see `part`. ::

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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.files import read_json
from stream_dataloader.stores._base.leaves import LAYOUT
from stream_dataloader.stores._base.packing import StreamRecord
from stream_dataloader.stores.mds.builder import SampleEncoder, ShardBuilder
from stream_dataloader.stores.mds.compression import unpack
from stream_dataloader.stores.mds.fetch import check_file
from stream_dataloader.stores.mds.index import INDEX, ShardFile, write_index
from stream_dataloader.stores.mds.part import MdsPart, builder_of, list_path, read_agreed, shard_name, tail_path
from stream_dataloader.stores.mds.table import StreamTable, write_table

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

    def part(self, worker: int) -> MdsPart:
        """See `Packer`."""
        return MdsPart(self._folder, worker, self._key_column, self._encodings, self._options)

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
        agreed = read_agreed(self._folder)
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
            written = _Written(self._folder, worker, builder_of(self._folder, agreed, self._options))
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
        with open(list_path(folder, worker), "rb") as lines:
            for line in lines:
                with suppress(ValueError):  # the last one may be cut off
                    self.entries.append(json.loads(line))
        tail = tail_path(folder, worker, len(self.entries))
        if os.path.exists(tail):
            with open(tail, "rb") as file:
                while len(size := file.read(4)) == 4:
                    sample = file.read(length := int.from_bytes(size, "little"))
                    if len(sample) == length:
                        builder.add(sample)
            if builder.samples:
                self.entries.append(builder.write(shard_name(worker, len(self.entries))))

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
                found.append(self._builder.write(f"{shard_name(self._worker, number)}.kept"))
        return found

    def _raw(self, entry: Mapping[str, Any]) -> bytes:
        """A shard's bytes, unpacked."""
        source = ShardFile(**(entry["zip_data"] or entry["raw_data"]))
        path = os.path.join(self._folder, source.basename)
        data = check_file(source, path, path)
        if entry["compression"] is None:
            return data
        return b"".join(unpack(entry["compression"], data, entry["raw_data"]["bytes"], path))
