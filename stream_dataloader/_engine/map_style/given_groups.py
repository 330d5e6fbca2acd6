"""The user's groups: ids, lists of indices, ranges or lengths, converted to `IndexGroups`.

Guarantee: each index belongs to the dataset, and to exactly one group, unless the user allows something else.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from stream_dataloader._engine import options
from stream_dataloader._engine.map_style.index_groups import IndexGroups
from stream_dataloader._engine.schedule.rules import IntArray
from stream_dataloader.errors import shorten

#: A sort key of each index, or a function that gives it.
Order = Callable[[int], Any] | Sequence[Any] | npt.NDArray[Any]

IDS = "ids (one group id for each index)"


def given_groups(
    groups: Any,
    lengths: Any,
    dataset_length: int | None,
    *,
    order: Order | None = None,
    allow_partial: bool = False,
    allow_repeats: bool = False,
) -> IndexGroups:
    """Convert the groups that a user passed by one of two options; see `LaneBatchSampler`."""
    if (groups is None) == (lengths is None):
        given = "neither groups nor lengths is given" if groups is None else "groups and lengths are both given"
        raise ValueError(
            f"{given}; pass groups=, the group id of each index or lists of indices, or lengths=, the number of "
            "indices of each group"
        )
    if lengths is None:
        return groups_of(groups, dataset_length, order=order, allow_partial=allow_partial, allow_repeats=allow_repeats)
    if order is not None:
        raise ValueError("order= sorts the indices of equal ids, and lengths= says that groups follow each other")
    allow_partial = options.flag("allow_partial", allow_partial)
    found = _groups_of_lengths(lengths, dataset_length)
    if dataset_length is not None and not allow_partial:
        _check_cover(found)
    return found


def groups_of(
    given: Any,
    dataset_length: int | None,
    *,
    order: Order | None = None,
    allow_partial: bool = False,
    allow_repeats: bool = False,
) -> IndexGroups:
    """Convert the groups of indices that a user passed as ids or lists."""
    allow_partial = options.flag("allow_partial", allow_partial)
    allow_repeats = options.flag("allow_repeats", allow_repeats)
    listed = _listed(given)
    if len(listed) == 0:
        raise ValueError("groups is empty; pass at least one group")
    if not _is_group(listed[0]):
        groups = _groups_of_ids(listed, dataset_length, order)
    elif order is not None:
        raise ValueError("order= sorts the indices of equal ids, and groups are lists of indices; sort those")
    else:
        groups = _groups_of_lists(listed, dataset_length)
    if dataset_length is not None and not allow_partial:
        _check_cover(groups)
    if not allow_repeats:
        _check_repeats(groups)
    return groups


def _is_group(entry: Any) -> bool:
    """Return whether this is a list of indices, not an id."""
    return isinstance(entry, (list, tuple, range)) or getattr(entry, "ndim", 0) > 0


def _listed(given: Any) -> Any:
    """Return `given` as a sequence or array."""
    given = _as_numpy(given)
    is_number = getattr(given, "ndim", 1) == 0
    if is_number or isinstance(given, (str, bytes, Mapping, set, frozenset)) or not isinstance(given, Iterable):
        what = f"groups is {shorten(given)}, a {type(given).__name__}"
        raise TypeError(f"{what}; pass {IDS}, or a list of lists of indices or ranges")
    return given if isinstance(given, (list, tuple, range, np.ndarray)) else list(given)


def _as_numpy(values: Any) -> Any:
    """Convert tensors to arrays."""
    return values.numpy() if hasattr(values, "numpy") and not isinstance(values, np.ndarray) else values


def _groups_of_lengths(given: Any, dataset_length: int | None) -> IndexGroups:
    given = _as_numpy(given)
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise TypeError(f"lengths is {shorten(given)}, a {type(given).__name__}; pass one length for each group")
    listed: Any = given if hasattr(given, "__len__") else list(given)
    lengths = options.check_lengths(listed, len(listed))
    assert lengths is not None
    if len(lengths) == 0:
        raise ValueError("lengths is empty; pass at least one group")
    if dataset_length is not None and (total := int(lengths.sum())) > dataset_length:
        what = f"the lengths add up to {total}, and the dataset has {dataset_length} items"
        raise ValueError(f"{what}; correct them, or pass groups=, if they are the group id of each index")
    return IndexGroups(lengths, None, dataset_length)


def _groups_of_lists(listed: Any, dataset_length: int | None) -> IndexGroups:
    if _count_on(listed, dataset_length):
        return IndexGroups(np.fromiter(map(len, listed), np.int64), None, dataset_length)
    arrays = [_indices_of(number, group) for number, group in enumerate(listed)]
    flat = np.concatenate(arrays)
    groups = IndexGroups(np.fromiter(map(len, arrays), np.int64), flat, dataset_length)
    wrong = (flat < 0) | (flat >= groups.dataset_length)
    if wrong.any():
        place, count = int(wrong.argmax()), groups.dataset_length
        number, within = _locate(groups, place)
        limit = f"indices count from 0 to {max(count - 1, 0)}"
        if flat[place] < 0:
            why = f"{limit}; a negative index does not count from the end, pass the index itself"
        else:
            why = f"the dataset has {count} items, so {limit}; leave the index out"
        raise ValueError(f"groups[{number}][{within}] is {flat[place]}, and {why}")
    return groups


def _count_on(groups: Any, dataset_length: int | None) -> bool:
    """Return whether groups are ranges that follow each other from 0 on."""
    end = 0
    for group in groups:
        if type(group) is not range or group.step != 1 or (group and group.start != end):
            return False
        end += len(group)
    return dataset_length is None or end <= dataset_length


def _indices_of(number: int, group: Any) -> npt.NDArray[Any]:
    if isinstance(group, range):
        return np.arange(group.start, group.stop, group.step)
    if not _is_group(group):
        what = f"groups[{number}] is {shorten(group)}, a {type(group).__name__}"
        raise TypeError(f"{what}, and groups[0] a list of indices; pass lists of indices only, or {IDS}")
    try:
        array = np.asarray(group, None if len(group) else np.int64)
    except ValueError:  # it contains lists of different lengths
        array = np.empty((0, 0))
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(f"groups[{number}] is {shorten(group, 80)}, and must be a flat list of integers, indices")
    return array


def _locate(groups: IndexGroups, place: int) -> tuple[int, int]:
    """Return the group, and the place in it, of a place in all groups put together."""
    ends = np.cumsum(groups.lengths)
    number = int(np.searchsorted(ends, place, "right"))
    return number, place - int(ends[number] - groups.lengths[number])


def _groups_of_ids(ids: Any, dataset_length: int | None, order: Order | None) -> IndexGroups:
    """Make groups of equal ids."""
    count = len(ids)
    if dataset_length is not None and count != dataset_length:
        array = _as_array(ids)
        hint = ""
        if array is not None and array.dtype.kind in "iu" and int(array.sum()) == dataset_length:
            hint = f" (they add up to {dataset_length}: if they are the lengths of consecutive groups, pass ranges)"
        what = f"groups has {count} ids, and the dataset {dataset_length} items"
        raise ValueError(f"{what}; pass an id for each item, or a list of indices for each group{hint}")
    codes = _codes(ids)
    if order is not None:
        by_key = _sorted_by(order, count)
        return IndexGroups(np.bincount(codes), by_key[np.argsort(codes[by_key], kind="stable")], count)
    begins = np.concatenate([[0], np.flatnonzero(np.diff(codes)) + 1]).astype(np.int64)
    runs = codes[begins]
    if len(runs) > codes.max() + 1:
        number = int(np.flatnonzero(runs < np.maximum.accumulate(runs))[0])  # a code below an earlier one is a repeat
        again, earlier = int(begins[number]), int(begins[runs == runs[number]][0])
        what = f"groups has id {_shown(ids[again])} at index {earlier}, and, with other ids between, again at"
        remedy = "pass different ids, or, if it is one group, order=, a sort key for each index"
        raise ValueError(f"{what} index {again}; {remedy}")
    return IndexGroups(np.diff(begins, append=count), None, count)


def _shown(entry: Any) -> str:
    return shorten(entry.item() if isinstance(entry, np.generic) else entry)


def _codes(ids: Any) -> IntArray:
    """Number ids in the order of their first occurrence."""
    array = _as_array(ids)
    if array is not None and array.ndim == 1 and array.dtype.kind in "iuSUb":
        _, first, inverse = np.unique(array, return_index=True, return_inverse=True)
        codes: IntArray = np.argsort(np.argsort(first))[inverse]
        return codes
    known: dict[Hashable, int] = {}
    found = np.empty(len(ids), np.int64)
    for index, group in enumerate(ids):
        try:
            if _is_group(group) and not isinstance(group, tuple):
                raise TypeError
            if group is None or group != group:  # noqa: PLR0124 - NaN is no id, as it differs from itself
                raise ValueError(f"groups[{index}] is {group}; every index needs a group id (a number or a string)")
            found[index] = known.setdefault(group, len(known))
        except TypeError:
            what = f"groups[{index}] is {shorten(group)}, a {type(group).__name__}"
            raise TypeError(f"{what}, and groups[0] {_shown(ids[0])}; pass {IDS}, or lists of indices only") from None
    return found


def _as_array(values: Any) -> npt.NDArray[Any] | None:
    """Return `values` as an array if they are of one kind; NumPy would turn mixed numbers and strings into strings."""
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
    """Sort all indices by their keys; indices with equal keys keep their order."""
    keys = [order(index) for index in range(count)] if callable(order) else _as_numpy(order)
    if not hasattr(keys, "__len__"):
        raise TypeError(f"order is {shorten(order)}, a {type(order).__name__}; pass one sort key for each index")
    if len(keys) != count:
        raise ValueError(f"order has {len(keys)} sort keys, and there are {count} indices; pass one for each")
    array = _as_array(keys)
    if array is not None and array.ndim == 1 and array.dtype.kind in "iufSUMmb":
        missing = array != array  # noqa: PLR0124 - NaN and NaT
        if missing.any():
            index = int(missing.argmax())
            raise ValueError(f"order[{index}] is {array[index]}, which comes neither before nor after another key")
        return np.argsort(array, kind="stable")
    try:
        return np.array(sorted(range(count), key=keys.__getitem__), np.int64)
    except TypeError as error:
        raise TypeError(f"order has sort keys that cannot be compared: {error}; pass numbers, or strings") from None


def _check_cover(groups: IndexGroups) -> None:
    """Refuse groups that leave items of the dataset out."""
    length, flat = groups.dataset_length, groups.flat
    if flat is None:
        missing = np.arange(groups.total, length)
    else:
        missing = np.flatnonzero(np.bincount(flat, minlength=length) == 0)
    if len(missing):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        what = f"no group has index {int(missing[0])}{more}, and the dataset has {length} items"
        raise ValueError(f"{what}; put each in a group, or pass allow_partial=True")


def _check_repeats(groups: IndexGroups) -> None:
    """Refuse groups that contain an index twice."""
    flat = groups.flat
    counts = np.empty(0) if flat is None else np.bincount(flat)
    if flat is None or counts.max(initial=0) <= 1:
        return
    index = int((counts > 1).argmax())
    one, other = (_locate(groups, int(place))[0] for place in np.flatnonzero(flat == index)[:2])
    where = f"twice in groups[{one}]" if one == other else f"in groups[{one}] and [{other}]"
    remedy = "take it out of one, or pass allow_repeats=True"
    raise ValueError(f"index {index} is {where}, and would be read twice in an epoch; {remedy}")
