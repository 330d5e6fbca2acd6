"""The store of a TFDS or RLDS dataset.

Guarantee: an episode costs one record, read when its stream is opened; its steps are decoded when they are read.
Nothing is opened twice by processes that were forked, see `records`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.options import given_columns, renamed
from stream_dataloader.stores._base.rows import RowSteps
from stream_dataloader.stores._base.store import Store
from stream_dataloader.stores.tfds.builder import Builder, read_builder
from stream_dataloader.stores.tfds.episode import EpisodeReader
from stream_dataloader.stores.tfds.records import Records
from stream_dataloader.streams.cache.file_cache import is_url

__all__ = ["TfdsStore"]


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

    Raises:
        FileNotFoundError: There is no such directory.
        ImportError: tensorflow-datasets is not installed.
        StoreError: The dataset is damaged, in TFRecord files, or has no such split, feature or column.
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
        return {"name": info.get("name"), "config": info.get("configName"), "split": self._split}

    def close(self) -> None:
        """Close the index, and end the process that reads for this one; the store can be used."""
        if (records := self._records.pop(os.getpid(), None)) is not None:
            records.close()
        super().close()


class _Index:
    """See `store.Index`: where episodes lie, and what reads their steps."""

    lengths = None

    def __init__(self, builder: Builder, reader: EpisodeReader) -> None:
        self.builder = builder
        self.reader = reader
        self.fingerprint = builder.fingerprint

    def __len__(self) -> int:
        return self.builder.stops[-1]
