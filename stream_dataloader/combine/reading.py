"""Reading of an epoch of several loaders, one batch of each at a time.

Guarantees: endless members are asked for a batch only if it will be delivered. If several members raise at one step,
the error of the lowest lane is raised. An iteration that is dropped drops its members' iterations.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from stream_dataloader._engine.advice import Setup
from stream_dataloader._engine.device import OneAhead
from stream_dataloader._engine.loader.base_position import is_being_read
from stream_dataloader._engine.loader.iteration import Output
from stream_dataloader._engine.reading.deferred import Begun, Deferred, Turn, UntilEnd
from stream_dataloader._engine.schedule.rules import deal_lanes
from stream_dataloader._engine.workers.batch_counts import BatchCounts, clock
from stream_dataloader._engine.workers.settings import WorkerSettings
from stream_dataloader.batch import StreamBatch
from stream_dataloader.combine.join import Join, Side
from stream_dataloader.combine.position import JointPosition
from stream_dataloader.errors import StreamError
from stream_dataloader.stats import Events, LoaderStats, TraceEvent

if TYPE_CHECKING:
    from stream_dataloader.dataloader import StreamDataLoader

#: Counts of members' loaders that are added up for the joined batches.
_COUNTED = ("items", "begun", "late_cells", "bytes")


class Member(NamedTuple):
    """One of the loaders that are read together."""

    side: Side
    loader: StreamDataLoader[Any]
    endless: bool


class JointIteration:
    """An iterator over the batches of one epoch of several loaders."""

    def __init__(
        self, members: Sequence[Member], position: JointPosition, join: Join, output: Output, counts: BatchCounts
    ) -> None:
        self._members, self._position, self._join, self.output, self._counts = members, position, join, output, counts
        self.closed = False
        self._taken: Counter[str] = Counter()  # sums of members' counts for the newest step
        self.epoch = position.prepare()
        collate_fn = None if output.collate_fn is None else list
        self._iterators: list[Deferred[Any] | None] = []
        for member, over in zip(members, self.epoch.place.over, strict=True):
            begin = functools.partial(member.loader._begin, collate_fn, parts=output.parts, whole_steps=output.parts)
            self._iterators.append(None if over else Deferred(begin, member.loader._turn))
        try:
            for iterator in self._iterators:  # all start their workers before the first one waits for a batch
                if iterator is not None:
                    iterator.begin()
        except BaseException:
            self.close()
            raise
        position.begin(self.epoch)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        begin, epoch = self._counts.wait(), self.epoch
        given = self._next_of_all()
        layouts = [member.loader._position.layout for member in self._members]
        try:
            if self.output.collate_fn is None:
                state = functools.partial(self._position.state_of, epoch, epoch.last)
                made: Any = self._join.batch(given, layouts, epoch.number, epoch.step - 1, state)
            else:
                windows = self._join.windows(given, next((each for each in layouts if each is not None), None))
                try:
                    made = self.output.collate_fn(windows)
                except StopIteration as error:  # raised from `__next__` it would look like the epoch's end
                    raise RuntimeError("collate_fn raised StopIteration") from error
            self._count(begin)
            return self.output.finish(made)
        except BaseException:
            epoch.take_back()
            self.close()
            raise

    def parts(self) -> Iterator[StreamBatch]:
        """Yield each worker's part of each step, in order, to the end."""
        epoch = self.epoch
        while True:
            begin = self._counts.wait()
            try:
                given = self._next_of_all()
            except StopIteration:
                return
            pairs = zip(self._members, given, strict=True)
            try:
                parts = [
                    self.output.finish(self._join.part(member.side, part, epoch.number, epoch.step - 1))
                    for member, own in pairs
                    for part in own or ()
                ]
                self._count(begin)
            except BaseException:
                epoch.take_back()
                self.close()
                raise
            yield from parts

    def _count(self, begin: int) -> None:
        cells = self._members[-1].side.lanes.stop * self._join.new_steps
        self._counts.joined(begin, self.epoch.step - 1, self._taken, cells)

    def _next_of_all(self) -> list[Any]:
        """Take the next batch, windows or parts of each member; None for a member that has ended."""
        epoch, position = self.epoch, self._position
        given: list[Any] = [None] * len(self._members)
        if self.closed:
            raise epoch.ending()
        errors: list[Exception] = []
        self._taken.clear()
        try:
            is_end = epoch.step == position.stop
            # Members that end come first. Only then is it known whether the step will be delivered, and an endless
            # member is asked only if so: otherwise its batch would be lost.
            for endless in (False, True):
                is_end = is_end or (endless and position.ends(epoch))
                for number, member in enumerate(self._members):
                    if member.endless is endless and not is_end:
                        self._take(number, given, errors)
            if errors and not is_end:  # at the epoch's end the step is not delivered, nor are its errors
                raise errors[0]
        except BaseException:
            self.close()
            raise
        if is_end:
            epoch.finished = True
            self.close()
            raise StopIteration
        position.advance(epoch)
        return given

    def _take(self, number: int, given: list[Any], errors: list[Exception]) -> None:
        """Take a member's next batch, or note its end or its error."""
        member, iterator = self._members[number], self._iterators[number]
        if iterator is None or self.epoch.members_over[number]:
            return
        failures, counts = member.loader.failures, member.loader._starter.counts
        known, before = len(failures), dict(counts)
        try:
            given[number] = next(iterator)
            self._taken.update({name: counts[name] - before[name] for name in _COUNTED})
        except StopIteration:
            self.epoch.members_over[number] = True
        except Exception as error:
            errors.append(member.side.add_member_to(error))
            errors.sort(key=lambda error: getattr(error, "lane", -1))
        finally:  # streams that were skipped before an error must be reported, too
            for failure in failures[known:]:
                found = member.side.add_member_to(failure)
                assert isinstance(found, StreamError)
                self._position.failures.append(found)

    def close(self) -> None:
        """End the iteration: workers that are not kept end, streams are closed."""
        self.closed = True
        self._counts.end()
        for iterator in self._iterators:
            if iterator is not None:
                iterator.close()


class JointStarter:
    """Starts iterations over several loaders, with the interface of `Starter`."""

    def __init__(self, members: Sequence[Member], join: Join, settings: WorkerSettings, turn: Turn) -> None:
        self._members, self._join, self._turn, self._settings = members, join, turn, settings
        lanes = members[-1].side.lanes.stop
        self._counts = BatchCounts(deal_lanes(lanes, 0), join.new_steps, shared=False)
        self._newest: Callable[[], JointIteration | None] = type(None)

    def renew(self, settings: WorkerSettings) -> None:
        """Use other workers from the next iteration on."""
        self._settings = settings
        for member in self._members:
            member.loader._renew(worker_init_fn=shifted(settings.worker_init_fn, member.side.first_worker))

    @property
    def is_reading(self) -> bool:
        """Whether an epoch is being read: its iterator exists, and has not seen the end."""
        return is_being_read(self._newest(), self._turn)

    def begin(self, position: JointPosition, output: Output) -> Begun[Any]:
        """Begin to read the coming epoch; any other iteration ends."""
        begin = clock()
        self.end()
        iteration = JointIteration(self._members, position, self._join, output, self._counts)
        self._counts.begin(begin)
        self._newest = weakref.ref(iteration)
        batches: Iterator[Any] = iteration
        if output.parts:
            batches = UntilEnd(iteration.parts(), iteration.epoch.ending)
        if output.device is not None and output.device.type == "cuda":
            batches = OneAhead(batches, output.device, iteration.epoch.hold)
        return batches, iteration.close

    def end(self) -> None:
        """End the current iteration: its iterator raises from now on."""
        self._turn.end()
        if (iteration := self._newest()) is not None:
            iteration.close()
        for member in self._members:
            member.loader._starter.end()

    def stop_workers(self) -> None:
        """End the current iteration, and wait for the end of worker processes."""
        self.end()
        for member in self._members:
            member.loader._stop_workers()

    def stats(self) -> LoaderStats:
        own, all_stats = self._counts.stats(0, 0), [member.loader.stats() for member in self._members]
        names = ("slots_in_use", "slots", "copies", "skipped", "gaps", "restarts")
        sums = {name: sum(getattr(stats, name) for stats in all_stats) for name in names}
        shifts = [member.side.first_worker for member in self._members]
        rules = [member.loader.dataset._rules for member in self._members]
        setup = Setup(
            lanes=self._members[-1].side.lanes.stop,
            time_steps=rules[0].time_steps,
            packed=all(each.windows == "packed" for each in rules),
            sources=sum(each.num_sources for each in rules),
            num_workers=self._settings.num_workers,
            prefetch_factor=self._settings.batches_ahead,
        )
        return dataclasses.replace(
            own,
            **sums,
            workers=tuple(itertools.chain.from_iterable(stats.workers for stats in all_stats)),
            events=Events(lambda: _joined(own.events, [stats.events for stats in all_stats], shifts)),
            setup=setup,
        )


def _joined(
    own: Sequence[TraceEvent], of_members: Sequence[Sequence[TraceEvent]], shifts: Sequence[int]
) -> list[TraceEvent]:
    events = list(own)
    for one, shift in zip(of_members, shifts, strict=True):
        events += [event._replace(worker=event.worker + shift) for event in one if event.worker >= 0]
    return sorted(events, key=lambda event: event.start_ns)


def shifted(function: Callable[[int], Any] | None, first: int) -> Callable[[int], Any] | None:
    """Return a `worker_init_fn` that numbers workers from `first`."""
    return None if function is None else functools.partial(_call_shifted, function, first)


def _call_shifted(function: Callable[[int], Any], first: int, worker: int) -> Any:
    return function(first + worker)
