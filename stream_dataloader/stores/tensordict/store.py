"""Reads what tensordict saved, as streams of nested dicts.

Guarantee: opening reads meta.json files, and the one column that says where streams begin; a window is copied once,
from the map into the batch.
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
from stream_dataloader.stores._base.files import read_json
from stream_dataloader.stores._base.leaves import LeafSpec
from stream_dataloader.stores._base.mapped import Column, LeafFile, MappedSteps
from stream_dataloader.stores._base.options import renamed
from stream_dataloader.stores._base.rows import check_untold
from stream_dataloader.stores._base.store import Store
from stream_dataloader.stores.tensordict.saved import Name, Saved, read_saved
from stream_dataloader.streams.array.tables import NpyTable

__all__ = ["TensorDictStore"]

#: torchrl's storages write here how much of them is filled.
_STORAGE = "storage_metadata.json"


class TensorDictStore(Store):
    """A TensorDict that was saved by `memmap` or `save`; its first dimension is time.

    Items are dicts as the TensorDict was, a tensorclass is a dict too. A `NonTensorStack` of texts is a text a step;
    what holds for all steps (`NonTensorData`) is not in items, `info().metadata` has it. Names are as in tensordict:
    `"reward"`, or a tuple for what is nested, `("next", "reward")`.

    Without `stream`, `lengths` or `done`, the whole is one stream. A storage that torchrl's `ReplayBuffer` dumped is
    read as far as it was filled, in the order in which it lies there.

    Args:
        path: The folder.
        columns: Names of what to read; a nested TensorDict's name takes all that is in it. None reads all.
        stream: The name of a column with a whole number a step: where it changes, a stream begins. torchrl's is
            `("collector", "traj_ids")`.
        lengths: Where the streams' lengths are: the name of a column with a number a stream, which is then no leaf of
            items, or a `.npy` file, looked for in the folder if its path is relative.
        done: The name of a column with a flag a step: a stream ends with a step where it is set. torchrl's is
            `("next", "done")`.

    Raises:
        FileNotFoundError: There is no such folder.
        StoreError: The save is damaged, or lacks what was named; holds what is not read: pickles, nested tensors, lazy
            stacks, tensors without time or of another length (leave them out, by `columns`); the column does not fit.
        TypeError: A name that is none.
        ValueError: More than one of `stream`, `lengths` and `done`.
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
        super().__init__(path, columns=self._wanted, **{option: self._cuts.get(option) for option in given})
        _ = self.index

    def _read_index(self) -> _Index:
        if not os.path.isdir(self.path):
            raise FileNotFoundError(f"there is no store at {self.path}; give the folder that TensorDict.memmap wrote")
        try:
            return self._index_of(read_saved(self.path))
        except StoreError:
            raise
        except ValueError as error:
            raise StoreError(f"{self.path} is damaged: {error}; save it anew") from None

    def _index_of(self, saved: Saved) -> _Index:
        chosen = self._chosen(saved)
        rows = {name: len(saved.stacks[name]) for name in chosen if name in saved.stacks}
        rows |= {name: saved.tensors[name][1].shape[0] for name in chosen if name in saved.tensors}
        most = saved.batch[0] if saved.batch else rows[chosen[0]]
        if wrong := next((name for name in chosen if rows[name] != most), None):
            raise StoreError(
                f"{self.path}: {_text(wrong)} has {rows[wrong]} rows, and time has {most} steps (by "
                f"{'the batch size' if saved.batch else _text(chosen[0])}); leave it out, by columns="
            )
        bounds = self._bounds(saved, most)
        structure, flat = flatten(_nested({name: _column(saved, name) for name in chosen}))
        sizes = [column.spec.step_bytes if isinstance(column, LeafFile) else 1 for column in flat]
        check_untold(self.path, most, sizes)  # of texts as many are there as are said
        content = hashlib.blake2b(bounds.tobytes(), digest_size=16)
        for path in [*saved.metas, *sorted(column.path for column in flat if isinstance(column, LeafFile))]:
            found = os.stat(path) if os.path.exists(path) else None
            content.update(
                repr((os.path.relpath(path, self.path), found and (found.st_size, found.st_mtime_ns))).encode()
            )
        for path in saved.metas:
            with open(path, "rb") as file:
                content.update(file.read())
        return _Index(structure, flat, bounds, np.diff(bounds), saved.values, saved.version, content.hexdigest())

    def _chosen(self, saved: Saved) -> list[Name]:
        """What items are made of."""
        found = [*saved.tensors, *saved.stacks]
        chosen: dict[Name, None] = {}
        for wanted in self._wanted or [()]:
            below = [name for name in found if name[: len(wanted)] == wanted]
            for name, why in saved.refused.items():
                if name[: len(wanted)] == wanted:
                    raise StoreError(f"{self.path}: {_text(name)} {why}; columns= names what to read instead")
            if wanted and not below:
                why = "holds for all steps; info().metadata has it" if wanted in saved.values else "is not there"
                raise StoreError(
                    f"{self.path}: {_text(wanted)} {why}; there is {shorten([_short(name) for name in found], 200)}"
                )
            chosen |= dict.fromkeys(below)
        if self._wanted is None:
            chosen.pop(self._cuts.get("lengths", ()), None)
        for name in chosen:
            if name in saved.tensors and not saved.tensors[name][1].shape:
                raise StoreError(f"{self.path}: {_text(name)} is one number, without time; leave it out, by columns=")
        if not chosen:
            raise StoreError(f"{self.path} holds no tensors to read")
        return list(chosen)

    def _bounds(self, saved: Saved, most: int) -> NDArray[np.int64]:
        """Where streams begin and end: they follow one another, and none is left out."""
        steps = most
        if os.path.exists(path := os.path.join(self.path, _STORAGE)):
            steps = read_json(path, dict).get("len")
            if type(steps) is not int or not 0 <= steps <= most:
                raise StoreError(f"{path} says that {shorten(steps)} steps are filled, of {most}; the store is damaged")
        if not self._cuts:
            return np.array([0, steps], np.int64)
        ((option, name),) = self._cuts.items()
        found, text = self._cut_column(saved, option, name)
        if found.dtype.kind not in ("biu" if option == "lengths" else "biuO") or found.size != len(found):
            raise StoreError(
                f"{text} is {found.dtype} {shorten(found.shape)}; to cut streams, give one whole number or flag a row"
            )
        found = found.reshape(-1)
        if option == "lengths":
            lengths = found.tolist()
            if min(lengths, default=0) < 0 or sum(lengths) != steps:
                raise StoreError(
                    f"{text} holds lengths from {min(lengths, default=0)} on, of {sum(lengths):,} steps together, and "
                    f"there are {steps:,} steps"
                )
            return np.cumsum([0, *lengths], dtype=np.int64)
        if len(found) not in (steps, most):
            raise StoreError(f"{text} has {len(found)} rows, and there are {steps} steps; it has to have as many")
        found = found[:steps]
        ends = found[1:] != found[:-1] if option == "stream" else found[:-1]
        return np.array([0, *(np.flatnonzero(ends) + 1), steps] if steps else [0], np.int64)

    def _cut_column(self, saved: Saved, option: str, name: Name) -> tuple[NDArray[Any], str]:
        """A whole column, and what errors call it."""
        if option == "lengths" and len(name) == 1 and name[0].endswith(".npy"):
            path = os.path.join(self.path, name[0])
            with closing(NpyTable(path, path)) as table:
                return table.all_rows(), path
        text = f"{self.path}: {_text(name)}"
        if name in saved.stacks:
            return np.array(saved.stacks[name], object), text
        spec = saved.tensors[name][1] if name in saved.tensors else None
        if spec is None or not spec.shape or spec.dtype not in DTYPES_OF_NUMPY:
            names = [_short(found) for found, (_, spec) in saved.tensors.items() if spec.shape]
            raise StoreError(
                f"{text}, the {option}, is {spec or 'no column'}; give a column of whole numbers, of "
                f"{shorten(names, 200)}"
            )
        return np.array(_column(saved, name).rows), text

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
    """What was saved, see `Index`: an item's structure and its leaves, where streams are, what holds for all steps."""

    structure: Node
    columns: Sequence[Column]
    bounds: NDArray[np.int64]  # where streams begin and end
    lengths: NDArray[np.int64]
    values: Mapping[Name, Any]
    version: int
    fingerprint: str

    def __len__(self) -> int:
        return len(self.lengths)


def _column(saved: Saved, name: Name) -> Column:
    if name in saved.stacks:
        return Column(saved.stacks[name])
    path, spec = saved.tensors[name]
    return LeafFile(path, LeafSpec(spec.dtype, spec.shape[1:]), spec.shape[0], exact=False)


def _name(option: str, value: Any) -> Name:
    name = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, (tuple, list)) else ()
    if not name or not all(isinstance(key, str) for key in name):
        raise TypeError(f"{option} names {value!r}; a name is a string, or a tuple of them for what is nested")
    return name


def _short(name: Name) -> Any:
    return name[0] if len(name) == 1 else name


def _text(name: Name) -> str:
    return repr(_short(name))


def _nested(columns: Mapping[Name, Column]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, column in columns.items():
        inner = found
        for key in name[:-1]:
            inner = inner.setdefault(key, {})
        inner[name[-1]] = column
    return found
