"""Collects the parts of one step from all workers, and goes on with new workers after a death.

One FIFO a reader; a step is complete when each reader that has not ended has a part for it::

    reader 0   part 0 | part 1 | part 2 |                 worker 0, lanes 0, 1
    reader 1   part 0 | part 1 |                          worker 1, lanes 2, 3
                  |        |
               step 0   step 1   ...

Guarantee: steps come in order, each once and whole, whoever was faster or died meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from stream_dataloader._assembly.part import Part
from stream_dataloader._assembly.slots import Slot
from stream_dataloader._loader.courses import MembersProgress
from stream_dataloader._schedule.progress import Progress
from stream_dataloader._schedule.rules import Reader
from stream_dataloader._workers.feed import Feed
from stream_dataloader.errors import WorkerDeathError

#: Has new workers go on from a record after a death; None if they may not.
Restart = Callable[[WorkerDeathError, Any], Feed | None]


class StepCollector:
    """The parts of an epoch, step after step.

    Args:
        feed: The workers' parts.
        readers: Who reads which lanes.
        restart: None if no worker can die.

    Attributes:
        readers: Who reads which lanes.
        elsewhere: The feeds of other threads or processes, which have to end.
    """

    def __init__(self, feed: Feed, readers: Sequence[Reader], restart: Restart | None = None) -> None:
        self.readers = readers
        self._feed = feed
        self.elsewhere = feed.elsewhere
        self._restart = restart
        self._forget()

    def _forget(self) -> None:
        self._fifos: list[deque[Part]] = [deque() for _ in self.readers]
        self._ended = [False] * len(self.readers)

    def collect(self, progress: Progress | MembersProgress) -> list[Part | None]:
        """Each reader's part of the step that comes next, None for one that has ended.

        Args:
            progress: Tells the step, and where new workers begin if one dies.

        Raises:
            WorkerError: A worker died and there may be no more restarts, or none delivered in time.
        """
        while True:
            try:
                return [self._next(reader, progress.step) for reader in range(len(self.readers))]
            except WorkerDeathError as death:
                self._feed.close()
                feed = self._restart(death, progress.record(progress.step)) if self._restart else None
                if feed is None:
                    raise
                self.elsewhere[:] = feed.elsewhere
                self._feed = feed
                self._forget()

    def _next(self, reader: int, step: int) -> Part | None:
        fifo = self._fifos[reader]
        while not fifo and not self._ended[reader]:
            for part in self._feed.receive(step):
                self._fifos[part.reader].append(part)
                self._ended[part.reader] = part.end or bool(part.faults)
        return fifo.popleft() if fifo else None

    def slot(self, step: int) -> Slot | None:
        """See `Feed`."""
        return self._feed.slot(step)

    def close(self) -> None:
        """No part is wanted any more."""
        self._feed.close()
