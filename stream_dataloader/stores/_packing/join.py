"""`join`: makes one store of parts that were packed separately. Their data stay where they are.

Guarantee: the index is written last. Until then there is no store at the path, and `join` may be called again.
"""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

import numpy as np

from stream_dataloader._engine.descriptors import above_standard
from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.files import in_folder, matching, plain_path, sync_folder
from stream_dataloader.stores._base.formats import JOINED
from stream_dataloader.stores._base.packing import StreamRecord
from stream_dataloader.stores._base.store import Store, StoreInfo
from stream_dataloader.stores._packing.partial import Partial
from stream_dataloader.stores._packing.share import NOTE, Note
from stream_dataloader.stores.joined import KIND, JoinedStore
from stream_dataloader.stores.memmap.packed import finish_store
from stream_dataloader.streams.cache import FileCache, is_url

__all__ = ["join", "names_of_parts"]


def join(path: str | os.PathLike[str], *, storage_options: Mapping[str, Mapping[str, Any]] | None = None) -> StoreInfo:
    """Make one store of the parts that `stores.pack(..., part=(i, n))` wrote.

    Streams are in the order of the sources. Nothing is copied: the folders of the parts belong to the store.
    After an interrupt, or after a part was deleted and packed again, call `join` again.

    Args:
        path: Path or URL of the store, as it was given to `pack`.
        storage_options: Options for a URL, see `FileCache`.

    Returns:
        A summary of the store.

    Raises:
        StoreError: A part is missing, there twice or damaged, or parts were packed with other arguments, or hold
            other items. The message names the part.
        OSError: The disk is full, or the server cannot be reached.

    Example:
        >>> import pathlib, tempfile
        >>> from stream_dataloader import stores
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "letters.store"
        >>> streams = ["hello", "hi", "hey"], lambda text: map(ord, text)
        >>> for i in range(2):  # each on a machine of its own
        ...     _ = stores.pack(streams, path, part=(i, 2))
        >>> stores.join(path).steps
        10
        >>> sources, open_stream = stores.open(path)
        >>> [open_stream.key(source) for source in sources]
        ['hello', 'hi', 'hey']
    """
    target, cache = plain_path(path), FileCache(storage_options=storage_options or {})
    first, *_ = notes = _notes_at(target, cache)
    joining = Partial(in_folder(target, ".joining"), storage_options, busy=f"{target} is being joined")
    with ExitStack() as opened, above_standard(), joining as partial:
        folders = [in_folder(target, note.share.folder) for note in notes]
        parts = [
            opened.enter_context(closing(note.open_part(folder, cache)))
            for note, folder in zip(notes, folders, strict=True)
        ]
        _check_leaves(parts)
        shutil.rmtree(partial.store, ignore_errors=True)  # of a join that was killed
        os.makedirs(partial.store)
        places = [(part, number) for part, store in enumerate(parts) for number in range(len(store))]
        files = finish_store(
            partial.store,
            KIND,
            list(_records_of(parts)),
            [number for _, number in places],
            np.array([[part for part, _ in places]], "<i8"),
            (),
            header=JOINED,
            format=first.arguments["format"],
            parts=[
                {"folder": note.share.folder, "streams": len(store), "fingerprint": store.index.fingerprint}
                for note, store in zip(notes, parts, strict=True)
            ],
            metadata=first.metadata,
        )
        for name in files:
            made = os.path.join(partial.store, name)
            if is_url(target):
                cache.remote(in_folder(target, name)).send(made)
            else:
                os.replace(made, os.path.join(target, name))
                sync_folder(target)
    with closing(JoinedStore(target, **({"cache": cache} if is_url(target) else {}))) as joined:
        return joined.info()


def _records_of(parts: Sequence[Store]) -> Iterator[StreamRecord]:
    for store in parts:
        for number, steps in enumerate(store.index.lengths.tolist()):
            yield StreamRecord(number, store.key(number), steps, None, store.metadata(number))


def names_of_parts(target: str, cache: FileCache) -> list[str]:
    """Return the names of the folders of all finished parts."""
    pattern = in_folder(target if is_url(target) else glob.escape(target), f"*-of-*/{NOTE}")
    try:
        return sorted(os.path.basename(os.path.dirname(one)) for one in matching(pattern, cache))
    except FileNotFoundError:
        return []


def _notes_at(target: str, cache: FileCache) -> list[Note]:
    """Return the notes of all parts in order, once none is missing."""
    if not (names := names_of_parts(target, cache)):
        raise StoreError(f"{target} has no finished part; stores.pack(..., part=(i, n)) writes them")
    notes = []
    for name in names:
        notes.append(note := Note.of(folder := in_folder(target, name), cache))
        if name != note.share.folder:
            raise StoreError(f"{folder} is a copy of part {note.share.folder}; remove one of them")
    notes.sort(key=lambda note: note.share)
    counts = sorted({note.share.parts for note in notes})
    if len(counts) > 1:
        raise StoreError(f"{target} has parts of {counts[0]} and of {counts[1]}: {shorten(names)}; delete those of one")
    if missing := sorted(set(range(counts[0])) - {note.share.number for note in notes}):
        what = ", ".join(f"({number}, {counts[0]})" for number in missing[:8]) + (", ..." if missing[8:] else "")
        raise StoreError(f"{target} lacks {len(missing)} of {counts[0]} parts: pack part={what}, and join again")
    for note in notes[1:]:
        note.check(notes[0].arguments, in_folder(target, note.share.folder), "delete that folder and pack it again")
    return notes


def _check_leaves(parts: Sequence[Store]) -> None:
    """Raise unless all parts that have steps have items of one kind."""
    found: dict[str, str] = {}
    for store in parts:
        if not store.index.lengths.any():
            continue
        leaves = store._leaves()
        if found and leaves != found:
            raise StoreError(f"items of {store.path} are {leaves}, and those of parts before it are {found}")
        found = leaves
