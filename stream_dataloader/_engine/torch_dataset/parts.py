"""Iteration over a `StreamDataset` without a `StreamDataLoader`: with torch's own `DataLoader`, or with none.

No code of this package runs in the main process there, so a worker finds out by itself which step ends the epoch.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import weakref
from collections.abc import Iterator
from multiprocessing import current_process, parent_process
from types import FrameType
from typing import Any

from torch.utils.data import get_worker_info

from stream_dataloader._engine.assembly.layout_check import LayoutCheck
from stream_dataloader._engine.assembly.part import Part, have_data
from stream_dataloader._engine.assembly.regroup import Regrouper
from stream_dataloader._engine.reading.deferred import Begun, Deferred, UntilEnd
from stream_dataloader._engine.reading.plan import Reading, ReadingPlan
from stream_dataloader._engine.reading.reader import PartReader, read_here, unsendable, warn_of_skip
from stream_dataloader._engine.reading.source_queue import Abandoned, SessionQueue
from stream_dataloader._engine.schedule.rules import deal_lanes
from stream_dataloader._engine.torch_dataset.sessions import SessionKey, SessionTable
from stream_dataloader.batch import StreamBatch
from stream_dataloader.errors import GapError


def plain_parts(plan: ReadingPlan, table: SessionTable, iteration: int) -> Iterator[StreamBatch]:
    """Return an iterator over the parts of this process's lanes.

    Each iteration takes the next epoch number: in the main process with its first `next`, with workers with `iter()`.
    """
    frame = inspect.currentframe()  # f_back is the dataset's __iter__, and the f_back of that its caller
    _refuse_collation(frame and frame.f_back and frame.f_back.f_back)
    worker = get_worker_info()
    if worker is None:
        return Deferred(functools.partial(_parts_here, plan, table))
    if table.sources[0] > len(plan.lists):
        return _outdated(len(plan.lists), int(table.sources[0]))
    if worker.id >= plan.rules.lanes:
        return iter(())  # more workers than lanes
    return UntilEnd(PlainParts(_read_as_worker(plan, table, iteration, worker.id, worker.num_workers), sent=True))


def _outdated(copied: int, sources: int) -> Iterator[StreamBatch]:
    """Raise an error with the first `next`, as torch takes one of `iter()` in a persistent worker for its death."""
    yield from ()
    raise RuntimeError(
        f"this worker has a copy of {copied} sources, and the dataset has {sources} since it was extended; "
        "persistent_workers=True keeps the copy, so build the DataLoader anew, or leave it out"
    )


def _refuse_collation(caller: FrameType | None) -> None:
    """Raise a `TypeError` if torch's `DataLoader` is about to collate parts, as it has a `batch_size`."""
    fetcher = None if caller is None else caller.f_locals.get("self")
    if not getattr(fetcher, "auto_collation", False):
        return
    collate_fn = getattr(fetcher, "collate_fn", None)
    collate_fn = getattr(collate_fn, "data_collator", collate_fn)  # the Trainer of transformers wraps the function
    if (getattr(collate_fn, "__module__", None) or "").split(".")[0] in ("torch", "transformers"):
        raise TypeError(
            "a StreamDataset yields parts of batches whose lanes continue from part to part, and a DataLoader with a "
            "batch_size would collate several of them; use StreamDataLoader(dataset, num_workers=...), or torch's "
            "DataLoader with batch_size=None; for the Trainer of transformers use StreamTrainer of "
            "stream_dataloader.integrations.transformers"
        )


def _parts_here(plan: ReadingPlan, table: SessionTable) -> Begun[StreamBatch]:
    reader = read_here(Reading.alone(plan, table.take_epoch(os.getpid())))
    return UntilEnd(PlainParts(reader, sent=False)), reader.close


def _read_as_worker(plan: ReadingPlan, table: SessionTable, iteration: int, number: int, workers: int) -> PartReader:
    """Read the lanes of one of several workers; there is no main process that coordinates them."""
    key, readers = plain_session(number, iteration), deal_lanes(plan.rules.lanes, workers)
    if len(readers) == 1:
        return read_here(Reading.alone(plan, table.take_epoch(key.owner), workers))
    row = table.join(key, number, [reader.lanes.start for reader in readers])
    reading = Reading.alone(plan, int(row.epoch[0]), workers)
    how = reading.order(), reading.draws(row.ledger.cursors), table.locked, lambda: False
    return PartReader(reading, number, SessionQueue(row, number, plan.rules, *how, gives_up=False))


def plain_session(worker_id: int, iteration: int) -> SessionKey:
    """Return the session's name for a worker of torch's own `DataLoader`.

    A `DataLoader` starts its workers one after the other, so the process ordinal minus the worker id is the same for
    all of them, and differs from that of another `DataLoader`.
    """
    ordinal = re.search(r"(\d+)$", current_process().name)
    parent = parent_process()
    return SessionKey(parent.pid or 0 if parent else 0, int(ordinal[1]) - worker_id if ordinal else 0, iteration)


class PlainParts:
    """The parts of one worker as `StreamBatch`es, up to the epoch's end: for torch's own `DataLoader`."""

    def __init__(self, reader: PartReader, *, sent: bool) -> None:
        self._reader = reader
        self._sent = sent
        # In torch's workers an error that a signal handler raises inside a finalizer is lost without harm, so a plain
        # `weakref.finalize` will do.
        if sent:
            weakref.finalize(self, reader.close).atexit = False
        plan = reader.reading.plan
        self._queue, self._rules = reader.queue, plan.rules
        readers = [reader.reader]
        self._layout_check = LayoutCheck(readers, plan.lists.sources)
        self._skipped: set[int] = set()
        self._regrouper = Regrouper(
            readers,
            plan.window_steps,
            plan.fill_value,
            self._layout_check,
            mark_ends=plan.mark_ends,
            context=plan.context,
        )

    def __iter__(self) -> Iterator[StreamBatch]:
        return self

    def __next__(self) -> StreamBatch:
        reader = self._reader
        part = next(reader)
        for report in part.failures:
            failure: Any = report.unpack()
            if failure.source_index not in self._skipped and not isinstance(failure, GapError):
                self._skipped.add(failure.source_index)
                warn_of_skip(failure)
        delivers = self._delivers(part)
        if part.faults:
            raise part.faults[0].error.unpack()
        if part.end or not delivers:
            reader.close()
            raise StopIteration
        self._layout_check.check([part], None)
        batch = self._regrouper.batch(part.step, self._queue.order.epoch, [part], None)
        if not self._sent:
            return batch
        try:
            return batch._sealed()
        except Exception as error:
            raise unsendable(part, reader.reader.worker_id, error) from error

    def _delivers(self, part: Part) -> bool:
        mode, queue = self._rules.padding_mode, self._queue
        if mode in ("zeros", "cycle"):
            return True
        has_data = have_data([part], mode, len(self._reader.reader.lanes))
        if not isinstance(queue, SessionQueue):
            return has_data
        last = part.end or bool(part.faults)
        queue.has_read(part.step, has_data or bool(part.faults), last=last)
        try:
            return not last and queue.delivers(part.step)
        except Abandoned:
            return False
