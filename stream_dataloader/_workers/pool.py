"""The worker processes of one loader: torch's, which starts them, asks them in turn and takes their parts in.

A `Mailbox` tells workers which iteration they read, also those that are kept from the one before; parts of
several steps come in one message where steps are cheap (`pace`).

Guarantee: workers that died are replaced, all together with the memory they shared.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import os
import sys
import time as clock
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from stream_dataloader._assembly.part import Fault, Part, pack
from stream_dataloader._assembly.slots import MESSAGE_BYTES, MOST_STEPS_A_MESSAGE, Ring, RingReader, Slot
from stream_dataloader._memory.pickling import ByValue, Sealed, share_classes
from stream_dataloader._memory.shared_memory import SharedMemory
from stream_dataloader._reading.activity import ActivityBoard
from stream_dataloader._reading.begin import read_as_worker
from stream_dataloader._reading.reader import unsendable
from stream_dataloader._reading.sessions import SessionKey
from stream_dataloader._reading.share import NO_RECOVERY, Recovery
from stream_dataloader._schedule.rules import IntArray
from stream_dataloader._state.snapshot import Snapshot
from stream_dataloader._workers.feed import WorkerFeed
from stream_dataloader._workers.pace import Pace
from stream_dataloader._workers.processes import Crew, WorkerInit, guard, shared_folder, start_method, starting
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import ErrorReport
from stream_dataloader.protocols import Transport

_pool_numbers = itertools.count(1)


class Mailbox:
    """What the main process tells workers that already run, and they it; each value is written by one side.

    Sessions are numbered from 1. A worker that is kept counts them itself, as often as it is iterated; it may
    still look at one when the next is announced, so the last few stay readable.
    """

    _KEPT = 4

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._memory = SharedMemory(8 * (2 + 2 * self._KEPT + workers))

    @property
    def pids(self) -> IntArray:
        """Process id of each worker, which it writes itself; 0 before it has come."""
        return self._memory.array()[2 + 2 * self._KEPT :]

    def open(self, epoch: int, raw: bool) -> int:
        """Announce a session; returns its number."""
        told = self._memory.array()
        session = int(told[0]) + 1
        place = 2 + 2 * (session % self._KEPT)
        told[place : place + 2] = epoch, raw
        told[0] = session
        return session

    def close(self, session: int) -> None:
        """End a session; its workers give up."""
        self._memory.array()[1] = session

    def closed(self, session: int) -> bool:
        """Whether a session has ended."""
        return bool(self._memory.array()[1] >= session)

    def read(self, session: int) -> tuple[int, bool]:
        """A session's epoch, and whether windows are passed on as they are."""
        place = 2 + 2 * (session % self._KEPT)
        epoch, raw = self._memory.array()[place : place + 2]
        return int(epoch), bool(raw)


class WorkerPool:
    """The worker processes of one loader; of the process that built it alone.

    Args:
        dataset: What they read.
        num_workers: How many there are; 0 only checks the options.
        transport: How batches come from workers; see `StreamDataLoader`.
        pin_memory: Whether shared memory is to be page-locked, where there is CUDA.
        options: Further options of torch's `DataLoader`.

    Raises:
        RuntimeError: There is no shared memory, and `transport` is `"shared_memory"`.

    Attributes:
        owner: The process that built it.
    """

    def __init__(
        self,
        dataset: StreamDataset,
        num_workers: int,
        *,
        worker_init_fn: Callable[[int], Any] | None,
        transport: Transport,
        pin_memory: bool,
        **options: Any,
    ) -> None:
        self.owner = os.getpid()
        self._dataset, self._num_workers, self._options = dataset, num_workers, options
        self._init = WorkerInit(worker_init_fn) if num_workers else None
        self._mailbox = Mailbox(num_workers)
        # one worker may be asked for all messages that are on their way, once the others have ended
        self._messages = (options.get("prefetch_factor") or 2) * num_workers + 2
        pace = Pace(num_workers, self._messages)
        self._parts = _Parts(dataset, self._mailbox, pace, SessionKey(self.owner, -next(_pool_numbers), 0))
        self._transport, self._pin_memory = transport, pin_memory
        self._ring_reader: RingReader | None = None
        self._crew: Crew | None  # kept, so that a death between two iterations is noticed
        self._hire()

    def __del__(self) -> None:
        crew = self.__dict__.get("_crew")
        if crew is not None and self.owner == os.getpid() and not sys.is_finalizing():  # no thread starts any more
            with crew.leaving():
                del self._dataloader

    def _hire(self) -> None:
        self._crew = None
        self._ring_reader = self._new_ring() if self._num_workers and self._transport != "queue" else None
        self._parts.ring = None if self._ring_reader is None else self._ring_reader.ring
        self._dataloader: DataLoader[Any] = DataLoader(
            self._parts,
            batch_size=None,
            num_workers=self._num_workers,
            collate_fn=_as_it_is,
            worker_init_fn=self._init,
            generator=torch.Generator().manual_seed(self._dataset.rules.seed),  # leaves the global one alone
            **self._options,
        )

    def _new_ring(self) -> RingReader | None:
        try:
            return RingReader(Ring(self._dataset.batch_size, self._messages), pin_memory=self._pin_memory)
        except OSError as error:
            self._do_without_ring(error)
            return None

    def _do_without_ring(self, reason: object) -> None:
        told = f"there is no shared memory for batches ({reason})"
        if self._transport == "shared_memory":
            raise RuntimeError(f'{told}; pass transport="auto" to have them sent through torch\'s queue')
        warnings.warn(f"{told}; they are sent through torch's queue, which is slower", RuntimeWarning, stacklevel=4)
        self._transport = "queue"

    def start(
        self, epoch: int, *, raw: bool, resume: Snapshot | None = None, recovery: Recovery = NO_RECOVERY
    ) -> WorkerFeed:
        """Start an iteration; the one before must be closed.

        Args:
            epoch: The epoch's number.
            raw: Pass on windows that the streams cut as they are.
            resume: Where in the epoch to begin; None at its beginning.
            recovery: What is different after a worker died.
        """
        persistent = self._dataloader.persistent_workers
        if persistent and resume is not None:
            self._hire()  # only workers that start now learn where to begin
        if persistent and self._crew is not None and (died := self._crew.died()):
            warnings.warn(f"{'; '.join(died.values())} between two epochs; all workers are started anew", stacklevel=4)
            self._crew.kill()
            self._hire()
        if self._ring_reader is not None and not persistent and self._ring_reader.unfit:
            self._hire()  # items have changed: new workers, and a ring that fits them
        if self._crew is None:
            self._parts.board.clear()
            self._mailbox.pids[:] = 0
        session = self._mailbox.open(epoch, raw)
        self._parts.sessions = session - 1  # for workers that start now; others count themselves
        self._parts.resume, self._parts.recovery = resume, recovery
        method = start_method(self._dataloader.multiprocessing_context)
        if method == "fork":
            share_classes()
        if self._init is not None:
            self._init.folder = shared_folder()
        before = {child.pid for child in multiprocessing.active_children()}
        iterator: Iterator[Sealed]
        with starting(method) as interrupts:
            try:
                iterator = iter(self._dataloader)
            except (BrokenPipeError, ConnectionResetError, EOFError) as error:  # a worker died before it knew its task
                iterator = _Broken(error)
            except RuntimeError as error:  # one that was kept died, or did not answer
                if not persistent or self._crew is None:
                    raise
                iterator = _Broken(error)
        started = [child for child in multiprocessing.active_children() if child.pid not in before]
        kept = self._crew.children.values() if persistent and self._crew is not None else ()
        self._crew = Crew(self._mailbox.pids, kept or started)
        guard(self._crew)
        if interrupts:
            self._crew.kill()
            self._hire()
            interrupts[0]()
        return WorkerFeed(
            iterator,
            self._crew,
            method,
            functools.partial(self._slot, self._ring_reader, session, raw),
            functools.partial(self._mailbox.close, session),
            self._hire,
            self._options.get("timeout") or 0,
            self._parts.board,
            self._dataset.sources,
        )

    def _slot(self, ring_reader: RingReader | None, session: int, raw: bool, step: int) -> Slot | None:
        if ring_reader is None:
            return None
        slot = ring_reader.lease(session, step, by_lane=raw)
        if slot is None and ring_reader.ring.refused and self._transport != "queue":
            self._do_without_ring("it could not be made large enough")
        return slot


class _Parts(IterableDataset[Any]):
    """What torch's `DataLoader` iterates over in each worker: messages with its parts in a session."""

    def __init__(self, dataset: StreamDataset, mailbox: Mailbox, pace: Pace, key: SessionKey) -> None:
        self._dataset, self._mailbox, self._pace, self._key = dataset, mailbox, pace, key
        self.sessions = 0  # before the one that is iterated next, here
        self.ring: Ring | None = None
        self.resume: Snapshot | None = None  # where the first session here begins
        self.recovery = NO_RECOVERY
        self.board = ActivityBoard(dataset.batch_size, mailbox.workers)

    def __getstate__(self) -> dict[str, Any]:
        dataset = self._dataset  # its class may be one that workers would not find
        return self.__dict__ | {"_dataset": (ByValue(type(dataset), "the dataset's class"), dataset.__getstate__())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        kind, inside = state["_dataset"]
        dataset = object.__new__(kind.value)
        dataset.__setstate__(inside)
        self.__dict__.update(state | {"_dataset": dataset})

    def __iter__(self) -> Iterator[Sealed]:
        worker = get_worker_info()
        assert worker is not None
        self._mailbox.pids[worker.id] = os.getpid()
        self.sessions += 1
        return self._read(self.sessions, worker.id)

    def _read(self, session: int, worker_id: int) -> Iterator[Sealed]:
        if self._mailbox.closed(session):
            return
        epoch, raw = self._mailbox.read(session)
        resume, self.resume = self.resume, None
        reader = read_as_worker(
            self._dataset.plan(),
            self._dataset.session_table,
            self._key._replace(iteration=session),
            epoch=epoch,
            by_lane=raw,
            ring=self.ring,
            resume=resume,
            board=self.board,
            recovery=self.recovery,
            closed=functools.partial(self._mailbox.closed, session),
        )
        with contextlib.closing(reader):
            sizes = self._pace.sizes(session, worker_id, together=self._dataset.rules.deterministic)
            for steps in sizes:
                begin = clock.monotonic()
                parts = list(itertools.islice(reader, steps))
                if not parts:
                    return
                message = _message(parts)
                most_steps = self.ring.most_steps if self.ring and parts[-1].in_slot else MOST_STEPS_A_MESSAGE
                most_steps = min(most_steps, MESSAGE_BYTES * len(parts) // len(message))
                sizes.filled(clock.monotonic() - begin, most_steps)
                yield message


class _Broken(Iterator[Any]):
    """Stands for an iterator of torch's that could not be had, and raises why where parts are awaited."""

    def __init__(self, reason: Exception) -> None:
        self._reason = str(reason)

    def __next__(self) -> Any:
        raise RuntimeError(self._reason)


def _message(parts: list[Part]) -> Sealed:
    try:
        return Sealed(pack(parts))
    except Exception as error:
        if len(parts) > 1:  # those before the one that cannot be pickled can
            return Sealed([packed for part in parts for packed in _message([part]).read()])
        (part,) = parts
        fault = Fault(part.runs[0].lane if part.runs else 0, True, ErrorReport(unsendable(part, error)))
        return Sealed([part._replace(in_slot=False, blocks=[], objects={}, faults=[fault])])


def _as_it_is(part: Any) -> Any:
    return part
