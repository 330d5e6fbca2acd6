"""Finds streams in a dataset that does not say what its streams are, by one pass over a column.

Guarantee: the pass looks at the column's bytes alone, and is made once by all processes; what it found is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores.mds.encodings import ArrayEncoding, Encoding, ListEncoding
from stream_dataloader.stores.mds.fetch import Shards
from stream_dataloader.stores.mds.table import write_table

__all__ = ["key_text", "steps_of", "write_key_table", "write_length_table"]


def key_text(value: Any) -> str:
    """A key as text."""
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)


def write_key_table(path: str, shards: Shards, count: int, place: int, encoding: Encoding) -> None:
    """Write a table of the runs of samples whose values in a column are the same.

    Args:
        path: The file.
        shards: The dataset's.
        count: How many there are.
        place: The column's.
        encoding: The column's.

    Raises:
        StoreError: A shard is damaged.
    """
    starts: list[int] = []
    keys: list[str] = []
    before: bytes | None = None
    for sample, part in _parts(shards, count, place):
        if before is None or part != before:
            before = bytes(part)
            starts.append(sample)
            try:
                keys.append(key_text(encoding.decode(part)))
            except ValueError as error:
                raise StoreError(f"sample {sample} has no key: {error}") from error
    total = sum(shards.samples)
    write_table(path, starts, np.diff([*starts, total]) if starts else [], _unlike(keys, starts))


def _unlike(keys: list[str], starts: list[int]) -> list[str]:
    """Keys that name one stream each: one that comes again has its first sample behind it."""
    seen: set[str] = set()
    found = []
    for key, start in zip(keys, starts, strict=True):
        found.append(f"{key}@{start}" if key in seen else key)
        seen.add(key)
    return found


def write_length_table(path: str, shards: Shards, count: int, place: int, encoding: Encoding) -> None:
    """Write a table of samples and how many time steps each has; see `write_key_table`."""
    steps = []
    for sample, part in _parts(shards, count, place):
        try:
            steps.append(steps_of(encoding, part))
        except ValueError as error:
            raise StoreError(f"sample {sample}: the column has {error}") from error
    write_table(path, range(len(steps)), steps, [str(sample) for sample in range(len(steps))])


def steps_of(encoding: Encoding, part: memoryview) -> int:
    """How many time steps a value has.

    Raises:
        ValueError: It is damaged, or is no sequence.
    """
    if isinstance(encoding, ListEncoding):
        return len(encoding.parts(part))
    if not isinstance(encoding, ArrayEncoding) or not (shape := encoding.layout(part)[1]):
        raise ValueError(f"{shorten(bytes(part[:20]))}, which is no sequence")
    return shape[0]


def _parts(shards: Shards, count: int, place: int) -> Iterator[tuple[int, memoryview]]:
    sample = 0
    for number in range(count):
        shard = shards.open(number)
        with shard.known:
            for part in shard.parts(place):
                yield sample, part
                sample += 1
