"""Files of tables, and the groups of rows that they are read by.

- Parquet (`PAR1`): a group is a row group, which is read, checked and decoded.
- Arrow IPC, Feather 2 (`ARROW1`), and Arrow IPC streams (`FF FF FF FF`): a group is a record batch, in a memory map.

Guarantee: only the columns that are asked for are read. What pyarrow says of damage comes with the name of the file. A
mapped batch is checked before it is used, so that lengths in it lead nowhere else.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.files import damage_named, inside, matching, read_json
from stream_dataloader.streams._media.known_file import KnownFile
from stream_dataloader.streams._media.names import natural_order
from stream_dataloader.streams._media.section import check_file
from stream_dataloader.streams.cache.file_cache import FileCache, is_url, open_local

__all__ = ["TableFile", "find_tables", "open_parquet", "open_table", "pyarrow_of", "whole"]

_SUFFIXES = (".parquet", ".pq", ".arrow", ".feather", ".ipc")
_PARQUET, _FILE, _STREAM, _FEATHER_1 = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff", b"FEA1"
_DIGESTED_BYTES = 1 << 16


def pyarrow_of(user: str) -> Any:
    """The package pyarrow, with `parquet` and `ipc`; an ImportError names the extra."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(f"{user} needs pyarrow: pip install 'stream-dataloader[arrow]' ({error})") from error
    return pyarrow


def open_parquet(path: str, metadata: Any = None, **options: Any) -> Any:
    """A `ParquetFile` that compares pages with their checksums; `metadata` is its footer, if it was read before.

    It is not read ahead by threads: a worker is forked from a process that may have read before.
    """
    file = pyarrow_of("Parquet").parquet.ParquetFile
    return file(path, metadata=metadata, pre_buffer=False, page_checksum_verification=True, **options)


@dataclass(frozen=True)
class TableFile:
    """One file.

    Attributes:
        path: Of the local file.
        name: What errors and keys call it.
        kind: Its first bytes.
        columns: The names of its columns.
        constants: Columns that the names of folders tell, `key=value`.
        groups: Rows of each group, `(groups,)`.
        digest: Of size, head and tail.
        known: What it was when its groups were listed.
        metadata: Parquet: what pyarrow read of the file's end.
        offsets: IPC stream: where each batch begins.
        held: Keeps a file of the cache.
    """

    path: str
    name: str
    kind: bytes
    columns: tuple[str, ...]
    constants: Mapping[str, Any]
    groups: NDArray[np.int64]
    digest: str
    known: KnownFile
    metadata: Any = field(default=None, repr=False)
    offsets: tuple[int, ...] = ()
    held: Any = field(default=None, repr=False)

    def read(self, group: int, columns: Sequence[str]) -> dict[str, Any]:
        """Some columns of a group, as Arrow's arrays."""
        with self.known, damage_named(self.name):
            found = self._read(group, [name for name in columns if name not in self.constants])
            for name, array in found.items():
                if len(array) != self.groups[group]:
                    raise StoreError(f"{self.name}: column {name!r} has {len(array)} of {self.groups[group]} rows")
        return found

    def _read(self, group: int, columns: list[str]) -> dict[str, Any]:

        if not columns:
            return {}
        if self.kind == _PARQUET:
            with open_parquet(self.path, self.metadata) as file:
                table = file.read_row_group(group, columns=columns, use_threads=False)
            return {name: whole(table.column(name)) for name in columns}
        batch = _batch(self.path, self.kind, self.offsets, group, columns)
        for name in columns:
            batch.column(name).validate(full=True)
        return {name: batch.column(name) for name in columns}

    @property
    def held_while_read(self) -> AbstractContextManager[None]:
        """Raises if rows that lie in the file, as a map, are others than they were."""
        return nullcontext() if self.kind == _PARQUET else self.known


def whole(column: Any) -> Any:
    """A column of a table in one piece."""
    import pyarrow as pa

    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _batch(path: str, kind: bytes, offsets: Sequence[int], group: int, columns: list[str] | None) -> Any:
    """A record batch, in a map of the file; None reads all columns."""
    import pyarrow as pa

    source = pa.memory_map(path)
    if kind == _FILE:
        schema = pa.ipc.open_file(source).schema
        wanted = list(range(len(schema))) if columns is None else [schema.get_field_index(name) for name in columns]
        return pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(included_fields=wanted)).get_batch(group)
    schema = pa.ipc.read_schema(source)
    source.seek(offsets[group])
    return pa.ipc.read_record_batch(pa.ipc.read_message(source), schema)


def open_table(path: str, root: str, cache: Any = None) -> TableFile:
    """Read what a file says of itself."""
    import pyarrow as pa

    held = open_local(path, cache)
    local = held.path
    try:
        check_file(local)
    except ValueError as error:
        raise StoreError(f"{error}; write it anew") from None
    known = KnownFile.of(local, name=path)
    with open(local, "rb") as file:
        head = file.read(_DIGESTED_BYTES)
        file.seek(max(0, known.size - _DIGESTED_BYTES))
        digest = hashlib.blake2b(f"{known.size} ".encode() + head + file.read(_DIGESTED_BYTES), digest_size=16)
    kind = next((magic for magic in (_PARQUET, _FILE, _STREAM) if head.startswith(magic)), None)
    if kind is None:
        what = "of Feather version 1, write it as version 2" if head.startswith(_FEATHER_1) else "neither"
        raise StoreError(f"{path} is {what}: Parquet and Arrow IPC files are read, and it begins with {head[:8]!r}")
    more: dict[str, Any] = {}
    with damage_named(path):
        if kind == _PARQUET:
            with open_parquet(local) as opened:
                metadata, schema = opened.metadata, opened.schema_arrow
            groups = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
            more = {"metadata": metadata}
            if sum(groups) != metadata.num_rows:
                raise StoreError(f"{path} is damaged: {sum(groups)} rows in groups, and {metadata.num_rows} in all")
        elif kind == _FILE:
            with pa.memory_map(local) as source:
                reader = pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(included_fields=[0]))
                groups = [reader.get_batch(group).num_rows for group in range(reader.num_record_batches)]
                schema = pa.ipc.open_file(source).schema
        else:
            schema, groups, offsets = _stream(local)
            more = {"offsets": tuple(offsets)}
        if len(set(schema.names)) < len(schema.names) or (groups and min(groups) < 0):
            raise StoreError(f"{path} has columns {schema.names} of {groups} rows; columns need names of their own")
        constants = {} if is_url(path) else _constants(os.path.relpath(path, root))
        return TableFile(
            local,
            path,
            kind,
            (*schema.names, *(name for name in constants if name not in schema.names)),
            {name: value for name, value in constants.items() if name not in schema.names},
            np.array(groups, np.int64),
            digest.hexdigest(),
            known,
            held=held if is_url(path) else None,
            **more,
        )


def _stream(path: str) -> tuple[Any, list[int], list[int]]:
    """What is in an IPC stream: the schema, and the rows and places of batches."""
    import pyarrow as pa

    groups: list[int] = []
    offsets: list[int] = []
    with pa.memory_map(path) as source:
        schema = pa.ipc.read_schema(source)
        size = source.size()
        while (place := source.tell()) < size:
            try:
                message = pa.ipc.read_message(source)
            except EOFError:  # the mark of the stream's end
                return schema, groups, offsets
            if message.type != "record batch":
                raise StoreError(
                    f"{path} has a {message.type} at byte {place:,}; streams are read without dictionaries, write it "
                    "as Parquet"
                )
            groups.append(pa.ipc.read_record_batch(message, schema).num_rows)
            offsets.append(place)
    raise StoreError(f"{path} has no end mark: it is unfinished or cut off; write it anew")


def _constants(relative: str) -> dict[str, Any]:
    """The columns that names of folders tell, as Hive has them."""
    found: dict[str, Any] = {}
    for part in relative.split(os.sep)[:-1]:
        name, sign, value = part.partition("=")
        if sign and name:
            found[name] = int(value) if value.isdecimal() else value
    return found


def find_tables(path: str, cache: FileCache | None = None) -> list[str]:
    """The paths or URLs of a store's files, in the order of their names, numbers as numbers.

    Args:
        path: A file, a folder with folders in it, or a pattern. In what datasets saved, `state.json` names the files.
        cache: See `patterns.matching`.
    """
    if is_url(path) or not os.path.isdir(path):
        return list(matching(path, cache))
    if os.path.exists(state := os.path.join(path, "state.json")):
        return _saved_dataset(path, read_json(state, dict), state)
    if os.path.exists(splits := os.path.join(path, "dataset_dict.json")):
        names = read_json(splits, dict).get("splits")
        raise StoreError(f"{path} is a DatasetDict of the splits {shorten(names)}; open the folder of one of them")
    found = [
        os.path.join(folder, name)
        for folder, _, names in os.walk(path)
        for name in names
        if name.endswith(_SUFFIXES) and not _is_hidden(os.path.relpath(os.path.join(folder, name), path))
    ]
    if not found:
        raise StoreError(f"{path} has no tables: no name in it ends with {', '.join(_SUFFIXES)}")
    return sorted(found, key=natural_order)


def _is_hidden(relative: str) -> bool:
    return any(part.startswith((".", "_")) for part in relative.split(os.sep))


def _saved_dataset(path: str, state: dict[str, Any], name: str) -> list[str]:
    if state.get("_indices_data_files"):
        raise StoreError(f"{path} is a selection of rows; write them out first, with flatten_indices().save_to_disk()")
    files = state.get("_data_files")
    if not isinstance(files, list) or not files or not all(isinstance(file, dict) for file in files):
        raise StoreError(f"{name} names no files: it is not of a dataset that was saved, or damaged")
    found = [inside(path, file.get("filename"), name) for file in files]
    if missing := [file for file in found if not os.path.exists(file)]:
        raise StoreError(f"{missing[0]} is missing, which {name} names; save the dataset anew")
    return found
