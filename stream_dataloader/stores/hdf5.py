"""Episodes in HDF5 files: a group is a stream, and its datasets are the leaves of items.

Guarantee: a dataset that claims much more data than is on the disk is refused without reading it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.files import damage_named, hashed, plain
from stream_dataloader.stores._base.formats import HDF5_SUFFIXES, given_columns, given_options
from stream_dataloader.stores._base.handles import Handles
from stream_dataloader.stores._base.rows import (
    PictureRows,
    Pictures,
    RowSteps,
    Selection,
    check_lengths,
    check_row,
    loaded_if_small,
    selected,
)
from stream_dataloader.stores._base.store import Index, Store
from stream_dataloader.streams._media.limits import Limits
from stream_dataloader.streams._media.listing import files_below
from stream_dataloader.streams._media.picture import Picture
from stream_dataloader.streams._media.section import KnownFile, check_file, closed_on_error, natural_order
from stream_dataloader.streams.array.hdf5 import Hdf5Table, datasets_in
from stream_dataloader.streams.array.hdf5_files import KnownFiles, Sources, check_size, open_file
from stream_dataloader.streams.cache.gate import Files, Gate, check_files

__all__ = ["Hdf5Store"]

_DATA, _ROOT = "data", "/"


class Hdf5Store(Store):
    """Episodes of robomimic, LIBERO, ALOHA and similar: groups of a file, or files of a folder.

    A group that holds datasets is a stream. A group of groups has one stream in each of them.
    An item is a dict, nested like the groups. All streams need the leaves of the first.
    Needs the extra `hdf5`.

    Args:
        path: A file, or a folder: all `.h5` and `.hdf5` files below it, in natural order.
        group: Group with the streams. None: `"data"`, or the root `"/"` without it.
        columns: Names of datasets, such as `["actions", "obs/image"]`, or of groups of them.
            A single name gives items that are arrays, not dicts. None reads all.
        filter_key: Only the streams that `mask/<filter_key>` lists.
        cameras: Names of encoded images to decode, such as `["observations/images"]`.
            Gray images have one channel; images of 16 bits are uint16.
        size: `(height, width)` of decoded images; None keeps their size.
        layout: `"CHW"` or `"HWC"`.
        color: `"rgb"`; `"bgr"` where RGB was encoded as BGR, as ALOHA does.
        files: Other files that may be read: `"inside"`, HDF5 files of the folder that virtual datasets name; or
            `"anywhere"`, any files, also in external links and external storage.
        limits: Largest sizes of decoded data; see `streams.Limits`. None: the defaults.
    """

    format: ClassVar[str] = "hdf5"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        group: str | None = None,
        columns: str | Sequence[str] | None = None,
        filter_key: str | None = None,
        cameras: str | Sequence[str] = (),
        size: tuple[int, int] | None = None,
        layout: Literal["CHW", "HWC"] = "CHW",
        color: Literal["rgb", "bgr"] = "rgb",
        files: Files = "inside",
        limits: Limits | None = None,
    ) -> None:
        check_files(files)
        if color not in ("rgb", "bgr"):
            raise ValueError(f"color is {color!r}; use 'rgb' or 'bgr'")
        cameras = [cameras] if isinstance(cameras, str) else list(cameras)
        options = given_options(locals(), columns=given_columns(columns, alone=True))
        self._opened = self._files = Handles[KnownFile, Any](_opened)
        self._checked: set[int] = set()  # streams that name no other file; `KnownFile` notices if this one changes
        self._pictures: Pictures | None = None
        if cameras:
            picture = Picture(size=size, layout=layout, limits=limits)
            self._pictures = Pictures(picture, "Hdf5Store(cameras=...)", swapped=color == "bgr")
        super().__init__(path, **options)
        _ = self.index

    def _read_index(self) -> _Index:
        files, streams, lengths = list[KnownFile](), list[_Stream](), list[int]()
        selection: Selection | None = None
        sources = self._sources()
        for path in _paths(self.path):
            with damage_named(path):
                check_file(path)
                files.append(known := KnownFile.of(path))
                with _opened(known) as file:
                    above = _group_of(file, path, self._options["group"], sources)
                    groups = _streams(file, path, above, self._options["filter_key"], sources)
                    if selection is None and groups:
                        name = f"{path}, {groups[0]}"
                        there, wrong = datasets_in(file[groups[0]], sources, name)
                        if wrong and self._options["columns"] is None:
                            other, why = next(iter(wrong.items()))
                            raise StoreError(f"{name}: {other!r} {why}; name others by columns={shorten(list(there))}")
                        there.pop("compress_len", None)  # in ALOHA's files it has a row for each camera
                        selection = selected(self._options["columns"], list(there), name)
                        check_lengths(name, {leaf: (there[leaf].shape or (0,))[0] for leaf in selection.names})
                        encoded = self._encoded(selection, name)
                    names = selection.names if selection else []
                    lengths += [_length(file, path, group, names, sources) for group in groups if names]
            inside = os.path.relpath(path, self.path) if os.path.isdir(self.path) else ""
            for group in groups:
                below = group[len(above) :].strip("/")
                key = f"{inside}:{below}" if inside and below else inside or below
                streams.append(_Stream(known, group, key or os.path.basename(path)))
        if selection is None:
            raise StoreError(f"{self.path} holds no streams: no groups in {above!r}")
        counted = np.array(lengths, np.int64)
        names = [os.path.relpath(known.path, self.path) for known in files]
        stamps = [(known.size, known.modified_ns) for known in (*files, *sources.known.values())]
        described = repr((names, stamps, [stream.key for stream in streams], selection.names))
        fingerprint = hashed(described, counted.tobytes())
        return _Index(fingerprint, counted, streams, selection, encoded, sources.known)

    def _sources(self) -> Sources:
        folder = self.path if os.path.isdir(self.path) else os.path.dirname(os.path.abspath(self.path))
        return Sources(Gate(folder, self._options["files"]), self._options["limits"])

    def _encoded(self, selection: Selection, name: str) -> set[str]:
        found: set[str] = set()
        for camera in self._options["cameras"]:
            below = camera.strip("/") + "/"
            if not (some := {leaf for leaf in selection.names if f"{leaf}/".startswith(below)}):
                raise StoreError(f"{name} has no cameras {camera!r}; it has {shorten(selection.names, 300)}")
            found |= some
        return found

    def _open_steps(self, number: int) -> RowSteps:
        index: _Index = self.index
        known, group, _ = index.streams[number]
        selection, name = index.selection, self.name_of(number)
        lease = self._files.lease(known)
        with closed_on_error(lease), known, damage_named(name):
            found = lease.handle[group]
            pictures, sources = dict.fromkeys(index.encoded, self._pictures), self._sources()
            sources.known.update(index.known)
            sources.is_checked = number in self._checked
            tables = [_table(found, name, leaf, pictures.get(leaf), sources) for leaf in selection.names]
            steps = check_lengths(name, dict(zip(selection.names, map(len, tables), strict=True)))
            promised = found.attrs.get("num_samples", steps)
            if steps != index.lengths[number] or np.ndim(promised) or promised != steps:
                told = f"by the index {index.lengths[number]}, by num_samples {promised}"
                raise StoreError(f"{name} is half written: it has {steps} steps, {told}")
            if not sources.known:
                self._checked.add(number)
            held = KnownFiles({known.path: known} | sources.known) if sources.known else known
            return RowSteps(selection.structure, tables, steps, close=lease.close, known=held)

    def metadata(self, number: int) -> Mapping[str, Any]:
        """Return the attributes of a stream's group."""
        number = self._check_number(number)
        return self._attributes(number, self.index.streams[number].group)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_checked": set()}

    def _metadata(self) -> Mapping[str, Any]:
        """Return the attributes of the group above the first stream's."""
        return self._attributes(0, os.path.dirname(self.index.streams[0].group))

    def _attributes(self, number: int, group: str) -> dict[str, Any]:
        known = self.index.streams[number].known
        with known, closing(self._files.lease(known)) as lease, damage_named(self.name_of(number)):
            return {str(name): plain(value) for name, value in lease.handle[group].attrs.items()}

    def check_stream(self, number: int) -> None:
        """Read one stream, and compare checksums (fletcher32)."""
        known, group, _ = self.index.streams[number]
        name = self.name_of(number)
        steps, lease = self._open_steps(number), self._files.lease(known)
        with closing(steps), closing(lease), damage_named(name):
            for leaf in self.index.selection.names:
                self._sources().check_written(lease.handle[group][leaf], f"{name}, {leaf}")
            steps.check()


class _Stream(NamedTuple):
    known: KnownFile
    group: str
    key: str


@dataclass
class _Index(Index):
    """See `Store._read_index`."""

    streams: list[_Stream]
    selection: Selection
    encoded: set[str]
    known: KnownFiles  # other files that are read, by virtual datasets for example

    def key(self, number: int) -> str:
        return self.streams[number].key


def _opened(known: KnownFile) -> Any:
    """Open an `h5py.File`; raise if the file has changed."""
    known.check()
    with damage_named(known.path):
        return open_file(known.path, known.path)


def _paths(path: str) -> list[str]:
    if not os.path.exists(path):
        raise FileNotFoundError(f"there is no HDF5 file or folder at {path}")
    if not os.path.isdir(path):
        return [path]
    if found := files_below(path, HDF5_SUFFIXES):
        return found
    raise StoreError(f"{path} has no files with names in {' or '.join(HDF5_SUFFIXES)}")


def _group_of(file: Any, name: str, group: str | None, sources: Sources) -> str:
    import h5py

    sources.check_links(file, _DATA if group is None else group, name)
    if group is None:
        return f"/{_DATA}" if isinstance(file.get(_DATA), h5py.Group) else _ROOT
    path = "/" + group.strip("/")
    if path != _ROOT and not isinstance(file.get(path), h5py.Group):
        raise StoreError(f"{name} has no group {group!r}; it has {shorten(list(file), 300)}")
    return path


def _streams(file: Any, name: str, above: str, filter_key: str | None, sources: Sources) -> list[str]:
    """Return the groups that are streams, in natural order."""
    import h5py
    from h5py import h5g

    group = file[above]
    members = {key: h5g.get_objinfo(group.id, os.fsencode(key), follow_link=False).type for key in group}
    for key, kind in members.items():
        if kind not in (h5g.GROUP, h5g.DATASET):  # maybe a link
            sources.check_links(group, key, f"{name}, {above}")
            found = group.get(key)
            if found is None and filter_key is None:
                raise StoreError(f"{name}, {above}: {key!r} is a link that leads nowhere; remove it")
            members[key] = {h5py.Group: h5g.GROUP, h5py.Dataset: h5g.DATASET}.get(type(found), kind)
    if foreign := [key for key in members if isinstance(key, bytes)]:
        raise StoreError(f"{name}, {above}: the name {foreign[0]!r} is no text in UTF-8; rename it")
    found = {key for key, kind in members.items() if kind == h5g.GROUP}
    if h5g.DATASET in members.values():
        if filter_key is not None:
            raise StoreError(f"{name}: {above} is one stream; leave out filter_key")
        return [above]
    if filter_key is not None:
        sources.check_links(file, f"mask/{filter_key}", name)
        mask = file.get(f"mask/{filter_key}")
        if not isinstance(mask, h5py.Dataset):
            there = shorten(list(file.get("mask", ())), 300)
            raise StoreError(f"{name} has no filter key {filter_key!r}; it has {there}")
        sources.check(mask, f"{name}: mask/{filter_key}")
        check_size(f"{name}: mask/{filter_key}", mask)
        wanted = {one.decode("utf-8", "replace") if isinstance(one, bytes) else str(one) for one in mask[:]}
        if missing := sorted(wanted - found):
            raise StoreError(f"{name}: mask/{filter_key} names {shorten(missing, 200)}, which are no groups")
        found = wanted
    return [f"{above.rstrip('/')}/{key}" for key in sorted(found, key=natural_order)]


def _length(file: Any, name: str, group: str, leaves: Sequence[str], sources: Sources) -> int:
    """Return the length of the first leaf by the fastest way in h5py; note other files that leaves are read from."""
    from h5py import Dataset, h5d

    path = f"{group.rstrip('/')}/{leaves[0]}"
    with damage_named(f"{name}, {path}"):
        sources.check_links(file, path, f"{name}, {path}", above=group)  # `_streams` has checked the group
        dataset = h5d.open(file.id, path.encode())
        # A dataset in the file itself has an offset in the file, or chunks.
        is_here = dataset.get_offset() is not None
        created = None if is_here else dataset.get_create_plist()
        if created is not None and (created.get_layout() == h5d.VIRTUAL or created.get_external_count()):
            for leaf in leaves:  # in a virtual file all leaves are virtual
                sources.check_links(file[group], leaf, f"{name}, {group}")
                if isinstance(found := file[group].get(leaf), Dataset):
                    sources.check(found, f"{name}, {group}/{leaf}")
        shape = dataset.get_space().get_simple_extent_dims()
    return int(shape[0]) if shape else 0


def _table(group: Any, name: str, leaf: str, pictures: Pictures | None, sources: Sources) -> Any:
    import h5py

    if not sources.is_checked:
        sources.check_links(group, leaf, name)
    if not isinstance(found := group.get(leaf), h5py.Dataset):
        raise StoreError(f"{name} has no dataset {leaf!r}; name others by columns=")
    label, dtype = f"{name}, {leaf}", found.dtype
    if not sources.is_checked:
        sources.check(found, label)
    if pictures is None and dtype.kind in "OSV":
        raise StoreError(f"{name}, dataset {found.name} is of dtype {dtype}; cameras= names encoded images")
    check_row(label, (found.shape or ())[1:], dtype)
    check_size(label, found)
    if pictures is not None:
        return PictureRows(found, pictures, label)
    return loaded_if_small(Hdf5Table(found, name))
