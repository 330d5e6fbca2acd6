"""Rows of HDF5 datasets, read by h5py.

Guarantee: one call reads large rows into the batch. Shared chunks are unpacked once.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from contextlib import suppress
from itertools import count
from typing import Any

import numpy as np

from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.streams.array.hdf5_files import KnownFiles, Sources, check_size, open_file
from stream_dataloader.streams.array.tables import check_rows, chunks_of

__all__ = ["Hdf5Table", "datasets_in", "found_in", "is_hdf5", "open_file"]

#: Largest cache of unpacked chunks for a lane. It holds the chunks of one row if they fit.
_LARGEST_CHUNK_CACHE_BYTES = 64 << 20

#: Groups that link to each other have names without end.
_MOST_LEVELS, _MOST_GROUPS = 64, 1024

#: Larger rows are read in place: this is 0.5 times as fast as a copy for 1 KB, but 1.6 times for 1 MB.
_IN_PLACE_BYTES = 32 << 10


def is_hdf5(path: str) -> bool:
    """Return True for an HDF5 file, even if other data come before its signature."""
    with suppress(ImportError):
        import h5py

        return bool(h5py.is_hdf5(path))
    return False


def datasets_in(group: Any, sources: Sources, label: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return all datasets below a group by name, and what is wrong with the names that cannot be read.

    Links and second names of an object count as names of their own.
    """
    found: dict[str, Any] = {}
    wrong: dict[str, str] = {}
    _walk(group, "", [], (found, wrong, count()), sources, label)
    return found, wrong


def _walk(group: Any, way: str, above: list[Any], names: Any, sources: Sources, label: str) -> None:
    import h5py

    found, wrong, groups = names
    if len(above) > _MOST_LEVELS:  # HDF5 looks up each group from the root, with a recursion in C
        raise StoreError(f"{group.file.filename} has groups that are nested more than {_MOST_LEVELS} deep")
    if next(groups) == _MOST_GROUPS:
        raise StoreError(f"{label} has more than {_MOST_GROUPS:,} groups, or groups with many names")
    for key in sorted(group, key=os.fsencode):
        if isinstance(key, bytes):
            wrong[f"{way}{os.fsdecode(key)}"] = "is no text in UTF-8"
            continue
        name = way + key
        try:
            sources.check_links(group, key, label)
        except StoreError as error:
            wrong[name] = f"is not read: {error}"
            continue
        one = group.get(key)
        if isinstance(one, h5py.Dataset):
            found[name] = one
        elif isinstance(one, h5py.Group) and one in (group, *above):
            wrong[name] = "is a group that contains it"
        elif isinstance(one, h5py.Group):
            _walk(one, f"{name}/", [group, *above], names, sources, label)
        elif one is None:
            wrong[name] = "is a link that leads nowhere"


def found_in(file: Any, name: str, dataset: str | None, sources: Sources) -> Any:
    """Return a dataset of a file by name, or the file's only dataset if `dataset` is None."""
    found = _found_in(file, name, dataset, sources)
    label = f"{name}, dataset {found.name}"
    sources.check(found, label)
    check_size(label, found)
    return found


def _found_in(file: Any, name: str, dataset: str | None, sources: Sources) -> Any:
    import h5py

    if dataset is not None:
        sources.check_links(file, dataset, name)
    if dataset is not None and isinstance(found := file.get(dataset), h5py.Dataset):
        return found
    there, _ = datasets_in(file, sources, name)
    if dataset is None and len(set(there.values())) == 1:  # it may have several names
        return there.popitem()[1]
    listed = shorten({name: one.shape for name, one in there.items()}, 300)
    asked = "name one by ArrayStream(dataset=...)" if dataset is None else f"{dataset!r} is none of them"
    raise ValueError(f"{name} has {len(there)} datasets: {listed}; {asked}")


class Hdf5Table:
    """Rows of an `h5py.Dataset`, whose file stays open; a `tables.Table`."""

    alike: Any = None

    def __init__(self, dataset: Any, name: str, known: KnownFiles | None = None) -> None:
        self._known = known  # other files that the dataset is read from
        dtype = dataset.dtype  # read once, because h5py makes a new one each time
        self._name = f"{name}, dataset {dataset.name}"
        check_rows(dataset.shape or (), dtype, self._name)
        self.dtype: np.dtype[Any] = dtype.newbyteorder("=")
        self.row_shape: tuple[int, ...] = dataset.shape[1:]
        self._rows = dataset.shape[0]
        if dataset.chunks is not None:
            _check_filters(dataset, self._name)
            dataset = _with_room_for_chunks(dataset)
        self._dataset = dataset

    def __len__(self) -> int:
        return int(self._rows)

    def row(self, index: int) -> Any:
        out = np.empty((1, *self.row_shape), self.dtype)
        self.read(index, out)
        return out[0]

    def read(self, start: int, out: Any) -> None:
        if self._known:
            with self._known:
                self._read(start, out)
        else:
            self._read(start, out)

    def _read(self, start: int, out: Any) -> None:
        try:
            if (flat := _memory_of(out)) is None:
                out[...] = self._dataset[start : start + len(out)]
                return
            memory, selected = flat
            rows = self._dataset.id.get_space()
            rows.select_hyperslab((start, *(0 for _ in self.row_shape)), (len(out), *self.row_shape))
            self._dataset.id.read(selected, rows, memory)
        except OSError as error:
            if error.errno is not None:
                raise
            # An error of the library: a wrong checksum, or a chunk that cannot be unpacked.
            what = f"{self._name}, rows {start} to {start + len(out)}"
            raise StoreError(f"{what}: {error}; it is damaged") from error

    def close(self) -> None:
        self._dataset = None


def _check_filters(dataset: Any, name: str) -> None:
    """Raise if a filter is missing. Importing hdf5plugin registers its filters."""
    from h5py import h5z

    created = dataset.id.get_create_plist()
    for number, _, _, kind in map(created.get_filter, range(created.get_nfilters())):
        if not h5z.filter_avail(number):
            with suppress(ImportError):
                importlib.import_module("hdf5plugin")
        if not h5z.filter_avail(number):
            called = f"the filter {number} ({kind.decode(errors='replace')})"
            remedy = "which is not there: pip install hdf5plugin"
            if sys.modules.get("hdf5plugin") is not None:
                remedy = "which hdf5plugin has not: have HDF5_PLUGIN_PATH name the folder of its library"
            raise ImportError(f"{name} was written with {called}, {remedy}; or leave this dataset out")


def _with_room_for_chunks(dataset: Any) -> Any:
    """Open the dataset again with a cache that keeps the unpacked chunks of a row."""
    from h5py import Dataset, h5d, h5p

    across = chunks_of(dataset, axis=1)
    size = across * math.prod(dataset.chunks) * dataset.dtype.itemsize
    if size > _LARGEST_CHUNK_CACHE_BYTES:
        return dataset
    # HDF5's defaults, or ten slots a chunk, as its manual advises.
    access = h5p.create(h5p.DATASET_ACCESS)
    access.set_chunk_cache(min(max(521, 10 * across + 1), 1 << 20), max(1 << 20, size), 1.0)
    return Dataset(h5d.open(dataset.file.id, dataset.name.encode(), access))


def _memory_of(out: Any) -> tuple[Any, Any] | None:
    """Return the memory from the first byte of `out` to its last, and the selection of the rows in it.

    Rows of other lanes lie between a lane's rows. HDF5 does not write to them::

        memory     r r r r . . . . r r r r . . . . r r r r        3 rows of 4 items, one every 8

    None if rows are small, or not contiguous.
    """
    size = math.prod(out.shape[1:])
    if size * out.itemsize < _IN_PLACE_BYTES or not out[0].flags.c_contiguous:
        return None
    stride, rest = divmod(out.strides[0], out.itemsize)
    if rest or stride < 0:
        return None
    from h5py import h5s

    stride = max(stride, size)
    length = (len(out) - 1) * stride + size
    memory = np.lib.stride_tricks.as_strided(out, (length,), (out.itemsize,))
    selected = h5s.create_simple((length,))
    selected.select_hyperslab((0,), (len(out),), (stride,), (size,))
    return memory, selected
