"""Burn-in: the first steps after a start, or of each window, bring the state up to date and teach nothing.

Kapturowski, Ostrovski, Quan, Munos and Dabney: Recurrent Experience Replay in Distributed Reinforcement Learning
(R2D2), ICLR 2019, section 3.
"""

from __future__ import annotations

from typing import Literal

import torch

from stream_dataloader import _options as options
from stream_dataloader.batch import StreamBatch
from stream_dataloader.recurrent.window import on_host

BurnInAt = Literal["start", "window"]


class BurnIn:
    """Says which steps are burn-in.

    Args:
        steps: How many.
        at: From where they count: the start of each stream, or of each window.

    Raises:
        TypeError: The number is no integer.
        ValueError: It is negative, or there is no such place.
    """

    def __init__(self, steps: int, at: BurnInAt) -> None:
        self.steps = options.integer("burn_in", steps, 0)
        self.at: BurnInAt = options.choice("burn_in_at", at, BurnInAt)

    def mask(self, batch: StreamBatch) -> torch.Tensor:
        """`(T, B)` bool: the step is real and burn-in."""
        real = batch.source >= 0
        if self.at == "start":
            return real & (batch.position < self.steps)
        t = torch.arange(batch.time_steps, device=real.device)
        return real & (t < self.steps)[:, None]

    def covers_head(self, batch: StreamBatch) -> bool:
        """Whether the first `steps` time steps of the batch are burn-in, or padding, in each lane."""
        if not self.steps or self.at == "window":
            return self.steps > 0
        host, head = on_host(batch), slice(0, self.steps)
        return bool(((host.position[head] < self.steps) | (host.source[head] < 0)).all())
