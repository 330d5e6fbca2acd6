"""The workers of one loader, as that sees them: `Pool` starts them, a `Session` is one iteration over their parts.

::

    start      workers, unless some were kept      Begin -> each reader
    receive    parts <- readers                    CREDIT -> each reader
    close      CLOSE -> each reader                workers that are not kept: EXIT, and a few seconds to end

Guarantees: a worker that ends, or does not deliver, is an error that says which, how, and what it read. What was sent
before a death is received before. After an interrupt or an error all workers are replaced, with the memory they share.
"""

from __future__ import annotations

import functools
import math
import multiprocessing
import os
import threading
import time as clock
import warnings
from collections.abc import Sequence
from multiprocessing import process as multiprocessing_process
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch

from stream_dataloader._advice import available_cores
from stream_dataloader._assembly.part import Part, unpack
from stream_dataloader._assembly.slot_pool import SlotLeases, SlotPool
from stream_dataloader._assembly.slots import MOST_STEPS_A_MESSAGE, Slot
from stream_dataloader._descriptors import above_standard
from stream_dataloader._memory.endings import Ending, WeakItems, deliver, interrupts_held
from stream_dataloader._memory.pickling import ByValue
from stream_dataloader._notices import log, warn
from stream_dataloader._reading.activity import ActivityBoard
from stream_dataloader._reading.plan import Recovery, Start
from stream_dataloader._reading.sessions import state_of
from stream_dataloader._schedule.rules import Reader
from stream_dataloader._workers import torch_quirks
from stream_dataloader._workers.channel import (
    CLOSE,
    ENDED,
    EXIT,
    FAILED,
    READY,
    Begin,
    ProcessMail,
    ThreadMail,
    Unreadable,
)
from stream_dataloader._workers.process import Job, advice, how_it_ended
from stream_dataloader._workers.seeding import base_seed
from stream_dataloader._workers.settings import WorkerSettings
from stream_dataloader._workers.shared import KEPT_ROWS, Rows, Shared
from stream_dataloader._workers.tally import Tally
from stream_dataloader._workers.threads import start_thread
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import ErrorReport, ItemError, WorkerDeathError, WorkerError, WorkerTimeoutError, shorten
from stream_dataloader.stream_info import workers_seed

LONGEST_START_SECONDS = 300.0  # of a worker: user code may import much
_LOOK_SECONDS = 1.0  # between looks at workers of which no end was noticed
REPORT_SECONDS = 10.0  # of a wait before it is logged; then twice as long
_FAREWELL_SECONDS = 4.0  # to all workers together, to end or to close their streams
_HURRIED_SECONDS = 0.1  # the same for threads, if it is known already that they hang
_DEATH_SECONDS = 1.0  # a connection to a worker that was killed may break before its end is known


class Assignment(NamedTuple):
    """What workers read, and how they are started."""

    members: Sequence[StreamDataset]
    readers: Sequence[Reader]
    settings: WorkerSettings
    tally: Tally


class Failure(NamedTuple):
    """What ended a reader, in the place of its next part."""

    reader: int
    error: Exception


class Crew:
    """The workers that there are; it does not hold the pool, which may go before them.

    Attributes:
        behind: For each reader, how many sessions it was told to begin and has not ended.
        ready: Workers that have started.
        spoiled: They must be replaced.
        is_read: A session was started and not closed.
        hurries: They are not waited for: they hang, or the user wants to leave now.
        left: They end, or have ended.
    """

    def __init__(self, work: Assignment, board: ActivityBoard, *, threads: bool) -> None:
        self.readers = [
            number for number, reader in enumerate(work.readers) if reader.worker_id < work.settings.num_workers
        ]
        self.mail: Any = ThreadMail(len(work.readers)) if threads else ProcessMail(len(work.readers))
        self.processes: list[BaseProcess] = []
        self.board = board
        self.behind = [0] * len(work.readers)
        self.ready: set[int] = set()
        self.spoiled = False
        self.is_read = False
        self.hurries = False
        self.left = False
        self._over = False
        self.threads = threads
        self.farewell_seconds = _FAREWELL_SECONDS
        self._turn = threading.RLock()

    def order(self, what: Any) -> None:
        for reader in self.readers:
            self.mail.send(reader, what)

    def died(self) -> dict[int, str]:
        """Which worker processes ended, -1 for one that was starting, and how."""
        if self.threads or self.left:
            return {}
        found: dict[int, str] = {}
        for number, process in enumerate(self.processes):
            if process.pid is None:
                found[-1] = "a worker died"
            elif (code := process.exitcode) is not None:
                come = number in self.ready
                who = f"worker {number}" if come else "a worker"
                found[number if come else -1] = f"{who} (pid {process.pid}) {how_it_ended(code)}"
        return found

    def leave(self) -> None:
        """End the workers; wait for processes, but not longer than for one that hangs."""
        with self._turn:
            if self._over:
                return
            self.left = True
            try:
                self.order(CLOSE)
                self.order(EXIT)
                if not self.hurries:
                    deadline = clock.monotonic() + _FAREWELL_SECONDS
                    for process in self.processes:
                        if process.pid is not None:
                            process.join(max(deadline - clock.monotonic(), 0))
            finally:
                for process in self.processes:
                    if process.pid is not None and process.exitcode is None:
                        process.kill()
            for process in self.processes:
                if process.pid is not None:
                    process.join()
            self._over = True


class Pool:
    """The workers of one loader; of the process that built it alone."""

    def __init__(self, work: Assignment) -> None:
        settings = work.settings
        self.owner = os.getpid()
        self.work = work
        self.leases: SlotLeases | None = None
        self.crew: Crew | None = None
        self.sessions = 0  # that were started
        self._threads = settings.worker_method == "thread"
        self._prefetch = settings.prefetch_factor or 2
        # for each reader: those that wait, the one that is used and the one that is filled
        self._messages = self._prefetch + 2
        self._transport = "queue" if settings.patience is not None else settings.transport
        self._device: torch.device | None = None
        self._context: Any = None
        self.method = "thread"
        self._ending: Ending | None = None
        self._renew_memory()
        if not self._threads:
            given = settings.multiprocessing_context
            self._context = multiprocessing.get_context(given) if given is None or isinstance(given, str) else given
            _warn_of_cores(settings.num_workers)

    def _renew_memory(self) -> None:
        shared = not self._threads
        # Threads that were left alone have the board before.
        self.board = self.work.tally.board = ActivityBoard(self.work.readers, shared=shared)
        several = [
            sum(reader.member == number for reader in self.work.readers) > 1 for number in range(len(self.work.members))
        ]
        members = zip(self.work.members, several, strict=True)
        self._rows = [Rows(member.rules, shared=shared) if many else None for member, many in members]

    def start(self, starts: Sequence[Start], recovery: Recovery) -> Session:
        """Start an iteration, where each member starts; the one before must be closed.

        Raises:
            RuntimeError: There is no memory for slots, and the user insists on it.
        """
        if not self._threads and multiprocessing.current_process().daemon:
            raise WorkerError(
                "this process is daemonic, as those of multiprocessing.Pool and the workers of torch's DataLoader are: "
                'it may have no worker processes; pass num_workers=0, or worker_method="thread"'
            )
        try:
            return self._start(starts, recovery)
        except BaseException:
            self.discard()
            raise

    def _start(self, starts: Sequence[Start], recovery: Recovery) -> Session:
        if (crew := self.crew) is not None:
            if died := crew.died():
                text = f"{'; '.join(died.values())} between two epochs; all workers are started anew"
                warn(text, 6, UserWarning)
                self.discard()
            elif crew.spoiled or crew.left or crew.is_read:  # an interrupt came before anybody had the session
                self.discard()
        if self.crew is None and self.leases is not None and self.leases.unfit:  # items have changed
            self.leases = None
        self.sessions += 1
        start = starts[0].epoch, recovery.number, 0 if starts[0].resume is None else starts[0].resume.step
        rules = self.work.members[0].rules
        seed = base_seed(workers_seed(rules.seed, start[0], rules.groups.first, *start[1:]))
        limit = start[2] + 1 + self._prefetch
        own = [Begin(self.sessions, start_, recovery, limit, seed) for start_ in starts]
        if self.crew is None:
            self._start_crew(own, seed)
        else:
            self._wait_for_rows(self.crew)
            for reader in self.crew.readers:
                self.crew.mail.send(reader, own[self.work.readers[reader].member])
        assert self.crew is not None
        self.crew.is_read = True
        for reader in self.crew.readers:
            self.crew.behind[reader] += 1
        return Session(self, self.crew, self.sessions, limit)

    def _wait_for_rows(self, crew: Crew) -> None:
        """Wait until all readers have left the session whose rows come next."""
        waiting = Session(self, crew, self.sessions, 0)
        waiting._awaits_rows = True
        while max(crew.behind) >= KEPT_ROWS:
            waiting.receive(0)

    def _start_crew(self, begins: Sequence[Begin], seed: int) -> None:
        work, settings = self.work, self.work.settings
        self.board.clear()
        shared = Shared(
            work.members,
            work.readers,
            self.board,
            work.tally.meters,
            self._rows,
            self._ready_slots(),
            asks=self._threads or settings.patience is not None,
            one_by_one=self._threads or settings.patience is not None,
        )
        if self._threads:
            crew = self._new_crew()
            for reader in crew.readers:
                crew.mail.send(reader, begins[work.readers[reader].member])
                start_thread(reader, settings.worker_init_fn, shared, crew.mail.ports[reader])
            return
        if self.method_of_start == "forkserver":
            torch_quirks.preload_forkserver()
        with interrupts_held(self.method_of_start) as interrupts, above_standard(), torch_quirks.on_cpu():
            crew = self._new_crew()
            try:
                for number in range(settings.num_workers):
                    self._start_process(crew, number, shared, begins, seed)
            except (BrokenPipeError, ConnectionResetError, EOFError):  # one died over its start, which `receive` finds
                pass
        deliver(interrupts)

    def _new_crew(self) -> Crew:
        self.crew = crew = Crew(self.work, self.board, threads=self._threads)
        self._ending = Ending(self, crew.leave)
        return crew

    def _start_process(self, crew: Crew, number: int, shared: Shared, begins: Sequence[Begin], seed: int) -> None:
        settings = self.work.settings
        own = [reader for reader in crew.readers if self.work.readers[reader].worker_id == number]
        member = self.work.readers[own[0]].member
        for reader in own:  # it reads while others are started
            crew.mail.send(reader, begins[member])
        job = Job(
            number=number,
            workers=settings.num_workers,
            member=member,
            readers=own,
            ports=[crew.mail.ports[reader] for reader in own],
            shared=shared,
            init=ByValue(settings.worker_init_fn, "worker_init_fn"),
            mail=crew.mail if self.method_of_start == "fork" else None,
            folder=torch_quirks.shared_folder(),
            dtype=torch.get_default_dtype(),
            seed=seed,
        )
        process: BaseProcess = self._context.Process(target=job.run, daemon=True)
        crew.processes.append(process)
        process.start()
        _processes.add(process)
        torch_quirks.heed_reaping(process)
        crew.mail.watch(process)
        for port in job.ports:
            port.close()

    @property
    def method_of_start(self) -> str:
        return str(self._context.get_start_method())

    def discard(self) -> None:
        """Have no workers, nor anything that those there have seen."""
        if self.crew is not None:
            self.crew.spoiled = True
            self.dismiss()
            self.leases = None
            self._renew_memory()

    def dismiss(self) -> None:
        """Have no workers: those that there are end."""
        if self.crew is not None:
            if self._ending is not None:
                self._ending.now()
            self.crew = None

    def died(self) -> dict[int, str]:
        return {} if self.crew is None else self.crew.died()

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

    def _ready_slots(self) -> SlotPool | None:
        """The slots that workers share, made now if there are none yet; None if there can be none."""
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
        otherwise = "put together in new memory each time" if self._threads else "sent through the message queue"
        problem = f"there is no shared memory for batches ({reason})"
        if self._transport == "shared_memory":
            raise RuntimeError(f'{problem}; pass transport="auto" to have them {otherwise}')
        text = f"{problem}; they are {otherwise}, which is slower"
        warn(text, 6)
        self._transport = "queue"

    def slot(self, leases: SlotLeases | None, session: int, step: int) -> Slot | None:
        """The slot of a step that all workers of a session are done with, if any."""
        if leases is None:
            return None
        copies = leases.copies
        slot = leases.lease(session, step)
        self.work.tally.counts["copies"] += leases.copies - copies
        if slot is None and leases.pool.refused and self._transport != "queue":
            self._do_without("it could not be made large enough")
        return slot


class Session:
    """One iteration over the parts of a pool's workers."""

    def __init__(self, pool: Pool, crew: Crew, number: int, limit: int) -> None:
        self._pool, self._crew = pool, crew
        self.slot = functools.partial(pool.slot, pool.leases, number)
        self._settings = pool.work.settings
        self._closed = False
        self._awaits_rows = False  # the end of a session before is awaited
        self._begin = self._further = clock.monotonic()  # when a worker was seen to have got further
        self._seen: Any = None
        self._prefetch = self._settings.prefetch_factor or 2
        self._wishes = dict.fromkeys(crew.readers, 1)  # how many steps a reader would put into a message
        self._wish = 1  # the smallest of them
        self._limits = dict.fromkeys(crew.readers, limit)  # up to where each may read

    def receive(self, step: int, seconds: float = math.inf) -> Sequence[Part | Failure]:
        """The next parts of any worker; waits for them while `step` is put together.

        There are none if none came within so many seconds.

        Raises:
            WorkerError: A worker died, or none delivered in time.
        """
        crew, begin, report = self._crew, clock.monotonic(), REPORT_SECONDS
        if crew.left:
            raise self._ended(step)
        look = min(_LOOK_SECONDS, self._settings.timeout or _LOOK_SECONDS, seconds)
        try:
            while True:
                if (mail := crew.mail.get(look)) is not None:
                    if (found := self._opened(step, *mail)) is not None:
                        return found
                    continue
                if crew.left:
                    raise self._ended(step)
                if died := crew.died():
                    raise self._death(step, died)
                waited = clock.monotonic() - begin
                if waited >= seconds:
                    return ()
                if waited > report:
                    report *= 2
                    log.warning("step %d is waited for since %.0f s: %s", step, waited, self._states())
                if self._is_late(waited):
                    raise self._lateness(step)
        except BaseException as error:
            if crew.left and isinstance(error, Exception):  # another thread ended the workers meanwhile
                raise self._ended(step) from None
            crew.spoiled = crew.hurries = True
            crew.farewell_seconds = _HURRIED_SECONDS
            if not crew.threads:  # those that do not hang close their streams in `close`
                self._pool.discard()
            raise

    def _opened(self, step: int, reader: int, message: tuple[Any, ...]) -> Sequence[Part | Failure] | None:
        """The parts in a message; None if there are none for this session."""
        crew, kind = self._crew, message[0]
        if kind == ENDED:
            crew.behind[reader] -= 1
            return () if self._awaits_rows else None
        if kind == READY:
            crew.ready.add(self._pool.work.readers[reader].worker_id)
            return None
        if crew.behind[reader] != 1 or self._closed:  # of a session before
            return None
        if kind == FAILED:
            crew.spoiled = True
            return (Failure(reader, self._error(step, reader, message[1])),)
        parts: Sequence[Part] = message[1] if crew.threads else unpack(message[1])
        if self._wishes.get(reader) != message[2] or parts[-1].end:
            self._wishes[reader] = MOST_STEPS_A_MESSAGE if parts[-1].end else message[2]
            self._wish = min(self._wishes.values())
        return parts

    def give_credit(self, step: int, reader: int | None = None) -> None:
        """Have all readers, or one, read ahead of a step that is put together now: as many messages as are wanted.

        Credit that is for less than half a message waits: to wake a worker costs more than a small step.
        """
        wish = self._wish
        limit = step + 1 + self._prefetch * wish
        first = self._crew.readers[0] if reader is None else reader
        if limit >= self._limits[first] + (wish + 1) // 2:
            for number in self._crew.readers if reader is None else (reader,):
                self._limits[number] = limit
                self._crew.mail.send(number, limit)

    def _error(self, step: int, reader: int, what: Any) -> Exception:
        """The error that a reader failed with."""
        if isinstance(what, ErrorReport):
            return what.unpack()
        if isinstance(what, Unreadable):
            error = what.error
            # large items are fetched from the worker, which may have died
            if isinstance(error, (OSError, EOFError)) and (died := self._died_soon()):
                return self._death(step, died)
            told = ItemError(
                f"what a worker sent cannot be unpickled here, at step {step}: {shorten(error)}; yield arrays, "
                "numbers, strings or other plain objects"
            )
            told.__cause__ = error
            return told
        if isinstance(what, Exception):
            return what
        number = self._pool.work.readers[reader].worker_id
        self._crew.farewell_seconds = _HURRIED_SECONDS
        how = f"exited with status {what.code}" if isinstance(what, SystemExit) else f"was ended by {shorten(what)}"
        return WorkerDeathError(
            f"worker {number} (a thread) {how} {self._doing(number)}; batch {step} was being put together. "
            "Something in it called sys.exit, or raised what is no Exception",
            suspects=self._crew.board.suspects(number),
        )

    def _died_soon(self) -> dict[int, str]:
        deadline = clock.monotonic() + _DEATH_SECONDS
        while not (died := self._crew.died()) and clock.monotonic() < deadline:
            clock.sleep(0.01)
        return died

    def _ended(self, step: int) -> WorkerError:
        return WorkerError(
            f"the program is ending, or another thread ended the workers, while batch {step} was waited for; close the "
            "iterator and join the thread that reads before the program ends"
        )

    def _death(self, step: int, died: dict[int, str]) -> WorkerDeathError:
        crew, board = self._crew, self._crew.board
        deaths = "; ".join(f"{how} {self._doing(w) if w >= 0 else 'while it started'}" for w, how in died.items())
        known = [worker for worker in died if worker >= 0]
        member = board.member(known[0]) if known else 0
        suspects = [board.suspects(worker) for worker in known if board.member(worker) == member]
        what = advice(crew.processes, board, died, self._pool.method_of_start)
        return WorkerDeathError(
            f"{deaths}; batch {step} was being put together. {what}; max_restarts= goes on with new workers",
            suspects=frozenset().union(*suspects),
            member=member,
        )

    # Waits

    def _is_late(self, waited: float) -> bool:
        """Whether no worker got further for too long; a message may carry several steps, and each has its time."""
        now, patience = clock.monotonic(), self._settings.timeout
        if (state := (self._crew.board.working.tobytes(), self._missing)) != self._seen:
            self._seen, self._further = state, now
        starting = self._missing and now - self._begin < LONGEST_START_SECONDS
        return bool(patience and not starting and min(waited, now - self._further) >= patience)

    @property
    def _missing(self) -> list[int]:
        return sorted({*range(self._settings.num_workers)} - self._crew.ready)

    def _lateness(self, step: int) -> WorkerTimeoutError:
        more = ". A thread cannot be ended: it is left alone until it comes back" if self._crew.threads else ""
        return WorkerTimeoutError(
            f"no worker delivered in time, within {self._settings.timeout:g} s, at step {step}: {self._states()}; "
            f"raise timeout=, or find out why it hangs{more}"
        )

    def _states(self) -> str:
        doing: dict[int, str] = {}
        for worker in self._crew.ready:
            stopped = not self._crew.threads and state_of(self._crew.processes[worker].pid or 0) in (b"T", b"t")
            if stopped or self._crew.board.is_reading(worker):
                doing[worker] = self._doing(worker) + ", and is stopped (SIGCONT continues it)" * stopped
        states = [
            f"worker {w} is {d}" for w, d in (doing or {w: self._doing(w) for w in sorted(self._crew.ready)}).items()
        ]
        states += [f"worker {worker} has not started (imports, worker_init_fn)" for worker in self._missing]
        return "; ".join(states)

    def _doing(self, worker: int) -> str:
        return self._crew.board.describe(worker, [member.sources for member in self._pool.work.members])

    # The end

    def close(self) -> None:
        """No part is wanted any more; workers that are not kept end, and streams are closed."""
        if self._closed:
            return
        self._closed, crew = True, self._crew
        if crew is not self._pool.crew:  # it was discarded
            return
        before, crew.spoiled, crew.is_read = crew.spoiled, True, False  # if this is interrupted
        crew.order(CLOSE)
        if crew.threads:
            before = not self._wait_for_threads() or before
        crew.spoiled = before
        if not self._settings.persistent_workers or crew.spoiled:
            self._pool.dismiss()

    def _wait_for_threads(self) -> bool:
        """Wait until threads have closed their streams, for a while; False if one did not."""
        crew = self._crew
        deadline = clock.monotonic() + crew.farewell_seconds
        while max(crew.behind) > 0:
            mail = crew.mail.get(max(deadline - clock.monotonic(), 0.0))
            if mail is None:
                break
            self._opened(0, *mail)
        stuck = [reader for reader in crew.readers if crew.behind[reader] > 0]
        if not stuck:
            return True
        workers = sorted({self._pool.work.readers[reader].worker_id for reader in stuck})
        text = (
            f"{'; '.join(f'worker {n} (a thread) is still {self._doing(n)}' for n in workers)}, "
            f"{crew.farewell_seconds:g} s after the epoch was left; a thread cannot be ended: it is left alone, "
            "and closes its streams when it comes back"
        )
        self._pool.discard()
        if crew.farewell_seconds == _FAREWELL_SECONDS:
            warn(text, 2)
        return False


def _warn_of_cores(workers: int) -> None:
    cores = available_cores()
    if workers > cores:
        warnings.warn(
            f"This DataLoader will create {workers} worker processes in total, and this process may use {cores} cores. "
            "More workers than cores take turns, which is slower; pass a smaller num_workers",
            UserWarning,
            stacklevel=6,
        )


#: Worker processes of this process.
_processes: WeakItems[BaseProcess] = WeakItems()


def _leave_to_parent() -> None:
    """In a process that was forked, leave workers to the process that started them: Python would end them."""
    multiprocessing_process._children.difference_update(_processes)  # type: ignore[attr-defined]
    _processes.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
