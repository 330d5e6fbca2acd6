"""Collects the parts of one step from all workers, and continues with new workers after a death.

One FIFO a reader; a step is complete when each reader that has not ended has a part for it::

    reader 0   part 0 | part 1 | part 2 |                 worker 0, lanes 0, 1
    reader 1   part 0 | part 1 |                          worker 1, lanes 2, 3
                  |        |
               step 0   step 1   ...

Guarantees: steps come in order, each once and whole. A source is blamed for the third death at the same place.
"""

from __future__ import annotations

import math
import time as clock
from collections import Counter, deque
from collections.abc import Callable

from stream_dataloader._assembly.part import Part
from stream_dataloader._loader.epoch import Epoch, Record
from stream_dataloader._notices import log
from stream_dataloader._reading.plan import NO_RECOVERY, Recovery
from stream_dataloader._workers.feed import REPORT_SECONDS, Assignment, Feed
from stream_dataloader.errors import WorkerDeathError, shorten

_PROOF = 3  # deaths at one place


class StepCollector:
    """The parts of an epoch, step after step."""

    feed: Feed  # the workers' parts, once `start` was called

    def __init__(self, begin: Callable[[Record, Recovery], Feed | None], work: Assignment) -> None:
        self.readers = work.readers
        self.elsewhere: list[Feed] = []  # feeds that have to be ended
        self._begin = begin
        self._work = work
        self._most = work.settings.max_restarts
        self._restarts = 0
        self._deaths: Counter[tuple[int, int, int]] = Counter()  # by suspect, which is a member's
        self._killers: dict[tuple[int, int], int] = {}
        self._patience = work.settings.patience
        self.late = [False] * len(self.readers)  # its part did not come in time
        self._report = REPORT_SECONDS

    def start(self, record: Record, recovery: Recovery = NO_RECOVERY) -> bool:
        self._work.tally.meters.stop_clocks()
        if (feed := self._begin(record, recovery)) is None:
            return False
        self.elsewhere[:] = feed.elsewhere
        self.feed = feed
        self._fifos: list[deque[Part]] = [deque() for _ in self.readers]
        self._ended = [False] * len(self.readers)
        return True

    def begin_epoch(self) -> None:
        """Resets the number of restarts; keeps the suspects."""
        self._restarts = 0

    def collect(self, epoch: Epoch) -> list[Part | None]:
        """Each reader's part of the step that comes next, None for one that has ended or is late."""
        if self._patience is not None:
            self._await(epoch, self._patience)
        parts: list[Part | None] = []
        while len(parts) < len(self.readers):
            fifo = self._fifos[len(parts)]
            if fifo:
                parts.append(fifo.popleft())
            elif self._ended[len(parts)] or self.late[len(parts)]:
                parts.append(None)
            elif not self._receive(epoch):
                parts = []
        if self._patience is not None:
            self._work.tally.meters.taken[:] += [part is not None for part in parts]
        return parts

    def _await(self, epoch: Epoch, patience: float) -> None:
        """Wait for all readers' parts, but only so long once one makes a batch."""
        until = math.inf
        while any(late := self._without_part()):
            if not self._makes_batch():
                until = math.inf
            elif until == math.inf:
                until = clock.monotonic() + patience
            left = max(until - clock.monotonic(), 0.0)
            if not self._receive(epoch, left) and self._makes_batch():
                break  # else a worker died, and new ones begin
        self.late = late
        self._tell_of(late, epoch.step)

    def _tell_of(self, late: list[bool], step: int) -> None:
        """Count the lanes that a batch does without, and log those that have been late for long."""
        tally = self._work.tally
        tally.note_late(late)
        seconds = tally.late_seconds
        if seconds < self._report:
            self._report = self._report if seconds >= REPORT_SECONDS else REPORT_SECONDS
            return
        self._report = 2 * seconds
        lanes = tally.late_lanes([member.sources for member in self._work.members])
        log.warning("step %d goes on without late lanes: %s", step, "; ".join(map(str, lanes)))

    def _without_part(self) -> list[bool]:
        states = zip(self._fifos, self._ended, strict=True)
        return [not fifo and not ended for fifo, ended in states]

    def _makes_batch(self) -> bool:
        return any(fifo and fifo[0].fresh for fifo in self._fifos)

    def _receive(self, epoch: Epoch, seconds: float = math.inf) -> bool:
        """Take in what comes next; False if nothing did, or all comes anew as a worker died."""
        try:
            parts = self.feed.receive(epoch.step, seconds)
        except WorkerDeathError as death:
            self.feed.close()
            if not self._start_again(death, epoch.last):
                raise
            return False
        for part in parts:
            self._fifos[part.reader].append(part)
            self._ended[part.reader] = part.end or bool(part.faults)
        return len(parts) > 0

    def _start_again(self, death: WorkerDeathError, record: Record) -> bool:
        """Have new workers go on from a record; False if there were too many deaths already."""
        member, dataset = death.member, self._work.members[death.member]
        suspects = {(member, *suspect) for suspect in death.suspects}
        self._deaths.update(suspects)
        proven = {(of, source): time for of, source, time in suspects if self._deaths[of, source, time] >= _PROOF}
        unknown = proven.keys() - self._killers.keys()
        if unknown:
            named = ", ".join(f"{index} ({shorten(dataset.sources[index], 80)})" for _, index in sorted(unknown))
            if dataset.on_error == "raise":
                raise WorkerDeathError(
                    f"source {named} killed its worker {_PROOF} times, each time at the same place; leave it out, or "
                    f'pass on_error="skip": {death}',
                    death.suspects,
                    member,
                ) from death
            log.warning("source %s killed its worker %d times and is skipped", named, _PROOF)
            self._killers |= proven
        elif self._restarts >= self._most:
            return False
        self._restarts += 1
        self._work.tally.counts["restarts"] += 1
        log.warning("%s; restart %d of %d, at step %d", str(death), self._restarts, self._most, record.step)
        return self.start(record, Recovery(self._killers, cautious=True, number=self._restarts))
