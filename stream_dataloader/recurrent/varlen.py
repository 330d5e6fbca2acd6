"""Segments: a batch's lanes laid end to end in one row, cut where nothing may flow from one step to the next.

Kernels for sequences of different lengths take such a row, and `cu_seqlens`, the places where it is cut. Lane b is at
`[b * T, (b + 1) * T)` of the row.

    lane 0  a a a . .      lane 1  b b C C C      (T = 5; a and b go on from the batch before, C starts, . is padding)

    row     a a a . . b b C C C      cu_seqlens  0 3 5 7 10      continues  1 0 1 0

Guarantee: no segment has steps of two lanes, of two streams, or both of a stream and of padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Segments"]


@dataclass(frozen=True, eq=False, repr=False)
class Segments:
    """The segments of a batch's lanes laid end to end, from `recurrent.segments(batch)`. N is their number.

    All tensors are on the batch's device. N follows from the data, so it changes from batch to batch.

    `continues` and `last` are for kernels that take a state for each segment and return one. Such a kernel is
    `fla.ops.gated_delta_rule.chunk_gated_delta_rule` of flash-linear-attention 0.5: `initial_state` and `final_state`
    are `(N, ...)`. `to_segments` and `to_lanes` make the one of the state of the lanes, and the other way round.

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
    """`(N,)` int64: the row of the batch that the segment is of, `0 ... B - 1`."""

    continues: torch.Tensor
    """`(N,)` bool: the segment goes on with the stream that its lane read in the batch before."""

    is_padding: torch.Tensor
    """`(N,)` bool: no item was read for any step of the segment."""

    last: torch.Tensor
    """`(B,)` int64: the segment that each lane ends with, apart from padding. Its final state is the lane's, unless it
    `is_padding`: then the lane has no item."""

    def to_segments(self, state: torch.Tensor | None, start: torch.Tensor | float = 0) -> torch.Tensor | None:
        """The segments' initial states, of the states that the lanes had after the batch before.

        Args:
            state: `(B, ...)`, what `to_lanes` returned; for a structure of tensors, call this for each. None, for the
                first batch, stands for lanes that all start.
            start: What a stream starts with, `(1, ...)` or a number.

        Returns:
            `(N, ...)`: the lane's state where the segment continues a stream, else `start`. None, which kernels take
            for zeros, if neither `state` nor another `start` is given.

        Raises:
            TypeError: `state` is no tensor.
            ValueError: It is not of B lanes; or it is None, and `start` is a number, which does not tell the shape.
        """
        if state is None:
            if isinstance(start, torch.Tensor):
                return start.expand(len(self), *start.shape[1:])
            if start == 0:
                return None
            raise ValueError(f"without a state, start must be a tensor (1, ...), and is {start!r}, which has no shape")
        _check_first(state, len(self.last), "lanes", "as to_lanes returns it")
        carried = state.index_select(0, self.row)
        goes_on = self.continues.reshape(-1, *[1] * (state.ndim - 1))
        return torch.where(goes_on, carried, start.to(state) if isinstance(start, torch.Tensor) else start)

    def to_lanes(self, state: torch.Tensor, *, before: torch.Tensor | None) -> torch.Tensor:
        """Return the lanes' states after the batch, of the final states of the segments.

        Args:
            state: `(N, ...)`.
            before: `(B, ...)`, what `to_segments` was given: a lane without an item keeps it, as its stream may go on
                later (with the loader's `patience`). None, for the first batch, stands for lanes that all start.

        Returns:
            `(B, ...)`.

        Raises:
            TypeError: `state` or `before` is no tensor.
            ValueError: `state` is not of N segments, or `before` not of B lanes.
        """
        _check_first(state, len(self), "segments", "as a kernel returns it that was given this cu_seqlens")
        after = state.index_select(0, self.last)
        if before is None:
            return after
        _check_first(before, len(self.last), "lanes", "as to_lanes returned it for the batch before")
        is_idle = self.is_padding.index_select(0, self.last)
        return torch.where(is_idle.reshape(-1, *[1] * (after.ndim - 1)), before.to(after), after)

    def __len__(self) -> int:
        """Number of segments, N."""
        return len(self.row)

    def __repr__(self) -> str:
        return f"Segments({len(self)} of {len(self.last)} lanes, device={str(self.row.device)!r})"


def _check_first(state: object, count: int, what: str, how: str) -> None:
    if not isinstance(state, torch.Tensor):
        raise TypeError(f"the state must be a tensor, and is a {type(state).__name__}; give each tensor by itself")
    if state.shape[:1] != (count,):
        found = f"the batch has {count} {what}, and the state is {tuple(state.shape)}"
        raise ValueError(f"{found}; its first dimension must be the {what}, {how}")


def begins_segment(is_first: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    """`(T, B)` bool: a segment begins at the step. A window's first step begins one, also if its stream goes on."""
    changed = padding[1:] != padding[:-1]
    return torch.cat([torch.ones_like(is_first[:1]), is_first[1:] | changed])


def find_segments(is_first: torch.Tensor, padding: torch.Tensor, device: torch.device) -> Segments:
    """The segments of `(T, B)` flags in host memory, put on `device`."""
    steps, lanes = is_first.shape
    first = begins_segment(is_first, padding).T.reshape(-1).nonzero().reshape(-1)
    count = len(first)
    row = first // steps
    is_padding = padding.T.reshape(-1)[first]
    started = is_first.T.reshape(-1)[first]
    rank = (
        torch.arange(count, dtype=torch.int64, device="cpu") + count * ~is_padding
    )  # of a lane, real segments are above padding, then the latest
    last = torch.zeros(lanes, dtype=torch.int64, device="cpu").scatter_reduce(0, row, rank, "amax") % max(count, 1)
    found: dict[str, Any] = {
        "cu_seqlens": torch.cat([first, first.new_tensor([steps * lanes])]).to(torch.int32),
        "row": row,
        "continues": (first % steps == 0) & ~started & ~is_padding,
        "is_padding": is_padding,
        "last": last,
    }
    return Segments(**{name: to_device(tensor, device) for name, tensor in found.items()})


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` on a device."""
    if device.type == "cuda":  # from pageable memory, the copy may wait for all that the device was told to do
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
