"""One stream's samples, read at their places in the tars.

Guarantee: members that lie side by side are read by one call, and nothing that was not asked for, but what lies between
them. A tar that is not what its index says is an error, never other data.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stream_dataloader._items.structure import flatten
from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores.webdataset.decoding import Decoder
from stream_dataloader.stores.webdataset.members import TarIndex, forget
from stream_dataloader.stores.webdataset.streams import Streams
from stream_dataloader.streams._media.known_file import KnownFile
from stream_dataloader.streams._media.section import closed_on_error
from stream_dataloader.streams.cache.file_cache import FileCache, LocalFile, is_url, open_local

__all__ = ["KEY", "Samples", "state_of"]

#: Members that lie no further apart than that are read together, and no more than that at once.
_GAP_BYTES, _MOST_AT_ONCE_BYTES = 1 << 16, 1 << 24

#: The key of a sample, as a column.
KEY = "__key__"


def state_of(status: os.stat_result) -> str:
    """What tells a local file from what it was: its size and time of change."""
    return f"{status.st_size} {status.st_mtime_ns}"


class Samples:
    """One stream's steps; see `Steps`."""

    def __init__(
        self,
        index: Streams,
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
        for row, (key, members) in enumerate(self._read(start, len(flatten(out)[1][0]))):
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
        contents = _contents(file, tar, wanted)
        for sample in range(first, first + count):
            key = tar.key(sample)
            found: dict[str, tuple[bytes, str]] = {}
            for kind in tar.kind[int(tar.first[sample]) : int(tar.first[sample + 1])].tolist():
                if self._wanted[kind]:
                    name = f"{self._name}, {self._index.paths[shard]}: {key}.{tar.extensions[kind]}"
                    found[tar.extensions[kind]] = next(contents), name
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


def _contents(file: _TarFile, tar: TarIndex, members: list[int]) -> Iterator[bytes]:
    """What members hold; those that lie side by side are read by one call."""
    starts = tar.offset[members]
    spans = list(zip(starts.tolist(), (starts + tar.size[members]).tolist(), strict=True))
    first = 0
    for number, (_, stop) in enumerate(spans, 1):
        begin, after = spans[first][0], spans[number : number + 1]
        if not after or after[0][0] - stop > _GAP_BYTES or after[0][1] - begin > _MOST_AT_ONCE_BYTES:
            held = file.read(begin, stop - begin)
            for one, other in spans[first:number]:
                yield held[one - begin : other - begin]
            first = number


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
            self._known = KnownFile.of(self._local.path, self._fd, name=path)
            state = os.path.basename(self._local.path) if is_url(path) else state_of(status)
            if state != tar.state or int((tar.offset + tar.size).max(initial=0)) > status.st_size:
                if is_url(path):
                    forget(path)
                raise StoreError(
                    f"{path} is another file now than when its members were listed ({shorten(state)}, not "
                    f"{shorten(tar.state)}): it was replaced or written to; open the store again, with stores.open"
                )

    def read(self, start: int, count: int) -> bytes:
        """Read bytes that were there when the file was opened."""
        with self._known:
            data = os.pread(self._fd, count, start)
            while len(data) < count:  # a signal, or more than the kernel reads at once
                if not (more := os.pread(self._fd, count - len(data), start + len(data))):
                    raise EOFError(f"{self._path} ends before byte {start + count:,}")
                data += more
            return data

    def close(self) -> None:
        self._close()
        self._local.close()
