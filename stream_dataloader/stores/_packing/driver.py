"""`pack`: writes streams into a store.

Guarantee: at the path there is a complete store, or nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import closing, contextmanager
from multiprocessing.context import BaseContext
from typing import Any, Literal

from stream_dataloader._engine.descriptors import above_standard
from stream_dataloader._engine.items.content import hash_content
from stream_dataloader._engine.options import check_items, choice
from stream_dataloader._engine.reading.lists import SourceList, SourceLists
from stream_dataloader._engine.reading.stream import Retries
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import StoreError, StreamError, WorkerDeathError, shorten, without_secrets
from stream_dataloader.stores._base.files import disk_bytes, in_folder, plain_path
from stream_dataloader.stores._base.formats import FORMATS, INDEXES, check_options
from stream_dataloader.stores._base.packing import StreamRecord
from stream_dataloader.stores._base.store import Store
from stream_dataloader.stores._packing.on_ray import pack_on_ray
from stream_dataloader.stores._packing.part import StreamPacker
from stream_dataloader.stores._packing.partial import Partial, is_store, packed_in
from stream_dataloader.stores._packing.run import ErrorChoice, PackReport, Run
from stream_dataloader.stores._packing.share import NOTE, Note, Share
from stream_dataloader.streams.cache import FileCache, is_url

__all__ = ["pack"]


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
    part: tuple[int, int] | None = None,
    worker_method: Literal["process", "ray"] = "process",
    ray_remote_args: Mapping[str, Any] | None = None,
    multiprocessing_context: BaseContext | str | None = None,
    storage_options: Mapping[str, Mapping[str, Any]] | None = None,
    **options: Any,
) -> PackReport:
    """Read streams once and save their time steps in a store, which `stores.open` opens.

    The store is written to `<path>.partial`, and renamed when it is complete. After an
    interrupt, an error or a full disk, call `pack` again with the same arguments to continue.
    To change `transform`, delete that folder first.

    Args:
        streams: A `StreamDataset`, or a pair `(sources, open_stream)` of streams of time steps.
            With `windows="given"` windows are split into steps. The result of `stores.open` keeps keys and metadata.
        path: Path or URL of the new store. Nothing may exist there.
        format: `"memmap"`, `"mds"` or `"lmdb"`.
        transform: Function that is applied to each time step, in the worker.
        num_workers: Number of processes that read and write; 0: only this one.
        on_error: Action for a stream that cannot be read or saved, or that kills its workers:
            `"raise"`; `"skip"`; or a function of the `StreamError` that returns one of these.
            After an interrupt, skipped streams are tried again.
        progress: True shows a bar, None shows it on a terminal. Or a function of the number of streams
            that are done and the number of all.
        verify: Compare the whole store with its checksums.
        metadata: Metadata of the whole store for JSON, if the format can save any.
        keys: Names of the streams, or a function of a source; None: from their store, or from the source.
        stream_metadata: Metadata of each stream for JSON, or a function of a source.
        seed: Seed of the generators of `get_stream_info()`, whose epoch is 0; None: the dataset's, or 0.
        part: `(i, n)`: pack only part `i` of `n`, from 0 on, into the folder `i-of-n` of `path`. Other machines pack
            other parts, with the same arguments, and `stores.join(path)` makes them one store. A part that
            is complete is not packed again.
        worker_method: `"ray"`: `num_workers` tasks of a Ray cluster pack parts, which are joined; see the guide
            "Beyond one machine".
        ray_remote_args: Options of `ray.remote` for each task.
        multiprocessing_context: Start method of workers, as for `StreamDataLoader`.
        storage_options: Options for a URL, see `FileCache`.
        options: Options of the format.

    Returns:
        A report of packed and skipped streams.

    Raises:
        FileExistsError: Something exists at the path.
        StreamError: A stream could not be packed; the message names the source and the step.
        StoreError: Another process packs to the path, or packing was begun with other arguments.
        OSError: The disk is full, or has another error.
        KeyboardInterrupt: Ctrl-C was pressed; the message says how many streams are packed.

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
    lists, seed_of_streams, how = _given_of(streams)
    if choice("worker_method", worker_method, Literal["process", "ray"]) == "ray":
        for name, given in (("part", part), ("multiprocessing_context", multiprocessing_context)):
            if given is not None:
                what = f'{name} is {shorten(given)}, and worker_method="ray" starts tasks of Ray, which pack parts'
                raise ValueError(f"{what}; leave it out")
        call = {
            "streams": streams,
            "path": os.fspath(path),
            "format": format,
            "transform": transform,
            "on_error": on_error,
            "progress": progress,
            "verify": verify,
            "metadata": metadata,
            "keys": keys,
            "stream_metadata": stream_metadata,
            "seed": seed,
            "storage_options": storage_options,
            **options,
        }
        return pack_on_ray(pack, call, len(lists.sources), num_workers, ray_remote_args)
    if ray_remote_args is not None:
        raise ValueError(f'ray_remote_args is {shorten(ray_remote_args)}, and needs worker_method="ray"')
    store = lists.open_stream if isinstance(lists.open_stream, Store) else None
    names = _keys_of(lists.sources, keys, store)
    notes = _notes_of(lists.sources, stream_metadata, store)
    if (chosen := FORMATS.get(format)) is None or chosen.packer is None:
        known = ", ".join(repr(name) for name, one in FORMATS.items() if one.packer is not None)
        why = "is unknown" if chosen is None else "is only read"
        raise ValueError(f"format {format!r} {why}; pack into one of {known}")
    packer_class = chosen.load(chosen.packer)
    check_options(packer_class, options, f"format is {format!r}")
    if metadata is None and store is not None:
        metadata = store.info().metadata
    if metadata is not None:
        json.dumps(metadata)  # raises now if JSON cannot hold it
        options["metadata"] = dict(metadata)
    header = {
        "format": format,
        "number of sources": len(names),
        "fingerprint of sources and keys": _digest_of([lists.fingerprint, *names]),
        "fingerprint of options": _digest_of(dict(options)),
        "windows taken apart": how.get("windowed", False),
        "_seed": seed_of_streams if seed is None else seed,
    } | ({} if seed is None else {"seed": seed})
    if is_url(os.fspath(path)) and format not in INDEXES:
        raise ValueError(f"format {format!r} is not read by URL; pack into a folder")
    share = None if part is None else Share.checked(part)
    own = range(len(names)) if share is None else share.sources(len(names))
    if share is not None:
        path = in_folder(plain_path(path), share.folder)
        if (report := _report_of(path, header, storage_options)) is not None:
            return report
    with above_standard(), Partial(path, storage_options) as partial, _telling_how_to_go_on(partial, len(own)):
        packer = packer_class(partial.store, **options)
        begun = partial.begin(header)
        factory = StreamPacker(lists, names, packer, partial.journal, transform, **how)
        with closing(Run(factory, on_error, progress, partial, own)) as run:
            run.pack(num_workers, int(begun["_seed"]), multiprocessing_context)
        packed, synced = packed_in(partial.journal)
        if run.skipped and not packed and share is None:  # of a part that was left out, others may be there
            error = next(iter(run.skipped.values()))
            raise StoreError(f"none of {len(names)} streams could be packed; {error}") from error
        records = [StreamRecord(one, names[one], *packed[one], notes[one]) for one in sorted(packed)]
        files = list(packer.finish(records, synced))
        if share is not None:
            Note(share, header, metadata or {}).write(partial.store)
            files.insert(0, NOTE)  # before the index
        if verify and (problems := chosen.load(chosen.store)(partial.store).verify()):
            more = f"{problems[0]}, and {len(problems) - 1} more"
            raise StoreError(f"{more}; delete {partial.folder} and pack again")
        size = disk_bytes(partial.store)
        partial.publish(files)
    return PackReport(
        path=partial.path,
        format=format,
        streams=len(records),
        steps=sum(record.steps for record in records),
        bytes=size,
        seconds=time.perf_counter() - began,
        packed_before=run.before,
        skipped=tuple(run.skipped[number] for number in sorted(run.skipped)),
    )


def _report_of(
    path: str, header: Mapping[str, Any], storage_options: Mapping[str, Mapping[str, Any]] | None
) -> PackReport | None:
    """Return the report of a part that is complete; raise if it was packed with other arguments."""
    cache = FileCache(storage_options=storage_options or {})
    if not is_store(path, cache):
        return None
    note = Note.of(path, cache)
    note.check(header, path, "delete that folder to pack it again")
    with closing(note.open_part(path, cache)) as store:
        steps = int(store.index.lengths.sum())
        size = store.info().disk_bytes or 0
        return PackReport(path, header["format"], len(store), steps, size, 0.0, packed_before=len(store))


@contextmanager
def _telling_how_to_go_on(partial: Partial, total: int) -> Iterator[None]:
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


def _given_of(streams: Any) -> tuple[SourceLists, int, dict[str, Any]]:
    if isinstance(streams, StreamDataset):
        retries = Retries(streams.retries, streams.retry_on, {})
        rules = streams._rules
        check_items(rules)
        return streams._source_lists, rules.seed, {"windowed": rules.time_steps is None, "retries": retries}
    try:
        sources, opens = streams
    except (TypeError, ValueError):
        found = shorten(streams, 80)
        raise TypeError(f"streams is {found}; give a StreamDataset, or (sources, open_stream)") from None
    empty = isinstance(sources, Sized) and not isinstance(sources, str) and not sources
    one = SourceList((), opens) if empty else SourceList.checked(sources, opens, None, None, None)
    return SourceLists([one]), 0, {}


def _keys_of(sources: Sequence[Any], given: Any, store: Store | None) -> list[str]:
    if given is None:
        found = [_key_of(source, store) for source in sources]
    else:
        found = [str(key) for key in (map(given, sources) if callable(given) else given)]
    if len(found) != len(sources):
        raise ValueError(f"keys has {len(found)} names, and there are {len(sources)} sources")
    seen = set[str]()
    for number, key in enumerate(found):
        if key in seen and given is not None:
            raise ValueError(f"keys has {key!r} twice; give each stream a name of its own")
        own = key
        while own in seen:
            own = f"{own}#{number}"  # the same source twice is two streams
        seen.add(own)
        found[number] = own
    return found


def _key_of(source: Any, store: Store | None) -> str:
    if store is None:
        # A store is often published, so names must not contain the options that opened its sources.
        return without_secrets(os.fsdecode(source)) if isinstance(source, (str, os.PathLike)) else shorten(source)
    if isinstance(source, (tuple, list)):
        number, start, stop = source
        return f"{store.key(number)}[{start or 0}:{'' if stop is None else stop}]"
    return store.key(source)


def _notes_of(sources: Sequence[Any], given: Any, store: Store | None) -> list[dict[str, Any]]:
    metadata: Iterable[Mapping[str, Any]] = ({} for _ in sources)
    if given is not None:
        metadata = map(given, sources) if callable(given) else given
    elif store is not None:
        metadata = (store.metadata(one[0] if isinstance(one, (tuple, list)) else one) for one in sources)
    found = [dict(one) for one in metadata]
    if len(found) != len(sources):
        raise ValueError(f"stream_metadata has {len(found)} dicts, and there are {len(sources)} sources")
    for number, one in enumerate(found):
        try:
            json.dumps(one)
        except (TypeError, ValueError) as error:
            source = shorten(sources[number])
            raise TypeError(f"the metadata of source {number} ({source}) is no JSON: {error}") from None
    return found


def _digest_of(content: Any) -> str:
    found = hashlib.blake2b(digest_size=8)
    hash_content(content, found.update)
    return found.hexdigest()
