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
from stream_dataloader._schedule.sections import Cuts, lengths_in
from stream_dataloader._schedule.snapshot import Snapshot, beginning

__all__ = ["place_later"]


def place_later(member: Member, start: Start, count: int) -> tuple[Start, int] | None:
    """The place `count` batches on, or the next epoch's beginning, and how many it were; None if only reading tells.

    That is so without lengths or with streams that may be skipped, with windows that streams cut themselves, and where
    the passes of an endless epoch differ in their sections.
    """
    reading = member.ranks.reading
    rules, scheduled, lengths = reading.rules, reading.plan().scheduled_lengths, reading.lengths
    endless = rules.padding_mode == "cycle"
    if lengths is None or (lengths < 0).any() or rules.time_steps is None or not rules.deterministic:
        return None
    total = None if endless else known_count(reading, start.epoch)
    if reading.on_error != "raise" or (endless and isinstance(scheduled, Cuts)):
        return None
    place = start.resume or beginning(rules)
    if total is not None and place.step + count >= total:
        return Start(start.epoch + 1), total - place.step
    known, order = lengths_in(scheduled, start.epoch), Order(rules, start.epoch, scheduled)
    assert known is not None
    firsts = scheduled.starts(start.epoch) if isinstance(scheduled, Cuts) else None

    def moved(place: Snapshot, sign: int) -> Snapshot:
        """The place with items counted from each section's first one, or from the source's."""
        if firsts is None:
            return place
        lanes = []
        for lane in place.lanes:
            first = 0 if lane.grant == NONE else sign * int(firsts[order[lane.grant].source])
            lanes.append(lane._replace(items=lane.items + first, position=lane.position + first))
        return place._replace(lanes=tuple(lanes))

    replay = Replay(rules, order, known, moved(place, -1))
    replay.skip_to(place.step + count)
    return start._replace(resume=moved(replay.place(), 1)), count
