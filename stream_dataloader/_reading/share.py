"""`Share`: what one reader, a worker or one of its threads, reads of an epoch, and how after a worker died."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from stream_dataloader._assembly.slot_writer import Slots
from stream_dataloader._reading.activity import ActivityBoard
from stream_dataloader._reading.meters import Meter, unread_meter
from stream_dataloader._reading.plan import ReadingPlan
from stream_dataloader._reading.source_queue import SourceQueue
from stream_dataloader._schedule.snapshot import Snapshot


class Start(NamedTuple):
    """Where an epoch begins to be read.

    Attributes:
        epoch: The epoch's number.
        resume: The place in it; None at its beginning.
    """

    epoch: int
    resume: Snapshot | None = None


class Recovery(NamedTuple):
    """What workers do differently after one of them died.

    Attributes:
        killers: Sources that killed their worker, each with its member, and the time from which on they are not to be
            read; -1: nor opened.
        cautious: Open no source early, so that one that kills its worker is known for sure.
        one_by_one: A worker's threads take turns, as it is not known which of their sources it was.
    """

    killers: Mapping[tuple[int, int], int]
    cautious: bool
    one_by_one: bool = False


NO_RECOVERY = Recovery({}, cautious=False)


@dataclass(frozen=True)
class Share:
    """One reader's share of an epoch.

    Attributes:
        queue: Where sources come from; its `epoch` is the epoch read.
        lanes: Its lanes, consecutive, as the schedule numbers them.
        batch_lanes: The same lanes, as the batch numbers them: there may be those of other members before.
        member: The member of the batch whose lanes they are.
        worker_id: The worker's number.
        reader: The reader's own number, among those of all workers.
        whole_windows: Windows are wanted lane by lane, for a `collate_fn`: those that streams cut themselves as they
            are, others in one piece each.
        board: Where to say what is being done.
        locally: The worker is the main process.
        slots: Where the slots are, if parts are to go there.
        resume: Where in the epoch to begin; None at its beginning.
        recovery: What is different after a worker died.
        meter: Where to count what is done.
    """

    queue: SourceQueue
    lanes: range
    batch_lanes: range
    member: int
    worker_id: int
    reader: int
    whole_windows: bool
    board: ActivityBoard
    locally: bool = False
    slots: Slots | None = None
    resume: Snapshot | None = None
    recovery: Recovery = NO_RECOVERY
    meter: Meter = field(default_factory=unread_meter)

    @property
    def killers(self) -> dict[int, int]:
        """Sources of its member that killed their worker; see `Recovery`."""
        return {source: time for (member, source), time in self.recovery.killers.items() if member == self.member}

    def marks_ends(self, plan: ReadingPlan) -> bool:
        """Whether streams' last steps are marked: in windows for a `collate_fn` nobody could see it."""
        return plan.mark_ends and not self.whole_windows
