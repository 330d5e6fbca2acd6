"""Collects the parts of one step from all workers, and continues with new workers after a death.

One FIFO a reader; a step is complete when each reader that has not ended has a part for it::

    reader 0   part 0 | part 1 | part 2 |                 worker 0, lanes 0, 1
    reader 1   part 0 | part 1 |                          worker 1, lanes 2, 3
                  |        |
               step 0   step 1   ...

Guarantee: steps come in order, each once and whole, whoever was faster or died meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from stream_dataloader._assembly.part import Part
from stream_dataloader._loader.epoch import Epoch
from stream_dataloader._loader.rescue import Rescue
from stream_dataloader._schedule.rules import Reader
from stream_dataloader._workers.feed import Feed
from stream_dataloader.errors import WorkerDeathError


class StepCollector:
    """The parts of an epoch, step after step.

    Args:
        feed: The workers' parts.
        readers: Who reads which lanes.
        rescue: Has new workers go on after a death.

    Attributes:
        readers: Who reads which lanes.
        feed: The workers' parts.
        elsewhere: The feeds of other threads or processes, which have to end.
    """

    def __init__(self, feed: Feed, readers: Sequence[Reader], rescue: Rescue) -> None:
        self.readers = readers
        self.feed = feed
        self.elsewhere = feed.elsewhere
        self._rescue = rescue
        self._forget()

    def _forget(self) -> None:
        self._fifos: list[deque[Part]] = [deque() for _ in self.readers]
        self._ended = [False] * len(self.readers)

    def collect(self, epoch: Epoch) -> list[Part | None]:
        """Each reader's part of the step that comes next, None for one that has ended.

        Args:
            epoch: Tells the step, and where new workers begin if one dies.

        Raises:
            WorkerError: A worker died and there may be no more restarts, or none delivered in time.
        """
        parts: list[Part | None] = []
        while len(parts) < len(self.readers):
            fifo = self._fifos[len(parts)]
            if fifo:
                parts.append(fifo.popleft())
            elif self._ended[len(parts)]:
                parts.append(None)
            else:
                try:
                    self._receive(epoch.step)
                except WorkerDeathError as death:
                    self._go_on(death, epoch)
                    parts = []
        return parts

    def _receive(self, step: int) -> None:
        for part in self.feed.receive(step):
            self._fifos[part.reader].append(part)
            self._ended[part.reader] = part.end or bool(part.faults)

    def _go_on(self, death: WorkerDeathError, epoch: Epoch) -> None:
        """Have new workers deliver the step, and nothing more from those before."""
        self.feed.close()
        feed = self._rescue.restart(death, epoch.last)
        if feed is None:
            raise death
        self.elsewhere[:] = feed.elsewhere
        self.feed = feed
        self._forget()
