"""Computation of an epoch's place some batches later, without reading them.

Guarantee: reading these batches would lead to the same place.
"""

from __future__ import annotations

from stream_dataloader._engine.loader.states import States
from stream_dataloader._engine.ranks.ranks import known_count
from stream_dataloader._engine.schedule.order import Order
from stream_dataloader._engine.schedule.place import Place
from stream_dataloader._engine.schedule.replay import Replay

__all__ = ["place_later"]


def place_later(states: States, place: Place, count: int) -> tuple[Place, int] | None:
    """Compute the place `count` batches later, or the next epoch's beginning, and the number of batches skipped.

    Return None if this needs reading: without lengths, if streams may be skipped, or if they cut their own windows.
    """
    reading = states.ranks.dataset
    rules, scheduled = reading._rules, reading._plan().scheduled_lengths
    if scheduled is None or not reading._source_lists.knows_lengths or rules.time_steps is None:
        return None
    # First come, first served, the lane that gets a source is not known beforehand. And a stream that is skipped
    # changes what all lanes read after it.
    if not rules.deterministic or reading.on_error != "raise":
        return None
    total = None if rules.padding_mode == "cycle" else known_count(reading, place.epoch, place)
    # A place behind the last batch would resume to an epoch without batches.
    if total is not None and place.step + count >= total:
        return Place(place.epoch + 1), total - place.step
    replay = Replay(rules, Order(rules, place, scheduled), scheduled, place)
    replay.skip_to(place.step + count)
    return replay.place(), count
