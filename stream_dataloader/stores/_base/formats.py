"""Table of formats, detection of the format at a path, and options of formats.

A format of another package is an entry point of the group `stream_dataloader.stores`: a subclass
of `Store`, with a static method `recognises(path, names)` if paths are to tell it.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib.metadata import EntryPoint, entry_points
from inspect import signature
from typing import Any, NamedTuple

from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.files import in_folder
from stream_dataloader.streams._media.listing import entries_in
from stream_dataloader.streams._media.section import check_flags
from stream_dataloader.streams.cache import FileCache, is_url, open_local

__all__ = [
    "FORMATS",
    "HDF5_SUFFIXES",
    "INDEXES",
    "JOINED",
    "PART_NAME",
    "Format",
    "check_options",
    "format_at",
    "format_of",
    "given_columns",
    "given_options",
    "known_formats",
]


HDF5_SUFFIXES = (".h5", ".hdf5")

_HERE = "stream_dataloader.stores"
_HDF5, _NPY = rb"\A\x89HDF\r\n\x1a\n", rb"\A\x93NUMPY"
_PACKED, JOINED, _LMDB = "store.json", "joined.json", rb'\A\s*\{\s*"kind":\s*"stream_dataloader lmdb store"'


#: Name of the folder of a part: its number, and the number of all parts.
PART_NAME = re.compile(r"(0|[1-9]\d*)-of-([1-9]\d*)")


class Format(NamedTuple):
    """One format: names of its module and classes, and what knows it by a path and names in it."""

    module: str
    store: str
    packer: str | None
    recognise: Callable[[str, frozenset[str]], bool]

    def load(self, name: str) -> Any:
        return getattr(importlib.import_module(self.module), name)


def _holds(pattern: bytes, *path: str) -> bool:
    try:
        with open(os.path.join(*path), "rb") as file:
            return re.search(pattern, file.read(min(1 << 20, os.fstat(file.fileno()).st_size))) is not None
    except OSError:
        return False


def _has(path: str, *names: str) -> bool:
    return any(os.path.exists(os.path.join(path, name)) for name in names)


def _ends(names: Iterable[str], *suffixes: str) -> bool:
    return any(name.rstrip("/").endswith(suffixes) for name in names)


def _is_npy(path: str, names: frozenset[str]) -> bool:
    folders = (os.path.join(path, name) for name in sorted(names))
    first = next(filter(os.path.isdir, folders), None)
    return _ends(names | {path, *(one.name for one in (entries_in(first) if first else ()))}, ".npy")


def _is_parquet(path: str, names: frozenset[str]) -> bool:
    if "dataset_dict.json" in names or _ends(names | {path}, ".parquet", ".arrow", ".feather"):
        return True
    as_hive = (name for name in names if "=" in name and os.path.isdir(os.path.join(path, name)))
    return any(as_hive) and not _is_npy(path, names)


def _is_tokens(path: str, names: frozenset[str]) -> bool:
    if _ends(names | {path}, ".bin", ".idx"):
        return True
    first = next((name for name in sorted(names) if name.endswith(".npy")), "") if names else path
    file = os.path.join(path, first) if names else path
    return first.endswith(".npy") and not (os.path.isdir(file) or _holds(_NPY, file))


#: Class of each format, and the function that recognises it. The first match is used.
_OURS: list[tuple[str, Callable[[str, frozenset[str]], bool]]] = [
    ("JoinedStore", lambda _, names: JOINED in names or any(map(PART_NAME.fullmatch, names))),
    ("LmdbStore", lambda at, names: _ends(names | {at}, ".lmdb", ".mdb") or _holds(_LMDB, at, _PACKED)),
    ("MemmapStore", lambda _, names: _PACKED in names),
    ("LeRobotStore", lambda at, _: _holds(rb'"codebase_version"\s*:', at, "meta", "info.json")),
    ("MdsStore", lambda at, _: _holds(rb'"shards"\s*:\s*\[', at, "index.json")),
    ("TfdsStore", lambda _, names: {"dataset_info.json", "features.json"} <= names),
    ("ZarrStore", lambda at, _: _ends({at}, ".zarr", ".zarr.zip") or _has(at, ".zgroup", "zarr.json")),
    ("TensorDictStore", lambda at, _: _holds(rb'"_type"\s*:', at, "meta.json")),
    ("Hdf5Store", lambda at, names: _ends(names | {at}, *HDF5_SUFFIXES) or _holds(_HDF5, at)),
    ("WebDatasetStore", lambda at, names: _ends(names | {at}, ".tar", ".tar.gz", ".tgz")),
    ("ParquetStore", _is_parquet),
    ("TokenStore", _is_tokens),
    ("NpyStore", _is_npy),
]
_PACKERS = {"lmdb": "LmdbPacker", "memmap": "MemmapPacker", "mds": "MdsPacker"}

#: File that is written last, for formats that can be read from the URL of a folder.
INDEXES = {"memmap": _PACKED, "mds": "index.json"}

#: Formats by name, which is the name of the module.
FORMATS: dict[str, Format] = {
    name: Format(f"{_HERE}.{name}", store, _PACKERS.get(name), recognise)
    for store, recognise in _OURS
    for name in [store.removesuffix("Store").lower()]
}


@functools.cache
def known_formats() -> dict[str, Format]:
    """Return the formats of the table, followed by those of other packages."""
    found = entry_points(group=_HERE)
    others = {one.name: Format(one.module, one.attr, None, functools.partial(_is_others, one)) for one in found}
    return FORMATS | others | FORMATS


def _is_others(entry: EntryPoint, path: str, names: frozenset[str]) -> bool:
    recognises = getattr(entry.load(), "recognises", None)
    return recognises is not None and bool(recognises(path, names))


def format_at(url: str, ask: Callable[[str], object]) -> str | None:
    """Return the format whose index `ask` finds at a URL, or None."""
    for name, index in {**INDEXES, "joined": JOINED}.items():
        with suppress(FileNotFoundError):
            ask(in_folder(url, index))
            return name
    return None


def format_of(path: str, cache: FileCache | None = None) -> str:
    """Return the name of a store's format."""
    is_pattern = any(sign in os.path.basename(path) for sign in "*?[{") and not os.path.lexists(path)
    if not (is_pattern or is_url(path) or os.path.exists(path)):
        raise FileNotFoundError(f"there is no store at {path}")
    names = frozenset(entry.name for entry in (entries_in(path) if os.path.isdir(path) else ()))
    found = next((name for name, one in known_formats().items() if one.recognise(path, names)), None)
    if found is None and is_url(path):
        found = format_at(path, lambda index: open_local(index, cache).close())
    if found is None:
        raise StoreError(f"{path} is of no known format; give format=, one of {', '.join(known_formats())}")
    return found


def check_options(kind: Callable[..., object], options: Mapping[str, object], taken: str) -> None:
    """Raise for options that a format does not have, and for flags that are not bools."""
    parameters = signature(kind).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return  # it checks them itself
    known = [one.name for one in parameters if one.name not in ("path", "folder")]
    if unknown := sorted(options.keys() - known):
        what = f"{taken}, which has no option {unknown[0]!r}"
        raise TypeError(f"{what}; it has {', '.join(known)}; format= names another")
    check_flags(kind, options)


def given_options(values: Mapping[str, Any], **changed: Any) -> dict[str, Any]:
    """Return the options among a constructor's `locals()`, some of them `changed`."""
    return {name: value for name, value in values.items() if name not in ("self", "path", "__class__")} | changed


def given_columns(columns: Any, *, alone: bool = False) -> Any:
    """Check the option `columns`: a list of names, None, or with `alone` also one name."""
    if columns is None or (alone and isinstance(columns, str) and columns):
        return columns
    names = list(columns) if isinstance(columns, Iterable) and not isinstance(columns, str) else [None]
    if not all(isinstance(name, str) for name in names):
        more = ", one by itself" if alone else ""
        raise TypeError(f"columns is {shorten(columns)}; give a list of names{more}, or None for all")
    if not names or not all(names) or len(set(names)) < len(names):
        raise ValueError(f"columns is {shorten(columns)}; give each once, or None for all")
    return names
