"""Folder in which a store is packed, beside the path of the finished store.

::

    clips.store.partial/
        lock               held by the process that packs, and by its workers; names the process
        journal            the arguments with which packing was begun
        journal.3          the streams that part 3 has packed, and the results of its `sync`
        store/             the future clips.store
        store.items.json   the layout of items; see `_base/packing.py`

A journal has one line for each entry, with a checksum. For a URL the folder is in the cache, and has one more journal,
`sent`.

Guarantee: one process at a time packs to a path. Everything that a journal lists is on the disk.
The store gets its name, or on a server its index, after everything else is written.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import itertools
import json
import os
import shutil
import socket
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.files import in_folder, plain_path, stamp_of, sync_folder
from stream_dataloader.stores._base.formats import format_at
from stream_dataloader.streams.cache import FileCache, cache_directory, is_url
from stream_dataloader.streams.cache.own_folder import LocalFile, lock, make_own_folder

__all__ = ["Packed", "Partial", "begin_part", "enter", "is_store", "packed_in"]

_VERSION = 1
_PATIENCE_SECONDS = 20.0
_HOST = socket.gethostname()

#: Packed streams: the number of steps and the place, by the stream's number.
Packed = dict[int, tuple[int, Any]]


class Partial:
    """Folder in which one process packs a store.

    Args:
        path: Path of the finished store.
        options: Those of a server.
        busy: Says what another process does if it holds the folder; None: it packs the store.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        options: Mapping[str, Mapping[str, Any]] | None = None,
        busy: str | None = None,
    ) -> None:
        self.path = plain_path(path).rstrip("/") or os.fspath(path)
        self._busy = busy or f"{self.path} is being packed"
        self._cache = FileCache(storage_options=options or {})
        self.folder = f"{self.path}.partial"
        if is_url(self.path):
            key = hashlib.sha256(self.path.encode()).hexdigest()[:24]
            self.folder = os.path.join(cache_directory("packing"), f"{key}.partial")
        self.store = os.path.join(self.folder, "store")
        self.journal = os.path.join(self.folder, "journal")

    def __enter__(self) -> Partial:
        if is_store(self.path, self._cache):
            raise FileExistsError(f"{self.path} exists, and pack overwrites nothing; delete it first")
        self._lock = self._locked()
        return self

    def __exit__(self, *_: object) -> None:
        if self._holds_streams():
            os.truncate(self._lock.fd, 0)
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()

    def _holds_streams(self) -> bool:
        return os.path.exists(self.store) and bool(packed_in(self.journal)[0])

    def _locked(self) -> LocalFile:
        path = os.path.join(self.folder, "lock")
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            make_own_folder(self.folder)
            with contextlib.suppress(FileNotFoundError):  # another process just removed the folder
                if (held := lock(path, create=True)) is not None:
                    break
                with open(path, encoding="utf-8") as file:
                    holder = file.read(200)
                if time.monotonic() > deadline or not _has_gone(holder):
                    raise StoreError(
                        f"{self._busy} by another process ({holder}); wait until it ends, or end it, and call again"
                    )
                time.sleep(0.02)  # workers of a killed process end soon
        os.truncate(held.fd, 0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        os.pwrite(held.fd, f"process {os.getpid()} of {_HOST}, since {since}".encode(), 0)
        return held

    def begin(self, header: Mapping[str, Any]) -> Mapping[str, Any]:
        """Begin to pack, or continue; return the header with which packing was begun.

        The header must be the same, except for names that begin with an underscore.
        """
        header = {"version": _VERSION, **header}
        if not self._holds_streams():
            for name in {*os.listdir(self.folder)} - {"lock"}:
                _remove(os.path.join(self.folder, name))
            os.makedirs(self.store)
            with open(self.journal, "xb") as file:
                enter(file, header)
        begun: Mapping[str, Any]
        begun, *_ = [*_entries_in(self.journal), {}]
        changed = [name for name in header if begun.get(name) != header[name] and not name.startswith("_")]
        if changed:
            what = "; ".join(f"{name} was {begun.get(name)}, and is {header[name]}" for name in changed)
            raise StoreError(f"{self.folder} was begun with other arguments: {what}; delete that folder to start again")
        return begun

    def publish(self, files: Sequence[str]) -> None:
        """Move the store to its path. The index is the last of its files."""
        for name in os.listdir(self.store):
            path = os.path.join(self.store, name)
            sync_folder(path) if name in files else _remove(path)
        sync_folder(self.store)
        if is_url(self.path):
            self._send(files)
            return
        try:
            os.rename(self.store, self.path)
        except OSError as error:
            raise FileExistsError(
                f"{self.path} has come to exist while it was packed ({error.strerror}); remove it"
            ) from error
        sync_folder(os.path.dirname(os.path.abspath(self.path)))

    def _send(self, files: Sequence[str]) -> None:
        journal = os.path.join(self.folder, "sent")
        sent = {entry["name"]: entry for entry in _entries_in(journal)}
        with open(journal, "ab") as file:
            for name in files:
                path, remote = os.path.join(self.store, name), self._cache.remote(in_folder(self.path, name))
                entry = {"name": name, "stamp": stamp_of([path])}
                with contextlib.suppress(FileNotFoundError):
                    if sent.get(name) == entry | {"version": remote.ask()[0]}:
                        continue
                remote.send(path)
                enter(file, entry | {"version": remote.ask()[0]})
        shutil.rmtree(self.store)


def is_store(path: str, cache: FileCache) -> bool:
    """Return whether something is at a path, or a complete store at a URL."""
    if is_url(path):
        return format_at(path, lambda index: cache.remote(index).ask()) is not None
    return os.path.lexists(path)


def _remove(path: str) -> None:
    shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)


def _has_gone(holder: str) -> bool:
    words = holder.replace(",", "").split()
    if words[3:4] != [_HOST]:
        return False
    try:
        os.kill(int(words[1]), 0)
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    return False


def begin_part(journal: str) -> tuple[int, BinaryIO]:
    """Create the journal of a new part; return the part's number and the journal."""
    for number in itertools.count():
        with contextlib.suppress(FileExistsError):
            file = open(f"{journal}.{number}", "xb")  # noqa: SIM115
            sync_folder(os.path.dirname(journal))
            return number, file
    raise AssertionError


def enter(file: BinaryIO, entry: Mapping[str, Any]) -> None:
    """Append an entry to a journal, which has only one writer."""
    line = json.dumps(entry, default=lambda number: number.item()).encode()  # NumPy's numbers
    file.write(b"\n%08x %s\n" % (zlib.crc32(line), line))  # begins a new line after an entry that was cut off
    file.flush()
    os.fsync(file.fileno())


def packed_in(journal: str) -> tuple[Packed, list[Any]]:
    """Return the packed streams, and the results of the parts' `sync`."""
    packed: Packed = {}
    synced = []
    for path in sorted(glob.glob(f"{glob.escape(journal)}.*")):
        for entry in _entries_in(path):
            packed.update({number: (steps, place) for number, steps, place in entry["streams"]})
            synced.append(entry["synced"])
    return packed, synced


def _entries_in(path: str) -> list[dict[str, Any]]:
    found = []
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        for line in file.read().split(b"\n"):
            check, _, text = line.partition(b" ")
            if check == b"%08x" % zlib.crc32(text):
                found.append(json.loads(text))
    return found
