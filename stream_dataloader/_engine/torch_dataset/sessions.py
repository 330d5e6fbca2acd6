"""The table of sessions for workers of torch's own `DataLoader`, which are not told their session.

The first worker of an iteration creates its session, and the others find it by its name::

    table     sessions created | epoch of new owners | owners: pid, next epoch | sessions: key, number | their rows

Guarantee: a row is taken over only when all workers of its session have left it or are dead.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple

import numpy as np

from stream_dataloader._engine.memory.fields import Carver, SharedFields, bytes_of
from stream_dataloader._engine.reading.session_row import SessionRow, is_alive
from stream_dataloader._engine.schedule.rules import Rules

_SESSIONS = 64  # iterations over one dataset that can be alive at once
_OWNERS = 4096  # live processes that iterate over one dataset


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


class SessionTable(SharedFields):
    """All sessions of one dataset, and the number of its next epoch for each process that iterates over it.

    Attributes:
        rules: The dataset's rules when it was built. The table has the same form when its list has become longer.
        sources: Number of sources of the longer list, as an array of one; 0: it is as long as it was.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        super().__init__()

    def _lay_out(self, carve: Carver) -> None:
        self.sources = carve(1)
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

    def join(self, key: SessionKey, worker: int, times: Sequence[int]) -> SessionRow:
        """Join a session; the first worker creates it.

        Args:
            key: The session's name, the same for all of its workers.
            worker: This worker's number.
            times: The time at which each worker begins.
        """
        with self.locked():
            found = np.flatnonzero((self._number > 0) & (self._key == key).all(axis=1))
            if len(found):
                row = self._row(int(found[0]))
            else:
                place = self._free_place()
                self._created[0] += 1
                begun = self._take_epoch(key.owner)
                self._key[place] = key
                self._number[place] = self._created[0]
                self._rows[place] = 0
                row = self._row(place)
                row.begin(begun, times)
            row.enter(worker)
        return row

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
