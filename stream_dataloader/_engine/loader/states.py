"""States of one loader: plain data of a place in an epoch.

Guarantee: a place counts as an epoch's end only if the lengths of streams say so beforehand.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from stream_dataloader._engine.items.layout import Layout
from stream_dataloader._engine.items.plain import layout_from_plain, layout_to_plain
from stream_dataloader._engine.ranks.ranks import Ranks, identity_of, known_count
from stream_dataloader._engine.reading.plan import Start
from stream_dataloader._engine.schedule.order import Order
from stream_dataloader._engine.schedule.position import EpochPlace
from stream_dataloader._engine.schedule.replay import has_rest
from stream_dataloader._engine.schedule.rules import Rules
from stream_dataloader._engine.schedule.saved_state import LoadedState, plain_epoch, to_plain
from stream_dataloader._engine.schedule.snapshot import PackedSnapshot
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import FailureLimitError, StateError, StreamError


class States:
    """Makes states of places; also keeps their other content, the layout of items and the skipped sources.

    Args:
        dataset: The dataset that the loader was built with.
        ranks: The ranks that read it.
        length: Number of batches of an epoch of an endless run; None if epochs are the dataset's.
    """

    def __init__(self, dataset: StreamDataset, ranks: Ranks, length: int | None) -> None:
        self.ranks = ranks
        self.layout: Layout | None = None  # of the epoch's items, or of the loaded state's
        self._dataset = dataset
        self._length = length
        self._order: tuple[Rules, int, Any, Order] | None = None  # of the epoch that `is_end` was called for last
        self._failed: dict[int, set[int]] = {}  # skipped sources by local group, including those of a loaded state

    def load(self, loaded: LoadedState) -> Start:
        self._failed = dict(enumerate(loaded.failures))
        self.layout = None
        self._know_layout(loaded.items)
        return Start(*self.ranks.resumed(loaded))

    def forget_place(self) -> None:
        """Forget the skipped sources of a loaded state, because it belongs to another rank."""
        self._failed = {}

    def is_end(self, reading: StreamDataset, epoch: int, record: PackedSnapshot) -> bool:
        """Return whether an epoch is known to have no batch after a place in it.

        Making the order of very many sources takes seconds, so this is done only near the epoch's end.
        """
        plan = reading._plan()
        rules, lists = plan.rules, plan.lists
        if not lists.knows_lengths or rules.padding_mode == "cycle":
            return False
        if not self.ranks.alone or rules.padding_mode == "drop":
            changed = record.unpack_changed(rules)
            steps = known_count(reading, epoch, changed)  # of all ranks; None if a stream can change it
            return steps is not None and record.step >= steps
        to_come = sum(max(0, share - cursor) for share, cursor in zip(rules.shares, record.cursors, strict=True))
        if rules.mix is None and to_come > lists.most_empty:
            return False
        place = record.unpack(rules)
        growth = () if place.changed is None else place.changed.growth
        if self._order is None or self._order[:3] != (rules, epoch, growth):
            self._order = rules, epoch, growth, Order(rules, epoch, plan.scheduled_lengths, place)
        return not has_rest(place, rules, self._order[3], plan.section)

    def of_record(
        self, reading: StreamDataset, epoch: int, record: PackedSnapshot, at: EpochPlace | None = None
    ) -> dict[str, Any]:
        """Return the state at a place in an epoch; at its end, the state of the next epoch's beginning."""
        if self.is_end(reading, epoch, record):
            return self.of(reading, Start(epoch + 1), at)
        return self.of(reading, Start(epoch, record.unpack(reading._rules)), at)

    def of(self, reading: StreamDataset, start: Start, at: EpochPlace | None = None) -> dict[str, Any]:
        """Return the state at a place, of the dataset as it was read there."""
        rules, length = reading._rules, self._length
        failed = [self._failed.get(group, ()) for group in range(rules.groups.count)]
        items = None if self.layout is None else layout_to_plain(self.layout)
        state = to_plain(rules, start.epoch, start.resume, identity_of(reading), failed, items)
        return state if length is None or at is None else state | plain_epoch(at, length)

    def count_failure(self, failure: StreamError) -> None:
        """Count a skipped stream.

        Raises:
            FailureLimitError: More sources were skipped than `max_failures`.
        """
        group = failure.lane // self.ranks.dataset._rules.lanes_of_a_group
        self._failed.setdefault(group, set()).add(failure.source_index)
        most = self._dataset.max_failures
        count = len(set().union(*self._failed.values()))
        if most is not None and count > most:
            found = "1 source was" if count == 1 else f"{count} sources were"
            raise FailureLimitError(
                f"{found} skipped, and max_failures is {most}; the last one: {failure}",
                **failure.place,
            ) from failure

    def _know_layout(self, items: Any) -> None:
        if items is not None:
            with suppress(StateError):  # a class cannot be imported here; only a rank without items needs the layout
                self.layout = layout_from_plain(items)

    def __getstate__(self) -> Mapping[str, Any]:
        items = None if self.layout is None else layout_to_plain(self.layout)
        return self.__dict__ | {"layout": items, "_order": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, layout=None)
        self._know_layout(state["layout"])
