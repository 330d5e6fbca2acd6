"""The start of an iteration: parts come from workers or from this thread, and all ranks begin together.

::

    epochs of their own     iteration 0 |iteration 1 |iteration 2       each begins where its epoch does
    n batches, kept         iteration 0 ----|-----------|--------       workers stay, with what they have read ahead
    n batches, not kept     iteration 0 |iteration 1 |iteration 2       each is resumed where the one before stopped

Guarantee: an iteration that cannot start leaves the loader's position unchanged, and no part in transit.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from stream_dataloader._engine.advice import Setup
from stream_dataloader._engine.device import OneAhead
from stream_dataloader._engine.loader.base_position import is_being_read
from stream_dataloader._engine.loader.collector import Begun, StepCollector
from stream_dataloader._engine.loader.epoch import Epoch
from stream_dataloader._engine.loader.iteration import Iteration, Output
from stream_dataloader._engine.loader.position import LoaderPosition
from stream_dataloader._engine.memory.endings import Ending
from stream_dataloader._engine.ranks.ranks import Ranks
from stream_dataloader._engine.reading.activity import WorkerStatus
from stream_dataloader._engine.reading.deferred import Begun as Reads
from stream_dataloader._engine.reading.deferred import Turn, UntilEnd
from stream_dataloader._engine.reading.plan import Reading, Recovery
from stream_dataloader._engine.reading.reader import read_here
from stream_dataloader._engine.schedule.place import Place, uncounted_lane
from stream_dataloader._engine.schedule.rules import deal_lanes
from stream_dataloader._engine.schedule.saved_state import common
from stream_dataloader._engine.workers.batch_counts import BatchCounts, clock
from stream_dataloader._engine.workers.pool import Pool
from stream_dataloader._engine.workers.settings import WorkerSettings
from stream_dataloader._engine.workers.workers import Assignment
from stream_dataloader.errors import StateError
from stream_dataloader.stats import LoaderStats


class Starter:
    """Starts iterations of one loader, and holds its workers."""

    def __init__(self, ranks: Ranks, settings: WorkerSettings, turn: Turn) -> None:
        self._ranks = ranks
        self._turn = turn
        rules, workers = ranks.dataset._rules, settings.num_workers
        readers = deal_lanes(rules.lanes, workers)
        counts = BatchCounts(readers, rules.time_steps, shared=workers > 0)
        self._newest: Callable[[], Iteration | None] = type(None)
        self._ending: Ending | None = None  # of the newest iteration, which may be gone
        self._work = Assignment(ranks.dataset, readers, settings, counts)
        self._status = WorkerStatus(readers, shared=False)  # of lanes that are read here
        self.renew(settings)

    def renew(self, settings: WorkerSettings) -> None:
        """Use other workers from the next iteration on; the current iteration keeps those it has."""
        self._kept: tuple[Iteration, Iterator[Any]] | None = None  # a run that goes on, and its batches on the device
        self._work = work = self._work._replace(dataset=self._ranks.dataset, settings=settings)
        self.pool = _pool_of(work) if settings.num_workers else None

    def stop_workers(self) -> None:
        """End the current iteration, and wait for the end of worker processes."""
        self.end()
        if self.pool is not None:
            self.pool.stop_workers()

    @property
    def counts(self) -> Mapping[str, int]:
        """Counts of batches so far, by names of `LoaderStats`."""
        return self._work.counts.totals

    @property
    def is_reading(self) -> bool:
        """Whether an epoch is being read: its iterator exists, and has not seen the end."""
        return is_being_read(self._newest(), self._turn)

    @property
    def newest(self) -> Iteration | None:
        """The iteration that began last, unless it is gone."""
        return self._newest()

    def begin(self, position: LoaderPosition, output: Output) -> Reads[Any]:
        """Begin to read what comes next: a kept run goes on, any other iteration ends."""
        kept = self._kept
        if kept is not None and self._goes_on(kept[0], position, output):
            iteration = kept[0]
            position.begin(iteration.epoch)
            iteration.begin_epoch()
        else:
            self.end()
            kept, iteration = None, self._start(position, output)
            self._newest, self._ending = weakref.ref(iteration), iteration.ending
        left = position.left
        batches = self._on_device(iteration, left) if kept is None or output.parts else kept[1]
        if left is None:
            return batches, iteration.close
        # The next epoch of a run can go on with the same iteration only if its workers stay.
        keeps = self._work.settings.persistent_workers or not self._work.settings.num_workers
        if keeps:
            self._kept = iteration, batches
        return batches if output.parts else itertools.islice(batches, left), _nothing if keeps else iteration.close

    def _goes_on(self, kept: Iteration, position: LoaderPosition, output: Output) -> bool:
        """Return whether the kept run can go on, unchanged, for an iterator with this output."""
        # After a fork the workers are the parent's. Another output needs windows of another kind from them.
        if not kept.is_own or kept.closed or kept.output != output or not position.goes_on:
            return False
        if output.parts and kept.epoch.is_ahead:  # a part was copied ahead, and would be lost
            return False
        return self.pool is None or not self.pool.died()

    def _on_device(self, iteration: Iteration, left: int | None) -> Iterator[Any]:
        output = iteration.output
        if output.whole_steps:
            return iteration.steps_of_parts(left)
        batches = UntilEnd(iteration.parts(left), iteration.epoch.ending) if output.parts else iteration
        if output.device is None or output.device.type != "cuda":
            return batches
        pool, release = self.pool, _nothing
        if pool is not None:
            pool.lock_slots(output.device)
            release = pool.release_slots
        return OneAhead(batches, output.device, iteration.epoch.hold, release)  # copies to the device one batch ahead

    def end(self) -> None:
        """End the current iteration: its iterator raises from now on."""
        # The turn ends first: closing may take long, and an iterator of the old epoch must not read meanwhile.
        self._turn.end()
        self._kept = None
        if (iteration := self._newest()) is not None:
            iteration.close()
        # The iteration is gone, but its clean-up may still wait for a thread. It is done now, so that two epochs never
        # use the same workers.
        elif self._ending is not None:
            self._ending.now()

    def _start(self, position: LoaderPosition, output: Output) -> Iteration:
        """Start the next iteration; the position is told once it has begun."""
        begin, whole_windows = clock(), output.collate_fn is not None
        work = self._work
        work.dataset._source_lists.check_given()
        place, epoch = position.coming(), position.coming_epoch(len(work.readers))
        if not whole_windows and epoch.dataset._rules.time_steps is None:
            _check_counted(place)
        if self.pool is not None and self.pool.owner != os.getpid():  # the loader was built before a fork
            self.renew(work.settings)
        begin_again = functools.partial(_begin_again, weakref.ref(self), whole_windows)
        # The collector refers to this starter weakly, and only the iteration holds the collector. So the streams of an
        # iterator that the user drops are closed, even if the loader lives on.
        collector = StepCollector(begin_again, work)
        collector.start(place)
        # A run that goes on has met the other ranks before, and parts are yielded without them.
        if not output.parts and not position.goes_on:
            try:
                self._meet_ranks(epoch, position)
            except BaseException:
                # The workers have started. They would read on for an epoch that does not begin.
                epoch.steps.close()
                collector.close()
                raise
        work.counts.begin(begin)
        position.begin(epoch)
        return Iteration(epoch, collector, position, output, work.counts)

    def _meet_ranks(self, epoch: Epoch, position: LoaderPosition) -> None:
        terms = {} if self._ranks.alone else common(position.coming_state())
        epoch.steps = self._ranks.begin(epoch.number, epoch.step, terms, changed=epoch.changed is not None)

    def _read(self, whole_windows: bool, place: Place, recovery: Recovery) -> Begun:
        if self.pool is not None:
            return Begun(self.pool.start(place, recovery, whole_windows=whole_windows), None)
        reading = Reading(
            *(self._work.dataset._plan(), place, self._work.readers, self._status, self._work.counts.meters),
            recovery=recovery,
            whole_windows=whole_windows,
            locally=True,
        )
        return Begun(None, read_here(reading))

    def stats(self) -> LoaderStats:
        work, rules = self._work, self._work.dataset._rules
        setup = Setup(
            lanes=rules.lanes,
            time_steps=rules.time_steps,
            packed=rules.windows == "packed",
            sources=rules.num_sources,
            num_workers=work.settings.num_workers,
            prefetch_factor=work.settings.batches_ahead,
            forecast=work.dataset._plan().forecast(),
        )
        slots = (0, 0) if self.pool is None else self.pool.slots_in_use
        return dataclasses.replace(work.counts.stats(*slots), setup=setup)


def _pool_of(work: Assignment) -> Pool:
    if work.settings.worker_method != "ray":
        return Pool(work)
    # Imported here, because importing Ray takes seconds, and most loaders do not use it.
    from stream_dataloader._engine.remote.pool import RayPool

    return RayPool(work)


def _nothing() -> None:
    pass


def _begin_again(starter: Callable[[], Starter | None], *how: Any) -> Begun | None:
    """Begin to read from a place; return None if the loader is gone."""
    found = starter()
    return None if found is None else found._read(*how)


def _check_counted(place: Place) -> None:
    if (lane := uncounted_lane(place)) is not None:
        raise StateError(
            f"lane {lane} is in the middle of a stream whose time steps were not counted, because the loader had a "
            "collate_fn; load the state into a loader with a collate_fn"
        )
