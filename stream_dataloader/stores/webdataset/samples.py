"""One stream's samples, read at their places in the tars, and decoded by the extensions of their members.

Guarantee: members that lie side by side are read by one call. A tar that is not what its index says is an error.

What the package webdataset decodes (1.0.2, `autodecode`), with less trust:

- images (jpg, png, webp, bmp, ppm, tiff, ...), by OpenCV: `(3, H, W)` RGB, uint8 or uint16; see the options;
- npy: an array of numbers; cls, id, count and the like: a whole number, as text: int64;
- txt, text, transcript: a string; json, jsn: what it says, in dicts and lists;
- pth, pkl, pickle: refused unless allowed, as they run code when they are read;
- anything else: bytes.

Of `depth.png`, the last part counts.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stream_dataloader._items.structure import flatten
from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.pictures import Pictures
from stream_dataloader.stores._base.stream import put_row
from stream_dataloader.stores.webdataset.members import TarIndex, forget
from stream_dataloader.streams._media.known_file import KnownFile
from stream_dataloader.streams._media.picture import Picture
from stream_dataloader.streams._media.section import closed_on_error
from stream_dataloader.streams.array.tables import read_header
from stream_dataloader.streams.cache.file_cache import FileCache, LocalFile, is_url, open_local

__all__ = ["Decoder", "KEY", "Samples", "state_of"]


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
        index: Any,  # `store.Streams`
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


_IMAGES = frozenset({"jpg", "jpeg", "png", "webp", "bmp", "ppm", "pgm", "tif", "tiff"})

_TEXTS = frozenset({"txt", "text", "transcript"})

_NUMBERS = frozenset({"cls", "cls2", "class", "count", "index", "inx", "id", "int"})

_JSON = frozenset({"json", "jsn"})

_PICKLED = frozenset({"pkl", "pickle", "pth"})


class Decoder:
    """Decodes members; used by one thread at a time."""

    def __init__(self, picture: Picture, *, decode: bool, allow_pickle: bool) -> None:
        self._decode = decode
        self._picture = picture
        self._allow_pickle = allow_pickle
        self._pictures: Pictures | None = None

    def item(self, extension: str, data: bytes, name: str) -> Any:
        """What a member holds."""
        kind = extension.rpartition(".")[2] if self._decode else ""
        if kind in _IMAGES:
            return self._images().item(data, name)
        try:
            if kind == "npy":
                return _array(data, name)
            if kind in _TEXTS:
                return data.decode("utf-8")
            if kind in _NUMBERS:
                return np.int64(int(data))
            if kind in _JSON:
                return json.loads(data)
        except (ValueError, RecursionError, OverflowError) as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError(f"{name} cannot be decoded: {error}") from None
        return self._unpickled(kind, data, name) if kind in _PICKLED else data

    def write(self, extension: str, data: bytes, name: str, out: Any, row: int) -> None:
        """Decode a member into a row of a batch."""
        if self._decode and isinstance(out, np.ndarray) and extension.rpartition(".")[2] in _IMAGES:
            self._images().item(data, name, out[row])
        else:
            put_row(self.item(extension, data, name), out, row, name)

    def _images(self) -> Pictures:
        if self._pictures is None:
            self._pictures = Pictures(self._picture, "reading images of a WebDataset")
        return self._pictures

    def _unpickled(self, kind: str, data: bytes, name: str) -> Any:
        if not self._allow_pickle:
            raise StoreError(
                f"{name} is pickled, and reading it may run any code; leave it out by columns=, or give "
                "allow_pickle=True if you trust who made it"
            )
        try:
            if kind == "pth":
                import torch

                return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
            return pickle.loads(data)
        except Exception as error:  # a pickle may raise anything
            raise StoreError(f"{name} cannot be unpickled: {type(error).__name__}: {error}") from error


def _array(data: bytes, name: str) -> Any:
    """The array of a `.npy` file, whose header is compared with the bytes there are before anything is allocated."""
    file = io.BytesIO(data)
    header = read_header(file, name)
    if header.dtype.hasobject or header.dtype.kind not in "biufc":
        raise StoreError(f"{name} is of dtype {header.dtype}, and arrays are of numbers; leave it out by columns=")
    if header.file_bytes != len(data):
        raise StoreError(f"{name} is damaged: {len(data):,} bytes of {header.file_bytes:,}; write it anew")
    flat = np.frombuffer(data, header.dtype, offset=header.offset)
    order: Any = "F" if header.fortran_order else "C"
    return np.array(flat.reshape(header.shape, order=order), header.dtype.newbyteorder("="), order="C")[()]
