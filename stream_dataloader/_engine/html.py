"""HTML of a batch for notebooks: a row per lane, with thumbnails, and a line per leaf.

Guarantees: `page` returns at most `LIMIT_BYTES`, and never raises an `Exception`. Only a few values of a batch are
copied from the device.
"""

from __future__ import annotations

import base64
import html
import itertools
import logging
import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from stream_dataloader.errors import shown as made_visible
from stream_dataloader.errors import shown_lines, without_secrets

_log = logging.getLogger("stream_dataloader")

#: The most bytes of one object, in UTF-8, as each run saves them in the notebook's file.
LIMIT_BYTES = 100_000

_LANES = 16
_COLUMNS = 4
_LINES = 16
_RUNS = 3
_PICTURES = 2
_VALUES = 6
_LETTERS = 48
_HEAD = ("lane", "worker", "source", "positions", "reset", "padding")
#: Characters of a text that are searched for secrets before it is cut.
_MOST_LOOKED_AT = 4096

#: Number of pictures of a lane, and the larger side of each; the first pair that is small enough is used.
_SIZES = ((4, 64), (3, 64), (2, 64), (1, 64), (1, 48), (1, 32), (1, 24), (1, 16))
_LEAST_SIDE = 8
_MOST_SIDE = 128
_SHOWN = "height:64px;min-width:8px;image-rendering:pixelated"

Pixels = np.ndarray[Any, np.dtype[np.uint8]]


class _Short(reprlib.Repr):
    """Short texts of objects; secrets are removed from URLs before texts are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = _LETTERS

    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(without_secrets(_beginning(x)), level)

    def repr_instance(self, x: Any, level: int) -> str:
        try:
            text = without_secrets(repr(x))
        except Exception:  # the object's own `__repr__` raised
            return super().repr_instance(x, level)
        return text if len(text) <= self.maxother else f"{text[: self.maxother - 3]}..."


_short = _Short()


def page(make: Callable[[], str], otherwise: Callable[[], str]) -> str:
    """Return the HTML of `make`, or the text of `otherwise` if that fails or is too long."""
    for way in (make, lambda: preformatted(otherwise())):
        try:
            if len((made := way()).encode("utf-8", "replace")) <= LIMIT_BYTES:
                return made
        except Exception:  # a notebook must show something, whatever fails
            _log.debug("an object cannot be shown as HTML", exc_info=True)
    return "<pre>(cannot be shown)</pre>"


def preformatted(text: str) -> str:
    """Return text of several lines as HTML, cut if it is too long."""
    kept = text[: LIMIT_BYTES // 12]  # a character takes at most ten bytes
    shown = html.escape(shown_lines(kept)) + ("…" if len(text) > len(kept) else "")
    return f'<pre style="line-height:1.2">{shown}</pre>'


def escaped(value: str, limit: int = 60) -> str:
    """Return text on one line, cut, without markup, secrets of URLs, or control characters."""
    text = made_visible(_beginning(value))
    return html.escape(text[:limit]) + ("…" if len(text) > limit else "")


def _beginning(text: str) -> str:
    return str.__getitem__(text, slice(_MOST_LOOKED_AT))  # a subclass may override indexing


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of cells that are HTML already."""
    lines = [_row("th", head), *(_row("td", row) for row in rows)]
    return f'<table style="border-collapse:collapse" cellpadding="4">{"".join(lines)}</table>'


def _row(tag: str, cells: Sequence[str]) -> str:
    shown = (f'<{tag} style="text-align:left">{cell}</{tag}>' for cell in cells)
    return f"<tr>{''.join(shown)}</tr>"


def batch_html(host: Any, leaves: Sequence[tuple[str, str, Any]]) -> str:
    """Return the HTML of a batch, see `StreamBatch._repr_html_`.

    Args:
        leaves: For each leaf its name, its description, and the leaf, or None if it cannot be looked into.
    """
    time_steps, lanes = host.mask.shape
    shown, real = min(lanes, _LANES), host.source_index.numpy() >= 0
    fitting = [(name, leaf) for name, _, leaf in leaves if _has_lanes(leaf, time_steps, lanes)]
    columns = fitting[:_COLUMNS]
    steps = [np.flatnonzero(real[:, lane]).tolist() for lane in range(shown)]
    cells = [[_cell(leaf, b, steps[b]) for _, leaf in columns] for b in range(shown)]
    described = [f"{escaped(f'data{name}')}: {escaped(text, 100)}" for name, text, _ in leaves[:_LINES]]

    def put_together() -> str:
        head = [*_HEAD, *(escaped(name or "data", 40) for name, _ in columns)]
        padding = 1 - real.mean() if real.size else 0.0
        parts = [
            f"<div><b>StreamBatch</b> step {host.batch_index}, epoch {host.epoch}: "
            f"{time_steps} time steps of {lanes} lanes, "
            f"{int(host.reset.sum())} resets, {padding:.0%} padding</div>",
            table(head, [_lane(host, b) + cells[b] for b in range(shown)]),
            _more(lanes - shown, "lanes"),
            *(f"<div><code>{line}</code></div>" for line in described),
            _more(len(leaves) - _LINES, "leaves"),
        ]
        return f'<div style="overflow-x:auto">{"".join(parts)}</div>'

    room = LIMIT_BYTES - len(put_together().encode("utf-8", "replace"))
    tensors = ((i, leaf) for i, (_, leaf) in enumerate(columns) if isinstance(leaf, torch.Tensor))
    found = ((i, _pictures(leaf)) for i, leaf in tensors)
    pictured = [(i, pictures) for i, pictures in found if pictures is not None][:_PICTURES]
    with_data = [b for b in range(shown) if steps[b]]
    for i, pictures in pictured:
        taken = [_pixels(pictures[:, b], steps[b]) for b in with_data]
        images = _thumbnails(taken, room // len(pictured))
        for b, image in zip(with_data, images, strict=False):
            cells[b][i] = image
    return put_together()


def _has_lanes(leaf: Any, time_steps: int, lanes: int) -> bool:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape[:2] == (time_steps, lanes) and leaf.numel() > 0
    if type(leaf) is not list or len(leaf) != time_steps:
        return False
    return all(type(row) is list and len(row) == lanes for row in leaf)


def runs_of(source: np.ndarray[Any, Any], starts: np.ndarray[Any, Any]) -> list[tuple[int, int]]:
    """Return the beginning and end of each run of one stream in a lane, `(T,)`; padding is not a run."""
    edges = np.flatnonzero((np.diff(source) != 0) | starts[1:]) + 1
    pairs = itertools.pairwise([0, *edges.tolist(), len(source)])
    return [(begin, stop) for begin, stop in pairs if begin < stop and source[begin] >= 0]


def _lane(host: Any, b: int) -> list[str]:
    source = host.source_index[:, b].numpy()
    position = host.position[:, b].numpy()
    mask = host.mask[:, b].numpy()
    runs = runs_of(source, host.is_first[:, b].numpy())
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
    if not steps:
        return ""
    try:
        if isinstance(leaf, torch.Tensor):
            return _numbers(leaf, lane, steps)
        return _objects(leaf, lane, steps)
    except Exception:  # an object's own methods may raise anything
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
    values = taken.tolist()
    told = [f"{value:.4g}" if isinstance(value, (float, complex)) else str(value) for value in values]
    return ", ".join(told + ["…"] * (count > len(told)))


def _objects(leaf: list[list[Any]], lane: int, steps: list[int]) -> str:
    values = [leaf[t][lane] for t in steps[:_LETTERS]]
    if all(isinstance(value, str) and len(value) == 1 for value in values):
        return escaped("".join(values) + ("…" if len(steps) > len(values) else ""), _LETTERS)
    shown = [_object(value) for value in values[:_VALUES]]
    return escaped(" · ".join(shown) + (" · …" if len(steps) > len(shown) else ""), _LETTERS)


def _object(value: Any) -> str:
    if isinstance(value, str):
        return made_visible(_beginning(value))[: _LETTERS + 1]
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return f"{type(value).__name__} {str(value.dtype).removeprefix('torch.')}"
    try:
        return _short.repr(value)
    except Exception:  # its own `__repr__` raised, or it is a huge number
        return type(value).__name__


def _pictures(leaf: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor of pictures as `(T, B, H, W, channels)`; None if it holds no pictures."""
    if leaf.dtype == torch.uint8 and leaf.ndim == 4:
        leaf = leaf[..., None]
    if leaf.ndim == 5 and (leaf.dtype == torch.uint8 or leaf.is_floating_point()):
        for pictures in (leaf.movedim(2, -1), leaf):
            if pictures.shape[-1] in (1, 3, 4) and min(pictures.shape[2:4]) >= _LEAST_SIDE:
                return pictures
    return None


def _pixels(pictures: torch.Tensor, steps: list[int]) -> Pixels:
    """Return some pictures of a lane, far apart, `(N, H, W, 1 or 3)`; large ones are thinned out."""
    count = min(len(steps), _SIZES[0][0])
    chosen = [steps[i * len(steps) // count] for i in range(count)]
    every = [max(1, length // _MOST_SIDE) for length in pictures.shape[1:3]]
    thinned = pictures[:, :: every[0], :: every[1], :3]
    thinned = thinned[chosen].detach().cpu()
    if thinned.dtype == torch.uint8:
        return thinned.numpy()
    values = thinned.double().numpy()
    values = np.where(np.isfinite(values), values, 0.0)
    low, high = values.min(), values.max()
    if low >= 0 and high <= 1:
        values = values * 255
    elif low < 0 or high > 255:  # normalised values
        values = (values - low) / max(high - low, 1e-300) * 255
    pixels: Pixels = np.round(np.clip(values, 0, 255)).astype(np.uint8)
    return pixels


def _thumbnails(lanes: list[Pixels], room: int) -> list[str]:
    """Return an `<img>` for each lane, together at most `room` bytes, or none at all."""
    try:
        import cv2
    except ImportError:
        return []
    for count, side in _SIZES:
        made = [_image(cv2, pictures[:count], side) for pictures in lanes]
        if sum(map(len, made)) <= room:
            return made
    return []


def _image(cv2: Any, pictures: Pixels, side: int) -> str:
    height, width = pictures.shape[1:3]
    by = min(1.0, side / max(height, width))
    size = max(1, round(width * by)), max(1, round(height * by))
    small = [cv2.resize(each, size, interpolation=cv2.INTER_AREA) for each in pictures]
    strip = np.concatenate(small, axis=1)
    if strip.ndim == 3:  # OpenCV's order is blue, green, red
        strip = strip[..., ::-1]
    _, encoded = cv2.imencode(".png", np.ascontiguousarray(strip))
    text = base64.b64encode(encoded.tobytes()).decode("ascii")
    return f'<img alt="" style="{_SHOWN}" src="data:image/png;base64,{text}">'
