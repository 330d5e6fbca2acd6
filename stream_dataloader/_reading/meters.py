"""Counts what workers do, and what their time goes into, in memory that the main process can look at at any moment.

Each number has one writer, so no lock is needed. The last events of each worker's thread lie in a ring, for a trace::

    numbers    idle | busy | opening | ...                    a row a reader, nanoseconds and counts
    events     kind, begin, stop, number | kind, ... |        the newest overwrites the oldest

Guarantee: counting never waits and never fails; it costs about a microsecond a step.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence

import numpy as np

from stream_dataloader._memory.fields import Carver, SharedFields
from stream_dataloader._schedule.rules import IntArray
from stream_dataloader.stats import TraceEvent, WorkerStats

#: The numbers of a reader, in this order.
IDLE_NS, BUSY_NS, OPENING_NS, GRANTING_NS, AHEAD_NS, ITEMS, STEPS, SENT, OPENED, OPENED_AHEAD, RETRIED, HEAD = range(12)
_NUMBERS = 12

#: Kinds of events; 0 is none.
STEP, OPEN, OPEN_AHEAD, GRANT = range(1, 5)
_KINDS = ("", "step", "open", "open ahead", "grant")

_EVENTS = 2048
_WORDS = 4  # an event's

#: Shorter waits for a grant, which are most, are no events.
_SHORTEST_GRANT_NS = 100_000

clock = time.monotonic_ns


class Meters(SharedFields):
    """The meters of a loader's workers, one for each of their threads."""

    def __init__(self, workers: Sequence[int], *, shared: bool = True) -> None:
        self._workers = workers
        super().__init__(shared=shared)

    def _lay_out(self, carve: Carver) -> None:
        self._numbers = carve(len(self._workers), _NUMBERS)
        self._events = carve(len(self._workers), _EVENTS, _WORDS)

    def of(self, reader: int) -> Meter:
        """A reader's meter."""
        return Meter(self._numbers[reader].data, self._events[reader].reshape(-1).data)

    def stats(self) -> tuple[WorkerStats, ...]:
        """What each worker did so far: the sums of its threads."""
        sums = np.zeros((max(self._workers) + 1, _NUMBERS), np.int64)
        np.add.at(sums, self._workers, self._numbers)
        return tuple(map(_stats, sums.tolist()))

    def events(self) -> Callable[[], list[TraceEvent]]:
        """Puts together what the last events of all workers were until now."""
        return functools.partial(_put_together, self._workers, self._events.copy())


def _put_together(workers: Sequence[int], of_readers: IntArray) -> list[TraceEvent]:
    return [
        TraceEvent(worker, _KINDS[kind], begin, stop, number, reader - workers.index(worker))
        for reader, (worker, events) in enumerate(zip(workers, of_readers, strict=True))
        for kind, begin, stop, number in events[events[:, 0] > 0].tolist()
    ]


def _stats(row: list[int]) -> WorkerStats:
    reading = row[BUSY_NS] - row[OPENING_NS] - row[GRANTING_NS]
    return WorkerStats(
        reading_seconds=max(reading, 0) / 1e9,
        opening_seconds=row[OPENING_NS] / 1e9,
        granting_seconds=row[GRANTING_NS] / 1e9,
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
        head = next(self._next)  # one step of the interpreter: the background thread has another
        at = head % _EVENTS * _WORDS
        events = self._events
        events[at], events[at + 1], events[at + 2], events[at + 3] = kind, begin, stop, number
        self._numbers[HEAD] = head + 1

    def step(self, step: int, begin: int, items: int, *, in_slot: bool) -> None:
        """A step was read."""
        stop, numbers = clock(), self._numbers
        numbers[IDLE_NS] += begin - self._mark
        numbers[BUSY_NS] += stop - begin
        numbers[ITEMS] += items
        numbers[STEPS] += 1
        if not in_slot:
            numbers[SENT] += 1
        self._mark = stop
        self._note(STEP, begin, stop, step)

    def opened(self, begin: int, source: int, *, ahead: bool) -> None:
        """A stream was opened, or could not be."""
        stop, numbers = clock(), self._numbers
        numbers[AHEAD_NS if ahead else OPENING_NS] += stop - begin
        numbers[OPENED_AHEAD if ahead else OPENED] += 1
        self._note(OPEN_AHEAD if ahead else OPEN, begin, stop, source)

    def waited_for_opening(self, begin: int) -> None:
        """The background thread was waited for, which opened a stream."""
        self._numbers[OPENING_NS] += clock() - begin

    def granted(self, begin: int) -> None:
        """A grant was waited for."""
        stop = clock()
        self._numbers[GRANTING_NS] += stop - begin
        if stop - begin >= _SHORTEST_GRANT_NS:
            self._note(GRANT, begin, stop, -1)

    def retried(self, times: int) -> None:
        """A stream was opened again after errors."""
        self._numbers[RETRIED] += times
