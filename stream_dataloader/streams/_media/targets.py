"""Targets of tokens and units: the next one, and `ignore_index` for the last.

Guarantee: texts, files of tokens and tables have as many items as tokens, because the last token has a target too.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import numpy as np

from stream_dataloader.streams._media.section import whole_number

__all__ = ["IGNORE_INDEX", "TARGET_DTYPE", "check_ignore_index", "put_targets"]

#: The target that torch's `cross_entropy` ignores by default.
IGNORE_INDEX = -100
#: The range of class numbers that `cross_entropy` accepts.
TARGET_DTYPE = np.dtype(np.int64)


def check_ignore_index(value: Any, *, targets: bool, tokens: Container[int] = ()) -> int:
    """Return the option `ignore_index` as an int; raise if targets cannot hold it, or if it is one of `tokens`."""
    limits = np.iinfo(TARGET_DTYPE)
    number = whole_number("ignore_index", value, f"give an int64, such as {IGNORE_INDEX}", limits.min, limits.max)
    if number != IGNORE_INDEX and not targets:
        raise ValueError(f"ignore_index is {number}, and there are no targets; give targets=True")
    if targets and number in tokens:
        what = "a token that may come, which the loss would leave out everywhere"
        raise ValueError(f"ignore_index is {number}, {what}; give another, such as {IGNORE_INDEX}")
    return number


def put_targets(target: Any, after: Any, ignore_index: int, ends: Any = None) -> None:
    """Write the tokens `after` as targets, and `ignore_index` after them and at `ends` of documents."""
    count = len(after)
    target[:count] = after
    if count < len(target):
        target[count:] = ignore_index
    if ends is not None:
        target[ends] = ignore_index
