"""Whether a factory that takes `start` uses it: one that ignores it resumes with other items than come next.

A factory is suspected if two streams of a source begin alike that were opened at different items. Then it is opened
twice more, at two items that follow each other.

Guarantee: it is only blamed if these streams begin alike, and do not go on alike. So one whose items are all equal is
not. Nothing more is opened without a suspicion, and a factory is looked at once a process.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from stream_dataloader._items.structure import Misfit, flatten
from stream_dataloader._reading.global_draws import GlobalDraws
from stream_dataloader._reading.opening import END, takes_start
from stream_dataloader._reading.stream import OpenedStream
from stream_dataloader._schedule.sections import Section
from stream_dataloader.stream_info import StreamInfo

__all__ = ["IGNORES_START", "ignores_start", "is_start_ignored"]

IGNORES_START = (
    "open_stream has a parameter start=0 and ignores it: streams begin alike whatever it is; begin at item `start`, or "
    "leave the parameter out, and streams are read forward"
)
_MOST_SOURCES = 256  # of a factory, whose beginnings are kept
_MOST_BYTES = 4096  # of a leaf, where beginnings are compared
_MOST_EQUAL = 256  # items that are read of a stream to find two that differ

_log = logging.getLogger("stream_dataloader")


#: How the streams of a factory begin: by source, the item they were opened at and what that was like.
_beginnings: weakref.WeakKeyDictionary[Callable[..., Any], dict[Any, tuple[int, int]]] = weakref.WeakKeyDictionary()
#: Whether a factory that was suspected ignores `start`.
_ignoring: weakref.WeakKeyDictionary[Callable[..., Any], bool] = weakref.WeakKeyDictionary()


def is_start_ignored(stream: OpenedStream) -> bool:
    """Whether a stream that was opened in its middle begins elsewhere, as far as that can be known."""
    factory, source = stream.factory, stream.source
    if not takes_start(factory) or stream.first is END:
        return False
    try:
        if factory in _ignoring:
            return _ignoring[factory] and stream.items > 0
        known = _beginnings.setdefault(factory, {})
        if source not in known and len(known) >= _MOST_SOURCES:
            return False
        content = hash(str(_content(stream.first, _MOST_BYTES)))
        other, alike = known.setdefault(source, (stream.items, content))
    except (TypeError, Misfit):  # not hashable, or nested too deeply: there is nothing to compare
        return False
    if other == stream.items or alike != content:
        return False
    ignores = _ignoring[factory] = ignores_start(
        factory, source, max(other, stream.items), stream.info, draws=stream.draws is not None
    )
    if ignores and not stream.items:
        _log.warning("%s; what was read of source %d was wrong", IGNORES_START, stream.info.source_index)
    return ignores and stream.items > 0


def ignores_start(
    factory: Callable[..., Any], source: Any, item: int, info: StreamInfo, *, draws: bool = False
) -> bool:
    """Whether a factory begins with the same items of a source at `item`, 1 or more, as at the one before."""
    if not takes_start(factory):
        return False
    try:
        begins = _first_run(factory, source, item, info, draws)
        return begins is not None and begins == _first_run(factory, source, item - 1, info, draws)
    except Exception:  # told where the stream itself is read
        return False


def _first_run(
    factory: Callable[..., Any], source: Any, start: int, info: StreamInfo, draws: bool
) -> tuple[Any, int, Any] | None:
    """A stream's first item, how many are equal to it, and the next; None if none comes, or late.

    One item is not enough: many recordings begin with black or silence, and are alike wherever that is entered.
    """
    own = dataclasses.replace(info)  # its random draws are not those of the stream
    stream = OpenedStream(own, factory, source, Section(info.source_index, 0, -1, -1))
    stream.items = start
    if draws:  # others for each start: what is drawn alike tells nothing
        stream.draws = GlobalDraws(dataclasses.replace(own, start=start))
    before = stream.enter()
    try:
        first = _content(stream.next_item())
        for count in range(1, _MOST_EQUAL):
            if (item := stream.next_item()) is END:
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
