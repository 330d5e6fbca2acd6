"""Reads groups of a map-style dataset: each group is a stream, and `dataset[i]` an item.

Guarantee: items come in the order of the group's indices; a stream begins at any item without reading those before. An
error comes at the item it belongs to, also where several are fetched at once.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, TypedDict

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import IterableDataset

from stream_dataloader._items.layout import Layout, as_array
from stream_dataloader._items.structure import Misfit, flatten
from stream_dataloader._map_style.given_groups import groups_of
from stream_dataloader._map_style.group_ids import Order
from stream_dataloader.errors import shorten
from stream_dataloader.protocols import OnError, PaddingMode, Schedule, Windows
from stream_dataloader.sectioning import Sections
from stream_dataloader.stream_info import get_stream_info

_STACKED_BYTES = 1 << 19


class MapStyleOptions(TypedDict, total=False):
    """Options of `StreamDataset` that `StreamDataset.from_map_style` passes on."""

    padding_mode: PaddingMode
    fill_value: Any
    seed: int | None
    time_steps: int | None
    windows: Windows
    shuffle: bool
    schedule: Schedule
    deterministic: bool
    lookahead: int | None
    open_early: bool | None
    on_error: OnError
    max_failures: int | None
    retries: int
    retry_on: type[Exception] | Sequence[type[Exception]]
    fingerprint: str | None
    mark_ends: bool
    sections: Sections | None


class OpenGroup:
    """Opens the stream of one group.

    Args:
        dataset: What has the items.
        time_steps: Number of items of a window.
    """

    # `_reading` keeps factories that it has looked at in a cache by their hash, which must not keep a dataset alive
    __hash__: ClassVar[None]  # type: ignore[assignment]

    def __init__(self, dataset: Any, time_steps: int) -> None:
        self.dataset = dataset
        self._time_steps = time_steps

    def __eq__(self, other: object) -> bool:
        return self is other

    def __call__(self, indices: Sequence[int], start: int = 0) -> GroupStream:
        """Open one group.

        Args:
            indices: Its indices.
            start: How many of them to pass over.
        """
        info = get_stream_info()
        if info is not None and info.stop is not None:  # of a section: what is behind it need not be fetched
            indices = indices[: info.stop]
        return GroupStream(self.dataset, indices, start, self._time_steps)


class GroupStream:
    """The items of one group; a `ReadsInto`.

    `read_into` is told how much of a window is to be filled, and so fetches just that, by one call of the dataset's
    `__getitems__`. The first item alone is asked for by `next`, which fetches a window of items, and keeps the others.

    Args:
        dataset: What has the items.
        indices: Their indices.
        start: How many of them to pass over.
        time_steps: Number of items of a window.
    """

    def __init__(self, dataset: Any, indices: Sequence[int], start: int, time_steps: int) -> None:
        self._dataset = dataset
        self._get_many = getattr(dataset, "__getitems__", None)  # torch's own DataLoader asks the same
        self._indices = indices
        self._next = start
        self._get_one = functools.partial(_one_of, self._get_many) if self._get_many else dataset.__getitem__
        self._at_once = time_steps if self._get_many else 1
        self._fetched: deque[Any] = deque()
        self._error: Exception | None = None  # of the item behind those
        self._latest: Any = None
        self._layout: Layout | None = None
        self._stack: torch.Tensor | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._fetched:
            self._fetch(self._at_once)
        if not self._fetched:
            raise StopIteration
        self._latest = self._fetched.popleft()
        return self._latest

    def read_into(self, out: Any) -> int:
        """See `ReadsInto`."""
        columns = [out] if type(out) is np.ndarray else [as_array(leaf) for leaf in flatten(out)[1]]
        room = len(columns[0]) if columns else 1
        if self._layout is None:
            self._layout, _ = Layout.of(self._latest, windowed=False)
        fetched = self._fetched
        if len(fetched) < room and not (fetched and self._error):
            self._fetch(room - len(fetched))
        items = [fetched.popleft() for _ in range(min(room, len(fetched)))]
        if type(out) is np.ndarray and self._stacked(items, out):
            return len(items)
        for count, item in enumerate(items):
            try:
                for column, leaf in zip(columns, self._layout.read(item), strict=True):
                    column[count] = leaf
            except (Misfit, OverflowError) as error:
                self._error = (
                    error if isinstance(error, Misfit) else Misfit(f"a number does not fit its dtype: {error}")
                )
                fetched.clear()
                if not count:
                    raise self._error from None
                return count  # the error is raised with the next call, after the items before were handed out
        return len(items)

    def _stacked(self, items: list[Any], out: npt.NDArray[Any]) -> bool:
        """Whether items that are one small tensor each, as the first was, could be written together.

        To copy them twice, first next to each other, is quicker than to copy one at a time: for 16 items of 12 KB it
        takes 2.3 microseconds an item, against 2.8. Large items, which do not stay in the processor's cache, go one by
        one.
        """
        assert self._layout is not None
        dtype, shape, _ = self._layout.specs[0]
        if not items or out.nbytes > _STACKED_BYTES:
            return False
        for item in items:
            if type(item) is not torch.Tensor or item.dtype is not dtype or item.shape != shape:
                return False
        if self._stack is None or len(self._stack) < len(items):
            self._stack = torch.empty((len(out), *shape), dtype=dtype)
        try:
            out[: len(items)] = torch.stack(items, out=self._stack[: len(items)]).numpy()
        except (RuntimeError, TypeError):  # on a GPU, sparse, part of a graph
            return False
        return True

    def _fetch(self, count: int) -> None:
        """Fetch the next items, at most as many; an error is raised when its own item comes."""
        if self._error is not None:
            raise self._error
        wanted = _plain(self._indices[self._next : self._next + count])
        fetched, before = self._fetched, len(self._fetched)
        if self._get_many and len(wanted) > 1:
            with contextlib.suppress(Exception):  # which of them is broken is found out one by one
                fetched.extend(_checked(self._get_many(wanted), wanted))
                self._next += len(wanted)
                return
        try:  # items before a broken one stay
            fetched.extend(map(self._get_one, wanted))
            if len(fetched) < before + len(wanted):
                raise RuntimeError(f"the dataset raised StopIteration at index {wanted[len(fetched) - before]}")
        except Exception as error:
            if not fetched:
                raise
            self._error = error
        self._next += len(fetched) - before


def _one_of(get_many: Callable[[list[int]], Any], index: int) -> Any:
    return _checked(get_many([index]), [index])[0]


def _plain(indices: Any) -> Any:
    """Indices as Python's integers, which every dataset takes."""
    return list(indices) if isinstance(indices, range) else indices.tolist()


def _checked(items: Any, wanted: list[int]) -> Any:
    if not hasattr(items, "__len__") or len(items) != len(wanted):
        count = len(items) if hasattr(items, "__len__") else f"a {type(items).__name__}, no list"
        raise ValueError(
            f"the dataset's __getitems__ was given {len(wanted)} indices, {shorten(wanted, 60)}, and returned {count}; "
            "return a list with one item for each"
        )
    return items


def map_style(
    dataset: Any,
    groups: Any,
    options: MapStyleOptions,
    *,
    order: Order | None,
    allow_partial: bool,
    allow_repeats: bool,
) -> dict[str, Any]:
    """What `StreamDataset` is to be built with, to read a map-style dataset.

    Raises:
        ValueError: The groups do not fit the dataset.
        TypeError: It is no map-style dataset, or what is known from it is given too.
    """
    _check_dataset(dataset)
    for name in ("sources", "open_stream", "lengths"):
        if name in options:
            raise TypeError(f"from_map_style makes {name} of the dataset and its groups; leave {name}= out")
    found = groups_of(
        groups,
        len(dataset),
        order=order,
        numbers="ids",
        allow_partial=allow_partial,
        allow_repeats=allow_repeats,
    )
    time_steps = options.get("time_steps")
    made: dict[str, Any] = {
        "sources": found,
        "open_stream": OpenGroup(dataset, time_steps if isinstance(time_steps, int) and time_steps > 1 else 1),
        "lengths": found.lengths,
        **options,
    }
    # the groups count in any case: a state must not be taken up with a dataset that has grown since
    named = options.get("fingerprint")
    if named is None or isinstance(named, str):
        made["fingerprint"] = found.fingerprint if named is None else f"{named}: {found.fingerprint}"
    return made


def _check_dataset(dataset: Any) -> None:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"dataset is a {type(dataset).__name__}, which has no items by index; from_map_style reads datasets with "
            "__getitem__ and __len__; give what is iterated as sources and open_stream to StreamDataset"
        )
    try:
        len(dataset)
    except TypeError:
        raise TypeError(
            f"dataset is a {type(dataset).__name__} without __len__, by which its groups are checked; define it"
        ) from None
