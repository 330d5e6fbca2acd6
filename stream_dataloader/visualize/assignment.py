"""Which time steps of which streams lie in which lane: what a timeline draws.

Guarantee: plain data.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Assignment", "Segment"]


class Segment(NamedTuple):
    """Consecutive time steps of one stream in a lane.

    Attributes:
        lane: The lane.
        begin: Its first time step, counted over the epoch: step * T + t.
        stop: The time step behind its last.
        source: Index of the stream's source.
        position: The first step's index within its stream.
        starts: The stream starts here: the lane's state is reset.
        fresh: It is read for the first time in this epoch.
    """

    lane: int
    begin: int
    stop: int
    source: int
    position: int
    starts: bool
    fresh: bool


@dataclass(frozen=True)
class Assignment:
    """What each lane reads when.

    Attributes:
        segments: What lanes read, by lane and time; what lies between is padding.
        lanes: Number of lanes, B.
        steps: Number of batches.
        time_steps: Time steps of a batch, T; the longest window, where streams cut windows themselves.
        workers: The lanes of each worker.
    """

    segments: tuple[Segment, ...] = dataclasses.field(repr=False)
    lanes: int
    steps: int
    time_steps: int
    workers: tuple[range, ...]

    @property
    def padding_share(self) -> float:
        """How much of all cells is padding, 0 to 1."""
        cells = self.lanes * self.steps * self.time_steps
        return 1 - sum(segment.stop - segment.begin for segment in self.segments) / cells if cells else 0.0

    @property
    def streams(self) -> int:
        """How many streams start."""
        return sum(segment.starts for segment in self.segments)
