"""The worker processes of one loader: torch starts them, asks them in turn and takes their parts in.

Guarantee: workers that died are replaced, all together with the memory they shared.
"""

from __future__ import annotations

import functools
import itertools
import math
import multiprocessing
import time as clock
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.context import BaseContext
from typing import Any

import torch
from torch.utils.data import DataLoader

from stream_dataloader._assembly.part import Part, unpack
from stream_dataloader._assembly.slots import Slot
from stream_dataloader._descriptors import above_standard
from stream_dataloader._memory.endings import Ending, deliver, interrupts_held
from stream_dataloader._notices import warn
from stream_dataloader._reading.plan import Recovery, Start
from stream_dataloader._reading.sessions import SessionKey
from stream_dataloader._workers import torch_quirks
from stream_dataloader._workers.feed import Assignment, Feed, Pool
from stream_dataloader._workers.mailbox import Mailbox
from stream_dataloader._workers.packets import PacketContext, Unanswered
from stream_dataloader._workers.processes import ProcessCrew, WorkerInit
from stream_dataloader._workers.worker import Arrived, WorkerParts
from stream_dataloader.errors import ItemError, WorkerDeathError, WorkerError, shorten

_DEATH_SECONDS = 1.0  # a connection to a worker that was killed may break before its end is known

_pool_numbers = itertools.count(1)


class WorkerPool(Pool):
    """The worker processes of one loader."""

    def __init__(self, work: Assignment) -> None:
        count = work.settings.num_workers
        # one worker may be asked for all messages that are on their way, once the others have ended
        messages = (work.settings.prefetch_factor or 2) * count + 2
        super().__init__(work, messages, "sent through the message queue", shared=count > 0)
        self._init = WorkerInit(work.settings.worker_init_fn) if count else None
        self.mailbox = Mailbox(count, messages)
        key = SessionKey(self.owner, -next(_pool_numbers), 0)
        self._parts = WorkerParts(work.members, work.readers, self.mailbox, key, work.tally.meters, self.board)
        self._parts.are_paced = work.settings.patience is not None
        self._ending: Ending | None = None
        self._generator = torch.Generator(device="cpu")  # of workers' seeds: the program's own is left alone
        self._engage()

    def dismiss(self) -> None:
        if self._ending is not None:
            self._ending.now()

    def hire(self) -> None:
        """Replace all workers, and the memory that they have seen."""
        self.dismiss()
        self.leases = None  # of which they hold the memory
        self._engage()

    def _engage(self) -> None:
        self.dismiss()
        self.work.tally.board = self.board
        crew, settings = ProcessCrew(self.board, self.work, self.mailbox), self.work.settings
        if settings.num_workers:
            self._ending = Ending(self, crew.leave)
        order: dict[str, Any] = {}  # which older versions do not have
        if settings.patience is not None:
            order["in_order"] = False
        self._dataloader: DataLoader[Any] = DataLoader(
            self._parts,
            batch_size=None,
            num_workers=settings.num_workers,
            collate_fn=_as_it_is,
            worker_init_fn=self._init,
            generator=self._generator,
            prefetch_factor=settings.prefetch_factor if settings.num_workers else None,
            persistent_workers=settings.persistent_workers,
            multiprocessing_context=settings.multiprocessing_context,
            **order,
        )
        self._context: BaseContext | None = self._dataloader.multiprocessing_context  # as the user gave it
        self.method = str((self._context or multiprocessing).get_start_method())
        self._crew = crew  # the last: if this is interrupted, the ones before are known to have left

    def start(self, starts: Sequence[Start], recovery: Recovery) -> Feed:
        if self.work.settings.num_workers and multiprocessing.current_process().daemon:
            raise WorkerError(
                "this process is daemonic, as those of multiprocessing.Pool and the workers of torch's DataLoader are: "
                'it may have no worker processes; pass num_workers=0, or worker_method="thread"'
            )
        keeps = self.work.settings.persistent_workers
        if self._crew.left if keeps else self._crew.iterator is not None:
            self.hire()  # an interrupt came before anybody had them, or while they left
        self._replace_unfit(starts)
        if self._crew.session and self._crew.iterator is None:  # they have left, or could not be started
            self._engage()
        parts = self._parts
        if not self._crew.session:
            self.board.clear()
            self.mailbox.pids[:] = 0
        parts.slots = self._ready_slots()
        session = self.mailbox.open(starts[0].epoch)
        parts.sessions = session - 1  # for workers that start now; others count themselves
        parts.starts = starts
        parts.recovery = recovery
        resume = starts[0].resume
        start = starts[0].epoch, recovery.number, 0 if resume is None else resume.step
        self._generator.manual_seed(parts.workers_seed(*start))
        iterator = self._iterate(session)
        slot = functools.partial(self._slot, self.leases, session)
        return WorkerFeed(iterator, self._crew, slot, self)

    def died(self) -> dict[int, str]:
        are_kept = self.work.settings.persistent_workers and self._crew.iterator is not None
        return self._crew.died(or_ended=True) if are_kept else {}

    def _replace_unfit(self, starts: Sequence[Start]) -> None:
        if died := self.died():
            text = f"{'; '.join(died.values())} between two epochs; all workers are started anew"
            warn(text, 5, UserWarning)
            self._crew.kill()
            self.hire()
        elif self.work.settings.persistent_workers:
            before = (self._parts.starts or starts)[0]
            if any(start != before._replace(epoch=starts[0].epoch, resume=None) for start in starts):
                self.hire()  # only workers that start now learn where to begin, and what for
        elif self._slots_are_unfit:
            self.hire()  # items have changed: new workers, and slots that fit them

    def _iterate(self, session: int) -> Iterator[Arrived] | None:
        """Torch's iterator over a session; None if a worker died over its start."""
        if self._init is not None:
            self._init.folder = torch_quirks.shared_folder()
            self._init.forked = self.method == "fork"
            self._init.dtype = torch.get_default_dtype()
        crew = self._crew
        if crew.packets is None:
            crew.packets = PacketContext(self._context or multiprocessing.get_context(self.method))
        self._dataloader.multiprocessing_context = packets = crew.packets
        packets.watch = crew
        crew.await_session()
        if self.method == "forkserver":
            torch_quirks.preload_forkserver()
        iterator: Iterator[Arrived] | None = None
        with interrupts_held(self.method) as interrupts, above_standard():  # multiprocessing makes pipes
            crew.session = session  # not before: of an interrupted start, nobody is to be taken for dead
            try:
                crew.iterator = iterator = torch_quirks.iterator_of(self._dataloader)
            except (Unanswered, BrokenPipeError, ConnectionResetError, EOFError):
                pass
            except RuntimeError:  # torch's signal handler may have raised a death
                if not crew.has_ended:  # what torch says of the program, such as of its default device
                    raise
            finally:
                for process in packets.processes:
                    torch_quirks.heed_reaping(process)
        try:
            deliver(interrupts)
        except BaseException:  # a handler that raises nothing changes nothing
            crew.kill()
            self.hire()
            raise
        return iterator


def _as_it_is(part: Any) -> Any:
    return part


class WorkerFeed:
    """One iteration over a pool's workers; without an iterator, one has died."""

    def __init__(
        self,
        iterator: Iterator[Arrived] | None,
        crew: ProcessCrew,
        slot: Callable[[int], Slot | None],
        pool: WorkerPool,
    ) -> None:
        self._iterator = iterator
        self._crew = crew
        self.slot = slot
        self._pool = pool
        self._session = crew.session

    @property
    def elsewhere(self) -> list[Feed]:
        return [self]

    def receive(self, step: int, seconds: float = math.inf) -> Sequence[Part]:
        crew, message = self._crew, None
        crew.step, crew.allowed = step, seconds
        try:
            if self._iterator is not None:
                message = torch_quirks.next_of(self._iterator)
        except StopIteration:
            if crew.left:
                raise self._ended(step) from None
            raise WorkerError(f"the workers ended before the epoch, at step {step}: a bug in the loader") from None
        except Unanswered:
            pass
        except BaseException as error:
            if crew.left and isinstance(error, Exception):  # its queues were closed meanwhile
                raise self._ended(step) from None
            # Ctrl-C, or what another signal's handler raises: torch's iterator may be in the middle of anything
            self._dismiss()
            raise
        if message is None:  # said here, where no traceback holds torch's iterator
            if crew.is_over:
                return ()
            if crew.left:
                raise self._ended(step)
            if not crew.late:
                raise self._death(step, crew.died(or_ended=True))
            lateness = crew.lateness()
            self._dismiss()
            raise lateness
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

    def _ended(self, step: int) -> WorkerError:
        return WorkerError(
            f"the program is ending, or another thread ended the workers, while batch {step} was waited for; close the "
            "iterator and join the thread that reads before the program ends"
        )

    def _died_soon(self) -> dict[int, str]:
        deadline = clock.monotonic() + _DEATH_SECONDS
        while not (died := self._crew.died(or_ended=True)) and clock.monotonic() < deadline:
            clock.sleep(0.01)
        return died

    def _death(self, step: int, died: dict[int, str]) -> WorkerDeathError:
        crew, board = self._crew, self._crew.board
        deaths = "; ".join(f"{how} {crew.doing(w) if w >= 0 else 'while it started'}" for w, how in died.items())
        known = [worker for worker in died if worker >= 0]
        member = board.member(known[0]) if known else 0
        suspects = [board.suspects(worker) for worker in known if board.member(worker) == member]
        advice = crew.advice(died, self._pool.method)
        self._dismiss()
        return WorkerDeathError(
            f"{deaths}; batch {step} was being put together. {advice}; max_restarts= goes on with new workers",
            suspects=frozenset().union(*suspects),
            member=member,
        )

    def _dismiss(self) -> None:
        self._crew.kill()
        self._pool.hire()

    def close(self) -> None:
        """Announce the end; workers that are not kept end."""
        self._pool.mailbox.close(self._session)
        if not self._pool.work.settings.persistent_workers:
            self._crew.leave()
