"""Zarr replay buffers: the steps of all streams, end to end, and the end of each stream.

Guarantee: opening unpacks only the array of the ends.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.files import damage_named, hashed
from stream_dataloader.stores._base.formats import given_columns
from stream_dataloader.stores._base.handles import Handles
from stream_dataloader.stores._base.rows import RowSteps, Selection, selected
from stream_dataloader.stores._base.store import Index, Store
from stream_dataloader.stores.zarr.arrays import ArrayRows, ZarrArray
from stream_dataloader.stores.zarr.opened import OpenedZarr
from stream_dataloader.streams._media.limits import Limits
from stream_dataloader.streams._media.section import KnownFile, closed_on_error
from stream_dataloader.streams.cache.gate import Files, Gate

__all__ = ["ZarrStore"]

#: Largest number of streams, because a damaged store may claim any number.
_MOST_STREAMS = 1 << 24


class ZarrStore(Store):
    """Replay buffer of diffusion_policy: flat arrays, and the ends of episodes.

    An item is a dict of the arrays' rows; arrays in nested groups are nested dicts.
    A chunk that was lost is read as zeros. Needs the extra `zarr`.

    Args:
        path: A folder, or a `.zarr.zip`.
        data: The group of the arrays; `"/"` is the root.
        ends: The array with the ends of streams.
        columns: Names of arrays, such as `["img", "action"]`, or of groups of them. A single
            name gives items that are arrays, not dicts. None reads all.
        files: Files that links in the folder may lead to: `"inside"` it, or `"anywhere"`.
        limits: Largest size of a chunk; see `streams.Limits`. None: the defaults.
    """

    format: ClassVar[str] = "zarr"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        data: str = "data",
        ends: str = "meta/episode_ends",
        columns: str | Sequence[str] | None = None,
        files: Files = "inside",
        limits: Limits | None = None,
    ) -> None:
        self._opened: Handles[str, OpenedZarr] = Handles(functools.partial(OpenedZarr, files=files, limits=limits))
        columns = given_columns(columns, alone=True)
        super().__init__(path, data=data, ends=ends, columns=columns, files=files, limits=limits)
        _ = self.index

    def _check_links(self) -> None:
        """Check nothing yet. Arrays are checked at their first read, because a store may have a million chunks."""
        if os.path.isdir(self.path):
            Gate(self.path, self._options["files"]).check_links(levels=2)

    def _read_index(self) -> _Index:
        with closing(self._opened.lease(self.path)) as lease, damage_named(self.path):
            opened: OpenedZarr = lease.handle
            data, ends = (self._options[name].strip("/") for name in ("data", "ends"))
            below = f"{data}/" if data else ""
            places = {place[len(below) :]: place for place in opened.places() if place.startswith(below)}
            if not places:
                raise StoreError(f"{self.path} has no group {data!r} of arrays; it has {opened.listed()}")
            there = [name for name, place in places.items() if place != ends]
            selection = selected(self._options["columns"], there, f"{self.path}, {data or '/'}")
            stops = self._stops(opened.array(ends), f"{self.path}, {ends}")
            arrays = {name: opened.array(places[name]) for name in selection.names}
            described = [[name, array.described] for name, array in arrays.items()]
            version = str(opened.group.metadata.zarr_format)
        steps = int(stops[-1]) if len(stops) else 0
        if wrong := {name: len(array) for name, array in arrays.items() if len(array) != steps}:
            found = shorten(wrong, 300)
            raise StoreError(f"{self.path}: {ends} ends at step {steps}, and others at {found}; use columns=")
        texts = [json.dumps(one, sort_keys=True, default=str) for one in described]
        known = {places[name]: array.known for name, array in arrays.items()}
        is_folder = os.path.isdir(self.path)
        times = [(place, (one.modified_ns, 0 if is_folder else one.size)) for place, one in known.items()]
        fingerprint = hashed(stops.tobytes(), *texts, repr(sorted(times)))
        starts = np.concatenate([np.zeros(1, np.int64), stops[:-1]]) if len(stops) else stops
        return _Index(fingerprint, stops - starts, starts, known, selection, version)

    def _stops(self, array: ZarrArray, name: str) -> NDArray[np.int64]:
        if array.row_shape or array.dtype.kind not in "iu" or len(array) > _MOST_STREAMS:
            found = f"{array.dtype} {(len(array), *array.row_shape)}"
            raise StoreError(f"{name} is {found}; it should be a list of ints, one a stream")
        array.check_chunks()
        stops = np.asarray(array.unpack(0, len(array)), np.int64)
        if len(stops) and (stops[0] < 0 or (stops[1:] < stops[:-1]).any()):
            raise StoreError(f"{name} is damaged: {shorten(stops.tolist(), 200)} is not in ascending order")
        return stops

    def _open_steps(self, number: int) -> RowSteps:
        index: _Index = self.index
        for known in index.places.values():
            known.check()
        lease = self._opened.lease(self.path)
        with closed_on_error(lease):
            start, steps = int(index.starts[number]), int(index.lengths[number])
            tables = [ArrayRows(lease.handle.array(place)) for place in index.places]
            return RowSteps(index.selection.structure, tables, steps, first=start, close=lease.close)

    def _metadata(self) -> Mapping[str, Any]:
        """Return the attributes of the root."""
        with closing(self._opened.lease(self.path)) as lease, damage_named(self.path):
            found: dict[str, Any] = lease.handle.group.attrs.asdict()
            return found


@dataclass
class _Index(Index):
    """See `Store._read_index`."""

    starts: NDArray[np.int64]
    places: dict[str, KnownFile]  # files that describe the leaves' arrays
    selection: Selection
    version: str
