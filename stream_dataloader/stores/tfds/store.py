"""The store of a TFDS or RLDS dataset: what a builder's directory holds, and where the examples of a split lie.

Guarantee: sizes that its JSON files claim are compared with the files before anything is made of them; no file outside
of the directory is read, and no code of the dataset's builder is imported. An episode costs one record, read when its
stream is opened; its steps are decoded when they are read.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.files import inside, read_json
from stream_dataloader.stores._base.options import given_columns, renamed
from stream_dataloader.stores._base.rows import RowSteps
from stream_dataloader.stores._base.store import Store
from stream_dataloader.stores.tfds.episode import EpisodeReader
from stream_dataloader.stores.tfds.records import Records
from stream_dataloader.streams._media.known_file import KnownFile
from stream_dataloader.streams.cache.file_cache import is_url

__all__ = ["Builder", "Shard", "TfdsStore", "read_builder"]


class TfdsStore(Store):
    """A dataset that TFDS prepared in ArrayRecord files (`file_format="array_record"`), such as RLDS episodes.

    A stream is an episode: the steps in a nested feature, each a dict as `builder.as_data_source` gives it. Text
    features are `str`, other strings `bytes`; the loader keeps both as objects. What the dataset says of an episode
    besides its steps is `metadata(number)`, which reads its record. `lengths` is None: only an episode's record tells
    its length; pack the dataset where lengths are wanted. A stream's key is TFDS's id: the file, and the place in it.

    TensorFlow and the code of the dataset's builder are not needed. A record holds a whole episode, and is in memory
    while its stream is open.

    Args:
        path: The builder's directory: `.../name/version`, or `.../name/config/version`.
        split: Which examples: `"train"`, parts as `"train[10%:20%]"`, sums as `"train[:100]+validation"`, `"all"`.
        stream: The feature that holds a stream's steps: a `Dataset`, `Sequence` or `Video`.
        columns: Which columns of a step to unpack, with their outer names: `"observation/image"`; `"observation"` is
            all below it. None: all.
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
        if not isinstance(split, str):
            raise TypeError(f"split is {split!r}; give a text such as 'train' or 'train[:50%]+test'")
        self._split, self._stream, self._columns = split, stream, given_columns(columns)
        super().__init__(path, split=split, stream=stream, columns=self._columns)
        self._records: dict[int, Records] = {}
        if is_url(self.path):
            raise StoreError(f"{self.path} is remote, and array_record reads local files; copy the dataset here")
        _ = self.index

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_records": {}}

    def _read_index(self) -> _Index:
        builder = read_builder(self.path, self._split)
        return _Index(builder, EpisodeReader(builder.features, self.path, self._stream, self._columns))

    def _record(self, number: int) -> bytes:
        shard, place = self.index.builder.find(number)
        records = self._records.setdefault(os.getpid(), Records())
        try:
            with shard.known:
                return records.read(shard.path, place, shard.records, shard.known.size)
        except StoreError as error:
            raise StoreError(f"{self.name_of(number)}: {error}") from None

    def _open_steps(self, number: int) -> RowSteps:
        index: _Index = self.index
        return index.reader.episode(self._record(number), self.name_of(number))

    def key(self, number: int) -> str:
        shard, place = self.index.builder.find(self._check_number(number))
        return f"{os.path.basename(shard.path)}__{place}"

    def metadata(self, number: int) -> Mapping[str, Any]:
        """What the dataset says of an episode besides its steps; reads its record."""
        number = self._check_number(number)
        index: _Index = self.index
        return index.reader.metadata(self._record(number), self.name_of(number))

    def _version(self) -> str:
        return str(self.index.builder.info.get("version", ""))

    def _metadata(self) -> Mapping[str, Any]:
        info = self.index.builder.info
        return {
            "name": info.get("name"),
            "config": info.get("configName"),
            "split": self._split,
        }

    def close(self) -> None:
        """Close the index, and end the process that reads for this one; the store can be used."""
        if (records := self._records.pop(os.getpid(), None)) is not None:
            records.close()
        super().close()


class _Index:
    """See `Store._read_index`: where episodes lie, and what reads their steps."""

    lengths = None

    def __init__(self, builder: Builder, reader: EpisodeReader) -> None:
        self.builder = builder
        self.reader = reader
        self.fingerprint = builder.fingerprint

    def __len__(self) -> int:
        return self.builder.stops[-1]


INFO, FEATURES = "dataset_info.json", "features.json"


class Shard(NamedTuple):
    """Part of a file: examples `[skip, skip + take)` of the `records` that it has; `known` is it as it was listed."""

    path: str
    skip: int
    take: int
    records: int
    known: KnownFile


class Builder(NamedTuple):
    """A dataset's info and features, and the parts of files in which a split's examples lie, in order."""

    info: dict[str, Any]
    features: Any
    shards: list[Shard]
    stops: list[int]
    fingerprint: str

    def find(self, number: int) -> tuple[Shard, int]:
        """Where an example lies: the file, and its place among all that the file has."""
        found = bisect.bisect_right(self.stops, number)
        shard = self.shards[found]
        return shard, shard.skip + number - (self.stops[found] - shard.take)


def read_builder(path: str, split: str) -> Builder:
    """Read what there is; `split` is as TFDS takes it."""
    if not os.path.isdir(path):
        raise FileNotFoundError(f"there is no dataset at {path}; give a builder's directory, such as .../name/1.0.0")
    info = read_json(os.path.join(path, INFO), dict)
    others = info.get("alternativeFileFormats") or []
    formats = [
        info.get("fileFormat") or "tfrecord",
        *(others if isinstance(others, list) else []),
    ]
    if "array_record" not in formats:
        raise StoreError(
            f"{path} holds {' and '.join(map(str, formats))} files, and only ArrayRecord files can be read at any "
            "episode; prepare the dataset with file_format='array_record', convert it by 'tfds convert_format "
            "--out_file_format=array_record', or read it with TensorFlow once and pack it: stores.pack"
        )
    read_json(os.path.join(path, FEATURES), dict)
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise ImportError(
            f"a TFDS dataset needs tensorflow-datasets ({error}); install it: pip install 'stream-dataloader[tfds]'"
        ) from error
    try:
        builder = tfds.builder_from_directory(path, file_format="array_record")
        features, splits = builder.info.features, builder.info.splits
        names = sorted(splits)
    except Exception as error:
        raise StoreError(
            f"{path} is damaged, or of another version: tensorflow_datasets {tfds.__version__} cannot read it "
            f"({_text(error)}); prepare the dataset anew"
        ) from error
    try:
        instructions = splits[split].file_instructions
    except Exception as error:
        raise StoreError(
            f"{path} has no split {split!r} ({_text(error)}); it has {names}, and takes parts of them such as "
            f"'{names[0] if names else 'train'}[10%:20%]' and sums such as 'train+test'"
        ) from error
    shards = [_shard(path, instruction) for instruction in instructions]
    if not shards or any(int(length) < 0 for found in info["splits"] for length in found.get("shardLengths") or ()):
        raise StoreError(f"{path} has no example in its split {split!r}, or {INFO} is damaged; its splits are {names}")
    with open(os.path.join(path, FEATURES), "rb") as file:
        digest = hashlib.blake2b(file.read(), digest_size=16)
    what = [info.get(key) for key in ("name", "configName", "version")]
    numbers = [(os.path.basename(one.path), one.skip, one.take, one.records, one.known.size) for one in shards]
    digest.update(repr([what, numbers]).encode())
    return Builder(
        info,
        features,
        shards,
        list(itertools.accumulate(one.take for one in shards)),
        digest.hexdigest(),
    )


def _shard(path: str, instruction: Any) -> Shard:
    name = os.path.relpath(os.path.abspath(os.fspath(instruction.filename)), os.path.abspath(path))
    file = inside(path, name, os.path.join(path, INFO))
    try:
        known = KnownFile.of(file)
    except FileNotFoundError:
        raise StoreError(f"{file} is missing, which {INFO} names; prepare the dataset anew") from None
    shard = Shard(
        file,
        int(instruction.skip),
        int(instruction.take),
        int(instruction.examples_in_shard),
        known,
    )
    if not 0 <= shard.skip <= shard.skip + shard.take <= shard.records <= known.size:  # a record takes more than a byte
        raise StoreError(
            f"{file} has {known.size:,} bytes, and {INFO} says that examples {shard.skip} to "
            f"{shard.skip + shard.take} of {shard.records:,} are in it; prepare the dataset anew"
        )
    return shard


def _text(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]
