"""Starts to read: parts come from workers or from this thread, and all ranks begin together.

Guarantee: an iteration that cannot start leaves the loader where it stands, and no part is on its way.
"""

from __future__ import annotations

import dataclasses
import os

from stream_dataloader._advice import Setup
from stream_dataloader._loader.position import LoaderPosition
from stream_dataloader._loader.settings import WorkerSettings
from stream_dataloader._ranks.agreement import OwnSteps, Steps
from stream_dataloader._ranks.ranks import Ranks
from stream_dataloader._reading.begin import read_locally
from stream_dataloader._schedule.progress import Progress
from stream_dataloader._schedule.rules import deal_lanes
from stream_dataloader._schedule.saved_state import common
from stream_dataloader._schedule.snapshot import Snapshot, uncounted_lane
from stream_dataloader._workers.collector import StepCollector
from stream_dataloader._workers.feed import LocalFeed
from stream_dataloader._workers.iteration import Iteration, Output
from stream_dataloader._workers.pool import WorkerPool
from stream_dataloader._workers.rescue import Rescue
from stream_dataloader._workers.tally import Tally, clock
from stream_dataloader._workers.threads import ThreadPool
from stream_dataloader.errors import StateError
from stream_dataloader.stats import LoaderStats


class Starter:
    """Starts iterations of one loader, and holds its workers.

    Args:
        ranks: What is read here, and who else reads.
        num_workers: Number of workers; 0 reads in the thread that asks.
        max_restarts: How often new workers may go on in an epoch.
        settings: What workers are started with.

    Attributes:
        pool: The workers.
        tally: What was read so far.
    """

    def __init__(self, ranks: Ranks, num_workers: int, max_restarts: int, settings: WorkerSettings) -> None:
        self._ranks = ranks
        self._num_workers = num_workers
        self._max_restarts = max_restarts
        self._readers = deal_lanes(ranks.reading.rules.lanes, num_workers, settings.threads_per_worker)
        self.tally = Tally(self._readers, shared=num_workers > 0)
        self.renew(settings)

    def renew(self, settings: WorkerSettings) -> None:
        """Have other workers for the next iteration; what is being read goes on with those it has."""
        self._settings = settings
        self._rescue: Rescue | None = None
        reading, workers, tally = self._ranks.reading, self._num_workers, self.tally
        self.pool: WorkerPool | ThreadPool
        if settings.worker_method == "thread" and workers:
            self.pool = ThreadPool(reading, workers, settings, tally)
        else:
            self.pool = WorkerPool(reading, self._readers, workers, tally=tally, **settings.of_processes())

    def start(self, position: LoaderPosition, output: Output, *, parts: bool) -> Iteration:
        """Start the iteration that comes next.

        Args:
            position: Where the loader stands; it is told once the iteration has begun.
            output: How what is yielded is made.
            parts: It is not regrouped, and ranks do not wait for each other.

        Raises:
            StateError: Time steps are wanted, and where it begins they were not counted.
            RankError: The ranks are not about to read the same, or one did not come.
        """
        begin = clock()
        epoch, resume = position.coming()
        reading, whole_windows = self._ranks.reading, output.collate_fn is not None
        if resume is not None and not whole_windows and reading.rules.time_steps is None:
            _check_counted(resume)
        if self._num_workers:
            if self.pool.owner != os.getpid():  # the loader was built before this process was forked
                self.renew(self._settings)
            pool = self.pool
            self._rescue = None
            if not isinstance(pool, ThreadPool):
                self._rescue = Rescue(
                    pool,
                    reading,
                    epoch,
                    self.tally,
                    whole_windows=whole_windows,
                    most=self._max_restarts,
                    threads=self._settings.threads_per_worker,
                )
            feed = pool.start(epoch, whole_windows=whole_windows, resume=resume)
            collector = StepCollector(feed, self._readers, self._rescue)
        else:
            reader = read_locally(
                reading.plan(), epoch, whole_windows=whole_windows, resume=resume, meters=self.tally.meters
            )
            collector = StepCollector(LocalFeed(reader), self._readers)
        progress = Progress(reading.rules, epoch, resume, len(self._readers))
        steps: Steps = OwnSteps()
        if not parts and not position.goes_on:
            try:
                terms = {} if self._ranks.alone else common(position.coming_state())
                steps = self._ranks.begin(epoch, progress.step, terms)
            except BaseException:
                collector.close()
                raise
        self.tally.begin(begin)
        position.begin(progress)
        return Iteration(reading, collector, progress, position, steps, output, self.tally)

    def stats(self) -> LoaderStats:
        """What was read so far."""
        reading = self._ranks.reading
        setup = Setup(
            lanes=reading.rules.lanes,
            time_steps=reading.rules.time_steps,
            packed=reading.rules.windows == "packed",
            sources=reading.rules.num_sources,
            num_workers=self._num_workers,
            prefetch_factor=self._settings.prefetch_factor or 2,
            threads_per_worker=self._settings.threads_per_worker,
        )
        return dataclasses.replace(self.tally.stats(*self.pool.memory.in_use), setup=setup)

    def lost_workers(self) -> bool:
        """Whether kept workers died since they were waited for last."""
        return bool(self.pool.died())

    def go_on(self) -> None:
        """The iteration that was started last is read on in another epoch."""
        if self._rescue is not None:
            self._rescue.begin_epoch()


def _check_counted(place: Snapshot) -> None:
    if (lane := uncounted_lane(place)) is not None:
        raise StateError(
            f"lane {lane} stands in a stream whose time steps were not counted: the state was saved by a loader with a "
            "collate_fn, which takes windows as they are; load it into a loader with a collate_fn, or read the epoch "
            "from its beginning, without the state"
        )
