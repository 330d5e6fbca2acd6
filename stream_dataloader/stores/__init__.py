"""Stores: many streams in one place, which can be read from any step.

::

    stores.pack((paths, open_video), "clips.store")          # decode once
    sources, open_stream = stores.open("clips.store")  # read at the speed of memory
    dataset = StreamDataset(sources, open_stream, batch_size=8, time_steps=16)  # knows the lengths

A store is a factory that knows its streams. `open` detects its format. Open `_base/store.py` first.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.deltas import DeltaStore
from stream_dataloader.stores._base.files import plain_path
from stream_dataloader.stores._base.formats import FORMATS, check_options, format_of, known_formats
from stream_dataloader.stores._base.hub import hub_folder
from stream_dataloader.stores._base.store import OpenedStore, Store, StoreInfo

if TYPE_CHECKING:
    from stream_dataloader.stores._packing.driver import pack
    from stream_dataloader.stores._packing.join import join
    from stream_dataloader.stores._packing.run import PackReport
    from stream_dataloader.stores.hdf5 import Hdf5Store
    from stream_dataloader.stores.joined import JoinedStore
    from stream_dataloader.stores.lerobot import LeRobotStore
    from stream_dataloader.stores.lmdb import LmdbStore
    from stream_dataloader.stores.mds import MdsStore, MdsWriter
    from stream_dataloader.stores.memmap import MemmapStore
    from stream_dataloader.stores.npy import NpyStore
    from stream_dataloader.stores.parquet import ParquetStore
    from stream_dataloader.stores.tensordict import TensorDictStore
    from stream_dataloader.stores.tfds import TfdsStore
    from stream_dataloader.stores.token import TokenStore
    from stream_dataloader.stores.webdataset import WebDatasetStore
    from stream_dataloader.stores.zarr import ZarrStore

__all__ = [
    "Hdf5Store",
    "JoinedStore",
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
    "TokenStore",
    "WebDatasetStore",
    "ZarrStore",
    "inspect",
    "join",
    "open",
    "pack",
    "verify",
]

#: Names that are imported on first use, and their modules.
_MODULES = {one.store: one.module for one in FORMATS.values()} | {
    "MdsWriter": f"{__name__}.mds",
    "PackReport": f"{__name__}._packing.run",
    "join": f"{__name__}._packing.join",
    "pack": f"{__name__}._packing.driver",
}


def open(
    path: Any,
    *,
    format: str | None = None,
    deltas: Mapping[str, Iterable[int]] | None = None,
    **options: Any,
) -> OpenedStore:
    """Open a store; return the first two arguments of `StreamDataset`.

    Args:
        path: A folder, a file, a URL where the format allows, or
            `hf://datasets/owner/name`: a LeRobot dataset of the Hub. Or a `Dataset`,
            `DatasetDict` or `IterableDataset` of Hugging Face.
        format: The store's format, such as `"memmap"`. None detects it.
        deltas: Windows for entries of items that are dicts, as steps relative to
            the item's own step. With `{"action": range(16)}` an item's
            `action` is `(16, ...)`: the next 16 actions. Steps outside the stream repeat
            its first or last step, and are True in `action_is_pad`, `(16,)`.
        options: Options of the format's class: `stores.MemmapStore` and so on.

    Returns:
        The numbers of all streams, and the store, which opens them.

    Raises:
        FileNotFoundError: Nothing exists at that path.
        StoreError: The store is damaged or unfinished, or its format is unknown.
        TypeError: The format has no such option.
        ImportError: A package is missing; the message names the extra to install.
    """
    is_path = isinstance(path, (str, os.PathLike))
    path = hub_folder(plain_path(path)) if is_path else path
    name = format or (format_of(path, options.get("cache")) if is_path else "parquet")
    if (found := known_formats().get(name)) is None:
        raise ValueError(f"format is {format!r}; use one of {list(known_formats())}, or None")
    one = next(iter(path.values()), None) if isinstance(path, Mapping) else path
    is_forward = name == "parquet" and hasattr(one, "num_shards")  # an IterableDataset
    kind: Callable[..., Store] = found.load("ShardStore" if is_forward else found.store)
    check_options(kind, options, f"the format is {name!r}")
    store = kind(path, **options)
    if deltas is not None:
        store = DeltaStore(store, deltas)
    return OpenedStore(store.sources, store)


def inspect(path: Any, *, format: str | None = None, **options: Any) -> StoreInfo:
    """Return a summary of a store's contents. The arguments are those of `open`."""
    return open(path, format=format, **options).open_stream.info()


def verify(
    path: Any,
    *,
    format: str | None = None,
    progress: Callable[[int, int], Any] | None = None,
    **options: Any,
) -> list[str]:
    """Read all of a store, and compare it with its checksums; options are those of `open`.

    Args:
        path: See `open`.
        format: See `open`.
        progress: Function that is called with the number of streams read so far and the number of all.
        options: See `open`.

    Returns:
        One line for each problem; empty if there is none.
    """
    return open(path, format=format, **options).open_stream.verify(progress)


def __getattr__(name: str) -> Any:
    """Import a format on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
