"""Episodes in HDF5 files: a group is a stream, and its datasets are the leaves of the items.

::

    robomimic 0.3, LIBERO           data/demo_0/{actions, rewards, dones, states, obs/<name>}       a stream a demo
                                    mask/<filter key>   names of demos;  attribute `num_samples` of each demo
    ALOHA, ACT                      action, observations/{qpos, qvel, images/<camera>}              a stream a file
    RVT's event representations     data                                                            a stream a file

(Layouts as of robomimic's `utils/dataset.py`, LIBERO's `scripts/create_dataset.py`, ACT's `record_sim_episodes.py`,
and RVT's `data/genx_utils/sequence_base.py`.)

Guarantee: opening looks at the first stream in full, of each other one at the length of one leaf. How many files are
open is bounded. A dataset that claims much more than is on the disk, or lies in another file, is refused unread.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.files import damage_named
from stream_dataloader.stores._base.formats import HDF5_SUFFIXES
from stream_dataloader.stores._base.handles import Handles, Lease
from stream_dataloader.stores._base.options import given_columns, renamed
from stream_dataloader.stores._base.rows import (
    RowSteps,
    Selection,
    check_lengths,
    check_row,
    check_untold,
    loaded_if_small,
    selected,
)
from stream_dataloader.stores._base.store import Store
from stream_dataloader.streams._media.known_file import KnownFile
from stream_dataloader.streams._media.names import natural_order
from stream_dataloader.streams._media.section import check_file, closed_on_error
from stream_dataloader.streams.array.hdf5 import Hdf5Table, open_file

__all__ = ["Hdf5Store"]

_DATA, _ROOT = "data", "/"
_MOST_FILTERED = 1 << 24
_LARGEST_ATTRIBUTE_BYTES = 1 << 24

#: Datasets of more bytes have to be on the disk, a thousandth of them at least: gzip packs zeros as tightly as that.
_LARGEST_UNCHECKED_BYTES, _MOST_PACKED = 64 << 20, 1100


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
        columns = given_columns(columns, alone=True)
        self._files: Handles[KnownFile, Any] = Handles(_opened)
        super().__init__(path, group=group, columns=columns, filter_key=filter_key)
        _ = self.index

    def close(self) -> None:
        """Close the files that no stream reads; see `Store.close`."""
        super().close()
        self._files.close()

    def _read_index(self) -> _Index:
        files, groups, keys, lengths, file_of = (
            list[KnownFile](),
            list[str](),
            list[str](),
            list[int](),
            list[int](),
        )
        group, columns, filter_key = (self._options[name] for name in ("group", "columns", "filter_key"))
        selection: Selection | None = None
        first_above = _ROOT
        for path in _paths(self.path):
            with damage_named(path):
                check_file(path)
                known = KnownFile.of(path)
                with _opened(known) as file:
                    above = _group_of(file, path, group)
                    names = _streams(file, path, above, filter_key)
                    if selection is None and names:
                        first_above, selection = (
                            above,
                            _leaves_of(file, f"{path}, {names[0]}", names[0], columns),
                        )
                    lengths += [_length(file, path, one, selection.names[0]) for one in names if selection]
            inside = os.path.relpath(path, self.path) if os.path.isdir(self.path) else ""
            keys += [_key(one, above, inside) or os.path.basename(path) for one in names]
            groups += names
            file_of += [len(files)] * len(names)
            files.append(known)
        if selection is None:
            raise StoreError(
                f"{self.path} holds no streams: {len(files)} files, without any group in {group or _DATA!r}"
            )
        counted = np.array(lengths, np.int64)
        inside_names = [os.path.relpath(known.path, self.path) for known in files]
        stamps = [(known.size, known.modified_ns) for known in files]
        described = repr((inside_names, stamps, keys, selection.names)).encode()
        fingerprint = hashlib.blake2b(described + counted.tobytes(), digest_size=16).hexdigest()
        return _Index(
            fingerprint,
            counted,
            files,
            file_of,
            groups,
            keys,
            selection,
            first_above,
        )

    def _open_steps(self, number: int) -> RowSteps:
        index: _Index = self.index
        lease, known, selection = (
            self._lease(number),
            index.files[index.file_of[number]],
            index.selection,
        )
        with (
            closed_on_error(lease),
            known,
            damage_named(name := self.name_of(number)),
        ):
            group = lease.handle[index.groups[number]]
            tables = [_table(group, name, leaf) for leaf in selection.names]
            steps = check_lengths(name, dict(zip(selection.names, map(len, tables), strict=True)))
            check_untold(name, steps, (math.prod(table.row_shape) for table in tables))
            promised = group.attrs.get("num_samples", steps)
            if steps != index.lengths[number] or np.ndim(promised) or promised != steps:
                raise StoreError(
                    f"{name} has {steps} steps, by the index {index.lengths[number]}, and by its attribute num_samples "
                    f"{promised}: it is damaged or half written; write it anew"
                )
            return RowSteps(
                selection,
                [loaded_if_small(table) for table in tables],
                lease.close,
                known,
            )

    def _lease(self, number: int) -> Lease[KnownFile, Any]:
        index: _Index = self.index
        with damage_named(self.name_of(number)):
            return self._files.lease(index.files[index.file_of[number]])

    def key(self, number: int) -> str:
        return str(self.index.keys[self._check_number(number)])

    def metadata(self, number: int) -> Mapping[str, Any]:
        """The attributes of a stream's group."""
        known = self.index.files[self.index.file_of[self._check_number(number)]]
        with known, closing(self._lease(number)) as lease:
            return _attributes(lease.handle, self.index.groups[number], self.name_of(number))

    def _metadata(self) -> Mapping[str, Any]:
        """The attributes of the group above the first stream's."""
        with closing(self._lease(0)) as lease:
            return _attributes(lease.handle, self.index.group, self.path)

    def check_stream(self, number: int) -> None:
        """Read one stream, which compares the checksums of its chunks if it was written with them (fletcher32).

        Raises:
            StoreError: It is damaged, or some of its chunks were never written.
        """
        name = self.name_of(number)
        with (
            closing(self._open_steps(number)) as steps,
            closing(self._lease(number)) as lease,
            damage_named(name),
        ):
            for leaf in self.index.selection.names:
                dataset = lease.handle[self.index.groups[number]][leaf]
                if dataset.chunks is None or not dataset.size or dataset.is_virtual:
                    continue
                sizes = zip(dataset.shape, dataset.chunks, strict=True)
                expected = math.prod(-(-size // chunk) for size, chunk in sizes)
                if (found := dataset.id.get_num_chunks()) < expected:  # the others would be read as zeros
                    raise StoreError(
                        f"{name}, {leaf} has {found} of {expected} chunks: it is half written or damaged; write it anew"
                    )
            steps.check()


class _Index(NamedTuple):
    """See `Store._read_index`; of each stream its file, its group in it and its name."""

    fingerprint: str
    lengths: NDArray[np.int64]
    files: list[KnownFile]
    file_of: list[int]
    groups: list[str]
    keys: list[str]
    selection: Selection
    group: str  # whose members the first stream's file has as streams

    def __len__(self) -> int:
        return len(self.groups)


def _opened(known: KnownFile) -> Any:
    """An `h5py.File`, if the file is what it was."""
    known.check()
    return open_file(known.path, known.path)


def _paths(path: str) -> list[str]:
    """The files of a store, in natural order."""
    if not os.path.exists(path):
        raise FileNotFoundError(f"there is no store at {path}; give an HDF5 file, or a folder of them")
    if not os.path.isdir(path):
        return [path]
    found = [
        os.path.join(folder, name)
        for folder, _, names in os.walk(path)
        for name in names
        if name.endswith(HDF5_SUFFIXES)
    ]
    if not found:
        raise StoreError(f"{path} has no files with names in {' or '.join(HDF5_SUFFIXES)}; rename them, or give one")
    return sorted(found, key=natural_order)


def _key(group: str, above: str, file: str) -> str:
    """A stream's name: that of the group below `above`, after that of the file if there may be several."""
    inside = group[len(above) :].strip("/")
    return f"{file}:{inside}" if file and inside else file or inside


def _group_of(file: Any, name: str, group: str | None) -> str:
    """The group to look for streams in."""
    import h5py

    if group is None:
        return f"/{_DATA}" if file.get(_DATA, getclass=True) is h5py.Group else _ROOT
    path = "/" + group.strip("/")
    if path != _ROOT and file.get(path, getclass=True) is not h5py.Group:
        raise StoreError(f"{name} has no group {group!r}; it has {shorten(list(file), 300)}")
    return path


def _streams(file: Any, name: str, above: str, filter_key: str | None) -> list[str]:
    """The groups that are streams."""
    import h5py

    members = {key: file[above].get(key, getclass=True) for key in file[above]}
    wanted = [key for key, kind in members.items() if kind is h5py.Group]
    if h5py.Dataset in members.values():
        if filter_key is not None:
            raise StoreError(f"{name}: {above} is one stream, so filter_key={filter_key!r} has nothing to choose from")
        return [above]
    if filter_key is not None:
        wanted = _filtered(file, name, filter_key, wanted)
    return [f"{above.rstrip('/')}/{key}" for key in sorted(wanted, key=natural_order)]


def _filtered(file: Any, name: str, filter_key: str, there: list[str]) -> list[str]:
    """The streams that robomimic's filter key names."""
    import h5py

    mask = file["mask"] if file.get("mask", getclass=True) is h5py.Group else {}
    found = mask.get(filter_key)
    if not isinstance(found, h5py.Dataset):
        raise StoreError(
            f"{name} has no filter key {filter_key!r}; it has {shorten(list(mask), 300)} in its group mask"
        )
    if found.ndim != 1 or found.size > _MOST_FILTERED or found.dtype.kind not in "SO":
        raise StoreError(
            f"{name}: mask/{filter_key} is {found.dtype} {found.shape}, and should be a list of names; it is damaged"
        )
    _check_size(f"{name}: mask/{filter_key}", found, found.nbytes)
    names = [one.decode("utf-8", "replace") if isinstance(one, bytes) else str(one) for one in found[:]]
    if missing := sorted(set(names) - set(there)):
        raise StoreError(f"{name}: mask/{filter_key} names {shorten(missing, 200)}, of which there is no group")
    if len(set(names)) < len(names):
        raise StoreError(f"{name}: mask/{filter_key} names a stream twice; it is damaged")
    return names


def _leaves_of(file: Any, name: str, group: str, columns: str | Sequence[str] | None) -> Selection:
    """Which leaves the items have, by the first stream."""
    import h5py

    there: dict[str, int] = {}

    def visit(found_name: str, found: Any) -> None:
        if isinstance(found, h5py.Dataset):
            there[found_name] = found.shape[0] if found.shape else 0

    file[group].visititems(visit)
    selection = selected(columns, list(there), name)
    check_lengths(name, {leaf: there[leaf] for leaf in selection.names})
    return selection


def _length(file: Any, name: str, group: str, leaf: str) -> int:
    """The length of one leaf, as quickly as h5py tells it."""
    import h5py

    path = f"{group.rstrip('/')}/{leaf}"
    try:
        shape = h5py.h5d.open(file.id, path.encode()).get_space().get_simple_extent_dims()
    except (KeyError, ValueError):
        raise StoreError(
            f"{name}: {group} has no dataset {leaf!r}, as the first stream has; name others by columns="
        ) from None
    if not shape:
        raise StoreError(f"{name}: {path} is a single number, without an axis for time steps; leave it out by columns=")
    return int(shape[0])


def _table(group: Any, name: str, leaf: str) -> Hdf5Table:
    """One of a stream's datasets."""
    import h5py

    if not isinstance(found := group.get(leaf), h5py.Dataset):
        raise StoreError(f"{name} has no dataset {leaf!r}; name others by columns=, or leave the stream out")
    if found.file.id != group.file.id or found.external:
        raise StoreError(f"{name}: {leaf!r} lies in another file, which is refused; copy it into this one")
    table = Hdf5Table(group.file, name, found)
    check_row(f"{name}, {leaf}", table.row_shape, table.dtype)
    _check_size(
        f"{name}, {leaf}",
        found,
        len(table) * math.prod(table.row_shape) * table.dtype.itemsize,
    )
    return table


def _check_size(name: str, dataset: Any, claimed: int) -> None:
    """Refuse a dataset that claims much more than is on the disk."""
    if claimed <= _LARGEST_UNCHECKED_BYTES or dataset.is_virtual:
        return
    there = dataset.id.get_storage_size()
    if dataset.chunks is not None:
        there = dataset.id.get_num_chunks() * math.prod(dataset.chunks) * dataset.dtype.itemsize
    if claimed > _MOST_PACKED * there:
        raise StoreError(
            f"{name} is {dataset.dtype} {dataset.shape}, {claimed:,} bytes, and {there:,} of them are there: it is "
            "damaged, or was never written"
        )


def _attributes(file: Any, group: str, name: str) -> dict[str, Any]:
    """A group's attributes, as plain values; large ones are left out."""
    found: dict[str, Any] = {}
    with damage_named(name):
        attributes = file[group].attrs
        for key in attributes:
            if attributes.get_id(key).get_storage_size() <= _LARGEST_ATTRIBUTE_BYTES:
                value = attributes[key]
                value = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
                found[str(key)] = value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
    return found
