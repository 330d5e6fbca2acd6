"""What a lane reads, in a few words: text, the first numbers, or the beginnings of other objects.

Guarantee: it looks at a few values only, whatever the size of the batch, and only these leave the device.
"""

from __future__ import annotations

import reprlib
from typing import Any

import numpy as np
import torch

from stream_dataloader._html.page import escaped

_VALUES = 6
_LETTERS = 48
_short = reprlib.Repr()
_short.maxstring = _short.maxother = _LETTERS


def cell(leaf: Any, lane: int, steps: list[int]) -> str:
    """The values of a leaf in one lane, at time steps that are no padding, as HTML.

    Args:
        leaf: A dense tensor `(T, B, ...)`, or a list `[t][b]`.
        lane: The lane's place in the batch.
        steps: Time steps, ascending.
    """
    try:
        return _tensor_cell(leaf, lane, steps) if isinstance(leaf, torch.Tensor) else _list_cell(leaf, lane, steps)
    except Exception:  # of an object's own methods
        return "?"


def _tensor_cell(leaf: torch.Tensor, lane: int, steps: list[int]) -> str:
    if leaf.ndim == 2:
        taken = leaf[steps[:_VALUES], lane]
        more = len(steps) > _VALUES
    else:  # the first numbers of the first time step
        taken, more = leaf[steps[0], lane], False
        while taken.ndim > 1:
            more = more or len(taken) > 1
            taken = taken[0]
        more = more or len(taken) > _VALUES
        taken = taken[:_VALUES]
    taken = taken.detach().cpu()
    if taken.is_floating_point():
        taken = taken.double()
    return ", ".join(map(_number, taken.tolist())) + (", …" if more else "")


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (float, complex)) else str(value)


def _list_cell(leaf: list[list[Any]], lane: int, steps: list[int]) -> str:
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
