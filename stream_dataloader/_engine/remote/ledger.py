"""Requests for sources by workers on several machines, where lengths are not known; a thread of the loader decides.

::

    worker -> loader    session, time, requests: lane, time, ahead      with new requests, before a wait, or after 1 ms
    loader -> worker    session, decisions: lane, decision             as soon as requests are decided

Guarantees: a decision is made once all workers have reached its time, so it is the same for any number of workers.
Nothing waits for an answer unless it needs it at once.
"""

from __future__ import annotations

import select
import socket
import threading
import time as clock
from collections.abc import Callable, Iterable

import numpy as np

from stream_dataloader._engine.descriptors import above_standard
from stream_dataloader._engine.memory.fields import Carver
from stream_dataloader._engine.reading.plan import Reading
from stream_dataloader._engine.reading.source_queue import Abandoned, SourceQueue
from stream_dataloader._engine.remote.frames import FrameSocket
from stream_dataloader._engine.schedule.order import Order
from stream_dataloader._engine.schedule.requests import Ledger
from stream_dataloader._engine.schedule.rules import NEVER, NONE, PENDING, IntArray, Rules
from stream_dataloader._engine.workers.channel import Begin

_LEAST_SECONDS = 1e-3  # between two messages of a worker that only say how far it is
_WAIT_SECONDS = 5e-3  # between looks whether the session is over, or the other thread has taken the decision


class _Session:
    """The requests of one session, as the loader knows them."""

    def __init__(self, number: int, reading: Reading, order: Order) -> None:
        self.number, self._rules, self._readers = number, reading.plan.rules, reading.readers
        self._ledger = Ledger(Carver(), self._rules)
        self._ledger.start(order.again.first)
        self._times = list(reading.times)
        self._taken = [0] * self._rules.lanes
        self._sent = [0] * self._rules.lanes  # decisions that were sent

    def take(self, worker: int, numbers: IntArray) -> None:
        """Take a worker's time and requests."""
        time, *requests = numbers.tolist()
        self._times[worker] = max(self._times[worker], time)
        lanes = requests[::3]
        for lane, at, ahead in zip(lanes, requests[1::3], requests[2::3], strict=True):
            self._ledger.take(lane, at, bool(ahead))
            self._taken[lane] += 1
        self._ledger.show(lanes)

    def decide(self) -> dict[int, list[int]]:
        """Decide what can be decided; return each worker's news, as lanes and decisions in turn."""
        if not self._ledger.has_undecided():
            return {}
        self._ledger.decide(min(self._times) if self._rules.deterministic else NEVER)
        news: dict[int, list[int]] = {}
        for worker, reader in enumerate(self._readers):
            for lane in reader.lanes:
                while self._sent[lane] < self._taken[lane]:
                    decision = self._ledger.decision(lane, self._sent[lane])
                    if decision == PENDING:
                        break
                    news.setdefault(worker, []).extend((lane, decision))
                    self._sent[lane] += 1
        return news


class LedgerThread:
    """Decides requests in a thread, which lives until `close`."""

    def __init__(self, reading: Callable[[Begin], Reading]) -> None:
        self._reading = reading
        self._session: _Session | None = None
        self._turn = threading.Lock()
        self._new: list[tuple[int, FrameSocket]] = []
        self._ends: dict[int, tuple[int, FrameSocket]] = {}  # workers and their connections, by descriptors
        with above_standard():
            self._wake, self._woken = socket.socketpair()
        threading.Thread(target=self._run, name="stream-ledger", daemon=True).start()

    def begin(self, begin: Begin) -> None:
        """Begin a session, before any worker is told of it."""
        if self._session is None or self._session.number != begin.session:
            reading = self._reading(begin)
            session = _Session(begin.session, reading, reading.order(begin.start.epoch))
            with self._turn:
                self._session = session

    def add(self, worker: int, end: FrameSocket) -> None:
        """Add a worker's connection."""
        with self._turn:
            self._new.append((worker, end))
        self._wake.send(b"+")

    def close(self) -> None:
        """End the thread and the connections."""
        self._wake.close()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor in self._ends:
                    self._take(poll, *self._ends[descriptor])
                elif not self._woken.recv(64):
                    break
            else:
                with self._turn:
                    for worker, end in self._new:
                        self._ends[end.fileno()] = worker, end
                        poll.register(end, select.POLLIN)
                    self._new.clear()
                    self._send_decisions(poll)
                continue
            break
        self._woken.close()
        for _, end in (*self._ends.values(), *self._new):
            end.close()

    def _take(self, poll: select.poll, worker: int, end: FrameSocket) -> None:
        try:
            while (frame := end.take()) is not None:
                numbers: IntArray = np.frombuffer(frame[0], np.int64)
                with self._turn:
                    if self._session is not None and self._session.number == numbers[0]:
                        self._session.take(worker, numbers[1:])
        except EOFError:
            poll.unregister(end)
            del self._ends[end.fileno()]
            end.close()

    def _send_decisions(self, poll: select.poll) -> None:
        """Send what was decided; the caller holds the lock."""
        news = {} if self._session is None else self._session.decide()
        for worker, end in self._ends.values():
            if self._session is not None and (found := news.get(worker)):
                end.put([np.array([self._session.number, *found], np.int64)])
            poll.modify(end, select.POLLIN if end.flush() else select.POLLIN | select.POLLOUT)


class LedgerQueue(SourceQueue):
    """A worker's source queue. The loader decides its requests, mostly before they are needed."""

    is_shared = True

    def __init__(
        self,
        end: FrameSocket,
        session: int,
        lanes: Iterable[int],
        rules: Rules,
        order: Order,
        is_over: Callable[[], bool],
    ) -> None:
        super().__init__(rules, order)
        self._end, self._number, self._is_over = end, session, is_over
        self._time = self._sent = -1  # the time that was published, and that the loader knows
        self._sent_at = 0.0
        self._requests: list[int] = []  # that the loader does not know
        self._taken = dict.fromkeys(lanes, 0)
        self._decisions: dict[int, list[int]] = {lane: [] for lane in lanes}
        self._listening = threading.Lock()  # a thread that opens sources early listens, too

    def take(self, lane: int, time: int, ahead: bool) -> int:
        """See `SourceQueue`."""
        self._requests += (lane, time, ahead)
        self._taken[lane] += 1
        return PENDING - self._taken[lane]

    def publish(self, time: int) -> None:
        """See `SourceQueue`."""
        self._time = time
        if self._requests or clock.monotonic() - self._sent_at >= _LEAST_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Tell the loader what it does not know yet, at once."""
        if self._requests or self._sent < self._time:
            self._end.put([np.array([self._number, self._time, *self._requests], np.int64)])
            self._end.flush()
            self._requests.clear()
            self._sent, self._sent_at = self._time, clock.monotonic()

    def decision(self, lane: int, request: int) -> int:
        """See `SourceQueue`."""
        if request > PENDING:
            return request
        number, known = PENDING - 1 - request, self._decisions[lane]
        if number >= len(known):
            self._listen()
        if number >= len(known):
            return PENDING
        return NONE if known[number] == NONE else self.order.again.draw(known[number])

    def wait(self, lane: int, time: int, request: int) -> int:
        """See `SourceQueue`."""
        while (decision := self.decision(lane, request)) == PENDING:
            if self._time < time or self._requests:
                self._time = max(self._time, time)
                self.flush()
            self._end.wait(select.POLLIN, _WAIT_SECONDS)
            self._end.flush()
            if self._is_over():
                raise Abandoned
        return decision

    def _listen(self) -> None:
        with self._listening:
            try:
                while (frame := self._end.take()) is not None:
                    session, *news = np.frombuffer(frame[0], np.int64).tolist()
                    if session == self._number:
                        for lane, decision in zip(news[::2], news[1::2], strict=True):
                            self._decisions[lane].append(decision)
            except EOFError:
                raise Abandoned from None

    def finish(self) -> None:
        """See `SourceQueue`."""
        self._time = NEVER
        self.flush()


class LedgerRows:
    """A worker's connection to the loader's ledger, in place of rows in shared memory.

    Attributes:
        queue: The queue of the current session.
    """

    def __init__(self, end: FrameSocket) -> None:
        self._end = end
        self.queue: LedgerQueue | None = None

    def enter(
        self,
        reading: Reading,
        session: int,
        place: int,
        closed: Callable[[], bool],
        *,
        gives_up: bool,  # noqa: ARG002
    ) -> SourceQueue:
        """Join a session."""
        assert reading.start is not None
        order = reading.order(reading.start.epoch)
        lanes = reading.readers[place].lanes
        self.queue = LedgerQueue(self._end, session, lanes, reading.plan.rules, order, closed)
        return self.queue

    def flush(self) -> None:
        """Tell the loader how far this worker is, before it waits for something else."""
        if self.queue is not None:
            self.queue.flush()
