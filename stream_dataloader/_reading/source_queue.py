"""A worker's end of a session: it takes out tickets here and learns what they were granted.

Each worker publishes the time it is about to work on; it never takes out a ticket for an earlier one. So the
tickets up to the smallest published time can be decided for good, and whoever holds the lock decides them
(`ledger.Ledger`). Waiting workers poll: nothing relies on a notify that a killed worker could swallow.

Guarantee: a wait ends, with `Abandoned`, when the session is closed or one of its workers is gone.
"""

from __future__ import annotations

import functools
import threading
import time as clock
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import numpy.typing as npt

from stream_dataloader._memory.fields import Carver
from stream_dataloader._reading.sessions import FINISHED, LEFT, RUNNING, SessionKey, SessionRow, SessionTable, is_alive
from stream_dataloader._schedule.order import Order
from stream_dataloader._schedule.rules import NEVER, PENDING, Rules
from stream_dataloader._schedule.sections import Lengths
from stream_dataloader._schedule.snapshot import Snapshot

_FIRST_WAIT_SECONDS = 20e-6
_LONGEST_WAIT_SECONDS = 1e-3
_LIVENESS_SECONDS = 0.5


class Abandoned(Exception):
    """The session has no future: it was closed, or one of its workers is gone."""


class SourceQueue:
    """A worker's end of one session.

    Args:
        row: The session's state.
        worker: This worker's number.
        rules: Those of the dataset.
        order: What grants stand for.
        lock: Keeps the session's other workers out.
        closed: Whether the session was closed from outside; asked while waiting.
        gives_up: It is asked between two lanes, too: a process that reads on for a while can be ended, a thread cannot.

    Attributes:
        epoch: The session's epoch number.
        order: What grants stand for.
    """

    def __init__(
        self,
        row: SessionRow,
        worker: int,
        rules: Rules,
        order: Order,
        lock: Callable[[], AbstractContextManager[object]],
        closed: Callable[[], bool],
        *,
        gives_up: bool,
    ) -> None:
        self._row = row
        self._time = row.time.data  # several times faster to write a number to than the array
        self._worker = worker
        self._rules = rules
        self._lock = lock
        self._closed = closed
        self._gives_up = gives_up
        self.epoch = int(row.epoch[0])
        self.order = order

    def publish(self, time: int) -> None:
        """Promise to take out no ticket for an earlier time any more.

        Raises:
            Abandoned: The session was closed, and this one gives up.
        """
        if self._gives_up and time != NEVER and self._closed():
            raise Abandoned
        self._time[self._worker] = time

    def is_waited_for(self) -> bool:
        """Some lane has a ticket that cannot be decided yet."""
        return self._row.ledger.has_undecided()

    def take(self, lane: int, time: int, *, ahead: bool) -> int:
        """Take out a ticket and return its number within the lane."""
        with self._lock():
            return self._row.ledger.take(lane, time, ahead)

    def decision(self, lane: int, ticket: int) -> int:
        """The number of the ticket's grant, `NONE`, or `PENDING`; decides what can be decided."""
        horizon = int(self._row.time.min()) if self._rules.deterministic else NEVER
        if horizon < self._row.ledger.time(lane, ticket):
            return PENDING
        with self._lock():
            self._row.ledger.grant(horizon)
            return self._row.ledger.decision(lane, ticket)

    def wait(self, lane: int, ticket: int) -> int:
        """The ticket's decision, once there is one.

        Raises:
            Abandoned: There will be none.
        """
        decision = self.decision(lane, ticket)
        if decision == PENDING:
            self._poll(lambda: self.decision(lane, ticket) != PENDING)
            decision = self.decision(lane, ticket)
        return decision

    def end_fresh(self, step: int) -> None:
        """Tell that from `step` on none of this worker's lanes reads anything new."""
        self._row.fresh_end[self._worker] = step

    def end_busy(self, step: int) -> None:
        """Tell that from `step` on one of this worker's lanes is idle."""
        self._row.idle_from[self._worker] = min(step, int(self._row.idle_from[self._worker]))

    def delivers(self, step: int) -> bool:
        """Whether `step` belongs to the epoch; waits for as many workers as it takes to know.

        The main process of a `StreamDataLoader` sees this from the parts; this is for workers that serve
        torch's `DataLoader`, which have to end the epoch by themselves.

        Raises:
            Abandoned: It will never be known.
        """
        row, workers = self._row, int(self._row.workers[0])

        def passed() -> npt.NDArray[np.bool_]:
            return row.time[:workers] >= (step + 1) * self._rules.lanes

        if self._rules.padding_mode == "drop":  # ends where the first lane idles
            self._poll(lambda: bool(passed().all() or (row.idle_from <= step).any()))
            return not (row.idle_from <= step).any()

        def some_fresh() -> bool:  # a worker counts once it has passed the step: only then is its end known
            return bool((passed() & (row.fresh_end[:workers] > step)).any())

        self._poll(lambda: some_fresh() or bool(passed().all()))
        return some_fresh()

    def finish(self) -> None:
        """Take part no more: nobody has to wait for this worker."""
        self.publish(NEVER)
        self._row.status[self._worker] = FINISHED

    def leave(self) -> None:
        """Go away; before `finish`, this ends the session for those who wait for this worker."""
        if self._row.status[self._worker] == RUNNING:
            self._row.status[self._worker] = LEFT

    def _poll(self, condition: Callable[[], bool]) -> None:
        delay, next_look = _FIRST_WAIT_SECONDS, clock.monotonic() + _LIVENESS_SECONDS
        while not condition():
            if self._closed() or (self._row.status == LEFT).any():
                raise Abandoned
            if clock.monotonic() > next_look:
                next_look += _LIVENESS_SECONDS
                running = self._row.pid[self._row.status == RUNNING]
                if not all(is_alive(int(pid)) for pid in running):
                    raise Abandoned
            clock.sleep(delay)
            delay = min(1.5 * delay, _LONGEST_WAIT_SECONDS)


def local_queues(
    rules: Rules,
    epoch: int,
    lengths: Lengths | None,
    resume: Snapshot | None,
    workers: int = 1,
    closed: Callable[[], bool] | None = None,
) -> list[SourceQueue]:
    """The ends of a session whose workers are threads of this process, in ordinary memory.

    Args:
        rules: Those of the dataset.
        epoch: The epoch's number.
        lengths: Those of the dataset's sources or sections, if they are known.
        resume: Where in the epoch it begins; None at its beginning.
        workers: How many there are; all of them take part from now on.
        closed: Whether the session was closed from outside; None: nobody closes it.
    """
    order = _order(rules, lengths, resume, epoch)
    row, lock = SessionRow(Carver(), rules), threading.Lock()
    row.begin(epoch, workers, first=order.first)
    for worker in range(workers):
        row.enter(worker)
    asked = closed or (lambda: False)
    return [
        SourceQueue(row, worker, rules, order, lambda: lock, asked, gives_up=closed is not None)
        for worker in range(workers)
    ]


def join_session(
    table: SessionTable,
    key: SessionKey,
    worker: int,
    workers: int,
    *,
    lengths: Lengths | None,
    epoch: int | None = None,
    resume: Snapshot | None = None,
    closed: Callable[[], bool] = lambda: False,
    gives_up: bool = False,
) -> SourceQueue:
    """Take part in a session; the first to come creates it.

    Args:
        table: The dataset's sessions.
        key: Names the session; the same for all of its workers.
        worker: This worker's number, below `workers`, the number of those with lanes.
        lengths: Those of the dataset's sources or sections, if they are known.
        epoch: The session's epoch; None takes the owner's next.
        resume: Where in the epoch it begins, the same for all workers; None at its beginning.
        closed: See `SourceQueue`, like the next.
    """
    row, order = table.join(key, worker, workers, epoch, functools.partial(_order, table.rules, lengths, resume))
    return SourceQueue(row, worker, table.rules, order, table.locked, closed, gives_up=gives_up)


def _order(rules: Rules, lengths: Lengths | None, resume: Snapshot | None, epoch: int) -> Order:
    return Order(rules, epoch, lengths, *(resume.cursors, resume.returned) if resume else ())
