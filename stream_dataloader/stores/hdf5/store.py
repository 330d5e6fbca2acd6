"""Reads episodes from HDF5 files.

Guarantee: a file is opened once a process, and shared by the streams that are read from it; how many files are open is
bounded. Rows go from the file into the batch by one call a leaf and window, see `streams.array.hdf5`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, ClassVar

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.handles import Handles, Lease
from stream_dataloader.stores._base.options import given_columns, renamed
from stream_dataloader.stores._base.rows import RowSteps, loaded_if_small
from stream_dataloader.stores._base.store import Store
from stream_dataloader.stores.hdf5.files import attributes, hdf5_errors, open_known, open_tables_of
from stream_dataloader.stores.hdf5.index import Hdf5Index, read_index
from stream_dataloader.streams._media.known_file import KnownFile
from stream_dataloader.streams._media.section import closed_on_error

__all__ = ["Hdf5Store"]


class Hdf5Store(Store):
    """Episodes of robomimic, LIBERO, ALOHA and alike: groups of an HDF5 file, or the files of a folder.

    A group that holds datasets is a stream; one that holds only groups has a stream in each of them, in natural order
    (`demo_9` before `demo_10`). An item is a dict, nested as the groups are: `{"actions": ..., "obs": {"image": ...}}`.
    Its leaves are those that the first stream has, and all streams must have them. Needs the package h5py
    (`pip install 'stream-dataloader[h5py]'`), and hdf5plugin if files were written with its filters.

    Args:
        path: A file, or a folder: all files below it whose names end in `.h5` or `.hdf5` are read, in natural order.
        group: Which group is looked at; `"/"` is the file's root. None takes `"data"` if there is such a group, as
            robomimic has it, and else the root.
        columns: Names of the datasets to read, such as `["actions", "obs/image"]`; a group's name stands for all in it.
            A single name gives items that are arrays, not dicts. None reads all.
        filter_key: Only the streams that are listed in the dataset `mask/<filter_key>`, as robomimic has it.

    Raises:
        FileNotFoundError: There is nothing at that path.
        StoreError: A file is damaged or no HDF5 file, has no such group, leaf or filter key, or leaves of different
            lengths.
        ImportError: h5py is not installed.

    Example:
        >>> import pathlib, tempfile
        >>> import h5py
        >>> import numpy as np
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "demos.hdf5"
        >>> with h5py.File(path, "w") as file:
        ...     for number, steps in enumerate((5, 3)):
        ...         file[f"data/demo_{number}/actions"] = np.zeros((steps, 7))
        ...         file[f"data/demo_{number}/obs/image"] = np.zeros((steps, 84, 84, 3), np.uint8)
        >>> store = Hdf5Store(path)
        >>> store.key(1), store.lengths.tolist(), next(store(1))["obs"]["image"].shape
        ('demo_1', [5, 3], (84, 84, 3))
    """

    format: ClassVar[str] = "hdf5"

    @renamed(leaves="columns")
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        group: str | None = None,
        columns: str | Sequence[str] | None = None,
        filter_key: str | None = None,
    ) -> None:
        for name, value in (("group", group), ("filter_key", filter_key)):
            if value is not None and (not isinstance(value, str) or not value):
                raise TypeError(f"{name} is {value!r}; give a name, or None")
        self._wanted = given_columns(columns, alone=True)
        self._group = group
        self._filter_key = filter_key
        self._files: Handles[KnownFile, Any] = Handles(open_known)
        super().__init__(path, group=group, columns=self._wanted, filter_key=filter_key)
        _ = self.index

    def close(self) -> None:
        """Close the files that no stream reads; see `Store.close`."""
        super().close()
        self._files.close()

    def _read_index(self) -> Hdf5Index:
        return read_index(self.path, self._group, self._wanted, self._filter_key)

    def _open_steps(self, number: int) -> RowSteps:
        index: Hdf5Index = self.index
        lease, known = self._lease(number), index.files[index.file_of[number]]
        with closed_on_error(lease), known:
            tables = open_tables_of(
                lease.handle, self.name_of(number), index.groups[number], index.selection, int(index.lengths[number])
            )
            return RowSteps(index.selection, [loaded_if_small(table) for table in tables], lease.close, known)

    def _lease(self, number: int) -> Lease[KnownFile, Any]:
        index: Hdf5Index = self.index
        with hdf5_errors(self.name_of(number)):
            return self._files.lease(index.files[index.file_of[number]])

    def key(self, number: int) -> str:
        return str(self.index.keys[self._check_number(number)])

    def metadata(self, number: int) -> Mapping[str, Any]:
        """The attributes of a stream's group."""
        known = self.index.files[self.index.file_of[self._check_number(number)]]
        with known, closing(self._lease(number)) as lease:
            return attributes(lease.handle[self.index.groups[number]], self.name_of(number))

    def _metadata(self) -> Mapping[str, Any]:
        """The attributes of the group above the first stream's."""
        with closing(self._lease(0)) as lease:
            return attributes(lease.handle[self.index.group], self.path)

    def check_stream(self, number: int) -> None:
        """Read one stream, which compares the checksums of its chunks if it was written with them (fletcher32).

        Raises:
            StoreError: It is damaged, or some of its chunks were never written.
        """
        with (
            closing(self._open_steps(number)) as steps,
            closing(self._lease(number)) as lease,
            hdf5_errors(self.name_of(number)),
        ):
            for leaf in self.index.selection.names:
                _check_chunks(lease.handle[self.index.groups[number]][leaf], f"{self.name_of(number)}, {leaf}")
            steps.check()


def _check_chunks(dataset: Any, name: str) -> None:
    """Refuse a dataset that has chunks which were never written: they would be read as zeros."""
    if dataset.chunks is None or not dataset.size or dataset.is_virtual:
        return
    expected = 1
    for size, chunk in zip(dataset.shape, dataset.chunks, strict=True):
        expected *= -(-size // chunk)
    if (found := dataset.id.get_num_chunks()) < expected:
        raise StoreError(f"{name} has {found} of {expected} chunks: it is half written or damaged; write it anew")
