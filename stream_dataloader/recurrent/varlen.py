"""Segments: a batch's lanes laid end to end in one row, cut where no state may flow from one step to the next.

Kernels for sequences of different lengths take such a row and its boundaries, `cu_seqlens`. Lane b is at
`[b * T, (b + 1) * T)` of the row.

    lane 0  a a a . .      lane 1  b b C C C      (T = 5; a and b continue the batch before, C starts, . is padding)

    row     a a a . . b b C C C      cu_seqlens  0 3 5 7 10      continues  1 0 1 0

Guarantee: no segment has steps of two lanes, of two streams, or both of a stream and of padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

__all__ = ["Segments"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False, repr=False)
class Segments:
    """Segments of a batch's lanes laid end to end, from `recurrent.segments(batch)`. N is their number.

    All tensors are on the batch's device. N depends on the data, so it changes from batch to batch.

    `continues` and `last` are for kernels that take a state for each segment and return one. Such a kernel is
    `fla.ops.gated_delta_rule.chunk_gated_delta_rule` of flash-linear-attention 0.5: `initial_state` and `final_state`
    are `(N, ...)`. `to_segments` converts states of lanes to states of segments, and `to_lanes` converts them back.

    Example:
        >>> import torch
        >>> from stream_dataloader import StreamDataLoader, StreamDataset, recurrent
        >>> dataset = StreamDataset([6, 1, 3], range, batch_size=2, time_steps=4, windows="packed")
        >>> for batch in StreamDataLoader(dataset):
        ...     segments = recurrent.segments(batch)
        ...     print(segments, segments.cu_seqlens.tolist(), segments.continues.tolist())
        Segments(3 of 2 lanes, device='cpu') [0, 4, 5, 8] [False, False, False]
        Segments(3 of 2 lanes, device='cpu') [0, 2, 4, 8] [True, False, False]
    """

    cu_seqlens: torch.Tensor
    """`(N + 1,)` int32: segment n is at `[cu_seqlens[n], cu_seqlens[n + 1])` of the row."""

    row: torch.Tensor
    """`(N,)` int64: the segment's row of the batch, `0 ... B - 1`."""

    continues: torch.Tensor
    """`(N,)` bool: the segment continues the stream that its lane read in the batch before."""

    is_padding: torch.Tensor
    """`(N,)` bool: all steps of the segment are padding."""

    last: torch.Tensor
    """`(B,)` int64: the last segment of each lane that is not padding. Its final state is the lane's state. If this
    segment `is_padding`, the lane has no item."""

    def to_segments(self, state: torch.Tensor | None, start: torch.Tensor | float = 0) -> torch.Tensor | None:
        """Return the segments' initial states, given the states of the lanes after the batch before.

        Args:
            state: `(B, ...)`, the result of `to_lanes`. For a structure of tensors, call this for each tensor. None,
                for the first batch, means that all lanes start.
            start: State at the start of a stream, `(1, ...)` or a number.

        Returns:
            `(N, ...)`: the lane's state where the segment continues a stream, else `start`. None, which kernels treat
            as zeros, if neither `state` nor another `start` is given.

        Raises:
            TypeError: `state` is not a tensor.
            ValueError: `state` does not have B lanes. Or it is None, and `start` is a number, which has no shape.
        """
        if state is None:
            if isinstance(start, torch.Tensor):
                return start.expand(len(self), *start.shape[1:])
            if start == 0:
                return None
            raise ValueError(f"without a state, start must be a tensor (1, ...), not {start!r}, which has no shape")
        _check_first(state, len(self.last), "lanes", "as to_lanes returns it")
        carried = state.index_select(0, self.row)
        goes_on = self.continues.reshape(-1, *[1] * (state.ndim - 1))
        return torch.where(goes_on, carried, start.to(state) if isinstance(start, torch.Tensor) else start)

    def to_lanes(self, state: torch.Tensor, *, before: torch.Tensor | None) -> torch.Tensor:
        """Return the lanes' states after the batch, given the final states of the segments.

        Args:
            state: `(N, ...)`.
            before: `(B, ...)`, the state given to `to_segments`. A lane without an item keeps it, because its stream
                may continue later (behind `NOTHING_YET`). None, for the first batch, means that all lanes
                start.

        Returns:
            `(B, ...)`.

        Raises:
            TypeError: `state` or `before` is not a tensor.
            ValueError: `state` does not have N segments, or `before` does not have B lanes.
        """
        _check_first(state, len(self), "segments", "as a kernel called with this cu_seqlens returns it")
        after = state.index_select(0, self.last)
        if before is None:
            return after
        _check_first(before, len(self.last), "lanes", "as to_lanes returned it for the batch before")
        is_idle = self.is_padding.index_select(0, self.last)
        return torch.where(is_idle.reshape(-1, *[1] * (after.ndim - 1)), before.to(after), after)

    def __len__(self) -> int:
        """Return the number of segments, N."""
        return len(self.row)

    def __repr__(self) -> str:
        return f"Segments({len(self)} of {len(self.last)} lanes, device={str(self.row.device)!r})"


def _check_first(state: object, count: int, what: str, how: str) -> None:
    if not isinstance(state, torch.Tensor):
        raise TypeError(f"the state must be a tensor, not a {type(state).__name__}; pass each tensor by itself")
    if state.shape[:1] != (count,):
        found = f"the batch has {count} {what}, but the state is {tuple(state.shape)}"
        raise ValueError(f"{found}; its first dimension must be the {what}, {how}")


def begins_segment(is_first: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    """Return `(T, B)` bool: a segment begins at the step, as it always does at a window's first step."""
    changed = padding[1:] != padding[:-1]
    return torch.cat([torch.ones_like(is_first[:1]), is_first[1:] | changed])


def find_segments(cuts: Array, is_first: Array, padding: Array, device: torch.device) -> Segments:
    """Return the segments between the cuts from `cuts_of`, on `device`; the `(T, B)` flags are in host memory."""
    steps, lanes = is_first.shape
    number = np.arange(len(cuts) - 1)
    row, t = np.divmod(cuts[:-1].astype(np.int64), steps)
    is_padding = padding[t, row]
    last, is_real = np.zeros(lanes, np.int64), ~is_padding
    last[row] = number  # if a lane has several segments, the latest one stays
    last[row[is_real]] = number[is_real]
    found = {
        "cu_seqlens": cuts,
        "row": row,
        "continues": (t == 0) & ~is_first[t, row] & is_real,
        "is_padding": is_padding,
        "last": last,
    }
    return Segments(**{name: to_device(torch.from_numpy(array), device) for name, array in found.items()})


def find_starts(is_first: Array) -> Array:
    """Return where `(T, B)` flags are set, in the row of lanes laid end to end, in order."""
    starts = _places(is_first, len(is_first))
    starts.sort()
    return starts


def find_padding_edges(padding: Array) -> Array:
    """Return where `(T, B)` flags begin or end within lanes, in the same row."""
    return _places(padding[1:] != padding[:-1], len(padding)) + 1


def _places(flags: Array, steps: int) -> Array:
    t, lane = np.divmod(flags.reshape(-1).nonzero()[0], flags.shape[1])  # few are set: there is no need to copy all
    places: Array = lane * steps + t
    return places


def cuts_of(starts: Array, padding_edges: Array, steps: int, lanes: int) -> Array:
    """Return `cu_seqlens`, int32: all these places, and each lane's begin and end."""
    return np.unique(np.concatenate((np.arange(lanes + 1) * steps, starts, padding_edges))).astype(np.int32)


def count_starts(starts: Array, steps: int, lanes: int) -> Array:
    """Return `(B, T)` int32: how many starts each lane has up to each time step."""
    begins = np.arange(lanes + 1) * steps
    edges = np.concatenate((begins, starts))
    edges.sort()  # a lane's begin is before a start there
    number = np.arange(len(edges) - 1)
    number -= edges.searchsorted(begins)[edges[:-1] // steps]
    return number.astype(np.int32).repeat(edges[1:] - edges[:-1]).reshape(lanes, steps)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to a device."""
    if device.type == "cuda":  # a copy from pageable memory may wait for all work queued on the device
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
