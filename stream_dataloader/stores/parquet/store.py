"""Reads streams out of tables: runs of rows that share a key, or files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.options import given_columns, renamed
from stream_dataloader.stores._base.pictures import Pictures
from stream_dataloader.stores._base.store import Store
from stream_dataloader.stores.parquet.rows import Rows, RowSteps
from stream_dataloader.stores.parquet.tables import (
    TableFile,
    find_tables,
    open_table,
    pyarrow_of,
)
from stream_dataloader.streams._media.picture import Picture
from stream_dataloader.streams._media.section import whole_number
from stream_dataloader.streams.cache.file_cache import FileCache

__all__ = ["ParquetStore"]


class ParquetStore(Store):
    """Streams in Parquet and Arrow files: rows with one key, one after the other, are a stream; each row is a step.

    Items are dicts by column; see `stream_dataloader.stores.parquet.columns` for what becomes of Arrow's types. It
    needs the package pyarrow: `pip install 'stream-dataloader[arrow]'`.

    Parquet is read by row groups. One that was read is kept for all streams of the process, up to `cache_bytes`, so
    row groups of some thousand rows serve best. Arrow's IPC files are memory-mapped, and read without a copy unless
    they are compressed.

    Args:
        path: A file, a folder of files, also with folders `key=value` in it, a pattern `"data-{00..15}.parquet"` or
            `"*.parquet"`, or a URL. Files are read in the order of their names.
        stream: The column whose runs of one value are streams, also from one file to the next. None: each file is one.
        columns: Which to read, in this order; None reads all.
        decode: Columns of binary that hold encoded images: `{"image": "image"}`; with dots in structs.
        fill_null: What takes the place of nulls: a value, or values by column. None has nulls raise.
        size: `(height, width)` of images; None keeps theirs.
        layout: `"CHW"`, channels first, or `"HWC"`.
        color: `"rgb"` or `"gray"`.
        upright: Turn images as their EXIF says; False leaves them as they are stored.
        cache_bytes: How much decoded row groups may take that no stream is in, in each process.
        cache: Where files from URLs are kept; None is the cache that all streams share.
    """

    format: ClassVar[str] = "parquet"

    @renamed(key="stream")
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        stream: str | None = None,
        columns: Sequence[str] | None = None,
        decode: Mapping[str, str] | None = None,
        fill_null: Any = None,
        size: tuple[int, int] | None = None,
        layout: Literal["CHW", "HWC"] = "CHW",
        color: Literal["rgb", "gray"] = "rgb",
        upright: bool = True,
        cache_bytes: int = 256 << 20,
        cache: FileCache | None = None,
    ) -> None:
        wanted = given_columns(columns)
        decode = {} if decode is None else dict(decode)
        super().__init__(
            path,
            stream=stream,
            columns=wanted,
            decode=decode or None,
            fill_null=fill_null,
            size=size,
            layout=layout,
            color=color,
            upright=upright,
            cache_bytes=cache_bytes,
            cache=cache,
        )
        pyarrow_of("ParquetStore")
        if wrong := {name: kind for name, kind in decode.items() if kind != "image"}:
            raise ValueError(f"decode is {wrong}; 'image' is what a column can be decoded as")
        whole_number("cache_bytes", cache_bytes, "give a number of bytes from 0 on", 0)
        self._key, self._columns, self._images = stream, wanted, frozenset(decode)
        self._fill, self._cache_bytes, self._cache = fill_null, cache_bytes, cache
        self._picture = Picture(size, layout, color, upright=upright)
        _ = self.index

    def _read_index(self) -> Rows:
        pyarrow_of("ParquetStore")
        paths = find_tables(self.path, self._cache)
        files = [open_table(path, self.path, self._cache) for path in paths]
        pictures = Pictures(self._picture, "reading images of a table") if self._images else None
        wanted = self._wanted(files)
        return Rows(self.path, files, self._key, wanted, self._images, pictures, self._fill, self._cache_bytes)

    def _wanted(self, files: list[TableFile]) -> list[str]:
        wanted = self._columns or list(files[0].columns)
        needed = {
            *wanted,
            *([] if self._key is None else [self._key]),
            *(name.split(".")[0] for name in self._images),
        }
        for file in files:
            if missing := sorted(needed - set(file.columns)):
                raise StoreError(f"{file.name} has no column {missing}; it has {sorted(file.columns)}")
        return wanted

    def _open_steps(self, number: int) -> RowSteps:
        return RowSteps(self.index, number, self.name_of(number))

    def key(self, number: int) -> str:
        return str(self.index.key(self._check_number(number)))

    def metadata(self, number: int) -> Mapping[str, Any]:
        return {"file": self.index.file_of(self._check_number(number)).name}

    def _metadata(self) -> Mapping[str, Any]:
        return {"files": len(self.index.files), "row_groups": len(self.index.first) - 1}

    def _disk_bytes(self) -> int | None:
        rows: Rows = self.index
        return sum(file.known.size for file in rows.files)
