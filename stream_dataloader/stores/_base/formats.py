"""The table of formats, and what kind of store lies at a path: told by names of files, without reading data.

A format of another package is an entry point of the group `stream_dataloader.stores`: its name is the format's, its
object a subclass of `Store`. To be found by a path, that has a static method `recognises(path, names)`; see `Format`.

Guarantee: looking costs a listing of two folders at most, and needs no optional package.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

from stream_dataloader.errors import StoreError
from stream_dataloader.streams.cache.file_cache import is_url

__all__ = ["FORMATS", "HDF5_SUFFIXES", "Format", "format_of", "known_formats"]

HDF5_SUFFIXES = (".h5", ".hdf5")

_SHARDS = re.compile(rb'"shards"\s*:\s*\[')
_HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"


class Format(NamedTuple):
    """One format.

    Attributes:
        module: Where its store is.
        store: The name of its class.
        packer: The name of its `Packer`, or None if nothing can be packed into it.
        recognise: Whether what lies at a path is of this format, by the path and the names in the folder.
    """

    module: str
    store: str
    packer: str | None
    recognise: Callable[[str, frozenset[str]], bool]

    def load(self, name: str) -> Any:
        """Its store or its packer."""
        return getattr(importlib.import_module(self.module), name)


def _value(path: str, key: str, *names: str) -> object:
    """What a small JSON file has for a key; None if it has nothing, or is none."""
    try:
        with open(os.path.join(path, *names), encoding="utf-8") as file:
            found = json.loads(file.read(1 << 20))
    except (OSError, ValueError):
        return None
    return found.get(key) if isinstance(found, dict) else None


def _is_mds(path: str, names: frozenset[str]) -> bool:
    if "index.json" not in names:
        return False
    with open(os.path.join(path, "index.json"), "rb") as file:  # which is large if there are many shards
        return _SHARDS.search(file.read(1 << 16)) is not None


def _is_hdf5(path: str, names: frozenset[str]) -> bool:
    if os.path.isfile(path):
        with open(path, "rb") as file:
            return file.read(8) == _HDF5_SIGNATURE or path.endswith(HDF5_SUFFIXES)
    return any(name.endswith(HDF5_SUFFIXES) for name in names)


def _is_lmdb(path: str, names: frozenset[str]) -> bool:
    """A store that was packed, or an LMDB file or folder as LMDB makes it; one of several need not be named so."""
    if any(name.endswith((".lmdb", ".mdb")) for name in (path.rstrip("/"), *names)):
        return True
    return "store.json" in names and _value(path, "kind", "store.json") == "stream_dataloader lmdb store"


def _is_zarr(path: str, names: frozenset[str]) -> bool:
    return bool(names & {".zgroup", "zarr.json"}) or (path.rstrip("/").endswith((".zarr", ".zarr.zip")))


def _is_pattern(path: str) -> bool:
    """Whether a path stands for several: `train-{000..015}.tar`, `data/*.parquet`."""
    return any(sign in os.path.basename(path) for sign in "*?[{")


def _suffixed(*suffixes: str) -> Callable[[str, frozenset[str]], bool]:
    def recognise(path: str, names: frozenset[str]) -> bool:
        return path.endswith(suffixes) or any(name.endswith(suffixes) for name in names)

    return recognise


def _is_npy(path: str, names: frozenset[str]) -> bool:
    if path.endswith(".npy") or any(name.endswith(".npy") for name in names):
        return True
    folders = (os.path.join(path, name) for name in sorted(names) if not name.startswith("."))
    first = next(filter(os.path.isdir, folders), None)
    return first is not None and any(name.endswith(".npy") for name in os.listdir(first))


def _is_parquet(path: str, names: frozenset[str]) -> bool:
    if "dataset_dict.json" in names or _suffixed(".parquet", ".arrow", ".feather")(path, names):
        return True
    as_hive = (name for name in names if "=" in name and os.path.isdir(os.path.join(path, name)))
    return any(as_hive) and not _is_npy(path, names)


#: Of each format its class, what recognises it, and its packer; in the order in which they are looked for.
_OURS: list[tuple[str, Callable[[str, frozenset[str]], bool], str | None]] = [
    ("LmdbStore", _is_lmdb, "LmdbPacker"),
    ("MemmapStore", lambda _, names: "store.json" in names, "MemmapPacker"),
    ("LeRobotStore", lambda path, _: bool(_value(path, "codebase_version", "meta", "info.json")), None),
    ("MdsStore", _is_mds, "MdsPacker"),
    ("TfdsStore", lambda _, names: {"dataset_info.json", "features.json"} <= names, None),
    ("ZarrStore", _is_zarr, None),
    ("TensorDictStore", lambda path, _: bool(_value(path, "_type", "meta.json")), None),
    ("Hdf5Store", _is_hdf5, None),
    ("WebDatasetStore", _suffixed(".tar", ".tar.gz", ".tgz"), None),
    ("ParquetStore", _is_parquet, None),
    ("NpyStore", _is_npy, None),
]

#: By their names, which are those of their modules and the beginnings of their classes'.
FORMATS: dict[str, Format] = {
    name: Format(f"stream_dataloader.stores.{name}", store, packer, recognise)
    for store, recognise, packer in _OURS
    for name in [store.removesuffix("Store").lower()]
}


@functools.cache
def known_formats() -> dict[str, Format]:
    """Those of the table, and behind them those of other packages."""
    found = entry_points(group="stream_dataloader.stores")
    others = {one.name: Format(one.module, one.attr, None, functools.partial(_is_others, one)) for one in found}
    return FORMATS | {name: one for name, one in others.items() if name not in FORMATS}


def _is_others(entry: EntryPoint, path: str, names: frozenset[str]) -> bool:
    recognises = getattr(entry.load(), "recognises", None)
    return recognises is not None and bool(recognises(path, names))


def format_of(path: str) -> str:
    """The name of a store's format.

    Raises:
        FileNotFoundError: There is nothing.
        StoreError: It is none that is known; says how to name one.
    """
    names: frozenset[str] = frozenset()
    if not is_url(path) and not (_is_pattern(path) and not os.path.lexists(path)):
        if not os.path.exists(path):
            raise FileNotFoundError(f"there is no store at {path}; give the path of a folder or a file")
        names = frozenset(os.listdir(path)) if os.path.isdir(path) else frozenset()
    found = next((name for name, one in known_formats().items() if one.recognise(path, names)), None)
    if found is None:
        raise StoreError(
            f"{path} is no store of a known format; name it, if it is one: stores.open(path, format=...), one of "
            f"{', '.join(known_formats())}"
        )
    return found
