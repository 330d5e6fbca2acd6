"""One run of packing: has all streams packed that are not packed yet, here or by workers.

Guarantee: each stream ends up in the journal, or its error was put to `on_error`. No worker outlives the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from multiprocessing.context import BaseContext
from typing import Any, Literal

from stream_dataloader.errors import ReadError, StoreError, StreamError, WorkerDeathError, shorten
from stream_dataloader.stores._base.packing import Packer, StreamRecord
from stream_dataloader.stores._packing.crew import Crew, Worker, described
from stream_dataloader.stores._packing.folder import PartialFolder
from stream_dataloader.stores._packing.given import Given
from stream_dataloader.stores._packing.items import Task
from stream_dataloader.stores._packing.journal import Entry, Journal
from stream_dataloader.stores._packing.ledger import MOST_DEATHS, Ledger, streams_at_once
from stream_dataloader.stores._packing.progress import Progress
from stream_dataloader.stores._packing.space import LOOKED_SECONDS, SpaceWatch
from stream_dataloader.stores._packing.worker import Job, PartWriter, Tasks

__all__ = ["ErrorChoice", "Run"]

_MOST_FALSE_STARTS = 3

ErrorChoice = Literal["raise", "skip"]


class Run:
    """One run of packing.

    Args:
        given: What to pack.
        folder: Where.
        journal: What is packed already.
        job: How.
        on_error: See `pack`.
        num_workers: See `pack`.
        context: How workers are started.
        progress: See `pack`.

    Attributes:
        skipped: Why streams were skipped.
    """

    def __init__(
        self,
        given: Given,
        folder: PartialFolder,
        journal: Journal,
        job: Job,
        on_error: ErrorChoice | Callable[[StreamError], ErrorChoice],
        num_workers: int,
        context: BaseContext,
        progress: bool | Callable[[int, int], Any] | None,
    ) -> None:
        self._given = given
        self._folder = folder
        self._journal = journal
        self._job = job
        self._on_error = on_error
        self._num_workers = num_workers
        self._context = context
        self._progress_shown = progress
        self._ledger = Ledger(number for number in range(len(given)) if number not in journal.entries)
        self._false_starts = 0
        self.skipped: list[StreamError] = []

    def pack(self) -> None:
        """Pack all streams that are not packed."""
        if self._journal.finishing is not None or self._ledger.is_empty:
            return
        lengths = [self._given.length(number) for number in self._ledger.to_do]
        steps = None if None in lengths else sum(filter(None, lengths))
        self._space = SpaceWatch(self._folder, len(lengths), steps)
        name = os.path.basename(self._folder.path)
        self._progress = Progress(self._progress_shown, name, len(self._journal.entries), len(self._given))
        try:
            if self._num_workers:
                self._pack_by_workers()
            else:
                self._pack_here()
        finally:
            self._progress.close()

    def finish(self, packer: Packer) -> list[StreamRecord]:
        """Make a store of what is packed."""
        given, journal = self._given, self._journal
        if self.skipped and not journal.entries:
            raise StoreError(f"none of {len(given)} streams could be packed; {self.skipped[0]}") from self.skipped[0]
        journal.begin_finish(error.source_index for error in self.skipped)
        entries = [journal.entries[number] for number in sorted(journal.entries)]
        records = [
            StreamRecord(entry.number, given.keys[entry.number], entry.steps, entry.place, given.metadata(entry.number))
            for entry in entries
        ]
        packer.finish(records)
        return records

    # ---- in this process

    def _pack_here(self) -> None:
        writer = PartWriter(self._job, self._journal.begin_part(), 0, lambda message: self._take(0, message))
        try:
            while self._ledger.to_do:
                for number in self._ledger.take(0, 1):
                    writer.pack(self._task(number))
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to tell
                writer.close()
            raise
        writer.close()

    def _task(self, number: int) -> Task:
        given = self._given
        try:
            json.dumps(dict(given.metadata(number)))
        except (TypeError, ValueError) as error:
            source = shorten(given.sources[number])
            raise TypeError(f"the metadata of source {number} ({source}) cannot be kept as JSON: {error}") from None
        return Task(number, given.sources[number], given.keys[number], given.length(number), given.factory(number))

    # ---- by workers

    def _pack_by_workers(self) -> None:
        crew = Crew(self._context, self._job, self._folder.workers, self._folder.descriptors)
        try:
            while not self._ledger.is_empty:
                self._man(crew)
                for worker in list(crew.workers):
                    if worker.is_ready and not worker.is_leaving and not self._ledger.holds(worker.number):
                        self._hand_out(crew, worker)
                for worker, message in crew.hear(LOOKED_SECONDS):
                    self._hear(worker, message)
                self._space.look()
        finally:
            crew.stop(self._hear_last)

    def _man(self, crew: Crew) -> None:
        """Start workers for what there is to do."""
        wanted = min(self._num_workers, len(self._ledger.to_do) + len(crew.workers))
        while len(crew.workers) < wanted:
            crew.start(self._journal.begin_part())

    def _hand_out(self, crew: Crew, worker: Worker) -> None:
        ledger = self._ledger
        if not ledger.to_do:
            if ledger.has_written(worker.number) and not any(ledger.holds(one.number) for one in crew.workers):
                crew.give(worker, None)  # all is written: no need to wait for the next time it would sync
            return
        count = streams_at_once(worker.packed, worker.seconds, len(ledger.to_do), self._num_workers)
        crew.give(worker, Tasks([self._task(number) for number in ledger.take(worker.number, count)]))

    def _hear(self, worker: Worker, message: tuple[Any, ...] | None) -> None:
        if message is None:
            self._mourn(worker)
        elif message[0] == "ready":
            worker.is_ready = True
        elif message[0] == "broken":
            raise message[1].unpack()
        else:
            self._take(worker.number, message)
            if message[0] == "packed":
                worker.packed += 1
                now = time.perf_counter()
                worker.seconds += now - worker.began
                worker.began = now

    def _hear_last(self, worker: Worker, message: tuple[Any, ...] | None) -> None:
        """What workers tell when they are to end: only what they have written counts."""
        if message is not None and message[0] in ("packed", "synced"):
            self._take(worker.number, message)

    def _mourn(self, worker: Worker) -> None:
        """A worker is gone."""
        how = described(worker.process.exitcode)
        if not worker.is_ready:
            self._false_starts += 1
            if self._false_starts >= _MOST_FALSE_STARTS:
                raise WorkerDeathError(
                    f"workers cannot be started: the last one {how}. What it wrote to stderr may tell why. With "
                    f'{self._context.get_start_method()!r}, a script calls pack under `if __name__ == "__main__":`'
                )
        number = self._ledger.died(worker.number)
        if number is not None:
            source = shorten(self._given.sources[number])
            self._decide(
                ReadError(
                    f"source {number} ({source}): {MOST_DEATHS} workers died while they packed it; the last one {how}. "
                    "If it was out of memory, use fewer workers; faulthandler shows where a library crashed",
                    source_index=number,
                    source=source,
                )
            )

    # ---- what becomes of streams

    def _take(self, worker: int, message: tuple[Any, ...]) -> None:
        """What a worker tells of its streams."""
        kind, *told = message
        if kind == "read":
            self._space.steps_read += told[0]
            self._progress.read(*told)
        elif kind == "packed":
            self._ledger.written(worker, Entry(*told))
            self._space.packed += 1
            self._progress.finished()
            self._space.look()
        elif kind == "synced":
            self._journal.add(self._ledger.synced(worker, *told))
        elif kind == "failed":
            number, report = told
            self._ledger.failed(worker, number)
            self._decide(report.unpack())

    def _decide(self, error: StreamError) -> None:
        choice = self._on_error(error) if callable(self._on_error) else self._on_error
        if choice == "raise":
            raise error
        if choice != "skip":
            raise ValueError(f"on_error returned {choice!r} for {error}; return 'raise' or 'skip'")
        self.skipped.append(error)
        self._progress.finished()
