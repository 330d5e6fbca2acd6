"""Collection of the parts of one step from all workers; after a worker's death it continues with new workers.

Each reader has a FIFO. A step is complete when each reader that has not ended has a part for it::

    reader 0   part 0 | part 1 | part 2 |                 worker 0, lanes 0, 1
    reader 1   part 0 | part 1 |                          worker 1, lanes 2, 3
                  |        |
               step 0   step 1   ...

Guarantees: steps come in order, each once and whole. A source counts as the cause of the third death at the same place.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from stream_dataloader._engine.assembly.part import Part
from stream_dataloader._engine.assembly.slots import Slot
from stream_dataloader._engine.loader.epoch import Epoch
from stream_dataloader._engine.notices import log
from stream_dataloader._engine.reading.plan import NO_RECOVERY, Recovery
from stream_dataloader._engine.reading.reader import PartReader
from stream_dataloader._engine.schedule.place import Place
from stream_dataloader._engine.workers.session import Failure, Session
from stream_dataloader._engine.workers.workers import Assignment
from stream_dataloader.errors import WorkerDeathError, shorten

_PROOF = 3  # deaths at the same place that show that the source is the cause


class Begun(NamedTuple):
    """Reader of an epoch: the session of its workers, or a reader in this thread."""

    session: Session | None
    local: PartReader | None


class StepCollector:
    """The parts of an epoch, step after step.

    Attributes:
        session: The session of the workers; None without workers.
        slot: Returns the slot with the parts of a step, as workers count steps; called once for each.
        passed_over: Number of steps that made no batch, since workers began.
    """

    session: Session | None
    slot: Callable[[int], Slot | None]
    passed_over: int

    def __init__(self, begin: Callable[[Place, Recovery], Begun | None], work: Assignment) -> None:
        self.readers = work.readers
        self.elsewhere: list[Session] = []  # sessions to end when the iteration is dropped
        self._begin = begin
        self._work = work
        self._most = work.settings.max_restarts
        self._restarts = 0
        self._deaths: Counter[tuple[int, int]] = Counter()  # by suspect
        self._killers: dict[int, int] = {}

    def start(self, place: Place, recovery: Recovery = NO_RECOVERY) -> bool:
        self._work.counts.meters.stop_clocks()  # workers that died left their times running
        if (begun := self._begin(place, recovery)) is None:
            return False
        self.session, self._local = begun
        self.elsewhere[:] = () if self.session is None else (self.session,)
        self._fifos: list[deque[Part | Failure]] = [deque() for _ in self.readers]
        self._ended = [False] * len(self.readers)
        self.slot = _no_slot if self.session is None else self.session.slot
        self.passed_over = 0
        return True

    def begin_epoch(self) -> None:
        """Reset the number of restarts, but keep the suspects."""
        self._restarts = 0

    def collect(self, epoch: Epoch) -> list[Part | None]:
        """Return each reader's part of the next step, None for a reader that has ended."""
        # Credit counts the steps that workers know, including those that made no batch.
        if self.session is not None:
            self.session.give_credit(epoch.step + self.passed_over)
        parts: list[Part | None] = []
        while len(parts) < len(self.readers):
            fifo = self._fifos[len(parts)]
            if fifo:
                part = fifo.popleft()
                if isinstance(part, Failure):
                    # After a death, new workers read this step from its beginning, so earlier parts of it are dropped.
                    self._restart_or_raise(part.error, epoch)
                    parts = []
                    continue
                parts.append(part)
            elif self._local is not None:
                parts.append(None if self._local.ended else next(self._local))
            elif self._ended[len(parts)]:
                parts.append(None)
            elif not self._receive(epoch):  # a worker died, and the step starts over
                parts = []
        return parts

    def pass_over(self, epoch: Epoch) -> None:
        """Make no batch of the step that was collected last; readers count it all the same."""
        self.slot(epoch.step + self.passed_over)  # frees it
        self.passed_over += 1

    def _receive(self, epoch: Epoch) -> bool:
        """Take the next parts in; return False if a worker died and the step starts over."""
        assert self.session is not None
        try:
            parts = self.session.receive(epoch.step)
        except WorkerDeathError as death:
            self._restart_or_raise(death, epoch)
            return False
        for part in parts:
            self._fifos[part.reader].append(part)
            # A reader that reported an error sends no more parts. Waiting for its next one would never end.
            self._ended[part.reader] = isinstance(part, Failure) or part.end or bool(part.faults)
        return True

    def _restart_or_raise(self, error: Exception, epoch: Epoch) -> None:
        """Start again after a worker's death; raise any other error, or the death if no restart is left."""
        self.close()
        if not isinstance(error, WorkerDeathError) or not self._start_again(error, epoch):
            raise error

    def close(self) -> None:
        """Stop reading; no part is needed any more."""
        if self._local is not None:
            self._local.close()
        if self.session is not None:
            self.session.close()

    def _start_again(self, death: WorkerDeathError, epoch: Epoch) -> bool:
        """Let new workers go on behind the last delivered batch; return False after too many deaths."""
        dataset = self._work.dataset
        # One death proves nothing, as the system may kill a worker for lack of memory. Several at one place do.
        self._deaths.update(death.suspects)
        proven = {source: time for source, time in death.suspects if self._deaths[source, time] >= _PROOF}
        unknown = proven.keys() - self._killers.keys()
        if unknown:
            named = ", ".join(f"{index} ({shorten(dataset.sources[index], 80)})" for index in sorted(unknown))
            if dataset.on_error == "raise":
                raise WorkerDeathError(
                    f"source {named} killed its worker {_PROOF} times, each time at the same place; leave it out, or "
                    f'pass on_error="skip": {death}',
                    death.suspects,
                ) from death
            log.warning("source %s killed its worker %d times and is skipped", named, _PROOF)
            self._killers |= proven
        elif self._restarts >= self._most:
            return False
        place = epoch.go_back()  # what dead workers had read ahead is read again
        self._restarts += 1
        self._work.counts.totals["restarts"] += 1
        log.warning("%s; restart %d of %d, at step %d", str(death), self._restarts, self._most, place.step)
        return self.start(place, Recovery(self._killers, cautious=True, number=self._restarts))


def _no_slot(step: int) -> None:
    """Return None: without workers no batch lies in shared memory."""
