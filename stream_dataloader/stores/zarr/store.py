"""Reads streams of a Zarr replay buffer: ranges of its arrays.

Guarantee: a chunk is unpacked once for the windows that lie in it, not once a step. An archive is opened in the process
that reads it, and shared by its streams.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, ClassVar

from stream_dataloader.stores._base.handles import Handles
from stream_dataloader.stores._base.options import given_columns, renamed
from stream_dataloader.stores._base.rows import RowSteps
from stream_dataloader.stores._base.store import Store
from stream_dataloader.stores.zarr.arrays import ChunkedTable, zarr_errors
from stream_dataloader.stores.zarr.index import Opened, ZarrIndex, open_group, read_index
from stream_dataloader.streams._media.section import closed_on_error

__all__ = ["ZarrStore"]


class ZarrStore(Store):
    """A replay buffer as diffusion_policy has it: flat arrays of all episodes' steps, and where each episode ends.

    A stream is one range of steps, and an item is a dict of the arrays' rows: `{"action": ..., "img": ...}`; arrays in
    groups below are dicts in it. Zarr's formats 2 and 3 are read. Needs the package zarr, which needs Python 3.11
    (`pip install 'stream-dataloader[zarr]'`).

    A lane keeps one unpacked chunk of each leaf. Write chunks no longer than a few windows, if memory is short. In a
    Zarr store a chunk that is not there is one of fill values, so a chunk that was lost cannot be told from zeros.

    Args:
        path: A folder, or an archive (`.zarr.zip`).
        data: The group of the arrays; `"/"` is the root.
        ends: The array that says where streams end, counted in steps from the store's first.
        columns: Names of the arrays to read, such as `["img", "action"]`; a group's name stands for all in it. A single
            name gives items that are arrays, not dicts. None reads all.

    Raises:
        FileNotFoundError: There is nothing at that path.
        StoreError: It is damaged or no Zarr store, has no such group or arrays, or they do not fit together.
        ImportError: zarr is not installed.

    Example:
        >>> import pathlib, tempfile
        >>> import numpy as np, zarr
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "demos.zarr"
        >>> group = zarr.open_group(path, mode="w", zarr_format=2)
        >>> _ = group.create_array("data/action", data=np.zeros((8, 2), np.float32))
        >>> _ = group.create_array("meta/episode_ends", data=np.array([5, 8]))
        >>> store = ZarrStore(path)
        >>> store.lengths.tolist(), next(store(1))
        ([5, 3], {'action': array([0., 0.], dtype=float32)})
    """

    format: ClassVar[str] = "zarr"

    @renamed(leaves="columns")
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        data: str = "data",
        ends: str = "meta/episode_ends",
        columns: str | Sequence[str] | None = None,
    ) -> None:
        for name, value in (("data", data), ("ends", ends)):
            if not isinstance(value, str) or not value:
                raise TypeError(f"{name} is {value!r}; give a path in the store, such as 'data'")
        self._wanted = given_columns(columns, alone=True)
        self._data = data
        self._ends = ends
        self._opened: Handles[str, Opened] = Handles(open_group)
        super().__init__(path, data=data, ends=ends, columns=self._wanted)
        _ = self.index

    def close(self) -> None:
        """Close the archive, as soon as no stream reads it; see `Store.close`."""
        super().close()
        self._opened.close()

    def _read_index(self) -> ZarrIndex:
        with closing(self._opened.lease(self.path)) as lease:
            return read_index(lease.handle, self.path, self._data, self._ends, self._wanted)

    def _open_steps(self, number: int) -> RowSteps:
        index: ZarrIndex = self.index
        start = int(index.starts[number])
        prefix = self._data.strip("/")
        for array in index.arrays:
            array.check()
        lease = self._opened.lease(self.path)
        with closed_on_error(lease):
            arrays = [lease.handle.array(f"{prefix}/{name}".strip("/")) for name in index.selection.names]
            tables = [ChunkedTable(array, start, start + int(index.lengths[number])) for array in arrays]
            return RowSteps(index.selection, tables, lease.close)

    def _version(self) -> str:
        return str(self.index.version)

    def _metadata(self) -> Mapping[str, Any]:
        """The root's attributes."""
        with closing(self._opened.lease(self.path)) as lease, zarr_errors(self.path):
            found: dict[str, Any] = lease.handle.group.attrs.asdict()
            return found

    def check_stream(self, number: int) -> None:
        """Read one stream, which compares checksums if arrays were written with them (crc32c, in format 3).

        Raises:
            StoreError: It is damaged.
        """
        with closing(self._open_steps(number)) as steps:
            steps.check()
