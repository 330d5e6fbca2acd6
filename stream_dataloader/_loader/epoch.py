"""`Epoch`: what is read between two `iter()`s, of each member of the batch, and how far it was delivered.

::

    member 0            0 1 2 3 4 |                ends with the epoch, or is padded behind its end
    member 1, endless   7 8 9 10 11 | 12 13 ...    its own epoch goes on from one epoch of the loader to the next
    loader's step       0 1 2 3 4 |  0  1

Most batches have one member, and an epoch is that member's. A run that is read in epochs of n batches is one `Epoch`.

Guarantee: a record is that of all members after the same batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from stream_dataloader._loader.member import Member
from stream_dataloader._ranks.agreement import Steps
from stream_dataloader._reading.plan import Start
from stream_dataloader._schedule.position import EpochsOfRun
from stream_dataloader._schedule.snapshot import PackedSnapshot, Progress, nothing_left

_KEPT_RECORDS = 64  # trainers fetch ahead: the state can be had as of so many batches ago


class Course:
    """What is read of one member in an epoch, and how far.

    Args:
        member: The member.
        start: Where it begins.
        readers: Which of the readers are its own.
        ended: It has nothing for the step that comes next.
        goes_on: It never ends, and goes on in the loader's next epoch: it is asked only for steps that are delivered.
    """

    def __init__(self, member: Member, start: Start, readers: slice, *, ended: bool, goes_on: bool) -> None:
        self.member = member
        self.dataset = member.ranks.reading
        self.readers = readers
        parts = readers.stop - readers.start
        self.progress = Progress(self.dataset.rules, start.epoch, start.resume, parts)  # of its own epoch
        self.steps = Steps()  # decides which steps belong to that
        self.ended = ended
        self.goes_on = goes_on

    def start(self, record: PackedSnapshot | None) -> Start:
        """Where it is from a record on; None: it had ended."""
        rules = self.dataset.rules
        if record is None:
            return Start(self.progress.epoch, nothing_left(rules))
        return Start(self.progress.epoch, record.unpack(rules) if record.step else None)


class Record(NamedTuple):
    """Where all members stand between two steps."""

    step: int  # the loader's step that comes next
    members: tuple[PackedSnapshot | None, ...]  # None: it has ended


class Epoch:
    """An epoch as it is delivered.

    Args:
        number: Its number, or that of the run.
        step: Where it begins.
        courses: What is read of each member.
        stop: The step before which it ends; None if unknown until read, or it is a run.
    """

    def __init__(self, number: int, step: int, courses: Sequence[Course], stop: int | None = None) -> None:
        self.number = number
        self.courses = courses
        self.stop = stop
        self.epochs: EpochsOfRun | None = None  # of n batches, in which a run is read
        self.finished = False  # the end was seen
        self.is_ahead = self._end_held = False  # the last batch, or the end, was taken and not handed out yet
        self._records: deque[Record] = deque(maxlen=_KEPT_RECORDS)
        self._keep(step)

    def _keep(self, step: int) -> None:
        members: list[PackedSnapshot | None] = []
        for course in self.courses:
            members.append(None if course.ended else course.progress.last)
        self.last = Record(step, tuple(members))
        self._records.append(self.last)
        self.step = step  # the last, as Ctrl-C may come between any two lines: the step's record is there

    def advance(self, reports: Sequence[Any]) -> None:
        """Follow one more step."""
        for course in self.courses:
            if not course.ended:
                course.progress.advance(reports[course.readers])
        self._keep(self.step + 1)

    def hold(self, batch: bool, end: bool) -> None:
        """Say what was taken and not handed out yet: the last batch, the epoch's end."""
        self.is_ahead, self._end_held = batch, end

    @property
    def end_is_ahead(self) -> bool:
        """The epoch's end was seen and not handed out yet."""
        return self.finished and self._end_held

    @property
    def over(self) -> bool:
        """The epoch is over for the user too."""
        return self.finished and not self._end_held

    def record(self, step: int | None = None) -> Record:
        """Where the epoch stands for the user, or stood before `step`."""
        if step is None:
            step = self.step - self.is_ahead
        record: Record
        records = tuple(self._records)  # another thread may be reading on
        for record in reversed(records):
            if record.step == step:
                return record
        raise ValueError(
            f"the state as of step {step} is not known: steps {records[0].step} to {self.step} are; save it sooner, or "
            "ask the batch for it"
        )
