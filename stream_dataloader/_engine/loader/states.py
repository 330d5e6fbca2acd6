"""States of one loader: plain data of a place in an epoch.

Guarantee: a place counts as an epoch's end only if the lengths of streams say so beforehand.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from stream_dataloader._engine.items.layout import Layout
from stream_dataloader._engine.items.plain import layout_from_plain, layout_to_plain
from stream_dataloader._engine.loader.epoch import Epoch
from stream_dataloader._engine.ranks.ranks import Ranks, identity_of, known_count
from stream_dataloader._engine.schedule.follower import PackedPlace
from stream_dataloader._engine.schedule.order import Order
from stream_dataloader._engine.schedule.place import Place
from stream_dataloader._engine.schedule.replay import has_unread
from stream_dataloader._engine.schedule.rules import Rules
from stream_dataloader._engine.schedule.saved_state import LoadedState, to_plain
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
        self._order: tuple[tuple[Rules, int, Any], Order] | None = None  # of the epoch `is_end` was asked about last
        self._failed: dict[int, set[int]] = {}  # skipped sources by local group, including those of a loaded state

    def load(self, loaded: LoadedState) -> Place:
        self._failed = dict(enumerate(loaded.failures))
        self.layout = None
        self._know_layout(loaded.items)
        return self.ranks.resumed(loaded.place)

    def forget_place(self) -> None:
        """Forget the skipped sources of a loaded state, because it belongs to another rank."""
        self._failed = {}

    def is_end(self, epoch: Epoch, record: PackedPlace) -> bool:
        """Return whether an epoch is known to have no batch after a place in it.

        Making the order of very many sources takes seconds, so this is done only near the epoch's end.
        """
        plan = epoch.dataset._plan()
        rules, lists = plan.rules, plan.lists
        if not lists.knows_lengths or rules.padding_mode == "cycle":
            return False
        if not self.ranks.alone or rules.padding_mode == "drop":
            place = epoch.place(record) if record.base.has_changed else None
            steps = known_count(epoch.dataset, epoch.number, place)  # of all ranks; None if a stream can change it
            return steps is not None and record.step >= steps
        to_come = sum(max(0, share - cursor) for share, cursor in zip(rules.shares, record.cursors, strict=True))
        if rules.mix is None and to_come > lists.most_empty:
            return False
        place = epoch.place(record)
        key = rules, place.epoch, place.growth
        if self._order is None or self._order[0] != key:
            self._order = key, Order(rules, place, plan.scheduled_lengths)
        return not has_unread(place, rules, self._order[1], plan.section)

    def of_record(self, epoch: Epoch, record: PackedPlace) -> dict[str, Any]:
        """Return the state at a place in an epoch; at its end, the state of the next epoch's beginning."""
        is_end = self.is_end(epoch, record)
        return self.of(epoch.dataset, Place(epoch.number + 1) if is_end else epoch.place(record))

    def of(self, reading: StreamDataset, place: Place) -> dict[str, Any]:
        """Return the state at a place, of the dataset as it was read there."""
        rules = reading._rules
        failed = [self._failed.get(group, ()) for group in range(rules.groups.count)]
        items = None if self.layout is None else layout_to_plain(self.layout)
        identity = identity_of(reading)
        return to_plain(rules, place, identity, failed, items, batches_per_epoch=self._length)

    def count_failure(self, failure: StreamError) -> None:
        """Count a skipped stream.

        Raises:
            FailureLimitError: More sources were skipped than `max_failures`.
        """
        dataset = self.ranks.dataset
        group = failure.lane // dataset._rules.lanes_of_a_group
        # By its key: in a mix the index of a source moves up when the list of an earlier dataset grows.
        self._failed.setdefault(group, set()).add(dataset._source_lists.key(failure.source_index))
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
