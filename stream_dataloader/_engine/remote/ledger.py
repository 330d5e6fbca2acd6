"""Requests for sources by workers on several machines, where lengths are not known; the loader decides them.

::

    worker -> loader    session, time, requests: lane, time, ahead      with new requests, before a wait, or after 1 ms
    loader -> worker    session, decisions: lane, decision             as soon as requests are decided

Guarantees: a decision is made once all workers have reached its time, so it is the same for any number of workers.
Nothing waits for an answer unless it needs it at once.
"""

from __future__ import annotations

import threading
import time as clock
from collections.abc import Callable, Iterable

import numpy as np

from stream_dataloader._engine.memory.fields import Carver
from stream_dataloader._engine.reading.plan import Reading
from stream_dataloader._engine.reading.source_queue import Abandoned, SourceQueue
from stream_dataloader._engine.schedule.draws import Draws
from stream_dataloader._engine.schedule.order import Order
from stream_dataloader._engine.schedule.requests import Ledger
from stream_dataloader._engine.schedule.rules import NEVER, PENDING, IntArray
from stream_dataloader._engine.workers.channel import Begin

_LEAST_SECONDS = 1e-3  # between two messages of a worker that only say how far it is
_WAIT_SECONDS = 50e-3  # between looks whether the session is over


class RemoteLedger:
    """The requests of the current session, as the loader knows them. One thread at a time may call it."""

    def __init__(self, reading: Callable[[Begin], Reading]) -> None:
        self._reading = reading
        self._session = 0

    def begin(self, begin: Begin) -> None:
        """Begin a session, before any worker is told of it."""
        if self._session == begin.session:
            return
        reading = self._reading(begin)
        self._session, self._rules, self._readers = begin.session, reading.plan.rules, reading.readers
        self._ledger = Ledger(Carver(), self._rules)
        self._draws = reading.draws(self._ledger.cursors)
        self._ledger.start(self._draws.first)
        self._times = list(reading.times)
        self._taken = [0] * self._rules.lanes
        self._sent = [0] * self._rules.lanes  # decisions that were returned

    def take(self, worker: int, numbers: IntArray) -> dict[int, IntArray]:
        """Take a worker's time and requests; return the messages to workers whose requests are decided now."""
        session, time, *requests = numbers.tolist()
        if session != self._session:
            return {}
        self._times[worker] = max(self._times[worker], time)
        lanes = requests[::3]
        for lane, at, ahead in zip(lanes, requests[1::3], requests[2::3], strict=True):
            self._ledger.take(lane, at, bool(ahead))
            self._taken[lane] += 1
        self._ledger.show(lanes)
        return self._decide() if self._ledger.has_undecided() else {}

    def _decide(self) -> dict[int, IntArray]:
        self._ledger.decide(min(self._times) if self._rules.deterministic else NEVER, self._draws)
        decided: dict[int, list[int]] = {}
        for worker, reader in enumerate(self._readers):
            for lane in reader.lanes:
                while self._sent[lane] < self._taken[lane]:
                    decision = self._ledger.decision(lane, self._sent[lane])
                    if decision == PENDING:
                        break
                    decided.setdefault(worker, [self._session]).extend((lane, decision))
                    self._sent[lane] += 1
        return {worker: np.array(found, np.int64) for worker, found in decided.items()}


class RemoteQueue(SourceQueue):
    """A worker's source queue. The loader decides its requests, mostly before they are needed.

    Args:
        tell: Sends a message to the loader's ledger.
    """

    is_shared = True

    def __init__(
        self,
        tell: Callable[[IntArray], None],
        session: int,
        lanes: Iterable[int],
        order: Order,
        draws: Draws,
        is_over: Callable[[], bool],
    ) -> None:
        super().__init__(order, draws)
        self._tell, self._session, self._is_over = tell, session, is_over
        self._time = self._told = -1  # the time that was published, and that the loader knows
        self._told_at = 0.0
        self._requests: list[int] = []  # that the loader does not know
        self._taken = dict.fromkeys(lanes, 0)
        self._decisions: dict[int, list[int]] = {lane: [] for lane in lanes}
        self._news = threading.Condition()

    def hear(self, numbers: IntArray) -> None:
        """Take decisions of the loader; called by the thread that receives."""
        session, *decisions = numbers.tolist()
        if session == self._session:
            with self._news:
                for lane, decision in zip(decisions[::2], decisions[1::2], strict=True):
                    self._decisions[lane].append(decision)
                self._news.notify_all()

    def take(self, lane: int, time: int, ahead: bool) -> int:
        """See `SourceQueue`."""
        self._requests += (lane, time, ahead)
        self._taken[lane] += 1
        return PENDING - self._taken[lane]

    def publish(self, time: int) -> None:
        """See `SourceQueue`."""
        self._time = time
        if self._requests or clock.monotonic() - self._told_at >= _LEAST_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Tell the loader what it does not know yet, at once."""
        if self._requests or self._told < self._time:
            self._tell(np.array([self._session, self._time, *self._requests], np.int64))
            self._requests.clear()
            self._told, self._told_at = self._time, clock.monotonic()

    def decision(self, lane: int, request: int) -> int:
        """See `SourceQueue`."""
        if request > PENDING:
            return request
        number, known = PENDING - 1 - request, self._decisions[lane]
        return known[number] if number < len(known) else PENDING

    def wait(self, lane: int, time: int, request: int) -> int:
        """See `SourceQueue`."""
        while (decision := self.decision(lane, request)) == PENDING:
            if self._time < time or self._requests:
                self._time = max(self._time, time)
                self.flush()
            with self._news:
                if self.decision(lane, request) == PENDING:
                    self._news.wait(_WAIT_SECONDS)
            if self._is_over():
                raise Abandoned
        return decision

    def finish(self) -> None:
        """See `SourceQueue`."""
        self._time = NEVER
        self.flush()
