"""Where an epoch stands some batches later, without reading them.

Guarantee: the place is that to which reading leads.
"""

from __future__ import annotations

from stream_dataloader._loader.epoch import Member
from stream_dataloader._ranks.ranks import known_count
from stream_dataloader._reading.plan import Start
from stream_dataloader._schedule.order import Order
from stream_dataloader._schedule.replay import Replay
from stream_dataloader._schedule.rules import NONE
from stream_dataloader._schedule.sections import Cuts
from stream_dataloader._schedule.snapshot import Snapshot, beginning

__all__ = ["place_later"]


def place_later(member: Member, start: Start, count: int) -> tuple[Start, int] | None:
    """The place `count` batches on, or the next epoch's beginning, and how many it were; None if only reading tells.

    It does without lengths, with streams that may be skipped, or that cut their own windows.
    """
    reading = member.ranks.reading
    rules, scheduled = reading.rules, reading.plan().scheduled_lengths
    if scheduled is None or not reading.source_lists.knows_lengths or rules.time_steps is None:
        return None
    if not rules.deterministic or reading.on_error != "raise":
        return None
    total = None if rules.padding_mode == "cycle" else known_count(reading, start.epoch)
    place = start.resume or beginning(rules)
    if total is not None and place.step + count >= total:
        return Start(start.epoch + 1), total - place.step
    order = Order(rules, start.epoch, scheduled)

    def moved(place: Snapshot, sign: int) -> Snapshot:
        """The place with items counted from each section's first one, or from the source's."""
        if not isinstance(scheduled, Cuts):
            return place
        lanes = []
        for lane in place.lanes:
            found = None if lane.grant == NONE else order[lane.grant]
            first = 0 if found is None else sign * scheduled.section(found.source, found.epoch).start
            lanes.append(lane._replace(items=lane.items + first, position=lane.position + first))
        return place._replace(lanes=tuple(lanes))

    replay = Replay(rules, order, scheduled, moved(place, -1))
    replay.skip_to(place.step + count)
    return start._replace(resume=moved(replay.place(), 1)), count
