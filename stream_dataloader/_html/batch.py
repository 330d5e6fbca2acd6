"""A batch as HTML: a line that sums it up, a row a lane, a line a leaf of its data.

::

    StreamBatch step 3, epoch 0: 16 time steps of 8 lanes, 2 resets, 12% padding
    lane  worker  source  positions  reset  padding  ['image']      ['label']
    0     0       17      32 to 47                   ▣▣▣▣           3, 3, 3, 5, 5, 5, …
    1     0       4       0 to 9     yes    6 of 16  ▣▣▣▣           1, 1, 1, 1, 1, 1, …
    and 6 more lanes
    data['image']: uint8 (16, 8, 3, 64, 64)

Guarantee: it looks at a few values only, and only these leave the device.
"""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from stream_dataloader._html.page import LIMIT_BYTES, escaped, size, table
from stream_dataloader._html.pictures import order_of_axes, thumbnails

_LANES = 16
_COLUMNS = 4
_LINES = 16
_RUNS = 3
_PICTURES = 2
_VALUES = 6
_LETTERS = 48
_HEAD = ("lane", "worker", "source", "positions", "reset", "padding")
_short = reprlib.Repr()
_short.maxstring = _short.maxother = _LETTERS


def batch_html(host: Any, leaves: Sequence[tuple[str, str, Any]]) -> str:
    """See `StreamBatch._repr_html_`.

    Args:
        host: The batch, with its bookkeeping on the CPU.
        leaves: Each leaf's name, what it looks like, and it, or None.
    """
    time_steps, lanes = host.mask.shape
    shown, real = min(lanes, _LANES), host.source.numpy() >= 0
    columns = [(name, leaf) for name, _, leaf in leaves if _has_lanes(leaf, time_steps, lanes)][:_COLUMNS]
    steps = [np.flatnonzero(real[:, lane]).tolist() for lane in range(shown)]
    cells = [[_cell(leaf, b, steps[b]) for _, leaf in columns] for b in range(shown)]
    described = [f"{escaped(f'data{name}')}: {escaped(text, 100)}" for name, text, _ in leaves[:_LINES]]

    def put_together() -> str:
        head = [*_HEAD, *(escaped(name or "data", 40) for name, _ in columns)]
        padding = 1 - real.mean() if real.size else 0.0
        parts = [
            f"<div><b>StreamBatch</b> step {host.step}, epoch {host.epoch}: "
            f"{time_steps} time steps of {lanes} lanes, "
            f"{int(host.reset.sum())} resets, {padding:.0%} padding</div>",
            table(head, [_lane(host, b) + cells[b] for b in range(shown)]),
            _more(lanes - shown, "lanes"),
            *(f"<div><code>{line}</code></div>" for line in described),
            _more(len(leaves) - _LINES, "leaves"),
        ]
        return f'<div style="overflow-x:auto">{"".join(parts)}</div>'

    room = LIMIT_BYTES - size(put_together())
    pictures = [i for i, (_, leaf) in enumerate(columns) if order_of_axes(leaf)][:_PICTURES]
    with_data = [b for b in range(shown) if steps[b]]
    for i in pictures:
        images = thumbnails([(columns[i][1], b, steps[b]) for b in with_data], room // len(pictures))
        for b, image in zip(with_data, images, strict=True):
            cells[b][i] = image or cells[b][i]
    return put_together()


def _has_lanes(leaf: Any, time_steps: int, lanes: int) -> bool:
    """Whether it is `(T, B, ...)` or `[t][b]`, so that a lane has a part of it."""
    if isinstance(leaf, torch.Tensor):
        return leaf.shape[:2] == (time_steps, lanes) and leaf.numel() > 0
    if type(leaf) is not list or len(leaf) != time_steps:
        return False
    return all(type(row) is list and len(row) == lanes for row in leaf)


def runs_of(source: np.ndarray[Any, Any], starts: np.ndarray[Any, Any]) -> list[tuple[int, int]]:
    """Where each run of one stream in a lane's window begins and stops; padding is none.

    Args:
        source: `(T,)`, as a batch has it for a lane.
        starts: `(T,)`, the same of `is_start`.
    """
    edges = np.flatnonzero((np.diff(source) != 0) | starts[1:]) + 1
    pairs = itertools.pairwise([0, *edges.tolist(), len(source)])
    return [(begin, stop) for begin, stop in pairs if begin < stop and source[begin] >= 0]


def _lane(host: Any, b: int) -> list[str]:
    source = host.source[:, b].numpy()
    position = host.position[:, b].numpy()
    mask = host.mask[:, b].numpy()
    runs = runs_of(source, host.is_start[:, b].numpy())
    more = f", and {len(runs) - _RUNS} more" if len(runs) > _RUNS else ""
    notes = []
    if padded := int((source < 0).sum()):
        notes.append(f"{padded} of {len(source)}")
    if again := int(((source >= 0) & ~mask).sum()):
        notes.append(f"{again} read again")
    return [
        str(int(host.lane[b])),
        str(int(host.worker_id[b])),
        ", ".join(str(source[begin]) for begin, _ in runs[:_RUNS]) + more,
        ", ".join(f"{position[begin]} to {position[stop - 1]}" for begin, stop in runs[:_RUNS]) + more,
        "yes" if host.reset[b] else "",
        ", ".join(notes),
    ]


def _more(count: int, what: str) -> str:
    return f"<div>and {count} more {what}</div>" if count > 0 else ""


def _cell(leaf: Any, lane: int, steps: list[int]) -> str:
    """What a lane reads at some time steps: text, the first numbers, or objects in short."""
    if not steps:
        return ""
    try:
        if isinstance(leaf, torch.Tensor):
            return _numbers(leaf, lane, steps)
        return _objects(leaf, lane, steps)
    except Exception:  # of an object's own methods
        return "?"


def _numbers(leaf: torch.Tensor, lane: int, steps: list[int]) -> str:
    if leaf.ndim == 2:
        count, taken = len(steps), leaf[steps[:_VALUES], lane]
    else:  # the first numbers of the first time step
        count, taken = leaf[0, 0].numel(), leaf[steps[0], lane]
        while taken.ndim > 1:
            taken = taken[0]
        taken = taken[:_VALUES]
    taken = taken.detach().cpu()
    if taken.is_floating_point():
        taken = taken.double()
    told = list(map(_number, taken.tolist()))
    if count > len(told):
        told.append("…")
    return ", ".join(told)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (float, complex)) else str(value)


def _objects(leaf: list[list[Any]], lane: int, steps: list[int]) -> str:
    values = [leaf[t][lane] for t in steps[:_LETTERS]]
    if all(isinstance(value, str) and len(value) == 1 for value in values):
        return escaped("".join(values) + ("…" if len(steps) > len(values) else ""), _LETTERS)
    shown = [_object(value) for value in values[:_VALUES]]
    return escaped(" · ".join(shown) + (" · …" if len(steps) > len(shown) else ""), _LETTERS)


def _object(value: Any) -> str:
    if isinstance(value, str):
        return str.__getitem__(value, slice(_LETTERS + 1))
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return f"{type(value).__name__} {str(value.dtype).removeprefix('torch.')}"
    try:
        return _short.repr(value)
    except Exception:  # of its own `__repr__`, or a number with thousands of digits
        return type(value).__name__
