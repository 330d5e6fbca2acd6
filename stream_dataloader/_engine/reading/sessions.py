"""Sessions, the shared state of one iteration over a dataset, in memory that all its workers share.

A *session* is one iteration over the dataset, and has a row. A `StreamDataLoader` tells its workers their row. With
torch's own `DataLoader`, the first worker creates the session, in a table::

    table     sessions created | epoch of new owners | owners: pid, next epoch | sessions: key, number | their rows
    row       epoch, workers | of each worker: status, pid, time, ends | the ledger of its requests

Guarantee: a row is taken over only when all workers of its session have left it or are dead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple

import numpy as np

from stream_dataloader._engine.memory.fields import Carver, SharedFields, bytes_of
from stream_dataloader._engine.schedule.order import Order
from stream_dataloader._engine.schedule.requests import Ledger
from stream_dataloader._engine.schedule.rules import NEVER, Rules

_SESSIONS = 64  # iterations over one dataset that can be alive at once
_OWNERS = 4096  # live processes that iterate over one dataset

#: Status of a worker in its session. ABSENT is 0, because cleared memory must mean that no worker has come.
ABSENT, RUNNING, FINISHED, LEFT = range(4)


class SessionKey(NamedTuple):
    """Name of one iteration over a dataset.

    Attributes:
        owner: Process id of the parent.
        group: Process ordinal minus worker id.
        iteration: How often the dataset was iterated before.
    """

    owner: int
    group: int
    iteration: int


class SessionRow:
    """One session's state; cleared before it begins.

    There are at most as many workers as lanes, so arrays with an entry per worker have one entry per lane.

    Attributes:
        epoch: The epoch's number, as an array of one.
        workers: Number of workers that take part, as an array of one.
        status: Status of each worker.
        pid: Process id of each worker, once it has joined.
        time: The time that each worker has published: it makes no request for an earlier one.
        read: Steps that each worker has read, where workers themselves find out which steps belong to the epoch.
        end: The step that ends the epoch, as far as such a worker knows.
        ledger: The session's requests.
    """

    def __init__(self, carve: Carver, rules: Rules) -> None:
        self.epoch = carve(1)
        self.workers = carve(1)
        self.status = carve(rules.lanes)
        self.pid = carve(rules.lanes)
        self.time = carve(rules.lanes)
        self.read = carve(rules.lanes)
        self.end = carve(rules.lanes)
        self.ledger = Ledger(carve, rules)

    def begin(self, epoch: int, times: Sequence[int], first: Sequence[int]) -> None:
        """Begin a session that no worker has joined yet."""
        self.epoch[0] = epoch
        self.workers[0] = len(times)
        self.time[:] = NEVER  # entries beyond the last worker must not delay any decision
        self.time[: len(times)] = times
        self.end[:] = NEVER
        self.ledger.start(first)

    def enter(self, worker: int) -> None:
        """Join as a worker, in this process."""
        self.pid[worker] = os.getpid()
        self.status[worker] = RUNNING

    def gone(self, *, all_arrived: bool) -> bool:
        """Return whether every worker that joined is gone; with `all_arrived`, also that all have joined."""
        status = self.status[: self.workers[0]]
        if all_arrived and (status == ABSENT).any():
            return False
        running = self.pid[: len(status)][status == RUNNING]
        return not any(is_alive(int(pid)) for pid in running)


class SessionTable(SharedFields):
    """All sessions of one dataset, and the number of its next epoch for each process that iterates over it.

    Attributes:
        rules: The dataset's rules.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        super().__init__()

    def _lay_out(self, carve: Carver) -> None:
        self._created = carve(1)  # number of sessions that were created
        self._first_epoch = carve(1)  # the first epoch of new owners
        self._owner = carve(_OWNERS)  # each owner's process id; 0 is a free place
        self._next_epoch = carve(_OWNERS)
        self._key = carve(_SESSIONS, len(SessionKey._fields))
        self._number = carve(_SESSIONS)  # from 1 in the order in which sessions were created; 0 is a free row
        # A row is laid out when it is used: laying out all of them would take as long as the rest of a worker's start.
        self._rows = carve(_SESSIONS, bytes_of(partial(SessionRow, rules=self.rules)), dtype=np.uint8)

    def take_epoch(self, owner: int) -> int:
        """Take the number of an owner's next epoch."""
        with self.locked():
            return self._take_epoch(owner)

    def set_epoch(self, owner: int, epoch: int) -> None:
        """Set the number of an owner's next epoch, and of the first epoch of new owners."""
        with self.locked():
            self._first_epoch[0] = epoch
            self._next_epoch[self._place_of(owner)] = epoch

    def locked(self) -> AbstractContextManager[None]:
        """Keep other workers out of all sessions."""
        return self._memory.locked()

    def join(
        self, key: SessionKey, worker: int, times: Sequence[int], order_of: Callable[[int], Order]
    ) -> tuple[SessionRow, Order]:
        """Join a session; the first worker creates it.

        Args:
            key: The session's name, the same for all of its workers.
            worker: This worker's number.
            times: The time at which each worker begins.
            order_of: Makes the order in which an epoch's sources are drawn.

        Returns:
            The session's state, and its order.
        """
        with self.locked():
            found = np.flatnonzero((self._number > 0) & (self._key == key).all(axis=1))
            if len(found):
                row = self._row(int(found[0]))
                order = order_of(int(row.epoch[0]))
            else:
                place = self._free_place()
                self._created[0] += 1
                begun = self._take_epoch(key.owner)
                order = order_of(begun)
                self._key[place] = key
                self._number[place] = self._created[0]
                self._rows[place] = 0
                row = self._row(place)
                row.begin(begun, times, order.again.first)
            row.enter(worker)
        return row, order

    def _row(self, place: int) -> SessionRow:
        return SessionRow(Carver(self._rows[place]), self.rules)

    def _free_place(self) -> int:
        oldest_first = [int(place) for place in np.argsort(self._number, kind="stable")]
        if not self._number[oldest_first[0]]:
            return oldest_first[0]
        # A row with a worker that has not joined may still be needed, or the worker was killed before it joined. Such
        # rows are taken over only if no other is free.
        for all_arrived in (True, False):
            for place in oldest_first:
                if self._row(place).gone(all_arrived=all_arrived):
                    return place
        raise RuntimeError(
            f"{_SESSIONS} iterations over one StreamDataset are alive at once, which is the limit; "
            "close some, or build a StreamDataset for each"
        )

    def _take_epoch(self, owner: int) -> int:
        place = self._place_of(owner)
        epoch = int(self._next_epoch[place])
        self._next_epoch[place] = epoch + 1
        return epoch

    def _place_of(self, owner: int) -> int:
        """Return an owner's place in the table; a new owner gets a free place, or that of a dead process."""
        found = np.flatnonzero(self._owner == owner)
        if len(found):
            return int(found[0])
        free = np.flatnonzero(self._owner == 0)
        dead = (i for i, pid in enumerate(self._owner) if not is_alive(int(pid)))
        place = int(free[0]) if len(free) else next(dead, -1)
        if place < 0:
            raise RuntimeError(
                f"{_OWNERS} live processes iterate over one StreamDataset, which is the limit; build a "
                "StreamDataset in each"
            )
        self._owner[place] = owner
        self._next_epoch[place] = self._first_epoch[0]
        return place


def state_of(pid: int) -> bytes:
    """Return a process's state, the letter in `/proc`; empty if there is no such process, or it cannot be read."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0]
    except OSError:
        return b""


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie, which has ended but was not reaped, does not."""
    if state := state_of(pid):
        return state not in (b"Z", b"X")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
