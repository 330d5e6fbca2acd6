"""Zarr replay buffers: arrays of all streams' steps, and where each stream ends.

::

    data/action             (steps, 2)              all streams' steps, end to end
    data/img                (steps, 96, 96, 3)
    meta/episode_ends       (streams,)              first step behind each stream, counted over all steps

(As diffusion_policy's `common/replay_buffer.py` writes it, in Zarr's format 2. Formats 2 and 3 are read by the package
zarr, 3.1.)

Guarantee: opening unpacks no array but that of the ends, and that is as long as it says on the disk. Rows that share a
chunk with others are taken from the chunk that was unpacked last, of which all streams of a process have one copy;
chunks that are wanted whole are unpacked together, and not kept. An archive is opened in the process that reads it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import weakref
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.files import damage_named
from stream_dataloader.stores._base.handles import Handles
from stream_dataloader.stores._base.options import given_columns, renamed
from stream_dataloader.stores._base.rows import (
    RowSteps,
    Selection,
    check_row,
    check_untold,
    selected,
)
from stream_dataloader.stores._base.store import Store
from stream_dataloader.streams._media.known_file import KnownFile
from stream_dataloader.streams._media.section import closed_on_error
from stream_dataloader.streams.array.tables import check_rows

__all__ = ["ZarrStore"]

_LARGEST_UNCHECKED_BYTES = 1 << 20
_MOST_CHUNKS_OF_ENDS = 1 << 20

#: What the chunks of one row of them may take: they are unpacked together.
_LARGEST_CHUNKS_BYTES = 4 << 30


class ZarrStore(Store):
    """A replay buffer as diffusion_policy has it: flat arrays of all episodes' steps, and where each episode ends.

    A stream is one range of steps, and an item is a dict of the arrays' rows: `{"action": ..., "img": ...}`; arrays in
    groups below are dicts in it. Zarr's formats 2 and 3 are read. Needs the package zarr, which needs Python 3.11
    (`pip install 'stream-dataloader[zarr]'`).

    A lane keeps one unpacked chunk of each leaf. Write chunks no longer than a few windows, if memory is short. In a
    Zarr store a chunk that is not there is one of fill values, so a chunk that was lost cannot be told from zeros.

    Args:
        path: A folder, or an archive (`.zarr.zip`).
        data: The group of the arrays; `"/"` is the root.
        ends: The array that says where streams end, counted in steps from the store's first.
        columns: Names of the arrays to read, such as `["img", "action"]`; a group's name stands for all in it. A single
            name gives items that are arrays, not dicts. None reads all.
    """

    format: ClassVar[str] = "zarr"

    @renamed(leaves="columns")
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        data: str = "data",
        ends: str = "meta/episode_ends",
        columns: str | Sequence[str] | None = None,
    ) -> None:
        for name, value in (("data", data), ("ends", ends)):
            if not isinstance(value, str) or not value:
                raise TypeError(f"{name} is {value!r}; give a path in the store, such as 'data'")
        self._data, self._ends = data.strip("/"), ends.strip("/")
        self._opened: Handles[str, _Opened] = Handles(_Opened)
        super().__init__(path, data=data, ends=ends, columns=given_columns(columns, alone=True))
        _ = self.index

    def close(self) -> None:
        """Close the archive, as soon as no stream reads it; see `Store.close`."""
        super().close()
        self._opened.close()

    def _read_index(self) -> _Index:
        with (
            closing(self._opened.lease(self.path)) as lease,
            damage_named(self.path),
        ):
            opened: _Opened = lease.handle
            group: Any = opened.group
            above = group.get(self._data) if self._data else group
            if not hasattr(above, "members"):
                raise StoreError(f"{self.path} has no group {self._data!r}; it has {opened.listed()}; name it by data=")
            there = sorted(name for name, found in above.members(max_depth=None) if hasattr(found, "chunks"))
            arrays = [name for name in there if self._place(name) != self._ends]
            selection = selected(
                self._options["columns"],
                arrays,
                f"{self.path}, {self._data or '/'}",
            )
            stops = self._stops(opened)
            chosen = {name: opened.array(self._place(name)) for name in selection.names}
            described = [[name, group[self._place(name)].metadata.to_dict()] for name in selection.names]
        steps = int(stops[-1]) if len(stops) else 0
        if wrong := {name: len(array) for name, array in chosen.items() if len(array) != steps}:
            raise StoreError(
                f"{self.path}: {self._ends} ends at step {steps}, and there are arrays with other numbers of steps: "
                f"{shorten(wrong, 300)}; the store is half written, or they are no data: choose others by columns="
            )
        check_untold(
            self.path,
            steps,
            (math.prod(array.row_shape) for array in chosen.values()),
        )
        digest = hashlib.blake2b(stops.tobytes(), digest_size=16)
        for one in described:
            digest.update(json.dumps(one, sort_keys=True, default=str).encode())
        known = {self._place(name): array.known for name, array in chosen.items()}
        times = {name: (one.modified_ns, 0 if os.path.isdir(self.path) else one.size) for name, one in known.items()}
        digest.update(repr(sorted(times.items())).encode())
        starts = np.concatenate([np.zeros(1, np.int64), stops[:-1]]) if len(stops) else stops
        version = str(group.metadata.zarr_format)
        return _Index(
            digest.hexdigest(),
            stops - starts,
            starts,
            [*known.values()],
            selection,
            version,
        )

    def _place(self, name: str) -> str:
        return f"{self._data}/{name}" if self._data else name

    def _stops(self, opened: _Opened) -> NDArray[np.int64]:
        """Where streams end."""
        array = opened.array(self._ends)  # which refuses what is not of numbers
        name = f"{self.path}, {self._ends}"
        if array.row_shape or array.dtype.kind not in "iu":
            raise StoreError(f"{name} is {array.dtype} {(len(array), *array.row_shape)}; it should be a list of ints")
        claimed = len(array) * array.dtype.itemsize
        if claimed > _LARGEST_UNCHECKED_BYTES:
            found: Any = opened.group[self._ends]
            if found.nchunks > _MOST_CHUNKS_OF_ENDS:  # zarr would list them all
                raise StoreError(
                    f"{name} has {claimed:,} bytes in {found.nchunks:,} chunks, more than {_MOST_CHUNKS_OF_ENDS:,}: "
                    "it is damaged, or has to be written anew in larger chunks"
                )
            there = found.nchunks_initialized * math.prod(found.shards or found.chunks) * array.dtype.itemsize
            if there < claimed:
                raise StoreError(f"{name} has {claimed:,} bytes, and {there:,} of them are there: it is half written")
        stops = array.unpack(0, len(array))
        if len(stops) and (stops[0] < 0 or (stops[1:] < stops[:-1]).any() or stops[-1] > np.iinfo(np.int64).max):
            raise StoreError(f"{name} is not in ascending order: {shorten(stops.tolist(), 200)}; the store is damaged")
        return np.asarray(stops, np.int64)

    def _open_steps(self, number: int) -> RowSteps:
        index: _Index = self.index
        for array in index.arrays:
            array.check()
        lease = self._opened.lease(self.path)
        with closed_on_error(lease):
            arrays = [lease.handle.array(self._place(name)) for name in index.selection.names]
            start, steps = int(index.starts[number]), int(index.lengths[number])
            return RowSteps(
                index.selection,
                [_Rows(array, start, steps) for array in arrays],
                lease.close,
            )

    def _version(self) -> str:
        return str(self.index.version)

    def _metadata(self) -> Mapping[str, Any]:
        """The root's attributes."""
        with (
            closing(self._opened.lease(self.path)) as lease,
            damage_named(self.path),
        ):
            found: dict[str, Any] = lease.handle.group.attrs.asdict()
            return found

    def check_stream(self, number: int) -> None:
        """Read one stream, which compares checksums if arrays were written with them (crc32c, in format 3).

        Raises:
            StoreError: It is damaged.
        """
        with closing(self._open_steps(number)) as steps:
            steps.check()


class _Index(NamedTuple):
    """See `Store._read_index`."""

    fingerprint: str
    lengths: NDArray[np.int64]
    starts: NDArray[np.int64]
    arrays: list[KnownFile]  # their folders: the time is that of the last chunk that came or went; or the archive
    selection: Selection
    version: str

    def __len__(self) -> int:
        return len(self.lengths)


class _Opened:
    """A store that is open in this process, with the arrays that were asked for; `group` is the root."""

    def __init__(self, path: str) -> None:
        try:
            import zarr
            from zarr.storage import LocalStore, ZipStore
        except ImportError as error:
            raise ImportError(
                f"reading {path} needs zarr, on Python 3.11 or later: pip install 'stream-dataloader[zarr]'"
            ) from error
        if not os.path.exists(path):
            raise FileNotFoundError(f"there is no store at {path}; give a Zarr folder, or a .zarr.zip archive")
        self._path = path
        self._arrays: dict[str, _Array] = {}
        store = LocalStore(path, read_only=True) if os.path.isdir(path) else ZipStore(path, mode="r")
        try:
            with damage_named(path):
                self.group = zarr.open_group(store, mode="r")
        except BaseException:
            if hasattr(store, "_zf"):  # which a ZipStore has once it is open
                store.close()
            raise

    def array(self, place: str) -> _Array:
        """An array by its path in the store."""
        if place not in self._arrays:
            with damage_named(f"{self._path}, array {place}"):
                array = self.group.get(place)
                if not hasattr(array, "chunks"):
                    raise StoreError(f"{self._path} has no array {place!r}; it has {self.listed()}")
                self._arrays[place] = _Array(self._path, place, array)
        return self._arrays[place]

    def listed(self) -> str:
        """What there is, for errors."""
        return shorten(sorted(name for name, _ in self.group.members(max_depth=None)), 300)

    def close(self) -> None:
        """Close the archive, if it is one; streams that read it raise."""
        self.group.store.close()


class _Array:
    """An array of a store, and the rows of chunks that some stream holds."""

    def __init__(self, path: str, place: str, array: Any) -> None:
        self._name = name = f"{path}, array {place}"
        self._array = array
        folder = os.path.join(path, place)
        self.known = KnownFile.of(folder, name=f"{path}, {place}") if os.path.isdir(path) else KnownFile.of(path)
        described = array.metadata.to_dict()
        if "pickle" in repr([described.get(key) for key in ("filters", "compressor", "codecs")]).lower():
            raise StoreError(f"{name} was written by pickle, which runs code when it is read; it is refused")
        check_rows(array.shape, array.dtype, name)
        self.row_shape: tuple[int, ...] = tuple(map(int, array.shape[1:]))
        self.dtype: np.dtype[Any] = array.dtype.newbyteorder("=")
        check_row(name, self.row_shape, self.dtype)
        self.chunk_rows = max(1, min(array.chunks[0], array.shape[0]))
        across = math.prod(-(-size // chunk) for size, chunk in zip(array.shape[1:], array.chunks[1:], strict=True))
        unpacked = math.prod(array.chunks) * self.dtype.itemsize * across
        if unpacked > _LARGEST_CHUNKS_BYTES:
            raise StoreError(
                f"{name} is {array.dtype} {tuple(array.shape)} in chunks {tuple(array.chunks)}: {unpacked:,} bytes "
                f"would be unpacked for a step, more than {_LARGEST_CHUNKS_BYTES:,}; it is damaged, or has to be "
                "written anew in smaller chunks"
            )
        self._chunks: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def __len__(self) -> int:
        return int(self._array.shape[0])

    def chunk(self, number: int) -> Any:
        """The rows of one chunk, and of those beside it."""
        found = self._chunks.get(number)
        if found is None:
            found = self._chunks[number] = self.unpack(number * self.chunk_rows, (number + 1) * self.chunk_rows)
        return found

    def unpack(self, start: int, stop: int) -> Any:
        """Rows, as far as there are."""
        with (
            self.known,
            damage_named(f"{self._name}, rows {start} to {stop}"),
        ):  # zarr opens chunks by their names
            return np.asarray(self._array[start : min(stop, len(self))])


class _Rows:
    """The rows of a stream, and the chunk that it was in last."""

    def __init__(self, array: _Array, start: int, length: int) -> None:
        self._array = array
        self._start = start
        self._length = length
        self._kept: tuple[int, Any] = -1, None
        self.row_shape, self.dtype = array.row_shape, array.dtype

    def __len__(self) -> int:
        return self._length

    def row(self, index: int) -> Any:
        number, inside = divmod(self._start + index, self._array.chunk_rows)
        return np.array(self._chunk(number)[inside], self.dtype)[()]

    def read(self, start: int, out: Any) -> None:
        """Write rows to `out`, and keep the chunk that is needed next time.

        ::

            chunks      |  0    |  1    |  2    |  3    |
            rows                xx xxxxxx xxxxxx xx          0 is kept from before, 1 and 2 are read straight, 3 is kept
        """
        first = position = self._start + start
        stop, rows = first + len(out), self._array.chunk_rows
        while position < stop:
            number, inside = divmod(position, rows)
            until = stop // rows * rows
            if not inside and until > position and number != self._kept[0]:
                out[position - first : until - first] = self._array.unpack(position, until)
            else:
                until = min(stop, (number + 1) * rows)
                out[position - first : until - first] = self._chunk(number)[inside : inside + until - position]
            position = until

    def _chunk(self, number: int) -> Any:
        if self._kept[0] != number:
            self._kept = -1, None  # given back before the next one takes room
            self._kept = number, self._array.chunk(number)
        return self._kept[1]

    def close(self) -> None:
        self._kept = -1, None
