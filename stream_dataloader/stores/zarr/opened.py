"""An open Zarr folder or archive: the names of its arrays, and each array once it is read."""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Iterator

from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.files import damage_named, package
from stream_dataloader.stores.zarr.arrays import ZarrArray
from stream_dataloader.streams._media.limits import DEFAULT, Limits
from stream_dataloader.streams._media.listing import entries_in, is_hidden
from stream_dataloader.streams.cache.gate import Files

__all__ = ["OpenedZarr"]

#: Files that describe an array of format 2, and a group or an array of format 3.
_ARRAY, _NODE = ".zarray", "zarr.json"

#: Bytes by which packing may make a member of an archive larger, beside a tenth.
_OVERHEAD_BYTES = 1024

#: Packages of codecs that replay buffers use, by the beginning of the codecs' names.
_CODECS = {
    "imagecodecs_": "imagecodecs (imagecodecs.numcodecs.register_codecs())",
    "numcodecs.": "numcodecs with what this codec needs",
    "pcodec": "pcodec",
    "zfpy": "zfpy",
    "wavpack": "wavpack-numcodecs",
    "blosc2": "blosc2",
}


class OpenedZarr:
    """Open store of this process; `group` is its root."""

    def __init__(self, path: str, files: Files, limits: Limits | None) -> None:
        self._files, self._limits = files, limits or DEFAULT
        zarr = package("zarr", f"with Python 3.11 or later, {path}", "zarr")
        folders, archives = zarr.storage.LocalStore, zarr.storage.ZipStore
        if not os.path.exists(path):
            raise FileNotFoundError(f"there is no Zarr folder or .zarr.zip at {path}")
        self._path = path
        self._arrays: dict[str, ZarrArray] = {}
        self._places: list[str] | None = None
        is_folder = os.path.isdir(path)
        if not is_folder:
            self._places = sorted(_arrays_of(path, self._limits))
        store = folders(path, read_only=True) if is_folder else archives(path, mode="r")
        try:
            with damage_named(path):
                # Consolidated metadata is a copy. It is outdated if data were appended without renewing it.
                self.group = zarr.open_group(store, mode="r", use_consolidated=False)
        except BaseException:
            if hasattr(store, "_zf"):  # a ZipStore has this once it is open
                store.close()
            raise

    def array(self, place: str) -> ZarrArray:
        if place not in self._arrays:
            with damage_named(f"{self._path}, array {place}"):
                if place not in self.places():
                    raise StoreError(f"{self._path} has no array {place!r}; it has {self.listed()}")
                try:
                    array = self.group[place]
                except ValueError as error:
                    raise _without_codec(f"{self._path}, array {place}", error) or error from None
                self._arrays[place] = ZarrArray(self._path, place, array, self._files, self._limits)
        return self._arrays[place]

    def places(self) -> list[str]:
        """Names of the arrays, from the names of files. No array is opened, because it may need a missing package."""
        if self._places is None:
            self._places = sorted(_arrays_below(self._path))
        return self._places

    def listed(self) -> str:
        return shorten(self.places(), 300)

    def close(self) -> None:
        self.group.store.close()


def _arrays_below(folder: str, place: str = "") -> Iterator[str]:
    files = {name: os.path.join(folder, name) for name in (_ARRAY, _NODE)}
    content = next((_content_of(path) for path in files.values() if os.path.isfile(path)), None)
    if content is not None and _is_array(content):
        yield place
        return  # below an array there are only chunks
    for entry in entries_in(folder):
        if entry.is_dir():
            yield from _arrays_below(entry.path, f"{place}/{entry.name}".strip("/"))


def _arrays_of(path: str, limits: Limits) -> Iterator[str]:
    """Yield the arrays of an archive, after checking what its members claim to unpack to."""
    with damage_named(path), zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            name, packed, unpacked = f"{path}, {member.filename}", member.compress_size, member.file_size
            limits.check_unpacked(packed, unpacked, name)
            if packed > unpacked + unpacked // 10 + _OVERHEAD_BYTES:  # zipfile would unpack all of it
                raise StoreError(f"{name} has {packed:,} packed bytes, and claims {unpacked:,} unpacked: it is damaged")
        for name in archive.namelist():
            place, _, file = name.rpartition("/")
            if file in (_ARRAY, _NODE) and not is_hidden(place) and _is_array(archive.read(name)):
                yield place


def _content_of(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _is_array(content: bytes) -> bool:
    """Return True if the file that describes a node (`.zarray`, `zarr.json`) describes an array."""
    try:
        found = json.loads(content)
    except ValueError:
        return True  # an error will name the damaged file when the array is opened
    return not isinstance(found, dict) or found.get("node_type") != "group"  # of another kind: an error, as above


def _without_codec(name: str, error: ValueError) -> StoreError | None:
    """Return an error about a codec that no installed package has, or None if `error` is about something else."""
    if type(error).__name__ != "UnknownCodecError":
        return None
    codec = re.sub(".*: ", "", str(error)).strip("'\"")
    owner = next((package for start, package in _CODECS.items() if codec.startswith(start)), "the package that has it")
    remedy = f"install {owner} and register it in the module of the main program, so that workers have it too"
    return StoreError(
        f"{name} needs the codec {codec!r}, which is not known here; {remedy}, or leave it out by columns="
    )
