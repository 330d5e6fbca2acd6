"""Where a loader's parts come from: this process, or torch's worker processes.

A `Feed` yields the parts of one iteration: each worker's in order of step, those of different workers in any
order.

Guarantee: a worker that ends, or does not deliver, is an error that says which worker, how, and what it was reading.
"""

from __future__ import annotations

import time as clock
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from stream_dataloader._assembly.part import Part, unpack
from stream_dataloader._assembly.slot_writer import SharedSlot
from stream_dataloader._assembly.slots import Slot
from stream_dataloader._notices import log
from stream_dataloader._reading.activity import ActivityBoard
from stream_dataloader._reading.reader import PartReader
from stream_dataloader._workers.packets import Unanswered
from stream_dataloader._workers.processes import Crew
from stream_dataloader._workers.sealed import Arrived
from stream_dataloader._workers.staff import Staff
from stream_dataloader.errors import ItemError, WorkerDeathError, WorkerError, WorkerTimeoutError, shorten

LONGEST_START_SECONDS = 300.0  # of a worker: user code may import much
_DEATH_SECONDS = 1.0  # a connection to a worker that was killed may break before its end is known
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
    """Lanes that are read in this process, when their parts are asked for.

    Args:
        readers: What reads them.
        slot: Where they put batches together; None if each has its own memory.
        others: Brings the parts of other readers; None if there are none.
    """

    def __init__(
        self, readers: Sequence[PartReader], slot: SharedSlot | None = None, others: Feed | None = None
    ) -> None:
        self._readers = readers
        self._slot = slot
        self._others = others
        self._step = -1
        self._left = 0  # how many have not been asked for their part of the step

    def receive(self, step: int) -> Sequence[Part]:
        """See `Feed`."""
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
        """See `Feed`."""
        if self._others is not None:
            return self._others.slot(step)
        return None if self._slot is None else self._slot.taken(step)

    @property
    def elsewhere(self) -> list[Feed]:
        """See `Feed`."""
        return [] if self._others is None else self._others.elsewhere

    def close(self) -> None:
        """See `Feed`."""
        for reader in self._readers:
            reader.close()
        if self._others is not None:
            self._others.close()


class WorkerFeed:
    """One iteration over the parts of a pool's workers.

    Args:
        iterator: torch's; None if a worker died before there was one.
        watch: Waits for the workers.
        method: How they were started.
        slot: Leases a step's slot.
        announce_end: Announces its end to them.
        replace: Called when the workers are no more: the pool needs others.
        staff: The workers, if they are not kept, and end.
    """

    def __init__(
        self,
        iterator: Iterator[Arrived] | None,
        watch: CrewWatch,
        method: str,
        slot: Callable[[int], Slot | None],
        announce_end: Callable[[], None],
        replace: Callable[[], None],
        staff: Staff | None,
    ) -> None:
        self._iterator = iterator
        self._watch = watch
        self._crew = watch.crew
        self._method = method
        self.slot = slot  # see `Feed`
        self._announce_end = announce_end
        self._replace = replace
        self._staff = staff

    def receive(self, step: int) -> Sequence[Part]:
        """See `Feed`."""
        self._watch.step = step
        message: Arrived | None = None
        try:
            if self._iterator is not None:
                message = next(self._iterator)
        except StopIteration:
            raise WorkerError(f"the workers ended before the epoch did, at step {step}: a bug in the loader") from None
        except Unanswered:
            pass
        except BaseException:
            # Ctrl-C, or what another signal's handler raises: the user wants to leave now, a worker may be in the
            # middle of something long, and torch's iterator in the middle of anything
            self._dismiss()
            raise
        if message is None:  # said here, where no traceback holds torch's iterator
            raise self._why_unanswered(step)
        try:
            return unpack(message.read())
        except Exception as error:
            # large items are fetched from the worker, which may have died
            if isinstance(error, (OSError, EOFError)) and (died := self._died_soon()):
                raise self._death(step, died) from error
            raise ItemError(
                f"what a worker sent cannot be unpickled here, at step {step}: {shorten(error)}; yield arrays, "
                "numbers, strings or other plain objects"
            ) from error

    def _why_unanswered(self, step: int) -> WorkerError:
        """Dismiss the workers, and say who died, or what those that are late do."""
        if not self._watch.late:
            return self._death(step, self._crew.died(or_ended=True))
        states = self._watch.states()
        self._dismiss()
        return WorkerTimeoutError(
            f"no worker delivered in time, within {self._watch.patience:g} s, at step {step}: {states}; "
            "raise timeout=, or find out why it hangs"
        )

    def _died_soon(self) -> dict[int, str]:
        deadline = clock.monotonic() + _DEATH_SECONDS
        while not (died := self._crew.died(or_ended=True)) and clock.monotonic() < deadline:
            clock.sleep(0.01)
        return died

    def _death(self, step: int, died: dict[int, str]) -> WorkerDeathError:
        """Dismiss the workers, and say who died."""
        watch = self._watch
        deaths = "; ".join(f"{how} {watch.doing(w) if w >= 0 else 'while it started'}" for w, how in died.items())
        known = [worker for worker in died if worker >= 0]
        member = watch.board.member(known[0]) if known else 0
        suspects = [watch.board.suspects(worker) for worker in known if watch.board.member(worker) == member]
        advice = self._crew.advice(died, self._method)
        self._dismiss()
        return WorkerDeathError(
            f"{deaths}; batch {step} was being put together. {advice}; max_restarts= goes on with new workers",
            suspects=frozenset().union(*suspects),
            member=member,
        )

    def _dismiss(self) -> None:
        self._crew.kill()
        self._replace()

    @property
    def elsewhere(self) -> list[Feed]:
        """See `Feed`."""
        return [self]

    def close(self) -> None:
        """See `Feed`. Workers that are not kept end."""
        self._announce_end()
        if self._staff is not None:
            self._staff.leave()


class CrewWatch:
    """Waits for workers: knows how long, and on whom.

    Args:
        crew: The workers.
        board: What they are doing.
        patience: Seconds in which one of them has to get further; 0 has no limit.
        sources: Those of each member.

    Attributes:
        late: None of them got any further for too long.
        step: The step that is being put together.
    """

    def __init__(self, crew: Crew, board: ActivityBoard, patience: float, sources: Sequence[Sequence[Any]]) -> None:
        self.crew = crew
        self.board = board
        self.patience = patience
        self.late = False
        self.step = 0
        self.look_seconds = min(_LOOK_SECONDS, patience or _LOOK_SECONDS)
        self._sources = sources
        self._begin = clock.monotonic()
        self._seen = self._state()
        self._further = self._begin  # when one of them was seen to have got further
        self._report = _REPORT_SECONDS

    def _state(self) -> tuple[bytes, list[int]]:
        return self.board.working.tobytes(), self.crew.missing

    def gives_up(self, waited_seconds: float) -> bool:
        """See `Watch`; a message may carry several steps, and each has its time."""
        if self.crew.died():
            return True
        now = clock.monotonic()
        if waited_seconds > self._report:
            self._report *= 2
            log.warning("step %d is waited for since %.0f s: %s", self.step, waited_seconds, self.states())
        if (state := self._state()) != self._seen:
            self._seen, self._further = state, now
        starting = self.crew.missing and now - self._begin < LONGEST_START_SECONDS
        stands_still = min(waited_seconds, now - self._further)
        self.late = bool(self.patience and not starting and stands_still >= self.patience)
        return self.late

    def states(self) -> str:
        """What the workers do that are waited for."""
        crew, doing = self.crew, dict[int, str]()
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
