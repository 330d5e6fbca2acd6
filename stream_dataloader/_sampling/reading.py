"""`SamplerReading`: the batches of one epoch of a `LaneBatchSampler`, and where it stood before each of them.

Guarantee: where it stood is known of every batch since the reading began, however many were drawn ahead: it is
replayed, from the nearest place that was kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy.typing as npt

from stream_dataloader._map_style.index_groups import IndexGroups
from stream_dataloader._sampling.lane_index import LaneIndices
from stream_dataloader._schedule.order import Order
from stream_dataloader._schedule.position import EpochStart
from stream_dataloader._schedule.replay import Replay
from stream_dataloader._schedule.rules import Rules
from stream_dataloader._schedule.snapshot import Snapshot

_KEPT_PLACES = 8  # a block of steps is between one and the next
_ALL = 1 << 62


class SamplerReading:
    """One epoch being drawn.

    Args:
        groups: What is read.
        rules: By which rules.
        start: Where it begins.
        total: Number of the epoch's batches; None: it has no end.

    Attributes:
        start: Where it began.
        fetched: Number of batches drawn of the epoch, with those before `start`.
    """

    def __init__(self, groups: IndexGroups, rules: Rules, start: EpochStart, total: int | None) -> None:
        self.start = start
        self.total = total
        self.fetched = start.epoch.delivered
        self._groups, self._rules = groups, rules
        self._first_step = (0 if start.place is None else start.place.step) - start.epoch.delivered  # of the epoch
        self._kept: deque[Snapshot] = deque(maxlen=_KEPT_PLACES)

    def batches(self) -> Iterator[LaneIndices]:
        """Draw what is left of the epoch."""
        replay = self._replay(self.start.place)
        lanes, flat = self._rules.lanes, self._groups.flat
        while (left := (_ALL if self.total is None else self.total) - self.fetched) > 0:
            self._kept.append(replay.place())
            places, kinds = replay.read(left)
            size = places[0].size
            all_kinds = kinds.tobytes()
            indices: npt.NDArray[Any] = (places if flat is None else flat[places]).reshape(-1, size)
            for number, row in enumerate(indices.tolist()):
                batch = LaneIndices(row)
                batch.kinds, batch.lanes = all_kinds[number * size : (number + 1) * size], lanes
                self.fetched += 1
                yield batch

    def reached(self) -> Snapshot:
        """Where it stands after all that were drawn."""
        return self.place(self.fetched)

    def place(self, batches: int) -> Snapshot:
        """Where it stood after so many batches of the epoch."""
        number, first = self.start.epoch
        if not first <= batches <= self.fetched:
            raise ValueError(
                f"the state as of step {batches} is not known: {self.fetched} batches of epoch {number} were drawn, "
                f"and the first was number {first}; pass the number of this epoch's batches that the trainer has used, "
                f"from {first} to {self.fetched}"
            )
        step = self._first_step + batches
        before = [place for place in self._kept if place.step <= step]
        replay = self._replay(before[-1] if before else self.start.place)
        replay.skip_to(step)
        return replay.place()

    def _replay(self, place: Snapshot | None) -> Replay:
        lengths = self._groups.lengths
        return Replay(self._rules, Order(self._rules, self.start.run, lengths), lengths, place)
