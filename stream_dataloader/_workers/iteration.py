"""One epoch being read: makes batches of the parts of all workers, and knows where it ends.

Guarantees: a step is delivered if and only if its mask has a step set (with `"drop"`, also no lane may idle). An error
is raised in place of the batch it belongs to, after all earlier batches. Of several errors in one step, the one of the
lowest lane is raised.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from stream_dataloader._assembly.frames import FrameWatch
from stream_dataloader._assembly.judge import Judge
from stream_dataloader._assembly.lane_windows import LaneWindows
from stream_dataloader._assembly.part import Part, have_data
from stream_dataloader._assembly.regroup import Regrouper
from stream_dataloader._assembly.slots import Slot
from stream_dataloader._loader.position import LoaderPosition
from stream_dataloader._ranks.agreement import Steps
from stream_dataloader._reading.reader import warn_of_skip
from stream_dataloader._schedule.progress import Progress
from stream_dataloader._schedule.rules import Reader
from stream_dataloader._schedule.snapshot import PackedSnapshot
from stream_dataloader._workers.collector import StepCollector
from stream_dataloader._workers.tally import Tally, clock
from stream_dataloader.batch import StreamBatch
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import StaleIteratorError, StreamError
from stream_dataloader.protocols import CollateFn

NEWER_HAS_BEGUN = (
    "a newer iter() of this StreamDataLoader has begun, or a state was loaded, which ended this iteration; to read "
    "twice at once, build a StreamDataLoader for each"
)


class Output(NamedTuple):
    """How what is yielded is made.

    Attributes:
        collate_fn: Makes it of the lanes' windows; None yields `StreamBatch`es.
        finish: The last touch to it.
        watch: Looks at a first batch of windows that streams cut; None if there is none to look at.
    """

    collate_fn: CollateFn | None
    finish: Callable[[Any], Any]
    watch: FrameWatch | None


class Iteration:
    """An iterator over the batches of one epoch.

    Args:
        dataset: What is read.
        collector: The workers' parts.
        progress: Follows what is delivered.
        position: Where the loader stands.
        steps: Decides which steps belong to the epoch.
        output: How what is yielded is made.
        tally: Counts what is handed out.

    Attributes:
        epoch: The epoch's number.
        closed: It is over, or was left.
        stale: A newer iteration of the same loader has begun.
    """

    def __init__(
        self,
        dataset: StreamDataset,
        collector: StepCollector,
        progress: Progress,
        position: LoaderPosition,
        steps: Steps,
        output: Output,
        tally: Tally,
    ) -> None:
        self.epoch = progress.epoch
        self.closed = False
        self.stale = False
        self._dataset = dataset
        self._collector = collector
        self._progress = progress
        self._position = position
        self._steps = steps
        self._output = output
        self._tally = tally
        self._watch = output.watch
        self._needs_layout = output.collate_fn is None or dataset.rules.time_steps is not None
        self._readers = collector.readers
        self._judge = Judge(self._readers, [dataset.sources])
        self._regrouper = self._regrouper_of(self._readers)
        self._windows = LaneWindows(self._readers, dataset.rules.time_steps, [dataset.fill_value], self._judge)
        self._skipped: set[int] = set()
        self._owner = os.getpid()
        _running.add(self)

    def _regrouper_of(self, readers: Sequence[Reader]) -> Regrouper:
        dataset = self._dataset
        time_steps, mark_ends = dataset.rules.time_steps, dataset.mark_ends
        return Regrouper(readers, time_steps, [dataset.fill_value], self._judge, mark_ends=mark_ends)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        begin, step = clock(), self._progress.step
        parts, slot = self._next_parts()
        judge = self._judge
        if not any(parts) and judge.layout is None and self._needs_layout:
            # nothing was read here yet: as the loaded state has it, or other ranks
            judge.layout = self._position.layout or self._steps.layout()
        if self._output.collate_fn is None:
            batch = self._regrouped(self._regrouper, step, parts, slot)
            batch.remember(functools.partial(self._position.state_of, self._progress, self._record()))
            self._note_layout()
            self._count(begin, step, parts)
            return self._output.finish(batch)
        windows = self._windows.of(parts, slot)
        self._note_layout()
        self._count(begin, step, parts)
        try:
            collated = self._output.collate_fn(windows)
        except StopIteration as error:  # would look like the epoch's end
            raise RuntimeError("collate_fn raised StopIteration") from error
        return self._output.finish(collated)

    def _note_layout(self) -> None:
        self._position.layout = self._judge.layout or self._position.layout
        self._steps.note_layout(self._position.layout)

    def _count(self, begin: int, step: int, parts: Sequence[Part | None]) -> None:
        self._tally.batch(begin, step, parts, self._judge.layout, self._dataset.rules)

    def _regrouped(
        self, regrouper: Regrouper, step: int, parts: Sequence[Part | None], slot: Slot | None
    ) -> StreamBatch:
        batch = regrouper.batch(step, self.epoch, parts, slot)
        if self._watch is not None and self._watch.look(self._judge.layout, batch):
            self._watch = None
        return batch

    def _record(self) -> PackedSnapshot:
        return self._progress.record(self._progress.step)

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
                    yield self._output.finish(self._regrouped(regrouper, step, parts[of_worker], slot))

    def _next_parts(self) -> tuple[list[Part | None], Slot | None]:
        """Each reader's part of the next step, None for one that has ended; and the step's slot."""
        if self.stale:
            raise StaleIteratorError(NEWER_HAS_BEGUN)
        if self.closed:
            raise StopIteration
        step = self._progress.step
        try:
            sent = self._collector.collect(self._progress)
            self._note_failures(sent)
            parts = [None if part is None or part.end else part for part in sent]
            slot = self._collector.slot(step) if any(parts) else None
            rules = self._dataset.rules
            delivered = self._steps.delivers(step, have_data(parts, rules.padding_mode, rules.lanes))
            if delivered:
                self._raise_first_error(parts, slot)
        except BaseException:
            self.close()
            raise
        if not delivered:
            self._progress.finished = True
            self.close()
            raise StopIteration
        self._progress.advance([None if part is None else part.reports for part in sent])
        return parts, slot

    def _note_failures(self, parts: list[Part | None]) -> None:
        for part in parts:
            for report in () if part is None else part.failures:
                failure = report.unpack()
                assert isinstance(failure, StreamError)
                self._position.note_failure(failure)
                if failure.source_index not in self._skipped:
                    self._skipped.add(failure.source_index)
                    self._tally.skipped += 1
                    warn_of_skip(failure)

    def _raise_first_error(self, parts: list[Part | None], slot: Slot | None) -> None:
        """Raise the error of the lowest lane, if there is one."""
        errors: list[tuple[int, Exception]] = []
        for part in parts:
            if part is not None and part.faults:
                errors += [(fault.lane, fault.error.unpack()) for fault in part.faults]
        if self._output.collate_fn is None:
            try:
                self._judge.judge(parts, slot)
            except StreamError as misfit:
                errors.append((misfit.lane, misfit))
        if errors:
            raise min(errors, key=lambda error: error[0])[1]

    def close(self) -> None:
        """End the iteration: workers that are not kept end, streams are closed."""
        if not self.closed and self.is_own:  # not in a process the user forked meanwhile
            self.closed = True
            self._tally.end()
            self._steps.close()
            self._collector.close()

    def __del__(self) -> None:
        if hasattr(self, "_owner"):
            self.close()


_running: weakref.WeakSet[Iteration] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End what is still being read while threads can be started and joined, which `__del__` could not any more."""
    for iteration in list(_running):
        iteration.close()
