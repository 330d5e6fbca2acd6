"""The table of an episode: its rows among those of other episodes, in files of any number of row groups.

Guarantee: the rows are those that say they are of the episode, and as many as the dataset promises. What is kept of an
episode is its numbers; of pictures, a few rows at a time.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.files import damage_named
from stream_dataloader.stores.lerobot.info import Feature
from stream_dataloader.stores.parquet.columns import Numbers, Objects, Source, column_of
from stream_dataloader.stores.parquet.tables import open_parquet, whole

__all__ = ["Tables", "check_columns", "opened", "read_columns", "values"]


EPISODE = "episode_index"

_MOST_KEPT_BYTES = 128 << 20

_ROWS_AT_ONCE = 1 << 14

_PICTURES_AT_ONCE = 16


class _Footer(NamedTuple):
    """What is known of a file: its footer, and the first and last episode of each row group."""

    metadata: Any
    first: NDArray[np.int64]
    last: NDArray[np.int64]


class Tables:
    """Reads episodes' rows; one a process, shared by its threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: tuple[Any, Any] | None = None

    def read(self, path: str, episode: int, length: int, features: Sequence[Feature], name: str) -> dict[str, Any]:
        """Numbers and texts of an episode, as arrays `(length, ...)` by name."""
        if not length:
            return {feature.name: np.empty((0, *feature.shape), feature.dtype or object) for feature in features}
        columns = list(dict.fromkeys([EPISODE, *(feature.name for feature in features)]))
        with self._lock, damage_named(path):
            table = self._rows(path, episode, columns)
        if table is None or table.num_rows != length:
            found = 0 if table is None else table.num_rows
            raise StoreError(f"{name} has {length} rows by the dataset's meta, and {found} in {path}; download it anew")
        with damage_named(path):
            return {feature.name: values(table.column(feature.name), feature, path) for feature in features}

    def pictures(self, path: str, episode: int, camera: str) -> Iterator[dict[str, Any]]:
        """The pictures of an episode, encoded, from its first row on; the file is open meanwhile.

        Yields:
            `{"bytes": ..., "path": ...}`, either of them None.
        """
        with self._lock:
            footer = _footer(path)
        groups = _groups(footer, episode)
        with opened(path, footer.metadata) as file:
            check_columns(file, (EPISODE, camera), path)
            for batch in file.iter_batches(_PICTURES_AT_ONCE, groups, [EPISODE, camera], use_threads=False):
                column = batch.column(camera)
                for row in np.flatnonzero(_episodes(batch, path) == episode).tolist():
                    found = column[row].as_py()
                    yield found if isinstance(found, dict) else {"bytes": found}

    def _rows(self, path: str, episode: int, columns: list[str]) -> Any:
        """The rows of an episode as a table; None if there are none."""
        footer = _footer(path)
        groups = _groups(footer, episode)
        key = (_identity(path), groups, columns)
        if self._kept is not None and self._kept[0] == key:
            return _of_episode(self._kept[1], episode, path)
        with opened(path, footer.metadata) as file:
            check_columns(file, columns, path)
            if not groups:
                return None
            size = sum(_stored_bytes(footer.metadata.row_group(group), columns) for group in groups)
            if size <= _MOST_KEPT_BYTES:
                table = file.read_row_groups(groups, columns, use_threads=False)
                if any(footer.first[group] != footer.last[group] for group in groups):
                    self._kept = key, table
                return _of_episode(table, episode, path)
            return _collected(
                file.iter_batches(_ROWS_AT_ONCE, groups, columns, use_threads=False),
                episode,
                path,
            )


def _identity(path: str) -> tuple[Any, ...]:
    status = os.stat(path)
    return path, status.st_size, status.st_mtime_ns


def _footer(path: str) -> _Footer:
    with damage_named(path):
        return _read_footer(*_identity(path))


def _groups(footer: _Footer, episode: int) -> list[int]:
    """The row groups that may have rows of an episode."""
    found: list[int] = np.flatnonzero((footer.first <= episode) & (episode <= footer.last)).tolist()
    return found


@functools.lru_cache(maxsize=4)
def _read_footer(path: str, _size: int, _changed: int) -> _Footer:
    """The footer of a file that is what it was when it was read."""
    with opened(path) as file:
        check_columns(file, (EPISODE,), path)
        metadata = file.metadata
        groups = metadata.num_row_groups
        column = next(i for i in range(metadata.num_columns) if metadata.schema.column(i).path == EPISODE)
        first, last = np.zeros(groups, np.int64), np.full(groups, -1, np.int64)
        for group in range(groups):
            statistics = metadata.row_group(group).column(column).statistics
            if statistics is not None and statistics.has_min_max:
                first[group], last[group] = statistics.min, statistics.max
            elif metadata.row_group(group).num_rows:
                found = _episodes(file.read_row_group(group, [EPISODE], use_threads=False), path)
                first[group], last[group] = found.min(), found.max()
        return _Footer(metadata, first, last)


def _stored_bytes(group: Any, columns: Sequence[str]) -> int:
    """What columns of a row group take in memory at most, or nearly; on disk, equal numbers take no room."""
    wanted = tuple(f"{name}." for name in columns)
    chunks = (group.column(i) for i in range(group.num_columns))
    return sum(
        max(chunk.total_uncompressed_size, 8 * chunk.num_values)
        for chunk in chunks
        if chunk.path_in_schema in columns or chunk.path_in_schema.startswith(wanted)
    )


def _episodes(rows: Any, path: str) -> NDArray[np.int64]:
    """Which episode each row is of."""
    column = rows.column(EPISODE)
    if column.null_count:
        raise StoreError(f"{path} has rows without an {EPISODE}; write it anew")
    return np.asarray(column.to_numpy(), np.int64)


def _of_episode(table: Any, episode: int, path: str) -> Any:
    where = np.flatnonzero(_episodes(table, path) == episode)
    if len(where) and where[-1] - where[0] + 1 != len(where):
        raise StoreError(f"{path} has rows of other episodes among those of episode {episode}; write it anew")
    return table.slice(where[0], len(where)) if len(where) else None


def _collected(batches: Iterator[Any], episode: int, path: str) -> Any:
    import pyarrow

    pieces: list[Any] = []
    for batch in batches:
        piece = _of_episode(batch, episode, path)
        if piece is not None:
            pieces.append(piece)
        elif pieces:
            break
    return pyarrow.Table.from_batches(pieces) if pieces else None


_BUFFER_BYTES = 1 << 18


@contextlib.contextmanager
def opened(path: str, metadata: Any = None) -> Iterator[Any]:
    """A `ParquetFile`, whose damage is named; `metadata` is its footer, if it was read before."""
    with damage_named(path), open_parquet(path, metadata, buffer_size=_BUFFER_BYTES) as file:
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
    found: Any = column_of(whole(column), Source(path, feature.name, 0, rows, frozenset(), None, None))
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
