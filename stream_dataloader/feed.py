"""Where a loader's parts come from: this process, or torch's worker processes.

A `Feed` yields the parts of one iteration: each worker's in order of step, those of different workers in any
order. `WorkerPool` wraps torch's `DataLoader`, which starts the workers, asks them in turn and takes their
parts in; a `Mailbox` tells workers which iteration they read, also those that are kept from the one before.

Guarantee: whatever ends a worker, or keeps it from delivering, is an error that says which worker and how.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import ErrorReport, WorkerError, WorkerTimeoutError
from stream_dataloader.part_reader import PartReader, unsendable
from stream_dataloader.pickling import Message
from stream_dataloader.regroup import Fault, Part
from stream_dataloader.schedule import IntArray
from stream_dataloader.shared_memory import SharedMemory
from stream_dataloader.source_queue import SessionKey
from stream_dataloader.workers import Crew, WorkerInit, guard, sigint_blocked

_pool_numbers = itertools.count(1)


class Feed(Protocol):
    """The parts of one iteration."""

    def receive(self, step: int) -> Part:
        """The next part of any worker that has not ended; waits for it while `step` is being put together.

        Raises:
            WorkerError: A worker died, or none delivered in time.
        """

    def close(self) -> None:
        """No part is wanted any more."""


class LocalFeed:
    """All lanes, read in this process."""

    def __init__(self, reader: PartReader) -> None:
        self._reader = reader

    def receive(self, step: int) -> Part:  # noqa: ARG002
        """See `Feed`."""
        return next(self._reader)

    def close(self) -> None:
        """See `Feed`."""
        self._reader.close()


class Mailbox:
    """What the main process tells workers that already run, and they it; each value is written by one side.

    Sessions are numbered from 1. A worker that is kept counts them itself, as often as it is iterated; it may
    still look at one when the next is announced, so the last few stay readable.
    """

    _KEPT = 4

    def __init__(self, workers: int) -> None:
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
        options: Further options of torch's `DataLoader`.

    Attributes:
        owner: The process that built it.
    """

    def __init__(
        self, dataset: StreamDataset, num_workers: int, worker_init_fn: Callable[[int], Any] | None, **options: Any
    ) -> None:
        self.owner = os.getpid()
        self._dataset, self._num_workers, self._options = dataset, num_workers, options
        self._init = WorkerInit(worker_init_fn) if num_workers else None
        self._mailbox = Mailbox(num_workers)
        self._parts = _Parts(dataset, self._mailbox, SessionKey(self.owner, -next(_pool_numbers), 0))
        self._crew: Crew | None  # kept, so that a death between two iterations is noticed
        self._hire()

    def _hire(self) -> None:
        self._crew = None
        self._dataloader: DataLoader[Any] = DataLoader(
            self._parts,
            batch_size=None,
            num_workers=self._num_workers,
            collate_fn=_as_it_is,
            worker_init_fn=self._init,
            generator=torch.Generator().manual_seed(self._dataset.rules.seed),  # leaves the global one alone
            **self._options,
        )

    def start(self, epoch: int, *, raw: bool) -> WorkerFeed:
        """Start an iteration; the one before must be closed."""
        persistent = self._dataloader.persistent_workers
        if persistent and self._crew is not None and (deaths := self._crew.deaths()):
            warnings.warn(f"{'; '.join(deaths)} between two epochs; all workers are started anew", stacklevel=4)
            self._crew.kill()
            self._hire()
        session = self._mailbox.open(epoch, raw)
        self._parts.sessions = session - 1  # for workers that start now; others count themselves
        with sigint_blocked():
            iterator = iter(self._dataloader)
        self._crew = Crew(self._mailbox.pids)
        guard(self._crew)
        return WorkerFeed(iterator, self._crew, functools.partial(self._mailbox.close, session), self._hire)


class WorkerFeed:
    """One iteration over the parts of a pool's workers.

    Args:
        iterator: torch's iterator.
        crew: The workers.
        tell_end: Tells them of its end.
        replace: Called when the workers are no more: the pool needs others.
    """

    def __init__(
        self, iterator: Iterator[Part], crew: Crew, tell_end: Callable[[], None], replace: Callable[[], None]
    ) -> None:
        self._iterator: Iterator[Part] | None = iterator
        self._crew, self._tell_end, self._replace = crew, tell_end, replace

    def receive(self, step: int) -> Part:
        """See `Feed`."""
        crew = self._crew
        assert self._iterator is not None
        crew.waiting = threading.current_thread() is threading.main_thread()
        try:
            if crew.casualty:
                raise RuntimeError("a worker died while nobody waited for it")
            return next(self._iterator)
        except StopIteration:
            raise WorkerError(f"the workers ended before the epoch did, at step {step}: a bug in the loader") from None
        except KeyboardInterrupt:
            self._dismiss()  # the user wants to leave now, and a worker may be in the middle of something long
            raise
        except RuntimeError as error:
            if deaths := crew.deaths():
                self._dismiss()
                raise WorkerError(
                    f"{'; '.join(deaths)}, at step {step}; if it was out of memory, use fewer workers, a smaller "
                    "prefetch_factor or smaller items"
                ) from error
            if "timed out" in str(error):
                self._dismiss()
                raise WorkerTimeoutError(
                    f"no worker delivered in time, at step {step} ({error}); raise timeout=, or find out which "
                    "stream hangs"
                ) from error
            raise
        finally:
            crew.waiting = False

    def _dismiss(self) -> None:
        self._crew.kill()
        self._replace()

    def close(self) -> None:
        """See `Feed`. Workers that are not kept end."""
        self._tell_end()
        with self._crew.leaving():
            self._iterator = None  # the last reference, unless workers are persistent: torch ends them


class _Parts(IterableDataset[Any]):
    """What torch's `DataLoader` iterates over in each worker: its parts, in the session that the mailbox names."""

    def __init__(self, dataset: StreamDataset, mailbox: Mailbox, key: SessionKey) -> None:
        self._dataset, self._mailbox, self._key = dataset, mailbox, key
        self.sessions = 0  # before the one that is iterated next, here

    def __iter__(self) -> Iterator[Message]:
        worker = get_worker_info()
        assert worker is not None
        self._mailbox.pids[worker.id] = os.getpid()
        self.sessions += 1
        return self._read(self.sessions)

    def _read(self, session: int) -> Iterator[Message]:
        if self._mailbox.closed(session):
            return
        epoch, raw = self._mailbox.read(session)
        reader = self._dataset.read_as_worker(
            self._key._replace(iteration=session),
            epoch=epoch,
            raw=raw,
            closed=functools.partial(self._mailbox.closed, session),
        )
        try:
            for part in reader:
                yield _message(part)
        finally:
            reader.close()


def _message(part: Part) -> Message:
    try:
        return Message(part)
    except Exception as error:
        fault = Fault(part.runs[0].lane if part.runs else 0, True, ErrorReport(unsendable(part, error)))
        return Message(part._replace(blocks=[], objects={}, faults=[fault]))


def _as_it_is(part: Any) -> Any:
    return part
