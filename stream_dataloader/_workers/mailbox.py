"""What the main process says to workers that already run, and they to it, in memory that both see.

Guarantee: each value is written by one side only, so there is nothing to lock.
"""

from __future__ import annotations

from stream_dataloader._memory.fields import Carver, SharedFields

_KEPT_SESSIONS = 4


class Mailbox(SharedFields):
    """Says which session workers are to read, what it is, and whether it has ended.

    Sessions are numbered from 1. A worker that is kept counts them itself, as often as it is iterated; it may
    still look at one when the next is announced, so the last few stay readable.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        super().__init__()

    def _lay_out(self, carve: Carver) -> None:
        self._announced = carve(1)  # number of the last session that was announced; 0 is none
        self._ended = carve(1)  # number of the last session that has ended
        self._epoch = carve(_KEPT_SESSIONS)
        self.pids = carve(self.workers)  # each worker writes its own; 0 before it came
        self._done = carve(self.workers)  # number of the last session that each worker has read to its end

    def open(self, epoch: int) -> int:
        """Announce a session; returns its number."""
        session = int(self._announced[0]) + 1
        self._epoch[session % _KEPT_SESSIONS] = epoch
        self._announced[0] = session
        return session

    def close(self, session: int) -> None:
        """End a session; its workers give up."""
        self._ended[0] = max(int(self._ended[0]), session)

    def closed(self, session: int) -> bool:
        """Whether a session has ended."""
        return bool(self._ended[0] >= session)

    def leave(self, session: int, worker: int) -> None:
        """Say that a worker has read a session to its end, so that it may exit."""
        self._done[worker] = session

    def may_exit(self, session: int, worker: int) -> bool:
        """Whether a session is over, or a worker is done with it."""
        return self.closed(session) or bool(self._done[worker] >= session)

    def epoch(self, session: int) -> int:
        """A session's epoch."""
        return int(self._epoch[session % _KEPT_SESSIONS])
