"""What is in HDF5 files of episodes: which groups are streams, which datasets are leaves, and how long streams are.

A group that holds datasets is a stream, and one that holds only groups has a stream in each of them::

    robomimic 0.3, LIBERO           data/demo_0/{actions, rewards, dones, states, obs/<name>}       a stream a demo
                                    mask/<filter key>   names of demos;  attribute `num_samples` of each demo
    ALOHA, ACT                      action, observations/{qpos, qvel, images/<camera>}              a stream a file
    RVT's event representations     data                                                            a stream a file

(Layouts as of robomimic's documentation "Dataset Contents and Overview" and its `utils/dataset.py`, LIBERO's
`scripts/create_dataset.py`, ACT's `record_sim_episodes.py`, and RVT's `data/genx_utils/sequence_base.py`.)

Guarantee: the first stream is looked at in full, of each other one only the length of one leaf. So the index of a file
takes a fraction of a millisecond a stream.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.formats import HDF5_SUFFIXES
from stream_dataloader.stores._base.rows import Leaves, Selection, check_lengths, selected
from stream_dataloader.stores.hdf5.files import (
    REMEDY,
    check_size,
    classes,
    hdf5_errors,
    open_known,
)
from stream_dataloader.streams._media.known_file import KnownFile
from stream_dataloader.streams._media.names import natural_order
from stream_dataloader.streams._media.section import check_file

__all__ = ["Hdf5Index", "read_index"]

_DATA, _ROOT = "data", "/"
_MOST_FILTERED = 1 << 24


class Hdf5Index(NamedTuple):
    """See `store.Index`.

    Attributes:
        fingerprint: Of names, sizes and times of files, keys, lengths and leaves.
        lengths: Time steps of each stream.
        files: All files that were found.
        file_of: In which of them each stream is.
        groups: Its group there.
        keys: Its name.
        selection: Which leaves an item has.
        group: Whose members the first stream's file has as streams.
    """

    fingerprint: str
    lengths: NDArray[np.int64]
    files: tuple[KnownFile, ...]
    file_of: NDArray[np.int32]
    groups: tuple[str, ...]
    keys: tuple[str, ...]
    selection: Selection
    group: str

    def __len__(self) -> int:
        return len(self.groups)


def _files(path: str) -> list[str]:
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


def read_index(path: str, group: str | None, leaves: Leaves, filter_key: str | None) -> Hdf5Index:
    """Look at all files of a store; the arguments are those of `Hdf5Store`."""
    files: list[KnownFile] = []
    groups: list[str] = []
    keys: list[str] = []
    lengths: list[int] = []
    file_of: list[int] = []
    selection: Selection | None = None
    first_above = _ROOT
    several = os.path.isdir(path)
    for name in _files(path):
        with hdf5_errors(name):
            check_file(name)
            known = KnownFile.of(name)
            with open_known(known) as file:
                above = _group_of(file, name, group)
                names = _streams(file, name, above, filter_key)
                if selection is None and names:
                    first_above = above
                    selection = _leaves_of(file, f"{name}, {names[0]}", names[0], leaves)
                if selection is not None:
                    lengths += [_length(file, name, one, selection.names[0]) for one in names]
        inside = os.path.relpath(name, path) if several else ""
        keys += [_key(one, above, inside) or os.path.basename(name) for one in names]
        groups += names
        file_of += [len(files)] * len(names)
        files.append(known)
    if selection is None:
        raise StoreError(f"{path} holds no streams: {len(files)} files, without any group in {group or _DATA!r}")
    counted = np.array(lengths, np.int64)
    inside_names = [os.path.relpath(known.path, path) for known in files]
    stamps = [(known.size, known.modified_ns) for known in files]
    described = repr((inside_names, stamps, keys, selection.names)).encode()
    digest = hashlib.blake2b(described + counted.tobytes(), digest_size=16)
    return Hdf5Index(
        digest.hexdigest(),
        counted,
        tuple(files),
        np.array(file_of, np.int32),
        tuple(groups),
        tuple(keys),
        selection,
        first_above,
    )


def _key(group: str, above: str, file: str) -> str:
    """A stream's name: that of the group below `above`, after that of the file if there may be several."""
    inside = group[len(above) :].strip("/")
    return f"{file}:{inside}" if file and inside else file or inside


def _group_of(file: Any, name: str, group: str | None) -> str:
    """The group to look for streams in."""
    if group is None:
        return f"/{_DATA}" if file.get(_DATA, getclass=True) is classes()[0] else _ROOT
    path = "/" + group.strip("/")
    if path != _ROOT and file.get(path, getclass=True) is not classes()[0]:
        raise StoreError(f"{name} has no group {group!r}; it has {shorten(list(file), 300)}")
    return path


def _streams(file: Any, name: str, above: str, filter_key: str | None) -> list[str]:
    """The groups that are streams."""
    group, dataset = classes()
    members = {key: file[above].get(key, getclass=True) for key in file[above]}
    if any(kind is dataset for kind in members.values()):
        names = [above]
        if filter_key is not None:
            raise StoreError(f"{name}: {above} is one stream, so filter_key={filter_key!r} has nothing to choose from")
        return names
    wanted = [key for key, kind in members.items() if kind is group]
    if filter_key is not None:
        wanted = _filtered(file, name, filter_key, members)
    return [f"{above.rstrip('/')}/{key}" for key in sorted(wanted, key=natural_order)]


def _filtered(file: Any, name: str, filter_key: str, members: dict[str, Any]) -> list[str]:
    """The members that robomimic's filter key names."""
    mask = file.get("mask", getclass=True) is classes()[0] and file["mask"]
    if not mask or mask.get(filter_key, getclass=True) is not classes()[1]:
        has = f"the filter keys {shorten(list(mask), 300)}" if mask else "no group 'mask' of filter keys"
        raise StoreError(f"{name} has no filter key {filter_key!r}; it has {has}")
    found = mask[filter_key]
    if found.ndim != 1 or found.size > _MOST_FILTERED or found.dtype.kind not in "SO":
        raise StoreError(
            f"{name}: mask/{filter_key} is {found.dtype} {found.shape}, and should be a list of names; it is damaged"
        )
    check_size(f"{name}: mask/{filter_key}", found, found.nbytes)
    names = [one.decode("utf-8", "replace") if isinstance(one, bytes) else str(one) for one in found[:]]
    if missing := [one for one in names if members.get(one) is not classes()[0]]:
        raise StoreError(f"{name}: mask/{filter_key} names {shorten(missing, 200)}, of which there is no group")
    if len(set(names)) < len(names):
        raise StoreError(f"{name}: mask/{filter_key} names a stream twice; it is damaged")
    return names


def _leaves_of(file: Any, name: str, group: str, leaves: Leaves) -> Selection:
    """Which leaves the items have, by the first stream."""
    there: dict[str, int] = {}
    dataset = classes()[1]

    def visit(found_name: str, found: Any) -> None:
        if isinstance(found, dataset):
            there[found_name] = found.shape[0] if found.shape else 0

    file[group].visititems(visit)
    selection = selected(leaves, list(there), name)
    check_lengths(name, {leaf: there[leaf] for leaf in selection.names})
    return selection


def _length(file: Any, name: str, group: str, leaf: str) -> int:
    """The length of one leaf, as quickly as h5py tells it."""
    import h5py

    path = f"{group.rstrip('/')}/{leaf}"
    try:
        shape = h5py.h5d.open(file.id, path.encode()).get_space().get_simple_extent_dims()
    except (KeyError, ValueError):
        raise StoreError(f"{name}: {group} has no dataset {leaf!r}, as the first stream has; {REMEDY}") from None
    if not shape:
        raise StoreError(f"{name}: {path} is a single number, without an axis for time steps; {REMEDY}")
    return int(shape[0])
