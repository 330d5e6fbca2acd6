"""Groups told by ids, one for each index: equal ids in a row, or scattered ones that a sort key puts in order.

Guarantee: an id that comes again after another one is an error without a sort key, as the two runs may be one group or
two; nothing that has no order or no identity (NaN, None) is taken for an id or a key.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from stream_dataloader._map_style.index_groups import IndexGroups
from stream_dataloader._schedule.rules import IntArray
from stream_dataloader.errors import shorten

#: A sort key of each index, or a function that gives it.
Order = Callable[[int], Any] | Sequence[Any] | npt.NDArray[Any]

IDS = "ids (one group id for each index)"


def is_group(entry: Any) -> bool:
    """Whether this is a list of indices, not an id."""
    return isinstance(entry, (list, tuple, range)) or getattr(entry, "ndim", 0) > 0


def groups_of_ids(ids: Any, dataset_length: int | None, order: Order | None) -> IndexGroups:
    """The groups of equal ids."""
    count = len(ids)
    if dataset_length is not None and count != dataset_length:
        raise ValueError(
            f"groups has {count} ids, and the dataset {dataset_length} items; give one id for each item, or a list of "
            "lists of indices or ranges, one for each group" + _hint_of_lengths(ids, dataset_length)
        )
    codes = _codes(ids)
    if order is not None:
        by_key = _sorted_by(order, count)
        return IndexGroups(np.bincount(codes), by_key[np.argsort(codes[by_key], kind="stable")], count)
    begins = np.concatenate([[0], np.flatnonzero(np.diff(codes)) + 1]).astype(np.int64)
    runs = codes[begins]
    if len(runs) > codes.max() + 1:
        number = int(np.flatnonzero(runs < np.maximum.accumulate(runs))[0])  # codes count up as ids come first
        code, again = runs[number], int(begins[number])
        earlier = int(np.flatnonzero(runs == code)[0])
        raise ValueError(
            f"groups has id {shorten(_entry(ids, again))} at index {int(begins[earlier])}, and, with other ids "
            f"between, again at index {again}; if these are one group, say in which order its items "
            "come: order= a sort key for each index, such as its time, or order=range(len(dataset)); "
            "else give them ids that differ"
        )
    return IndexGroups(np.diff(begins, append=count), None, count)


def _hint_of_lengths(ids: Any, dataset_length: int) -> str:
    array = _as_array(ids)
    if array is not None and array.dtype.kind in "iu" and int(array.sum()) == dataset_length:
        return (
            f" (they add up to {dataset_length}: if they are the lengths of consecutive groups, give "
            "[range(end - n, end) for n, end in zip(lengths, itertools.accumulate(lengths))])"
        )
    return ""


def _entry(ids: Any, index: int) -> Any:
    entry = ids[index]
    return entry.item() if isinstance(entry, np.generic) else entry


def _codes(ids: Any) -> IntArray:
    """Ids as numbers, in the order in which they first come."""
    array = _as_array(ids)
    if array is not None and array.ndim == 1 and array.dtype.kind in "iuSUb":
        _, first, inverse = np.unique(array, return_index=True, return_inverse=True)
        place = np.empty(len(first), np.int64)
        place[np.argsort(first)] = np.arange(len(first))
        codes: IntArray = place[inverse]
        return codes
    known: dict[Hashable, int] = {}
    found = np.empty(len(ids), np.int64)
    for index, group in enumerate(ids):
        if is_group(group) and not isinstance(group, tuple):
            raise TypeError(
                f"groups[{index}] is {shorten(group)}, a {type(group).__name__}, and groups[0] "
                f"{shorten(_entry(ids, 0))}; give {IDS}, or lists of indices only"
            )
        try:
            if group is None or group != group:  # noqa: PLR0124 - NaN is no id: it differs from itself
                raise ValueError(f"groups[{index}] is {group}, and is to be the id of a group; give each index one")
            found[index] = known.setdefault(group, len(known))
        except TypeError:
            raise TypeError(
                f"groups[{index}] is {shorten(group)}, a {type(group).__name__}; give {IDS}: numbers or strings"
            ) from None
    return found


def _as_array(values: Any) -> npt.NDArray[Any] | None:
    """`values` as an array, if they are of one kind; NumPy would make strings of numbers that stand beside strings."""
    if isinstance(values, np.ndarray):
        return values
    kinds = set() if isinstance(values, range) else {type(value) for value in values}
    if len(kinds) > 1 and not kinds <= {int, float}:
        return None
    try:
        return np.asarray(values)
    except (ValueError, OverflowError, TypeError):
        return None


def _sorted_by(order: Order, count: int) -> IntArray:
    """All indices, sorted by their keys; those with equal keys in their own order."""
    keys: Any = [order(index) for index in range(count)] if callable(order) else order
    if hasattr(keys, "numpy") and not isinstance(keys, np.ndarray):
        keys = keys.numpy()
    if not hasattr(keys, "__len__"):
        raise TypeError(f"order is {shorten(order)}, a {type(order).__name__}; give one sort key for each index")
    if len(keys) != count:
        raise ValueError(f"order has {len(keys)} sort keys, and there are {count} indices; give one for each")
    array = _as_array(keys)
    if array is not None and array.ndim == 1 and array.dtype.kind in "iufSUMmb":
        missing = np.isnat(array) if array.dtype.kind in "mM" else array != array  # noqa: PLR0124
        if missing.any():
            index = int(np.flatnonzero(missing)[0])
            raise ValueError(f"order[{index}] is {array[index]}, which comes neither before nor after another key")
        return np.argsort(array, kind="stable")
    try:
        return np.array(sorted(range(count), key=keys.__getitem__), np.int64)
    except TypeError as error:
        raise TypeError(f"order has sort keys that cannot be compared: {error}; give numbers, or strings") from None
