"""Where a loader's parts come from: this process, worker processes or threads.

A `Pool` has the workers of a loader, and the slots that they fill. Each iteration over what they read is a `Feed`,
which yields each reader's parts in order of step. A `Crew` knows on whom one waits.

Guarantee: a worker that ends, or does not deliver, is an error that says which, how, and what it read.
"""

from __future__ import annotations

import math
import os
import time as clock
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from stream_dataloader._assembly.part import Part
from stream_dataloader._assembly.slot_pool import SlotLeases, SlotPool
from stream_dataloader._assembly.slots import Slot, Slots
from stream_dataloader._notices import log, warn
from stream_dataloader._reading.activity import ActivityBoard
from stream_dataloader._reading.plan import Recovery, Start
from stream_dataloader._reading.reader import PartReader
from stream_dataloader._schedule.rules import Reader
from stream_dataloader._workers.settings import WorkerSettings
from stream_dataloader._workers.tally import Tally
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import WorkerTimeoutError

LONGEST_START_SECONDS = 300.0  # of a worker: user code may import much
_LOOK_SECONDS = 1.0  # between looks at workers of which no end was noticed
REPORT_SECONDS = 10.0  # of a wait before it is logged; then twice as long


class Feed(Protocol):
    """The parts of one iteration."""

    def receive(self, step: int, seconds: float = math.inf) -> Sequence[Part]:
        """The next parts of any worker; waits for them while `step` is put together.

        There are none if none came within so many seconds.

        Raises:
            WorkerError: A worker died, or none delivered in time.
        """

    @property
    def slot(self) -> Callable[[int], Slot | None]:
        """Says which slot has a step's parts, if any; asked once a step."""

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

    def receive(self, step: int, seconds: float = math.inf) -> Sequence[Part]:  # noqa: ARG002
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
        self.board = ActivityBoard(work.readers, shared=shared)
        self.leases: SlotLeases | None = None
        self._messages = messages
        self._transport = work.settings.transport
        if work.settings.patience is not None:
            self._transport = "queue"  # a slot is for the lanes of one step, and who is late has another
        self._otherwise = otherwise
        self._device: torch.device | None = None

    @abstractmethod
    def start(self, starts: Sequence[Start], recovery: Recovery) -> Feed:
        """Start an iteration, where each member starts; the one before must be closed.

        Raises:
            RuntimeError: There is no memory for slots, and the user insists on it.
        """

    @abstractmethod
    def dismiss(self) -> None:
        """Have no workers: those that there are end."""

    def died(self) -> dict[int, str]:
        return {}

    @property
    def slots_in_use(self) -> tuple[int, int]:
        leases = self.leases
        return (0, 0) if leases is None or not leases.pool.laid_out else (leases.in_use, leases.pool.slots)

    def release_slots(self) -> None:
        """Free the slots of batches that are gone, once the current CUDA stream is done with them."""
        if self.leases is not None:
            self.leases.release()

    def lock_slots(self, device: torch.device | None) -> None:
        """Have them page-locked from now on, as batches are copied to a CUDA device."""
        self._device = device
        if self.leases is not None and device is not None:
            self.leases.lock_for(device)

    @property
    def _slots_are_unfit(self) -> bool:
        return self.leases is not None and self.leases.unfit

    def _ready_slots(self) -> SlotPool | None:
        """What workers share, made now if it is not there yet; None if there are no slots."""
        if self.leases is None and self._transport != "queue":
            pin_memory, lanes = self.work.settings.pin_memory, self.work.readers[-1].lanes.stop
            try:
                self.leases = SlotLeases(SlotPool(lanes, self._messages), pin_memory=pin_memory)
            except OSError as error:
                self._do_without(error)
            else:
                self.lock_slots(self._device)
        return None if self.leases is None else self.leases.pool

    def _do_without(self, reason: object) -> None:
        problem = f"there is no shared memory for batches ({reason})"
        if self._transport == "shared_memory":
            raise RuntimeError(f'{problem}; pass transport="auto" to have them {self._otherwise}')
        text = f"{problem}; they are {self._otherwise}, which is slower"
        warn(text, 5)
        self._transport = "queue"

    def _slot(self, leases: SlotLeases | None, session: int, step: int) -> Slot | None:
        """The slot of a step that all workers of a session are done with, if any."""
        if leases is None:
            return None
        copies = leases.copies
        slot = leases.lease(session, step)
        self.work.tally.counts["copies"] += leases.copies - copies
        if slot is None and leases.pool.refused and self._transport != "queue":
            self._do_without("it could not be made large enough")
        return slot


class Crew(ABC):
    """Knows for whom one waits, and how long."""

    def __init__(self, board: ActivityBoard, work: Assignment) -> None:
        self.board = board
        self.step = 0
        self._sources = [member.sources for member in work.members]
        self._patience = work.settings.timeout  # in which one of them has to get further; 0 has no limit
        self.allowed = math.inf  # seconds that a wait may take

    @property
    def look_seconds(self) -> float:
        """See `Watch`."""
        return min(_LOOK_SECONDS, self._patience or _LOOK_SECONDS, self.allowed)

    def await_session(self) -> None:
        """Wait for parts of another session from now on."""
        self.late = False  # none of them got any further for too long
        self.is_over = False  # a wait took as long as it may
        self._begin = clock.monotonic()
        self._seen = self._state()
        self._further = self._begin  # when one of them was seen to have got further
        self._report = REPORT_SECONDS

    @property
    @abstractmethod
    def missing(self) -> list[int]:
        """Those that have not come."""

    @property
    @abstractmethod
    def workers(self) -> list[int]:
        """Those that have come."""

    def is_stopped(self, worker: int) -> bool:  # noqa: ARG002
        """Whether a worker was stopped by a signal, as by SIGSTOP."""
        return False

    def died(self) -> dict[int, str]:
        """Who died, -1 for one that was only starting, and how."""
        return {}

    def _state(self) -> tuple[bytes, list[int]]:
        return self.board.working.tobytes(), self.missing

    def gives_up(self, waited_seconds: float) -> bool:
        """See `Watch`; a message may carry several steps, and each has its time."""
        self.is_over = waited_seconds >= self.allowed and not self.died()
        if self.is_over or self.died():
            return True
        now = clock.monotonic()
        if waited_seconds > self._report:
            self._report *= 2
            log.warning("step %d is waited for since %.0f s: %s", self.step, waited_seconds, self._states())
        if (state := self._state()) != self._seen:
            self._seen, self._further = state, now
        starting = self.missing and now - self._begin < LONGEST_START_SECONDS
        stands_still = min(waited_seconds, now - self._further)
        self.late = bool(self._patience and not starting and stands_still >= self._patience)
        return self.late

    def lateness(self, advice: str = "") -> WorkerTimeoutError:
        return WorkerTimeoutError(
            f"no worker delivered in time, within {self._patience:g} s, at step {self.step}: {self._states()}; "
            f"raise timeout=, or find out why it hangs{advice}"
        )

    def _states(self) -> str:
        doing: dict[int, str] = {}
        for worker in self.workers:
            stopped = self.is_stopped(worker)
            if stopped or self.board.is_reading(worker):
                doing[worker] = self.doing(worker) + ", and is stopped (SIGCONT continues it)" * stopped
        states = [f"worker {w} is {d}" for w, d in (doing or {w: self.doing(w) for w in self.workers}).items()]
        states += [f"worker {worker} has not started (imports, worker_init_fn)" for worker in self.missing]
        return "; ".join(states)

    def doing(self, worker: int) -> str:
        return self.board.describe(worker, self._sources)
