"""Status of the workers, in memory that the main process can still read when a worker is dead.

`WorkerStatus` holds the current work of each worker, `Meters` holds counts of its past work. The last events are kept
in a ring, for a trace::

    numbers    idle | busy | opening | ...                    a row per reader, nanoseconds and counts
    events     kind, begin, stop, number | kind, ... |        the newest overwrites the oldest

Guarantee: each number has one writer, so there is no lock; counting costs about a microsecond per step.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from stream_dataloader._engine.memory.fields import Carver, SharedFields
from stream_dataloader._engine.schedule.rules import IntArray, Reader
from stream_dataloader.errors import shorten
from stream_dataloader.stats import TraceEvent, WorkerStats

#: The numbers of a reader, in this order.
IDLE_NS, BUSY_NS, OPENING_NS, WAITING_NS, AHEAD_NS, ITEMS, STEPS, SENT, OPENED, OPENED_AHEAD, RETRIED, HEAD = range(12)
_TIMES = 5
_SINCE = 12  # from here on: the moment since which each of the times runs, 0 if it does not
_NUMBERS = _SINCE + _TIMES

#: Kinds of events; 0 is none.
STEP, OPEN, OPEN_AHEAD, WAIT = range(1, 5)
_KINDS = ("", "step", "open", "open ahead", "wait")

_EVENTS = 2048
_WORDS = 4  # numbers of an event

#: Shorter waits for a draw are not recorded as events. Most waits are shorter, and would push other events out.
_SHORTEST_WAIT_NS = 100_000

clock = time.monotonic_ns


class Activity(NamedTuple):
    """Work of a worker at one moment; -1 stands for nothing.

    Attributes:
        time: The lane and step that it worked on, as `step * lanes + lane`.
        step: The step.
        lane: The lane.
        source: The source that is open in that lane.
        opening: The source that is being opened.
        open: The sources that are open in its lanes.
    """

    time: int
    step: int
    lane: int
    source: int
    opening: int
    open: tuple[int, ...]

    @property
    def suspects(self) -> frozenset[tuple[int, int]]:
        """Sources that may have killed it: the one it read, with the time, and the one it opened (time -1)."""
        read = {(self.source, self.time)} if self.source >= 0 and self.time >= 0 else set()
        return frozenset(read | ({(self.opening, -1)} if self.opening >= 0 else set()))


#: Names of exceptions that end a worker and are no `Exception`; not of `SystemExit`, which has a status.
ENDINGS = ("", "KeyboardInterrupt", "GeneratorExit", "CancelledError", "a BaseException")


def ending_of(error: BaseException) -> int:
    """Return the number in `ENDINGS` of an exception that ends a worker; 0 for `SystemExit`."""
    if isinstance(error, SystemExit):
        return 0
    names = [kind.__name__ for kind in type(error).__mro__]
    return next((number for number, name in enumerate(ENDINGS) if name in names), len(ENDINGS) - 1)


class WorkerStatus(SharedFields):
    """Status of all workers of a loader; 0 stands for nothing.

    Attributes:
        reading: For each lane of the batch, the source that is open plus 1.
        opening: For each reader, the source that is being opened plus 1.
        working: For each reader, the time that it works on plus 1.
        exiting: For each reader, the source whose code made it exit plus 1; negative if that source was being opened.
        raised: For each reader, the exception that made it exit, as `ending_of` numbers it.
    """

    def __init__(self, readers: Sequence[Reader], *, shared: bool = True) -> None:
        self._readers = readers
        super().__init__(shared=shared)

    def _lay_out(self, carve: Carver) -> None:
        self.reading = carve(self._readers[-1].lanes.stop)
        self.opening = carve(len(self._readers))
        self.working = carve(len(self._readers))
        self.exiting = carve(len(self._readers))
        self.raised = carve(len(self._readers))

    def clear(self) -> None:
        """Clear the status; no worker may be running."""
        for numbers in (self.reading, self.opening, self.working, self.exiting, self.raised):
            numbers[:] = 0

    def copy_of(self, number: int) -> IntArray:
        """Return the numbers of one reader."""
        whole = [field[number] for field in (self.opening, self.working, self.exiting, self.raised)]
        lanes = self._readers[number].lanes
        return np.concatenate([whole, self.reading[lanes.start : lanes.stop]])

    def put(self, number: int, numbers: IntArray) -> None:
        """Write what `copy_of` returned on another machine."""
        self.opening[number], self.working[number], self.exiting[number], self.raised[number] = numbers[:4]
        lanes = self._readers[number].lanes
        self.reading[lanes.start : lanes.stop] = numbers[4:]

    def doing(self, worker: int) -> Activity:
        """Return a worker's activity."""
        reader, time = self._readers[worker], int(self.working[worker]) - 1
        step, lane = divmod(time, self._readers[-1].lanes.stop)
        source = int(self.reading[lane]) - 1 if time >= 0 else -1
        opening, exiting = int(self.opening[worker]) - 1, int(self.exiting[worker])
        if exiting:
            source, opening = (exiting - 1, -1) if exiting > 0 else (-1, -exiting - 1)
        open_sources = tuple(int(self.reading[lane]) - 1 for lane in reader.lanes if self.reading[lane])
        return Activity(time, step, lane, source, opening, open_sources)

    def is_reading(self, worker: int) -> bool:
        """Return whether a worker is reading a lane."""
        return self.doing(worker).time >= 0

    def suspects(self, worker: int) -> frozenset[tuple[int, int]]:
        """Return the sources that may have killed a worker; see `Activity`."""
        return self.doing(worker).suspects

    def describe(self, worker: int, sources: Sequence[Any]) -> str:
        """Describe a worker's activity in words."""

        def named(index: int) -> str:
            try:
                return f"{index} ({shorten(sources[index], 80)})"
            except Exception:  # A source that cannot be unpickled must not hide why the worker died.
                return f"{index}"

        activity, parts = self.doing(worker), []
        if activity.time >= 0:
            at = f"reading source {named(activity.source)}" if activity.source >= 0 else "between two sources"
            parts.append(f"in lane {activity.lane}, step {activity.step}, {at}")
        if activity.opening >= 0:
            parts.append(f"opening source {named(activity.opening)}")
        if activity.open:
            parts.append(f"with source{'s' * (len(activity.open) > 1)} {', '.join(map(named, activity.open))} open")
        return ", ".join(parts) or "without a source"


class Meters(SharedFields):
    """The meters of a loader's workers."""

    def __init__(self, workers: int, *, shared: bool = True) -> None:
        self._workers = workers
        super().__init__(shared=shared)

    def _lay_out(self, carve: Carver) -> None:
        self._numbers = carve(self._workers, _NUMBERS)
        self._events = carve(self._workers, _EVENTS, _WORDS)

    def of(self, reader: int) -> Meter:
        """Return a reader's meter."""
        return Meter(self._numbers[reader].data, self._events[reader].reshape(-1).data)

    def copy_of(self, reader: int, since: int) -> tuple[IntArray, IntArray]:
        """Return the numbers of one reader, and its events that are kept, from number `since` on."""
        numbers = self._numbers[reader].copy()
        head = int(numbers[HEAD])
        return numbers, self._events[reader][np.arange(max(since, head - _EVENTS), head) % _EVENTS]

    def put(self, reader: int, numbers: IntArray, events: IntArray, later_ns: int = 0) -> None:
        """Write what `copy_of` returned on another machine, whose clock is `later_ns` behind this one."""
        head = int(numbers[HEAD])
        places = np.arange(head - len(events), head) % _EVENTS
        self._events[reader, places] = events + np.array([0, later_ns, later_ns, 0])
        self._numbers[reader] = numbers
        self._numbers[reader, _SINCE:] += later_ns * (numbers[_SINCE:] > 0)

    def stats(self, now: int | None = None) -> tuple[WorkerStats, ...]:
        """Return each worker's figures; with `now`, running times are counted up to that moment."""
        numbers = self._numbers.copy()
        if now is not None:
            since = numbers[:, _SINCE:]
            numbers[:, :_TIMES] += np.where(since > 0, np.maximum(now - since, 0), 0)
        return tuple(map(_stats, numbers.tolist()))

    def stop_clocks(self) -> None:
        """Stop all running times; workers that were killed left theirs running."""
        self._numbers[:, _SINCE:] = 0

    def events(self) -> Callable[[], list[TraceEvent]]:
        """Copy the last events of all workers; the returned function puts them together."""
        return functools.partial(_put_together, self._events.copy())


def _put_together(of_workers: IntArray) -> list[TraceEvent]:
    return [
        TraceEvent(worker, _KINDS[kind], begin, stop, number)
        for worker, events in enumerate(of_workers)
        for kind, begin, stop, number in events[events[:, 0] > 0].tolist()
    ]


def _stats(row: list[int]) -> WorkerStats:
    reading = row[BUSY_NS] - row[OPENING_NS] - row[WAITING_NS]
    return WorkerStats(
        reading_seconds=max(reading, 0) / 1e9,
        opening_seconds=row[OPENING_NS] / 1e9,
        waiting_seconds=row[WAITING_NS] / 1e9,
        idle_seconds=row[IDLE_NS] / 1e9,
        opening_ahead_seconds=row[AHEAD_NS] / 1e9,
        items=row[ITEMS],
        steps=row[STEPS],
        sent=row[SENT],
        opened=row[OPENED] + row[OPENED_AHEAD],
        retried=row[RETRIED],
    )


class Meter:
    """One reader's numbers, as it writes them."""

    def __init__(self, numbers: memoryview, events: memoryview) -> None:
        self._numbers = numbers
        self._events = events
        self._next = itertools.count(numbers[HEAD])
        self._mark = clock()

    def _note(self, kind: int, begin: int, stop: int, number: int) -> None:
        # The background thread of the same reader records events, too. `next` of a counter is a single step of the
        # interpreter, so the two threads never get the same entry.
        head = next(self._next)
        at = head % _EVENTS * _WORDS
        events = self._events
        events[at], events[at + 1], events[at + 2], events[at + 3] = kind, begin, stop, number
        self._numbers[HEAD] = head + 1

    def begin(self, what: int) -> int:
        """Start a time and return the moment; it runs until the call that says what it was spent on."""
        now = clock()
        self._numbers[_SINCE + what] = now
        return now

    def stop(self, what: int) -> None:
        """Stop a time. Call this before adding it up, so that `Meters.stats` never counts it twice."""
        self._numbers[_SINCE + what] = 0

    def step(self, step: int, begin: int, items: int, *, in_slot: bool) -> None:
        """Count a step that was read."""
        stop, numbers = clock(), self._numbers
        self.stop(BUSY_NS)
        numbers[IDLE_NS] += begin - self._mark
        numbers[BUSY_NS] += stop - begin
        numbers[ITEMS] += items
        numbers[STEPS] += 1
        if not in_slot:
            numbers[SENT] += 1
        self._mark = stop
        self._note(STEP, begin, stop, step)

    def opened(self, begin: int, source: int, *, ahead: bool) -> int:
        """Count a stream that was opened, or could not be; return the nanoseconds that it took."""
        stop, numbers, time = clock(), self._numbers, AHEAD_NS if ahead else OPENING_NS
        numbers[_SINCE + time] = 0
        numbers[time] += stop - begin
        numbers[OPENED_AHEAD if ahead else OPENED] += 1
        self._note(OPEN_AHEAD if ahead else OPEN, begin, stop, source)
        return stop - begin

    def waited_for_opening(self, begin: int) -> None:
        """Count a wait for the background thread, which opened a stream."""
        self.stop(OPENING_NS)
        self._numbers[OPENING_NS] += clock() - begin

    def waited_for_draw(self, begin: int) -> None:
        """Count a wait for a draw."""
        stop = clock()
        self.stop(WAITING_NS)
        self._numbers[WAITING_NS] += stop - begin
        if stop - begin >= _SHORTEST_WAIT_NS:
            self._note(WAIT, begin, stop, -1)

    def retried(self, times: int) -> None:
        """Count how often a stream was opened again after errors."""
        self._numbers[RETRIED] += times
