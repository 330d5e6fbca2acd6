"""HDF5 files that may be damaged or replaced: opening them, and the datasets of a stream in them.

Guarantee: what h5py raises about damage says which file or stream. A dataset that claims much more than is on the disk,
or lies in another file, is refused before anything is read of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.rows import Selection, check_lengths, check_row, check_untold
from stream_dataloader.streams._media.known_file import KnownFile
from stream_dataloader.streams.array.hdf5 import Hdf5Table, open_file

__all__ = [
    "REMEDY",
    "attributes",
    "check_size",
    "classes",
    "hdf5_errors",
    "open_known",
    "open_tables_of",
]

REMEDY = "name others by columns=, or leave the stream out"

_LARGEST_ATTRIBUTE_BYTES = 1 << 24

#: Datasets of more bytes have to be on the disk, a thousandth of them at least: gzip packs zeros as tightly as that.
_LARGEST_UNCHECKED_BYTES, _MOST_PACKED = 64 << 20, 1100


@contextmanager
def hdf5_errors(name: str) -> Iterator[None]:
    """Have what h5py raises about a damaged file say which; `name` is of the file or the stream."""
    try:
        yield
    except StoreError:
        raise
    except (KeyError, RuntimeError, TypeError, ValueError, OverflowError, MemoryError, AttributeError) as error:
        text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
        if str(name) not in text:
            text = f"{name} is damaged: {text or repr(error)}; write it anew"
        raise StoreError(text) from error
    except OSError as error:
        if error.errno is not None or str(name) in str(error):
            raise
        raise StoreError(f"{name} is damaged: {error}; write it anew") from error


def open_known(known: KnownFile) -> Any:
    """Open a file, if it is what it was: an `h5py.File`."""
    known.check()
    try:
        return open_file(known.path, known.path)
    except OSError as error:
        if isinstance(error.__cause__, BlockingIOError):
            raise
        raise StoreError(str(error)) from error


def classes() -> tuple[Any, Any]:
    """h5py's classes of groups and of datasets."""
    import h5py

    return h5py.Group, h5py.Dataset


def open_tables_of(file: Any, name: str, group: str, selection: Selection, length: int) -> list[Hdf5Table]:
    """Open a stream's datasets."""
    tables: list[Hdf5Table] = []
    with hdf5_errors(name):
        for leaf in selection.names:
            path = f"{group.rstrip('/')}/{leaf}"
            found = file.get(path)
            if not isinstance(found, classes()[1]):
                raise StoreError(f"{name} has no dataset {leaf!r}; {REMEDY}")
            if found.file.id != file.id or found.external:
                raise StoreError(f"{name}: {leaf!r} lies in another file, which is refused; copy it into this one")
            table = Hdf5Table(file, name, found)
            check_row(f"{name}, {leaf}", table.row_shape, table.dtype)
            check_size(f"{name}, {leaf}", found, len(table) * math.prod(table.row_shape) * table.dtype.itemsize)
            tables.append(table)
        steps = check_lengths(name, {leaf: len(table) for leaf, table in zip(selection.names, tables, strict=True)})
        check_untold(name, steps, (math.prod(table.row_shape) for table in tables))
        told = file[group].attrs.get("num_samples", steps)
        if steps != length or np.ndim(told) or told != steps:
            raise StoreError(
                f"{name} has {steps} steps, and should have {length if steps != length else told} (as its attribute "
                "num_samples says): it is damaged or half written; write it anew"
            )
    return tables


def check_size(name: str, dataset: Any, claimed: int) -> None:
    """Refuse a dataset that claims much more than is on the disk."""
    if claimed <= _LARGEST_UNCHECKED_BYTES or dataset.is_virtual:
        return
    there = dataset.id.get_storage_size()
    if dataset.chunks is not None:
        there = dataset.id.get_num_chunks() * math.prod(dataset.chunks) * dataset.dtype.itemsize
    if claimed > _MOST_PACKED * there:
        raise StoreError(
            f"{name} is {dataset.dtype} {dataset.shape}, {claimed:,} bytes, and {there:,} of them are there: it is "
            "damaged, or was never written"
        )


def attributes(group: Any, name: str) -> dict[str, Any]:
    """A group's attributes, as plain values; large ones are left out."""
    found: dict[str, Any] = {}
    with hdf5_errors(name):
        for key in group.attrs:
            if group.attrs.get_id(key).get_storage_size() > _LARGEST_ATTRIBUTE_BYTES:
                continue
            value = group.attrs[key]
            if isinstance(value, bytes):
                value = value.decode("utf-8", "replace")
            found[str(key)] = value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
    return found
