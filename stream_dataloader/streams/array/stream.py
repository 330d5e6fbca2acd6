"""Arrays whose rows are time steps.

Guarantee: only the rows of a batch are loaded, directly into the batch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from stream_dataloader._engine.hints import hinted
from stream_dataloader.streams._media.limits import Limits
from stream_dataloader.streams._media.section import check_file, section_of, whole_number
from stream_dataloader.streams.array.tables import MemoryTable, NpyTable, Table
from stream_dataloader.streams.cache import FileCache, open_local
from stream_dataloader.streams.cache.gate import Files, Gate, check_files

__all__ = ["ArrayStream"]

_NPY, _HDF5, _ZIP = b"\x93NUMPY", b"\x89HDF\r\n\x1a\n", b"PK\x03\x04"


@hinted
@dataclass(frozen=True, kw_only=True)
class ArrayStream:
    """Factory of streams from arrays: each row of the first axis is an item.

    A source is the path or URL of a `.npy` or HDF5 file, a NumPy array, a tensor, or a mapping of these. A source
    `(source, start, stop)` has only some rows. HDF5 files need the extra `hdf5`.

    Args:
        dataset: Name of the dataset in HDF5 files, such as `"events/frames"`. With several names, or a mapping of
            keys to names, items are dicts. None: the file's only dataset.
        cache: Cache for files from URLs; None is the cache that all streams share.
        files: Other files that an HDF5 file may name: `"inside"`, HDF5 files of its folder in virtual datasets;
            or `"anywhere"`, any files, also in external links and external storage.
        limits: Largest size of a chunk of HDF5; see `Limits`. None: the defaults.

    Raises:
        TypeError: `dataset` is neither a name nor a collection of names.
        ValueError: `dataset` is empty.

    Example:
        >>> import numpy as np
        >>> from stream_dataloader import StreamDataLoader, StreamDataset
        >>> from stream_dataloader.streams import ArrayStream
        >>> table = np.arange(10)
        >>> dataset = StreamDataset([table, (table, 4, 7)], ArrayStream(), batch_size=2, time_steps=5)
        >>> [batch.data.T.tolist() for batch in StreamDataLoader(dataset)]
        [[[0, 1, 2, 3, 4], [4, 5, 6, 0, 0]], [[5, 6, 7, 8, 9], [0, 0, 0, 0, 0]]]
    """

    _yields_steps: ClassVar[bool] = True
    open_early: ClassVar[bool] = True  # streams share nothing, and h5py has a lock around its library

    dataset: str | Sequence[str] | Mapping[str, str] | None = None
    cache: FileCache | None = None
    files: Files = "inside"
    limits: Limits | None = None

    def __post_init__(self) -> None:
        check_files(self.files)
        names: Any = self.dataset
        if names is None:
            return
        if isinstance(names, str):
            names = [names]
        elif isinstance(names, Mapping):
            names = [*names, *names.values()]
        if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"dataset is {self.dataset!r}; give a name, several, or a mapping")
        if not names or not all(names):
            raise ValueError(f"dataset is {self.dataset!r}, which names nothing")

    def __call__(self, source: Any, *, start: int = 0) -> Rows:
        """Open one source at item `start`, counted from the source's first item.

        Raises:
            ValueError: The source has no readable rows, or fewer than requested.
            OSError: The file cannot be read.
            ImportError: The package for this kind of file is not installed.
        """
        whole, first, stop = section_of(source)
        arrays = whole if isinstance(whole, Mapping) else {_ALONE: whole}
        if not arrays:
            raise ValueError("the source is an empty mapping")
        if not any(type(one) is not np.ndarray and isinstance(one, (str, os.PathLike)) for one in arrays.values()):
            in_memory: dict[Any, Table] = {key: MemoryTable(one, _name_of(key)) for key, one in arrays.items()}
            return _rows_of(in_memory, first, start, stop, None)
        with ExitStack() as opened:
            tables = self._open(arrays, opened)
            for table in tables.values():
                opened.callback(table.close)
            return _rows_of(tables, first, start, stop, opened)

    def length(self, source: Any) -> int:
        """Return the number of rows according to the file's header. It raises the same errors as opening."""
        with closing(self(source)) as rows:
            return rows.stop - rows.position

    def _open(self, arrays: Mapping[Any, Any], opened: ExitStack) -> dict[Any, Table]:
        """Open the arrays of a source, some of which are in files, by key."""
        tables: dict[Any, Table] = {}
        for key, one in arrays.items():
            if not isinstance(one, (str, os.PathLike)):
                tables[key] = MemoryTable(one, _name_of(key))
                continue
            local = opened.enter_context(open_local(one, self.cache))
            found = self._open_file(local.path, os.fspath(one), opened)
            if key is _ALONE:
                return found
            if _ALONE not in found:
                raise ValueError(
                    f"the source's {key!r} has several datasets, {[*found]}; give dataset= one name, or none"
                )
            tables[key] = found[_ALONE]
        return tables

    def _open_file(self, path: str, name: str, opened: ExitStack) -> dict[Any, Table]:
        check_file(path)
        with open(path, "rb") as file:
            head = file.read(len(_HDF5))
        if head.startswith(_NPY):
            if self.dataset is not None:
                raise ValueError(f"{name} is a .npy file, and dataset={self.dataset!r} is for HDF5")
            return {_ALONE: NpyTable(path, name)}
        if head.startswith(_ZIP):
            raise ValueError(f"{name} is a zip archive (.npz, or of torch.save); save its arrays as .npy")
        from stream_dataloader.streams.array.hdf5 import Hdf5Table, found_in, is_hdf5
        from stream_dataloader.streams.array.hdf5_files import Sources, open_file

        if head == _HDF5 or is_hdf5(path):
            file, names = opened.enter_context(open_file(path, name)), self.dataset
            sources = Sources(Gate(os.path.dirname(os.path.abspath(path)), self.files), self.limits)
            named: Mapping[Any, str | None] = (
                {_ALONE: names}
                if names is None or isinstance(names, str)
                else (names if isinstance(names, Mapping) else {key: key for key in names})
            )
            found = {key: found_in(file, name, dataset, sources) for key, dataset in named.items()}
            return {key: Hdf5Table(dataset, name, sources.known) for key, dataset in found.items()}
        raise ValueError(f"{name} is neither a .npy nor an HDF5 file: it begins with {head!r}")


class Rows:
    """Stream of rows `[position, stop)`; a `protocols.ReadsInto`."""

    def __init__(self, tables: dict[Any, Table], position: int, stop: int, opened: ExitStack | None) -> None:
        self._tables = tables
        self.position = position
        self.stop = stop
        self._opened = opened
        self._alike = None if opened else tuple([(key, table.alike) for key, table in tables.items()])

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        position, tables = self.position, self._tables
        if position >= self.stop:
            raise StopIteration
        alone = tables.get(_ALONE)
        row = {key: table.row(position) for key, table in tables.items()} if alone is None else alone.row(position)
        self.position += 1
        return row

    def read_into(self, out: Any) -> int:
        position, tables = self.position, self._tables
        leaves = {_ALONE: out} if _ALONE in tables else out
        count = room = len(next(iter(leaves.values())))
        if position + room > self.stop:
            count = self.stop - position
        for key, table in tables.items() if count else ():
            table.read(position, leaves[key] if count == room else leaves[key][:count])
        self.position = position + count
        return count

    def close(self) -> None:
        self.position, self._tables = self.stop, {}
        if self._opened is not None:
            self._opened.close()


#: Key of an array that stands alone, so that items are not dicts.
_ALONE: Any = object()


def _name_of(key: Any) -> str:
    return "the source" if key is _ALONE else f"the source's {key!r}"


def _rows_of(tables: dict[Any, Table], first: Any, start: Any, stop: Any, opened: ExitStack | None) -> Rows:
    first, start = _rows("start", first), _rows("start", start)
    rows, *others = [len(table) for table in tables.values()]
    if others and others.count(rows) < len(others):
        lengths = {name: len(table) for name, table in tables.items()}
        raise ValueError(f"arrays side by side have other numbers of rows: {lengths}")
    stop = rows if stop is None else _rows("stop", stop)
    if not first <= stop <= rows:
        raise ValueError(f"rows {first} to {stop} were asked for, and the array has {rows}")
    if start > stop - first:
        raise ValueError(f"start is {start}, and the source has {stop - first} rows")
    return Rows(tables, first + start, stop, None if opened is None else opened.pop_all())


def _rows(name: str, value: Any) -> int:
    if type(value) is int and value >= 0:
        return value
    return whole_number(name, value, "rows are counted, from 0", 0)
