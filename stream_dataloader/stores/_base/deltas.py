"""Windows of neighbouring steps for some entries of an item.

::

    deltas={"state": (-2, -1, 0)}

    step                 0          1          2          3
    item["state"]     s0 s0 s0   s0 s0 s1   s0 s1 s2   s1 s2 s3
    ["state_is_pad"]   T  T  .    T  .  .    .  .  .    .  .  .

Guarantee: steps outside the stream repeat its first or last step, and are marked.
If items are read in order, each step is read once.

Source: `delta_timestamps` and `*_is_pad` of LeRobot's `LeRobotDataset`.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stream_dataloader._engine.items.layout import DTYPES_OF_NUMPY, Layout, as_array, as_tensor
from stream_dataloader._engine.items.structure import Node, flatten, unflatten
from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.leaves import LeafSpec, leaf_names
from stream_dataloader.stores._base.store import Store, StoreInfo
from stream_dataloader.stores._base.stream import Steps
from stream_dataloader.streams._media.section import closed_on_error

__all__ = ["DeltaStore"]

_PADDED = "_is_pad"

Path = tuple[str, ...]


class DeltaStore(Store):
    """A store whose entries have windows; see `stores.open`."""

    def __init__(self, store: Store, deltas: Mapping[str, Iterable[int]]) -> None:
        windows = {name: _window(name, deltas[name]) for name in deltas}
        steps = {name: window.tolist() for name, window in windows.items()}
        super().__init__(store.path, **store._options, deltas=steps)
        self.format = store.format  # type: ignore[misc]  # each class has one
        self._store = self._far = store
        self._near: Store | None = None
        self._windows: dict[Path, NDArray[np.int64]] = {}
        self._structure: Node | None = None
        self._leaf_specs: list[LeafSpec] = []
        if (item := store._first_item()) is None:
            return
        if not isinstance(item, dict):
            raise StoreError(f"{store.path}: deltas= names entries of dicts, but its items are not dicts")
        self._windows = {(name,) if name in item else tuple(name.split("/")): windows[name] for name in windows}
        self._far = store._with_columns(list(windows))
        if names := _names_but(item, set(windows)):
            self._near = store._with_columns(names)
        layout, _ = Layout.of(self._far._first_item(), windowed=False)
        self._structure = layout.structure
        for name, spec in zip(leaf_names(layout.structure), layout.specs, strict=True):
            if spec.dtype is None:
                raise StoreError(f"{store.path}: {name} is {spec}, but deltas= takes numbers")
            self._leaf_specs.append(LeafSpec(spec.dtype, spec.shape))

    def _read_index(self) -> Any:
        return self._store.index

    def _open_steps(self, number: int) -> Steps:
        far = self._far._open_steps(number)
        with closed_on_error(far):
            near = None if self._near is None else self._near._open_steps(number)
        return _DeltaSteps(near, far, self._windows, self._structure, self._leaf_specs)

    def close(self) -> None:
        for store in (self._store, self._far, self._near):
            if store is not None:
                store.close()
        super().close()

    def check_stream(self, number: int) -> None:
        self._store.check_stream(number)

    def _damaged_files(self) -> list[str]:
        return self._store._damaged_files()

    def key(self, number: int) -> str:
        return self._store.key(number)

    def metadata(self, number: int) -> Mapping[str, Any]:
        return self._store.metadata(number)

    def info(self) -> StoreInfo:
        return dataclasses.replace(self._store.info(), leaves=self._leaves())

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the store's own class."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._store, name)


class _DeltaSteps:
    """Steps, see `Steps`. Windows are cut from `far`, and all other entries are those of `near`."""

    def __init__(
        self,
        near: Steps | None,
        far: Steps,
        windows: Mapping[Path, NDArray[np.int64]],
        structure: Node | None,
        leaves: Sequence[LeafSpec],
    ) -> None:
        self._near, self._far, self._windows, self._structure, self._leaves = near, far, windows, structure, leaves
        self._begin = self._end = 0
        self._kept: list[NDArray[Any]] = []  # kept steps of `far`, one array for each leaf

    def __len__(self) -> int:
        return len(self._far)

    def item(self, index: int) -> Any:
        item: dict[str, Any] = {} if self._near is None else self._near.item(index)
        rows = self._rows(index, 1)
        for path, window in self._windows.items():
            chosen, outside = self._chosen(window, index, 1)
            level = item
            for key in path[:-1]:
                level = level.setdefault(key, {})
            structure, leaves = flatten(_entry(rows, path))
            level[path[-1]] = unflatten(structure, iter([leaf[chosen[0]] for leaf in leaves]))
            level[path[-1] + _PADDED] = outside[0]
        return item

    def read(self, start: int, out: Any) -> None:
        count = len(flatten(out)[1][0])
        if self._near is not None:
            self._near.read(start, _without(out, self._windows))
        rows = self._rows(start, count)
        for path, window in self._windows.items():
            chosen, outside = self._chosen(window, start, count)
            level = _entry(out, path[:-1])
            targets = flatten(level[path[-1]])[1]
            for leaf, target in zip(flatten(_entry(rows, path))[1], targets, strict=True):
                np.take(as_array(leaf), chosen, 0, out=as_array(target), mode="clip")
            as_array(level[path[-1] + _PADDED])[...] = outside

    def _chosen(self, window: NDArray[np.int64], start: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the indices of kept steps in windows, `(items, window)`, and which steps are outside the stream."""
        wanted = np.arange(start, start + count)[:, None] + window
        inside = np.clip(wanted, 0, len(self) - 1)
        return inside - self._begin, inside != wanted

    def _rows(self, start: int, count: int) -> Any:
        most = len(self) - 1
        first = min(max(start + int(window.min()), 0) for window in self._windows.values())
        last = max(min(start + count - 1 + int(window.max()), most) for window in self._windows.values())
        first, stop = min(first, most), max(last, 0) + 1
        if not self._begin <= first <= self._end:
            self._begin = self._end = first
            self._kept = []
        kept = [rows[first - self._begin :] for rows in self._kept]
        if (new := stop - self._end) > 0:
            fresh = [np.empty((new, *leaf.shape), leaf.stored) for leaf in self._leaves]
            self._far.read(self._end, self._over(fresh))
            kept = [np.concatenate(parts) for parts in zip(kept, fresh, strict=True)] if kept else fresh
            self._end = stop
        self._begin, self._kept = first, kept
        return self._over(kept)

    def _over(self, rows: list[NDArray[Any]]) -> Any:
        assert self._structure is not None
        return unflatten(self._structure, map(_as_numbers, rows, self._leaves))

    def close(self) -> None:
        self._kept = []
        self._far.close()
        if self._near is not None:
            self._near.close()


def _window(name: str, window: Iterable[int]) -> NDArray[np.int64]:
    try:
        found = np.array([operator.index(step) for step in window], np.int64)
    except TypeError:
        what = f"deltas[{name!r}] is {shorten(window)}"
        raise TypeError(f"{what}; give steps as whole numbers, such as range(16)") from None
    if not len(found):
        raise ValueError(f"deltas[{name!r}] is empty; give at least one step, such as (0,)")
    return found


def _names_but(item: Mapping[str, Any], taken: set[str], above: str = "") -> list[str]:
    names = []
    for key, below in item.items():
        name = above + key
        if name in taken:
            continue
        if isinstance(below, dict) and any(one.startswith(name + "/") for one in taken):
            names += _names_but(below, taken, name + "/")
        else:
            names.append(name)
    return names


def _entry(item: Any, path: Path) -> Any:
    for key in path:
        item = item[key]
    return item


def _without(item: Mapping[str, Any], paths: Iterable[Path]) -> dict[str, Any]:
    """Return an item without some entries and their padding flags."""
    left = dict(item)
    for key in {path[0] for path in paths}:
        below = [path[1:] for path in paths if path[0] == key]
        if () in below:
            del left[key], left[key + _PADDED]
        elif not (rest := _without(left[key], below)):
            del left[key]
        else:
            left[key] = rest
    return left


def _as_numbers(rows: NDArray[Any], leaf: LeafSpec) -> Any:
    return rows if leaf.dtype in DTYPES_OF_NUMPY else as_tensor(rows, leaf.dtype)
