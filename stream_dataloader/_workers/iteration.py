"""One epoch being read: puts the parts of all workers together, step after step, and knows where it ends.

One FIFO a worker; a step is complete when each worker that has not ended has a part for it::

    worker 0   part 0 | part 1 | part 2 |                 lanes 0, 1
    worker 1   part 0 | part 1 |                          lanes 2, 3
                  |        |
               step 0   step 1   ...

Guarantees: a step is delivered if and only if its mask has a step set (with `"drop"`, also no lane may idle). An error
is raised in place of the batch it belongs to, after all earlier batches. Of several errors in one step, the one of the
lowest lane is raised.
"""

from __future__ import annotations

import atexit
import functools
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from stream_dataloader._assembly.part import Part
from stream_dataloader._assembly.regroup import Regrouper
from stream_dataloader._assembly.slots import Slot
from stream_dataloader._items.layout import Layout
from stream_dataloader._ranks.agreement import Steps
from stream_dataloader._reading.reader import warn_of_skip
from stream_dataloader._schedule.rules import lanes_of_worker
from stream_dataloader._state.snapshot import LaneReports, PackedSnapshot
from stream_dataloader._state.tracker import Progress
from stream_dataloader._workers.feed import Feed
from stream_dataloader.batch import StreamBatch
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import StaleIteratorError, StreamError, WorkerDeathError
from stream_dataloader.protocols import CollateFn

NEWER_HAS_BEGUN = (
    "a newer iter() of this StreamDataLoader has begun, or a state was loaded, which ended this iteration; to read "
    "twice at once, build a StreamDataLoader for each"
)


class Iteration:
    """An iterator over the batches of one epoch.

    Args:
        dataset: What is read.
        num_workers: How its lanes are dealt; 0 counts as 1.
        feed: The workers' parts.
        epoch: The epoch's number.
        collate_fn: Makes what is yielded of the lanes' windows; None yields `StreamBatch`es.
        finish: The last touch to what is yielded.
        note_failure: Is told of streams that were skipped.
        progress: Follows what is delivered.
        state: Makes a state of an epoch and a record of its progress.
        steps: Decides which steps belong to the epoch.
        restart: Has new workers go on from a record after one died, if it may; None if none can die.

    Attributes:
        epoch: The epoch's number.
        closed: It is over, or was left.
        stale: A newer iteration of the same loader has begun.
    """

    def __init__(
        self,
        dataset: StreamDataset,
        num_workers: int,
        feed: Feed,
        epoch: int,
        *,
        collate_fn: CollateFn | None,
        finish: Callable[[Any], Any],
        note_failure: Callable[[StreamError], None],
        progress: Progress,
        state: Callable[[int, PackedSnapshot], dict[str, Any]],
        steps: Steps,
        restart: Callable[[WorkerDeathError, PackedSnapshot], Feed | None] | None,
    ) -> None:
        workers = max(1, num_workers)
        self.epoch, self.closed, self.stale = epoch, False, False
        self._feed, self._rules, self._fill_value = feed, dataset.rules, dataset.fill_value
        self._sources, self._known = dataset.sources, dict[Layout, Layout]()
        self._needs_layout = collate_fn is None or dataset.rules.time_steps is not None
        self._collate_fn, self._finish, self._note_failure = collate_fn, finish, note_failure
        self._lanes = [lanes_of_worker(dataset.batch_size, workers, worker) for worker in range(workers)]
        self._regrouper = self._regrouper_of(list(range(workers)))
        self._fifos: list[deque[Part]] = [deque() for _ in range(workers)]
        self._ended = [False] * workers
        self._skipped: set[int] = set()
        self._restart, self._steps = restart, steps
        self._owner = os.getpid()
        self._progress, self._state, self._step = progress, state, progress.step
        _running.add(self)

    def _regrouper_of(self, workers: list[int]) -> Regrouper:
        lanes, known = [self._lanes[w] for w in workers], self._known
        return Regrouper(lanes, workers, self._rules.time_steps, self._fill_value, self._sources, known)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        step = self._step
        parts, slot = self._next_parts()
        if not any(parts) and self._regrouper.layout is None and self._needs_layout:
            self._regrouper.layout = self._steps.layout()  # nothing was read here yet: as other ranks have it
        if self._collate_fn is None:
            batch = self._regrouper.batch(step, self.epoch, parts, slot)
            batch.remember(functools.partial(self._state, self.epoch, self._progress.record(self._progress.step)))
            self._steps.tell_layout(self._regrouper.layout)
            return self._finish(batch)
        windows = self._regrouper.windows(parts, slot)
        self._steps.tell_layout(self._regrouper.layout)
        try:
            batch = self._collate_fn(windows)
        except StopIteration as error:  # would look like the epoch's end
            raise RuntimeError("collate_fn raised StopIteration") from error
        return self._finish(batch)

    def parts(self) -> Iterator[StreamBatch]:
        """The epoch not regrouped: each worker's part of each step, in order of step and worker."""
        regroupers = [self._regrouper_of([worker]) for worker in range(len(self._lanes))]
        while True:
            try:
                parts, slot = self._next_parts()
            except StopIteration:
                return
            for worker, part in enumerate(parts):
                if part is not None:
                    yield self._finish(regroupers[worker].batch(part.step, self.epoch, [part], slot))

    def _next_parts(self) -> tuple[list[Part | None], Slot | None]:
        """Each worker's part of the next step, None for one that has ended; and the step's slot of the ring."""
        if self.stale:
            raise StaleIteratorError(NEWER_HAS_BEGUN)
        if self.closed:
            raise StopIteration
        try:
            parts, told = self._collect_again()
            slot = self._feed.slot(self._step) if any(parts) else None
            delivered = self._steps.delivers(self._step, self._has_data(parts))
            if delivered:
                self._raise_first_error(parts, slot)
        except BaseException:
            self.close()
            raise
        if not delivered:
            self._progress.finished = True
            self.close()
            raise StopIteration
        self._progress.advance(told)
        self._step += 1
        return parts, slot

    def _collect_again(self) -> tuple[list[Part | None], list[LaneReports | None]]:
        """`_collect`; if a worker dies over it, with new workers, which begin with this step."""
        while True:
            try:
                return self._collect()
            except WorkerDeathError as death:
                self._feed.close()
                feed = self._restart(death, self._progress.record(self._progress.step)) if self._restart else None
                if feed is None:
                    raise
                self._feed = feed
                self._fifos = [deque() for _ in self._fifos]
                self._ended = [False] * len(self._ended)

    def _collect(self) -> tuple[list[Part | None], list[LaneReports | None]]:
        gathered: list[Part | None] = []
        for worker, fifo in enumerate(self._fifos):
            while not fifo and not self._ended[worker]:
                for part in self._feed.receive(self._step):
                    self._fifos[part.worker_id].append(part)
                    self._ended[part.worker_id] = part.end or bool(part.faults)
            gathered.append(fifo.popleft() if fifo else None)
        for sent in gathered:
            if sent is not None and sent.failures:
                self._note_failures(sent)
        parts = [None if sent is None or sent.end else sent for sent in gathered]
        return parts, [None if sent is None else sent.told for sent in gathered]

    def _note_failures(self, part: Part) -> None:
        for report in part.failures:
            failure = report.unpack()
            assert isinstance(failure, StreamError)
            self._note_failure(failure)
            if failure.source_index not in self._skipped:
                self._skipped.add(failure.source_index)
                warn_of_skip(failure)

    def _has_data(self, parts: list[Part | None]) -> bool:
        """Whether the step belongs to the epoch, as far as is known here: a pure function of what lanes read in it."""
        given = [part for part in parts if part is not None]
        if self._rules.padding_mode == "drop":
            return sum([part.lanes_read for part in given]) == self._rules.lanes
        return any(part.fresh for part in given)

    def _raise_first_error(self, parts: list[Part | None], slot: Slot | None) -> None:
        """Raise the error of the lowest lane, if there is one."""
        errors: list[tuple[int, Exception]] = []
        for part in parts:
            if part is not None and part.faults:
                errors += [(fault.lane, fault.error.unpack()) for fault in part.faults]
        if self._collate_fn is None:
            try:
                self._regrouper.judge(parts, slot)
            except StreamError as misfit:
                errors.append((misfit.lane, misfit))
        if errors:
            raise min(errors, key=lambda error: error[0])[1]

    def close(self) -> None:
        """End the iteration: workers that are not kept end, streams are closed."""
        if not self.closed and self._owner == os.getpid():  # not in a process the user forked meanwhile
            self.closed = True
            self._steps.close()
            self._feed.close()

    def __del__(self) -> None:
        if hasattr(self, "_feed"):
            self.close()


_running: weakref.WeakSet[Iteration] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End what is still being read while threads can be started and joined, which `__del__` could not any more."""
    for iteration in list(_running):
        iteration.close()
