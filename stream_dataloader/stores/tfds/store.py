"""Store of a TFDS or RLDS dataset, decoded like TFDS's `as_data_source` (4.9.10).

Guarantee: sizes that its JSON files claim are compared with the files.
No file outside of the directory is read. Of the modules that `features.json` names, only TFDS's own are imported.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import json
import operator
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any, ClassVar, NamedTuple

import numpy as np

from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.files import damage_named, hashed, inside, package, plain, read_json
from stream_dataloader.stores._base.formats import given_columns
from stream_dataloader.stores._base.handles import Handles
from stream_dataloader.stores._base.rows import RowSteps, Selection, check_lengths, selected
from stream_dataloader.stores._base.store import Store
from stream_dataloader.stores._base.stream import put_row
from stream_dataloader.stores.tfds.records import Records
from stream_dataloader.streams._media.section import KnownFile
from stream_dataloader.streams.cache.gate import Files

__all__ = ["TfdsStore"]

_INFO, _FEATURES = "dataset_info.json", "features.json"

#: Keys that name a feature's class in JSON: of the message `Feature`, and before TFDS 4.4.
_NAMES_OF_CLASSES = {"pythonClassName", "python_class_name", "type"}


class TfdsStore(Store):
    """Dataset in ArrayRecord files (`file_format="array_record"`), such as RLDS episodes.

    A stream has the steps in a nested feature, as `as_data_source` returns them: text features
    are `str`, other strings are `bytes`. `lengths` is None.

    Args:
        path: The builder's directory: `.../name/version`, or `.../name/config/version`.
        split: Examples to read: `"train"`, `"train[10%:20%]"`, `"train[:100]+validation"`, `"all"`.
        stream: Name of the feature with a stream's steps: a `Dataset`, `Sequence` or `Video`.
        columns: Features to unpack: `"observation/image"`, or `"observation"` for all below it.
        files: Files that links in the folder may lead to: `"inside"` it, or `"anywhere"`.
    """

    format: ClassVar[str] = "tfds"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        split: str = "train",
        stream: str = "steps",
        columns: Sequence[str] | None = None,
        files: Files = "inside",
    ) -> None:
        super().__init__(path, split=split, stream=stream, columns=given_columns(columns), files=files)
        self._opened = self._records = Handles(Records)
        _ = self.index

    def _read_index(self) -> _Index:
        path, split = self.path, self._options["split"]
        if not os.path.isdir(path):
            raise FileNotFoundError(f"there is no builder's directory on this machine at {path}")
        info = read_json(os.path.join(path, _INFO), dict)
        formats = [info.get("fileFormat") or "tfrecord", *(info.get("alternativeFileFormats") or [])]
        if "array_record" not in formats:
            what = f"{path} holds {' and '.join(map(str, formats))} files"
            raise StoreError(f"{what}; prepare it with file_format='array_record', or by stores.pack")
        _check_classes(read_json(os.path.join(path, _FEATURES), dict), os.path.join(path, _FEATURES))
        tfds = package("tensorflow_datasets", path, "tfds")
        with damage_named(f"{path}, by tensorflow_datasets {tfds.__version__},"):
            builder = tfds.builder_from_directory(path, file_format="array_record")
            features, splits = builder.info.features, builder.info.splits
            names = sorted(splits)
        try:
            instructions = splits[split].file_instructions
        except Exception as error:
            raise StoreError(f"{path} has no split {split!r} ({error}); it has {names}") from error
        if not instructions:
            raise StoreError(f"{path} has no example in its split {split!r}; its splits are {names}")
        reader = _EpisodeReader(features, path, self._options["stream"], self._options["columns"])
        return _Index(path, info, instructions, reader)

    def _record(self, number: int) -> bytes:
        shard, place = self.index.find(number)
        path = shard.known.path
        what = f"{self.name_of(number)}: {path}, record {place},"
        try:
            with damage_named(what), shard.known, closing(self._records.lease(self.path)) as lease:
                return lease.handle.read(path, place, shard.records)
        except BaseException:
            self._records.close()  # the next read starts another
            raise

    def _open_steps(self, number: int) -> RowSteps:
        reader: _EpisodeReader = self.index.reader
        return reader.episode(self._record(number), self.name_of(number))

    def key(self, number: int) -> str:
        shard, place = self.index.find(self._check_number(number))
        return f"{os.path.basename(shard.known.path)}__{place}"

    def metadata(self, number: int) -> Mapping[str, Any]:
        """Return the values of an episode's record beside its steps."""
        number = self._check_number(number)
        reader: _EpisodeReader = self.index.reader
        return reader.metadata(self._record(number), self.name_of(number))

    def _version(self) -> str:
        return str(self.index.info.get("version", ""))

    def _metadata(self) -> Mapping[str, Any]:
        info = self.index.info
        return {"name": info.get("name"), "config": info.get("configName"), "split": self._options["split"]}


def _check_classes(features: Any, name: str) -> None:
    """Raise for classes of features whose module TFDS would import; JSON may contain JSON as text."""
    left = [features]
    while left:
        found = left.pop()
        if isinstance(found, list):
            left += found
        elif isinstance(found, str) and found.lstrip().startswith(("{", "[")):
            with suppress(ValueError, RecursionError):
                left.append(json.loads(found))
        elif isinstance(found, dict):
            left += found.values()
            for key in _NAMES_OF_CLASSES & found.keys():
                full = found[key]
                if isinstance(full, str) and "." in full and not _is_known(full):
                    what = f"{name} names the class {shorten(full)}, and data imports no modules but TFDS's own"
                    raise StoreError(f"{what}; import its module before you open the store, if you trust it")


def _is_known(full: str) -> bool:
    return full.startswith("tensorflow_datasets.") or full.rpartition(".")[0] in sys.modules


class _Shard(NamedTuple):
    """Examples `[skip, skip + take)` of a file's `records`."""

    known: KnownFile
    skip: int
    take: int
    records: int


class _Index:
    """Index of a split's examples."""

    lengths = None

    def __init__(self, path: str, info: Mapping[str, Any], instructions: Sequence[Any], reader: _EpisodeReader) -> None:
        self.info, self.reader = info, reader
        self._shards = [_shard(path, instruction) for instruction in instructions]
        self._stops = list(itertools.accumulate(shard.take for shard in self._shards))
        what = [info.get(key) for key in ("name", "configName", "version")]
        shards = [(os.path.basename(known.path), *numbers, known.size) for known, *numbers in self._shards]
        with open(os.path.join(path, _FEATURES), "rb") as file:
            self.fingerprint = hashed(file.read(), repr([what, shards]))

    def __len__(self) -> int:
        return self._stops[-1]

    def find(self, number: int) -> tuple[_Shard, int]:
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
        claimed = f"{_INFO} says that it has examples {skip} to {skip + take} of {records:,}"
        raise StoreError(f"{file} has {known.size:,} bytes, and {claimed}")
    return _Shard(known, skip, take, records)


class _EpisodeReader:
    """Decoder of some columns of the steps in a feature."""

    def __init__(self, features: Any, path: str, steps: str, columns: Sequence[str] | None) -> None:
        from tensorflow_datasets.core.example_parser import ExampleParserNp
        from tensorflow_datasets.core.features import FeaturesDict

        names = sorted(features.keys()) if hasattr(features, "keys") else []
        nested = [name for name in names if hasattr(features[name], "feature")]
        if steps not in nested:
            raise StoreError(f"{path} has no feature {steps!r} of several steps; give stream= one of {nested}")
        there = dict(_leaves(features[steps].feature))
        is_value = list(there) == [""] and not columns  # a step is one value
        self._selection = Selection("", [""]) if is_value else selected(columns, list(there), f"{path}, {steps}")
        info = features.get_serialized_info()
        self._steps = steps
        self._parser = ExampleParserNp({steps: _picked(self._selection.item, info[steps])})
        self._decoders = {name: _Decoder(there[name]) for name in self._selection.names}
        rest = [name for name in names if name != steps]
        self._rest = FeaturesDict({name: features[name] for name in rest})
        self._rest_parser = ExampleParserNp({name: info[name] for name in rest})

    def episode(self, record: bytes, name: str) -> RowSteps:
        with damage_named(f"{name}, by features.json,"):
            stored = self._parser.parse_example(record)[self._steps]
            columns = {}
            for column, decoder in self._decoders.items():
                inner = functools.reduce(operator.getitem, column.split("/") if column else (), stored)
                columns[column] = _Column(inner, decoder, name, f", {column}" if column else "")
            steps = check_lengths(name, {column: len(table) for column, table in columns.items()})
        return RowSteps(self._selection.structure, list(columns.values()), steps)

    def metadata(self, record: bytes, name: str) -> Mapping[str, Any]:
        with damage_named(f"{name}, its metadata,"):
            found: Mapping[str, Any] = plain(self._rest.decode_example_np(self._rest_parser.parse_example(record)))
            return found


class _Decoder:
    """Decoder of one feature of a step, or of an episode."""

    def __init__(self, feature: Any) -> None:
        from tensorflow_datasets import features

        # Only a dict of features can decode sequences at any depth.
        self._alone = features.FeaturesDict({"": feature})
        self._is_text = isinstance(feature, features.Text)
        decodes = getattr(type(feature), "decode_example_np", None)
        is_plain = isinstance(feature, features.Tensor) and decodes is features.Tensor.decode_example_np
        self.shape: tuple[int, ...] | None = tuple(feature.shape) if is_plain else None

    def decode(self, stored: Any) -> Any:
        value = self._alone.decode_example_np({"": stored})[""]
        if self._is_text and isinstance(value, bytes):
            return value.decode()
        if isinstance(value, list):  # a sequence within a step
            kinds = {(inner.dtype, inner.shape) if hasattr(inner, "shape") else None for inner in value}
            return np.array(value) if len(kinds) == 1 and None not in kinds else value
        if isinstance(value, np.ndarray) and not (value.flags.owndata and value.flags.writeable):
            return value.copy()
        return value


class _Column:
    """One column of an episode; a `tables.Table`."""

    def __init__(self, stored: Any, decoder: _Decoder, stream: str, name: str) -> None:
        self._stored, self._decoder = stored, decoder
        self._stream, self._name = stream, name
        is_number = isinstance(stored, np.ndarray) and stored.dtype.kind in "biufc"
        self._is_plain = is_number and stored.shape[1:] == decoder.shape

    def __len__(self) -> int:
        return len(self._stored)

    def row(self, index: int) -> Any:
        if self._is_plain:
            return np.array(self._stored[index])[()]
        try:
            return self._decoder.decode(self._stored[index])
        except Exception as error:
            where = f"{self._stream}, step {index}{self._name}"
            raise StoreError(f"{where} cannot be decoded ({type(error).__name__}: {error})") from error

    def read(self, start: int, out: Any) -> None:
        if self._is_plain:
            out[...] = self._stored[start : start + len(out)]
            return
        for t in range(len(out)):
            put_row(self.row(start + t), out, t, f"{self._stream}, step {start + t}{self._name}")

    def close(self) -> None:
        self._stored = []


def _leaves(feature: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    from tensorflow_datasets.core.features import FeaturesDict

    if not isinstance(feature, FeaturesDict):
        yield name, feature
        return
    for key in sorted(feature.keys()):  # in features.json they have no order
        yield from _leaves(feature[key], f"{name}/{key}" if name else key)


def _picked(item: Any, nested: Any) -> Any:
    if not isinstance(item, dict):
        return nested
    return {key: _picked(below, nested[key]) for key, below in item.items()}
