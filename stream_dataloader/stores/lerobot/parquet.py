"""Parquet files that may hold anything: what pyarrow raises becomes an error that names the file.

No file stays open.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.arrow import arrow_errors, open_parquet
from stream_dataloader.stores.lerobot.info import Feature
from stream_dataloader.stores.parquet.columns import Numbers, Objects, Source, column_of
from stream_dataloader.stores.parquet.tables import whole

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


def values(column: Any, feature: Feature, path: str) -> NDArray[Any]:
    """A column's rows as an array of its own, `(rows, *shape)` of the feature's dtype; texts as objects."""
    import pyarrow

    rows = len(column)
    what = f"{path}: {feature.name!r}"
    found: Any = column_of(whole(column), Source(path, feature.name, 0, rows, frozenset(), None))
    if feature.dtype is None and isinstance(found, Objects):
        texts: NDArray[Any] = np.empty(rows, object)
        texts[:] = [text[0] if isinstance(text, list) else text for text in found.array.to_pylist()]
        return texts
    if not isinstance(found, Numbers) or feature.dtype is None:
        raise StoreError(f"{what} is of {column.type}, and meta/info.json says {feature.dtype or feature.kind}")
    shape = found.array.shape[1:]
    if rows and math.prod(shape) != math.prod(feature.shape):
        raise StoreError(f"{what} has rows of the shape {shape}, and meta/info.json says {feature.shape}")
    if feature.dtype.kind == "b" and found.array.dtype != feature.dtype:  # any number but 0 would be true
        raise StoreError(f"{what} is of {found.array.dtype}, and meta/info.json says bool; write it anew")
    if found.array.dtype == feature.dtype:
        return np.array(found.array).reshape(rows, *feature.shape)  # a copy: it is a part of other episodes' rows
    # A number that the dtype cannot hold is an error: the cast is a safe one.
    cast = pyarrow.array(found.array.reshape(-1)).cast(pyarrow.from_numpy_dtype(feature.dtype))
    return np.array(cast.to_numpy(zero_copy_only=False)).reshape(rows, *feature.shape)
