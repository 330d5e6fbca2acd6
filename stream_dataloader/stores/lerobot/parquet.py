"""Parquet files that may hold anything: what pyarrow raises becomes an error that names the file.

No file stays open.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.arrow import arrow_errors, open_parquet
from stream_dataloader.stores.lerobot.info import Feature

__all__ = ["check_columns", "opened", "read_columns", "reading", "values"]

_BUFFER_BYTES = 1 << 18


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Name the file in what pyarrow raises."""
    try:
        with arrow_errors(functools.partial(_damaged, path)):
            yield
    except FileNotFoundError:
        raise StoreError(
            f"{path} is missing: the dataset is unfinished or damaged; download or write it anew"
        ) from None
    except OSError as error:
        raise type(error)(error.errno, f"{path} cannot be read: {error}") from error


def _damaged(path: str, error: BaseException) -> StoreError:
    return StoreError(f"{path} is damaged: {shorten(str(error), 200)}; download or write it anew")


@contextlib.contextmanager
def opened(path: str, metadata: Any = None) -> Iterator[Any]:
    """A `ParquetFile`, within `reading`; `metadata` is its footer, if it was read before."""
    with reading(path), open_parquet(path, metadata, buffer_size=_BUFFER_BYTES) as file:
        yield file


def check_columns(file: Any, columns: Sequence[str], path: str) -> None:
    """Refuse a file that lacks columns."""
    names = file.schema_arrow.names
    if missing := [name for name in columns if name not in names]:
        raise StoreError(f"{path} has no column {', '.join(map(repr, missing))}; it has {shorten(names, 300)}")
    if twice := [name for name in columns if names.count(name) > 1]:
        raise StoreError(f"{path} has the columns {twice} twice; write it anew")


def read_columns(path: str, columns: Sequence[str]) -> Any:
    """Columns of a file as an Arrow table."""
    with opened(path) as file:
        check_columns(file, columns, path)
        return file.read(columns=list(columns), use_threads=False).select(list(columns))


def values(column: Any, feature: Feature, what: str) -> NDArray[Any]:
    """A column's rows as an array of its own.

    Args:
        column: Arrow's, in one or several chunks; numbers, or lists of lists of them, all of one length.
        feature: What the rows should be.
        what: For errors: which column of which file.

    Returns:
        `(rows, *shape)`, of the feature's dtype; texts as objects.
    """
    import pyarrow

    rows = len(column)
    chunks = [_flat(chunk, what) for chunk in column.chunks if len(chunk)]
    shapes = {shape for shape, _ in chunks}
    if len(shapes) > 1:
        raise StoreError(f"{what} has rows of the shapes {sorted(shapes)}")
    found = next(iter(shapes), feature.shape)
    if found != feature.shape and not (rows and int(np.prod(found)) == int(np.prod(feature.shape))):
        raise StoreError(f"{what} has rows of the shape {found}, and meta/info.json says {feature.shape}")
    if feature.dtype is None:
        texts: NDArray[Any] = np.empty(rows, object)
        texts[:] = [text for _, flat in chunks for text in flat.to_pylist()]
        return texts
    wanted = pyarrow.from_numpy_dtype(feature.dtype)
    parts = []
    for _, flat in chunks:
        if feature.dtype.kind == "b" and flat.type != wanted:  # any number but 0 would be true
            raise StoreError(f"{what} is of {flat.type}, and meta/info.json says bool; write it anew")
        # A number that the dtype cannot hold is an error: the cast is a safe one.
        cast = flat if flat.type.equals(wanted) else flat.cast(wanted)
        parts.append(cast.to_numpy(zero_copy_only=False))
    joined = np.concatenate(parts, dtype=feature.dtype) if parts else np.empty(0, feature.dtype)
    return joined.reshape(rows, *feature.shape)


def _flat(array: Any, what: str) -> tuple[tuple[int, ...], Any]:
    """The shape of an array's rows, and their numbers end to end."""
    from pyarrow import types

    shape: list[int] = []
    while True:
        if array.null_count:
            raise StoreError(
                f"{what} lacks {array.null_count} of its values; leave the column out by columns=, or fill it"
            )
        if hasattr(array, "storage"):  # an extension type, as the package datasets has for arrays of more axes
            array = array.storage
        elif types.is_fixed_size_list(array.type):
            shape.append(array.type.list_size)
            array = array.flatten()
        elif types.is_list(array.type) or types.is_large_list(array.type):
            sizes = np.diff(array.offsets.to_numpy())
            if len(sizes) and (sizes != sizes[0]).any():
                raise StoreError(
                    f"{what} has rows of different lengths, {sizes.min()} to {sizes.max()}; leave it out by columns="
                )
            shape.append(int(sizes[0]) if len(sizes) else 0)
            array = array.flatten()
        else:
            return tuple(shape), array
