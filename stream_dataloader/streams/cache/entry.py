"""Entry of the cache for one URL: a directory of files.

Guarantee: each step is atomic, and the kernel frees a lock when its holder dies.

Each URL has a directory::

    files/5f1c.../lock                  held while fetching
                  part                  the bytes that have arrived so far
                  09af...-clip.mp4      the file, with its version; locked (shared) by readers;
                                        atime: last read, mtime: last known as the newest
"""

from __future__ import annotations

import glob
import os
import time
from collections.abc import Callable
from contextlib import suppress

from stream_dataloader.streams.cache.own_folder import (
    LocalFile,
    Wait,
    check_own_folder,
    lock,
    make_own_folder,
    new_file,
)

__all__ = ["CacheEntry", "make_room"]

#: Number of times that a directory is made again which is not there when its lock is opened.
_MOST_TRIES = 1000


class CacheEntry:
    """Entry of the cache for one URL.

    Args:
        directory: Directory of the entry, inside that of the cache.
        name: Name of the file.
        shared: Several users write to the cache.
        wait_seconds: Longest time that another process may hold the entry without progress.
    """

    def __init__(self, directory: str, name: str, shared: bool, wait_seconds: float) -> None:
        self._directory, self._name = directory, name
        self._shared, self._wait_seconds = shared, wait_seconds
        self.part = os.path.join(directory, "part")

    def get(self, held: Callable[[], LocalFile | None], fetch: Callable[[], None]) -> LocalFile:
        if self._is_there() and (file := held()) is not None:
            return file
        with self._locked():
            if (file := held()) is None:
                try:
                    new_file(self.part, shared=self._shared)
                    fetch()
                finally:
                    with suppress(OSError):
                        os.unlink(self.part)
                for path in self.versions()[1:]:
                    _unlink(path)
                file = self.hold()
                assert file is not None
            return file

    def _locked(self) -> LocalFile:
        found, tries = None, 0
        while found is None:
            tries += 1
            try:
                self._check_folders()
                mode = 0o666 if self._shared else 0o600
                wait = Wait(self._wait_seconds, self._size_of_part)
                found = lock(os.path.join(self._directory, "lock"), create=True, wait=wait, mode=mode)
            except OSError as error:
                # Another process may have removed the directory in between; a link that leads nowhere stays.
                if isinstance(error, FileNotFoundError) and tries < _MOST_TRIES:
                    continue
                if error.errno is None:  # its message is already complete
                    raise
                why = f"the cache of remote files cannot be written ({error.strerror})"
                remedy = "set STREAM_DATALOADER_CACHE to a directory that can"
                raise type(error)(error.errno, f"{why}; {remedy}", self._directory) from error
        return found

    def _is_there(self) -> bool:
        """Return True if the entry's folder exists; raise if another user may have made it."""
        if self._shared:
            return True
        return check_own_folder(os.path.dirname(self._directory)) and check_own_folder(self._directory)

    def _check_folders(self) -> None:
        for folder in (os.path.dirname(self._directory), self._directory):
            make_own_folder(folder, shared=self._shared)

    def _size_of_part(self) -> int:
        with suppress(OSError):
            return os.stat(self.part).st_size
        return -1

    def versions(self, version: str = "", since: float = 0.0) -> list[str]:
        """Return the complete files of a version that were checked since a time, the newest first."""
        found = []
        with suppress(OSError), os.scandir(self._directory) as files:  # an error is raised again by the lock
            for file in files:
                named, dash, _ = file.name.partition("-")
                if dash and version in ("", named):
                    with suppress(FileNotFoundError):
                        found.append((file.stat().st_mtime_ns, file.path))
        return [path for asked, path in sorted(found, reverse=True) if asked >= since * 1e9]

    def hold(self, version: str = "", since: float = 0.0) -> LocalFile | None:
        for path in self.versions(version, since):
            if (held := lock(path, shared=True, wait=Wait(self._wait_seconds))) is not None:
                with suppress(OSError):  # another user's
                    os.utime(held.fd, ns=(time.time_ns(), os.fstat(held.fd).st_mtime_ns))
                return held
        return None

    def take_in(self, version: str) -> None:
        """Give the fetched file its name."""
        os.utime(self.part, ns=(time.time_ns(), time.time_ns()))  # fsspec may have set the server's time
        os.replace(self.part, os.path.join(self._directory, f"{version}-{self._name}"))


def make_room(directory: str, size: int, limit: int, part: str) -> None:
    """Delete the least recently used files until a new one has room."""
    stored = []
    for path in glob.iglob(os.path.join(glob.escape(directory), "*", "*")):
        if os.path.basename(path) != "lock" and path != part:
            with suppress(FileNotFoundError):
                known = os.stat(path)
                stored.append((known.st_atime_ns, known.st_size, path))
    total = size + sum(taken for _, taken, _ in stored)
    for _, taken, path in sorted(stored):
        if total > limit and _delete(path):
            total -= taken


def _delete(path: str) -> bool:
    directory = os.path.dirname(path)
    fetching = lock(os.path.join(directory, "lock"))
    if fetching is None:
        return False
    with fetching:
        gone = _unlink(path)
        with suppress(OSError):
            if os.listdir(directory) == ["lock"]:
                os.unlink(fetching.path)
                os.rmdir(directory)
        return gone


def _unlink(path: str) -> bool:
    with suppress(OSError):  # another user's
        held = lock(path)
        if held is not None:
            with held:
                os.unlink(path)
            return True
    return False
