"""Starts to read: parts come from workers or from this thread, and all ranks begin together.

::

    epochs of their own     iteration 0 |iteration 1 |iteration 2       each begins where its epoch does
    n batches, kept         iteration 0 ----|-----------|--------       workers, and what they have read ahead, stay
    n batches, not kept     iteration 0 |iteration 1 |iteration 2       each is resumed where the one before stopped

Guarantee: an iteration that cannot start leaves the loader where it stands, and no part is on its way.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from stream_dataloader._advice import Setup
from stream_dataloader._assembly.slots import SharedSlot, Slots
from stream_dataloader._device import OneAhead
from stream_dataloader._loader.collector import Begun, StepCollector
from stream_dataloader._loader.epoch import Epoch, Record
from stream_dataloader._loader.iteration import Iteration, Output
from stream_dataloader._loader.position import LoaderPosition
from stream_dataloader._memory.endings import Ending
from stream_dataloader._ranks.ranks import Ranks
from stream_dataloader._reading.activity import ActivityBoard
from stream_dataloader._reading.deferred import Begun as Reads
from stream_dataloader._reading.deferred import Turn
from stream_dataloader._reading.plan import Reading, Recovery
from stream_dataloader._reading.reader import PartReader, read_here
from stream_dataloader._schedule.rules import deal_members
from stream_dataloader._schedule.saved_state import common
from stream_dataloader._schedule.snapshot import Snapshot, uncounted_lane
from stream_dataloader._workers.pool import Pool
from stream_dataloader._workers.settings import WorkerSettings
from stream_dataloader._workers.tally import Tally, clock
from stream_dataloader._workers.workers import Assignment
from stream_dataloader.errors import StateError
from stream_dataloader.stats import LoaderStats


class Starter:
    """Starts iterations of one loader, and holds its workers."""

    def __init__(self, ranks: Sequence[Ranks], workers: Sequence[int], settings: WorkerSettings, turn: Turn) -> None:
        self._ranks = ranks
        self._turn = turn
        lanes = [own.reading.rules.lanes for own in ranks]
        readers = deal_members(lanes, workers, lane_by_lane=settings.patience is not None)
        tally = Tally(readers, ranks[0].reading.rules.time_steps, shared=sum(workers) > 0)
        self._newest: Callable[[], Iteration | None] = type(None)
        self._ending: Ending | None = None  # of the newest, which may be gone
        self._work = Assignment((), readers, settings, tally)
        self._board = ActivityBoard(readers, shared=False)  # of lanes that are read here
        self.renew(settings)

    def renew(self, settings: WorkerSettings) -> None:
        """Have other workers for the next iteration; what is being read goes on with those it has."""
        self._kept: tuple[Iteration, Iterator[Any]] | None = None  # a run that goes on, and it on the device
        self._work = work = self._work._replace(members=[own.reading for own in self._ranks], settings=settings)
        self.pool = Pool(work) if settings.num_workers else None

    def dismiss(self) -> None:
        """End what is being read, and wait for the end of worker processes."""
        self.end()
        if self.pool is not None:
            self.pool.dismiss()

    @property
    def is_reading(self) -> bool:
        """An epoch is being read: its iterator is there, and has not seen the end."""
        iteration = self._newest()
        if iteration is None or self._turn.reader() is None:
            return False
        return not iteration.closed or iteration.epoch.end_is_ahead

    def begin(self, position: LoaderPosition, output: Output) -> Reads[Any]:
        """Begin to read what comes next: what was kept of a run goes on, anything else that is read ends."""
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
        keeps = self._work.settings.persistent_workers or not self._work.settings.num_workers
        if keeps:
            self._kept = iteration, batches
        return batches if output.parts else itertools.islice(batches, left), _nothing if keeps else iteration.close

    def _goes_on(self, kept: Iteration, position: LoaderPosition, output: Output) -> bool:
        """Whether the run that was kept can be read on, as it is, for an iterator that yields something."""
        if not kept.is_own or kept.closed or kept.output != output or not position.goes_on:
            return False
        if output.parts and kept.epoch.is_ahead:  # a part was copied ahead, and is lost
            return False
        return self.pool is None or not self.pool.died()

    def _on_device(self, iteration: Iteration, left: int | None) -> Iterator[Any]:
        output = iteration.output
        batches = iteration.parts(left) if output.parts else iteration
        if output.device is None or output.device.type != "cuda":
            return batches
        pool, release = self.pool, _nothing
        if pool is not None:
            pool.lock_slots(output.device)
            release = pool.release_slots
        return OneAhead(batches, output.device, iteration.epoch.hold, release)  # that one copies by itself

    def end(self) -> None:
        """End what is being read: its iterator raises from now on."""
        self._turn.end()
        self._kept = None
        if (iteration := self._newest()) is not None:
            iteration.close()
        elif self._ending is not None:
            self._ending.now()

    def _start(self, position: LoaderPosition, output: Output) -> Iteration:
        """Start the iteration that comes next; the position learns of it once it has begun."""
        begin, whole_windows = clock(), output.collate_fn is not None
        work = self._work
        epoch = position.coming_epoch(work.readers)
        for course in epoch.courses:
            if not whole_windows and course.dataset.rules.time_steps is None and not course.ended:
                _check_counted(course.start(course.progress.last).resume)
        if self.pool is not None and self.pool.owner != os.getpid():  # the loader was built before a fork
            self.renew(work.settings)
        begin_again = functools.partial(_begin_again, weakref.ref(self), epoch, whole_windows)
        # Only the iteration holds it: streams of a loop that was left go with the loop, not with the loader.
        collector = StepCollector(begin_again, work)
        collector.start(epoch.last)
        if not output.parts and not position.goes_on:
            try:
                self._meet_ranks(epoch, position)
            except BaseException:
                for course in epoch.courses:
                    course.steps.close()
                collector.close()
                raise
        work.tally.begin(begin)
        position.begin(epoch)
        return Iteration(epoch, collector, position, output, work.tally)

    def _meet_ranks(self, epoch: Epoch, position: LoaderPosition) -> None:
        for number, (ranks, course) in enumerate(zip(self._ranks, epoch.courses, strict=True)):
            if not course.ended:
                terms = {} if ranks.alone else common(position.coming_states()[number])
                at = course.progress
                course.steps = ranks.begin(at.epoch, at.step, terms, changed=at.last.changed is not None)

    def _read(self, epoch: Epoch, whole_windows: bool, record: Record, recovery: Recovery) -> Begun:
        starts = []
        for course, own in zip(epoch.courses, record.members, strict=True):
            start = course.start(own)
            resume = start.resume
            if resume is not None:  # readers count the loader's steps: those of one step write to one slot
                resume = resume._replace(step=record.step)
            starts.append(start._replace(resume=resume, whole_windows=whole_windows))
        work, count = self._work, self._work.settings.num_workers
        session = None if self.pool is None else self.pool.start(starts, recovery)
        members = dict.fromkeys(reader.member for reader in work.readers if reader.worker_id >= count)
        slots = Slots(whole_windows)
        if len(members) > 1 and session is None:
            slots = SharedSlot(work.readers[-1].lanes.stop, whole_windows)
        local: dict[int, PartReader] = {}
        for member in members:
            plan, board, meters = work.members[member].plan(), self._board, work.tally.meters
            reading = Reading(plan, starts[member], work.readers, board, meters, member, lambda _: slots, locally=True)
            local[reading.own[0][0]] = read_here(reading)
        return Begun(session, local, slots)

    def stats(self) -> LoaderStats:
        work = self._work
        rules = [member.rules for member in work.members]
        setup = Setup(
            lanes=sum(own.lanes for own in rules),
            time_steps=rules[0].time_steps,
            packed=all(own.windows == "packed" for own in rules),
            sources=sum(own.num_sources for own in rules),
            num_workers=work.settings.num_workers,
            prefetch_factor=work.settings.batches_ahead,
            outlook=work.members[0].plan().outlook() if len(rules) == 1 else None,
        )
        slots = (0, 0) if self.pool is None else self.pool.slots_in_use
        sources = [member.sources for member in work.members]
        return dataclasses.replace(work.tally.stats(*slots, sources), setup=setup)


def _nothing() -> None:
    pass


def _begin_again(starter: Callable[[], Starter | None], *how: Any) -> Begun | None:
    """Begin to read from a record, unless the loader is gone."""
    found = starter()
    return None if found is None else found._read(*how)


def _check_counted(place: Snapshot | None) -> None:
    if place is not None and (lane := uncounted_lane(place)) is not None:
        raise StateError(
            f"lane {lane} stands in a stream whose time steps were not counted, as the loader had a collate_fn; load "
            "the state into one that has"
        )
