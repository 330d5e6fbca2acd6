"""One epoch being read: makes batches of the parts of all workers, and knows where it ends.

Guarantees: a step is delivered if and only if its mask has a step set (with `"drop"`, also no lane may idle). An error
is raised in place of the batch it belongs to, after all earlier batches. Of several errors in one step, the one of the
lowest lane is raised. An iteration that is dropped ends soon afterwards, by a thread, as no Python code may run where
it is dropped (`_memory/endings.py`). Streams that were read here, without workers, go as the user's other objects do.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from stream_dataloader._assembly.frames import FrameWatch
from stream_dataloader._assembly.judge import Judge
from stream_dataloader._assembly.lane_windows import LaneWindows
from stream_dataloader._assembly.part import Part, have_data
from stream_dataloader._assembly.regroup import Regrouper
from stream_dataloader._assembly.slots import Slot
from stream_dataloader._loader.courses import Course, MembersProgress
from stream_dataloader._loader.members import AnyPosition, MembersPosition
from stream_dataloader._memory.endings import Ending
from stream_dataloader._ranks.agreement import AgreedSteps
from stream_dataloader._reading.reader import warn_of_skip
from stream_dataloader._schedule.progress import Progress
from stream_dataloader._schedule.rules import Reader
from stream_dataloader._workers.collector import StepCollector
from stream_dataloader._workers.feed import Feed
from stream_dataloader._workers.tally import Tally, clock
from stream_dataloader.batch import StreamBatch
from stream_dataloader.errors import StreamError
from stream_dataloader.protocols import CollateFn


class Output(NamedTuple):
    """What an iterator yields, and how that is made.

    Attributes:
        collate_fn: Makes it of the lanes' windows; None yields `StreamBatch`es.
        parts: It is not regrouped, and ranks do not wait for each other.
        device: Where it is moved to.
        finish: The last touch to it.
        watch: Looks at a first batch of windows that streams cut; None if there is none to look at.
    """

    collate_fn: CollateFn | None
    parts: bool
    device: torch.device | None
    finish: Callable[[Any], Any]
    watch: FrameWatch | None


class Iteration:
    """An iterator over the batches of one epoch.

    Args:
        courses: What is read, of each member of the batch.
        collector: The workers' parts.
        progress: Follows what is delivered.
        position: Where the loader stands.
        output: How what is yielded is made.
        tally: Counts what is handed out.

    Attributes:
        epoch: The epoch's number.
        closed: It is over, or was left.
        output: What it yields.
        ending: Ends what goes on elsewhere; None if nothing does.
    """

    def __init__(
        self,
        courses: Sequence[Course],
        collector: StepCollector,
        progress: Progress | MembersProgress,
        position: AnyPosition,
        output: Output,
        tally: Tally,
    ) -> None:
        self.epoch = progress.epoch
        self.closed = False
        self._courses = courses
        self._collector = collector
        self._progress = progress
        self._position = position
        self.output = output
        self._tally = tally
        self._watch = output.watch
        members = [course.dataset for course in courses]
        self._time_steps = members[0].rules.time_steps
        self._lanes = sum(member.rules.lanes for member in members)
        self._fill_values = [member.fill_value for member in members]
        self._marks_ends = all(member.mark_ends for member in members)
        self._needs_layout = output.collate_fn is None or self._time_steps is not None
        self._readers = collector.readers
        self._judge = Judge(self._readers, [member.sources for member in members])
        self._regrouper = self._regrouper_of(self._readers)
        self._windows = LaneWindows(self._readers, self._time_steps, self._fill_values, self._judge)
        self._skipped: set[tuple[int, int]] = set()
        self._owner = os.getpid()
        ends = collector.elsewhere or any(isinstance(course.steps, AgreedSteps) for course in courses)
        self.ending = Ending(self, functools.partial(_end, courses, collector.elsewhere)) if ends else None

    def _regrouper_of(self, readers: Sequence[Reader]) -> Regrouper:
        return Regrouper(
            readers,
            self._time_steps,
            self._fill_values,
            self._judge,
            mark_ends=self._marks_ends,
            numbered=isinstance(self._position, MembersPosition),
        )

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        begin, step = clock(), self._progress.step
        parts, slot = self._next_parts()
        judge = self._judge
        if not any(parts) and judge.layout is None and self._needs_layout:
            # nothing was read here yet: as the loaded state has it, or other ranks
            judge.layout = self._position.layout or self._layout_elsewhere()
        if self.output.collate_fn is None:
            batch = self._regrouped(self._regrouper, step, parts, slot)
            state_of: Any = self._position.state_of
            batch.remember(functools.partial(state_of, self._progress, self._progress.record(step + 1)))
            self._note_layout()
            self._count(begin, step, parts)
            return self.output.finish(batch)
        windows = self._windows.of(parts, slot)
        self._note_layout()
        self._count(begin, step, parts)
        try:
            collated = self.output.collate_fn(windows)
        except StopIteration as error:  # would look like the epoch's end
            raise RuntimeError("collate_fn raised StopIteration") from error
        return self.output.finish(collated)

    def _note_layout(self) -> None:
        for course in self._courses:
            layout = course.position.layout = self._judge.layout or course.position.layout
            course.steps.note_layout(layout)

    def _layout_elsewhere(self) -> Any:
        """What items look like on other ranks."""
        return next(course for course in self._courses if course.ended is None).steps.layout()

    def _count(self, begin: int, step: int, parts: Sequence[Part | None]) -> None:
        self._tally.batch(begin, step, parts, self._judge.layout, self._lanes, self._time_steps)

    def _regrouped(
        self, regrouper: Regrouper, step: int, parts: Sequence[Part | None], slot: Slot | None
    ) -> StreamBatch:
        batch = regrouper.batch(step, self.epoch, parts, slot)
        if self._watch is not None and self._watch.look(self._judge.layout, batch):
            self._watch = None
        return batch

    @property
    def is_own(self) -> bool:
        """It was begun in this process; not so in one that was forked since."""
        return self._owner == os.getpid()

    def parts(self, steps: int | None = None) -> Iterator[StreamBatch]:
        """The epoch not regrouped: each worker's part of each step, in order of step and worker.

        Args:
            steps: How many steps; None: to the epoch's end.
        """
        regroupers = []
        for _, group in itertools.groupby(enumerate(self._readers), lambda numbered: numbered[1].worker_id):
            numbers, readers = zip(*group, strict=True)
            regroupers.append((self._regrouper_of(readers), slice(numbers[0], numbers[-1] + 1)))
        stop = None if steps is None else self._progress.step + steps
        while self._progress.step != stop:
            begin, step = clock(), self._progress.step
            try:
                parts, slot = self._next_parts()
            except StopIteration:
                return
            self._count(begin, step, parts)
            for regrouper, of_worker in regroupers:
                if any(parts[of_worker]):
                    yield self.output.finish(self._regrouped(regrouper, step, parts[of_worker], slot))

    def _next_parts(self) -> tuple[list[Part | None], Slot | None]:
        """Each reader's part of the next step, None for one that has ended; and the step's slot."""
        if self.closed:
            raise StopIteration
        step = self._progress.step
        try:
            sent = self._collector.collect(self._progress)
            parts = self._delivered(step, sent)
            if parts is not None:
                slot = self._collector.slot(step) if any(parts) else None
                self._raise_first_error(parts, slot)
        except BaseException:
            self.close()
            raise
        if parts is None:
            self._progress.finished = True
            self.close()
            raise StopIteration
        self._progress.advance([None if part is None else part.reports for part in sent])
        return parts, slot

    def _delivered(self, step: int, sent: Sequence[Part | None]) -> list[Part | None] | None:
        """The parts of a step, None for lanes that are padded; None if the epoch ends before it.

        Endless members come last: what they have is delivered only where the epoch goes on.
        """
        parts = list(sent)
        for course in self._courses:
            if not course.goes_on:
                self._take(course, step, parts)
        if self._position.is_end(step, self._courses):
            return None
        for course in self._courses:
            if course.goes_on:
                self._take(course, step, parts)
        return parts

    def _take(self, course: Course, step: int, parts: list[Part | None]) -> None:
        """Put what is delivered of a member in place of what its readers sent, or find that it has ended."""
        own = parts[course.readers]
        if course.ended is None:
            self._note_failures(course, own)
            own = [None if part is None or part.end else part for part in own]
            rules = course.dataset.rules
            if not course.steps.delivers(course.progress.step, have_data(own, rules.padding_mode, rules.lanes)):
                course.ended = step
        parts[course.readers] = own if course.ended is None else [None] * len(own)

    def _note_failures(self, course: Course, parts: Sequence[Part | None]) -> None:
        for part in parts:
            for report in () if part is None else part.failures:
                failure = report.unpack()
                assert isinstance(failure, StreamError)
                course.position.note_failure(failure)
                skipped = course.readers.start, failure.source_index
                if skipped not in self._skipped:
                    self._skipped.add(skipped)
                    self._tally.skipped += 1
                    warn_of_skip(failure)

    def _raise_first_error(self, parts: list[Part | None], slot: Slot | None) -> None:
        """Raise the error of the lowest lane, if there is one."""
        errors: list[tuple[int, Exception]] = []
        for part in parts:
            if part is not None and part.faults:
                errors += [(fault.lane, fault.error.unpack()) for fault in part.faults]
        if self.output.collate_fn is None:
            try:
                self._judge.judge(parts, slot)
            except StreamError as misfit:
                errors.append((misfit.lane, misfit))
        if errors:
            raise min(errors, key=lambda error: error[0])[1]

    def close(self) -> None:
        """End the iteration: workers that are not kept end, streams are closed."""
        if self.is_own:  # not in a process the user forked meanwhile
            self.closed = True
            self._tally.end()
            if self.ending is not None:
                self.ending.now()
            self._collector.close()


def _end(courses: Sequence[Course], feeds: Sequence[Feed]) -> None:
    """End what goes on elsewhere; may be called again."""
    for course in courses:
        course.steps.close()
    for feed in feeds:
        feed.close()
