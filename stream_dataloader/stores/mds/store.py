"""Reading of MDS datasets from a folder or from a server.

Source: mosaicml-streaming 0.13; the tests compare with it.

Guarantee: a value that does not fit the batch raises an error, and is never converted or broadcast.
"""

from __future__ import annotations

import functools
import os
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from stream_dataloader._engine.items.structure import flatten, unflatten
from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.files import disk_bytes, in_folder, inside, stamp_of
from stream_dataloader.stores._base.formats import given_columns, given_options
from stream_dataloader.stores._base.handles import ShardReader
from stream_dataloader.stores._base.leaves import classes_of
from stream_dataloader.stores._base.store import Store
from stream_dataloader.stores._base.stream import put_row
from stream_dataloader.stores.mds.encodings import ArrayEncoding, PictureEncoding
from stream_dataloader.stores.mds.index import INDEX, DatasetIndex, read_index
from stream_dataloader.stores.mds.shards import Rows
from stream_dataloader.stores.mds.streams import MdsIndex
from stream_dataloader.streams._media.limits import Limits
from stream_dataloader.streams._media.section import whole_number
from stream_dataloader.streams.cache import FileCache, is_url
from stream_dataloader.streams.cache.gate import Files

__all__ = ["MdsStore"]


class MdsStore(Store):
    """MDS dataset in a folder or at a URL.

    Items are dicts by column, or the items that were packed. Pictures are `(H, W)` or `(H, W, 3 or 4)`, RGB.

    Args:
        path: The folder of index.json, or its URL.
        stream: Kind of stream: `"shard"`; `"sample"`, whose time steps are the rows of its arrays and the elements
            of its lists, each with the sample's other values; or the name of a column: consecutive samples
            with the same value (`"column:shard"` is a column named `shard`). None: streams that were packed,
            else shards. For a column, the whole dataset is read once, and fetched if it is remote.
        split: The folder below `path` with index.json.
        columns: Names of the columns to read; None reads all except the one that names streams.
        allow_pickle: Also read columns of encoding `pkl`, which may run any code.
        upright: Turn JPEG images as their EXIF data say.
        cache: Cache for remote shards and unpacked ones.
        predownload: Number of further shards of a stream that are fetched and unpacked in advance.
        files: Files that links in the folder may lead to: `"inside"` it, or `"anywhere"`.
        limits: Largest sizes of decoded data; see `streams.Limits`. None: the defaults.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> from stream_dataloader.stores import MdsStore, MdsWriter
        >>> folder = tempfile.mkdtemp()
        >>> with MdsWriter(folder, columns={"x": "ndarray:float32:2", "episode": "int"}) as writer:
        ...     for step in range(5):
        ...         writer.write({"x": np.full(2, step, np.float32), "episode": step // 3})
        >>> store = MdsStore(folder, stream="episode")
        >>> [(store.key(number), [item["x"].tolist() for item in store(number)]) for number in store.sources]
        [('0', [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]), ('1', [[3.0, 3.0], [4.0, 4.0]])]
    """

    format: ClassVar[str] = "mds"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        stream: str | None = None,
        split: str | None = None,
        columns: Sequence[str] | None = None,
        allow_pickle: bool = False,
        upright: bool = True,
        cache: FileCache | None = None,
        predownload: int = 1,
        files: Files = "inside",
        limits: Limits | None = None,
    ) -> None:
        if stream is not None and not isinstance(stream, str):
            raise TypeError(f"stream is {stream!r}; give 'shard', 'sample' or the name of a column")
        predownload = whole_number("predownload", predownload, "give a number of shards from 0 on", 0)
        super().__init__(path, **given_options(locals(), columns=given_columns(columns)))
        self._cache = FileCache() if cache is None else cache
        if split:
            inside(self.path, split, "split")
        self._folder = in_folder(self.path, split) if split else self.path
        self._classes: dict[str, type] = {}
        self._classes = classes_of(self.index.structure)

    def _state(self) -> str:
        return "" if is_url(self._folder) else stamp_of([in_folder(self._folder, INDEX)])

    def _read_index(self) -> MdsIndex:
        path = in_folder(self._folder, INDEX)
        if not is_url(path) and not os.path.isdir(self._folder):
            raise FileNotFoundError(f"there is no MDS dataset at {self._folder}, no index.json")
        stamp = self._state()
        with self._cache.open(path) as local:
            found = read_index(local.path, path)
            stamp = stamp or os.path.basename(local.path)
        return MdsIndex(self._folder, found, stamp, self._options, self._classes, self._cache)

    def close(self) -> None:
        if self._index is not None:
            self._index.shards.close()
        super().close()

    def _open_steps(self, number: int) -> MdsSteps:
        return MdsSteps(self.index, number, self._options["predownload"], functools.partial(self.name_of, number))

    def _metadata(self) -> Mapping[str, Any]:
        found: DatasetIndex = self.index.found
        return {
            **found.note.get("metadata", {}),
            "stream": self.index.kind,
            "columns": dict(zip(found.names, found.encodings, strict=True)),
            "shards": len(found.shards),
            "samples": self.index.firsts[-1],
            "compression": found.shards[0].compression if found.shards else None,
        }

    def _disk_bytes(self) -> int | None:
        return None if is_url(self._folder) else disk_bytes(self._folder)

    def _damaged_files(self) -> list[str]:
        damaged = []
        for shard in range(len(self.index.found.shards)):
            try:
                self.index.shards.verify(shard)
            except (OSError, ValueError) as error:
                damaged.append(str(error))
        return damaged


class MdsSteps:
    """Steps that are samples, or the rows of one sample; see `Steps`."""

    def __init__(self, index: MdsIndex, number: int, ahead: int, name: Callable[[], str]) -> None:
        self._index, self._name = index, name
        self._rows: Rows | None = None
        self._begin = self._end = 0  # range of the stream's steps that the rows have
        self._start, self._steps = int(index.starts[number]), 1
        if index.kind != "sample" and index.lengths is not None:
            self._steps = int(index.lengths[number])
        self._shards = ShardReader(index.shards, ahead, self._shard_of(self._start + self._steps - 1))
        try:
            if self._steps:
                rows, _ = self._at(0)
            if index.kind == "sample":
                self._rows = rows.of_sample()
                self._end = self._steps = len(self._rows)
            columns = self._rows.columns if self._rows else ()
            self._direct = all(isinstance(one.encoding, (ArrayEncoding, PictureEncoding)) for one in columns)
        except StoreError as error:
            self.close()
            raise self._error(error) from error

    def __len__(self) -> int:
        return self._steps

    def _error(self, error: Exception) -> StoreError:
        return StoreError(f"{self._name()}: {error}")

    def _shard_of(self, sample: int) -> int:
        return bisect_right(self._index.firsts, sample) - 1

    def _at(self, step: int) -> tuple[Rows, int]:
        """Return the rows that contain a step, and its index in them."""
        if self._rows is None or not self._begin <= step < self._end:
            at, end, firsts = self._start + step, self._start + self._steps, self._index.firsts
            shard = self._shards.at(number := self._shard_of(at))
            first, stop = firsts[number], min(end, firsts[number + 1])
            self._rows = Rows.of(shard, self._index.columns, at - first, stop - first)
            self._begin, self._end = step, step + len(self._rows)
        return self._rows, step - self._begin

    def item(self, index: int) -> Any:
        try:
            rows, row = self._at(index)
            with rows.shard.known:
                return unflatten(self._index.structure, iter(rows.values(row)))
        except StoreError as error:
            raise self._error(error) from error

    def read(self, start: int, out: Any) -> None:
        _, leaves = flatten(out)
        step, stop = start, start + len(leaves[0])
        while step < stop and self._direct:
            try:
                rows, row = self._at(step)
                more = min(stop, self._end) - step
                with rows.shard.known:
                    rows.write(row, [leaf[step - start : step - start + more] for leaf in leaves])
            except StoreError as error:
                raise self._error(error) from error
            step += more
        for row in range(step, stop):
            put_row(self.item(row), out, row - start, f"{self._name()}, step {row}")

    def close(self) -> None:
        self._shards.close()
        self._rows = None
