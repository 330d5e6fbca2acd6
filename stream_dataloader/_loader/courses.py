"""What is read of each member of a batch in an iteration, and how far.

::

    member 0            0 1 2 3 4 |                ends with the epoch, or is padded behind its end
    member 1, endless   7 8 9 10 11 | 12 13 ...    its own epoch goes on from one epoch of the loader to the next
    loader's step       0 1 2 3 4 |  0  1

Guarantee: a record is that of all members after the same batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from stream_dataloader._loader.position import LoaderPosition
from stream_dataloader._ranks.agreement import Steps
from stream_dataloader._reading.share import Start
from stream_dataloader._schedule.progress import KEPT_RECORDS, HandedOut, Progress
from stream_dataloader._schedule.snapshot import PackedSnapshot, nothing_left
from stream_dataloader.dataset import StreamDataset


class Course:
    """What is read of one member in an iteration, and how far.

    Args:
        dataset: What is read.
        position: Where the member stands, from one epoch to the next.
        progress: Follows its epoch.
        readers: Which of the readers are its own.
        step: The loader's step at which it begins.
        begin: Where its readers begin.
        over: It has ended before.

    Attributes:
        steps: Decides which steps belong to its epoch.
        ended: The first step for which it has nothing; None as long as it has not ended.
        goes_on: It never ends, and is asked only for steps that are delivered.
    """

    def __init__(
        self,
        dataset: StreamDataset,
        position: LoaderPosition,
        progress: Progress,
        readers: slice,
        step: int,
        begin: Start,
        *,
        over: bool,
    ) -> None:
        self.dataset = dataset
        self.position = position
        self.progress = progress
        self.readers = readers
        self.begin = self._of_step(begin, step)
        self.steps: Steps = Steps()
        self.ended = step - 1 if over else None
        self.goes_on = False
        self._ahead = progress.step - step  # an endless one counts its steps over all epochs

    def is_over(self, step: int) -> bool:
        """Whether it has ended before a step that comes next."""
        return self.ended is not None and self.ended < step

    def record(self, step: int) -> PackedSnapshot | None:
        """Where it stood before a step of the loader; None if it had ended."""
        return None if self.is_over(step) else self.progress.record(step + self._ahead)

    def start(self, step: int, record: PackedSnapshot | None) -> Start:
        """Where its readers go on from a record."""
        rules = self.dataset.rules
        if record is None:
            return self._of_step(Start(self.progress.epoch, nothing_left(rules)), step)
        return self._of_step(Start(self.progress.epoch, record.unpack(rules) if record.step else None), step)

    @staticmethod
    def _of_step(start: Start, step: int) -> Start:
        """The same for readers, who all count the loader's steps: those of one step write to one slot."""
        return start if start.resume is None else start._replace(resume=start.resume._replace(step=step))


class MembersRecord(NamedTuple):
    """Where all members stand between two steps.

    Attributes:
        step: The loader's step that comes next.
        members: Where each member stands in its own epoch; None of one that has ended.
    """

    step: int
    members: tuple[PackedSnapshot | None, ...]


class MembersProgress(HandedOut):
    """Follows an epoch of several members as it is delivered.

    Args:
        epoch: The epoch's number.
        step: Where it begins.
        courses: The members.

    Attributes:
        epoch: The epoch's number.
        step: Number of steps delivered.
    """

    def __init__(self, epoch: int, step: int, courses: Sequence[Course]) -> None:
        self.epoch = epoch
        self.step = self._first = step
        self.courses = courses

    def advance(self, reports: Sequence[Any]) -> None:
        """Follow one more step; see `Progress`."""
        for course in self.courses:
            if course.ended is None:
                course.progress.advance(reports[course.readers])
        self.step += 1

    def record(self, step: int | None = None) -> MembersRecord:
        """Where the epoch stands, or stood before `step`.

        Raises:
            ValueError: That is too long ago, or was not delivered yet.
        """
        if step is None:
            step = self.step - self._held
        first = max(self._first, self.step - KEPT_RECORDS + 1)
        if not first <= step <= self.step:
            raise ValueError(f"the state as of step {step} is not known; known are steps {first} to {self.step}")
        return MembersRecord(step, tuple(course.record(step) for course in self.courses))
