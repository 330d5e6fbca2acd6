"""`pack`: streams become a store.

Guarantee: there is a whole store at the path, or nothing.
"""

from __future__ import annotations

import errno
import hashlib
import inspect
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from multiprocessing.context import BaseContext
from typing import Any, Literal

from stream_dataloader._items.content import hash_content
from stream_dataloader.dataloader import StreamDataLoader
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import ErrorReport, StoreError, StreamError, WorkerDeathError
from stream_dataloader.stores._base.formats import FORMATS
from stream_dataloader.stores._base.options import check_options
from stream_dataloader.stores._base.packing import Packer, StreamRecord
from stream_dataloader.stores._packing.given import Given, given_of, metadata_of
from stream_dataloader.stores._packing.part import StreamPacker
from stream_dataloader.stores._packing.partial import Partial, packed_in
from stream_dataloader.stores._packing.report import PackReport, Progress, disk_bytes

__all__ = ["pack"]

#: Errors of a full disk.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

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
        path: Where the store will be. There must be nothing.
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
    given = given_of(streams, keys)
    notes = metadata_of(given, stream_metadata)
    packer_class = _packer(format)
    check_options(packer_class, options, f"format is {format!r}")
    if metadata is None and given.store is not None and "metadata" in inspect.signature(packer_class).parameters:
        metadata = given.store.info().metadata
    if metadata is not None:
        options["metadata"] = dict(metadata)
    with Partial(path) as partial:
        packer = packer_class(partial.store, **options)
        header = partial.begin(_header(given, format, options, seed))
        before, total = packed_in(partial.journal)[0], len(notes)
        run = _Run(given, partial, packer, on_error, int(header["_seed"]))
        with _telling_how_to_go_on(partial, total):
            if not partial.is_whole:
                with closing(Progress(progress, partial, before, total)) as run.progress:
                    run.pack(transform, num_workers, multiprocessing_context)
            packed, synced = packed_in(partial.journal)
            if run.skipped and not packed:
                error = next(iter(run.skipped.values()))
                raise StoreError(f"none of {total} streams could be packed; {error}") from error
            records = [
                StreamRecord(number, given.keys[number], entry.steps, entry.place, notes[number])
                for number, entry in sorted(packed.items())
            ]
            if not partial.is_whole:
                partial.finish(packer.finish(records, synced))
            if verify:
                _verify(partial, format)
            partial.publish()
    return PackReport(
        path=partial.path,
        format=format,
        streams=len(records),
        steps=sum(record.steps for record in records),
        bytes=disk_bytes(partial.path),
        seconds=time.perf_counter() - began,
        packed_before=len(before),
        skipped=tuple(run.skipped[number] for number in sorted(run.skipped)),
    )


@dataclass
class _Run:
    """A loader opens what is not packed, and its workers write it."""

    given: Given
    partial: Partial
    packer: Packer
    on_error: ErrorChoice | Callable[[StreamError], ErrorChoice]
    seed: int
    progress: Progress = field(init=False)
    skipped: dict[int, StreamError] = field(default_factory=dict)

    def pack(self, transform: Callable[[Any], Any] | None, num_workers: int, context: BaseContext | str | None) -> None:
        """Pack all streams that are not packed."""
        journal, before = self.partial.journal, -1
        while left := len(self.given.keys) - len(packed_in(journal)[0]) - len(self.skipped):
            if left == before:
                raise StoreError(f"workers died before the disk held one of {left:,} streams")
            # a second time if a worker died before the disk held what it had packed
            before = left
            factory = StreamPacker(self.given, self.packer, transform, journal, frozenset(self.skipped))
            loader = self._loader(factory, min(num_workers, left), context)
            try:
                self._read(loader)
            finally:
                loader._dismiss_workers()
                factory.close()

    def _loader(self, factory: StreamPacker, workers: int, context: BaseContext | str | None) -> StreamDataLoader[Any]:
        lists = self.given.lists
        dataset = StreamDataset(
            list(lists) if lists.mix else lists.sources,
            factory,
            max(1, workers),
            seed=self.seed,
            deterministic=False,
            on_error="skip" if callable(self.on_error) else self.on_error,
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
                        self.progress.done(number, steps)
                self.progress.look()

    def _decide(self, error: StreamError) -> None:
        choice = self.on_error(error) if callable(self.on_error) else self.on_error
        if choice == "raise":
            raise error
        if choice != "skip":
            raise ValueError(f"on_error returned {choice!r} for {error}; return 'raise' or 'skip'")
        self.skipped[error.source_index] = error
        self.progress.done(error.source_index)


def _reports_of(loader: StreamDataLoader[Any]) -> Iterator[list[Any]]:
    yield from loader
    # the second epoch finishes the parts, as each worker begins a stream
    yield next(iter(loader))


def _packer(format: str) -> Callable[..., Packer]:
    """What packs into a format; a ValueError if it is unknown, or only read."""
    known = {name: one.packer for name, one in FORMATS.items() if one.packer is not None}
    if format not in known:
        why = "is only read" if format in FORMATS else "is unknown"
        raise ValueError(f"format {format!r} {why}; pack into one of {', '.join(map(repr, known))}")
    packer: Callable[..., Packer] = FORMATS[format].load(known[format])
    return packer


def _header(given: Given, format: str, options: Mapping[str, Any], seed: int | None) -> dict[str, Any]:
    """What must stay the same; what begins with an underscore need not."""

    def digest(content: Any) -> str:
        found = hashlib.blake2b(digest_size=8)
        hash_content(content, found.update)
        return found.hexdigest()

    return {
        "format": format,
        "number of sources": len(given.keys),
        "fingerprint of sources and keys": digest([given.lists.fingerprint, *given.keys]),
        "fingerprint of options": digest(dict(options)),
        "windows taken apart": given.windowed,
        "_seed": given.seed if seed is None else seed,
    } | ({} if seed is None else {"seed": seed})


@contextmanager
def _telling_how_to_go_on(partial: Partial, total: int) -> Iterator[None]:
    """Have errors say what is kept, and what to do."""

    def with_kept(text: object) -> str:
        count = len(packed_in(partial.journal)[0])
        if not count:
            return f"{text}. Nothing is packed, and nothing is kept"
        packed = f"{count:,} of {total:,} streams are packed"
        return f"{text}. {packed}, in {partial.folder}: pack again and it goes on there, or delete that"

    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(with_kept("packing was interrupted")) from None
    except (StreamError, WorkerDeathError) as error:
        error.args = (with_kept(error),)
        raise
    except OSError as error:
        if error.errno in _FULL:
            full = f"the disk of {partial.folder} is full ({error.strerror}). Free some of it"
            raise OSError(error.errno, with_kept(full)) from error
        if error.errno is not None:
            error.strerror = with_kept(error.strerror)
        raise


def _verify(partial: Partial, format: str) -> None:
    from stream_dataloader import stores

    problems = stores.verify(partial.store, format=format)
    if problems:
        raise StoreError(
            f"what was packed differs from what the disk holds: {problems[0]}, and {len(problems) - 1} more; "
            f"delete {partial.folder} and pack anew"
        )
