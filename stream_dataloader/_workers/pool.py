"""The worker processes of one loader: torch's, which starts them, asks them in turn and takes their parts in.

A `Mailbox` says which iteration workers read, also to those that are kept from the one before; what runs in a
worker is in `worker`.

Guarantee: workers that died are replaced, all together with the memory they shared.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.context import BaseContext
from typing import Any

import torch
from torch.utils.data import DataLoader

from stream_dataloader._memory.endings import Ending
from stream_dataloader._memory.interrupts import deliver
from stream_dataloader._notices import log_warned
from stream_dataloader._reading.sessions import SessionKey
from stream_dataloader._reading.share import Recovery, Start
from stream_dataloader._schedule.rules import Reader
from stream_dataloader._workers import torch_quirks
from stream_dataloader._workers.feed import CrewWatch, WorkerFeed
from stream_dataloader._workers.mailbox import Mailbox
from stream_dataloader._workers.memory import BatchMemory
from stream_dataloader._workers.pace import Pace
from stream_dataloader._workers.packets import PacketContext, Unanswered
from stream_dataloader._workers.processes import Crew, WorkerInit, starting
from stream_dataloader._workers.sealed import Arrived
from stream_dataloader._workers.settings import WorkerSettings
from stream_dataloader._workers.staff import Staff
from stream_dataloader._workers.tally import Tally
from stream_dataloader._workers.worker import WorkerParts
from stream_dataloader.dataset import StreamDataset

_pool_numbers = itertools.count(1)


class WorkerPool:
    """The worker processes of one loader; of the process that built it alone.

    Args:
        members: What they read: the dataset of each member of the batch.
        readers: Who reads which lanes.
        num_workers: How many workers there are; 0 only checks the settings.
        settings: What they are started with.
        tally: Where to count what is done.

    Attributes:
        owner: The process that built it.
        memory: Where batches are put together.
    """

    def __init__(
        self,
        members: Sequence[StreamDataset],
        readers: Sequence[Reader],
        num_workers: int,
        settings: WorkerSettings,
        tally: Tally,
    ) -> None:
        self.owner = os.getpid()
        self._members = members
        self._num_workers = num_workers
        self._settings = settings
        self._init = WorkerInit(settings.worker_init_fn) if num_workers else None
        self._mailbox = Mailbox(num_workers)
        # one worker may be asked for all messages that are on their way, once the others have ended
        messages = (settings.prefetch_factor or 2) * num_workers + 2
        pace = Pace(num_workers, messages)
        key = SessionKey(self.owner, -next(_pool_numbers), 0)
        self._parts = WorkerParts(members, readers, self._mailbox, pace, key, tally.meters)
        self.memory = BatchMemory(readers[-1].lanes.stop, messages, settings, tally)
        self._ending: Ending | None = None
        self._engage()

    def dismiss(self) -> None:
        """End the workers that there are, and wait for that."""
        if self._ending is not None:
            self._ending.now()

    def _hire(self) -> None:
        """Have other workers than those that there are, which end."""
        self.dismiss()
        self._engage()

    def _engage(self) -> None:
        staff = Staff()
        if self._num_workers:
            self._ending = Ending(self, staff.leave)
            self.memory.forget()
        self._dataloader: DataLoader[Any] = DataLoader(
            self._parts,
            batch_size=None,
            num_workers=self._num_workers,
            collate_fn=_as_it_is,
            worker_init_fn=self._init,
            generator=torch.Generator().manual_seed(self._members[0].rules.seed),  # leaves the global one alone
            prefetch_factor=self._settings.prefetch_factor,
            persistent_workers=self._settings.persistent_workers,
            multiprocessing_context=self._settings.multiprocessing_context,
        )
        self._context: BaseContext | None = self._dataloader.multiprocessing_context  # as the user gave it
        self._method = str((self._context or multiprocessing).get_start_method())
        self._staff = staff  # the last: if this is interrupted, the ones before are known to have left

    def start(self, starts: Sequence[Start], *, whole_windows: bool, recovery: Recovery) -> WorkerFeed:
        """Start an iteration; the one before must be closed.

        Args:
            starts: Where each member begins.
            whole_windows: Pass on windows that the streams cut as they are.
            recovery: What is different after a worker died.
        """
        staff = self._staff
        if staff.left if self._settings.persistent_workers else staff.iterator is not None:
            self._hire()  # an interrupt came before anybody had them, or while they left
        self._replace_unfit(starts)
        if self._staff.crew is None:
            self._parts.board.clear()
            self._mailbox.pids[:] = 0
        self._parts.slots = self.memory.ready()
        session = self._mailbox.open(starts[0].epoch, whole_windows)
        self._parts.sessions = session - 1  # for workers that start now; others count themselves
        self._parts.starts = starts
        self._parts.recovery = recovery
        iterator, watch = self._iterate(session)
        return WorkerFeed(
            iterator,
            watch,
            self._method,
            functools.partial(self.memory.slot, self.memory.leases, session, whole_windows),
            functools.partial(self._mailbox.close, session),
            self._hire,
            None if self._settings.persistent_workers else self._staff,
        )

    def died(self) -> dict[int, str]:
        """Which kept workers died, and how."""
        crew = self._staff.crew
        return crew.died(or_ended=True) if crew is not None and self._settings.persistent_workers else {}

    def _replace_unfit(self, starts: Sequence[Start]) -> None:
        """Have new workers where those that are kept cannot read what is wanted."""
        if died := self.died():
            assert self._staff.crew is not None
            text = f"{'; '.join(died.values())} between two epochs; all workers are started anew"
            log_warned(text)
            warnings.warn(text, stacklevel=5)
            self._staff.crew.kill()
            self._hire()
        elif self._settings.persistent_workers and any(start != (starts[0].epoch, None) for start in starts):
            self._hire()  # only workers that start now learn where to begin
        if not self._settings.persistent_workers and self.memory.unfit:
            self._hire()  # items have changed: new workers, and slots that fit them

    def _iterate(self, session: int) -> tuple[Iterator[Arrived] | None, CrewWatch]:
        """An iterator of torch's, None if a worker died over it; and who waits for the workers."""
        if self._init is not None:
            self._init.folder = torch_quirks.shared_folder()
            self._init.forked = self._method == "fork"
        staff = self._staff
        if staff.packets is None or not self._settings.persistent_workers:
            staff.packets = PacketContext(self._context or multiprocessing.get_context(self._method))
        packets = staff.packets
        self._dataloader.multiprocessing_context = packets
        crew = Crew(self._mailbox, session, packets.processes)
        packets.watch = watch = CrewWatch(
            crew, self._parts.board, self._settings.timeout, [own.sources for own in self._members]
        )
        iterator: Iterator[Arrived] | None = None
        with starting(self._method) as interrupts:
            staff.crew = crew  # not before: of an interrupted start, nobody is to be taken for dead
            try:
                iterator = torch_quirks.iterator_of(self._dataloader, packets.processes)
                staff.iterator = iterator
            except (Unanswered, BrokenPipeError, ConnectionResetError, EOFError):
                pass
            except RuntimeError:  # torch's signal handler may have raised a death
                if not crew.died(or_ended=True):
                    raise
        try:
            deliver(interrupts)
        except BaseException:  # a handler that raises nothing changes nothing
            crew.kill()
            self._hire()
            raise
        return iterator, watch


def _as_it_is(part: Any) -> Any:
    return part
