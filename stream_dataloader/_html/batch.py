"""A batch as HTML: a line that sums it up, a row a lane, a line a leaf of its data.

::

    StreamBatch step 3, epoch 0: 16 time steps of 8 lanes, 2 resets, 12% padding
    lane  worker  source  positions  reset  padding  ['image']      ['label']
    0     0       17      32 to 47                   ▣▣▣▣           3, 3, 3, 5, 5, 5, …
    1     0       4       0 to 9     yes    6 of 16  ▣▣▣▣           1, 1, 1, 1, 1, 1, …
    and 6 more lanes
    data['image']: uint8 (16, 8, 3, 64, 64)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from stream_dataloader._html.cells import cell
from stream_dataloader._html.page import LIMIT_BYTES, escaped, size, table
from stream_dataloader._html.pictures import order_of_axes, thumbnails

_LANES = 16
_COLUMNS = 4
_LINES = 16
_RUNS = 3
_PICTURES = 2
_HEAD = ("lane", "worker", "source", "positions", "reset", "padding")


class Marks(NamedTuple):
    """A batch's bookkeeping, as arrays."""

    step: int
    epoch: int
    lane: np.ndarray[Any, Any]
    worker: np.ndarray[Any, Any]
    reset: np.ndarray[Any, Any]
    starts: np.ndarray[Any, Any]
    mask: np.ndarray[Any, Any]
    source: np.ndarray[Any, Any]
    position: np.ndarray[Any, Any]


class Leaf(NamedTuple):
    """A leaf of a batch's data: the way to it, what it looks like, and it."""

    name: str
    description: str
    value: Any


def batch_html(marks: Marks, leaves: Sequence[Leaf]) -> str:
    """See `StreamBatch._repr_html_`.

    Args:
        marks: The bookkeeping.
        leaves: All leaves; those of a value None are not looked into.
    """
    time_steps, lanes = marks.mask.shape
    shown = min(lanes, _LANES)
    columns = [leaf for leaf in leaves if _has_lanes(leaf.value, time_steps, lanes)][:_COLUMNS]
    real = [np.flatnonzero(marks.source[:, b] >= 0).tolist() for b in range(shown)]
    told = [[cell(leaf.value, b, real[b]) if real[b] else "" for leaf in columns] for b in range(shown)]
    pictures = [i for i, leaf in enumerate(columns) if order_of_axes(leaf.value)][:_PICTURES]
    places = [b for b in range(shown) if real[b]]

    def put_together() -> str:
        head = [*_HEAD, *(escaped(leaf.name or "data", 40) for leaf in columns)]
        rows = [_lane(marks, b) + told[b] for b in range(shown)]
        parts = [_summary(marks), table(head, rows), _more(lanes - shown, "lanes"), _leaves(leaves)]
        return f'<div style="overflow-x:auto">{"".join(parts)}</div>'

    room = LIMIT_BYTES - size(put_together())
    for i in pictures:
        images = thumbnails([(columns[i].value, b, real[b]) for b in places], room // len(pictures))
        for b, image in zip(places, images, strict=True):
            told[b][i] = image or told[b][i]
    return put_together()


def _has_lanes(leaf: Any, time_steps: int, lanes: int) -> bool:
    """Whether it is `(T, B, ...)` or `[t][b]`, so that a lane has a part of it."""
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape[:2]) == (time_steps, lanes) and leaf.ndim >= 2 and leaf.numel() > 0
    if type(leaf) is not list or len(leaf) != time_steps:
        return False
    return all(type(row) is list and len(row) == lanes for row in leaf)


def _summary(marks: Marks) -> str:
    time_steps, lanes = marks.mask.shape
    padding = 1 - float((marks.source >= 0).mean()) if marks.source.size else 0.0
    return (
        f"<div><b>StreamBatch</b> step {int(marks.step)}, epoch {int(marks.epoch)}: {time_steps} time steps of "
        f"{lanes} lanes, {int(marks.reset.sum())} resets, {padding:.0%} padding</div>"
    )


def _lane(marks: Marks, b: int) -> list[str]:
    source, position = marks.source[:, b], marks.position[:, b]
    real = source >= 0
    edges = np.flatnonzero((np.diff(source) != 0) | marks.starts[1:, b]) + 1
    begins = [begin for begin in [0, *edges.tolist()] if begin < len(source) and real[begin]]
    stops = [int(edges[edges > begin].min(initial=len(source))) for begin in begins[:_RUNS]]
    runs = list(zip(begins, stops, strict=False))
    more = f", and {len(begins) - _RUNS} more" if len(begins) > _RUNS else ""
    padded, again = int((~real).sum()), int((real & ~marks.mask[:, b]).sum())
    notes = [f"{padded} of {len(source)}"] * bool(padded) + [f"{again} read again"] * bool(again)
    return [
        str(int(marks.lane[b])),
        str(int(marks.worker[b])),
        ", ".join(str(int(source[begin])) for begin, _ in runs) + more,
        ", ".join(f"{int(position[begin])} to {int(position[stop - 1])}" for begin, stop in runs) + more,
        "yes" if marks.reset[b] else "",
        ", ".join(notes),
    ]


def _leaves(leaves: Sequence[Leaf]) -> str:
    told = [f"{escaped(f'data{leaf.name}')}: {escaped(leaf.description, 100)}" for leaf in leaves[:_LINES]]
    return "".join(f"<div><code>{line}</code></div>" for line in told) + _more(len(leaves) - _LINES, "leaves")


def _more(count: int, what: str) -> str:
    return f"<div>and {count} more {what}</div>" if count > 0 else ""
