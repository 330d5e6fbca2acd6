"""Thumbnails of what looks like pictures, as PNG within the page.

Guarantee: however many and large the pictures are, their thumbnails take no more than the bytes given, and a
large picture leaves its device thinned out. Without OpenCV there are none.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import torch

#: Pictures of a lane, and the larger side of each: the first that is small enough.
_SIZES = ((4, 64), (3, 64), (2, 64), (1, 64), (1, 48), (1, 32), (1, 24), (1, 16))
_LEAST_SIDE = 8
_MOST_SIDE = 128
_GAP = 2
_SHOWN = "height:64px;min-width:8px;image-rendering:pixelated"

Pixels = np.ndarray[Any, np.dtype[np.uint8]]


def order_of_axes(leaf: Any) -> str:
    """`"CHW"`, `"HWC"` or `"HW"` of a tensor `(T, B, ...)` that looks like pictures; empty if it does not."""
    if not isinstance(leaf, torch.Tensor) or not (leaf.dtype == torch.uint8 or leaf.is_floating_point()):
        return ""
    if leaf.ndim == 4 and leaf.dtype == torch.uint8 and min(leaf.shape[2:]) >= _LEAST_SIDE:
        return "HW"
    if leaf.ndim != 5:
        return ""
    for order, channels, sides in (("CHW", 2, (3, 4)), ("HWC", 4, (2, 3))):
        if leaf.shape[channels] in (1, 3, 4) and min(leaf.shape[side] for side in sides) >= _LEAST_SIDE:
            return order
    return ""


def thumbnails(cells: list[tuple[torch.Tensor, int, list[int]]], room: int) -> list[str]:
    """An `<img>` for each cell, together at most `room` bytes; empty where there can be none.

    Args:
        cells: Tensors that look like pictures, each with a lane and the time steps to choose from, some at least.
        room: Bytes.
    """
    none = [""] * len(cells)
    try:
        import cv2
    except ImportError:
        return none
    frames = [_frames(leaf, lane, _chosen(steps)) for leaf, lane, steps in cells]
    for count, side in _SIZES:
        made = [_image(cv2, found[:count], side) for found in frames]
        if sum(map(len, made)) <= room:
            return made
    return none


def _chosen(steps: list[int]) -> list[int]:
    """Time steps of a few pictures, the first of them and others as far apart as can be."""
    count = min(len(steps), _SIZES[0][0])
    return [steps[i * len(steps) // count] for i in range(count)]


def _frames(leaf: torch.Tensor, lane: int, steps: list[int]) -> list[Pixels]:
    return [_pixels(leaf[step, lane], order_of_axes(leaf)) for step in steps]


def _pixels(frame: torch.Tensor, order: str) -> Pixels:
    """A picture `(H, W, 1 or 3)`, thinned out where it is large: a GPU copies no more than that."""
    if order == "CHW":
        frame = frame.permute(1, 2, 0)
    elif order == "HW":
        frame = frame.unsqueeze(-1)
    every = [max(1, length // _MOST_SIDE) for length in frame.shape[:2]]
    frame = frame[:: every[0], :: every[1], :3].detach().cpu()
    if frame.dtype == torch.uint8:
        return frame.contiguous().numpy()
    values = frame.double().numpy()
    values = np.where(np.isfinite(values), values, 0.0)
    low, high = values.min(), values.max()
    if low >= 0 and high <= 1:
        values = values * 255
    elif low < 0 or high > 255:  # normalised: from its darkest to its brightest
        values = (values - low) / max(high - low, 1e-300) * 255
    pixels: Pixels = np.round(np.clip(values, 0, 255)).astype(np.uint8)
    return pixels


def _image(cv2: Any, frames: list[Pixels], side: int) -> str:
    """Pictures side by side."""
    small = [_scaled(cv2, frame, side) for frame in frames]
    height, width = max(len(frame) for frame in small), sum(frame.shape[1] for frame in small)
    strip = np.full((height, width + _GAP * (len(small) - 1), 3), 128, np.uint8)
    at = 0
    for frame in small:
        strip[: frame.shape[0], at : at + frame.shape[1]] = frame
        at += frame.shape[1] + _GAP
    _, encoded = cv2.imencode(".png", np.ascontiguousarray(strip[..., ::-1]))
    text = base64.b64encode(encoded.tobytes()).decode("ascii")
    return f'<img alt="" style="{_SHOWN}" src="data:image/png;base64,{text}">'


def _scaled(cv2: Any, frame: Pixels, side: int) -> Pixels:
    height, width = frame.shape[:2]
    by = min(1.0, side / max(height, width))
    size = max(1, round(width * by)), max(1, round(height * by))
    scaled: Pixels = cv2.resize(frame, size, interpolation=cv2.INTER_AREA) if by < 1 else frame
    return scaled if scaled.ndim == 3 else scaled[..., None]
