"""Check that a factory uses its `start` parameter: one that ignores it would resume with the wrong items.

A factory is suspected if two streams of the same source, opened at different items, begin alike. It is then opened
twice more, at two consecutive items.

Guarantee: an error is raised only if these two streams begin alike and contain different items. A factory whose items
are all equal passes. Without a suspicion nothing more is opened, and each factory is tested once per process.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from stream_dataloader._engine.items.structure import Misfit, flatten
from stream_dataloader._engine.reading.global_draws import GlobalDraws
from stream_dataloader._engine.reading.opening import END, takes_start
from stream_dataloader._engine.reading.stream import OpenedStream
from stream_dataloader._engine.schedule.sections import Section
from stream_dataloader.protocols import NOTHING_YET
from stream_dataloader.stream_info import StreamInfo

__all__ = ["IGNORES_START", "ignores_start", "is_start_ignored"]

IGNORES_START = (
    "open_stream has a parameter start=0 and ignores it: streams begin alike for any start; begin at item `start`, or "
    "remove the parameter, and streams are read forward"
)
_MOST_SOURCES = 256  # sources of a factory whose beginnings are kept
_MOST_BYTES = 4096  # bytes of a leaf that are compared
_MOST_EQUAL = 256  # items that are read from a stream to find two that differ

_log = logging.getLogger("stream_dataloader")


#: Beginnings of each factory's streams: by source, the item a stream was opened at and a hash of its content.
_beginnings: weakref.WeakKeyDictionary[Callable[..., Any], dict[Any, tuple[int, int]]] = weakref.WeakKeyDictionary()
#: For each factory that was tested, whether it ignores `start`.
_ignoring: weakref.WeakKeyDictionary[Callable[..., Any], bool] = weakref.WeakKeyDictionary()


def is_start_ignored(stream: OpenedStream) -> bool:
    """Return whether a stream that was opened in its middle begins at another item, as far as this can be known."""
    factory, source = stream.factory, stream.source
    if stream.first is END or stream.first is NOTHING_YET or not takes_start(factory):
        return False
    try:
        if factory in _ignoring:
            return _ignoring[factory] and stream.items > 0
        known = _beginnings.setdefault(factory, {})
        if source not in known and len(known) >= _MOST_SOURCES:
            return False
        content = hash(str(_content(stream.first, _MOST_BYTES)))
        other, alike = known.setdefault(source, (stream.items, content))
    except (TypeError, Misfit):  # the source is not hashable, or the item is nested too deeply to compare
        return False
    if other == stream.items or alike != content:
        return False
    ignores = _ignoring[factory] = ignores_start(
        factory, source, max(other, stream.items), stream.info, draws=stream.draws is not None
    )
    if ignores and not stream.items:
        _log.warning("%s; the items read from source %d were wrong", IGNORES_START, stream.info.source_index)
    return ignores and stream.items > 0


def ignores_start(
    factory: Callable[..., Any], source: Any, item: int, info: StreamInfo, *, draws: bool = False
) -> bool:
    """Return whether a factory's stream begins with the same items at `item` (1 or more) as at the item before."""
    if not takes_start(factory):
        return False
    try:
        begins = _first_run(factory, source, item, info, draws)
        return begins is not None and begins == _first_run(factory, source, item - 1, info, draws)
    except Exception:  # the same error is raised where the stream itself is read
        return False


def _first_run(
    factory: Callable[..., Any], source: Any, start: int, info: StreamInfo, draws: bool
) -> tuple[Any, int, Any] | None:
    """Return a stream's first item, the number of equal ones, and the first that differs; None if none differs soon.

    One item is not enough: many recordings begin with black or silence, and look alike wherever they are entered.
    """
    own = dataclasses.replace(info)  # a copy, so that the stream's own random generators stay untouched
    stream = OpenedStream(own, factory, source, Section(info.source_index, 0, -1, -1))
    stream.items = start
    if draws:  # seeded differently for each start: equal random draws would look like an ignored `start`
        stream.draws = GlobalDraws(dataclasses.replace(own, start=start))
    before = stream.enter()
    try:
        first = _content(stream.next_item())
        for count in range(1, _MOST_EQUAL):
            if (item := stream.next_item()) is END or item is NOTHING_YET:
                break
            if (content := _content(item)) != first:
                return first, count, content
        return None
    finally:
        stream.leave(before)
        stream.close()


def _content(item: Any, most: int | None = None) -> tuple[str, list[Any]]:
    structure, leaves = flatten(item)
    return str(structure), [_leaf(leaf, most) for leaf in leaves]


def _leaf(leaf: Any, most: int | None) -> Any:
    if isinstance(leaf, torch.Tensor):
        leaf = leaf.detach().cpu().numpy()
    return leaf.reshape(-1)[:most].tobytes() if isinstance(leaf, (np.ndarray, np.generic)) else leaf
