"""The workers of one loader: `Pool` starts them, keeps them from one iteration to the next, and replaces them.

::

    start      workers, unless some were kept      Begin -> each reader
    receive    parts <- readers                    CREDIT -> each reader        of the `Session`
    close      CLOSE -> each reader                workers that are not kept: EXIT, and a few seconds to end

Guarantee: after a worker died or raised an error, the workers read no further iteration.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import warnings
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch

from stream_dataloader._engine.advice import available_cores
from stream_dataloader._engine.assembly.slot_pool import SlotLeases, SlotPool
from stream_dataloader._engine.assembly.slots import Slot
from stream_dataloader._engine.descriptors import limits_named, standard_for_children
from stream_dataloader._engine.memory.endings import Ending, interrupts_held
from stream_dataloader._engine.memory.pickling import ByValue
from stream_dataloader._engine.notices import warn
from stream_dataloader._engine.reading.activity import WorkerStatus
from stream_dataloader._engine.reading.plan import Recovery
from stream_dataloader._engine.schedule.place import Place
from stream_dataloader._engine.workers import torch_quirks
from stream_dataloader._engine.workers.channel import Begin, ProcessMail, ThreadMail
from stream_dataloader._engine.workers.process import Job
from stream_dataloader._engine.workers.seeding import base_seed
from stream_dataloader._engine.workers.session import Session
from stream_dataloader._engine.workers.shared import KEPT_ROWS, Rows, Shared
from stream_dataloader._engine.workers.threads import start_worker
from stream_dataloader._engine.workers.workers import Assignment, Workers
from stream_dataloader.errors import WorkerError
from stream_dataloader.stream_info import workers_seed

AnyWorkers = TypeVar("AnyWorkers", bound=Workers)


class Pool:
    """The workers of one loader, usable only in the process that built it."""

    def __init__(self, work: Assignment) -> None:
        settings = work.settings
        self.owner = os.getpid()
        self.work = work
        self.leases: SlotLeases | None = None
        self.workers: Workers | None = None
        self.sessions = 0  # number of sessions that were started
        self._threads = settings.worker_method == "thread"
        self._processes = settings.worker_method == "process"
        self._prefetch = settings.batches_ahead
        # For each reader: messages that wait, one that is in use, and one that is being filled.
        self._messages = self._prefetch + 2
        self._uses_slots = settings.uses_slots
        self._device: torch.device | None = None
        self._context: Any = None
        self._ending: Ending | None = None
        self._renew_memory()
        if self._processes:
            given = settings.multiprocessing_context
            self._context = multiprocessing.get_context(given) if given is None or isinstance(given, str) else given
            warn_of_cores(settings.num_workers)

    def _renew_memory(self) -> None:
        shared = self._processes
        # Threads that were abandoned still write to the old status.
        self.status = WorkerStatus(self.work.readers, shared=shared)
        several = len(self.work.readers) > 1
        self._rows = Rows(self.work.dataset._rules, shared=shared) if several else None

    def start(self, place: Place, recovery: Recovery, *, whole_windows: bool) -> Session:
        """Start an iteration at a place; the one before must be closed."""
        if self._processes and multiprocessing.current_process().daemon:
            raise WorkerError(
                "this process is daemonic, like those of multiprocessing.Pool and the workers of torch's DataLoader, "
                'so it cannot start worker processes; pass num_workers=0, or worker_method="thread"'
            )
        try:
            return self._start(place, recovery, whole_windows=whole_windows)
        except BaseException:  # workers of an interrupted start may be half set up
            self.discard()
            raise

    def _start(self, place: Place, recovery: Recovery, *, whole_windows: bool) -> Session:
        if (workers := self.workers) is not None:
            if died := workers.died():
                text = f"{'; '.join(died.values())} between two epochs; all workers are started anew"
                warn(text, 6, UserWarning)
                self.discard()
            # `is_read` without an open session: an interrupt came after the session began, before it was returned.
            elif workers.spoiled or workers.left or workers.is_read:
                self.discard()
        if self.workers is None and self.leases is not None and self.leases.unfit:  # the layout of items has changed
            self.leases = None
        self.sessions += 1
        rules = self.work.dataset._rules
        seed = base_seed(workers_seed(rules.seed, place.epoch, rules.groups.first, recovery.number, place.step))
        limit = place.step + 1 + self._prefetch
        begin = Begin(self.sessions, place, whole_windows, recovery, limit, seed)
        if self.workers is None:
            self._start_workers(begin)
        else:
            self._wait_for_rows(self.workers)
            for reader in self.workers.readers:
                self.workers.mail.send(reader, begin)
        assert self.workers is not None
        self.workers.is_read = True
        for reader in self.workers.readers:
            self.workers.behind[reader] += 1
        return self._session(self.workers, limit)

    def _session(self, workers: Workers, limit: int) -> Session:
        slot = functools.partial(self.slot, self.leases, self.sessions)
        return Session(self.work, workers, limit, slot, self.stop_workers, self.discard)

    def _wait_for_rows(self, workers: Workers) -> None:
        """Wait until all readers have left the session whose row is used next."""
        waiting = self._session(workers, 0)
        waiting._awaits_rows = True
        while max(workers.behind) >= KEPT_ROWS:
            waiting.receive(0)

    def _start_workers(self, begin: Begin) -> None:
        work, settings = self.work, self.work.settings
        self.status.clear()
        shared = Shared(
            work.dataset,
            work.readers,
            self.status,
            work.counts.meters,
            self._rows,
            self._ready_slots(),
            in_threads=self._threads,
        )
        if self._threads:
            workers = self._new_workers()
            for reader in workers.readers:
                workers.mail.send(reader, begin)
                start_worker(reader, settings.worker_init_fn, shared, workers.mail.ports[reader])
            return
        folder = torch_quirks.shared_folder()  # before a forkserver makes one
        if self.method_of_start == "forkserver":
            with standard_for_children():
                torch_quirks.preload_forkserver()
        # The first time, multiprocessing also starts processes of its own here, which must get the same treatment.
        limited = limits_named(f"to start {settings.num_workers} worker processes")
        with limited, standard_for_children(), interrupts_held(self.method_of_start), torch_quirks.on_cpu():
            workers = self._new_workers()
            try:
                for number in range(settings.num_workers):
                    self._start_process(workers, number, shared, begin, folder)
            except (BrokenPipeError, ConnectionResetError, EOFError):  # a worker died at its start; `receive` says so
                pass

    def _new_workers(self) -> Workers:
        readers = len(self.work.readers)
        mail = ThreadMail(readers) if self._threads else ProcessMail(readers)
        return self._take_up(Workers(self.work, self.status, self.method_of_start, mail))

    def _take_up(self, workers: AnyWorkers) -> AnyWorkers:
        self.workers, self._ending = workers, Ending(self, workers.leave)
        return workers

    def _start_process(self, workers: Workers, number: int, shared: Shared, begin: Begin, folder: str | None) -> None:
        settings = self.work.settings
        workers.mail.send(number, begin)  # before the start, so that this worker reads while others are started
        job = Job(
            number=number,
            workers=settings.num_workers,
            port=workers.mail.ports[number],
            shared=shared,
            init=ByValue(settings.worker_init_fn, "worker_init_fn"),
            mail=workers.mail if self.method_of_start == "fork" else None,
            folder=folder,
            dtype=torch.get_default_dtype(),
            seed=begin.seed,
        )
        process: BaseProcess = self._context.Process(target=job.run, daemon=True)
        workers.processes.append(process)
        process.start()
        torch_quirks.detect_reaping(process)
        workers.add(process)
        # The worker has its own copy. If this process kept one, the socket of a dead worker would never report its end.
        job.port.close()

    @property
    def method_of_start(self) -> str:
        return "thread" if self._threads else str(self._context.get_start_method())

    def discard(self) -> None:
        """End the workers, and drop the memory that they share."""
        if self.workers is not None:
            self.workers.spoiled = True
            self.stop_workers()
            self.leases = None
            self._renew_memory()

    def stop_workers(self) -> None:
        """End the workers."""
        if self.workers is not None:
            if self._ending is not None:
                self._ending.now()
            self.workers = None

    def died(self) -> dict[int, str]:
        return {} if self.workers is None else self.workers.died()

    @property
    def slots_in_use(self) -> tuple[int, int]:
        leases = self.leases
        return (0, 0) if leases is None or not leases.pool.laid_out else (leases.in_use, leases.pool.slots)

    def release_slots(self) -> None:
        """Free the slots of batches that are gone, once the current CUDA stream is done with them."""
        if self.leases is not None:
            self.leases.release()

    def lock_slots(self, device: torch.device | None) -> None:
        """Page-lock the slots from now on, because batches are copied to a CUDA device."""
        self._device = device
        if self.leases is not None and device is not None:
            self.leases.lock_for(device)

    def _ready_slots(self) -> SlotPool | None:
        """Return the slots that workers share, made now if needed; None if there can be none."""
        if self.leases is None and self._uses_slots:
            pin_memory, lanes = self.work.settings.pin_memory, self.work.readers[-1].lanes.stop
            try:
                self.leases = SlotLeases(SlotPool(lanes, self._messages), pin_memory=pin_memory)
            except OSError as error:
                self._do_without(error)
            else:
                self.lock_slots(self._device)
        return None if self.leases is None else self.leases.pool

    def _do_without(self, reason: object) -> None:
        otherwise = "assembled in new memory each time" if self._threads else "sent through the message queue"
        problem = f"there is no shared memory for batches ({reason})"
        warn(f"{problem}; they are {otherwise}, which is slower", 6)
        self._uses_slots = False

    def slot(self, leases: SlotLeases | None, session: int, step: int) -> Slot | None:
        """Return the slot of a step that all workers of a session are done with, if any."""
        if leases is None:
            return None
        copies = leases.copies
        slot = leases.lease(session, step)
        self.work.counts.totals["copies"] += leases.copies - copies
        if slot is None and leases.pool.refused and self._uses_slots:
            self._do_without("it could not be made large enough")
        return slot


def warn_of_cores(workers: int) -> None:
    """Warn if there are more worker processes than cores, as torch's `DataLoader` does."""
    cores = available_cores()
    if workers > cores:
        warnings.warn(
            f"This DataLoader will create {workers} worker processes in total, and this process may use {cores} cores. "
            "More workers than cores share them, which is slower; pass a smaller num_workers",
            UserWarning,
            stacklevel=6,
        )
