"""State that a loader's workers share and are started with: the dataset, their status, and sessions' rows.

::

    rows    of several readers: session, row | session, row       two sessions of a kept worker

Guarantee: a row is reused only once all workers have left its session.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from stream_dataloader._engine.assembly.part import Part
from stream_dataloader._engine.assembly.slot_pool import PooledSlots, SlotPool
from stream_dataloader._engine.assembly.slots import MOST_STEPS_A_MESSAGE, Slots
from stream_dataloader._engine.memory.fields import Carver, SharedFields, bytes_of
from stream_dataloader._engine.memory.pickling import ByValue
from stream_dataloader._engine.reading.activity import Meters, WorkerStatus
from stream_dataloader._engine.reading.plan import Reading
from stream_dataloader._engine.reading.reader import PartReader
from stream_dataloader._engine.reading.session_row import SessionRow
from stream_dataloader._engine.reading.source_queue import KnownQueue, SessionQueue, SourceQueue
from stream_dataloader._engine.schedule.rules import Reader, Rules
from stream_dataloader._engine.workers.channel import Begin
from stream_dataloader.dataset import StreamDataset

KEPT_ROWS = 2  # a worker may still be in the previous session while others read the current one


class Rows(SharedFields):
    """The rows of requests of several readers."""

    def __init__(self, rules: Rules, *, shared: bool) -> None:
        self._rules = rules
        self._shared = shared
        super().__init__(shared=shared)
        if not shared:
            self._lock = threading.Lock()

    def _lay_out(self, carve: Carver) -> None:
        self._session = carve(KEPT_ROWS)  # the session of each row
        self._bytes = carve(KEPT_ROWS, bytes_of(functools.partial(SessionRow, rules=self._rules)), dtype=np.uint8)

    def locked(self) -> AbstractContextManager[object]:
        return self._memory.locked() if self._shared else self._lock

    def enter(
        self, reading: Reading, session: int, number: int, closed: Callable[[], bool], *, gives_up: bool
    ) -> SourceQueue:
        """Join a session; the first reader begins it."""
        kept = session % KEPT_ROWS
        row = SessionRow(Carver(self._bytes[kept]), self._rules)
        draws = reading.draws(row.ledger.cursors)
        with self.locked():
            if self._session[kept] != session:  # the first reader clears the row, which still holds an older session
                self._bytes[kept] = 0
                row.begin(reading.place.epoch, reading.times)
                row.ledger.start(draws.first)
                self._session[kept] = session
            row.enter(number)
        how = reading.order(), draws, self.locked, closed
        return SessionQueue(row, number, self._rules, *how, gives_up=gives_up)


@dataclass
class Shared:
    """State that all workers of a loader have.

    Attributes:
        in_threads: Readers are threads of the loader's process. As threads cannot be killed, they check
            between two lanes whether to stop, and a message carries one step.
    """

    dataset: StreamDataset
    readers: Sequence[Reader]
    status: WorkerStatus
    meters: Meters
    rows: Any  # `Rows`, or `RemotePort` on another machine; None for a reader that is alone, or knows the lengths
    slots: SlotPool | None
    in_threads: bool

    def enter(self, number: int, closed: Callable[[], bool], begin: Begin) -> PartReader:
        """Begin to read a session as one of its readers; called in the thread that reads."""
        slots = Slots if self.slots is None else functools.partial(PooledSlots, self.slots, begin.session)
        plan = self.dataset._plan()
        shared = self.readers, self.status, self.meters, slots
        reading = Reading(plan, begin.place, *shared, begin.recovery, begin.whole_windows)
        asked = closed if self.in_threads else None
        queue: SourceQueue
        if len(self.readers) == 1:
            queue = SourceQueue(reading.order(), reading.draws(), asked)
        elif reading.known_lengths is not None:
            order, lanes = reading.order(), self.readers[number].lanes
            queue = KnownQueue(plan.rules, order, asked, reading.known_lengths, begin.place, lanes)
        else:
            queue = self.rows.enter(reading, begin.session, number, closed, gives_up=self.in_threads)
        return PartReader(reading, number, queue)

    def most_steps(self, parts: list[Part]) -> int:
        """Return the most steps of a message with parts like these, as slots allow."""
        if self.in_threads:
            return 1
        if self.slots is None or not any(part.contents.in_slot for part in parts):
            return MOST_STEPS_A_MESSAGE
        return self.slots.most_steps

    def __getstate__(self) -> dict[str, Any]:
        kind = ByValue(type(self.dataset), "the dataset's class")  # workers may not be able to import the class
        return self.__dict__ | {"dataset": (kind, self.dataset.__getstate__())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        kind, inside = state["dataset"]
        dataset = object.__new__(kind.value)
        dataset.__setstate__(inside)
        self.__dict__.update(state | {"dataset": dataset})
