"""What is in a Zarr replay buffer: arrays of all streams' steps, and where each stream ends.

::

    data/action             (steps, 2)              all streams' steps, end to end
    data/img                (steps, 96, 96, 3)
    meta/episode_ends       (streams,)              first step behind each stream, counted over all steps

(As diffusion_policy's `common/replay_buffer.py` writes it, in Zarr's format 2. Formats 2 and 3 are read by the package
zarr, 3.1.)

Guarantee: no array is unpacked but that of the ends, and that is as long as it says on the disk.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.rows import Leaves, Selection, check_untold, selected
from stream_dataloader.stores.zarr.arrays import ChunkedArray, zarr_errors
from stream_dataloader.streams._media.known_file import KnownFile

__all__ = ["Opened", "ZarrIndex", "open_group", "read_index"]

_LARGEST_UNCHECKED_BYTES = 1 << 20
_MOST_CHUNKS_OF_ENDS = 1 << 20


class ZarrIndex(NamedTuple):
    """See `store.Index`.

    Attributes:
        fingerprint: Of the ends, and of the arrays' descriptions and times.
        lengths: Time steps of each stream.
        starts: The first step of each stream.
        arrays: The folder of each array, as it was: its time is that of the last chunk that came or went. Of an
            archive, that itself.
        selection: Which arrays an item has.
        version: Of the format.
    """

    fingerprint: str
    lengths: NDArray[np.int64]
    starts: NDArray[np.int64]
    arrays: tuple[KnownFile, ...]
    selection: Selection
    version: str

    def __len__(self) -> int:
        return len(self.lengths)


class Opened:
    """A store that is open in this process, with the arrays that were asked for.

    Attributes:
        group: The root, a `zarr.Group`.
    """

    def __init__(self, path: str, group: Any) -> None:
        self.group = group
        self._path = path
        self._arrays: dict[str, ChunkedArray] = {}

    def array(self, path: str) -> ChunkedArray:
        """An array by its path in the store."""
        found = self._arrays.get(path)
        if found is None:
            name = f"{self._path}, array {path}"
            with zarr_errors(name):
                array = self.group.get(path)
                if not hasattr(array, "chunks"):
                    raise StoreError(f"{self._path} has no array {path!r}; it has {_listed(self.group)}")
                found = self._arrays[path] = ChunkedArray(array, name, _known(self._path, path))
        return found

    def close(self) -> None:
        """Close the archive, if it is one; streams that read it raise."""
        self.group.store.close()


def open_group(path: str) -> Opened:
    """Open a store."""
    try:
        import zarr
        from zarr.storage import LocalStore, ZipStore
    except ImportError as error:
        raise ImportError(
            f"reading {path} needs zarr, on Python 3.11 or later: pip install 'stream-dataloader[zarr]'"
        ) from error
    if not os.path.exists(path):
        raise FileNotFoundError(f"there is no store at {path}; give a Zarr folder, or a .zarr.zip archive")
    with zarr_errors(path):
        if os.path.isdir(path):
            return Opened(path, zarr.open_group(LocalStore(path, read_only=True), mode="r"))
        store = ZipStore(path, mode="r")
        try:
            return Opened(path, zarr.open_group(store, mode="r"))
        except BaseException:
            if hasattr(store, "_zf"):
                store.close()
            raise


def read_index(opened: Opened, path: str, data: str, ends: str, leaves: Leaves) -> ZarrIndex:
    """Look at what there is; `data`, `ends` and `leaves` (`columns`) are those of `ZarrStore`."""
    with zarr_errors(path):
        above = opened.group if not data.strip("/") else opened.group.get(data.strip("/"))
        if not hasattr(above, "members"):
            raise StoreError(f"{path} has no group {data!r}; it has {_listed(opened.group)}; name it by data=")
        prefix = f"{data.strip('/')}/" if data.strip("/") else ""
        there = sorted(name for name, found in above.members(max_depth=None) if hasattr(found, "chunks"))
        selection = selected(leaves, [name for name in there if prefix + name != ends.strip("/")], f"{path}, {data}")
    stops = _ends(opened, path, ends.strip("/"))
    steps = int(stops[-1]) if len(stops) else 0
    arrays = {name: opened.array(prefix + name) for name in selection.names}
    if wrong := {name: len(array) for name, array in arrays.items() if len(array) != steps}:
        raise StoreError(
            f"{path}: {ends} ends at step {steps}, and there are arrays with other numbers of steps: "
            f"{shorten(wrong, 300)}; the store is half written, or they are no data: choose others by columns="
        )
    check_untold(path, steps, (math.prod(array.row_shape) for array in arrays.values()))
    digest = hashlib.blake2b(stops.tobytes(), digest_size=16)
    for name in selection.names:
        described = opened.group[prefix + name].metadata.to_dict()
        digest.update(json.dumps([name, described], sort_keys=True, default=str).encode())
    known = {prefix + name: _known(path, prefix + name) for name in selection.names}
    times = {name: (one.modified_ns, 0 if os.path.isdir(path) else one.size) for name, one in known.items()}
    digest.update(repr(sorted(times.items())).encode())
    starts = np.concatenate([np.zeros(1, np.int64), stops[:-1]]) if len(stops) else stops
    version = str(opened.group.metadata.zarr_format)
    return ZarrIndex(digest.hexdigest(), stops - starts, starts, tuple(known.values()), selection, version)


def _known(path: str, array: str) -> KnownFile:
    return (
        KnownFile.of(os.path.join(path, array), name=f"{path}, {array}") if os.path.isdir(path) else KnownFile.of(path)
    )


def _ends(opened: Opened, path: str, ends: str) -> NDArray[np.int64]:
    """Where streams end."""
    array = opened.array(ends)  # which refuses what is not of numbers
    name = f"{path}, {ends}"
    if array.row_shape or array.dtype.kind not in "iu":
        raise StoreError(f"{name} is {array.dtype} {(len(array), *array.row_shape)}; it should be a list of ints")
    claimed = len(array) * array.dtype.itemsize
    if claimed > _LARGEST_UNCHECKED_BYTES:
        with zarr_errors(name):
            found = opened.group[ends]
            if found.nchunks > _MOST_CHUNKS_OF_ENDS:  # zarr would list them all
                raise StoreError(
                    f"{name} has {claimed:,} bytes in {found.nchunks:,} chunks, more than {_MOST_CHUNKS_OF_ENDS:,}: "
                    "it is damaged, or has to be written anew in larger chunks"
                )
            there = found.nchunks_initialized * math.prod(found.shards or found.chunks) * array.dtype.itemsize
        if there < claimed:
            raise StoreError(f"{name} has {claimed:,} bytes, and {there:,} of them are there: it is half written")
    stops = np.empty(len(array), array.dtype)
    array.read(0, stops, {})
    if len(stops) and (stops[0] < 0 or (stops[1:] < stops[:-1]).any() or stops[-1] > np.iinfo(np.int64).max):
        raise StoreError(f"{name} is not in ascending order: {shorten(stops.tolist(), 200)}; the store is damaged")
    return stops.astype(np.int64)


def _listed(group: Any) -> str:
    return shorten(sorted(name for name, _ in group.members(max_depth=None)), 300)
