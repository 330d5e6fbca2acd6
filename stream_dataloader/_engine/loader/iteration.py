"""One epoch being read: makes batches of the parts of all workers, and finds the epoch's end.

Guarantees: a step is delivered if and only if its mask has a step set (with `"drop"`, also no lane may idle). An error
is raised in place of the batch it belongs to, and of several the one of the lowest lane. An iteration that is dropped
ends soon.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from stream_dataloader._engine.assembly.lane_windows import LaneWindows
from stream_dataloader._engine.assembly.layout_check import LayoutCheck
from stream_dataloader._engine.assembly.part import Part, are_late, have_data
from stream_dataloader._engine.assembly.regroup import Regrouper
from stream_dataloader._engine.assembly.slots import Slot
from stream_dataloader._engine.loader.collector import StepCollector
from stream_dataloader._engine.loader.epoch import Epoch
from stream_dataloader._engine.loader.position import LoaderPosition
from stream_dataloader._engine.memory.endings import Ending
from stream_dataloader._engine.notices import warn
from stream_dataloader._engine.ranks.agreement import AgreedSteps, Steps
from stream_dataloader._engine.reading.reader import warn_of_skip
from stream_dataloader._engine.schedule.rules import Reader
from stream_dataloader._engine.workers.batch_counts import BatchCounts
from stream_dataloader._engine.workers.session import Session
from stream_dataloader.batch import StreamBatch
from stream_dataloader.errors import GapError, StreamError, shorten

#: `collate_fn(windows)` gets the list of the B lanes' windows, in lane order.
CollateFn = Callable[[list[Any]], Any]


class Output(NamedTuple):
    """Form of an iterator's batches.

    Attributes:
        collate_fn: Makes a batch of the lanes' windows; None yields `StreamBatch`es.
        parts: Yield the parts of workers, without regrouping, and without waiting for other ranks.
        whole_steps: Yield lists of all parts of a step.
        device: The device that batches are moved to, if any.
        finish: Called with each batch; its result is yielded.
    """

    collate_fn: CollateFn | None
    parts: bool
    whole_steps: bool
    device: torch.device | None
    finish: Callable[[Any], Any]


def _why_no_batch(epoch: Epoch) -> str:
    """Return why an epoch ended before its first batch, although no source was skipped, and what to do."""
    sources = epoch.dataset.sources  # a wrong path, or a generator that forgot to yield
    look = f"look at what open_stream yields for the first source, {shorten(sources[0])}"
    if epoch.dataset._rules.padding_mode == "drop":
        return (
            'padding_mode="drop" ends it with the first idle lane, and one was idle in the first window; use a smaller '
            f'batch_size or time_steps, or padding_mode="zeros", or {look}'
        )
    return f"none of its {len(sources)} streams yielded an item; {look}"


class Iteration:
    """An iterator over the batches of one epoch, or of a run that is read in epochs."""

    def __init__(
        self, epoch: Epoch, collector: StepCollector, position: LoaderPosition, output: Output, counts: BatchCounts
    ) -> None:
        self.epoch = epoch
        self.output = output
        self.closed = False
        self._collector = collector
        self._position = position
        self._counts = counts
        dataset, time_steps = epoch.dataset, epoch.dataset._window_steps
        self._layout_check = LayoutCheck(collector.readers, dataset.sources)
        self._make: Regrouper | LaneWindows = self._regrouper_of(collector.readers)
        if output.collate_fn is not None:
            self._make = LaneWindows(collector.readers, time_steps, dataset.fill_value, self._layout_check)
        self._pads_by_value = output.collate_fn is not None and time_steps is None
        self._noted: Any = ...  # the layout that was noted last; None is a layout that is not known
        self._skipped: set[int] = set()
        self._of_step: Iterator[StreamBatch] = iter(())
        self._owner = os.getpid()
        ends = collector.elsewhere or isinstance(epoch.steps, AgreedSteps)
        self.ending = Ending(self, functools.partial(_end, epoch.steps, collector.elsewhere)) if ends else None

    def _regrouper_of(self, readers: Sequence[Reader]) -> Regrouper:
        dataset = self.epoch.dataset
        how: Any = {"mark_ends": bool(dataset.mark_ends), "context": dataset.context}
        return Regrouper(readers, dataset._window_steps, dataset.fill_value, self._layout_check, **how)

    def __iter__(self) -> Iterator[Any]:
        return self

    def begin_epoch(self) -> None:
        """Begin the next epoch of the same run."""
        self._collector.begin_epoch()

    def __next__(self) -> Any:
        begin, step, output, layout_check = self._counts.wait(), self.epoch.step, self.output, self._layout_check
        sent, parts, slot = self._next_parts()
        try:
            if layout_check.layout is None and not any(parts) and not self._pads_by_value:
                # This rank has read nothing yet. To pad its batch it needs the layout of a loaded state or other ranks.
                layout_check.layout = self._position.layout or self.epoch.steps.layout()
            made: Any
            if isinstance(self._make, Regrouper):
                # The record is bound now, so that later batches do not change this batch's state.
                state = functools.partial(self._position.state_of, self.epoch, self.epoch.last)
                made = self._make.batch(step, self.epoch.number, parts, slot, state)
            else:
                made = self._make.of(parts, slot)
            # By identity: comparing layouts would cost time in every batch; to note an equal one again does no harm.
            if layout_check.layout is not self._noted:
                self._note_layout()
            self._counts.batch(begin, step, sent, layout_check.layout)
            if output.collate_fn is not None:
                try:
                    made = output.collate_fn(made)
                except StopIteration as error:  # raised from `__next__` it would look like the epoch's end
                    raise RuntimeError("collate_fn raised StopIteration") from error
            return output.finish(made)
        except BaseException:
            # The batch is lost with this iteration, so a state must not count it as delivered.
            self.epoch.take_back()
            self.close()
            raise

    def _note_layout(self) -> None:
        states = self._position.states
        self._noted = self._layout_check.layout
        states.layout = self._noted or states.layout
        self.epoch.steps.note_layout(states.layout)

    @property
    def is_own(self) -> bool:
        """Whether it was begun in this process, and not before a fork."""
        return self._owner == os.getpid()

    def parts(self, steps: int | None = None) -> Iterator[StreamBatch]:
        """Yield each worker's part of each step, in order, to the end or for a number of steps."""
        return itertools.chain.from_iterable(self.steps_of_parts(steps))

    def steps_of_parts(self, steps: int | None = None) -> Iterator[Iterable[StreamBatch]]:
        """Yield the parts of each step together, to the end or for a number of steps."""
        # A worker may have several readers. Its part of a step is that of all of them, side by side.
        regroupers = []
        numbered = enumerate(self._collector.readers)
        for _, group in itertools.groupby(numbered, lambda numbered: numbered[1].worker_id):
            numbers, readers = zip(*group, strict=True)
            regroupers.append((self._regrouper_of(readers), slice(numbers[0], numbers[-1] + 1)))
        stop = None if steps is None else self.epoch.step + steps
        while self.epoch.step != stop:
            begin, step = self._counts.wait(), self.epoch.step
            try:
                sent, parts, slot = self._next_parts()
            except StopIteration:
                return
            self._counts.batch(begin, step, sent, self._layout_check.layout)
            self._of_step = self._parts_of(step, parts, slot, regroupers)
            yield self._of_step

    def rest_of_step(self) -> list[StreamBatch]:
        """Take the parts of the last step that were not yielded yet; a state is of whole steps."""
        return list(self._of_step)

    def _parts_of(
        self,
        step: int,
        parts: list[Part | None],
        slot: Slot | None,
        regroupers: Sequence[tuple[Regrouper, slice]],
    ) -> Iterator[StreamBatch]:
        for regrouper, of_worker in regroupers:
            # A worker whose lanes are idle has no part; an empty batch would look like data to a per-worker model.
            if not any(parts[of_worker]):
                continue
            try:
                made = self.output.finish(regrouper.batch(step, self.epoch.number, parts[of_worker], slot))
            except BaseException:
                self.epoch.take_back()  # the rest of the step is lost with this iteration
                self.close()
                raise
            yield made

    def _next_parts(self) -> tuple[Sequence[Part | None], list[Part | None], Slot | None]:
        """Return what each reader sent for the next step, its part of it, and the step's slot.

        None stands for a reader that has ended, and for a part without an item.
        """
        if self.closed:
            raise self.epoch.ending()
        epoch, delivered = self.epoch, False
        parts: list[Part | None]
        slot: Slot | None = None
        try:
            rules = epoch.dataset._rules
            while True:
                sent, parts = self._collector.collect(epoch), []
                for part in sent:
                    if part is not None and part.failures:
                        self._note_failures(part)
                    # A part without runs is that of a reader that ends here, or whose streams all had no item yet.
                    parts.append(None if part is None or not (part.contents.runs or part.faults) else part)
                has_data = have_data(sent, rules.padding_mode, rules.lanes)
                if has_data or not are_late(sent):
                    break
                # No lane has an item yet, so there is nothing to deliver. The step is passed over and gets no number,
                # because numbers of batches must not depend on how long a live source took.
                epoch.pass_over([None if part is None else part.reports for part in sent])
                self._collector.pass_over(epoch)
                self._counts.pass_over(sent)
            if delivered := epoch.steps.delivers(epoch.step, has_data):
                slot = self._collector.slot(epoch.step + self._collector.passed_over) if any(parts) else None
                self._raise_first_error(parts, slot)
                # Advance only now: after an error, the state is still that of the last delivered batch.
                epoch.advance([None if part is None else part.reports for part in sent])
        except BaseException:
            # An error or Ctrl-C may have come in the middle of a step, so this iteration cannot go on.
            self.close()
            raise
        if not delivered:
            epoch.finished = True
            self.close()
            if not epoch.step and not self._skipped:
                warn(f"the epoch has no batch, as {_why_no_batch(epoch)}", 4)
            raise StopIteration
        return sent, parts, slot

    def _note_failures(self, part: Part) -> None:
        for report in part.failures:
            failure = report.unpack()
            assert isinstance(failure, StreamError)
            if isinstance(failure, GapError):  # no source was skipped, and the worker has logged the gap
                self._position.failures.append(failure)
                self._counts.totals["gaps"] += 1
                continue
            self._position.note_failure(failure)
            if failure.source_index not in self._skipped:
                self._skipped.add(failure.source_index)
                self._counts.totals["skipped"] += 1
                warn_of_skip(failure)

    def _raise_first_error(self, parts: list[Part | None], slot: Slot | None) -> None:
        errors: list[tuple[int, Exception]] = []
        for part in parts:
            if part is not None and part.faults:
                errors += [(fault.lane, fault.error.unpack()) for fault in part.faults]
        if self.output.collate_fn is None:  # windows for a `collate_fn` may differ in layout, a batch may not
            try:
                self._layout_check.check(parts, slot)
            except StreamError as misfit:
                errors.append((misfit.lane, misfit))
        # The lowest lane wins, whichever worker reported first. Otherwise the error would depend on timing.
        if errors:
            raise min(errors, key=lambda error: error[0])[1]

    def close(self) -> None:
        """End the iteration: workers that are not kept end, streams are closed."""
        if self.is_own:  # a process that the user forked must not end the parent's workers
            self.closed = True
            self._counts.end()
            # Other ranks and workers come first, as they may wait for this process. Closing streams here may take long.
            if self.ending is not None:
                self.ending.now()
            self._collector.close()


def _end(steps: Steps, sessions: Sequence[Session]) -> None:
    """End the iteration's work in workers and other ranks; may be called again."""
    steps.close()
    for session in sessions:
        session.close()
