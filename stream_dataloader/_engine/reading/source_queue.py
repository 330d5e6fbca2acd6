"""Source queues: a reader draws its sources alone, or together with others by requests in order of time.

If lengths are known, each reader computes all requests by itself. Otherwise readers join a session. Each of them
publishes the time it is about to work on, and never makes a request for an earlier one. So the requests up to the
smallest published time can be decided for good, by any reader that holds the lock.

Guarantee: a wait ends, with `Abandoned`, when the session is closed or one of its workers is gone.
"""

from __future__ import annotations

import os
import time as clock
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from stream_dataloader._engine.reading.session_row import FINISHED, LEFT, RUNNING, SessionRow, is_alive
from stream_dataloader._engine.schedule.draws import Draws
from stream_dataloader._engine.schedule.order import Order
from stream_dataloader._engine.schedule.place import Place
from stream_dataloader._engine.schedule.replay import Replay
from stream_dataloader._engine.schedule.rules import NEVER, PENDING, Rules
from stream_dataloader._engine.schedule.sections import Lengths

# Most waits are shorter than the shortest sleep takes: for another worker to open and read a short stream.
_BUSY_WAIT_SECONDS = 100e-6
_FIRST_WAIT_SECONDS = 20e-6
_USUAL_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 1e-3, 10e-3
_LIVENESS_SECONDS = 0.5


_yield: Callable[[], None] = getattr(os, "sched_yield", lambda: clock.sleep(0))


class Abandoned(Exception):
    """The session has no future: it was closed, or one of its workers is gone."""


class SourceQueue:
    """Source queue of a reader that reads all lanes alone.

    Args:
        draws: The draws from the place on where it begins.
        closed: See below.

    Attributes:
        is_shared: Whether other readers may wait for this one's first items.
        order: The source of each draw; its `epoch` is the one that is read.
        closed: Whether to give up. Threads cannot be killed, so a thread that reads asks this between two lanes.
    """

    is_shared = False

    def __init__(self, order: Order, draws: Draws, closed: Callable[[], bool] | None = None) -> None:
        self.order = order
        self.closed = closed
        self._draws = draws

    def publish(self, time: int) -> None:
        """Publish a time: from now on, make no request for an earlier one."""

    def take(self, lane: int, time: int, ahead: bool) -> int:  # noqa: ARG002
        """Make a request: its draw or `NONE`, or a number below `PENDING`."""
        return self._draws.decide(lane, ahead)

    def decision(self, lane: int, request: int) -> int:  # noqa: ARG002
        """Return a request's draw, `NONE` or `PENDING`."""
        return request

    def wait(self, lane: int, time: int, request: int) -> int:  # noqa: ARG002
        """Wait for the decision of a request and return it; `time` is the time that the reader works on."""
        return self.decision(lane, request)

    def is_waited_for(self) -> bool:
        """Return whether some lane has a request that cannot be decided yet, as far as this reader knows."""
        return False

    def finish(self) -> None:
        """Finish the epoch: other readers need not wait for this one any more."""

    def leave(self) -> None:
        """Leave the session; before `finish`, this ends it for readers that wait for this one."""


class KnownQueue(SourceQueue):
    """Source queue of a reader if lengths are known: it computes the requests of all lanes by itself.

    So it waits for no other reader, and needs neither a session nor a lock.

    Args:
        place: The place from which the epoch goes on.
        lanes: The lanes that are read here.
    """

    def __init__(
        self,
        rules: Rules,
        order: Order,
        closed: Callable[[], bool] | None,
        lengths: Lengths,
        place: Place,
        lanes: Iterable[int],
    ) -> None:
        super().__init__(order, Draws(rules, place, note=self._note), closed)
        self._drawn: dict[int, deque[int]] = {lane: deque() for lane in lanes}
        replay = Replay(rules, order, lengths, place, self._draws)
        self._sources = replay.sources_before(NEVER // rules.lanes)

    def _note(self, lane: int, draw: int) -> None:
        if lane in self._drawn:
            self._drawn[lane].append(draw)

    def take(self, lane: int, time: int, ahead: bool) -> int:  # noqa: ARG002
        """See `SourceQueue`."""
        drawn = self._drawn[lane]
        while not drawn and next(self._sources, None) is not None:
            pass
        return drawn.popleft()


class SessionQueue(SourceQueue):
    """Source queue of a reader in a session; with `gives_up`, `closed` is asked between lanes.

    Args:
        draws: The draws, with the cursors of the row, which all readers move.
    """

    is_shared = True

    def __init__(
        self,
        row: SessionRow,
        worker: int,
        rules: Rules,
        order: Order,
        draws: Draws,
        lock: Callable[[], AbstractContextManager[object]],
        closed: Callable[[], bool],
        *,
        gives_up: bool,
    ) -> None:
        super().__init__(order, draws, closed if gives_up else None)
        self._row, self._rules = row, rules
        self._time = row.time.data  # writing a number to it is several times faster than to the array
        self._worker = worker
        self._lock = lock
        self._is_over = closed
        self._hidden: set[int] = set()  # lanes with requests that were made but not shown yet
        self._horizon = -1  # the time up to which all requests are decided

    def publish(self, time: int) -> None:
        """See `SourceQueue`."""
        # Requests must be shown before the time after them: otherwise another reader could decide later requests first.
        if self._hidden:
            with self._lock():
                self._row.ledger.show(self._hidden)
                self._hidden.clear()
                self._time[self._worker] = time
                self._decide_requests()
        else:
            self._time[self._worker] = time

    def is_waited_for(self) -> bool:
        """See `SourceQueue`."""
        return self._row.ledger.has_undecided()

    def take(self, lane: int, time: int, ahead: bool) -> int:
        """See `SourceQueue`."""
        self._hidden.add(lane)
        return PENDING - 1 - self._row.ledger.take(lane, time, ahead)

    def decision(self, lane: int, request: int) -> int:
        """See `SourceQueue`."""
        if request > PENDING:
            return request
        number, ledger = PENDING - 1 - request, self._row.ledger
        decision = ledger.decision(lane, number)
        if decision == PENDING and self._reached() != self._horizon:
            with self._lock():
                self._decide_requests()
            decision = ledger.decision(lane, number)
        return decision

    def _decide_requests(self) -> None:
        self._horizon = self._reached()
        self._row.ledger.decide(self._horizon, self._draws)

    def _reached(self) -> int:
        """Return the time that all readers have reached."""
        return int(self._row.time.min()) if self._rules.deterministic else NEVER

    def wait(self, lane: int, time: int, request: int) -> int:
        """See `SourceQueue`.

        This publishes the lane's own time. Usually a reader publishes whole steps only, as its lanes are consecutive.
        """
        decision = self.decision(lane, request)
        if decision == PENDING:
            self.publish(time)
            self._poll(lambda: self.decision(lane, request) != PENDING)
            decision = self.decision(lane, request)
        return decision

    def has_read(self, step: int, has_data: bool, *, last: bool) -> None:
        """Tell the other workers whether a step belongs to the epoch, as far as this worker's lanes show it."""
        if not has_data:
            self._row.end[self._worker] = min(step, int(self._row.end[self._worker]))
        self._row.read[self._worker] = NEVER if last else step + 1

    def delivers(self, step: int) -> bool:
        """Return whether `step` belongs to the epoch, after waiting for the workers whose answer is needed.

        Raises:
            Abandoned: A worker is gone, so the answer will never be known.
        """
        workers = slice(int(self._row.workers[0]))
        read, end = self._row.read[workers], self._row.end[workers]
        drops = self._rules.padding_mode == "drop"  # the epoch ends with the first idle lane, not with the last

        def is_decided() -> bool:  # one worker that has read the step may suffice, otherwise all must have
            has_read = read > step
            return bool(has_read.all() or (has_read & ((end <= step) == drops)).any())

        self._poll(is_decided)
        return bool((end > step).all() if drops else ((end > step) & (read > step)).any())

    def finish(self) -> None:
        """See `SourceQueue`."""
        self.publish(NEVER)
        self._row.status[self._worker] = FINISHED

    def leave(self) -> None:
        """See `SourceQueue`."""
        if self._row.status[self._worker] == RUNNING:
            self._row.status[self._worker] = LEFT

    def _poll(self, condition: Callable[[], bool]) -> None:
        begun = clock.monotonic()
        delay, next_look = _FIRST_WAIT_SECONDS, begun + _LIVENESS_SECONDS
        while not condition():
            # A reader that left without finishing publishes no further time, so this wait would never end.
            if self._is_over() or (self._row.status == LEFT).any():
                raise Abandoned
            # A process that was killed could not set its status, so processes are checked from time to time.
            if (now := clock.monotonic()) > next_look:
                next_look += _LIVENESS_SECONDS
                running = self._row.pid[self._row.status == RUNNING]
                if not all(is_alive(int(pid)) for pid in running):
                    raise Abandoned
            if now - begun < _BUSY_WAIT_SECONDS:
                _yield()
                continue
            clock.sleep(delay)
            # A longer wait looks less often, so that it ends at most about 1 % later than possible.
            delay = min(1.5 * delay, max(_USUAL_WAIT_SECONDS, (now - begun) / 100), _LONGEST_WAIT_SECONDS)
