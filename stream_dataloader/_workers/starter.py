"""Starts to read: parts come from workers or from this thread, and all ranks begin together.

Guarantee: an iteration that cannot start leaves the loader where it stands, and no part is on its way.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import weakref
from collections.abc import Sequence

from stream_dataloader._advice import Setup
from stream_dataloader._assembly.slot_writer import SharedSlot
from stream_dataloader._loader.courses import Course, MembersRecord
from stream_dataloader._loader.members import AnyPosition
from stream_dataloader._loader.position import LoaderPosition
from stream_dataloader._loader.settings import WorkerSettings
from stream_dataloader._ranks.ranks import Ranks
from stream_dataloader._reading.activity import ActivityBoard
from stream_dataloader._reading.begin import read_here
from stream_dataloader._reading.share import NO_RECOVERY, Reading, Recovery, Start
from stream_dataloader._schedule.progress import Progress
from stream_dataloader._schedule.rules import deal_members
from stream_dataloader._schedule.saved_state import common
from stream_dataloader._schedule.snapshot import PackedSnapshot, Snapshot, nothing_left, uncounted_lane
from stream_dataloader._workers.collector import StepCollector
from stream_dataloader._workers.feed import Feed, LocalFeed
from stream_dataloader._workers.iteration import Iteration, Output
from stream_dataloader._workers.pool import WorkerPool
from stream_dataloader._workers.rescue import Rescue
from stream_dataloader._workers.tally import Tally, clock
from stream_dataloader._workers.threads import ThreadPool
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import StateError
from stream_dataloader.stats import LoaderStats


class Starter:
    """Starts iterations of one loader, and holds its workers.

    Args:
        ranks: What is read here of each member of the batch, and who else reads.
        workers: Number of workers of each member; 0 reads in the thread that asks.
        max_restarts: How often new workers may go on in an epoch.
        settings: What workers are started with.

    Attributes:
        pool: The workers.
        tally: What was read so far.
    """

    def __init__(
        self, ranks: Sequence[Ranks], workers: Sequence[int], max_restarts: int, settings: WorkerSettings
    ) -> None:
        self._ranks = ranks
        self._num_workers = sum(workers)
        self._max_restarts = max_restarts
        lanes = [own.reading.rules.lanes for own in ranks]
        self._readers = deal_members(lanes, workers, settings.threads_per_worker)
        self.tally = Tally(self._readers, shared=self._num_workers > 0)
        self.renew(settings)

    @property
    def _members(self) -> list[StreamDataset]:
        return [own.reading for own in self._ranks]

    def renew(self, settings: WorkerSettings) -> None:
        """Have other workers for the next iteration; what is being read goes on with those it has."""
        self._settings = settings
        self._rescue: weakref.ref[Rescue] | None = None  # it holds this
        members, readers, workers, tally = self._members, self._readers, self._num_workers, self.tally
        self.pool: WorkerPool | ThreadPool
        if settings.worker_method == "thread" and workers:
            self.pool = ThreadPool(members, readers, workers, settings, tally)
        else:
            self.pool = WorkerPool(members, readers, workers, tally=tally, **settings.of_processes())

    def start(self, position: AnyPosition, output: Output, *, parts: bool) -> Iteration:
        """Start the iteration that comes next.

        Args:
            position: Where the loader stands; it is told once the iteration has begun.
            output: How what is yielded is made.
            parts: It is not regrouped, and ranks do not wait for each other.

        Raises:
            StateError: Time steps are wanted, and where it begins they were not counted.
            RankError: The ranks are not about to read the same, or one did not come.
        """
        begin, whole_windows = clock(), output.collate_fn is not None
        position.leave()
        step, over = position.coming_step()
        courses = [
            self._course(number, member, step, over=over[number], whole_windows=whole_windows)
            for number, member in enumerate(position.members)
        ]
        if self._num_workers and self.pool.owner != os.getpid():  # the loader was built before this process was forked
            self.renew(self._settings)
        rescue: Rescue | None = None
        if not isinstance(self.pool, ThreadPool) and self._num_workers:
            rescue = Rescue(
                functools.partial(self._begin, courses, whole_windows),
                self._members,
                self.tally,
                most=self._max_restarts,
                threads=self._settings.threads_per_worker,
            )
        self._rescue = None if rescue is None else weakref.ref(rescue)
        collector = StepCollector(self._begin(courses, whole_windows), self._readers, rescue)
        if not parts and not position.goes_on:
            try:
                for ranks, course in zip(self._ranks, courses, strict=True):
                    if course.ended is None:
                        terms = {} if ranks.alone else common(course.position.coming_state())
                        course.steps = ranks.begin(course.progress.epoch, course.progress.step, terms)
            except BaseException:
                for course in courses:
                    course.steps.close()
                collector.close()
                raise
        self.tally.begin(begin)
        return Iteration(courses, collector, position.begin_all(courses), position, output, self.tally)

    def _course(self, number: int, member: LoaderPosition, step: int, *, over: bool, whole_windows: bool) -> Course:
        """What is read of a member, from where it stands."""
        reading, (epoch, place) = self._ranks[number].reading, member.coming()
        if place is not None and not whole_windows and reading.rules.time_steps is None:
            _check_counted(place)
        own = [index for index, reader in enumerate(self._readers) if reader.member == number]
        progress = Progress(reading.rules, epoch, place, len(own))
        begin = Start(epoch, nothing_left(reading.rules) if over else place)
        return Course(reading, member, progress, slice(own[0], own[-1] + 1), step, begin, over=over)

    def _begin(
        self,
        courses: Sequence[Course],
        whole_windows: bool,
        record: MembersRecord | PackedSnapshot | None = None,
        recovery: Recovery = NO_RECOVERY,
    ) -> Feed:
        """Begin to read all members, from a record of what was delivered; None: from where their courses begin."""
        if record is None:
            starts = [course.begin for course in courses]
        else:
            of_members = record.members if isinstance(record, MembersRecord) else (record,)
            starts = [course.start(record.step, own) for course, own in zip(courses, of_members, strict=True)]
        local = [number for number, reader in enumerate(self._readers) if reader.worker_id >= self._num_workers]
        others: Feed | None = None
        if isinstance(self.pool, ThreadPool):
            others = self.pool.start(starts, whole_windows=whole_windows)
        elif self._num_workers:
            others = self.pool.start(starts, whole_windows=whole_windows, recovery=recovery)
        if others is not None and not local:
            return others
        slot = None
        if len(local) > 1 and others is None:
            slot = SharedSlot(self._readers[-1].lanes.stop, whole_windows=whole_windows)
        board, readers = ActivityBoard(self._readers, shared=False), []
        for member in dict.fromkeys(self._readers[number].member for number in local):
            plan, meters = self._members[member].plan(), self.tally.meters
            reading = Reading(
                plan, starts[member], self._readers, board, meters, member, whole_windows, slot, locally=True
            )
            readers += [begin() for begin in read_here(reading)]
        return LocalFeed(readers, slot, others)

    def stats(self) -> LoaderStats:
        """What was read so far."""
        rules = [member.rules for member in self._members]
        setup = Setup(
            lanes=sum(own.lanes for own in rules),
            time_steps=rules[0].time_steps,
            packed=all(own.windows == "packed" for own in rules),
            sources=sum(own.num_sources for own in rules),
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
        if self._rescue is not None and (rescue := self._rescue()) is not None:
            rescue.begin_epoch()


def _check_counted(place: Snapshot) -> None:
    if (lane := uncounted_lane(place)) is not None:
        raise StateError(
            f"lane {lane} stands in a stream whose time steps were not counted: the state was saved by a loader with a "
            "collate_fn, which takes windows as they are; load it into a loader with a collate_fn, or read the epoch "
            "from its beginning, without the state"
        )
