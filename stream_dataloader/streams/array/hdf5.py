"""Rows of HDF5 datasets, read by h5py.

Guarantee: one call of the HDF5 library reads large rows into the batch, without an array in between. Compressed chunks
that several reads share are unpacked once. A file is locked for reading while it is open, if the file system can do
that (HDF5_USE_FILE_LOCKING=FALSE in the environment switches locks off).
"""

from __future__ import annotations

import importlib
import math
import os
from contextlib import suppress
from types import ModuleType
from typing import Any

import numpy as np

from stream_dataloader.errors import StoreError
from stream_dataloader.streams.array.tables import check_rows

__all__ = ["Hdf5Table", "is_hdf5", "open_file"]

#: A lane keeps as many unpacked chunks as a row of them takes, up to this.
_LARGEST_CHUNK_CACHE_BYTES = 64 << 20

#: Of more chunks in a row of them, none is kept: the table of their places is ten times as long.
_MOST_CHUNKS_ACROSS = 1 << 16

#: Rows of this size and above are read in place: 0.5 times as fast as a copy with 1 KB, 1.6 times with 1 MB.
_IN_PLACE_BYTES = 32 << 10

_LISTED = 20


def is_hdf5(path: str) -> bool:
    """Whether this is an HDF5 file; its signature may follow a block of other data, so h5py looks for it."""
    try:
        import h5py
    except ImportError:
        return False
    return bool(h5py.is_hdf5(path))


def open_file(path: str, name: str) -> Any:
    """Open a file for reading: an `h5py.File`; errors call it `name`."""
    try:
        import h5py
    except ImportError as error:
        raise ImportError(f"reading {name} needs h5py: pip install 'stream-dataloader[h5py]'") from error
    try:
        return h5py.File(path, "r", locking="best-effort")
    except BlockingIOError as error:
        raise BlockingIOError(
            error.errno,
            f"{name} is open for writing elsewhere; close it there, or set HDF5_USE_FILE_LOCKING=FALSE to read what "
            "is there",
        ) from error
    except OSError as error:
        raise OSError(f"{name} is not a whole HDF5 file: {_text(error)}; write it anew") from error


class Hdf5Table:
    """Rows of one dataset; a `tables.Table`.

    Args:
        file: An `h5py.File`, which stays open.
        name: What it is called in errors.
        dataset: Its name, or an `h5py.Dataset` of the file; None for the only one.
    """

    def __init__(self, file: Any, name: str, dataset: Any) -> None:
        import h5py

        found = dataset if isinstance(dataset, h5py.Dataset) else _find(h5py, file, name, dataset)
        dtype = found.dtype  # asked for once: h5py makes a new one each time
        self._name = f"{name}, dataset {found.name}"
        if found.shape is None:
            raise ValueError(f"{self._name} is empty: it has neither shape nor rows")
        if dtype.hasobject:
            raise ValueError(f"{self._name} holds strings, references or rows of many lengths, not numbers")
        check_rows(found.shape, dtype, self._name)
        _check_filters(h5py, found, self._name)
        self._h5py = h5py
        self._dataset = _with_room_for_chunks(h5py, found)
        self.dtype: np.dtype[Any] = dtype.newbyteorder("=")
        self.row_shape: tuple[int, ...] = found.shape[1:]
        self._rows = found.shape[0]

    def __len__(self) -> int:
        return int(self._rows)

    def row(self, index: int) -> Any:
        out = np.empty((1, *self.row_shape), self.dtype)
        self.read(index, out)
        return out[0]

    def read(self, start: int, out: Any) -> None:
        try:
            if (flat := _memory_of(self._h5py, out)) is None:
                out[...] = self._dataset[start : start + len(out)]
                return
            memory, selected = flat
            rows = self._dataset.id.get_space()
            rows.select_hyperslab((start, *(0 for _ in self.row_shape)), (len(out), *self.row_shape))
            self._dataset.id.read(selected, rows, memory)
        except OSError as error:
            what = f"{self._name}, rows {start} to {start + len(out)}: {_text(error)}"
            if error.errno is None:  # the library's own: a wrong checksum, or a chunk that cannot be unpacked
                raise StoreError(f"{what}; it is damaged, write it anew") from error
            raise OSError(error.errno, what) from error

    def close(self) -> None:
        self._dataset = None


def _find(h5py: ModuleType, file: Any, name: str, dataset: str | None) -> Any:
    if dataset is not None and isinstance(found := file.get(dataset), h5py.Dataset):
        return found
    names: list[str] = []
    file.visititems(lambda name, found: names.append(name) if isinstance(found, h5py.Dataset) else None)
    if dataset is None and len(names) == 1:
        return file[names[0]]
    listed = ", ".join([f"{name!r} {file[name].shape}" for name in names[:_LISTED]] + ["..."] * (len(names) > _LISTED))
    asked = "name one by ArrayStream(dataset=...)" if dataset is None else f"{dataset!r} is none of them"
    raise ValueError(f"{name} has {len(names)} datasets: {listed}; {asked}")


def _check_filters(h5py: ModuleType, dataset: Any, name: str) -> None:
    """Raise if a filter of a dataset is missing; importing hdf5plugin registers its own."""
    if dataset.chunks is None:
        return
    created = dataset.id.get_create_plist()
    for number, _, _, kind in map(created.get_filter, range(created.get_nfilters())):
        if not h5py.h5z.filter_avail(number):
            with suppress(ImportError):
                importlib.import_module("hdf5plugin")
        if not h5py.h5z.filter_avail(number):
            raise ImportError(
                f"{name} was written with the filter {number} ({kind.decode(errors='replace')}), which is not there: "
                "pip install hdf5plugin, or write it anew with gzip or lzf"
            )


def _with_room_for_chunks(h5py: ModuleType, dataset: Any) -> Any:
    """The dataset, opened so that the chunks of a row stay unpacked from one read to the next."""
    if dataset.chunks is None:
        return dataset
    across = math.prod(-(-size // chunk) for size, chunk in zip(dataset.shape[1:], dataset.chunks[1:], strict=True))
    size = across * math.prod(dataset.chunks) * dataset.dtype.itemsize
    if size > _LARGEST_CHUNK_CACHE_BYTES or across > _MOST_CHUNKS_ACROSS:
        return dataset
    # 521 slots and 1 MiB are HDF5's defaults. Its manual advises ten slots a chunk. Chunks that were read in full are
    # evicted first.
    access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
    access.set_chunk_cache(max(521, 10 * across + 1), max(1 << 20, size), 1.0)
    name = dataset.name.encode()
    return h5py.Dataset(h5py.h5d.open(dataset.file.id, name, access))


def _memory_of(h5py: ModuleType, out: Any) -> tuple[Any, Any] | None:
    """A flat array over all that lies between the first byte of `out` and its last, and which of it are the rows.

    A row is contiguous, and between a lane's rows are other lanes', which HDF5 leaves alone::

        memory     r r r r . . . . r r r r . . . . r r r r        3 rows of 4 items, one every 8

    None if rows are small, or not contiguous.
    """
    size = math.prod(out.shape[1:])
    if (
        size * out.itemsize < _IN_PLACE_BYTES
        or not out[0].flags.c_contiguous
        or out.strides[0] % out.itemsize
        or out.strides[0] < 0
    ):
        return None
    stride = max(out.strides[0] // out.itemsize, size)
    length = (len(out) - 1) * stride + size
    memory = np.lib.stride_tricks.as_strided(out, (length,), (out.itemsize,))
    selected = h5py.h5s.create_simple((length,))
    selected.select_hyperslab((0,), (len(out),), (stride,), (size,))
    return memory, selected


def _text(error: OSError) -> str:
    return str(error) or os.strerror(error.errno or 0)
