"""Saved TensorDicts of tensordict 0.14 and 0.15, as streams of nested dicts.

A folder's meta.json says what each key is: a tensor is `key.memmap`,
and what is nested a folder with a meta.json of its own.

Guarantee: nothing is unpickled. An entry that cannot be read raises an error that names it.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from stream_dataloader._engine.items.structure import Node, flatten
from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.files import damage_named, hashed, read_json
from stream_dataloader.stores._base.leaves import LeafSpec, dtype_named
from stream_dataloader.stores._base.rows import RowSteps
from stream_dataloader.stores._base.store import Index, Store
from stream_dataloader.stores.memmap.store import LeafFile
from stream_dataloader.streams._media.limits import check_empty_rows
from stream_dataloader.streams.cache.gate import Files

__all__ = ["TensorDictStore"]

#: A key of a TensorDict, and keys in those that it holds.
_Name = tuple[str, ...]

_META = "meta.json"
_PICKLED = "is pickled, and pickles may run any code"
_UNSAFE = {sign: f"%{sign:02X}" for sign in (*range(32), *b'/<>:"|?*\\ %', 127)}

#: File in which torchrl's storages save the number of filled steps.
_STORAGE = "storage_metadata.json"


class TensorDictStore(Store):
    """TensorDict that was saved by `memmap` or `save`; its first dimension is time.

    Items are nested dicts. A `NonTensorStack` is a text for each step, and a `NonTensorData` is metadata.
    Names are `"reward"`, or a tuple for nested entries, `("next", "reward")`.

    Without `stream`, `lengths` or `done`, all steps are one stream.
    Only the filled part of a storage of torchrl's `ReplayBuffer` is read.

    Args:
        path: The folder.
        columns: Names of entries or of nested TensorDicts to read. None reads all.
        stream: Column whose value changes where a stream begins, such as `("collector", "traj_ids")`.
        lengths: Column with a length for each stream, which is then not a leaf; or a `.npy` file in the folder.
        done: Column with a flag for each step that ends a stream, such as `("next", "done")`.
        files: Files that links in the folder may lead to: `"inside"` it, or `"anywhere"`.
    """

    format: ClassVar[str] = "tensordict"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        columns: Sequence[str | tuple[str, ...]] | None = None,
        stream: str | tuple[str, ...] | None = None,
        lengths: str | tuple[str, ...] | None = None,
        done: str | tuple[str, ...] | None = None,
        files: Files = "inside",
    ) -> None:
        if columns is not None and (not isinstance(columns, (list, tuple)) or not columns):
            raise TypeError(f"columns is {columns!r}; give a list of names, or None")
        wanted = None if columns is None else [_name("columns", column) for column in columns]
        given = {"stream": stream, "lengths": lengths, "done": done}
        self._cuts = {option: _name(option, value) for option, value in given.items() if value is not None}
        if len(self._cuts) > 1:
            raise ValueError(f"{' and '.join(self._cuts)} both say where streams begin")
        super().__init__(path, columns=wanted, files=files, **given | self._cuts)
        _ = self.index

    def _read_index(self) -> _Index:
        if not os.path.isdir(self.path):
            raise FileNotFoundError(f"there is no folder at {self.path}")
        with damage_named(self.path):
            saved = _Saved(self.path)
            saved.read(self.path, ())
            return self._index_of(saved)

    def _index_of(self, saved: _Saved) -> _Index:
        columns = self._columns(saved)
        first = next(iter(columns.values()))
        steps = saved.batch[0] if saved.batch else len(first)
        nested: dict[str, Any] = {}
        for name, column in columns.items():
            if len(column) != steps:
                raise saved.error(name, f"has {len(column)} rows, and time has {steps} steps")
            inner = nested
            for key in name[:-1]:
                inner = inner.setdefault(key, {})
            inner[name[-1]] = column
        structure, flat = flatten(nested)
        check_empty_rows(steps, any(not isinstance(one, LeafFile) or one.spec.step_bytes for one in flat), self.path)
        bounds = self._bounds(saved, steps)
        content: list[Any] = [bounds.tobytes()]
        files = sorted(column.path for column in flat if isinstance(column, LeafFile))
        for path in [*saved.metas, *files]:
            found = os.stat(path) if os.path.exists(path) else None
            stamp = found and (found.st_size, found.st_mtime_ns)
            content.append(repr((os.path.relpath(path, self.path), stamp)))
        content += [pathlib.Path(path).read_bytes() for path in saved.metas]
        return _Index(hashed(*content), np.diff(bounds), structure, flat, bounds, saved)

    def _columns(self, saved: _Saved) -> dict[_Name, LeafFile | _Texts]:
        found: dict[_Name, LeafFile | _Texts] = {}
        columns = self._options["columns"]
        for wanted in columns or [()]:
            below = [name for name in saved.leaves if name[: len(wanted)] == wanted]
            if columns is None and "lengths" in self._cuts:
                below = [name for name in below if name != self._cuts["lengths"]]
            if not below:
                raise saved.error(wanted, "is not there, or holds for all steps")
            found |= {name: saved.column(name) for name in below}
        return found

    def _bounds(self, saved: _Saved, most: int) -> NDArray[np.int64]:
        steps = most
        if os.path.exists(path := os.path.join(self.path, _STORAGE)):
            steps = read_json(path, dict).get("len")
            if type(steps) is not int or not 0 <= steps <= most:
                raise StoreError(f"{path} is damaged: {shorten(steps)} steps are filled, of {most}")
        if not self._cuts:
            return np.array([0, steps], np.int64)
        ((option, name),) = self._cuts.items()
        if option == "lengths" and name[0].endswith(".npy"):
            found = np.load(os.path.join(self.path, name[0]), mmap_mode="r")
        else:
            column = saved.column(name)
            found = np.array(column.rows) if isinstance(column, LeafFile) else np.array(column, object)
        kinds = "biu" if option == "lengths" else "biuO"
        if found.dtype.kind not in kinds or found.size != len(found):
            raise saved.error(name, f"is {found.dtype} {found.shape}, and no number or flag a row")
        found = found.reshape(-1)
        if option == "lengths":
            lengths = found.tolist()
            if min(lengths, default=0) < 0 or sum(lengths) != steps:
                raise saved.error(name, f"is {shorten(lengths)}, and there are {steps} steps")
            return np.cumsum([0, *lengths], dtype=np.int64)
        if len(found) not in (steps, most):
            raise saved.error(name, f"has {len(found)} rows, and there are {steps} steps")
        found = found[:steps]
        ends = found[1:] != found[:-1] if option == "stream" else found[:-1]
        return np.array([0, *(np.flatnonzero(ends) + 1), steps] if steps else [0], np.int64)

    def _open_steps(self, number: int) -> RowSteps:
        index: _Index = self.index
        start, stop = map(int, index.bounds[number : number + 2])
        return RowSteps(index.structure, index.columns, stop - start, first=start)

    def _metadata(self) -> Mapping[str, Any]:
        return {".".join(name): value for name, value in self.index.saved.values.items()}

    def _version(self) -> str:
        return str(self.index.saved.version)


@dataclass
class _Index(Index):
    """See `Store._read_index`."""

    structure: Node
    columns: Sequence[LeafFile | _Texts]
    bounds: NDArray[np.int64]  # boundaries of streams
    saved: _Saved


class _Saved:
    """Entries of a folder, by name."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.batch: list[int] = []  # the batch size of the outermost TensorDict
        self.version = 0
        self.leaves: dict[_Name, _File | _Texts | str] = {}  # a text says why an entry cannot be read
        self.values: dict[_Name, Any] = {}  # values that hold for all steps
        self.metas: list[str] = []  # contents of meta.json, which identify a save

    def error(self, name: _Name, why: str) -> StoreError:
        if not self.leaves:
            return StoreError(f"{self.path} is no saved TensorDict, or holds no tensors")
        shown = shorten([_shown(one) for one in self.leaves if one != name], 200)
        return StoreError(f"{self.path}: {_shown(name)!r} {why}; columns= chooses of {shown}")

    def column(self, name: _Name) -> LeafFile | _Texts:
        found = self.leaves.get(name, "is not there, or holds for all steps")
        if isinstance(found, str):
            raise self.error(name, found)
        if isinstance(found, _Texts):
            return found
        path, dtype, shape = found
        if not shape:
            raise self.error(name, "is one number, without time")
        return LeafFile(path, LeafSpec(dtype, shape[1:]), shape[0], exact=False)

    def read(self, folder: str, name: _Name) -> None:
        path = os.path.join(folder, _META)
        meta = read_json(path, dict)
        self.metas.append(path)
        version = meta.get("_format_version", 0)
        if version not in (0, 1):
            raise StoreError(f"{path} is of format {shorten(version)}, and 1 is known here")
        pickles = (os.path.join(folder, file) for file in ("other.pickle", "pickle.pkl"))
        is_pickled = any(map(os.path.exists, pickles))
        data = meta.get("data")
        if isinstance(meta.get("shape"), list):
            if not name:
                self.batch, self.version = meta["shape"], version
            for key, entry in meta.items():
                if isinstance(entry, dict):
                    self._read_entry(folder, key, entry, (*name, key))
            for key in ("shape", "device", "_type", *meta):
                files = [_place(folder, key, ".memmap"), os.path.join(_place(folder, key, ""), _META)]
                if not isinstance(meta.get(key), dict) and any(map(os.path.exists, files)):
                    lost = "is named like a field of meta.json, or damaged there"
                    self.leaves |= {(*name, key): f"{lost}: its shape is lost"}
        elif os.path.isdir(inner := os.path.join(folder, "_tensordict")):  # a tensorclass
            if is_pickled:
                self.leaves |= {(*name, "other.pickle"): _PICKLED}
            self.read(inner, name)
        elif is_pickled:
            self.leaves[name] = _PICKLED
        elif meta.get("stack_dim") == 0 and isinstance(data, list) and {*map(type, data)} <= {str}:
            self.leaves[name] = _Texts(data)
        elif meta.get("_is_non_tensor") is True and "stack_dim" not in meta:
            self.values[name] = data
        else:  # including a lazy stack of different shapes
            kind = shorten(meta.get("_type"), 80)
            self.leaves[name] = f"is a {kind}; save it as a TensorDict, a stack by contiguous()"

    def _read_entry(self, folder: str, key: str, entry: Mapping[str, Any], name: _Name) -> None:
        if isinstance(entry.get("type"), str):
            self.read(_place(folder, key, ""), name)
        elif entry.get("is_nested"):
            self.leaves[name] = "is a nested tensor, whose rows differ in shape; pad it"
        else:
            with damage_named(f"{folder}/{_META}, {key!r}"):
                dtype = dtype_named(str(entry["dtype"]).removeprefix("torch."))
                self.leaves[name] = _File(_place(folder, key, ".memmap"), dtype, tuple(entry["shape"]))


class _Texts(list[str]):
    """Texts, one for each step; a `tables.Table`."""

    def row(self, index: int) -> str:
        return self[index]


class _File(NamedTuple):
    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def _place(folder: str, key: str, suffix: str) -> str:
    """Return the place of a key's file or folder; before tensordict 0.9 its name was the key itself."""
    if key in ("", ".", ".."):
        return os.path.join(folder, ("%2E" * len(key) or "%") + suffix)
    names = (key.translate(_UNSAFE), key)
    newer, older = (os.path.join(folder, name + suffix) for name in names)
    is_newer = "/" in key or os.path.exists(newer) or not os.path.exists(older)
    return newer if is_newer else older


def _name(option: str, value: Any) -> _Name:
    name = (value,) if isinstance(value, str) else value
    if not isinstance(name, (tuple, list)) or not name or {*map(type, name)} != {str}:
        raise TypeError(f"{option} names {value!r}; give a string, or a tuple of them")
    return tuple(name)


def _shown(name: _Name) -> Any:
    return name[0] if len(name) == 1 else name
