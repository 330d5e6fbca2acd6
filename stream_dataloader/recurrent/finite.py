"""Looks for NaN and infinity in states, without making an accelerator's host wait.

One number a state, the sum, is not finite if anything in it is not (or if the sum overflows: then a closer look says
so). From a CUDA device it is copied while the model trains on, and looked at before the next batch.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stream_dataloader.errors import NonFiniteStateError
from stream_dataloader.recurrent.states import States
from stream_dataloader.recurrent.window import Window


class FiniteCheck:
    """Whether all numbers of some lanes' states are finite."""

    def __init__(self, states: States) -> None:
        self._states = states.map(lambda leaf, _: leaf.detach())
        sums = [_sum(leaf) for leaf in self._states.leaves if leaf.is_floating_point() or leaf.is_complex()]
        self._copied: torch.cuda.Event | None = None
        self._total = torch.zeros(())
        for i, one in enumerate(sums):
            self._total = self._total.to(one.device) + one if i else one
        if self._total.device.type == "cuda":
            device = self._total.device
            self._total = self._total.to("cpu", non_blocking=True)  # into page-locked memory
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(device))

    def __getstate__(self) -> dict[str, Any]:
        if self._copied is not None:
            self._copied.synchronize()
        return self.__dict__ | {"_copied": None}

    def bad(self) -> npt.NDArray[np.bool_]:
        """`(B,)`: the lane's state holds NaN or infinity. Waits for the sum."""
        if self._copied is not None:
            self._copied.synchronize()
        states = self._states
        found = np.zeros(states.leaves[0].shape[states.dims[0]], np.bool_)
        if math.isfinite(self._total.item()):
            return found
        for leaf, dim in zip(states.leaves, states.dims, strict=True):
            finite = torch.isfinite(leaf).movedim(dim, 0).reshape(len(found), -1).all(1)
            found |= ~finite.cpu().numpy()
        return found


def _sum(leaf: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's numbers, in single precision at least."""
    real = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
    return real.sum(dtype=torch.float64 if real.dtype == torch.float64 else torch.float32)


def text_of(bad: npt.NDArray[np.bool_], window: Window) -> str:
    """Names the first lane that goes on with a state that is not finite."""
    row, more = int(bad.argmax()), int(bad.sum()) - 1
    return (
        f"lane {window.lanes[row]} goes on with source {window.first.source[row]} at position "
        f"{window.first.position[row]}, and its state holds NaN or infinity"
        f"{f' (and {more} more lanes)' if more else ''}"
    )


def error_of(bad: npt.NDArray[np.bool_], window: Window) -> NonFiniteStateError:
    """The error that names that lane."""
    lane, source, position = (int(own[bad.argmax()]) for own in (window.lanes, *window.first))
    return NonFiniteStateError(
        f"{text_of(bad, window)}, which would stay until the stream ends: clip gradients, take smaller steps, call "
        f'reset([{lane}]), or say nonfinite="reset"',
        source_index=source,
        position=position,
        lane=lane,
    )
