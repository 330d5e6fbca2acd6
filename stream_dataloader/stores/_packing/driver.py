"""`pack`: streams become a store.

Guarantee: there is a whole store at the path, or nothing.
"""

from __future__ import annotations

import errno
import hashlib
import inspect
import itertools
import json
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from multiprocessing.context import BaseContext
from typing import Any, Literal

from stream_dataloader._items.content import hash_content
from stream_dataloader.dataloader import StreamDataLoader
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import ErrorReport, StoreError, StreamError, WorkerDeathError, shorten
from stream_dataloader.stores._base.formats import FORMATS
from stream_dataloader.stores._base.options import check_options
from stream_dataloader.stores._base.packing import Packer, StreamRecord
from stream_dataloader.stores._packing.folder import PartialFolder
from stream_dataloader.stores._packing.given import Given, given_of
from stream_dataloader.stores._packing.journal import Journal
from stream_dataloader.stores._packing.report import PackReport, Progress, disk_bytes
from stream_dataloader.stores._packing.writer import StreamPacker, close_part

__all__ = ["pack"]

_ANEW = "Give what it was begun with, or delete that folder to begin anew"

#: Errors that mean a full disk: no space, the quota, the largest file that is allowed.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

#: How many messages a worker may be ahead of one that packs a long stream.
_AHEAD = 64
_MOST_RESTARTS = 8

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
        on_error: What to do about a stream that cannot be opened or read, does not fit the others, or kills its
            workers: `"raise"`; `"skip"`: the store goes without it; or a callable that is given the `StreamError`, in
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
        >>> dataset = StreamDataset(sources, open_stream, batch_size=2, time_steps=5)
        >>> [batch.data.T.tolist() for batch in StreamDataLoader(dataset)]
        [[[104, 101, 108, 108, 111], [104, 105, 0, 0, 0]]]
    """
    began = time.perf_counter()
    given = given_of(streams, keys, stream_metadata)
    packer_class = _packer(format)
    check_options(packer_class, options, f"format is {format!r}")
    if not callable(on_error) and on_error not in ("raise", "skip"):
        raise ValueError(f"on_error is {on_error!r}; use 'raise', 'skip' or a function of the error")
    if not isinstance(num_workers, int) or num_workers < 0:
        raise ValueError(f"num_workers is {num_workers!r}; give 0 or more")
    if isinstance(multiprocessing_context, str):
        multiprocessing.get_context(multiprocessing_context)  # says so if there is none of that name
    if metadata is None and given.store is not None and "metadata" in inspect.signature(packer_class).parameters:
        metadata = given.store.info().metadata
    if metadata is not None:
        options["metadata"] = dict(metadata)
    with PartialFolder(path) as folder:
        journal = Journal(folder.journal, _header(given, format, options, seed), _ANEW)
        if journal.is_new or not os.path.isdir(folder.store):
            if journal.entries:
                raise StoreError(f"{folder.partial} tells of streams that are gone; delete it and pack anew")
            folder.begin_anew()
        try:
            packer = packer_class(folder.store, **options)
        except BaseException:
            if journal.is_new:
                os.unlink(folder.journal)  # nothing was packed with these options
            raise
        before, total = len(journal.entries), len(given.keys)
        skipped: list[StreamError] = []
        with _telling_how_to_go_on(total, folder, journal):
            if journal.finishing is None:
                run = _Run(given, folder, journal, packer, on_error, skipped)
                run.pack(transform, num_workers, multiprocessing_context, progress)
            if skipped and not journal.entries:
                raise StoreError(f"none of {total} streams could be packed; {skipped[0]}") from skipped[0]
            journal.begin_finish(error.source_index for error in skipped)
            records = [
                StreamRecord(number, given.keys[number], entry.steps, entry.place, given.metadata(number))
                for number, entry in sorted(journal.entries.items())
            ]
            packer.finish(records, journal.synced)
            if verify:
                _verify(folder, format)
            size = disk_bytes(folder.store)
            folder.publish()
    return PackReport(
        path=folder.path,
        format=format,
        streams=len(records),
        steps=sum(record.steps for record in records),
        bytes=size,
        seconds=time.perf_counter() - began,
        packed_before=before,
        skipped=tuple(sorted(skipped, key=lambda error: error.source_index)),
    )


class _Run:
    """One run of packing: a loader reads what is not packed, and its workers write it.

    Args:
        skipped: Why streams were skipped; filled here.
    """

    def __init__(
        self,
        given: Given,
        folder: PartialFolder,
        journal: Journal,
        packer: Packer,
        on_error: ErrorChoice | Callable[[StreamError], ErrorChoice],
        skipped: list[StreamError],
    ) -> None:
        self._given = given
        self._folder = folder
        self._journal = journal
        self._packer = packer
        self._on_error = on_error
        self._skipped = skipped
        self._reported: set[int] = set()

    def pack(
        self,
        transform: Callable[[Any], Any] | None,
        num_workers: int,
        context: BaseContext | str | None,
        shown: bool | Callable[[int, int], Any] | None,
    ) -> None:
        """Pack all streams that are not packed."""
        journal, lengths = self._journal, self._given.lists.lengths
        total = len(self._given.keys)
        to_do = [number for number in range(total) if number not in journal.entries]
        for number in to_do:
            _check_metadata(self._given, number)
        steps = None
        if lengths is not None and not self._given.windowed and min(lengths[to_do], default=0) >= 0:
            steps = int(lengths[to_do].sum())
        with closing(Progress(shown, self._folder, len(journal.entries), total, steps)) as self._progress:
            while left := total - len(journal.entries) - len(self._skipped):
                # a second time if a worker died after it had packed, before the disk held that
                ended = {*journal.entries, *(error.source_index for error in self._skipped)}
                factory = StreamPacker(self._given, self._packer, transform, self._folder.journal, ended)
                loader = self._loader(factory, min(num_workers, left), context)
                try:
                    self._read(loader)
                finally:
                    loader._dismiss_workers()
                    close_part(self._folder.journal)
                    journal.look()
                if left == total - len(journal.entries) - len(self._skipped):
                    raise StoreError(f"workers packed streams, and died before the disk held one of {left:,}")

    def _loader(self, factory: StreamPacker, workers: int, context: BaseContext | str | None) -> StreamDataLoader[Any]:
        lists = self._given.lists
        dataset = StreamDataset(
            list(lists) if lists.mix else lists.sources,
            factory,
            max(1, workers),
            seed=int(self._journal.header["_seed"]),
            deterministic=False,
            on_error="skip" if self._on_error != "raise" else "raise",
            fingerprint="packed",
        )
        options: dict[str, Any] = {}
        if workers:
            options = {
                "prefetch_factor": _AHEAD,
                "persistent_workers": True,
                "multiprocessing_context": context,
                "max_restarts": _MOST_RESTARTS,
                "transport": "queue",
            }
        return StreamDataLoader(dataset, workers, list, rank=0, world_size=1, **options)

    def _read(self, loader: StreamDataLoader[Any]) -> None:
        """Have a loader pack streams."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "skipped the rest of a stream", RuntimeWarning)  # the report tells it
            decided = 0
            for reports in itertools.chain(loader, [[]]):  # the last streams may be skipped behind the last reports
                for failure in loader.failures[decided:]:
                    self._decide(failure)
                decided = len(loader.failures)
                self._take(reports)
            # the second epoch finishes the parts: each worker has a lane, and begins a stream in it
            self._take(next(iter(loader)))

    def _take(self, reports: list[Any]) -> None:
        """Take in what a step's lanes have reported."""
        for report in reports:
            if isinstance(report, ErrorReport):
                raise report.unpack()
            for packed in report or ():
                if packed.number not in self._reported:  # else a worker died after it had packed it
                    self._reported.add(packed.number)
                    self._progress.packed(packed.steps, packed.bytes)
        self._progress.look()

    def _decide(self, error: StreamError) -> None:
        choice = self._on_error(error) if callable(self._on_error) else self._on_error
        if choice == "raise":
            raise error
        if choice != "skip":
            raise ValueError(f"on_error returned {choice!r} for {error}; return 'raise' or 'skip'")
        self._skipped.append(error)
        self._progress.finished()


def _check_metadata(given: Given, number: int) -> None:
    try:
        json.dumps(dict(given.metadata(number)))
    except (TypeError, ValueError) as error:
        source = shorten(given.lists.sources[number])
        raise TypeError(f"the metadata of source {number} ({source}) cannot be kept as JSON: {error}") from None


def _packer(format: str) -> Callable[..., Packer]:
    """What packs into a format.

    Raises:
        ValueError: It is unknown, or only read.
    """
    known = {name: one.packer for name, one in FORMATS.items() if one.packer is not None}
    if format not in known:
        why = "is only read" if format in FORMATS else "is unknown"
        raise ValueError(f"format {format!r} {why}; pack into one of {', '.join(map(repr, known))}")
    packer: Callable[..., Packer] = FORMATS[format].load(known[format])
    return packer


def _header(given: Given, format: str, options: Mapping[str, Any], seed: int | None) -> dict[str, Any]:
    """What must stay the same over an interrupt; what begins with an underscore need not."""
    digest = hashlib.blake2b(digest_size=8)
    hash_content(dict(options), digest.update)
    return {
        "format": format,
        "number of sources": len(given.keys),
        "fingerprint of sources and keys": given.fingerprint(),
        "fingerprint of options": digest.hexdigest(),
        "windows taken apart": given.windowed,
        "_seed": given.seed if seed is None else seed,
    } | ({} if seed is None else {"seed": seed})


@contextmanager
def _telling_how_to_go_on(total: int, folder: PartialFolder, journal: Journal) -> Iterator[None]:
    """Have errors say what is kept, and what to do."""

    def kept() -> str:
        journal.look()
        return (
            f"{len(journal.entries):,} of {total:,} streams are packed, in {folder.partial}: pack again and it "
            "goes on there, or delete that folder"
        )

    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"packing was interrupted. {kept()}") from None
    except StreamError as error:
        again = type(error)(f"{error}. {kept()}", **error.place)
        again.__cause__ = error.__cause__
        raise again from error.__cause__
    except OSError as error:
        if error.errno in _FULL:
            raise OSError(
                error.errno,
                f"the disk of {folder.partial} is full ({error.strerror}). Free some of it, then go on. {kept()}",
            ) from error
        if error.errno is not None:
            raise OSError(error.errno, f"{error.strerror}. {kept()}", error.filename) from error
        raise
    except WorkerDeathError as error:
        raise WorkerDeathError(f"{error}. {kept()}") from error.__cause__


def _verify(folder: PartialFolder, format: str) -> None:
    from stream_dataloader import stores

    problems = stores.verify(folder.store, format=format)
    if problems:
        raise StoreError(
            f"what was packed differs from what the disk holds: {problems[0]}, and {len(problems) - 1} more; check the "
            f"disk, delete {folder.partial} and pack anew"
        )
