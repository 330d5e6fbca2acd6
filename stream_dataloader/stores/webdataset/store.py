"""Reads streams out of WebDataset's tars.

Guarantee: each step is read at its place, with as many calls as a window has pieces that lie apart; nothing is read
that was not asked for. A tar that is not what its index says is an error, never other data.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.store import Store
from stream_dataloader.stores.webdataset.decoding import Decoder
from stream_dataloader.stores.webdataset.members import TarIndex, beside, in_cache, keep, load, scan
from stream_dataloader.stores.webdataset.shards import find_shards
from stream_dataloader.streams._media.picture import Picture
from stream_dataloader.streams._media.section import check_kind, closed_on_error
from stream_dataloader.streams.cache.file_cache import FileCache, LocalFile, is_url, open_local

__all__ = ["WebDatasetStore"]

#: Members that lie no further apart than that are read together, and no more than that at once.
_GAP_BYTES, _MOST_AT_ONCE_BYTES = 1 << 16, 1 << 24
_FETCHED_AT_ONCE = 8

#: The key of a sample, as a column.
KEY = "__key__"


class WebDatasetStore(Store):
    r"""Streams in WebDataset's tars: samples are members with one key, a stream is a run of samples, each a step.

    A sample's key is the name of its members up to the first dot behind the last slash, its columns are what follows:
    `video_0001/000017.jpg` and `video_0001/000017.cls` are the sample `video_0001/000017`. Items are dicts by
    column, decoded by the extension; see `stream_dataloader.stores.webdataset.decoding`.

    Each tar's headers are read once, to an index that is kept beside it as `NAME.tar.members`, or in this library's
    cache where the folder cannot be written to. A stream may go on in the next tar. Tars on servers are fetched by
    `FileCache`: all of them when the store is opened for the first time, and then as they are read.

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
        allow_pickle: Also read `.pkl` and `.pth`, which may run any code.
        cache: Where tars from URLs are kept; None is the cache that all streams share.

    Raises:
        FileNotFoundError: There is no tar at a path.
        StoreError: A tar is damaged, compressed, or samples of a stream are not together.

    Example:
        >>> import io, tarfile, tempfile, numpy as np
        >>> path = tempfile.mkdtemp() + "/train-000.tar"
        >>> with tarfile.open(path, "w") as tar:
        ...     for name in ("a/0.cls", "a/1.cls", "b/0.cls"):
        ...         info = tarfile.TarInfo(name)
        ...         info.size = 1
        ...         tar.addfile(info, io.BytesIO(b"7"))
        >>> store = WebDatasetStore(path)
        >>> [(store.key(number), len(list(store(number)))) for number in store.sources]
        [('a', 2), ('b', 1)]
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
        allow_pickle: bool = False,
        cache: FileCache | None = None,
    ) -> None:
        if isinstance(shards, str) or isinstance(columns, str):
            raise TypeError("shards and columns are lists of names; give [name] for one")
        shards, columns = (None if names is None else list(names) for names in (shards, columns))
        super().__init__(
            path,
            shards=shards,
            stream=stream,
            columns=columns,
            decode=decode,
            size=size,
            layout=layout,
            color=color,
            allow_pickle=allow_pickle,
            cache=cache,
        )
        if columns is not None and (not columns or len(set(columns)) < len(columns)):
            raise ValueError(f"columns is {columns}; give each that is wanted once, or None for all")
        self._shards, self._columns, self._cache = shards, columns, cache
        self._stream = stream
        _rule(stream)
        self._picture = Picture(size, layout, color)
        self._decoding = {"decode": bool(decode), "allow_pickle": bool(allow_pickle)}
        known = {extension for tar in self.index.tars for extension in tar.extensions} | {KEY}
        if missing := [name for name in columns or () if name not in known]:
            raise StoreError(f"{self.path} has no column {missing}; it has {sorted(known)}")

    def _read_index(self) -> _Streams:
        paths = find_shards(self.path, self._shards)
        if any(map(is_url, paths)):
            with ThreadPoolExecutor(_FETCHED_AT_ONCE) as pool:
                tars = list(pool.map(self._tar, paths))
        else:
            tars = list(map(self._tar, paths))
        return _Streams(self.path, paths, tars, _rule(self._stream))

    def _tar(self, path: str) -> TarIndex:
        """A tar's index: kept, or made now."""
        if is_url(path):
            files, state = [in_cache(path)], None
        else:
            status = os.stat(path)
            check_kind(path, status.st_mode)
            files, state = [beside(path), in_cache(os.path.abspath(path))], _state(status)
        for kept in files:
            if (found := load(kept, state)) is not None:
                return found
        with open_local(path, self._cache) as local, open(local.path, "rb") as file:
            index = scan(file, path, state or _version(local.path))
        keep(index, *files)
        return index

    def _open_steps(self, number: int) -> _Samples:
        decoder = Decoder(self._picture, **self._decoding)
        return _Samples(self.index, number, self.name_of(number), self._columns, decoder, self._cache)

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


def _state(status: os.stat_result) -> str:
    """What tells a file from what it was: of a local one the size and time of change, of a fetched one its version."""
    return f"{status.st_size} {status.st_mtime_ns}"


def _version(local: str) -> str:
    return os.path.basename(local)


def _rule(stream: str | None) -> Callable[[str, str], str]:
    """Which stream a sample is of: by its key, and its tar's name.

    Raises:
        ValueError: The option says nothing.
    """
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


class _Streams:
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
        for shard, tar in enumerate(tars):
            self._group(shard, tar, start, lengths, seen)
        self.start = np.array(start, np.int64)
        self.lengths: NDArray[np.int64] = np.array(lengths, np.int64)
        digest = hashlib.blake2b(digest_size=16)
        for tar in tars:
            digest.update(f"{tar.digest} {tar.samples} ".encode())
        digest.update(self.start.tobytes())
        self.fingerprint = digest.hexdigest()

    def _group(self, shard: int, tar: TarIndex, start: list[int], lengths: list[int], seen: dict[str, int]) -> None:
        """Add a tar's samples to the streams."""
        first = int(self.starts[shard])
        short = self._names[shard]
        for name, run in itertools.groupby(map(tar.key, range(tar.samples)), lambda key: self._rule(key, short)):
            keys = list(run)
            if name not in seen:
                seen[name] = len(start)
                start.append(first)
                lengths.append(len(keys))
            elif seen[name] != len(start) - 1 or self._known(start[-1], first, keys):
                raise StoreError(
                    f"{self.paths[shard]}: samples of the stream {name!r} are in {self._place(start[seen[name]])} "
                    f"already, and {keys[0]!r} does not follow on them; write the tars sorted by name, or give another "
                    "stream=, such as 'shard'"
                )
            else:
                lengths[-1] += len(keys)
            first += len(keys)

    def _known(self, start: int, stop: int, keys: list[str]) -> bool:
        """Whether a stream that goes on in another tar has a sample of these keys already."""
        return not {self.sample_key(sample) for sample in range(start, stop)}.isdisjoint(keys)

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


@dataclass
class _Piece:
    """Some members of a tar that are read together.

    Attributes:
        start: The first byte.
        stop: The one behind the last.
        members: By their numbers in the index.
    """

    start: int
    stop: int
    members: list[int]


class _Samples:
    """One stream's steps; see `Steps`."""

    def __init__(
        self,
        index: _Streams,
        number: int,
        name: str,
        columns: list[str] | None,
        decoder: Decoder,
        cache: FileCache | None,
    ) -> None:
        self._index = index
        self._first, self._count = int(index.start[number]), int(index.lengths[number])
        self._name = name
        self._columns = columns
        self._decoder = decoder
        self._cache = cache
        self._shard = -1
        self._file: _TarFile | None = None
        self._wanted: NDArray[np.bool_] = np.zeros(0, bool)

    def __len__(self) -> int:
        return self._count

    def item(self, index: int) -> Any:
        ((_, members),) = self._read(index, 1)
        found = {
            extension: self._decoder.item(extension, data, name)
            for extension, (data, name) in members.items()
            if extension != KEY
        }
        if self._columns is None:
            return found
        return {name: found[name] if name != KEY else members[KEY][1] for name in self._columns}

    def read(self, start: int, out: Any) -> None:
        for row, (key, members) in enumerate(self._read(start, _rows(out))):
            if not isinstance(out, dict) or out.keys() != members.keys():
                raise StoreError(
                    f"{self._name}: sample {key!r} has {sorted(members)}, and those before it have {sorted(out)}; give "
                    "the columns that all have, by columns="
                )
            for extension, (data, name) in members.items():
                self._decoder.write(extension, data, name, out[extension], row)

    def _read(self, start: int, count: int) -> Iterator[tuple[str, dict[str, tuple[bytes, str]]]]:
        """Samples: the key, and by column the bytes and what errors call them."""
        sample, stop = self._first + start, self._first + start + count
        while sample < stop:
            shard = self._index.shard_of(sample)
            end = min(stop, int(self._index.starts[shard + 1]))
            yield from self._of_shard(shard, sample - int(self._index.starts[shard]), end - sample)
            sample = end

    def _of_shard(self, shard: int, first: int, count: int) -> Iterator[tuple[str, dict[str, tuple[bytes, str]]]]:
        tar, file = self._index.tars[shard], self._opened(shard)
        begin, end = int(tar.first[first]), int(tar.first[first + count])
        wanted = (begin + np.flatnonzero(self._wanted[tar.kind[begin:end]])).tolist()
        pieces, data = iter(_pieces(tar, wanted)), _Piece(0, 0, [])
        held = b""
        for sample in range(first, first + count):
            key = tar.key(sample)
            found: dict[str, tuple[bytes, str]] = {}
            for member in range(int(tar.first[sample]), int(tar.first[sample + 1])):
                extension = tar.extensions[int(tar.kind[member])]
                if not self._wanted[tar.kind[member]]:
                    continue
                if not data.members or member > data.members[-1]:
                    data = next(pieces)
                    held = file.read(data.start, data.stop - data.start)
                offset = int(tar.offset[member]) - data.start
                name = f"{self._name}, {self._index.paths[shard]}: {key}.{extension}"
                found[extension] = held[offset : offset + int(tar.size[member])], name
            self._check(key, found)
            yield key, found

    def _check(self, key: str, found: dict[str, tuple[bytes, str]]) -> None:
        for column in self._columns or ():
            if column == KEY:
                found[KEY] = b"", key
            elif column not in found:
                raise StoreError(
                    f"{self._name}: sample {key!r} has no {column!r}, it has {sorted(found)}; give the columns that "
                    "all have, by columns="
                )

    def _opened(self, shard: int) -> _TarFile:
        if self._file is None or shard != self._shard:
            self.close()
            tar = self._index.tars[shard]
            self._file = _TarFile(self._index.paths[shard], tar, self._cache)
            self._shard = shard
            columns = self._columns
            self._wanted = np.array([columns is None or name in columns for name in tar.extensions], bool)
        return self._file

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _rows(out: Any) -> int:
    """How many rows a batch's leaves have."""
    while isinstance(out, dict):
        out = next(iter(out.values()))
    return len(out)


def _pieces(tar: TarIndex, members: list[int]) -> Iterator[_Piece]:
    """Members that lie side by side, as pieces to be read at once."""
    piece: _Piece | None = None
    for member in members:
        start = int(tar.offset[member])
        stop = start + int(tar.size[member])
        if piece is None or start - piece.stop > _GAP_BYTES or stop - piece.start > _MOST_AT_ONCE_BYTES:
            if piece is not None:
                yield piece
            piece = _Piece(start, stop, [])
        piece.stop = stop
        piece.members.append(member)
    if piece is not None:
        yield piece


class _TarFile:
    """A tar that is open for reading at any place."""

    def __init__(self, path: str, tar: TarIndex, cache: FileCache | None) -> None:
        self._path = path
        self._local: LocalFile = open_local(path, cache)
        with closed_on_error(self._local):
            self._fd = os.open(self._local.path, os.O_RDONLY | os.O_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self._fd)
        with closed_on_error(self):
            status = os.fstat(self._fd)
            state = _version(self._local.path) if is_url(path) else _state(status)
            if state != tar.state or int((tar.offset + tar.size).max(initial=0)) > status.st_size:
                if is_url(path) and os.path.exists(kept := in_cache(path)):
                    os.unlink(kept)
                raise StoreError(
                    f"{path} is another file now than when its members were listed ({shorten(state)}, not "
                    f"{shorten(tar.state)}): it was replaced or written to; open the store again, with stores.open"
                )

    def read(self, start: int, count: int) -> bytes:
        """Read bytes that were there when the file was opened.

        Raises:
            OSError: They are there no more.
        """
        data = os.pread(self._fd, count, start)
        while len(data) < count:  # a signal, or more than the kernel reads at once
            more = os.pread(self._fd, count - len(data), start + len(data))
            if not more:
                raise OSError(f"{self._path} was cut off while it was read: it ends before byte {start + count:,}")
            data += more
        return data

    def close(self) -> None:
        self._close()
        self._local.close()
