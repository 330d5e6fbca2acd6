"""Zarr replay buffers: the steps of all streams, end to end, and the end of each stream.

Guarantee: opening unpacks only the array of the ends.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import re
import weakref
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.files import damage_named, hashed, package
from stream_dataloader.stores._base.formats import given_columns
from stream_dataloader.stores._base.handles import Handles
from stream_dataloader.stores._base.rows import RowSteps, Selection, check_row, selected
from stream_dataloader.stores._base.store import Index, Store
from stream_dataloader.streams._media.limits import DEFAULT, Limits
from stream_dataloader.streams._media.listing import entries_in, is_hidden
from stream_dataloader.streams._media.section import KnownFile, closed_on_error
from stream_dataloader.streams.array.tables import check_rows
from stream_dataloader.streams.cache.gate import Files, Gate

__all__ = ["ZarrStore"]

#: Files that describe an array of format 2, and a group or an array of format 3.
_ARRAY, _NODE = ".zarray", "zarr.json"

#: Packages of codecs that replay buffers use, by the beginning of the codecs' names.
_CODECS = {
    "imagecodecs_": "imagecodecs (imagecodecs.numcodecs.register_codecs())",
    "numcodecs.": "numcodecs with what this codec needs",
    "pcodec": "pcodec",
    "zfpy": "zfpy",
    "wavpack": "wavpack-numcodecs",
    "blosc2": "blosc2",
}

#: Largest number of streams, because a damaged store may claim any number.
_MOST_STREAMS = 1 << 24


class ZarrStore(Store):
    """Replay buffer of diffusion_policy: flat arrays, and the ends of episodes.

    An item is a dict of the arrays' rows; arrays in nested groups are nested dicts.
    A chunk that was lost is read as zeros. Needs the extra `zarr`.

    Args:
        path: A folder, or a `.zarr.zip`.
        data: The group of the arrays; `"/"` is the root.
        ends: The array with the ends of streams.
        columns: Names of arrays, such as `["img", "action"]`, or of groups of them. A single
            name gives items that are arrays, not dicts. None reads all.
        files: Files that links in the folder may lead to: `"inside"` it, or `"anywhere"`.
        limits: Largest size of a chunk; see `streams.Limits`. None: the defaults.
    """

    format: ClassVar[str] = "zarr"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        data: str = "data",
        ends: str = "meta/episode_ends",
        columns: str | Sequence[str] | None = None,
        files: Files = "inside",
        limits: Limits | None = None,
    ) -> None:
        self._opened: Handles[str, _Opened] = Handles(functools.partial(_Opened, files=files, limits=limits))
        columns = given_columns(columns, alone=True)
        super().__init__(path, data=data, ends=ends, columns=columns, files=files, limits=limits)
        _ = self.index

    def _check_links(self) -> None:
        """Check nothing yet. Arrays are checked at their first read, because a store may have a million chunks."""
        if os.path.isdir(self.path):
            Gate(self.path, self._options["files"]).check_links(levels=2)

    def _read_index(self) -> _Index:
        with closing(self._opened.lease(self.path)) as lease, damage_named(self.path):
            opened: _Opened = lease.handle
            data, ends = (self._options[name].strip("/") for name in ("data", "ends"))
            below = f"{data}/" if data else ""
            places = {place[len(below) :]: place for place in opened.places() if place.startswith(below)}
            if not places:
                raise StoreError(f"{self.path} has no group {data!r} of arrays; it has {opened.listed()}")
            there = [name for name, place in places.items() if place != ends]
            selection = selected(self._options["columns"], there, f"{self.path}, {data or '/'}")
            stops = self._stops(opened.array(ends), f"{self.path}, {ends}")
            arrays = {name: opened.array(places[name]) for name in selection.names}
            described = [[name, array.described] for name, array in arrays.items()]
            version = str(opened.group.metadata.zarr_format)
        steps = int(stops[-1]) if len(stops) else 0
        if wrong := {name: len(array) for name, array in arrays.items() if len(array) != steps}:
            found = shorten(wrong, 300)
            raise StoreError(f"{self.path}: {ends} ends at step {steps}, and others at {found}; use columns=")
        texts = [json.dumps(one, sort_keys=True, default=str) for one in described]
        known = {places[name]: array.known for name, array in arrays.items()}
        is_folder = os.path.isdir(self.path)
        times = [(place, (one.modified_ns, 0 if is_folder else one.size)) for place, one in known.items()]
        fingerprint = hashed(stops.tobytes(), *texts, repr(sorted(times)))
        starts = np.concatenate([np.zeros(1, np.int64), stops[:-1]]) if len(stops) else stops
        return _Index(fingerprint, stops - starts, starts, known, selection, version)

    def _stops(self, array: _Array, name: str) -> NDArray[np.int64]:
        if array.row_shape or array.dtype.kind not in "iu" or len(array) > _MOST_STREAMS:
            found = f"{array.dtype} {(len(array), *array.row_shape)}"
            raise StoreError(f"{name} is {found}; it should be a list of ints, one a stream")
        stops = np.asarray(array.unpack(0, len(array)), np.int64)
        if len(stops) and (stops[0] < 0 or (stops[1:] < stops[:-1]).any()):
            raise StoreError(f"{name} is damaged: {shorten(stops.tolist(), 200)} is not in ascending order")
        return stops

    def _open_steps(self, number: int) -> RowSteps:
        index: _Index = self.index
        for known in index.places.values():
            known.check()
        lease = self._opened.lease(self.path)
        with closed_on_error(lease):
            start, steps = int(index.starts[number]), int(index.lengths[number])
            tables = [_Rows(lease.handle.array(place)) for place in index.places]
            return RowSteps(index.selection.structure, tables, steps, first=start, close=lease.close)

    def _metadata(self) -> Mapping[str, Any]:
        """Return the attributes of the root."""
        with closing(self._opened.lease(self.path)) as lease, damage_named(self.path):
            found: dict[str, Any] = lease.handle.group.attrs.asdict()
            return found


@dataclass
class _Index(Index):
    """See `Store._read_index`."""

    starts: NDArray[np.int64]
    places: dict[str, KnownFile]  # files that describe the leaves' arrays
    selection: Selection
    version: str


class _Opened:
    """Open store of this process; `group` is its root."""

    def __init__(self, path: str, files: Files, limits: Limits | None) -> None:
        self._files, self._limits = files, limits or DEFAULT
        zarr = package("zarr", f"with Python 3.11 or later, {path}", "zarr")
        folders, archives = zarr.storage.LocalStore, zarr.storage.ZipStore
        if not os.path.exists(path):
            raise FileNotFoundError(f"there is no Zarr folder or .zarr.zip at {path}")
        self._path = path
        self._arrays: dict[str, _Array] = {}
        self._places: list[str] | None = None
        store = folders(path, read_only=True) if os.path.isdir(path) else archives(path, mode="r")
        try:
            with damage_named(path):
                # Consolidated metadata is a copy. It is outdated if data were appended without renewing it.
                self.group = zarr.open_group(store, mode="r", use_consolidated=False)
        except BaseException:
            if hasattr(store, "_zf"):  # a ZipStore has this once it is open
                store.close()
            raise

    def array(self, place: str) -> _Array:
        if place not in self._arrays:
            with damage_named(f"{self._path}, array {place}"):
                if place not in self.places():
                    raise StoreError(f"{self._path} has no array {place!r}; it has {self.listed()}")
                try:
                    array = self.group[place]
                except ValueError as error:
                    raise _without_codec(f"{self._path}, array {place}", error) or error from None
                self._arrays[place] = _Array(self._path, place, array, self._files, self._limits)
        return self._arrays[place]

    def places(self) -> list[str]:
        """Names of the arrays, from the names of files. No array is opened, because it may need a missing package."""
        if self._places is None:
            if os.path.isdir(self._path):
                self._places = sorted(_arrays_below(self._path))
            else:
                with zipfile.ZipFile(self._path) as archive:
                    self._places = sorted(_arrays_of(archive))
        return self._places

    def listed(self) -> str:
        return shorten(self.places(), 300)

    def close(self) -> None:
        self.group.store.close()


def _arrays_below(folder: str, place: str = "") -> Iterator[str]:
    files = {name: os.path.join(folder, name) for name in (_ARRAY, _NODE)}
    content = next((_content_of(path) for path in files.values() if os.path.isfile(path)), None)
    if content is not None and _is_array(content):
        yield place
        return  # below an array there are only chunks
    for entry in entries_in(folder):
        if entry.is_dir():
            yield from _arrays_below(entry.path, f"{place}/{entry.name}".strip("/"))


def _arrays_of(archive: zipfile.ZipFile) -> Iterator[str]:
    for name in archive.namelist():
        place, _, file = name.rpartition("/")
        if file in (_ARRAY, _NODE) and not is_hidden(place) and _is_array(archive.read(name)):
            yield place


def _content_of(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _is_array(content: bytes) -> bool:
    """Return True if the file that describes a node (`.zarray`, `zarr.json`) describes an array."""
    try:
        found = json.loads(content)
    except ValueError:
        return True  # an error will name the damaged file when the array is opened
    return not isinstance(found, dict) or found.get("node_type") != "group"  # of another kind: an error, as above


def _without_codec(name: str, error: ValueError) -> StoreError | None:
    """Return an error about a codec that no installed package has, or None if `error` is about something else."""
    if type(error).__name__ != "UnknownCodecError":
        return None
    codec = re.sub(".*: ", "", str(error)).strip("'\"")
    owner = next((package for start, package in _CODECS.items() if codec.startswith(start)), "the package that has it")
    remedy = f"install {owner} and register it in the module of the main program, so that workers have it too"
    return StoreError(
        f"{name} needs the codec {codec!r}, which is not known here; {remedy}, or leave it out by columns="
    )


class _Array:
    """Array of a store, and its unpacked rows of chunks that streams hold."""

    def __init__(self, path: str, place: str, array: Any, files: Files, limits: Limits) -> None:
        self._name = name = f"{path}, array {place}"
        self._array = array
        folder = os.path.join(path, place)
        self.known = KnownFile.of(folder, name=f"{path}, {place}") if os.path.isdir(path) else KnownFile.of(path)
        self.described = described = array.metadata.to_dict()
        if "pickle" in repr([described.get(key) for key in ("filters", "compressor", "codecs")]).lower():
            raise StoreError(f"{name} was written by pickle, which may run any code")
        codecs = described.get("codecs") or [described.get("compressor")]
        self._is_blosc = bool(codecs[-1]) and "blosc" in (codecs[-1].get("id"), codecs[-1].get("name"))
        self._whole: set[int] = set()  # rows of chunks that were checked
        check_rows(array.shape, array.dtype, name)
        self.row_shape: tuple[int, ...] = tuple(map(int, array.shape[1:]))
        self.dtype: np.dtype[Any] = array.dtype.newbyteorder("=")
        check_row(name, self.row_shape, self.dtype)
        limits.check_chunk(math.prod(array.chunks) * array.dtype.itemsize, name)
        self._unchecked = Gate(path, files) if os.path.isdir(path) else None  # until the first read
        self.chunk_rows = max(1, min(array.chunks[0], array.shape[0]))
        self._chunks: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def __len__(self) -> int:
        return int(self._array.shape[0])

    def chunk(self, number: int) -> Any:
        found = self._chunks.get(number)
        if found is None:
            found = self._chunks[number] = self.unpack(number * self.chunk_rows, (number + 1) * self.chunk_rows)
        return found

    def _check_blosc(self, start: int, stop: int) -> None:
        """Raise if a chunk is shorter than its header says: Blosc would read memory behind it, and deliver that."""
        shape, sizes = self._array.shape[1:], self._array.chunks
        first = {*range(start // sizes[0], -(-stop // sizes[0]))} - self._whole
        rest = [range(-(-size // chunk)) for size, chunk in zip(shape, sizes[1:], strict=True)]
        for place in itertools.product(first, *rest):
            path = os.path.join(self.known.path, self._array.metadata.encode_chunk_key(place))
            with suppress(FileNotFoundError), open(path, "rb", buffering=0) as file:
                size, there = int.from_bytes(file.read(16)[12:], "little"), os.fstat(file.fileno()).st_size
                if there < max(size, 16):
                    found = f"{os.path.relpath(path, self.known.path)} is cut off: it has {there:,} bytes of {size:,}"
                    raise StoreError(f"{self._name}, rows {start} to {stop} cannot be read: chunk {found}")
        self._whole |= first

    def unpack(self, start: int, stop: int) -> Any:
        """Unpack rows `[start, stop)`, as far as the array has them."""
        if self._unchecked is not None:
            self._unchecked.check_links(self.known.path)
            self._unchecked = None
        with self.known, damage_named(f"{self._name}, rows {start} to {stop}"):  # zarr opens chunks by name
            if self._is_blosc and os.path.isdir(self.known.path):  # an archive has a checksum of each file
                self._check_blosc(start, min(stop, len(self)))
            return np.asarray(self._array[start : min(stop, len(self))])


class _Rows:
    """Rows of an array, which keep the latest row of chunks; a `tables.Table`."""

    def __init__(self, array: _Array) -> None:
        self._array = array
        self._kept: tuple[int, Any] = -1, None
        self.row_shape, self.dtype = array.row_shape, array.dtype

    def row(self, index: int) -> Any:
        number, inside = divmod(index, self._array.chunk_rows)
        return np.array(self._chunk(number)[inside], self.dtype)[()]

    def read(self, start: int, out: Any) -> None:
        """Write rows to `out`; whole chunks are unpacked directly into it."""
        position, stop, rows = start, start + len(out), self._array.chunk_rows
        while position < stop:
            number, inside = divmod(position, rows)
            until = stop // rows * rows
            if not inside and until > position and number != self._kept[0]:
                out[position - start : until - start] = self._array.unpack(position, until)
            else:
                until = min(stop, (number + 1) * rows)
                out[position - start : until - start] = self._chunk(number)[inside : inside + until - position]
            position = until

    def _chunk(self, number: int) -> Any:
        if self._kept[0] != number:
            self._kept = -1, None  # released before the next one is allocated
            self._kept = number, self._array.chunk(number)
        return self._kept[1]
