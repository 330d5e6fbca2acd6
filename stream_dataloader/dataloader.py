"""`StreamDataLoader`: regroups the parts of all workers into batches, Time x Batch.

One FIFO a worker; a batch is complete when each has a part for its step::

    worker 0   part 0 | part 1 | part 2 |                 lanes 0, 1
    worker 1   part 0 | part 1 |                          lanes 2, 3
                  |        |
               batch 0  batch 1   ...

Guarantees: the same batches whatever the number of workers; a batch is delivered if and only if its mask has
a step set; an error of a worker is raised at its own step, after all earlier batches; an iteration left
early leaves no process, thread or file behind.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.context import BaseContext
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from stream_dataloader import options
from stream_dataloader.batch import StreamBatch, map_leaves
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import (
    ErrorReport,
    StaleIteratorError,
    StreamError,
    WorkerError,
    WorkerTimeoutError,
)
from stream_dataloader.part_reader import PartReader, unsendable, warn_of_skip
from stream_dataloader.pickling import Message
from stream_dataloader.protocols import CollateFn
from stream_dataloader.regroup import Fault, Part, Regrouper
from stream_dataloader.schedule import IntArray, lanes_of_worker
from stream_dataloader.shared_memory import SharedMemory
from stream_dataloader.source_queue import SessionKey
from stream_dataloader.workers import Crew, WorkerInit, guard, sigint_blocked

__all__ = ["StreamDataLoader"]

_loader_numbers = itertools.count(1)


class StreamDataLoader:
    """Iterates over a `StreamDataset` in temporally coherent batches, read by several worker processes.

    Row b of a batch goes on where row b of the batch before it stopped. Made to be subclassed: build the
    dataset in `__init__` and pass it on.

    Args:
        dataset: What to read, and how lanes and windows are made.
        num_workers: Worker processes; 0 reads in this one. More than lanes count as as many as lanes.
        collate_fn: Without it the loader yields `StreamBatch`es; with it, what it returns for the list of the
            B lanes' windows, in lane order: pytrees of tensors `(T, ...)`, or, without the dataset's
            `time_steps`, the windows as the streams yield them. Runs in the main process.
        prefetch_factor: Batches that workers read ahead; None stands for 2 with workers.
        pin_memory: Put batches into page-locked memory, for fast copies to an accelerator.
        persistent_workers: Keep the workers from one epoch to the next.
        multiprocessing_context: `"fork"`, `"spawn"`, `"forkserver"` or a context; None is the default one.
        worker_init_fn: Called with the worker's id in each worker when it starts.
        timeout: Seconds to wait for a worker before `WorkerTimeoutError`; 0 waits for ever.
        device: Move batches there; see also `to`.

    Raises:
        TypeError: The dataset is no `StreamDataset`.
        ValueError: An option is out of range, or needs workers and there are none.

    Example:
        >>> from stream_dataloader import StreamDataset, StreamDataLoader
        >>> dataset = StreamDataset([range(3), range(10, 15)], iter, batch_size=2, time_steps=2)
        >>> [batch.data.tolist() for batch in StreamDataLoader(dataset)]
        [[[0, 10], [1, 11]], [[2, 12], [0, 13]], [[0, 14], [0, 0]]]
    """

    def __init__(
        self,
        dataset: StreamDataset,
        num_workers: int = 0,
        collate_fn: CollateFn | None = None,
        *,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        multiprocessing_context: str | BaseContext | None = None,
        worker_init_fn: Callable[[int], Any] | None = None,
        timeout: float = 0,
        device: torch.device | str | int | None = None,
    ) -> None:
        if not isinstance(dataset, StreamDataset):
            raise TypeError(f"dataset must be a StreamDataset, and is a {type(dataset).__name__}")
        if collate_fn is not None:
            options.check_callable("collate_fn", collate_fn, "a function of the list of windows, or None")
        num_workers = options.integer("num_workers", num_workers, 0)
        if num_workers > dataset.batch_size:
            warnings.warn(
                f"num_workers is {num_workers}, and batch_size {dataset.batch_size}: a worker reads whole lanes, so "
                f"{dataset.batch_size} workers are used; raise batch_size to use more",
                stacklevel=2,
            )
            num_workers = dataset.batch_size
        self.dataset, self.num_workers, self.collate_fn = dataset, num_workers, collate_fn
        self.pin_memory, self.timeout = pin_memory, timeout
        self.device = None if device is None else torch.device(device)
        self.failures: list[StreamError] = []
        self._mailbox = Mailbox(max(1, num_workers))
        self._dataloader: DataLoader[Any] = DataLoader(
            _WorkerDataset(dataset, self._mailbox, next(_loader_numbers)),
            batch_size=None,
            num_workers=num_workers,
            collate_fn=_as_it_is,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            multiprocessing_context=multiprocessing_context,
            worker_init_fn=WorkerInit(worker_init_fn) if num_workers else None,
            timeout=timeout,
            generator=torch.Generator().manual_seed(dataset.rules.seed),  # leaves the global one alone
        )
        self._next_epoch = 0
        self._epochs_set = 0  # requests of the dataset's that were heeded
        self._lengths: dict[int, int] = {}
        self._iteration: weakref.ref[Iteration] | None = None

    @property
    def batch_size(self) -> int:
        """Number of lanes, B."""
        return self.dataset.batch_size

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch that the next `iter()` reads; the ones after count on from it.

        Without it the first is 0, and each `iter()` takes the next number, finished or not. The last call
        counts, here or on the dataset.
        """
        self._next_epoch = options.integer("epoch", epoch, 0)
        self._epochs_set = self.dataset.epoch_request[0]

    def _coming_epoch(self) -> int:
        requests, epoch = self.dataset.epoch_request
        return self._next_epoch if requests == self._epochs_set else epoch

    def __iter__(self) -> Iterator[Any]:
        """Start the next epoch. The iterator before, if any, is closed, and raises from now on."""
        return self._start(raw=self.collate_fn is not None)

    def parts(self) -> Iterator[StreamBatch]:
        """Start the next epoch, not regrouped: iterate over the parts of each worker, step after step.

        Each part is a `StreamBatch` of one worker's lanes, for a model with a state for each `worker_id`.
        `collate_fn` takes no part in it.
        """
        iteration = self._start(raw=False)
        return (self._finish(part) for parts in iteration.steps() for part in iteration.regroup_each(parts))

    def _start(self, raw: bool) -> Iteration:
        if (old := self._running()) is not None:
            old.close()
        epoch = self._coming_epoch()
        self._next_epoch, self._epochs_set = epoch + 1, self.dataset.epoch_request[0]
        iteration = Iteration(self, epoch, raw)
        self._iteration = weakref.ref(iteration)
        return iteration

    def _running(self) -> Iteration | None:
        return None if self._iteration is None else self._iteration()

    def _finish(self, batch: Any) -> Any:
        """The last touch on the way to the user: page-locked memory, and the device."""
        if self.pin_memory:
            if torch.cuda.is_available():
                batch = map_leaves(batch, lambda leaf: leaf.pin_memory() if hasattr(leaf, "pin_memory") else leaf)
            else:
                warnings.warn("pin_memory=True has no effect: no CUDA device is available", stacklevel=3)
        if self.device is not None:
            device, non_blocking = self.device, self.pin_memory
            batch = map_leaves(batch, lambda leaf: _move(leaf, device, non_blocking))
        return batch

    def __len__(self) -> int:
        """Number of batches of the epoch being read, or of the next one; exact.

        Raises:
            TypeError: Unknown without the dataset's `lengths`, or endless.
        """
        running = self._running()
        epoch = self._coming_epoch() if running is None or running.closed else running.epoch
        if epoch not in self._lengths:
            self._lengths = {epoch: self.dataset.count_steps(epoch)}
        return self._lengths[epoch]

    def to(self, device: torch.device | str | int) -> StreamDataLoader:
        """Move batches to `device` from now on; returns the loader."""
        self.device = torch.device(device)
        return self

    def cuda(self, device: torch.device | str | int = "cuda") -> StreamDataLoader:
        """`to` the CUDA device."""
        return self.to(device)

    def cpu(self) -> StreamDataLoader:
        """`to` the CPU."""
        return self.to("cpu")


class Iteration:
    """One epoch of a loader, being read: an iterator over its batches.

    Attributes:
        epoch: The epoch's number.
        closed: It is over, or was left.
    """

    def __init__(self, loader: StreamDataLoader, epoch: int, raw: bool) -> None:
        dataset, workers = loader.dataset, max(1, loader.num_workers)
        self.epoch, self.closed = epoch, False
        self._loader, self._rules = loader, dataset.rules
        self._lanes = [lanes_of_worker(dataset.batch_size, workers, worker) for worker in range(workers)]
        self._regrouper = Regrouper(self._lanes, dataset.rules.time_steps, dataset.fill_value)
        self._fifos: list[deque[Part]] = [deque() for _ in range(workers)]
        self._ended = [False] * workers
        self._skipped: set[int] = set()
        self._step = 0
        self._reader: PartReader | None = None
        self._torch_iterator: Iterator[Part] | None = None
        self._crew: Crew | None = None
        if loader.num_workers == 0:
            self._reader = dataset.read_locally(epoch, raw=raw)
            return
        loader._mailbox.open(epoch, raw)
        with sigint_blocked():
            self._torch_iterator = iter(loader._dataloader)
        self._crew = Crew(loader._mailbox.pids)
        guard(self._crew)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        parts = self._next_parts()
        if self._loader.collate_fn is not None:
            try:
                batch = self._loader.collate_fn(self._regrouper.windows(parts))
            except StopIteration as error:  # would look like the epoch's end
                raise RuntimeError("collate_fn raised StopIteration") from error
            return self._loader._finish(batch)
        workers = range(len(self._lanes))
        return self._loader._finish(self._regrouper.batch(self._step - 1, self.epoch, workers, parts))

    def steps(self) -> Iterator[list[Part | None]]:
        """The parts of each step that belongs to the epoch."""
        with contextlib.suppress(StopIteration):
            while True:
                yield self._next_parts()

    def regroup_each(self, parts: list[Part | None]) -> Iterator[StreamBatch]:
        """Each worker's part as a batch of its own."""
        for worker, (lanes, part) in enumerate(zip(self._lanes, parts, strict=True)):
            if part is not None:
                regrouper = Regrouper([lanes], self._rules.time_steps, self._loader.dataset.fill_value)
                yield regrouper.batch(part.step, self.epoch, [worker], [part])

    def _next_parts(self) -> list[Part | None]:
        """The parts of the next step, in lane order; None for a worker that has ended."""
        if self._loader._running() is not self:
            raise StaleIteratorError(
                "a newer iter() of this StreamDataLoader has begun, which ended this iteration; "
                "to read twice at once, build a StreamDataLoader for each"
            )
        if self.closed:
            raise StopIteration
        try:
            parts = self._collect()
            self._note_failures(parts)
            delivered = self._delivered(parts)
            if delivered:
                self._raise_first_error(parts)
        except BaseException:
            self.close()
            raise
        if not delivered:
            self.close()
            raise StopIteration
        self._step += 1
        return parts

    def _collect(self) -> list[Part | None]:
        while any(not fifo and not ended for fifo, ended in zip(self._fifos, self._ended, strict=True)):
            part = self._receive()
            if part.end or part.faults:
                self._ended[part.worker_id] = True
            if not part.end or part.failures:
                self._fifos[part.worker_id].append(part)
        return [fifo.popleft() if fifo else None for fifo in self._fifos]

    def _receive(self) -> Part:
        """The next part of any worker."""
        if self._reader is not None:
            return next(self._reader)
        crew = self._crew
        assert self._torch_iterator is not None
        assert crew is not None
        crew.waiting = threading.current_thread() is threading.main_thread()
        try:
            if crew.casualty:
                raise RuntimeError("a worker died")
            return next(self._torch_iterator)
        except StopIteration:
            raise WorkerError("the workers ended before the epoch did; this should not happen") from None
        except KeyboardInterrupt:
            crew.kill()  # the user wants to leave now, and a worker may be in the middle of something long
            raise
        except RuntimeError as error:
            if deaths := crew.deaths():
                crew.kill()
                raise WorkerError(
                    f"{'; '.join(deaths)}, at step {self._step}; if it was out of memory, use fewer workers, a "
                    "smaller prefetch_factor or smaller items"
                ) from error
            if "timed out" in str(error):
                crew.kill()
                raise WorkerTimeoutError(
                    f"no worker delivered within timeout={self._loader.timeout} seconds, at step {self._step}; "
                    "raise timeout, or find out which stream hangs"
                ) from error
            raise
        finally:
            crew.waiting = False

    def _note_failures(self, parts: list[Part | None]) -> None:
        for report in [report for part in parts if part for report in part.failures]:
            failure = report.unpack()
            assert isinstance(failure, StreamError)
            self._loader.failures.append(failure)
            if failure.source_index not in self._skipped:
                self._skipped.add(failure.source_index)
                warn_of_skip(failure)

    def _delivered(self, parts: list[Part | None]) -> bool:
        """Whether the step belongs to the epoch: a pure function of what lanes read in it."""
        runs = [run for part in parts if part for run in part.runs]
        faults = [fault for part in parts if part for fault in part.faults]
        if self._rules.padding_mode == "drop":
            busy = {run.lane for run in runs} | {fault.lane for fault in faults}
            return len(busy) == self._rules.lanes
        return any(run.fresh for run in runs) or any(fault.fresh for fault in faults)

    def _raise_first_error(self, parts: list[Part | None]) -> None:
        """Raise the error of the lowest lane, if there is one."""
        faults = [(fault.lane, fault.error.unpack()) for part in parts if part for fault in part.faults]
        if self._loader.collate_fn is None:
            try:
                self._regrouper.judge(parts)
            except StreamError as misfit:
                faults.append((misfit.lane, misfit))
        if faults:
            raise min(faults, key=lambda fault: fault[0])[1]

    def close(self) -> None:
        """End the iteration: workers that are not kept end, streams are closed."""
        if not self.closed:
            self.closed = True
            self._loader._mailbox.close()
            with self._crew.leaving() if self._crew else contextlib.nullcontext():
                self._torch_iterator = None  # the last reference, unless workers are persistent: torch ends them
            if self._reader is not None:
                self._reader.close()

    def __del__(self) -> None:
        if hasattr(self, "_torch_iterator"):
            self.close()


class Mailbox:
    """What the main process tells workers that already run, and they it; written by one side each.

    Attributes:
        pids: Process id of each worker, 0 before it has come.
    """

    def __init__(self, workers: int) -> None:
        self._memory = SharedMemory(8 * (3 + workers))
        self._owner = os.getpid()

    @property
    def _told(self) -> IntArray:
        return self._memory.array()[:3]

    @property
    def pids(self) -> IntArray:
        """Process id of each worker; 0 before it has come."""
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


class _WorkerDataset(IterableDataset[Any]):
    """What the loader gives to torch: the dataset's parts, in the session that the mailbox names."""

    def __init__(self, dataset: StreamDataset, mailbox: Mailbox, loader_number: int) -> None:
        self._dataset, self._mailbox, self._loader_number = dataset, mailbox, loader_number
        self._owner = os.getpid()

    def __iter__(self) -> Iterator[Message]:
        worker = get_worker_info()
        assert worker is not None
        self._mailbox.pids[worker.id] = os.getpid()
        session, epoch, raw = self._mailbox.read()
        reader = self._dataset.read_as_worker(
            SessionKey(self._owner, -self._loader_number, session),
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


def _move(leaf: Any, device: torch.device, non_blocking: bool) -> Any:
    if isinstance(leaf, (torch.Tensor, StreamBatch)):
        return leaf.to(device, non_blocking=non_blocking)
    return leaf.to(device) if hasattr(leaf, "to") else leaf
