"""`Member`: what a loader knows of one member of its batch, from one epoch to the next. Most have one.

Guarantee: a place is taken for an epoch's end only where the lengths of streams say so beforehand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stream_dataloader._items.layout import Layout
from stream_dataloader._items.plain import layout_from_plain, layout_to_plain
from stream_dataloader._ranks.ranks import Ranks, identity_of, known_count
from stream_dataloader._reading.plan import Start
from stream_dataloader._schedule.order import Order
from stream_dataloader._schedule.position import EpochPlace
from stream_dataloader._schedule.replay import has_rest
from stream_dataloader._schedule.rules import Rules
from stream_dataloader._schedule.saved_state import LoadedState, plain_epoch, to_plain
from stream_dataloader._schedule.sections import Cuts, lengths_in
from stream_dataloader._schedule.snapshot import PackedSnapshot
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import FailureLimitError, StreamError


class Member:
    """A member of a batch; `length` is that of an endless run's epochs."""

    def __init__(self, dataset: StreamDataset, ranks: Ranks, length: int | None) -> None:
        self.ranks = ranks
        self.layout: Layout | None = None  # of the epoch's items, or of those of the loaded state
        self._dataset = dataset
        self._length = length
        self._order: tuple[Rules, int, Order] | None = None  # of the epoch whose end was asked for last
        self._failed: dict[int, set[int]] = {}  # sources that were skipped, also before a loaded state, by group hosted

    def load(self, loaded: LoadedState) -> Start:
        """Take up a state; returns where it goes on."""
        self._failed = dict(enumerate(loaded.failures))
        self.layout = layout_from_plain(loaded.items)
        return Start(*self.ranks.resumed(loaded))

    def forget_place(self) -> None:
        """What was loaded was of another rank."""
        self._failed = {}

    def is_end(self, epoch: int, record: PackedSnapshot) -> bool:
        """Whether an epoch is known to have no batch behind a place in it."""
        reading, lengths = self.ranks.reading, self._dataset.lengths
        rules, scheduled = reading.rules, reading.scheduled_lengths
        if lengths is None or (lengths < 0).any() or rules.padding_mode == "cycle":
            return False
        if not self.ranks.alone or rules.padding_mode == "drop":
            steps = known_count(reading, epoch)  # for all ranks, if no stream can change it
            return steps is not None and record.step >= steps
        if self._order is None or self._order[:2] != (rules, epoch):
            self._order = rules, epoch, Order(rules, epoch, scheduled)
        starts = scheduled.starts(epoch) if isinstance(scheduled, Cuts) else None
        known = lengths_in(scheduled, epoch)
        assert known is not None
        return not has_rest(record.unpack(rules), rules, self._order[2], known, starts)

    def state_of(self, epoch: int, record: PackedSnapshot, at: EpochPlace | None = None) -> dict[str, Any]:
        """The state at a place in an epoch; at its end, that of the next one's beginning."""
        if self.is_end(epoch, record):
            return self.state(Start(epoch + 1), at)
        return self.state(Start(epoch, record.unpack(self.ranks.reading.rules)), at)

    def state(self, start: Start, at: EpochPlace | None = None) -> dict[str, Any]:
        """A place as plain data; `at`: where it is in an epoch of n batches."""
        rules, length = self.ranks.reading.rules, self._length
        failed = [self._failed.get(group, ()) for group in range(rules.groups.count)]
        items = None if self.layout is None else layout_to_plain(self.layout)
        state = to_plain(rules, start.epoch, start.resume, identity_of(self._dataset), failed, items)
        return state if length is None or at is None else state | plain_epoch(at, length)

    def count_failure(self, failure: StreamError) -> None:
        """A stream was skipped; raises `FailureLimitError` if it was one too many."""
        group = failure.lane // self.ranks.reading.rules.lanes_of_a_group
        self._failed.setdefault(group, set()).add(failure.source_index)
        most = self._dataset.max_failures
        count = len(set().union(*self._failed.values()))
        if most is not None and count > most:
            found = "1 source was" if count == 1 else f"{count} sources were"
            raise FailureLimitError(
                f"{found} skipped, and max_failures is {most}; the last one: {failure}",
                **failure.place,
            ) from failure

    def __getstate__(self) -> Mapping[str, Any]:
        return self.__dict__ | {"layout": None, "_order": None}
