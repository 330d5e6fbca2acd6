"""What is in a folder that `TensorDict.memmap` wrote: the format of tensordict 0.14 and 0.15.

Checked against the sources of these versions, both ways. ::

    meta.json               of a TensorDict: an entry a key, and "shape" (the batch size), "device", "_type";
                            "_format_version" since 0.15, which is 1
    pixels.memmap           a tensor, C order, as its entry says: {"shape": [100, 3], "dtype": "torch.uint8", ...};
                            no file if it has no elements
    next/meta.json          a nested TensorDict, its entry is {"type": "TensorDict"}
    text/meta.json          "data": one value of NonTensorData, or a list, a value a step, of a NonTensorStack
    text/other.pickle       what JSON cannot hold (pickle.pkl of a stack)
    sample/_tensordict/     the TensorDict of a tensorclass

A key is a file's name with `%2F` and the like for what a path cannot hold; before 0.9 it was the key itself.

Guarantee: nothing is unpickled, and no file outside of the folder is named. What cannot be read is known by its name
and the reason, so that the rest can be read without it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.files import read_json
from stream_dataloader.stores._base.leaves import LeafSpec, dtype_named

__all__ = ["Name", "Saved", "read_saved"]

#: A key of a TensorDict, and keys in those that it holds.
Name = tuple[str, ...]

_META = "meta.json"
_NEWEST_VERSION = 1
_MOST_META_BYTES = 1 << 28
_DEEPEST = 64
_LARGEST_SIZE = 1 << 56
_UNSAFE = {ord(sign): f"%{ord(sign):02X}" for sign in ['/<>:"|?*\\ %', *map(chr, range(32)), chr(127)] for sign in sign}

#: Entries of meta.json that tensordict writes over those of tensors of these names.
_TAKEN = ("shape", "device", "_type")

_PICKLED = "is pickled, and pickles may run any code"


@dataclass
class Saved:
    """What a folder holds.

    Attributes:
        batch: The batch size of the outermost TensorDict.
        version: Of the format.
        tensors: Their files, and their dtypes and shapes, rows first, by name.
        stacks: Values of JSON, a step each, by name.
        values: Values of JSON that hold for all steps, by name.
        refused: What cannot be read, and why.
        metas: The meta.json files, which tell one save from another.
    """

    batch: tuple[int, ...] = ()
    version: int = 0
    tensors: dict[Name, tuple[str, LeafSpec]] = field(default_factory=dict)
    stacks: dict[Name, list[Any]] = field(default_factory=dict)
    values: dict[Name, Any] = field(default_factory=dict)
    refused: dict[Name, str] = field(default_factory=dict)
    metas: list[str] = field(default_factory=list)


def read_saved(folder: str) -> Saved:
    """Read all meta.json files."""
    saved = Saved()
    _read_folder(folder, (), saved)
    if () in saved.refused or () in saved.values or () in saved.stacks:
        raise StoreError(f"{folder} is no saved TensorDict: it {saved.refused.get((), 'holds no tensors')}")
    return saved


def _read_folder(folder: str, name: Name, saved: Saved) -> None:
    path = os.path.join(folder, _META)
    if len(name) > _DEEPEST:
        raise StoreError(f"{path} is nested more than {_DEEPEST} deep; is there a link to itself?")
    meta = read_json(path, dict, _MOST_META_BYTES)
    saved.metas.append(path)
    version = meta.get("_format_version", 0)
    if isinstance(version, int) and version > _NEWEST_VERSION:
        raise StoreError(
            f"{path} is of version {version} of tensordict's format, and the newest that is known here is "
            f"{_NEWEST_VERSION}; save it by tensordict 0.15, or use a newer release of this package"
        )
    if not isinstance(meta.get("_type"), str):
        raise StoreError(f"{path} is not of a saved TensorDict: it has no _type; save it by TensorDict.memmap")
    has_pickle = any(os.path.exists(os.path.join(folder, file)) for file in ("other.pickle", "pickle.pkl"))
    if isinstance(meta.get("shape"), list):
        saved.batch = saved.batch if name else _sizes(meta["shape"], path)
        saved.version = saved.version if name or not isinstance(version, int) else version
        _read_entries(folder, meta, name, saved)
    elif os.path.isdir(inner := os.path.join(folder, "_tensordict")):  # of a tensorclass
        if has_pickle:
            pickle: Name = (*name, "other.pickle")
            saved.refused[pickle] = _PICKLED
        _read_folder(inner, name, saved)
    elif "stack_dim" in meta and "data" not in meta:
        saved.refused[name] = (
            "is a lazy stack, whose parts may be of different shapes; save its .contiguous(), or open a folder in it"
        )
    elif has_pickle:
        saved.refused[name] = _PICKLED
    elif "stack_dim" in meta:
        values = meta["data"]
        if meta["stack_dim"] == 0 and isinstance(values, list) and all(isinstance(value, str) for value in values):
            saved.stacks[name] = values
        else:
            saved.refused[name] = "holds other values than a text a step"
    elif meta.get("_is_non_tensor") is True:
        saved.values[name] = meta.get("data")
    else:
        saved.refused[name] = f"is a {shorten(meta['_type'], 80)}, which cannot be read; save it as a TensorDict"


def _read_entries(folder: str, meta: Mapping[str, Any], name: Name, saved: Saved) -> None:
    """The entries of a TensorDict, one a key."""
    for key, entry in meta.items():
        if not isinstance(entry, dict):
            continue
        inner: Name = (*name, key)
        if isinstance(entry.get("type"), str):
            _read_folder(_place(folder, key, ""), inner, saved)
        elif entry.get("is_nested"):
            saved.refused[inner] = "is a nested tensor, of rows of different shapes; pad it, or leave it out"
        else:
            saved.tensors[inner] = _tensor(folder, key, entry)
    for key in _TAKEN:
        if os.path.exists(os.path.join(folder, f"{key}.memmap")) and not isinstance(meta.get(key), dict):
            inner = (*name, key)
            saved.refused[inner] = "is called as an entry of meta.json, so its shape is lost; rename it, save anew"


def _tensor(folder: str, key: str, entry: Mapping[str, Any]) -> tuple[str, LeafSpec]:
    path = _place(folder, key, ".memmap")
    try:
        dtype = dtype_named(str(entry.get("dtype")).removeprefix("torch."))
        return path, LeafSpec(dtype, _sizes(entry.get("shape"), path))
    except ValueError as error:
        raise StoreError(f"{os.path.join(folder, _META)} is damaged at {key!r}: {error}; save it anew") from None


def _sizes(found: Any, path: str) -> tuple[int, ...]:
    if not isinstance(found, list) or not all(type(size) is int and 0 <= size < _LARGEST_SIZE for size in found):
        raise StoreError(f"{path} has a shape {shorten(found, 80)}, which is none; the store is damaged, save it anew")
    return tuple(found)


def _place(folder: str, key: str, suffix: str) -> str:
    """Where a key's file or folder is."""
    if key in ("", ".", ".."):
        encoded = "%2E" * len(key) or "%"
    else:
        encoded = key.translate(_UNSAFE)
        older = os.path.join(folder, key + suffix)
        if not {"/", "\\", "\0"} & set(key) and encoded != key and os.path.exists(older):
            newer = os.path.join(folder, encoded + suffix)
            return newer if os.path.exists(newer) else older
    return os.path.join(folder, encoded + suffix)
