"""`pack`: streams become a store.

Guarantee: there is a whole store at the path, or nothing.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from multiprocessing.context import BaseContext
from typing import Any, Literal

from stream_dataloader.dataloader import StreamDataLoader
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import ErrorReport, StoreError, StreamError, WorkerDeathError
from stream_dataloader.stores._base.files import disk_bytes
from stream_dataloader.stores._base.formats import FORMATS, INDEXES, check_options
from stream_dataloader.stores._base.packing import StreamRecord
from stream_dataloader.stores._base.store import Store
from stream_dataloader.stores._packing.given import digest_of, given_of, keys_of, notes_of
from stream_dataloader.stores._packing.part import StreamPacker
from stream_dataloader.stores._packing.partial import Partial, packed_in
from stream_dataloader.stores._packing.report import PackReport, Progress
from stream_dataloader.streams.cache.file_cache import is_url

__all__ = ["pack"]

#: Messages that a worker may be ahead of another.
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
    storage_options: Mapping[str, Mapping[str, Any]] | None = None,
    **options: Any,
) -> PackReport:
    """Read streams once and keep their time steps in a store, which `stores.open` opens.

    The store is written to `<path>.partial`, and gets its name when it is whole. After an interrupt, an error
    or a full disk, call it again with the same arguments: it goes on. What a transform does is not compared:
    delete the folder to pack with another one.

    Args:
        streams: A `StreamDataset`, or a pair `(sources, open_stream)` of streams of time steps. Windows of a
            dataset without `time_steps` are taken apart; a leaf without a time axis is in each time step.
            Sources are packed whole, in the order of the list. What `stores.open` returns keeps its keys and
            metadata.
        path: Where the store will be, also a URL; there must be nothing. What is for a URL is packed in the cache.
        format: `"memmap"`, `"mds"` or `"lmdb"`.
        transform: Applied to each time step, in the worker.
        num_workers: Processes that read and write; 0: this one does.
        on_error: What to do about a stream that cannot be read, does not fit the others, or kills its workers:
            `"raise"`; `"skip"`: the store goes without it; or a callable that is given the `StreamError`, in
            this process, and returns one of the two. After an interrupt skipped streams are tried again.
        progress: True shows a bar, None does on a terminal. Or a function that is called with how many streams
            are done, and how many there are.
        verify: Compare the whole store with its checksums.
        metadata: Of the whole store, as JSON can hold it, if the format keeps any.
        keys: The streams' names, or a function of a source; None: their keys in their store, or their sources
            as text.
        stream_metadata: What is known of each stream, for JSON, or a function of a source.
        seed: Seeds the generators of `get_stream_info()`, whose epoch is 0; None: the dataset's, or 0, or that
            with which packing began.
        multiprocessing_context: How workers are started, as for `StreamDataLoader`.
        storage_options: For a URL, see `FileCache`.
        options: Of the format.

    Returns:
        What was packed, and what was skipped.

    Raises:
        FileExistsError: There is something at the path.
        StreamError: A stream could not be packed; names the source and the step.
        StoreError: Another process packs to the path, or it was begun with something else.
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
    lists, seed_of_streams, how = given_of(streams)
    store = lists.open_stream if isinstance(lists.open_stream, Store) else None
    names = keys_of(lists.sources, keys, store)
    notes = notes_of(lists.sources, stream_metadata, store)
    if (chosen := FORMATS.get(format)) is None or chosen.packer is None:
        known = ", ".join(repr(name) for name, one in FORMATS.items() if one.packer is not None)
        why = "is unknown" if chosen is None else "is only read"
        raise ValueError(f"format {format!r} {why}; pack into one of {known}")
    packer_class = chosen.load(chosen.packer)
    check_options(packer_class, options, f"format is {format!r}")
    if metadata is None and store is not None:
        metadata = store.info().metadata
    if metadata is not None:
        options["metadata"] = dict(metadata)
    header = {
        "format": format,
        "number of sources": len(names),
        "fingerprint of sources and keys": digest_of([lists.fingerprint, *names]),
        "fingerprint of options": digest_of(dict(options)),
        "windows taken apart": how.get("windowed", False),
        "_seed": seed_of_streams if seed is None else seed,
    } | ({} if seed is None else {"seed": seed})
    if is_url(os.fspath(path)) and format not in INDEXES:
        raise ValueError(f"format {format!r} is not read by URL; pack into a folder of this machine")
    with Partial(path, storage_options) as partial, _telling_how_to_go_on(partial, len(names)):
        packer = packer_class(partial.store, **options)
        begun = partial.begin(header)
        before = packed_in(partial.journal)[0]
        factory = StreamPacker(lists, names, packer, partial.journal, transform, **how)
        with closing(Progress(progress, partial, before, len(names))) as shown:
            run = _Run(factory, on_error, shown)
            run.pack(num_workers, int(begun["_seed"]), multiprocessing_context)
        packed, synced = packed_in(partial.journal)
        if run.skipped and not packed:
            error = next(iter(run.skipped.values()))
            raise StoreError(f"none of {len(names)} streams could be packed; {error}") from error
        records = [StreamRecord(one, names[one], *packed[one], notes[one]) for one in sorted(packed)]
        files = packer.finish(records, synced)
        if verify and (problems := chosen.load(chosen.store)(partial.store).verify()):
            more = f"{problems[0]}, and {len(problems) - 1} more"
            raise StoreError(f"{more}; delete {partial.folder} and pack anew")
        size = disk_bytes(partial.store)
        partial.publish(files)
    return PackReport(
        path=partial.path,
        format=format,
        streams=len(records),
        steps=sum(record.steps for record in records),
        bytes=size,
        seconds=time.perf_counter() - began,
        packed_before=len(before),
        skipped=tuple(run.skipped[number] for number in sorted(run.skipped)),
    )


class _Run:
    """A loader opens what is not packed, and its workers write it.

    Attributes:
        skipped: Why streams were left out, by their numbers.
    """

    def __init__(
        self, factory: StreamPacker, on_error: ErrorChoice | Callable[[StreamError], ErrorChoice], progress: Progress
    ) -> None:
        self._factory, self._on_error, self._progress = factory, on_error, progress
        self.skipped: dict[int, StreamError] = {}

    def pack(self, num_workers: int, seed: int, context: BaseContext | str | None) -> None:
        """Pack all streams that are not packed."""
        factory, before = self._factory, -1
        lists = factory.lists
        while left := len(factory.keys) - len(packed_in(factory.journal)[0]) - len(self.skipped):
            if left == before:
                raise StoreError(f"workers died before the disk held one of {left:,} streams")
            # a second time if a worker died before the disk held what it had packed
            before, workers = left, min(num_workers, left)
            factory.skipped = frozenset(self.skipped)
            dataset = StreamDataset(
                list(lists) if lists.mix else lists.sources,
                factory,
                max(1, workers),
                seed=seed,
                deterministic=False,
                on_error="skip" if callable(self._on_error) else self._on_error,
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
            loader = StreamDataLoader(dataset, workers, list, rank=0, world_size=1, **options)
            try:
                self._read(loader)
            finally:
                loader._dismiss_workers()
                factory.close()

    def _read(self, loader: StreamDataLoader[Any]) -> None:
        """Have a loader pack streams."""
        decided = 0
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "skipped the rest of a stream", RuntimeWarning)
            for reports in _reports_of(loader):
                for failure in loader.failures[decided:]:
                    self._decide(failure)
                decided = len(loader.failures)
                for report in reports:
                    if isinstance(report, ErrorReport):
                        raise report.unpack()
                    for number, steps in report or ():
                        self._progress.done(number, steps)
                self._progress.look()

    def _decide(self, error: StreamError) -> None:
        choice = self._on_error(error) if callable(self._on_error) else self._on_error
        if choice == "raise":
            raise error
        if choice != "skip":
            raise ValueError(f"on_error returned {choice!r} for {error}; return 'raise' or 'skip'")
        self.skipped[error.source_index] = error
        self._progress.done(error.source_index)


def _reports_of(loader: StreamDataLoader[Any]) -> Iterator[list[Any]]:
    yield from loader
    # the second epoch finishes the parts, as each worker begins a stream
    yield next(iter(loader))


@contextmanager
def _telling_how_to_go_on(partial: Partial, total: int) -> Iterator[None]:
    """Have errors say what is kept, and what to do."""
    try:
        yield
    except (KeyboardInterrupt, StreamError, WorkerDeathError, OSError) as error:
        kept = "Nothing is packed, and nothing is kept"
        if count := len(packed_in(partial.journal)[0]):
            packed = f"{count:,} of {total:,} streams are packed"
            kept = f"{packed}, in {partial.folder}: pack again and it goes on there, or delete that"
        if isinstance(error, OSError) and error.errno is not None:
            error.strerror = f"{error.strerror}. {kept}"
        else:
            error.args = (f"{str(error) or 'packing was interrupted'}. {kept}",)
        raise
