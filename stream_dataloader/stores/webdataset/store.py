"""Reads streams out of WebDataset's tars: finds the tars, and which of their samples are a stream.

Guarantee: streams are runs of samples, also from one tar to the next, and no two have one name. Samples of a stream
that lie in several places are an error, as is a sample that a stream has twice.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.files import matching, stamp_of
from stream_dataloader.stores._base.options import given_columns
from stream_dataloader.stores._base.store import Store
from stream_dataloader.stores.webdataset.members import TarIndex, keep, load, scan
from stream_dataloader.stores.webdataset.samples import KEY, Decoder, Samples, state_of
from stream_dataloader.streams._media.names import natural_order
from stream_dataloader.streams._media.picture import Picture
from stream_dataloader.streams._media.section import check_kind
from stream_dataloader.streams.cache.file_cache import FileCache, is_url, open_local

__all__ = ["Streams", "WebDatasetStore", "rule_of"]


_FETCHED_AT_ONCE = 8

_TARS = (".tar", ".tar.gz", ".tgz")


class WebDatasetStore(Store):
    r"""Streams in WebDataset's tars: samples are members with one key, a stream is a run of samples, each a step.

    A sample's key is the name of its members up to the first dot behind the last slash, its columns are what follows:
    `video_0001/000017.jpg` and `video_0001/000017.cls` are the sample `video_0001/000017`. Items are dicts by
    column, decoded by the extension; see `stream_dataloader.stores.webdataset.samples`.

    Each tar's headers are read once, to an index that is kept in this library's cache. A stream may go on in the next
    tar. Tars on servers are fetched by `FileCache`: all of them when the store is opened for the first time, and then
    as they are read.

    Args:
        path: A folder of tars, one tar, or a pattern: `"train-{000..015}.tar"`, also of URLs, or `"train-*.tar"`.
        shards: Names, paths, URLs or patterns of the tars, in order; relative to `path`. None takes what `path` says.
        stream: Which stream a sample is of, by its key. None: the directory part of the key, or the tar if it has none.
            `"shard"`: the tar. A regular expression with a group, `r"(ep\d+)_"`: what the group matches at the key's
            beginning. Another string, `"_"`: what stands before the last of it.
        columns: Which to read; `"__key__"` is the sample's key. None reads those that a sample has.
        decode: False leaves all columns bytes.
        size: `(height, width)` of images; None keeps theirs.
        layout: `"CHW"`, channels first, or `"HWC"`.
        color: `"rgb"` or `"gray"`.
        upright: Turn images as their EXIF says; False leaves them as they are stored.
        allow_pickle: Also read `.pkl` and `.pth`, which may run any code.
        cache: Where tars from URLs are kept; None is the cache that all streams share.
    """

    format: ClassVar[str] = "webdataset"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        shards: Sequence[str] | None = None,
        stream: str | None = None,
        columns: Sequence[str] | None = None,
        decode: bool = True,
        size: tuple[int, int] | None = None,
        layout: Literal["CHW", "HWC"] = "CHW",
        color: Literal["rgb", "gray"] = "rgb",
        upright: bool = True,
        allow_pickle: bool = False,
        cache: FileCache | None = None,
    ) -> None:
        if isinstance(shards, str):
            raise TypeError("shards is a list of names; give [name] for one")
        shards, wanted = None if shards is None else list(shards), given_columns(columns)
        super().__init__(
            path,
            shards=shards,
            stream=stream,
            columns=wanted,
            decode=decode,
            size=size,
            layout=layout,
            color=color,
            upright=upright,
            allow_pickle=allow_pickle,
            cache=cache,
        )
        self._shards, self._columns, self._cache = shards, wanted, cache
        self._stream = stream
        self._remote: list[str] = []
        rule_of(stream)
        self._picture = Picture(size, layout, color, upright=upright)
        self._decoding = {"decode": bool(decode), "allow_pickle": bool(allow_pickle)}
        known = {extension for tar in self.index.tars for extension in tar.extensions} | {KEY}
        if missing := [name for name in wanted or () if name not in known]:
            raise StoreError(f"{self.path} has no column {missing}; it has {sorted(known)}")

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_remote": []}

    def _state(self) -> str:
        return stamp_of(path for path in self._paths() if not is_url(path))

    def _paths(self) -> list[str]:
        """The tars; those of a server are listed once."""
        if self._remote:
            return self._remote
        if self._shards is not None:
            found = [tar for name in self._shards for tar in matching(_joined(self.path, name), self._cache)]
        elif os.path.isdir(self.path):
            names = [name for name in os.listdir(self.path) if name.endswith(_TARS) and not name.startswith(".")]
            if not names:
                raise StoreError(f"{self.path} has no tars: no name in it ends with .tar; give their folder")
            found = [os.path.join(self.path, name) for name in sorted(names, key=natural_order)]
        else:
            found = list(matching(self.path, self._cache))
        self._remote = found if any(map(is_url, found)) else []
        return found

    def _read_index(self) -> Streams:
        paths = self._paths()
        if any(map(is_url, paths)):
            with ThreadPoolExecutor(_FETCHED_AT_ONCE) as pool:
                tars = list(pool.map(self._tar, paths))
        else:
            tars = list(map(self._tar, paths))
        return Streams(self.path, paths, tars, rule_of(self._stream))

    def _tar(self, path: str) -> TarIndex:
        """A tar's index: kept, or made now."""
        name, state = path, None
        if not is_url(path):
            status = os.stat(path)
            check_kind(path, status.st_mode)
            name, state = os.path.abspath(path), state_of(status)
        elif self._expected is None and (self._cache or FileCache()).has(path):
            with open_local(path, self._cache) as local:  # which asks the server whether it is another one now
                state = os.path.basename(local.path)
        if (found := load(name, state)) is not None:
            return found
        with open_local(path, self._cache) as local, open(local.path, "rb") as file:
            index = scan(file, path, state or os.path.basename(local.path))
        keep(name, index)
        return index

    def _open_steps(self, number: int) -> Samples:
        decoder = Decoder(self._picture, **self._decoding)
        return Samples(self.index, number, self.name_of(number), self._columns, decoder, self._cache)

    def key(self, number: int) -> str:
        return str(self.index.name(self._check_number(number)))

    def metadata(self, number: int) -> Mapping[str, Any]:
        shard = self.index.shard_of(int(self.index.start[self._check_number(number)]))
        return {"shard": self.index.paths[shard]}

    def _metadata(self) -> Mapping[str, Any]:
        return {"shards": len(self.index.paths), "samples": int(self.index.starts[-1])}

    def _disk_bytes(self) -> int | None:
        paths = self.index.paths
        return None if any(map(is_url, paths)) else sum(os.stat(path).st_size for path in paths)


def _joined(path: str, name: str) -> str:
    if is_url(name) or os.path.isabs(name):
        return name
    return f"{path.rstrip('/')}/{name}" if is_url(path) else os.path.join(path, name)


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
    """Where the streams are in the tars; see `Store._read_index`."""

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

    def _group(
        self,
        shard: int,
        tar: TarIndex,
        start: list[int],
        lengths: list[int],
        seen: dict[str, int],
    ) -> None:
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
