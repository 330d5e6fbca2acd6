"""Which samples of a store's tars are a stream.

Guarantee: streams are runs of samples, also from one tar to the next, and no two have one name. Samples of a stream
that lie in several places are an error, as is a sample that a stream has twice.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError
from stream_dataloader.stores.webdataset.members import TarIndex

__all__ = ["Streams", "rule_of"]


def rule_of(stream: str | None) -> Callable[[str, str], str]:
    """Which stream a sample is of: by its key, and its tar's name."""
    if stream is None:
        return _directory
    if not isinstance(stream, str) or not stream:
        raise ValueError(
            f"stream is {stream!r}; give None, 'shard', a separator such as '_', or a regular expression with a group"
        )
    if stream == "shard":
        return lambda _, shard: shard
    if "(" not in stream:
        return lambda key, shard: key.rpartition(stream)[0] or shard
    try:
        pattern = re.compile(stream)
    except re.error as error:
        raise ValueError(f"stream is {stream!r}, which is no regular expression: {error}") from None
    if not pattern.groups:
        raise ValueError(f"stream is {stream!r}; put what names the stream into a group, as in '(ep[0-9]+)_'")

    def matched(key: str, shard: str) -> str:
        found = pattern.match(key)
        if found is None or found[1] is None:
            raise StoreError(f"{shard}: the key {key!r} does not match stream={stream!r}; give one that all keys match")
        return found[1]

    return matched


def _directory(key: str, shard: str) -> str:
    folder = key.rpartition("/")[0]
    return shard if folder in ("", ".") else folder


class Streams:
    """Where the streams are in the tars; see `Index`."""

    def __init__(self, path: str, paths: list[str], tars: list[TarIndex], rule: Callable[[str, str], str]) -> None:
        self.path, self.paths, self.tars = path, paths, tars
        self._rule = rule
        self._names = _short_names(paths)
        #: The number of each tar's first sample, counted over all tars, and of all samples.
        self.starts = np.cumsum([0, *(tar.samples for tar in tars)], dtype=np.int64)
        start: list[int] = []
        lengths: list[int] = []
        seen: dict[str, int] = {}
        self._last: set[str] = set()  # the keys of the last stream, which may go on in the next tar
        for shard, tar in enumerate(tars):
            self._group(shard, tar, start, lengths, seen)
        self._last.clear()
        self.start = np.array(start, np.int64)
        self.lengths: NDArray[np.int64] = np.array(lengths, np.int64)
        digest = hashlib.blake2b(digest_size=16)
        for tar in tars:
            digest.update(f"{tar.digest} {tar.samples} ".encode())
        digest.update(self.start.tobytes())
        self.fingerprint = digest.hexdigest()

    def _group(self, shard: int, tar: TarIndex, start: list[int], lengths: list[int], seen: dict[str, int]) -> None:
        """Add a tar's samples to the streams."""
        first, short = int(self.starts[shard]), self._names[shard]
        keys = tar.all_keys()
        names = [self._rule(key, short) for key in keys]
        changes = [place for place, (one, other) in enumerate(itertools.pairwise(names), 1) if one != other]
        for begin, stop in itertools.pairwise([0, *changes, len(keys)] if keys else []):
            name = names[begin]
            if name not in seen:
                seen[name] = len(start)
                start.append(first + begin)
                lengths.append(stop - begin)
                if stop == len(keys):
                    self._last = set(keys[begin:])
            elif begin or seen[name] != len(start) - 1 or not self._last.isdisjoint(keys[:stop]):
                raise StoreError(
                    f"{self.paths[shard]}: samples of the stream {name!r} are in {self._place(start[seen[name]])} "
                    f"already, and {keys[begin]!r} does not follow on them; write the tars sorted by name, or give "
                    "another stream=, such as 'shard'"
                )
            else:
                lengths[-1] += stop - begin
                self._last.update(keys[:stop])

    def _place(self, sample: int) -> str:
        return self.paths[self.shard_of(sample)]

    def __len__(self) -> int:
        return len(self.start)

    def shard_of(self, sample: int) -> int:
        """Which tar has a sample."""
        return int(np.searchsorted(self.starts, sample, "right")) - 1

    def sample_key(self, sample: int) -> str:
        """A sample's key."""
        shard = self.shard_of(sample)
        return self.tars[shard].key(sample - int(self.starts[shard]))

    def name(self, number: int) -> str:
        """A stream's name."""
        sample = int(self.start[number])
        return self._rule(self.sample_key(sample), self._names[self.shard_of(sample)])


def _short_names(paths: list[str]) -> list[str]:
    """Tars by names that are short and differ."""
    names = [os.path.basename(path) for path in paths]
    return names if len(set(names)) == len(names) else paths
