"""What the main process says to workers that already run, and they to it, in memory that both see.

Guarantee: each value is written by one side only, so there is nothing to lock.
"""

from __future__ import annotations

from stream_dataloader._memory.fields import Carver, bytes_of
from stream_dataloader._memory.shared_memory import SharedMemory
from stream_dataloader._schedule.rules import IntArray

_KEPT_SESSIONS = 4


class _Letters:
    """What lies in a mailbox; workers write `pids` and `done`, the main process the rest.

    Attributes:
        announced: Number of the last session that was announced, alone; 0 is none.
        ended: Number of the last session that has ended, alone.
        epoch: The epochs of the last sessions.
        whole_windows: Whether windows are passed on as they are in the last sessions.
        pids: Process id of each worker, 0 before it has come.
        done: Number of the last session that each worker has read to its end.
    """

    def __init__(self, carve: Carver, workers: int) -> None:
        self.announced = carve(1)
        self.ended = carve(1)
        self.epoch = carve(_KEPT_SESSIONS)
        self.whole_windows = carve(_KEPT_SESSIONS)
        self.pids = carve(workers)
        self.done = carve(workers)


class Mailbox:
    """Says which session workers are to read, what it is, and whether it has ended.

    Sessions are numbered from 1. A worker that is kept counts them itself, as often as it is iterated; it may
    still look at one when the next is announced, so the last few stay readable.

    Args:
        workers: How many there are.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._memory = SharedMemory(bytes_of(self._lay_out))
        self._letters = self._lay_out(Carver(self._memory.buffer))

    def _lay_out(self, carve: Carver) -> _Letters:
        return _Letters(carve, self.workers)

    @property
    def pids(self) -> IntArray:
        """Process id of each worker, which it writes itself; 0 before it has come."""
        return self._letters.pids

    def open(self, epoch: int, whole_windows: bool) -> int:
        """Announce a session; returns its number."""
        letters = self._letters
        session = int(letters.announced[0]) + 1
        letters.epoch[session % _KEPT_SESSIONS] = epoch
        letters.whole_windows[session % _KEPT_SESSIONS] = whole_windows
        letters.announced[0] = session
        return session

    def close(self, session: int) -> None:
        """End a session; its workers give up."""
        self._letters.ended[0] = max(int(self._letters.ended[0]), session)

    def closed(self, session: int) -> bool:
        """Whether a session has ended."""
        return bool(self._letters.ended[0] >= session)

    def leave(self, session: int, worker: int) -> None:
        """Say that a worker has read a session to its end, so that it may exit."""
        self._letters.done[worker] = session

    def may_exit(self, session: int, worker: int) -> bool:
        """Whether a session is over, or a worker is done with it; -1 is one that has not come."""
        return self.closed(session) or (worker >= 0 and bool(self._letters.done[worker] >= session))

    def read(self, session: int) -> tuple[int, bool]:
        """A session's epoch, and whether windows are passed on as they are."""
        place = session % _KEPT_SESSIONS
        return int(self._letters.epoch[place]), bool(self._letters.whole_windows[place])

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_letters"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._letters = self._lay_out(Carver(self._memory.buffer))
