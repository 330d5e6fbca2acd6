"""Stores: many streams kept in one place, packed once and read at any step.

::

    stores.pack((paths, open_video), "clips.store")          # decode once
    sources, open_stream = stores.open("clips.store")        # from then on, read at the speed of memory
    dataset = StreamDataset(sources, open_stream, batch_size=8, time_steps=16)              # which knows the lengths

A store is a factory that knows its streams; `open` finds out its format. A format imports the packages it needs when it
is first used, and of the package what lies below and `streams`. Open `_base/store.py` first.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.files import plain_path
from stream_dataloader.stores._base.formats import FORMATS, format_of, known_formats
from stream_dataloader.stores._base.options import check_options
from stream_dataloader.stores._base.store import OpenedStore, Store, StoreInfo

if TYPE_CHECKING:
    from stream_dataloader.stores._packing.driver import pack
    from stream_dataloader.stores._packing.report import PackReport
    from stream_dataloader.stores.hdf5 import Hdf5Store
    from stream_dataloader.stores.lerobot import LeRobotStore
    from stream_dataloader.stores.lmdb import LmdbStore
    from stream_dataloader.stores.mds import MdsStore, MdsWriter
    from stream_dataloader.stores.memmap import MemmapStore
    from stream_dataloader.stores.npy import NpyStore
    from stream_dataloader.stores.parquet import ParquetStore
    from stream_dataloader.stores.tensordict import TensorDictStore
    from stream_dataloader.stores.tfds import TfdsStore
    from stream_dataloader.stores.webdataset import WebDatasetStore
    from stream_dataloader.stores.zarr import ZarrStore

__all__ = [
    "Hdf5Store",
    "LeRobotStore",
    "LmdbStore",
    "MdsStore",
    "MdsWriter",
    "MemmapStore",
    "NpyStore",
    "OpenedStore",
    "PackReport",
    "ParquetStore",
    "Store",
    "StoreError",
    "StoreInfo",
    "TensorDictStore",
    "TfdsStore",
    "WebDatasetStore",
    "ZarrStore",
    "inspect",
    "open",
    "pack",
    "verify",
]

#: Names that are imported when they are first used, and their modules.
_MODULES = {one.store: one.module for one in FORMATS.values()} | {
    "MdsWriter": f"{__name__}.mds",
    "PackReport": f"{__name__}._packing.report",
    "pack": f"{__name__}._packing.driver",
}


def open(path: str | os.PathLike[str], *, format: str | None = None, **options: Any) -> OpenedStore:
    """Open a store: the first two arguments of `StreamDataset`.

    Args:
        path: A folder, a file, or a URL where the format allows.
        format: The store's format, such as `"memmap"`; the classes of stores have its name as `format`. None finds it
            out by the names of files.
        options: Of the format's class: `stores.MemmapStore` and so on.

    Returns:
        The numbers of all streams, and the store, which opens them.

    Raises:
        FileNotFoundError: There is nothing at that path.
        StoreError: The store is damaged, unfinished or of no known format.
        TypeError: The format has no such option.
        ImportError: A package is missing that the format needs; names the extra to install.
    """
    path = plain_path(path)
    name = format_of(path) if format is None else format
    if (found := known_formats().get(name)) is None:
        known = ", ".join(map(repr, known_formats()))
        raise ValueError(f"format is {format!r}; use one of {known}, or None to have it found")
    kind: Callable[..., Store] = found.load(found.store)
    taken = f"{path} was taken for a store of format {name!r}" if format is None else f"format is {name!r}"
    check_options(kind, options, taken)
    store = kind(path, **options)
    return OpenedStore(store.sources, store)


def inspect(path: str | os.PathLike[str], *, format: str | None = None, **options: Any) -> StoreInfo:
    """What a store holds: `stream-dataloader inspect` as a function. Arguments and errors are those of `open`."""
    return open(path, format=format, **options).open_stream.info()


def verify(
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    progress: Callable[[int, int], Any] | None = None,
    **options: Any,
) -> list[str]:
    """Read all of a store, and compare it with its checksums: `stream-dataloader verify` as a function.

    Args:
        path: See `open`, which also tells the errors for a store that cannot be opened.
        format: See `open`.
        progress: Called with how many streams were read, and how many there are.
        options: See `open`.

    Returns:
        What is wrong, a line each; empty if nothing is.
    """
    return open(path, format=format, **options).open_stream.verify(progress)


def __getattr__(name: str) -> Any:
    """Import a format when it is first used, so that one does not need the packages of another."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
