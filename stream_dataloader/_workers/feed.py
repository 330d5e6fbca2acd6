"""Where a loader's parts come from: this process, worker processes or threads.

A `Pool` has the workers of a loader. Each iteration over what they read is a `Feed`, which yields each reader's parts
in order of step, those of different readers in any order. A `CrewWatch` knows on whom one waits.

Guarantee: a worker that ends, or does not deliver, is an error that says which worker, how, and what it was reading.
"""

from __future__ import annotations

import os
import time as clock
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from stream_dataloader._assembly.part import Part
from stream_dataloader._assembly.slots import Slot, Slots
from stream_dataloader._notices import log
from stream_dataloader._reading.activity import ActivityBoard
from stream_dataloader._reading.plan import Recovery, Start
from stream_dataloader._reading.reader import PartReader
from stream_dataloader._schedule.rules import Reader
from stream_dataloader._workers.memory import BatchMemory
from stream_dataloader._workers.settings import WorkerSettings
from stream_dataloader._workers.tally import Tally
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import WorkerTimeoutError

LONGEST_START_SECONDS = 300.0  # of a worker: user code may import much
_LOOK_SECONDS = 1.0  # between looks at workers of which no end was noticed
_REPORT_SECONDS = 10.0  # of a wait after which it is said whom it is for; then twice as long, and so on


class Feed(Protocol):
    """The parts of one iteration."""

    def receive(self, step: int) -> Sequence[Part]:
        """The next parts of any worker that has not ended; waits for them while `step` is being put together.

        Raises:
            WorkerError: A worker died, or none delivered in time.
        """

    @property
    def slot(self) -> Callable[[int], Slot | None]:
        """Says which slot a step's parts were put into, if there is one; asked for once a step."""

    @property
    def elsewhere(self) -> list[Feed]:
        """What brings the parts of other threads or processes."""

    def close(self) -> None:
        """No part is wanted any more."""


class LocalFeed:
    """Lanes that are read here, when asked for, and those of `others`; see `Feed`."""

    def __init__(self, readers: Sequence[PartReader], slots: Slots, others: Feed | None = None) -> None:
        self._readers = readers
        self._slots = slots
        self._others = others
        self._step = -1
        self._left = 0  # how many have not been asked for their part of the step
        self.elsewhere: list[Feed] = [] if others is None else others.elsewhere

    def receive(self, step: int) -> Sequence[Part]:
        if step != self._step:
            self._step, self._left = step, len(self._readers)
        while self._left:
            reader = self._readers[-self._left]
            self._left -= 1
            if not reader.ended:
                return (next(reader),)
        assert self._others is not None
        return self._others.receive(step)

    def slot(self, step: int) -> Slot | None:
        if self._others is not None:
            return self._others.slot(step)
        return self._slots.taken(step)

    def close(self) -> None:
        for reader in self._readers:
            reader.close()
        if self._others is not None:
            self._others.close()


class Assignment(NamedTuple):
    """What workers read, and how they are started."""

    members: Sequence[StreamDataset]
    readers: Sequence[Reader]
    num_workers: int  # how many workers there are; 0 only checks the settings
    settings: WorkerSettings
    tally: Tally


class Pool(ABC):
    """The workers of one loader; of the process that built it alone.

    Args:
        work: What they read.
        messages: How many messages of theirs may be on their way.
        otherwise: What is done with batches without slots, in words.
        shared: They are other processes.
    """

    def __init__(self, work: Assignment, messages: int, otherwise: str, *, shared: bool) -> None:
        self.owner = os.getpid()
        self.work = work
        self.memory = BatchMemory(work.readers[-1].lanes.stop, messages, work.settings, work.tally, otherwise)
        self.board = ActivityBoard(work.readers, shared=shared)

    @abstractmethod
    def start(self, starts: Sequence[Start], recovery: Recovery) -> Feed:
        """Start an iteration, where each member starts; the one before must be closed."""

    @abstractmethod
    def dismiss(self) -> None:
        """Have no workers: those that there are end."""

    def died(self) -> dict[int, str]:
        """Which kept workers died, and how."""
        return {}


class Crew(Protocol):
    """The workers of one iteration, as one waits for them."""

    @property
    def missing(self) -> list[int]:
        """Those that have not come."""

    @property
    def workers(self) -> list[int]:
        """Those that have come."""

    def stopped(self, worker: int) -> bool:
        """Whether a worker was stopped by a signal, as by SIGSTOP."""

    def died(self) -> dict[int, str]:
        """Who died, -1 for one that was only starting, and how."""


class CrewWatch:
    """Waits for workers: knows how long, and on whom."""

    def __init__(self, crew: Crew, board: ActivityBoard, work: Assignment) -> None:
        self.board = board
        self.late = False  # none of them got any further for too long
        self.step = 0
        self._crew = crew
        self._sources = [member.sources for member in work.members]
        self._patience = work.settings.timeout  # in which one of them has to get further; 0 has no limit
        self.look_seconds = min(_LOOK_SECONDS, self._patience or _LOOK_SECONDS)
        self._begin = clock.monotonic()
        self._seen = self._state()
        self._further = self._begin  # when one of them was seen to have got further
        self._report = _REPORT_SECONDS

    def _state(self) -> tuple[bytes, list[int]]:
        return self.board.working.tobytes(), self._crew.missing

    def gives_up(self, waited_seconds: float) -> bool:
        """See `Watch`; a message may carry several steps, and each has its time."""
        if self._crew.died():
            return True
        now = clock.monotonic()
        if waited_seconds > self._report:
            self._report *= 2
            log.warning("step %d is waited for since %.0f s: %s", self.step, waited_seconds, self._states())
        if (state := self._state()) != self._seen:
            self._seen, self._further = state, now
        starting = self._crew.missing and now - self._begin < LONGEST_START_SECONDS
        stands_still = min(waited_seconds, now - self._further)
        self.late = bool(self._patience and not starting and stands_still >= self._patience)
        return self.late

    def lateness(self, advice: str = "") -> WorkerTimeoutError:
        """Says what the workers do that are waited for."""
        return WorkerTimeoutError(
            f"no worker delivered in time, within {self._patience:g} s, at step {self.step}: {self._states()}; "
            f"raise timeout=, or find out why it hangs{advice}"
        )

    def _states(self) -> str:
        crew, doing = self._crew, dict[int, str]()
        for worker in crew.workers:
            stopped = crew.stopped(worker)
            if stopped or self.board.is_reading(worker):
                doing[worker] = self.doing(worker) + ", and is stopped (SIGCONT continues it)" * stopped
        states = [f"worker {w} is {d}" for w, d in (doing or {w: self.doing(w) for w in crew.workers}).items()]
        states += [f"worker {worker} has not started (imports, worker_init_fn)" for worker in crew.missing]
        return "; ".join(states)

    def doing(self, worker: int) -> str:
        """What a worker is doing, or did last."""
        return self.board.describe(worker, self._sources)
