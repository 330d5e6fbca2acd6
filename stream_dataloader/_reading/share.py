"""`Reading`: how one member of a batch is read in a session; `Share`: what one of its readers reads of it.

Guarantee: all readers of a member, in whichever processes, are told the same but for their number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from stream_dataloader._assembly.slot_writer import Slots
from stream_dataloader._reading.activity import ActivityBoard
from stream_dataloader._reading.meters import Meters
from stream_dataloader._reading.plan import ReadingPlan
from stream_dataloader._reading.source_queue import SourceQueue
from stream_dataloader._schedule.order import Order
from stream_dataloader._schedule.rules import Reader, deal_members
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
class Reading:
    """How one member of a batch is read in a session: what all of its readers have in common.

    Attributes:
        plan: What is read, and how.
        start: Where to begin; None: with the next epoch of the process that iterates.
        readers: Who reads which lanes of the batch, of all members.
        board: Where to say what is being done.
        meters: Where to count what is done.
        member: The member whose lanes are read.
        whole_windows: Windows are wanted lane by lane, for a `collate_fn`: those that streams cut themselves as they
            are, others in one piece each.
        slots: Where windows go; None: with the parts.
        recovery: What is different after a worker died.
        locally: It is read in the thread that asks for batches.
    """

    plan: ReadingPlan
    start: Start | None
    readers: Sequence[Reader]
    board: ActivityBoard
    meters: Meters
    member: int = 0
    whole_windows: bool = False
    slots: Slots | None = None
    recovery: Recovery = NO_RECOVERY
    locally: bool = False

    @classmethod
    def alone(cls, plan: ReadingPlan, start: Start | None, num_workers: int = 0) -> Reading:
        """The reading of a dataset by itself, which no loader looks at."""
        readers = deal_members([plan.rules.lanes], [num_workers])
        board, meters = ActivityBoard(readers, shared=False), Meters(range(len(readers)), shared=False)
        return cls(plan, start, readers, board, meters, locally=not num_workers)

    def order(self, epoch: int) -> Order:
        """The order in which an epoch's sources are granted."""
        resume = self.resume
        granted = () if resume is None else (resume.cursors, resume.returned)
        return Order(self.plan.rules, epoch, self.plan.scheduled_lengths, *granted)

    @property
    def resume(self) -> Snapshot | None:
        """Where in the epoch to begin; None at its beginning."""
        return None if self.start is None else self.start.resume

    @cached_property
    def own(self) -> list[tuple[int, Reader]]:
        """The member's readers, with their numbers among all."""
        return [(number, reader) for number, reader in enumerate(self.readers) if reader.member == self.member]

    @cached_property
    def killers(self) -> dict[int, int]:
        """Sources of the member that killed their worker; see `Recovery`."""
        return {source: time for (member, source), time in self.recovery.killers.items() if member == self.member}

    @cached_property
    def marks_ends(self) -> bool:
        """Whether streams' last steps are marked: in windows for a `collate_fn` nobody could see it."""
        return self.plan.mark_ends and not self.whole_windows


class Share(NamedTuple):
    """One reader's share of what is read.

    Attributes:
        reading: What is read, and how.
        number: The reader's number, among those of all members.
        reader: Who it is, and its lanes as the batch numbers them.
        queue: Where sources come from.
    """

    reading: Reading
    number: int
    reader: Reader
    queue: SourceQueue

    @property
    def lanes(self) -> range:
        """Its lanes, as the schedule of its member numbers them."""
        first = self.reading.own[0][1].lanes.start
        return range(self.reader.lanes.start - first, self.reader.lanes.stop - first)
