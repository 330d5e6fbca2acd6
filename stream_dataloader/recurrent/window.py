"""What a batch asks of the lanes' states: which lanes start, which read nothing, where each goes on and stops.

And which steps are burn-in, which bring the state up to date and teach nothing: Kapturowski, Ostrovski, Quan, Munos
and Dabney, Recurrent Experience Replay in Distributed Reinforcement Learning (R2D2), ICLR 2019, section 3.
"""

from __future__ import annotations

import weakref
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from stream_dataloader.batch import StreamBatch

BurnInAt = Literal["start", "window"]


def on_host(batch: StreamBatch) -> StreamBatch:
    """The batch's bookkeeping in host memory; a batch that was moved remembers it, see `StreamBatch.host`."""
    return batch if batch.mask.device.type == "cpu" else batch.host


class Ends(NamedTuple):
    """A time step of each lane: of which stream it is, and where in it."""

    source: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]


class Window(NamedTuple):
    """A batch, lane by lane.

    Attributes:
        lanes: The lanes' numbers.
        real: The lane has an item, be it one read again.
        starts: A stream starts at the lane's first item.
        goes_on: The lane's first item is not the first one of its stream.
        first: The lane's first item.
        last: Its last one.
        epoch: The batch's epoch.
        step: Its number in the epoch.
        batch: Equal for one batch, its micro-batches and its copies on devices, and for no other.
    """

    lanes: npt.NDArray[np.int64]
    real: npt.NDArray[np.bool_]
    starts: npt.NDArray[np.bool_]
    goes_on: npt.NDArray[np.bool_]
    first: Ends
    last: Ends
    epoch: int
    step: int
    batch: Any

    @classmethod
    def of(cls, batch: StreamBatch) -> Window:
        """That of a batch."""
        host = on_host(batch)
        source, position = host.source.numpy(), host.position.numpy()
        there = source >= 0
        time_steps, lanes = there.shape
        rows = np.arange(lanes)
        begin = 0 if there[0].all() else there.argmax(0)  # a loader pads the end only, others may pad the front
        stop = -1 if there[-1].all() else time_steps - 1 - there[::-1].argmax(0)
        real = there[begin, rows]
        starts = host.is_start.numpy()[begin, rows]
        first = Ends(source[begin, rows], position[begin, rows])
        last = Ends(source[stop, rows], position[stop, rows])
        token = batch.__dict__.get("_state") or weakref.ref(batch)
        return cls(host.lane.numpy(), real, starts, real & ~starts, first, last, batch.epoch, batch.step, token)


def check_no_start_inside(batch: StreamBatch) -> None:
    """Raise if a stream starts after the first time step."""
    host = on_host(batch)
    if host.is_start[1:].any():
        t, row = (host.is_start[1:].nonzero()[0] + torch.tensor([1, 0])).tolist()
        raise ValueError(
            f"lane {host.lane[row]} starts source {host.source[t, row]} at t = {t}, inside the window; a state given "
            'at t = 0 does not get there; build the dataset with windows="aligned", or say packed=True if the '
            "model begins anew at batch.is_start"
        )


def burn_in_mask(batch: StreamBatch, steps: int, at: BurnInAt) -> torch.Tensor:
    """`(T, B)` bool: the step is real, and among the first `steps` of its stream, or of the window."""
    real = batch.source >= 0
    if at == "start":
        return real & (batch.position < steps)
    t = torch.arange(batch.time_steps, device=real.device)
    return real & (t < steps)[:, None]


def begins_with_burn_in(batch: StreamBatch, steps: int, at: BurnInAt) -> bool:
    """Whether the first `steps` time steps of the batch are burn-in, or padding, in each lane."""
    if not steps or at == "window":
        return steps > 0
    host, head = on_host(batch), slice(0, steps)
    return bool(((host.position[head] < steps) | (host.source[head] < 0)).all())
