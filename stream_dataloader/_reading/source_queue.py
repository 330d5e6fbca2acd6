"""The shared, lock-guarded list of sources: workers take out tickets here and learn what they were granted.

Each worker publishes the time it is about to work on; it never takes out a ticket for an earlier one. So the
tickets up to the smallest published time can be decided for good, and whoever holds the lock decides them
(`ledger.Ledger`). Waiting workers poll: nothing relies on a notify that a killed worker could swallow.

A *session* is one iteration over the dataset. It is created by whichever of its workers comes first, in a
slot of a table that all workers of the dataset share, and found by its key::

    StreamDataLoader       (main's pid, minus the loader's number, number of the iteration)
    torch's DataLoader     (parent's pid, process ordinal - worker id, how often the worker was iterated)

Guarantees: a slot is taken over only when all workers of its session have left it or are dead, and a wait
ends, with `Abandoned`, when the session is closed or one of its workers is gone.
"""

from __future__ import annotations

import os
import threading
import time as clock
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stream_dataloader._memory.fields import Carver, bytes_of
from stream_dataloader._memory.shared_memory import SharedMemory
from stream_dataloader._schedule.ledger import Ledger
from stream_dataloader._schedule.order import Order
from stream_dataloader._schedule.rules import NEVER, PENDING, IntArray, Rules
from stream_dataloader._state.progress import Snapshot

_SESSIONS = 64  # iterations over one dataset that can be alive at once
_OWNERS = 4096  # live processes that iterate over one dataset
_ABSENT, _RUNNING, _FINISHED, _LEFT = range(4)
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 20e-6, 1e-3
_LIVENESS_SECONDS = 0.5


class Abandoned(Exception):
    """The session has no future: it was closed, or one of its workers is gone."""


class SessionKey(NamedTuple):
    """Names one iteration over a dataset."""

    owner: int
    group: int
    iteration: int


class _Slot:
    """One session's state within a flat int64 array; all zero is a free slot."""

    def __init__(self, memory: IntArray, rules: Rules) -> None:
        head, memory = memory[:6], memory[6:]
        self.key, self.epoch, self.workers, self.created = head[:3], head[3:4], head[4:5], head[5:6]
        columns = memory[: 5 * rules.lanes].reshape(5, rules.lanes)
        self.status, self.pid, self.time, self.fresh_end, self.idle_from = columns
        self.ledger_memory = memory[5 * rules.lanes :]
        self.ledger = Ledger(Carver(self.ledger_memory), rules)

    @staticmethod
    def size(rules: Rules) -> int:
        return 6 + 5 * rules.lanes + bytes_of(lambda carve: Ledger(carve, rules)) // 8

    def create(self, key: SessionKey, epoch: int, workers: int, number: int, first: Sequence[int]) -> None:
        self.key[:], self.epoch[0], self.workers[0], self.created[0] = key, epoch, workers, number
        self.status[:] = _ABSENT
        self.time[:workers], self.time[workers:] = 0, NEVER
        self.fresh_end[:] = self.idle_from[:] = NEVER
        self.ledger_memory[:] = 0
        self.ledger.start(first)

    def gone(self, all_arrived: bool) -> bool:
        """Whether every worker that came has left or died; `all_arrived`: and none is still to come."""
        status = self.status[: self.workers[0]]
        if all_arrived and (status == _ABSENT).any():
            return False
        running = self.pid[: len(status)][status == _RUNNING]
        return not any(is_alive(int(pid)) for pid in running)


class SourceQueue:
    """A worker's end of one session.

    Attributes:
        epoch: The session's epoch number.
        order: What grants stand for.
    """

    def __init__(
        self,
        slot: _Slot,
        worker: int,
        rules: Rules,
        order: Order,
        lock: Callable[[], AbstractContextManager[object]],
        closed: Callable[[], bool],
    ) -> None:
        self._slot, self._worker, self._rules = slot, worker, rules
        self._lock, self._closed = lock, closed
        self.epoch = int(slot.epoch[0])
        self.order = order

    def publish(self, time: int) -> None:
        """Promise to take out no ticket for an earlier time any more."""
        self._slot.time[self._worker] = time

    def is_waited_for(self) -> bool:
        """Some lane has a ticket that cannot be decided yet."""
        return self._slot.ledger.has_undecided()

    def take(self, lane: int, time: int, *, ahead: bool) -> int:
        """Take out a ticket and return its number within the lane."""
        with self._lock():
            return self._slot.ledger.take(lane, time, ahead)

    def decision(self, lane: int, ticket: int) -> int:
        """The number of the ticket's grant, `NONE`, or `PENDING`; decides what can be decided."""
        horizon = int(self._slot.time.min()) if self._rules.deterministic else NEVER
        if horizon < self._slot.ledger.time(lane, ticket):
            return PENDING
        with self._lock():
            self._slot.ledger.grant(horizon)
            return self._slot.ledger.decision(lane, ticket)

    def wait(self, lane: int, ticket: int) -> int:
        """The ticket's decision, once there is one.

        Raises:
            Abandoned: There will be none.
        """
        self._poll(lambda: self.decision(lane, ticket) != PENDING)
        return self.decision(lane, ticket)

    def end_fresh(self, step: int) -> None:
        """Tell that from `step` on none of this worker's lanes reads anything new."""
        self._slot.fresh_end[self._worker] = step

    def end_busy(self, step: int) -> None:
        """Tell that from `step` on one of this worker's lanes is idle."""
        self._slot.idle_from[self._worker] = min(step, int(self._slot.idle_from[self._worker]))

    def delivers(self, step: int) -> bool:
        """Whether `step` belongs to the epoch; waits for as many workers as it takes to know.

        The main process of a `StreamDataLoader` sees this from the parts; this is for workers that serve
        torch's `DataLoader`, which have to end the epoch by themselves.

        Raises:
            Abandoned: It will never be known.
        """
        slot, workers = self._slot, int(self._slot.workers[0])

        def passed() -> npt.NDArray[np.bool_]:
            return slot.time[:workers] >= (step + 1) * self._rules.lanes

        if self._rules.padding_mode == "drop":  # ends where the first lane idles
            self._poll(lambda: bool(passed().all() or (slot.idle_from <= step).any()))
            return not (slot.idle_from <= step).any()

        def some_fresh() -> bool:  # a worker counts once it has passed the step: only then is its end known
            return bool((passed() & (slot.fresh_end[:workers] > step)).any())

        self._poll(lambda: some_fresh() or bool(passed().all()))
        return some_fresh()

    def finish(self) -> None:
        """Take part no more: nobody has to wait for this worker."""
        self.publish(NEVER)
        self._slot.status[self._worker] = _FINISHED

    def leave(self) -> None:
        """Go away; before `finish`, this ends the session for those who wait for this worker."""
        if self._slot.status[self._worker] == _RUNNING:
            self._slot.status[self._worker] = _LEFT

    def _poll(self, condition: Callable[[], bool]) -> None:
        delay, next_look = _FIRST_WAIT_SECONDS, clock.monotonic() + _LIVENESS_SECONDS
        while not condition():
            if self._closed() or (self._slot.status == _LEFT).any():
                raise Abandoned
            if clock.monotonic() > next_look:
                next_look += _LIVENESS_SECONDS
                running = self._slot.pid[self._slot.status == _RUNNING]
                if not all(is_alive(int(pid)) for pid in running):
                    raise Abandoned
            clock.sleep(delay)
            delay = min(1.5 * delay, _LONGEST_WAIT_SECONDS)


def local_queue(rules: Rules, epoch: int, lengths: IntArray | None, resume: Snapshot | None = None) -> SourceQueue:
    """The queue of a session without workers, in ordinary memory."""
    order = _order(rules, epoch, lengths, resume)
    slot = _Slot(np.zeros(_Slot.size(rules), np.int64), rules)
    slot.create(SessionKey(os.getpid(), 0, 0), epoch, workers=1, number=0, first=order.first)
    slot.status[0], slot.pid[0] = _RUNNING, os.getpid()
    lock = threading.Lock()
    return SourceQueue(slot, 0, rules, order, lambda: lock, lambda: False)


def _order(rules: Rules, epoch: int, lengths: IntArray | None, resume: Snapshot | None) -> Order:
    return Order(rules, epoch, lengths, *(resume.cursors, resume.returned) if resume else ())


class SessionTable:
    """All sessions of one dataset, in shared memory, and the number of its next epoch for each owner.

    Owners are processes that iterate over the dataset; several may, if it was sent or forked to them.

    Attributes:
        rules: Those of the dataset.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._head = 2 + 2 * _OWNERS  # sessions created, the epoch to begin with, then owners and their epochs
        self._memory = SharedMemory(8 * (self._head + _SESSIONS * _Slot.size(rules)))

    def take_epoch(self, owner: int) -> int:
        """The number of an owner's next epoch, which then counts as taken."""
        with self._memory.locked():
            return self._take_epoch(owner)

    def _take_epoch(self, owner: int) -> int:
        row = self._row(owner)
        row[1] += 1
        return int(row[1]) - 1

    def set_epoch(self, owner: int, epoch: int) -> None:
        """Set the number of an owner's next epoch, and of the first of owners to come."""
        with self._memory.locked():
            self._memory.array()[1] = epoch
            self._row(owner)[1] = epoch

    def _row(self, owner: int) -> IntArray:
        """An owner's pid and next epoch."""
        array: IntArray = self._memory.array()
        rows: IntArray = array[2 : self._head].reshape(-1, 2)
        owners = rows[:, 0]
        found = np.flatnonzero(owners == owner)
        if len(found):
            existing: IntArray = rows[int(found[0])]
            return existing
        free = np.flatnonzero(owners == 0)
        place = int(free[0]) if len(free) else next((i for i, pid in enumerate(owners) if not is_alive(int(pid))), None)
        if place is None:
            raise RuntimeError(
                f"{len(rows)} live processes iterate over one StreamDataset, the most there can be; build a "
                "StreamDataset in each"
            )
        row: IntArray = rows[place]
        row[:] = owner, array[1]
        return row

    def join(
        self,
        key: SessionKey,
        worker: int,
        workers: int,
        *,
        lengths: IntArray | None,
        epoch: int | None = None,
        resume: Snapshot | None = None,
        closed: Callable[[], bool] = lambda: False,
    ) -> SourceQueue:
        """Take part in a session; the first to come creates it.

        Args:
            key: Names the session; the same for all of its workers.
            worker: This worker's number, below `workers`, the number of those with lanes.
            epoch: The session's epoch; None takes the owner's next.
            resume: Where in the epoch it begins, the same for all workers; None at its beginning.
            closed: Whether the session was closed from outside; asked while waiting.
        """
        size, array = _Slot.size(self.rules), self._memory.array()
        places = array[self._head :].reshape(_SESSIONS, size)
        with self._memory.locked():
            slots = [_Slot(place, self.rules) for place in places]
            slot = next((slot for slot in slots if tuple(slot.key) == key), None)
            if slot is None:
                slot = _free_slot(slots)
                array[0] += 1
                begun = self._take_epoch(key.owner) if epoch is None else epoch
                order = _order(self.rules, begun, lengths, resume)
                slot.create(key, begun, workers, int(array[0]), order.first)
            else:
                order = _order(self.rules, int(slot.epoch[0]), lengths, resume)
            slot.status[worker], slot.pid[worker] = _RUNNING, os.getpid()
        return SourceQueue(slot, worker, self.rules, order, self._memory.locked, closed)


def _free_slot(slots: list[_Slot]) -> _Slot:
    oldest_first = sorted(slots, key=lambda slot: int(slot.created[0]))
    for all_arrived in (True, False):  # a worker killed before it came keeps a slot only while there are others
        for slot in oldest_first:
            if not slot.created[0] or slot.gone(all_arrived):
                return slot
    raise RuntimeError(
        f"{_SESSIONS} iterations over one StreamDataset are alive at once, the most there can be; "
        "close some, or build a StreamDataset for each"
    )


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended but was not waited for yet does not."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
