"""Copies of leaves that no dense tensor holds, as a stream may change them after it has yielded them.

Guarantee: what a list, set, dict, bytearray, array or tensor held when it was taken is in the batch, also if they are
inside each other. Other objects are not copied: they may refer to much, and most cannot change.
"""

from __future__ import annotations

import collections
import copy
from typing import Any

import numpy as np
import torch

#: The most frequent types that cannot change.
FIXED = frozenset([str, bytes, int, float, bool, complex, type(None)])

_CONTAINERS = (bytearray, set, collections.deque)


def lasting(leaf: Any, copies: dict[int, Any] | None = None) -> Any:
    """Return a leaf, or a copy of it that does not change with it.

    Args:
        copies: Copies of what contains the leaf, by id, as a container may be in itself.
    """
    kind = type(leaf)
    if kind in FIXED:
        return leaf
    if isinstance(leaf, (np.ndarray, np.void)):  # an entry of a structured array is a view, too
        return leaf.copy()
    if isinstance(leaf, torch.Tensor):
        try:
            return leaf.detach().clone()
        except RuntimeError:  # torch cannot copy a tensor of `uint4` and the like
            return leaf
    if isinstance(leaf, _CONTAINERS):
        return copy.copy(leaf)
    if kind is not list and kind is not dict and kind is not tuple:
        return leaf
    copies = {} if copies is None else copies
    if (copied := copies.get(id(leaf))) is not None:
        return copied
    if kind is tuple:
        return tuple([lasting(element, copies) for element in leaf])
    if kind is dict:
        copied = copies[id(leaf)] = {}
        copied.update({key: lasting(element, copies) for key, element in leaf.items()})
        return copied
    copied = copies[id(leaf)] = []
    copied += [element if type(element) in FIXED else lasting(element, copies) for element in leaf]
    return copied
