"""One item of foresight: whether a stream goes on behind the window that it filled.

Only the item behind a window has to be taken early. The one before it has been written by then, so a stream may use one
buffer for all of its items. What was taken waits until other lanes have read, and streams may share a buffer, so it is
kept as a copy.

Guarantee: the stream hands out what was taken where it would have yielded it. Nothing else than the time at which it
is read depends on it.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from stream_dataloader._items.layout import DTYPES_OF_NUMPY, Layout, Leaves, as_tensor, storage_dtype
from stream_dataloader._items.structure import Misfit
from stream_dataloader._reading.stream import END, OpenedStream
from stream_dataloader.stream_info import run_as


def goes_on(stream: OpenedStream, layout: Layout) -> bool:
    """Whether a stream has more behind the window that it filled; takes its next item ahead.

    What comes before an error is no end, whether the error is skipped or not.

    Args:
        stream: The stream; nothing of it was taken ahead before.
        layout: What its items look like.
    """
    writes = stream.writes and not layout.windowed and None not in layout.dtypes
    before = run_as(stream.info)
    try:
        return stream.look_ahead(functools.partial(_written if writes else _iterated, stream, layout))
    finally:
        run_as(before)


def _iterated(stream: OpenedStream, layout: Layout) -> list[Any]:
    """The next item; or windows, up to one that has steps: those without hold nothing."""
    taken: list[Any] = []
    while True:
        item = stream.next_item()
        item, tells = (item, True) if item is END else _kept(item, layout)
        taken.append(item)
        if tells:
            return taken


def _kept(item: Any, layout: Layout) -> tuple[Any, bool]:
    """An item that outlives the stream's buffer, and whether it holds a time step, or an error that is found later."""
    if type(item) is np.ndarray and not layout.windowed:  # the most frequent case, in less time
        return item.copy(), True
    try:
        leaves = layout.read(item)
        tells = not layout.windowed or layout.window_length(leaves) > 0
    except Misfit:  # the error says what it looks like, not what is in it
        return item, True
    return _rebuilt(layout, [leaf.copy() if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]), tells


def _written(stream: OpenedStream, layout: Layout) -> list[Any]:
    """The next item of a stream that writes its items: it may not be iterated any more."""
    columns = [np.empty((1, *spec.shape), storage_dtype(spec.dtype)) for spec in layout.specs if spec.dtype is not None]
    count = stream.read_into(_rebuilt(layout, columns), 1)
    if count < 0:  # opened again, it has taken an item
        item = stream.next_item()
        return [item if item is END else _kept(item, layout)[0]]
    return [_rebuilt(layout, [column[0, ...] for column in columns]) if count else END]


def _rebuilt(layout: Layout, leaves: Leaves) -> Any:
    """An item of leaves as `Layout.read` gives them, which it reads again."""
    return layout.build(
        as_tensor(leaf, spec.dtype)
        if spec.dtype is not None and spec.dtype not in DTYPES_OF_NUMPY and isinstance(leaf, np.ndarray)
        else leaf
        for spec, leaf in zip(layout.specs, leaves, strict=True)
    )
