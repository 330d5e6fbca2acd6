"""`EpochEnds`: whether a place in an epoch is its end, as far as that is known beforehand."""

from __future__ import annotations

import functools
from typing import Any

from stream_dataloader._ranks.ranks import Ranks, known_count
from stream_dataloader._schedule.order import Order
from stream_dataloader._schedule.rest import has_rest
from stream_dataloader._schedule.rules import Rules
from stream_dataloader._schedule.sections import Cuts, lengths_in
from stream_dataloader._schedule.snapshot import Snapshot
from stream_dataloader.dataset import StreamDataset


class EpochEnds:
    """Knows the ends of a loader's epochs, where the lengths of streams are known.

    Args:
        dataset: What is read.
        ranks: Who reads it.
    """

    def __init__(self, dataset: StreamDataset, ranks: Ranks) -> None:
        self._dataset = dataset
        self._ranks = ranks
        self._order: tuple[Rules, int, Order] | None = None  # of the epoch that was looked at last

    def is_end(self, epoch: int, place: Snapshot) -> bool:
        """Whether an epoch is known to have no batch behind a place in it."""
        lengths = self._dataset.lengths
        if lengths is None or (lengths < 0).any():
            return False
        if not self._ranks.alone:
            steps = self._known_steps(epoch)
            return steps is not None and place.step >= steps
        rules = self._ranks.reading.rules
        scheduled = self._ranks.reading.scheduled_lengths
        if self._order is None or self._order[:2] != (rules, epoch):
            self._order = rules, epoch, Order(rules, epoch, scheduled)
        starts = scheduled.starts(epoch) if isinstance(scheduled, Cuts) else None
        known = lengths_in(scheduled, epoch)
        assert known is not None
        return not has_rest(place, rules, self._order[2], known, functools.partial(self._known_steps, epoch), starts)

    def _known_steps(self, epoch: int) -> int | None:
        """Number of steps of an epoch, for all ranks, if no stream can change it."""
        return known_count(self._ranks.reading, epoch)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_order": None}
