"""Who packs what: decisions without processes.

::

    to do -> held by a worker -> written, not yet on the disk -> in the journal
      ^            |                       |
      +--- its worker died ----------------+

Guarantee: a stream is in one of these places. It leaves them only for the journal, or when it failed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from stream_dataloader.stores._packing.journal import Entry

__all__ = ["Ledger", "streams_at_once"]

#: How often a stream may take its worker with it.
MOST_DEATHS = 2

_AT_ONCE_SECONDS = 0.05
_MOST_AT_ONCE = 256


def streams_at_once(packed: int, seconds: float, left: int, workers: int) -> int:
    """How many streams a worker is handed: one, but more of those that take no time.

    Args:
        packed: How many streams a worker has packed.
        seconds: The time that took it.
        left: How many there are still to pack.
        workers: How many share them.
    """
    if not packed or seconds <= 0:
        return 1
    return max(1, min(int(_AT_ONCE_SECONDS * packed / seconds), left // (4 * workers), _MOST_AT_ONCE))


class Ledger:
    """The streams that are not in the journal.

    Args:
        numbers: Theirs, in the order in which they are to be packed.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self.to_do = deque(numbers)
        self._held: dict[int, deque[int]] = {}
        self._written: dict[int, list[Entry]] = {}
        self._deaths: Counter[int] = Counter()

    @property
    def is_empty(self) -> bool:
        """Whether all are in the journal, or failed."""
        return not (self.to_do or any(self._held.values()) or any(self._written.values()))

    def holds(self, worker: int) -> bool:
        """Whether a worker has streams that it has not written."""
        return bool(self._held.get(worker))

    def has_written(self, worker: int) -> bool:
        """Whether a worker has written streams that may not be on the disk."""
        return bool(self._written.get(worker))

    def take(self, worker: int, count: int) -> list[int]:
        """Hand streams to a worker that holds none."""
        taken = [self.to_do.popleft() for _ in range(min(count, len(self.to_do)))]
        self._held[worker] = deque(taken)
        return taken

    def written(self, worker: int, entry: Entry) -> None:
        """A worker has written the next of its streams."""
        assert self._held[worker].popleft() == entry.number
        self._written.setdefault(worker, []).append(entry)

    def failed(self, worker: int, number: int) -> None:
        """A worker could not read the next of its streams; nobody will try again."""
        assert self._held[worker].popleft() == number

    def synced(self, worker: int, count: int) -> list[Entry]:
        """The first of the streams that a worker has written are on the disk: what to enter in the journal."""
        written = self._written.pop(worker, [])
        self._written[worker] = written[count:]
        return written[:count]

    def died(self, worker: int) -> int | None:
        """A worker is gone, and what it held is to do again, first of all.

        Returns:
            The stream that it was packing, if that has taken as many workers with it as it may; it is not to do again.
        """
        held = self._held.pop(worker, deque())
        again = [entry.number for entry in self._written.pop(worker, [])]
        fatal: int | None = None
        if held:
            suspect = held[0]
            self._deaths[suspect] += 1
            if self._deaths[suspect] >= MOST_DEATHS:
                fatal = held.popleft()
        self.to_do.extendleft(reversed([*again, *held]))
        return fatal
