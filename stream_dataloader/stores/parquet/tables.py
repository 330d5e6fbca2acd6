"""Tables, and the groups of rows in which they are read.

- Parquet: a group is a row group, which is read, checked and decoded.
- Arrow IPC, Feather 2, and Arrow IPC streams: a group is a record batch, in a memory map.
- a `Dataset` of the package datasets: a group is some of its rows, by its own indices.

Guarantee: only requested columns are read.
A mapped batch is checked before it is used, so that wrong lengths cannot lead outside of it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.files import damage_named, digest_of, inside, matching, package, read_json
from stream_dataloader.stores.parquet.claims import (
    Leaves,
    check_group,
    check_messages,
    leaves_of,
    messages_of_file,
    messages_of_stream,
)
from stream_dataloader.stores.parquet.columns import joined
from stream_dataloader.streams._media.limits import DEFAULT, Limits
from stream_dataloader.streams._media.listing import files_below
from stream_dataloader.streams._media.section import KnownFile, check_file
from stream_dataloader.streams.cache import FileCache, is_url, open_local

__all__ = ["DatasetTable", "TableFile", "dataset_of", "decoded_features", "find_tables", "open_parquet"]

_SUFFIXES = (".parquet", ".pq", ".arrow", ".feather", ".ipc")
_PARQUET, _FILE, _STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"

#: Largest size of a group of a `Dataset`.
_ROWS, _BYTES = 1000, 16 << 20


def open_parquet(path: str, metadata: Any = None, **options: Any) -> Any:
    """Open a `ParquetFile` that compares checksums, and starts no threads."""
    options |= {"pre_buffer": False, "page_checksum_verification": True}
    return package("pyarrow.parquet", path, "arrow").ParquetFile(path, metadata=metadata, **options)


class TableFile:
    """One file; folders `key=value` below the `root` are columns."""

    def __init__(
        self, path: str, root: str | None = None, cache: FileCache | None = None, limits: Limits | None = None
    ) -> None:
        self.name, self._limits = path, limits or DEFAULT
        self._held = open_local(path, cache)  # open for as long as this object
        with damage_named(path):
            self.path = check_file(self._held.path)
        self.known = KnownFile.of(self.path, name=path)
        with open(self.path, "rb") as file:
            head = file.read(8)
        self.metadata: Any = None  # footer of a Parquet file
        self._leaves: dict[tuple[str, ...], Leaves] = {}
        with damage_named(path):
            if head.startswith(_PARQUET):
                groups, names = self._parquet()
            elif head.startswith((_FILE, _STREAM)):
                groups, names = self._ipc(is_stream=head.startswith(_STREAM))
            else:
                raise StoreError(f"{path} begins with {head!r}: it is no Parquet, Feather 2 or Arrow IPC")
        if len(set(names)) < len(names) or min(groups, default=0) < 0:
            raise StoreError(f"{path} has columns {names}, which need names of their own")
        #: First row of each group, and the number of rows.
        self.first = np.cumsum([0, *groups], dtype=np.int64)
        self._constants = {} if root is None or is_url(path) else _constants(os.path.relpath(path, root))
        self.columns = self.shown = list(dict.fromkeys([*names, *self._constants]))
        self._stored = frozenset(names)
        self.size = self.known.size

    def _parquet(self) -> tuple[list[int], list[str]]:
        with open_parquet(self.path) as opened:
            self.metadata = found = opened.metadata
            names = opened.schema_arrow.names
        return [found.row_group(group).num_rows for group in range(found.num_row_groups)], names

    def _ipc(self, *, is_stream: bool) -> tuple[list[int], list[str]]:
        import pyarrow as pa

        self._batches: list[Any] | None = None
        with open(self.path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            messages = list((messages_of_stream if is_stream else messages_of_file)(data))
        groups = check_messages(messages, self._limits, self.name)
        with pa.memory_map(self.path) as source:
            if not is_stream:
                return groups, pa.ipc.open_file(source).schema.names
            reader = pa.ipc.open_stream(source)
            self._batches = list(reader)
            source.seek(max(0, source.tell() - len(_END_OF_STREAM)))
            if source.read(len(_END_OF_STREAM)) != _END_OF_STREAM:
                raise StoreError(f"{self.name} has no end mark: it is unfinished or cut off")
            return [batch.num_rows for batch in self._batches], reader.schema.names

    def _mapped(self, columns: Sequence[str], group: int | None = None) -> list[Any]:
        import pyarrow as pa

        if self._batches is not None:
            return self._batches if group is None else [self._batches[group]]
        source = pa.memory_map(self.path)
        schema = pa.ipc.open_file(source).schema
        fields = [schema.get_field_index(name) for name in columns]
        options = pa.ipc.IpcReadOptions(included_fields=fields)
        reader = pa.ipc.open_file(source, options=options)
        groups = range(reader.num_record_batches) if group is None else [group]
        return [reader.get_batch(number) for number in groups]

    def read(self, columns: Sequence[str], group: int | None = None) -> dict[str, Any]:
        """Read some columns of a group, or of all rows, as Arrow's arrays."""
        import pyarrow as pa

        rows = int(self.first[-1])
        if group is not None:
            rows = int(self.first[group + 1] - self.first[group])
        with self.known, damage_named(self.name):
            found = self._read([name for name in columns if name in self._stored], group)
            for name, array in found.items():
                if len(array) != rows:
                    raise StoreError(f"{self.name}: column {name!r} has {len(array)} of {rows} rows")
        for name in columns:
            if name not in found:
                value = pa.scalar(self._constants[name])
                self._limits.check_unpacked(self.size, rows * max(8, len(str(value))), self.name)
                found[name] = pa.repeat(value, rows)
        return {name: found[name] for name in columns}

    def _read(self, columns: list[str], group: int | None) -> dict[str, Any]:
        import pyarrow as pa

        if not columns:
            return {}
        if self.metadata is None:
            table = pa.Table.from_batches(self._mapped(columns, group)).select(columns)
            table.validate(full=True)
        else:
            with open_parquet(self.path, self.metadata) as file:
                groups = range(len(self.first) - 1) if group is None else [group]
                leaves = self._leaves_of(columns)
                for number in groups:
                    check_group(self.metadata.row_group(number), leaves, self.size, self._limits, self.name)
                table = file.read_row_groups(groups, columns, use_threads=False)
        return {name: joined(table.column(name)) for name in columns}

    def _leaves_of(self, columns: Sequence[str]) -> Leaves:
        if (key := tuple(columns)) not in self._leaves:
            self._leaves[key] = leaves_of(self.metadata.schema, columns)
        return self._leaves[key]

    @property
    def digest(self) -> str:
        return digest_of(self.known)

    @property
    def held_while_read(self) -> AbstractContextManager[None]:
        """Return a context that raises if rows in a map have changed."""
        return self.known if self.metadata is None else nullcontext()


def _constants(relative: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in relative.split(os.sep)[:-1]:
        name, sign, value = part.partition("=")
        if sign and name:
            found[name] = int(value) if value.isdecimal() else value
    return found


def find_tables(path: str, cache: FileCache | None = None, split: str | None = None) -> list[str]:
    """Return the paths or URLs of a store's files."""
    splits = os.path.join(path, "dataset_dict.json")
    if not is_url(path) and os.path.exists(splits):
        names = read_json(splits, dict).get("splits") or ()
        if split is None or split not in names:
            raise StoreError(f"{path}: split is {split!r}; give one of {shorten(names)}")
        return find_tables(os.path.join(path, split))
    if split is not None:
        raise StoreError(f"{path} is no DatasetDict, and split is {split!r}")
    if is_url(path) or not os.path.isdir(path):
        return list(matching(path, cache))
    if os.path.exists(state := os.path.join(path, "state.json")):
        return _saved_dataset(path, read_json(state, dict), state)
    # Spark and Hive write notes and unfinished tables under names that begin with an underscore.
    found = [file for file in files_below(path, _SUFFIXES) if f"{os.sep}_" not in file[len(path.rstrip(os.sep)) :]]
    if not found:
        raise StoreError(f"{path} has no tables: no name in it ends with {', '.join(_SUFFIXES)}")
    return found


def _saved_dataset(path: str, state: dict[str, Any], name: str) -> list[str]:
    if state.get("_indices_data_files"):
        raise StoreError(f"{path} has indices; give what load_from_disk returns")
    with damage_named(name):
        found = [inside(path, file["filename"], name) for file in state["_data_files"]]
    if not found or not all(map(os.path.exists, found)):
        raise StoreError(f"{name} names no files, or such as are missing; save the dataset again")
    return found


class DatasetTable:
    """Rows of a `Dataset`; see `TableFile`."""

    held_while_read = nullcontext()

    def __init__(self, name: str, dataset: Any) -> None:
        self.name, self.digest, self._dataset = name, dataset._fingerprint, dataset
        self.columns, self.shown = dataset.column_names, dataset.format["columns"]
        self.size = dataset.data.nbytes
        at_once = min(_ROWS, max(1, _BYTES * len(dataset) // max(1, self.size)))
        self.first = np.append(np.arange(0, len(dataset), at_once), len(dataset))
        self._chosen: dict[str, Any] = {}

    def read(self, columns: Sequence[str], group: int | None = None) -> dict[str, Any]:
        rows = slice(None) if group is None else slice(*self.first[group : group + 2].tolist())
        if (key := str(columns)) not in self._chosen:  # takes milliseconds
            self._chosen[key] = self._dataset.select_columns(list(columns)).with_format("arrow")
        table = self._chosen[key][rows]
        return {name: joined(table.column(name)) for name in columns}


def dataset_of(given: Any, split: str | None) -> Any:
    """Return a `Dataset` or `IterableDataset`, or one split of several."""
    is_dict = isinstance(given, Mapping) and len(given) > 0
    found = next(iter(given.values())) if is_dict else given
    if not any(kind.__module__.startswith("datasets.") for kind in type(found).__mro__):
        raise TypeError(f"path is {shorten(given)}; give a path, a URL or a Dataset")
    if is_dict or split is not None:
        splits = list(given) if is_dict else []
        if split not in splits:
            raise StoreError(f"split is {split!r}; give one of {splits}")
        found = given[split]
    if getattr(found, "format", {}).get("type") == "custom":
        raise StoreError("the dataset's transform is not called; use map")
    if getattr(found, "_distributed", None) is not None:
        raise StoreError("the dataset is split by node; give all of it")
    return found


def decoded_features(features: Mapping[str, Any] | None, above: str = "") -> dict[str, str]:
    """Return the kinds of features that the package datasets decodes, by column, with dots in structs."""
    found: dict[str, str] = {}
    for name, feature in (features or {}).items():
        if isinstance(feature, Mapping):
            found |= decoded_features(feature, f"{above}{name}.")
        elif getattr(feature, "decode", False) is True:
            found[above + name] = type(feature).__name__
    return found
