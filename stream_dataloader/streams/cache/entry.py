"""What the cache has of one URL: a directory of files.

Guarantee: each step is atomic, and the kernel frees a lock when its holder dies.

A directory, one for each URL::

    files/5f1c.../lock                  held while fetching
                  part                  what has arrived so far
                  09af...-clip.mp4      the file, with its version; locked (shared) by readers;
                                        atime: last read, mtime: last known as the newest
"""

from __future__ import annotations

import fcntl
import glob
import os
import time
import weakref
from collections.abc import Callable
from contextlib import suppress

from stream_dataloader._descriptors import above_standard

__all__ = ["CacheEntry", "LocalFile", "lock", "make_room"]


class LocalFile:
    """A local file that is not deleted while this is open; `fd` is locked, or -1."""

    def __init__(self, path: str, fd: int = -1) -> None:
        self.path, self.fd = path, fd
        self._release = None if fd < 0 else weakref.finalize(self, _release, fd, os.getpid())

    def close(self) -> None:
        """Release the file; the cache may then delete it."""
        if self._release is not None:
            self._release()

    def __enter__(self) -> LocalFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _release(fd: int, process: int) -> None:
    if os.getpid() == process:  # a forked copy must not release its parent's lock
        # Closing is not enough: a forked process may have a copy of the descriptor.
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def lock(path: str, *, shared: bool = False, wait: bool = True, create: bool = False) -> LocalFile | None:
    """Lock a file, also against threads; None if there is none, or it is held."""
    flags = (os.O_RDONLY if shared else os.O_RDWR) | (os.O_CREAT if create else 0)
    while True:
        try:
            with above_standard():
                held = LocalFile(path, os.open(path, flags, 0o666))
        except FileNotFoundError:
            if create:
                raise
            return None
        try:
            fcntl.flock(held.fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
            if os.path.samestat(os.fstat(held.fd), os.stat(path)):
                return held
        except BlockingIOError:
            return None
        except FileNotFoundError:
            pass
        held.close()  # it was deleted while we waited


class CacheEntry:
    """What the cache has of one URL."""

    def __init__(self, directory: str, name: str) -> None:
        self._directory = directory
        self._name = name
        self.part = os.path.join(directory, "part")

    def get(self, held: Callable[[], LocalFile | None], fetch: Callable[[], None]) -> LocalFile:
        if (file := held()) is not None:
            return file
        with self._locked():
            if (file := held()) is None:
                try:
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
        found = None
        while found is None:
            try:
                os.makedirs(self._directory, exist_ok=True)
                found = lock(os.path.join(self._directory, "lock"), create=True)
            except FileNotFoundError:
                pass  # another process removed the directory in between
            except OSError as error:
                why = f"the cache of remote files cannot be written ({error.strerror})"
                remedy = "set STREAM_DATALOADER_CACHE to a directory that can"
                raise type(error)(error.errno, f"{why}; {remedy}", self._directory) from error
        return found

    def versions(self, version: str = "", since: float = 0.0) -> list[str]:
        """The whole files of a version, checked since a time; the newest first."""
        found = []
        with suppress(OSError), os.scandir(self._directory) as files:  # it comes again when the entry is locked
            for file in files:
                named, dash, _ = file.name.partition("-")
                if dash and version in ("", named):
                    with suppress(FileNotFoundError):
                        found.append((file.stat().st_mtime_ns, file.path))
        return [path for asked, path in sorted(found, reverse=True) if asked >= since * 1e9]

    def hold(self, version: str = "", since: float = 0.0) -> LocalFile | None:
        for path in self.versions(version, since):
            if (held := lock(path, shared=True)) is not None:
                with suppress(OSError):  # another user's
                    os.utime(held.fd, ns=(time.time_ns(), os.fstat(held.fd).st_mtime_ns))
                return held
        return None

    def take_in(self, version: str) -> None:
        """Give the fetched file its name."""
        os.utime(self.part, ns=(time.time_ns(), time.time_ns()))  # fsspec may have set the server's
        os.replace(self.part, os.path.join(self._directory, f"{version}-{self._name}"))


def make_room(directory: str, size: int, limit: int, part: str) -> None:
    """Delete the files not used for longest, until a new one has room."""
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
    fetching = lock(os.path.join(directory, "lock"), wait=False)
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
        held = lock(path, wait=False)
        if held is not None:
            with held:
                os.unlink(path)
            return True
    return False
