"""Samples of one stream, read at their places in the tars and decoded.

Guarantee: neighbouring members are read by one call. A tar that differs from its index raises an error.

Extensions are those of webdataset 1.0.2; only the last part of `depth.png` counts.

- images, by OpenCV: `(3, H, W)` RGB, uint8 or uint16;
- npy: an array of numbers; npz: a dict of them; cls, id, count and the like: int64;
- txt, text, transcript: a string; json, jsn: dicts and lists;
- mp, msgpack: by the package msgpack; pth, pkl, pickle, pyd: refused unless allowed;
- anything else: bytes.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
import weakref
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from stream_dataloader._engine.items.structure import flatten
from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.files import package
from stream_dataloader.stores._base.rows import Pictures
from stream_dataloader.stores._base.store import replaced
from stream_dataloader.stores._base.stream import put_row
from stream_dataloader.stores.webdataset.members import TarIndex, forget
from stream_dataloader.streams._media.limits import DEFAULT
from stream_dataloader.streams._media.listing import is_hidden
from stream_dataloader.streams._media.picture import Picture
from stream_dataloader.streams._media.section import KnownFile, closed_on_error, file_version
from stream_dataloader.streams.array.tables import read_header
from stream_dataloader.streams.cache import FileCache, is_url, open_local

__all__ = ["Decoder", "KEY", "Samples", "state_of"]


_GAP_BYTES, _MOST_AT_ONCE_BYTES = 1 << 16, 1 << 24
KEY = "__key__"  # as a column

_Members = dict[str, tuple[bytes, str]]  # by column: the bytes, and their name in errors


def state_of(status: os.stat_result) -> str:
    """Return a text that changes if a local file is changed."""
    return " ".join(map(str, file_version(status)))


class Samples:
    """Steps of one stream; see `Steps`."""

    def __init__(
        self,
        index: Any,  # `store.Streams`
        number: int,
        name: str,
        columns: list[str] | None,
        decoder: Decoder,
        cache: FileCache | None,
    ) -> None:
        self._index, self._name = index, name
        self._first, self._count = int(index.start[number]), int(index.lengths[number])
        self._columns, self._decoder, self._cache = columns, decoder, cache
        self._shard = -1
        self._file: _TarFile | None = None

    def __len__(self) -> int:
        return self._count

    def item(self, index: int) -> Any:
        ((_, members),) = self._read(index, 1)
        columns = self._columns or members
        return {name: self._decoder.item(name, *members[name]) for name in columns}

    def read(self, start: int, out: Any) -> None:
        for row, (key, members) in enumerate(self._read(start, len(flatten(out)[1][0]))):
            if not isinstance(out, dict) or out.keys() != members.keys():
                raise self._unlike(key, members, out)
            for column, (data, name) in members.items():
                self._decoder.write(column, data, name, out[column], row)

    def _read(self, start: int, count: int) -> Iterator[tuple[str, _Members]]:
        sample, stop = self._first + start, self._first + start + count
        while sample < stop:
            shard = self._index.shard_of(sample)
            begin, end = self._index.starts[shard : shard + 2].tolist()
            yield from self._of_shard(shard, sample - begin, min(stop, end) - sample)
            sample = end

    def _of_shard(self, shard: int, first: int, count: int) -> Iterator[tuple[str, _Members]]:
        tar, path = self._index.tars[shard], self._index.paths[shard]
        file = self._opened(shard, path, tar)
        begin, end = int(tar.first[first]), int(tar.first[first + count])
        wanted = (begin + np.flatnonzero(self._wanted[tar.kind[begin:end]])).tolist()
        contents = _contents(file, tar, wanted)
        for sample in range(first, first + count):
            key = tar.key(sample)
            found: _Members = {}
            for kind in tar.kind[int(tar.first[sample]) : int(tar.first[sample + 1])].tolist():
                if self._wanted[kind]:
                    extension = tar.extensions[kind]
                    found[extension] = next(contents), f"{self._name}, {path}: {key}.{extension}"
            for column in self._columns or ():
                if column == KEY:
                    found[KEY] = key.encode("utf-8", "surrogateescape"), KEY
                elif column not in found:
                    raise self._unlike(key, found, [column])
            yield key, found

    def _unlike(self, key: str, found: Iterable[str], wanted: Iterable[str]) -> StoreError:
        found, wanted = sorted(found), sorted(wanted)
        what = f"{self._name}: sample {key!r} has {found}, not {wanted}"
        return StoreError(f"{what}; give columns= that all have")

    def _opened(self, shard: int, path: str, tar: TarIndex) -> _TarFile:
        if self._file is None or shard != self._shard:
            self.close()
            self._file, self._shard = _TarFile(path, tar, self._cache), shard
            self._wanted = np.array([name in (self._columns or (name,)) for name in tar.extensions], bool)
        return self._file

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _contents(file: _TarFile, tar: TarIndex, members: list[int]) -> Iterator[bytes]:
    starts = tar.offset[members]
    stops = starts + tar.size[members]
    spans = list(zip(starts.tolist(), stops.tolist(), strict=True))
    first = 0
    for number, (_, stop) in enumerate(spans, 1):
        begin, after = spans[first][0], spans[number : number + 1]
        is_far = not after or after[0][0] - stop > _GAP_BYTES
        if is_far or after[0][1] - begin > _MOST_AT_ONCE_BYTES:
            held = file.read(begin, stop - begin)
            for one, other in spans[first:number]:
                yield held[one - begin : other - begin]
            first = number


class _TarFile:
    """Open tar, which can be read at any place."""

    def __init__(self, path: str, tar: TarIndex, cache: FileCache | None) -> None:
        self._path = path
        opened = contextlib.ExitStack()
        self.close = weakref.finalize(self, opened.close)
        with closed_on_error(self):
            local = opened.enter_context(open_local(path, cache))
            self._file = opened.enter_context(open(local.path, "rb", buffering=0))  # noqa: SIM115
            self._known = KnownFile.of(local.path, self._file.fileno(), name=path)
            state = os.path.basename(local.path)
            if not is_url(path):
                state = state_of(os.fstat(self._file.fileno()))
            if state != tar.state:
                if is_url(path):
                    forget(path)
                raise replaced(path)

    def read(self, start: int, count: int) -> bytes:
        with self._known:
            data = os.pread(self._file.fileno(), count, start)
            while len(data) < count:  # a read may be short, after a signal or of 2 GB
                if not (more := os.pread(self._file.fileno(), count - len(data), start + len(data))):
                    raise EOFError(f"{self._path} ends before byte {start + count:,}")
                data += more
            return data


_IMAGES = frozenset({"jpg", "jpeg", "png", "webp", "bmp", "ppm", "pgm", "tif", "tiff"})

_TEXTS = frozenset({"txt", "text", "transcript"})

_NUMBERS = frozenset({"cls", "cls2", "class", "count", "index", "inx", "id", "int"})

_JSON = frozenset({"json", "jsn"})

_PICKLED = frozenset({"pkl", "pickle", "pyd", "pth"})


class Decoder:
    """Decoder of members; `decode` may have functions for some extensions."""

    def __init__(
        self, picture: Picture, decode: bool | Mapping[str, Callable[[bytes], Any]], allow_pickle: bool
    ) -> None:
        self._picture, self._decode, self._allow_pickle = picture, decode is not False, allow_pickle
        self._limits = picture.limits or DEFAULT
        self._own = dict(decode) if isinstance(decode, Mapping) else {}

    @functools.cached_property
    def _images(self) -> Pictures:
        return Pictures(self._picture, "reading images of a WebDataset")

    def item(self, extension: str, data: bytes, name: str) -> Any:
        if extension == KEY:
            return data.decode("utf-8", "surrogateescape")
        kind = extension.rpartition(".")[2] if self._decode else ""
        if (own := self._own.get(extension)) is not None:
            try:
                return own(data)
            except Exception as error:  # of user code
                raise StoreError(f"{name}: decode= raised {type(error).__name__}: {error}") from error
        if kind in _IMAGES:
            return self._images.item(data, name)
        try:
            if kind == "npy":
                return _array(data, name)
            if kind == "npz":
                with zipfile.ZipFile(io.BytesIO(data)) as found:
                    members = found.infolist()
                    self._limits.check_unpacked(len(data), sum(one.file_size for one in members), name)
                    shown = [one for one in members if not is_hidden(one.filename)]
                    return {one.filename.removesuffix(".npy"): _array(_member(found, one), name) for one in shown}
            if kind in ("mp", "msgpack"):
                return package("msgpack", name).unpackb(data)
            if kind in _TEXTS:
                return data.decode("utf-8")
            if kind in _NUMBERS:
                return np.int64(int(data))
            if kind in _JSON:
                return self._limits.json(data)
        except StoreError:
            raise
        except (ValueError, RecursionError, OverflowError, zipfile.BadZipFile) as error:
            raise StoreError(f"{name} cannot be decoded: {str(error) or type(error).__name__}") from None
        return self._unpickled(kind, data, name) if kind in _PICKLED else data

    def write(self, extension: str, data: bytes, name: str, out: Any, row: int) -> None:
        as_image = self._decode and extension not in self._own
        if as_image and isinstance(out, np.ndarray) and extension.rpartition(".")[2] in _IMAGES:
            self._images.item(data, name, out[row])
        else:
            put_row(self.item(extension, data, name), out, row, name)

    def _unpickled(self, kind: str, data: bytes, name: str) -> Any:
        if not self._allow_pickle:
            raise StoreError(f"{name} is pickled, and may run any code; allow_pickle=True reads it")
        try:
            if kind == "pth":
                import torch

                return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
            return pickle.loads(data)
        except Exception as error:  # a pickle may raise anything
            raise StoreError(f"{name} cannot be unpickled: {error!r}") from error


def _member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    """Return a member's bytes. Unless it is told how many there are, zipfile unpacks more than the archive claims."""
    with archive.open(member) as file:
        return file.read(member.file_size)


def _array(data: bytes, name: str) -> Any:
    """Return the array of a `.npy` file after checking its size."""
    header = read_header(io.BytesIO(data), name)
    if header.dtype.kind not in "biufc":
        raise ValueError(f"it is of dtype {header.dtype}; leave it out by columns=")
    if header.file_bytes != len(data):
        raise ValueError(f"{len(data):,} bytes of {header.file_bytes:,}")
    flat = np.frombuffer(data, header.dtype, offset=header.offset)
    order: Any = "F" if header.fortran_order else "C"
    array = flat.reshape(header.shape, order=order)
    return np.array(array, header.dtype.newbyteorder("="), order="C")[()]
