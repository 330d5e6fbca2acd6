"""Thumbnails of what looks like pictures, as PNG within the page.

Guarantee: all thumbnails take no more than the bytes given, and a large picture leaves
its device thinned out. Without OpenCV there are none.
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
_SHOWN = "height:64px;min-width:8px;image-rendering:pixelated"

Pixels = np.ndarray[Any, np.dtype[np.uint8]]


def order_of_axes(leaf: Any) -> str:
    """`"CHW"`, `"HWC"` or `"HW"` of a tensor `(T, B, ...)` of pictures; else empty."""
    if not isinstance(leaf, torch.Tensor):
        return ""
    if leaf.dtype != torch.uint8 and not leaf.is_floating_point():
        return ""
    if leaf.ndim == 4 and leaf.dtype == torch.uint8 and min(leaf.shape[2:]) >= _LEAST_SIDE:
        return "HW"
    if leaf.ndim != 5:
        return ""
    for order, channels, sides in (("CHW", 2, (3, 4)), ("HWC", 4, (2, 3))):
        smallest = min(leaf.shape[side] for side in sides)
        if leaf.shape[channels] in (1, 3, 4) and smallest >= _LEAST_SIDE:
            return order
    return ""


def thumbnails(cells: list[tuple[torch.Tensor, int, list[int]]], room: int) -> list[str]:
    """An `<img>` for each cell, together at most `room` bytes; empty where there can be none.

    Args:
        cells: Tensors of pictures, each with a lane and time steps to choose from.
        room: Bytes.
    """
    none = [""] * len(cells)
    try:
        import cv2
    except ImportError:
        return none
    pictures = [_pixels(leaf, lane, steps) for leaf, lane, steps in cells]
    for count, side in _SIZES:
        made = [_image(cv2, found[:count], side) for found in pictures]
        if sum(map(len, made)) <= room:
            return made
    return none


def _pixels(leaf: torch.Tensor, lane: int, steps: list[int]) -> Pixels:
    """The first picture of a lane and some others, far apart: `(N, H, W, 1 or 3)`.

    They are thinned out where they are large, so that a GPU copies no more than that.
    """
    count = min(len(steps), _SIZES[0][0])
    chosen = [steps[i * len(steps) // count] for i in range(count)]
    order = order_of_axes(leaf)
    frames = leaf[:, lane]
    if order == "CHW":
        frames = frames.movedim(1, -1)
    elif order == "HW":
        frames = frames[..., None]
    every = [max(1, length // _MOST_SIDE) for length in frames.shape[1:3]]
    frames = frames[:, :: every[0], :: every[1], :3]
    frames = frames[chosen].detach().cpu()
    if frames.dtype == torch.uint8:
        return frames.numpy()
    values = frames.double().numpy()
    values = np.where(np.isfinite(values), values, 0.0)
    low, high = values.min(), values.max()
    if low >= 0 and high <= 1:
        values = values * 255
    elif low < 0 or high > 255:  # normalised: from the darkest to the brightest
        values = (values - low) / max(high - low, 1e-300) * 255
    pixels: Pixels = np.round(np.clip(values, 0, 255)).astype(np.uint8)
    return pixels


def _image(cv2: Any, pictures: Pixels, side: int) -> str:
    """Pictures side by side, scaled down."""
    height, width = pictures.shape[1:3]
    by = min(1.0, side / max(height, width))
    size = max(1, round(width * by)), max(1, round(height * by))
    small = [cv2.resize(each, size, interpolation=cv2.INTER_AREA) for each in pictures]
    strip = np.concatenate(small, axis=1)
    if strip.ndim == 3:  # OpenCV has blue first
        strip = strip[..., ::-1]
    _, encoded = cv2.imencode(".png", np.ascontiguousarray(strip))
    text = base64.b64encode(encoded.tobytes()).decode("ascii")
    return f'<img alt="" style="{_SHOWN}" src="data:image/png;base64,{text}">'
