"""What a TFDS builder's directory holds: which features, and where the examples of a split lie.

Guarantee: sizes that its JSON files claim are compared with the files before anything is made of them; no file outside
of the directory is read, and no code of the dataset's builder is imported.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import os
from typing import Any, NamedTuple

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.files import inside, read_json
from stream_dataloader.streams._media.known_file import KnownFile

__all__ = ["Builder", "Shard", "read_builder"]

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
    formats = [info.get("fileFormat") or "tfrecord", *(others if isinstance(others, list) else [])]
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
    return Builder(info, features, shards, list(itertools.accumulate(one.take for one in shards)), digest.hexdigest())


def _shard(path: str, instruction: Any) -> Shard:
    name = os.path.relpath(os.path.abspath(os.fspath(instruction.filename)), os.path.abspath(path))
    file = inside(path, name, os.path.join(path, INFO))
    try:
        known = KnownFile.of(file)
    except FileNotFoundError:
        raise StoreError(f"{file} is missing, which {INFO} names; prepare the dataset anew") from None
    shard = Shard(file, int(instruction.skip), int(instruction.take), int(instruction.examples_in_shard), known)
    if not 0 <= shard.skip <= shard.skip + shard.take <= shard.records <= known.size:  # a record takes more than a byte
        raise StoreError(
            f"{file} has {known.size:,} bytes, and {INFO} says that examples {shard.skip} to "
            f"{shard.skip + shard.take} of {shard.records:,} are in it; prepare the dataset anew"
        )
    return shard


def _text(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]
