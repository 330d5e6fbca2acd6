"""Store of WebDataset's tars, which finds the tars and the samples of each stream.

Guarantee: streams are runs of samples, which may continue in the next tar.
A stream in several places is an error, and so is a sample that a stream has twice.
"""

from __future__ import annotations

import itertools
import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.files import hashed, matching, stamp_of
from stream_dataloader.stores._base.formats import given_columns, given_options
from stream_dataloader.stores._base.store import Store
from stream_dataloader.stores.webdataset.members import TarIndex, keep, load, scan
from stream_dataloader.stores.webdataset.samples import KEY, Decoder, Samples, state_of
from stream_dataloader.streams._media.limits import Limits
from stream_dataloader.streams._media.listing import entries_in
from stream_dataloader.streams._media.picture import Picture
from stream_dataloader.streams._media.section import check_kind
from stream_dataloader.streams.cache import FileCache, is_url, open_local
from stream_dataloader.streams.cache.gate import Files

__all__ = ["Streams", "WebDatasetStore", "rule_of"]


_FETCHED_AT_ONCE = 8

_TARS = (".tar", ".tar.gz", ".tgz")


class WebDatasetStore(Store):
    r"""Streams in WebDataset's tars: samples are members with one key, and streams are runs of samples.

    A sample's key is the name up to the first dot after the last slash; the rest of the name is the
    column. Items are dicts, decoded as described in `stream_dataloader.stores.webdataset.samples`.

    A stream may continue in the next tar. Opening fetches tars from servers.

    Args:
        path: A folder of tars, a tar, or a pattern of paths or URLs, `"train-{000..015}.tar"`.
        shards: Names, paths, URLs or patterns of the tars, in order, relative to `path`.
        stream: Rule for the stream of a sample. None: the key's directory, or the tar without one. `"shard"`: the tar.
            A regular expression with a group, `r"(ep\d+)_"`: the text that the group matches.
            Another string, `"_"`: the text of the key before the last `"_"`.
        columns: Names of the columns to read; `"__key__"` is the sample's key. None reads all of a sample.
        decode: False leaves columns as bytes. A dict has functions of bytes, `{"ply": read_cloud}`.
        size: `(height, width)` of images; None keeps their size.
        layout: `"CHW"`, channels first, or `"HWC"`.
        color: `"rgb"` or `"gray"`.
        upright: Turn images as their EXIF data say.
        allow_pickle: Also read `.pkl` and `.pth`, which may run any code.
        cache: Cache for tars from URLs.
        files: Files that links in the folder may lead to: `"inside"` it, or `"anywhere"`.
        limits: Largest sizes of decoded data; see `streams.Limits`. None: the defaults.
    """

    format: ClassVar[str] = "webdataset"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        shards: Sequence[str] | None = None,
        stream: str | None = None,
        columns: Sequence[str] | None = None,
        decode: bool | Mapping[str, Callable[[bytes], Any]] = True,
        size: tuple[int, int] | None = None,
        layout: Literal["CHW", "HWC"] = "CHW",
        color: Literal["rgb", "gray"] = "rgb",
        upright: bool = True,
        allow_pickle: bool = False,
        cache: FileCache | None = None,
        files: Files = "inside",
        limits: Limits | None = None,
    ) -> None:
        if isinstance(shards, str):
            raise TypeError("shards is a list of names; give [name] for one")
        shards = None if shards is None else list(shards)
        super().__init__(path, **given_options(locals(), columns=given_columns(columns)))
        self._cache = cache
        self._remote: list[str] = []
        rule_of(stream)
        picture = Picture(size=size, layout=layout, color=color, upright=upright, limits=limits)
        self._decoder = Decoder(picture, decode, allow_pickle)
        known = {extension for tar in self.index.tars for extension in tar.extensions} | {KEY}
        if missing := [name for name in self._options["columns"] or () if name not in known]:
            raise StoreError(f"{self.path} has no column {missing}; it has {sorted(known)}")

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_remote": []}

    def _state(self) -> str:
        return stamp_of(path for path in self._paths() if not is_url(path))

    def _paths(self) -> list[str]:
        if self._remote:
            return self._remote
        if self._options["shards"] is not None:
            shards = self._options["shards"]
            names = [name if is_url(name) else os.path.join(self.path, name) for name in shards]
            found = [tar for name in names for tar in matching(name, self._cache)]
        elif os.path.isdir(self.path):
            found = [entry.path for entry in entries_in(self.path) if entry.name.endswith(_TARS)]
            if not found:
                raise StoreError(f"{self.path} has no tars: no name in it ends with .tar")
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
        return Streams(paths, tars, rule_of(self._options["stream"]))

    def _tar(self, path: str) -> TarIndex:
        name, state = path, None
        if not is_url(path):
            status = os.stat(path)
            check_kind(path, status.st_mode)
            # A copy may keep a tar's time, and many are of one size. But no program sets the time of the last change.
            name, state = f"{os.path.abspath(path)}\0{status.st_ctime_ns}", state_of(status)
        elif self._expected is None and (self._cache or FileCache()).has(path):
            with open_local(path, self._cache) as local:  # this asks the server for changes
                state = os.path.basename(local.path)
        if (found := load(name, state)) is not None:
            return found
        with open_local(path, self._cache) as local, open(local.path, "rb") as file:
            index = scan(file, path, state or os.path.basename(local.path))
        keep(name, index)
        return index

    def _open_steps(self, number: int) -> Samples:
        columns = self._options["columns"]
        return Samples(self.index, number, self.name_of(number), columns, self._decoder, self._cache)

    def metadata(self, number: int) -> Mapping[str, Any]:
        shard = self.index.shard_of(int(self.index.start[self._check_number(number)]))
        return {"shard": self.index.paths[shard]}

    def _metadata(self) -> Mapping[str, Any]:
        return {"shards": len(self.index.paths), "samples": int(self.index.starts[-1])}

    def _disk_bytes(self) -> int | None:
        paths = self.index.paths
        if any(map(is_url, paths)):
            return None
        return sum(os.stat(path).st_size for path in paths)


def rule_of(stream: str | None) -> Callable[[str, str], str]:
    """Return the function that gives the stream of a sample, given its key and its tar's name."""
    if stream is None:
        return _directory
    if not isinstance(stream, str) or not stream:
        raise ValueError(f"stream is {stream!r}; give None, 'shard', a separator, or an expression")
    if stream == "shard":
        return lambda _, shard: shard
    if "(" not in stream:
        return lambda key, shard: key.rpartition(stream)[0] or shard
    try:
        pattern = re.compile(stream)
    except re.error as error:
        raise ValueError(f"stream is {stream!r}, which is no regular expression: {error}") from None
    if not pattern.groups:
        raise ValueError(f"stream is {stream!r}; it needs a group, as in '(ep[0-9]+)_'")

    def matched(key: str, shard: str) -> str:
        found = pattern.match(key)
        if found is None or found[1] is None:
            raise StoreError(f"{shard}: the key {key!r} does not match stream={stream!r}")
        return found[1]

    return matched


def _directory(key: str, shard: str) -> str:
    folder = key.rpartition("/")[0]
    return shard if folder in ("", ".") else folder


class Streams:
    """Index of the streams in the tars."""

    def __init__(self, paths: list[str], tars: list[TarIndex], rule: Callable[[str, str], str]) -> None:
        self.paths, self.tars, self._rule = paths, tars, rule
        self._names = [os.path.basename(path) for path in paths]
        if len(set(self._names)) < len(paths):
            self._names = paths
        #: First sample of each tar, and the number of all samples.
        self.starts = np.cumsum([0, *(tar.samples for tar in tars)], dtype=np.int64)
        first: dict[str, int] = {}  # first sample of each stream
        name, last = "", set[str]()  # the last stream, and its keys
        for tar, path, short, begin in zip(tars, paths, self._names, self.starts.tolist(), strict=False):
            sample = begin
            named = ((rule(key, short), key) for key in tar.all_keys())
            for found, group in itertools.groupby(named, operator.itemgetter(0)):
                keys = [key for _, key in group]
                if found not in first:
                    first[found], name, last = sample, found, set()
                elif found != name or not last.isdisjoint(keys):
                    what = f"{path}: {keys[0]!r} does not follow on the stream {found!r}"
                    begun = paths[self.shard_of(first[found])]
                    raise StoreError(f"{what} in {begun}; sort the tars by name, or give stream='shard'")
                last.update(keys)
                sample += len(keys)
        self.start = np.array(list(first.values()), np.int64)
        self.lengths: NDArray[np.int64] = np.diff(np.append(self.start, self.starts[-1]))
        text = "".join(f"{tar.digest} {tar.samples} " for tar in tars)
        self.fingerprint = hashed(text, self.start.tobytes())

    def __len__(self) -> int:
        return len(self.start)

    def shard_of(self, sample: int) -> int:
        return int(np.searchsorted(self.starts, sample, "right")) - 1

    def key(self, number: int) -> str:
        sample = int(self.start[number])
        shard = self.shard_of(sample)
        return self._rule(self.tars[shard].key(sample - int(self.starts[shard])), self._names[shard])
