"""Where the streams of one long recording begin and end.

Guarantee: streams follow one another, from the first step to the last, and none is left out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError, shorten

__all__ = ["cut_by_episodes", "cut_by_flags", "cut_by_lengths"]


def cut_by_lengths(lengths: NDArray[Any], steps: int, name: str) -> NDArray[np.int64]:
    """Bounds of streams, `(streams + 1,)`, of their lengths.

    Raises:
        StoreError: They are no lengths, or not of that many steps.
    """
    lengths = _column(lengths, None, name)
    if len(lengths) and (int(lengths.min()) < 0 or int(lengths.max()) > steps):
        raise StoreError(f"{name} holds {lengths.min()} to {lengths.max()}, and lengths are 0 to {steps} steps")
    bounds = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=bounds[1:])
    if bounds[-1] != steps:
        raise StoreError(f"{name} holds lengths of {bounds[-1]:,} steps together, and there are {steps:,}")
    return bounds


def cut_by_episodes(episodes: NDArray[Any], steps: int, name: str) -> NDArray[np.int64]:
    """Bounds of streams: each begins where the number of the episode changes."""
    episodes = _column(episodes, steps, name)
    return _bounds(np.flatnonzero(episodes[1:] != episodes[:-1]) + 1, steps)


def cut_by_flags(flags: NDArray[Any], steps: int, name: str) -> NDArray[np.int64]:
    """Bounds of streams: each ends with a step whose flag is set, but the last may end without."""
    return _bounds(np.flatnonzero(_column(flags, steps, name)[:-1]) + 1, steps)


def _bounds(inner: NDArray[np.int64], steps: int) -> NDArray[np.int64]:
    return np.concatenate(([0], inner, [steps])) if steps else np.zeros(1, np.int64)


def _column(found: NDArray[Any], steps: int | None, name: str) -> NDArray[Any]:
    """One number a step; axes of one element behind the first do no harm."""
    if found.dtype.kind not in "biuO" or found.size != len(found):
        raise StoreError(
            f"{name} is {found.dtype} {shorten(found.shape)}; to cut streams, give one whole number or flag a row"
        )
    if steps is not None and len(found) != steps:
        raise StoreError(f"{name} has {len(found)} rows, and there are {steps} steps; it has to have as many")
    return found.reshape(-1)
