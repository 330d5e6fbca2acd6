"""What tensordict saved, as streams of nested dicts: the format of tensordict 0.14 and 0.15, checked both ways.

::

    meta.json               of a TensorDict: an entry a key, and "shape" (the batch size), "device", "_type";
                            "_format_version" since 0.15, which is 1
    pixels.memmap           a tensor, C order, as its entry says: {"shape": [100, 3], "dtype": "torch.uint8", ...};
                            no file if it has no elements
    next/meta.json          a nested TensorDict, its entry is {"type": "TensorDict"}
    text/meta.json          "data": one value of NonTensorData, or a list, a value a step, of a NonTensorStack
    text/other.pickle       what JSON cannot hold (pickle.pkl of a stack)
    sample/_tensordict/     the TensorDict of a tensorclass

A key is a file's name with `%2F` and the like for what a path cannot hold; before 0.9 it was the key itself.

Guarantee: opening reads meta.json files, and the one column that says where streams begin. Nothing is unpickled, and no
file outside of the folder is named. What cannot be read is refused by name, so that the rest can be read without it. A
window is copied once, from the map into the batch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stream_dataloader._items.layout import DTYPES_OF_NUMPY
from stream_dataloader._items.structure import Node, flatten, leaf_paths
from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.files import damage_named, read_json
from stream_dataloader.stores._base.leaves import LeafSpec, dtype_named
from stream_dataloader.stores._base.mapped import Column, LeafFile, MappedSteps
from stream_dataloader.stores._base.options import renamed
from stream_dataloader.stores._base.rows import check_untold
from stream_dataloader.stores._base.store import Store
from stream_dataloader.streams.array.tables import NpyTable

__all__ = ["TensorDictStore"]

#: A key of a TensorDict, and keys in those that it holds.
_Name = tuple[str, ...]

_META = "meta.json"
_NEWEST_VERSION = 1
_MOST_META_BYTES = 1 << 28
_DEEPEST = 64
_LARGEST_SIZE = 1 << 56
_UNSAFE = {ord(sign): f"%{ord(sign):02X}" for sign in ['/<>:"|?*\\ %', *map(chr, range(32)), chr(127)] for sign in sign}

#: Entries of meta.json that tensordict writes over those of tensors of these names.
_TAKEN = ("shape", "device", "_type")

#: torchrl's storages write here how much of them is filled.
_STORAGE = "storage_metadata.json"


class TensorDictStore(Store):
    """A TensorDict that was saved by `memmap` or `save`; its first dimension is time.

    Items are dicts as the TensorDict was, a tensorclass is a dict too. A `NonTensorStack` of texts is a text a step;
    what holds for all steps (`NonTensorData`) is not in items, `info().metadata` has it. Names are as in tensordict:
    `"reward"`, or a tuple for what is nested, `("next", "reward")`.

    Without `stream`, `lengths` or `done`, the whole is one stream. A storage that torchrl's `ReplayBuffer` dumped is
    read as far as it was filled, in the order in which it lies there. Pickles, nested tensors, lazy stacks and tensors
    without time are refused: leave them out, by `columns`.

    Args:
        path: The folder.
        columns: Names of what to read; a nested TensorDict's name takes all that is in it. None reads all.
        stream: The name of a column with a whole number a step: where it changes, a stream begins. torchrl's is
            `("collector", "traj_ids")`.
        lengths: Where the streams' lengths are: the name of a column with a number a stream, which is then no leaf of
            items, or a `.npy` file, looked for in the folder if its path is relative.
        done: The name of a column with a flag a step: a stream ends with a step where it is set. torchrl's is
            `("next", "done")`.
    """

    format: ClassVar[str] = "tensordict"

    @renamed(leaves="columns", episode="stream")
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        columns: Sequence[str | tuple[str, ...]] | None = None,
        stream: str | tuple[str, ...] | None = None,
        lengths: str | tuple[str, ...] | None = None,
        done: str | tuple[str, ...] | None = None,
    ) -> None:
        if columns is not None and (isinstance(columns, str) or not isinstance(columns, Sequence) or not columns):
            raise TypeError(f"columns is {columns!r}; give a list of names, or None for all")
        self._wanted = None if columns is None else [_name("columns", column) for column in columns]
        given = {"stream": stream, "lengths": lengths, "done": done}
        self._cuts = {option: _name(option, value) for option, value in given.items() if value is not None}
        if len(self._cuts) > 1:
            raise ValueError(f"{' and '.join(self._cuts)} both say where streams begin; give one of them")
        super().__init__(
            path,
            columns=self._wanted,
            **{option: self._cuts.get(option) for option in given},
        )
        _ = self.index

    def _read_index(self) -> _Index:
        if not os.path.isdir(self.path):
            raise FileNotFoundError(f"there is no store at {self.path}; give the folder that TensorDict.memmap wrote")
        with damage_named(self.path):
            saved = _Saved()
            saved.read(self.path, ())
            if () in saved.refused or () in saved.values or () in saved.leaves:
                raise StoreError(f"{self.path} is no saved TensorDict: it {saved.refused.get((), 'holds no tensors')}")
            return self._index_of(saved)

    def _index_of(self, saved: _Saved) -> _Index:
        columns = {name: self._column(saved, name) for name in self._chosen(saved)}
        steps = saved.batch[0] if saved.batch else len(next(iter(columns.values())).rows)
        if wrong := next(
            (name for name, column in columns.items() if len(column.rows) != steps),
            None,
        ):
            raise StoreError(
                f"{self.path}: {_text(wrong)} has {len(columns[wrong].rows)} rows, and time has {steps} steps; leave "
                "it out, by columns="
            )
        bounds = self._bounds(saved, steps)
        nested: dict[str, Any] = {}
        for (*levels, last), column in columns.items():
            inner = nested
            for key in levels:
                inner = inner.setdefault(key, {})
            inner[last] = column
        structure, flat = flatten(nested)
        files = [column for column in flat if isinstance(column, LeafFile)]
        check_untold(
            self.path,
            steps,
            [1] * (len(flat) > len(files)) + [file.spec.step_bytes for file in files],
        )
        content = hashlib.blake2b(bounds.tobytes(), digest_size=16)
        for path in [*saved.metas, *sorted(file.path for file in files)]:
            found = os.stat(path) if os.path.exists(path) else None
            name = os.path.relpath(path, self.path)
            content.update(repr((name, found and (found.st_size, found.st_mtime_ns))).encode())
        for path in saved.metas:
            with open(path, "rb") as file:
                content.update(file.read())
        return _Index(
            structure,
            flat,
            bounds,
            np.diff(bounds),
            saved.values,
            saved.version,
            content.hexdigest(),
        )

    def _chosen(self, saved: _Saved) -> list[_Name]:
        """What items are made of."""
        chosen: dict[_Name, None] = {}
        for wanted in self._wanted or [()]:
            below = [name for name in saved.leaves if name[: len(wanted)] == wanted]
            for name, why in saved.refused.items():
                if name[: len(wanted)] == wanted:
                    raise StoreError(f"{self.path}: {_text(name)} {why}; columns= names what to read instead")
            if wanted and not below:
                why = "holds for all steps; info().metadata has it" if wanted in saved.values else "is not there"
                there = shorten([_short(name) for name in saved.leaves], 200)
                raise StoreError(f"{self.path}: {_text(wanted)} {why}; there is {there}")
            chosen |= dict.fromkeys(below)
        if self._wanted is None:
            chosen.pop(self._cuts.get("lengths", ()), None)
        if not chosen:
            raise StoreError(f"{self.path} holds no tensors to read")
        return list(chosen)

    def _column(self, saved: _Saved, name: _Name) -> Column:
        found = saved.leaves[name]
        if isinstance(found, Column):
            return found
        path, spec = found
        if not spec.shape:
            raise StoreError(f"{self.path}: {_text(name)} is one number, without time; leave it out, by columns=")
        return LeafFile(path, LeafSpec(spec.dtype, spec.shape[1:]), spec.shape[0], exact=False)

    def _bounds(self, saved: _Saved, most: int) -> NDArray[np.int64]:
        """Where streams begin and end: they follow one another, and none is left out."""
        steps = most
        if os.path.exists(path := os.path.join(self.path, _STORAGE)):
            steps = read_json(path, dict).get("len")
            if type(steps) is not int or not 0 <= steps <= most:
                raise StoreError(f"{path} says that {shorten(steps)} steps are filled, of {most}; the store is damaged")
        if not self._cuts:
            return np.array([0, steps], np.int64)
        ((option, name),) = self._cuts.items()
        found = self._cut_column(saved, option, name)
        if found.dtype.kind not in ("biu" if option == "lengths" else "biuO") or found.size != len(found):
            raise StoreError(
                f"{self.path}: {option}={_text(name)} is {found.dtype} {shorten(found.shape)}; give a whole number or "
                "a flag a row"
            )
        found = found.reshape(-1)
        if option == "lengths":
            lengths = found.tolist()
            if min(lengths, default=0) < 0 or sum(lengths) != steps:
                raise StoreError(
                    f"{self.path}: lengths={_text(name)} holds lengths from {min(lengths, default=0)} on, of "
                    f"{sum(lengths):,} steps together, and there are {steps:,} steps"
                )
            return np.cumsum([0, *lengths], dtype=np.int64)
        if len(found) not in (steps, most):
            raise StoreError(f"{self.path}: {option}={_text(name)} has {len(found)} rows, and there are {steps} steps")
        found = found[:steps]
        ends = found[1:] != found[:-1] if option == "stream" else found[:-1]
        return np.array([0, *(np.flatnonzero(ends) + 1), steps] if steps else [0], np.int64)

    def _cut_column(self, saved: _Saved, option: str, name: _Name) -> NDArray[Any]:
        if option == "lengths" and len(name) == 1 and name[0].endswith(".npy"):
            path = os.path.join(self.path, name[0])
            with closing(NpyTable(path, path)) as table:
                rows: NDArray[Any] = table.all_rows()
                return rows
        column = self._column(saved, name) if name in saved.leaves else None
        if column is None or (isinstance(column, LeafFile) and column.spec.dtype not in DTYPES_OF_NUMPY):
            there = shorten([_short(one) for one in saved.leaves], 200)
            raise StoreError(f"{self.path}: {option}={_text(name)} is {column or 'no column'}; there is {there}")
        return np.array(column.rows, None if isinstance(column, LeafFile) else object)

    def _open_steps(self, number: int) -> MappedSteps:
        index: _Index = self.index
        start, stop = map(int, index.bounds[number : number + 2])
        return MappedSteps(index.structure, index.columns, start, stop - start)

    def _leaves(self) -> dict[str, str]:
        index: _Index = self.index
        names = [path.removeprefix("item") for path in leaf_paths(index.structure)]
        return dict(zip(names, map(str, index.columns), strict=True))

    def _metadata(self) -> Mapping[str, Any]:
        return {".".join(name): value for name, value in self.index.values.items()}

    def _version(self) -> str:
        return str(self.index.version)


class _Index(NamedTuple):
    """See `Store._read_index`: an item's structure and leaves, where streams are, what holds for all steps."""

    structure: Node
    columns: Sequence[Column]
    bounds: NDArray[np.int64]  # where streams begin and end
    lengths: NDArray[np.int64]
    values: Mapping[_Name, Any]
    version: int
    fingerprint: str

    def __len__(self) -> int:
        return len(self.lengths)


class _Saved:
    """What a folder holds, by name.

    Attributes:
        batch: The batch size of the outermost TensorDict.
        version: Of the format.
        leaves: Tensors, by their files, dtypes and shapes, rows first; and texts, one a step.
        values: What holds for all steps.
        refused: What cannot be read, and why.
        metas: The meta.json files, which tell one save from another.
    """

    def __init__(self) -> None:
        self.batch: tuple[int, ...] = ()
        self.version = 0
        self.leaves: dict[_Name, tuple[str, LeafSpec] | Column] = {}
        self.values: dict[_Name, Any] = {}
        self.refused: dict[_Name, str] = {}
        self.metas: list[str] = []

    def read(self, folder: str, name: _Name) -> None:
        """Read a folder's meta.json, and those below."""
        path = os.path.join(folder, _META)
        if len(name) > _DEEPEST:
            raise StoreError(f"{path} is nested more than {_DEEPEST} deep; is there a link to itself?")
        meta = read_json(path, dict, _MOST_META_BYTES)
        self.metas.append(path)
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
            if not name:
                self.batch, self.version = (
                    _sizes(meta["shape"], path),
                    version if isinstance(version, int) else 0,
                )
            self._read_entries(folder, meta, name)
        elif os.path.isdir(inner := os.path.join(folder, "_tensordict")):  # of a tensorclass
            if has_pickle:
                pickled = (*name, "other.pickle")
                self.refused[pickled] = "is pickled, and pickles may run any code"
            self.read(inner, name)
        elif "stack_dim" in meta and "data" not in meta:
            self.refused[name] = "is a lazy stack, of different shapes; save its .contiguous(), or open a folder in it"
        elif has_pickle:
            self.refused[name] = "is pickled, and pickles may run any code"
        elif "stack_dim" in meta:
            texts = meta["data"]
            if meta["stack_dim"] == 0 and isinstance(texts, list) and all(isinstance(text, str) for text in texts):
                self.leaves[name] = Column(texts)
            else:
                self.refused[name] = "holds other values than a text a step"
        elif meta.get("_is_non_tensor") is True:
            self.values[name] = meta.get("data")
        else:
            self.refused[name] = f"is a {shorten(meta['_type'], 80)}, which cannot be read; save it as a TensorDict"

    def _read_entries(self, folder: str, meta: Mapping[str, Any], name: _Name) -> None:
        """The entries of a TensorDict, one a key."""
        for key, entry in meta.items():
            if not isinstance(entry, dict):
                continue
            inner = (*name, key)
            if isinstance(entry.get("type"), str):
                self.read(_place(folder, key, ""), inner)
            elif entry.get("is_nested"):
                self.refused[inner] = "is a nested tensor, of rows of different shapes; pad it, or leave it out"
            else:
                path = _place(folder, key, ".memmap")
                try:
                    dtype = dtype_named(str(entry.get("dtype")).removeprefix("torch."))
                except ValueError as error:
                    raise StoreError(f"{folder}/{_META} is damaged at {key!r}: {error}; save it anew") from None
                self.leaves[inner] = (
                    path,
                    LeafSpec(dtype, _sizes(entry.get("shape"), path)),
                )
        for key in _TAKEN:
            inner = (*name, key)
            if os.path.exists(os.path.join(folder, f"{key}.memmap")) and not isinstance(meta.get(key), dict):
                self.refused[inner] = "is called as an entry of meta.json, so its shape is lost; save it anew"


def _sizes(found: Any, path: str) -> tuple[int, ...]:
    if not isinstance(found, list) or not all(type(size) is int and 0 <= size < _LARGEST_SIZE for size in found):
        raise StoreError(f"{path} has a shape {shorten(found, 80)}, which is none; the store is damaged, save it anew")
    return tuple(found)


def _place(folder: str, key: str, suffix: str) -> str:
    """Where a key's file or folder is."""
    if key in ("", ".", ".."):
        return os.path.join(folder, ("%2E" * len(key) or "%") + suffix)
    newer, older = (os.path.join(folder, name + suffix) for name in (key.translate(_UNSAFE), key))
    if {"/", "\\", "\0"} & set(key) or os.path.exists(newer) or not os.path.exists(older):
        return newer
    return older


def _name(option: str, value: Any) -> _Name:
    name = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, (tuple, list)) else ()
    if not name or not all(isinstance(key, str) for key in name):
        raise TypeError(f"{option} names {value!r}; a name is a string, or a tuple of them for what is nested")
    return name


def _short(name: _Name) -> Any:
    return name[0] if len(name) == 1 else name


def _text(name: _Name) -> str:
    return repr(_short(name))
