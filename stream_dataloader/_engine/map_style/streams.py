"""Streams over groups of a map-style dataset: each group is a stream, and `dataset[i]` an item.

Guarantee: a stream can begin at any item without reading those before. An error is raised at the item it belongs to,
even if several items are fetched at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypedDict

import numpy as np
from torch.utils.data import IterableDataset

from stream_dataloader._engine.map_style.given_groups import Order, groups_of
from stream_dataloader._engine.reading.plan import OnError
from stream_dataloader._engine.schedule.mix import Schedule
from stream_dataloader._engine.schedule.rules import PaddingMode, Windows
from stream_dataloader.anchors import Anchors
from stream_dataloader.errors import shorten
from stream_dataloader.sectioning import Sections
from stream_dataloader.stream_info import get_stream_info


class CommonOptions(TypedDict, total=False):
    """Options that all constructors of a `StreamDataset` pass on."""

    padding_mode: PaddingMode
    fill_value: Any
    time_steps: int | None
    windows: Windows
    deterministic: bool
    lookahead: int | None
    on_error: OnError
    max_failures: int | None
    retries: int
    retry_on: type[Exception] | Sequence[type[Exception]]
    mark_ends: bool | None
    seed_globals: bool
    context: int


class MapStyleOptions(CommonOptions, total=False):
    """Options that `StreamDataset.from_map_style` passes on."""

    seed: int | None
    shuffle: bool
    schedule: Schedule | None
    fingerprint: str | None
    sections: Sections | int | None
    anchors: Anchors | int | None


class OpenGroup:
    """Opens the stream of one group; fetches items by the dataset's `__getitems__`, if it has one."""

    def __init__(self, dataset: Any, time_steps: int) -> None:
        self.dataset = dataset
        self._time_steps = time_steps

    def __call__(self, indices: Sequence[int], start: int = 0) -> Iterator[Any]:
        """Yield the items of one group of indices, from number `start` on."""
        info = get_stream_info()
        if info is not None and info.stop is not None:  # items behind a section need not be fetched
            indices = indices[: info.stop]
        for begin in range(start, len(indices), self._time_steps):
            yield from fetch(self.dataset, list(_plain(indices[begin : begin + self._time_steps])))

    def _open_items(self, indices: Sequence[int], items: Sequence[int]) -> Iterator[Any]:
        """Yield some items of a group, without fetching the others."""
        chosen: Any = np.asarray(indices)[items]
        return self(chosen)


def fetch(dataset: Any, wanted: list[int]) -> Iterator[Any]:
    """Yield some items, fetched in one call of the dataset's `__getitems__` if it exists.

    An error is raised at the item it belongs to, after the items before it were yielded.
    """
    get_many = getattr(dataset, "__getitems__", None)  # torch's own DataLoader uses it, too
    if get_many is None:
        for index in wanted:
            yield dataset[index]
        return
    try:
        items = _checked(get_many(wanted), wanted)
    except Exception:
        if len(wanted) == 1:
            raise
        for index in wanted:  # one by one, so that the items before the broken one are still read
            yield _checked(get_many([index]), [index])[0]
    else:
        yield from items


def _plain(indices: Any) -> Any:
    """Return indices as Python integers, which every dataset takes."""
    return indices if isinstance(indices, range) else indices.tolist()


def _checked(items: Any, wanted: list[int]) -> Any:
    count = len(items) if hasattr(items, "__len__") else f"a {type(items).__name__}, no list"
    if count != len(wanted):
        what = f"the dataset's __getitems__ was given {len(wanted)} indices, {shorten(wanted, 60)}"
        raise ValueError(f"{what}, and returned {count}; return a list with one item for each")
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
    """Return the arguments with which a `StreamDataset` reads a map-style dataset."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        what = f"dataset is a {type(dataset).__name__}, which has no items by index"
        raise TypeError(f"{what}; pass sources and open_stream to StreamDataset instead")
    try:
        count = len(dataset)
    except TypeError:
        kind = type(dataset).__name__
        raise TypeError(f"dataset is a {kind} without __len__, which the check of groups needs; define it") from None
    for name in ("sources", "open_stream", "lengths"):
        if name in options:
            raise TypeError(f"from_map_style makes {name} from the dataset and its groups; leave {name}= out")
    left_out = {"allow_partial": allow_partial, "allow_repeats": allow_repeats}
    found = groups_of(groups, count, order=order, **left_out)
    time_steps = options.get("time_steps")
    made: dict[str, Any] = {
        "sources": found,
        "open_stream": OpenGroup(dataset, time_steps if isinstance(time_steps, int) and time_steps > 1 else 1),
        "lengths": found.lengths,
        **options,
    }
    # The groups are always part of the fingerprint: a state must not load into a dataset that has grown since.
    named = options.get("fingerprint")
    if named is None or isinstance(named, str):
        made["fingerprint"] = found.fingerprint if named is None else f"{named}: {found.fingerprint}"
    return made
