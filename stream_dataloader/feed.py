"""Where a loader's parts come from: this process, or torch's worker processes.

A `Feed` yields the parts of one iteration: each worker's in order of step, those of different workers in any
order. `WorkerPool` wraps torch's `DataLoader`, which starts the workers, asks them in turn and takes their
parts in; a `Mailbox` tells workers which iteration they read, also those that are kept from the one before.

Guarantee: whatever ends a worker, or keeps it from delivering, is an error that says which worker and how.
"""

from __future__ import annotations

import itertools
import os
import threading
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
    """What the main process tells workers that already run, and they it; each value is written by one side."""

    def __init__(self, workers: int) -> None:
        self._memory = SharedMemory(8 * (3 + workers))

    @property
    def _told(self) -> IntArray:
        return self._memory.array()[:3]

    @property
    def pids(self) -> IntArray:
        """Process id of each worker, which it writes itself; 0 before it has come."""
        return self._memory.array()[3:]

    def open(self, epoch: int, raw: bool) -> None:
        """Announce a session."""
        self._told[1:] = epoch, raw
        self._told[0] += 1

    def close(self) -> None:
        """End the session; its workers give up."""
        self._told[0] += 1

    def read(self) -> tuple[int, int, bool]:
        """The session's number, its epoch, and whether windows are passed on as they are."""
        session, epoch, raw = (int(value) for value in self._told)
        return session, epoch, bool(raw)


class WorkerPool:
    """The worker processes of one loader.

    Args:
        dataset: What they read.
        num_workers: How many there are; 0 only checks the options.
        options: Further options of torch's `DataLoader`.
    """

    def __init__(
        self, dataset: StreamDataset, num_workers: int, worker_init_fn: Callable[[int], Any] | None, **options: Any
    ) -> None:
        self._dataset, self._num_workers, self._options = dataset, num_workers, options
        self._init = WorkerInit(worker_init_fn) if num_workers else None
        self._mailbox = Mailbox(num_workers)
        self._number = next(_pool_numbers)
        self._hire()

    def _hire(self) -> None:
        self._dataloader: DataLoader[Any] = DataLoader(
            _Parts(self._dataset, self._mailbox, self._number),
            batch_size=None,
            num_workers=self._num_workers,
            collate_fn=_as_it_is,
            worker_init_fn=self._init,
            generator=torch.Generator().manual_seed(self._dataset.rules.seed),  # leaves the global one alone
            **self._options,
        )

    def start(self, epoch: int, *, raw: bool) -> WorkerFeed:
        """Start an iteration; the one before must be closed."""
        self._mailbox.open(epoch, raw)
        with sigint_blocked():
            iterator = iter(self._dataloader)
        crew = Crew(self._mailbox.pids)
        guard(crew)
        return WorkerFeed(iterator, crew, self._mailbox, self._hire)


class WorkerFeed:
    """One iteration over the parts of a pool's workers.

    Args:
        iterator: torch's iterator.
        crew: The workers.
        mailbox: Through which they are told of its end.
        replace: Called when the workers are no more: the pool needs others.
    """

    def __init__(self, iterator: Iterator[Part], crew: Crew, mailbox: Mailbox, replace: Callable[[], None]) -> None:
        self._iterator: Iterator[Part] | None = iterator
        self._crew, self._mailbox, self._replace = crew, mailbox, replace

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
        self._mailbox.close()
        with self._crew.leaving():
            self._iterator = None  # the last reference, unless workers are persistent: torch ends them


class _Parts(IterableDataset[Any]):
    """What torch's `DataLoader` iterates over in each worker: its parts, in the session that the mailbox names."""

    def __init__(self, dataset: StreamDataset, mailbox: Mailbox, pool_number: int) -> None:
        self._dataset, self._mailbox, self._pool_number = dataset, mailbox, pool_number
        self._owner = os.getpid()

    def __iter__(self) -> Iterator[Message]:
        worker = get_worker_info()
        assert worker is not None
        self._mailbox.pids[worker.id] = os.getpid()
        session, epoch, raw = self._mailbox.read()
        reader = self._dataset.read_as_worker(
            SessionKey(self._owner, -self._pool_number, session),
            epoch=epoch,
            raw=raw,
            closed=lambda: self._mailbox.read()[0] != session,
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
