"""The store of a TFDS or RLDS dataset: what a builder's directory holds, and where the examples of a split lie.

Guarantee: sizes that its JSON files claim are compared with the files; no file outside of the directory is read, and no
code of the dataset's builder is imported. An episode's record is read when its stream is opened.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, ClassVar, NamedTuple

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.files import damage_named, inside, read_json
from stream_dataloader.stores._base.handles import Handles
from stream_dataloader.stores._base.options import given_columns, renamed
from stream_dataloader.stores._base.rows import RowSteps
from stream_dataloader.stores._base.store import Store
from stream_dataloader.stores.tfds.episode import EpisodeReader
from stream_dataloader.stores.tfds.records import Records
from stream_dataloader.streams._media.section import KnownFile

__all__ = ["TfdsStore"]

_INFO, _FEATURES = "dataset_info.json", "features.json"


class TfdsStore(Store):
    """A dataset that TFDS prepared in ArrayRecord files (`file_format="array_record"`), such as RLDS episodes.

    A stream is an episode: the steps in a nested feature, each a dict as `builder.as_data_source` gives it. Text
    features are `str`, other strings `bytes`. `metadata(number)` is what else the dataset says of an episode. `lengths`
    is None: only a record tells its length. A stream's key is TFDS's id: the file, and the place in it.

    Args:
        path: The builder's directory: `.../name/version`, or `.../name/config/version`.
        split: Which examples: `"train"`, `"train[10%:20%]"`, `"train[:100]+validation"`, `"all"`.
        stream: The feature that holds a stream's steps: a `Dataset`, `Sequence` or `Video`.
        columns: Which columns of a step to unpack: `"observation/image"`, or `"observation"` for all below it.
    """

    format: ClassVar[str] = "tfds"

    @renamed(steps="stream", leaves="columns")
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        split: str = "train",
        stream: str = "steps",
        columns: Sequence[str] | None = None,
    ) -> None:
        super().__init__(path, split=split, stream=stream, columns=given_columns(columns))
        self._records: Handles[str, Records] = Handles(Records)
        _ = self.index

    def close(self) -> None:
        """Also end the process that reads for this one; see `Store.close`."""
        super().close()
        self._records.close()

    def _read_index(self) -> _Index:
        """Read what there is."""
        path, split = self.path, self._options["split"]
        if not os.path.isdir(path):
            raise FileNotFoundError(f"there is no builder's directory on this machine at {path}")
        info = read_json(os.path.join(path, _INFO), dict)
        formats = [info.get("fileFormat") or "tfrecord", *(info.get("alternativeFileFormats") or [])]
        if "array_record" not in formats:
            raise StoreError(
                f"{path} holds {' and '.join(map(str, formats))} files; prepare it with file_format='array_record', "
                "or read it by TensorFlow and pack it: stores.pack"
            )
        read_json(os.path.join(path, _FEATURES), dict)
        try:
            import tensorflow_datasets as tfds
        except ImportError as error:
            raise ImportError(f"{path} needs tensorflow-datasets: pip install 'stream-dataloader[tfds]'") from error
        with damage_named(f"{path}, by tensorflow_datasets {tfds.__version__},"):
            builder = tfds.builder_from_directory(path, file_format="array_record")
            features, splits = builder.info.features, builder.info.splits
            names = sorted(splits)
        try:
            instructions = splits[split].file_instructions
        except Exception as error:
            raise StoreError(f"{path} has no split {split!r} ({error}); it has {names}, and parts of them") from error
        shards = [_shard(path, instruction) for instruction in instructions]
        if not shards:
            raise StoreError(f"{path} has no example in its split {split!r}; its splits are {names}")
        with open(os.path.join(path, _FEATURES), "rb") as file:
            digest = hashlib.blake2b(file.read(), digest_size=16)
        what = [info.get(key) for key in ("name", "configName", "version")]
        numbers = [
            (os.path.basename(one.known.path), one.skip, one.take, one.records, one.known.size) for one in shards
        ]
        digest.update(repr([what, numbers]).encode())
        reader = EpisodeReader(features, path, self._options["stream"], self._options["columns"])
        return _Index(digest.hexdigest(), info, shards, reader)

    def _record(self, number: int) -> bytes:
        shard, place = self.index.find(number)
        try:
            with shard.known, closing(self._records.lease(self.path)) as lease:
                return lease.handle.read(shard.known.path, place, shard.records)
        except BaseException as error:
            self._records.close()  # the next read starts another
            if isinstance(error, StoreError):
                raise StoreError(f"{self.name_of(number)}: {error}") from None
            raise

    def _open_steps(self, number: int) -> RowSteps:
        reader: EpisodeReader = self.index.reader
        return reader.episode(self._record(number), self.name_of(number))

    def key(self, number: int) -> str:
        shard, place = self.index.find(self._check_number(number))
        return f"{os.path.basename(shard.known.path)}__{place}"

    def metadata(self, number: int) -> Mapping[str, Any]:
        """What the dataset says of an episode besides its steps; reads its record."""
        number = self._check_number(number)
        reader: EpisodeReader = self.index.reader
        return reader.metadata(self._record(number), self.name_of(number))

    def _version(self) -> str:
        return str(self.index.info.get("version", ""))

    def _metadata(self) -> Mapping[str, Any]:
        info = self.index.info
        return {"name": info.get("name"), "config": info.get("configName"), "split": self._options["split"]}


class _Shard(NamedTuple):
    """Part of a file: examples `[skip, skip + take)` of the `records` that it has."""

    known: KnownFile
    skip: int
    take: int
    records: int


class _Index:
    """See `Store._read_index`: where a split's examples lie, in order, and what reads their steps."""

    lengths = None

    def __init__(self, fingerprint: str, info: dict[str, Any], shards: list[_Shard], reader: EpisodeReader) -> None:
        self.fingerprint = fingerprint
        self.info = info
        self.reader = reader
        self._shards = shards
        self._stops = list(itertools.accumulate(shard.take for shard in shards))

    def __len__(self) -> int:
        return self._stops[-1]

    def find(self, number: int) -> tuple[_Shard, int]:
        """Where an example lies: the file, and its place in it."""
        found = bisect.bisect_right(self._stops, number)
        shard = self._shards[found]
        return shard, shard.skip + number - (self._stops[found] - shard.take)


def _shard(path: str, instruction: Any) -> _Shard:
    name = os.path.relpath(os.path.abspath(os.fspath(instruction.filename)), os.path.abspath(path))
    file = inside(path, name, os.path.join(path, _INFO))
    with damage_named(file):
        known = KnownFile.of(file)
    skip, take, records = int(instruction.skip), int(instruction.take), int(instruction.examples_in_shard)
    if not 0 <= skip <= skip + take <= records <= known.size:  # a record takes more than a byte
        told = f"{_INFO} says that it has examples {skip} to {skip + take} of {records:,}"
        raise StoreError(f"{file} has {known.size:,} bytes, and {told}")
    return _Shard(known, skip, take, records)
