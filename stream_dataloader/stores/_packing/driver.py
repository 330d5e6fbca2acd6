"""`pack`: streams become a store.

Guarantee: there is a whole store at the path, or nothing. What was packed before an interrupt, of whatever kind, is not
packed again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import inspect
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.context import BaseContext
from typing import Any, Literal

from stream_dataloader._items.content import hash_content
from stream_dataloader.errors import ReadError, StoreError, StreamError, WorkerDeathError, shorten
from stream_dataloader.stores._base.formats import FORMATS
from stream_dataloader.stores._base.packing import Packer, StreamRecord
from stream_dataloader.stores._packing.crew import Crew, Worker, context_of, described
from stream_dataloader.stores._packing.folder import PartialFolder
from stream_dataloader.stores._packing.given import Given, given_of
from stream_dataloader.stores._packing.items import Task
from stream_dataloader.stores._packing.journal import Entry, Journal
from stream_dataloader.stores._packing.ledger import MOST_DEATHS, Ledger, streams_at_once
from stream_dataloader.stores._packing.progress import Progress
from stream_dataloader.stores._packing.report import PackReport, size_text
from stream_dataloader.stores._packing.space import disk_bytes, estimate
from stream_dataloader.stores._packing.worker import Job, PartWriter, Tasks

__all__ = ["pack"]

_ANEW = "Give what it was begun with, or delete that folder to begin anew"
_LOOKED_SECONDS = 2.0
_MOST_FALSE_STARTS = 3

#: Errors that mean a full disk: no space, the quota, the largest file that is allowed.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

ErrorChoice = Literal["raise", "skip"]


def pack(
    streams: Any,
    path: str | os.PathLike[str],
    *,
    format: str = "memmap",
    transform: Callable[[Any], Any] | None = None,
    num_workers: int = 0,
    on_error: ErrorChoice | Callable[[StreamError], ErrorChoice] = "raise",
    progress: bool | Callable[[int, int], Any] | None = None,
    verify: bool = False,
    metadata: Mapping[str, Any] | None = None,
    keys: Sequence[str] | Callable[[Any], str] | None = None,
    stream_metadata: Sequence[Mapping[str, Any]] | Callable[[Any], Mapping[str, Any]] | None = None,
    seed: int | None = None,
    multiprocessing_context: BaseContext | str | None = None,
    **options: Any,
) -> PackReport:
    """Read streams once and keep their time steps in a store, which `stores.open` opens.

    The store is written to `<path>.partial`, and gets its name when it is whole. After an interrupt, an error, a full
    disk or a power failure, call it again with the same arguments: streams that are packed are not packed again. What a
    transform does is not compared: delete the folder to pack with another one.

    Args:
        streams: A `StreamDataset`, or a pair `(sources, open_stream)`. A pair's items are time steps. A dataset without
            `time_steps` yields windows, which are taken apart: the store holds time steps, and a leaf of a window
            without a time axis is in each of them. Sources are packed whole, in the order of the list. What
            `stores.open` returns is converted: streams keep their keys and metadata.
        path: Where the store will be. There must be nothing.
        format: `"memmap"`, `"mds"` or `"lmdb"`.
        transform: Applied to each time step, in the worker.
        num_workers: Processes that read and write; 0: this one does.
        on_error: What to do about a stream that cannot be opened or read, does not fit the others, or whose worker died
            twice: `"raise"`; `"skip"`: the store goes without it; or a callable that is given the `StreamError`, in
            this process, and returns one of the two. Called again after an interrupt, `pack` tries skipped streams
            again.
        progress: True shows a bar, None does on a terminal, False does not. Or a function that is called with how many
            streams are done, and how many there are.
        verify: Read the whole store and compare checksums, before it gets its name.
        metadata: Of the whole store, as JSON can hold it, if the format keeps any.
        keys: The streams' names, or a function of a source; None: their keys in the store that they come from, or their
            sources as text.
        stream_metadata: What is known of each stream, as JSON can hold it, or a function of a source.
        seed: Seeds the generators of `get_stream_info()`, whose epoch is 0; None: as the dataset's, or 0. Packing that
            goes on keeps the seed that it began with.
        multiprocessing_context: How workers are started, as for `StreamDataLoader`.
        options: Of the format.

    Returns:
        What was packed, and what was skipped.

    Raises:
        FileExistsError: There is something at the path.
        StreamError: A stream could not be packed; names the source and the step.
        StoreError: Another process packs to the path, or the interrupted packing was of other streams or options.
        OSError: The disk is full, or another error of it.
        KeyboardInterrupt: On Ctrl-C; says how far it came.

    Example:
        >>> import pathlib, tempfile
        >>> from stream_dataloader import StreamDataLoader, StreamDataset, stores
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "letters.store"
        >>> report = stores.pack((["hello", "hi"], lambda text: map(ord, text)), path)
        >>> report.streams, report.steps
        (2, 7)
        >>> sources, open_stream = stores.open(path)
        >>> dataset = StreamDataset(sources, open_stream, batch_size=2, time_steps=5, lengths=open_stream.lengths)
        >>> [batch.data.T.tolist() for batch in StreamDataLoader(dataset)]
        [[[104, 101, 108, 108, 111], [104, 105, 0, 0, 0]]]
    """
    began = time.perf_counter()
    given = given_of(streams, keys, stream_metadata)
    packer_class = _packer(format)
    if not callable(on_error) and on_error not in ("raise", "skip"):
        raise ValueError(f"on_error is {on_error!r}; use 'raise', 'skip' or a function of the error")
    if not isinstance(num_workers, int) or num_workers < 0:
        raise ValueError(f"num_workers is {num_workers!r}; give 0 or more")
    context = context_of(multiprocessing_context)
    if metadata is None and given.store is not None and "metadata" in inspect.signature(packer_class).parameters:
        metadata = given.store.info().metadata
    if metadata is not None:
        options["metadata"] = dict(metadata)
    with PartialFolder(path) as folder:
        header = _header(given, format, options, seed)
        with contextlib.closing(Journal(folder.journal, header, _ANEW)) as journal:
            if journal.is_new or not os.path.isdir(folder.store):
                if journal.entries:
                    raise StoreError(f"{folder.partial} tells of streams that are gone; delete it and pack anew")
                folder.begin_anew()
            try:
                packer = packer_class(folder.store, **options)
            except BaseException:
                if not journal.entries and not journal.parts:
                    os.unlink(folder.journal)  # nothing was packed with these options
                raise
            job = Job(packer, given.open_stream, transform, given.windowed, int(journal.header["_seed"]))
            before = len(journal.entries)
            run = _Run(given, folder, journal, job, on_error, num_workers, context, progress)
            with run.telling_how_to_go_on():
                run.pack()
                records = run.finish(packer)
                if verify:
                    _verify(folder, format)
                size = disk_bytes(folder.store)
                folder.publish()
    steps = sum(record.steps for record in records)
    skipped = tuple(sorted(run.skipped, key=lambda error: error.source_index))
    seconds = time.perf_counter() - began
    return PackReport(folder.path, format, len(records), steps, size, seconds, before, skipped)


def _packer(format: str) -> Callable[..., Packer]:
    """What packs into a format.

    Raises:
        ValueError: It is unknown, or only read.
    """
    known = [name for name, one in FORMATS.items() if one.packer is not None]
    if format not in known:
        why = "is only read" if format in FORMATS else "is unknown"
        raise ValueError(f"format {format!r} {why}; pack into one of {', '.join(map(repr, known))}")
    found = FORMATS[format]
    module = importlib.import_module(f"stream_dataloader.stores.{found.module}")
    packer: Callable[..., Packer] = getattr(module, str(found.packer))
    return packer


def _header(given: Given, format: str, options: Mapping[str, Any], seed: int | None) -> dict[str, Any]:
    """What must stay the same over an interrupt; what begins with an underscore need not."""
    digest = hashlib.blake2b(digest_size=8)
    hash_content(dict(options), digest.update)
    own = given.seed if seed is None else seed
    return {
        "format": format,
        "number of sources": len(given),
        "fingerprint of sources and keys": given.fingerprint(),
        "fingerprint of options": digest.hexdigest(),
        "windows taken apart": given.windowed,
        "_seed": 0 if own is None else own,
    } | ({} if seed is None else {"seed": seed})


class _Run:
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
        self._steps_read = 0
        self._packed = 0
        self._used_before = 0
        self._looked = 0.0
        self._steps_to_do: int | None = None
        self._streams_to_do = 0
        self._told_of_space = False
        self._false_starts = 0
        self.skipped: list[StreamError] = []

    def pack(self) -> None:
        """Pack all streams that are not packed."""
        if self._journal.finishing is not None or self._ledger.is_empty:
            return
        self._used_before = disk_bytes(self._folder.store)
        if self._given.lengths is not None:
            lengths = [self._given.length(number) for number in self._ledger.to_do]
            self._steps_to_do = None if None in lengths else sum(filter(None, lengths))
        self._streams_to_do = len(self._ledger.to_do)
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

    @contextlib.contextmanager
    def telling_how_to_go_on(self) -> Iterator[None]:
        """Have errors say what is kept, and what to do."""
        try:
            yield
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"packing was interrupted. {self._kept()}") from None
        except StreamError as error:
            again = type(error)(f"{error}. {self._kept()}", **error.place)
            again.__cause__ = error.__cause__
            raise again from error.__cause__
        except OSError as error:
            if error.errno in _FULL:
                raise OSError(
                    error.errno,
                    f"the disk of {self._folder.partial} is full ({error.strerror}). Free some of it, then go on. "
                    f"{self._kept()}",
                ) from error
            if error.errno is not None:
                raise OSError(error.errno, f"{error.strerror}. {self._kept()}", error.filename) from error
            raise
        except WorkerDeathError as error:
            raise WorkerDeathError(f"{error}. {self._kept()}") from error.__cause__

    def _kept(self) -> str:
        self._journal.look_again()
        return (
            f"{len(self._journal.entries):,} of {len(self._given):,} streams are packed, in {self._folder.partial}: "
            "pack again and it goes on there, or delete that folder"
        )

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
                for worker, message in crew.hear(_LOOKED_SECONDS):
                    self._hear(worker, message)
                self._look_at_space()
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
            self._steps_read += told[0]
            self._progress.read(*told)
        elif kind == "packed":
            self._ledger.written(worker, Entry(*told))
            self._packed += 1
            self._progress.finished()
            self._look_at_space()
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

    # ---- room on the disk

    def _look_at_space(self) -> None:
        """Stop before the disk is full, if it is clear that it will be."""
        if time.monotonic() - self._looked < _LOOKED_SECONDS:
            return
        self._looked = time.monotonic()
        used = disk_bytes(self._folder.store) - self._used_before
        steps_left = None if self._steps_to_do is None else self._steps_to_do - self._steps_read
        needed = estimate(used, self._steps_read, steps_left, self._packed, self._streams_to_do - self._packed)
        free = self._folder.free_bytes()
        if needed is None or needed.bytes <= free:
            return
        text = (
            f"the streams that are left take about {size_text(needed.bytes)}, and the disk of {self._folder.partial} "
            f"has {size_text(free)} free"
        )
        if needed.sure:
            raise OSError(errno.ENOSPC, text)
        if not self._told_of_space:
            self._told_of_space = True
            warnings.warn(f"{text}; free some of it while it goes on", RuntimeWarning, stacklevel=2)


def _verify(folder: PartialFolder, format: str) -> None:
    from stream_dataloader import stores

    problems = stores.verify(folder.store, format=format)
    if problems:
        raise StoreError(
            f"what was packed differs from what the disk holds: {problems[0]}, and {len(problems) - 1} more; check the "
            f"disk, delete {folder.partial} and pack anew"
        )
