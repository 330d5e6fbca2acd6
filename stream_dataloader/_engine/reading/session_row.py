"""The shared state of one session, and whether its workers are alive.

A *session* is one iteration over a dataset, by all of its workers. Its state is a row of memory that they share::

    row       epoch, workers | of each worker: status, pid, time, ends | the ledger of its requests

A `StreamDataLoader` tells its workers their row; under torch's own `DataLoader` they find it in a table.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from stream_dataloader._engine.memory.fields import Carver
from stream_dataloader._engine.schedule.requests import Ledger
from stream_dataloader._engine.schedule.rules import NEVER, Rules

#: Status of a worker in its session. ABSENT is 0, because cleared memory must mean that no worker has come.
ABSENT, RUNNING, FINISHED, LEFT = range(4)


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

    def begin(self, epoch: int, times: Sequence[int]) -> None:
        """Begin a session that no worker has joined yet."""
        self.epoch[0] = epoch
        self.workers[0] = len(times)
        self.time[:] = NEVER  # entries beyond the last worker must not delay any decision
        self.time[: len(times)] = times
        self.end[:] = NEVER

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
