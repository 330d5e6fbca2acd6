"""Counts what workers do, and what their time goes into, in memory that the main process can look at at any moment.

Each number has one writer, a worker or its background thread, so no lock is needed. The last events of each worker lie
in a ring, for a trace::

    numbers    idle | busy | opening | ...                    a row a worker, nanoseconds and counts
    events     kind, begin, stop, number | kind, ... |        the newest overwrites the oldest

Guarantee: counting never waits and never fails; it costs about a microsecond a step.
"""

from __future__ import annotations

import itertools
import time
from functools import cached_property
from typing import Any

import numpy as np

from stream_dataloader._memory.fields import Carver, bytes_of
from stream_dataloader._memory.shared_memory import SharedMemory
from stream_dataloader._schedule.rules import IntArray
from stream_dataloader.stats import TraceEvent, WorkerStats

#: The numbers of a worker, in this order.
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


class _Laid:
    """Where numbers and events lie."""

    def __init__(self, carve: Carver, workers: int) -> None:
        self.numbers = carve(workers * _NUMBERS)
        self.events = carve(workers * _EVENTS * _WORDS)


class Meters:
    """The meters of all workers of a loader.

    Args:
        workers: How many there are; 0 stands for the main process.
        shared: Put them where workers can write to them.
    """

    def __init__(self, workers: int, *, shared: bool = True) -> None:
        self._workers = max(workers, 1)
        self._memory = SharedMemory(bytes_of(self._lay_out)) if shared else None

    def _lay_out(self, carve: Carver) -> _Laid:
        return _Laid(carve, self._workers)

    @cached_property
    def _laid(self) -> _Laid:
        return self._lay_out(Carver(None if self._memory is None else self._memory.buffer))

    def of(self, worker: int) -> Meter:
        """A worker's meter."""
        laid = self._laid
        return Meter(
            laid.numbers[worker * _NUMBERS : (worker + 1) * _NUMBERS].data,
            laid.events[worker * _EVENTS * _WORDS : (worker + 1) * _EVENTS * _WORDS].data,
        )

    def stats(self) -> tuple[WorkerStats, ...]:
        """What each worker did so far."""
        return tuple(map(_stats, self._laid.numbers.reshape(self._workers, _NUMBERS).tolist()))

    def kept_events(self) -> IntArray:
        """The last events of all workers, as `events_of` takes them: a copy."""
        kept: IntArray = self._laid.events.reshape(self._workers, _EVENTS, _WORDS).copy()
        return kept

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("_workers", "_memory")}


def events_of(kept: IntArray) -> list[TraceEvent]:
    """What `Meters.kept_events` returned, put together."""
    return [
        TraceEvent(worker, _KINDS[kind], begin, stop, number)
        for worker, events in enumerate(kept)
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
    """One worker's numbers, as it writes them."""

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
        """A step was read.

        Args:
            step: Its number.
            begin: When that began.
            items: How many time steps there were.
            in_slot: They are in the step's slot.
        """
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
        """A stream was opened, or could not be.

        Args:
            begin: When that began.
            source: Which.
            ahead: In the background thread.
        """
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


def unread_meter() -> Meter:
    """A meter that nobody looks at."""
    return Meter(np.zeros(_NUMBERS, np.int64).data, np.zeros(_EVENTS * _WORDS, np.int64).data)
