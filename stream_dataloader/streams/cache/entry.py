"""What the cache has of one URL: a directory, whose files processes lock, rename and delete.

Guarantee: every step is atomic in the file system, so a process may be killed between any two.

A directory, one for each URL::

    files/5f1c.../lock                  held while fetching; its mtime is when the server was last asked
                  part                  what has arrived so far
                  09af...-clip.mp4      the file, with its version; locked (shared) by readers; atime is its last use
"""

from __future__ import annotations

import glob
import os
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress

from stream_dataloader.streams.cache.file_lock import FileLock, lock

__all__ = ["CacheEntry", "LocalFile", "delete_file", "stored_files"]

#: Each run asks the server once more; forked workers belong to the run.
_RUN_BEGAN = time.time()


class LocalFile:
    """A local file that is not deleted or moved while this is open.

    Attributes:
        path: Its path.
    """

    def __init__(self, path: str, held: FileLock | None = None) -> None:
        self.path = path
        self._release = None if held is None else weakref.finalize(self, held.close)

    def close(self) -> None:
        """Release the file; the cache may then delete it to make room."""
        if self._release is not None:
            self._release()

    def __enter__(self) -> LocalFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class CacheEntry:
    """What the cache has of one URL."""

    def __init__(self, directory: str, name: str) -> None:
        self._directory = directory
        self._name = name
        self.lock = os.path.join(directory, "lock")
        self.part = os.path.join(directory, "part")

    def locked(self) -> FileLock:
        """Lock the entry for fetching; waits for a process that holds it."""
        while True:
            try:
                os.makedirs(self._directory, exist_ok=True)
                found = lock(self.lock, create=True)
            except FileNotFoundError:  # another process removed the directory in between
                continue
            except OSError as error:
                why = f"the cache of remote files cannot be written ({error.strerror})"
                remedy = "set STREAM_DATALOADER_CACHE to a directory that can"
                raise type(error)(error.errno, f"{why}; {remedy}", self._directory) from error
            assert found is not None
            return found

    def versions(self) -> list[str]:
        """The whole files that are there, the newest first; normally one."""
        found = []
        with suppress(FileNotFoundError), os.scandir(self._directory) as files:
            for file in files:
                if "-" in file.name:
                    with suppress(FileNotFoundError):
                        found.append((file.stat().st_mtime_ns, file.path))
        return [path for _, path in sorted(found, reverse=True)]

    def hold(self, version: str | None = None) -> LocalFile | None:
        """The newest version, or a certain one, locked so that nobody deletes it."""
        for path in self.versions():
            if version is not None and not os.path.basename(path).startswith(f"{version}-"):
                continue
            if (held := lock(path, shared=True)) is not None:
                with suppress(OSError):  # another user's
                    os.utime(held.fd, ns=(time.time_ns(), os.fstat(held.fd).st_mtime_ns))
                return LocalFile(path, held)
        return None

    def take_in(self, version: str) -> None:
        """Give the fetched file its name."""
        os.utime(self.part)  # the newest mtime marks the newest version; fsspec may have set the server's
        os.replace(self.part, os.path.join(self._directory, f"{version}-{self._name}"))

    def drop_old(self) -> None:
        """Delete all versions but the newest, unless they are in use."""
        for path in self.versions()[1:]:
            _unlink(path)

    def was_checked(self, seconds: float) -> bool:
        """Whether the server was asked in this run, less than so many seconds ago."""
        with suppress(OSError):  # if it is not that there is none, it comes again when the entry is locked
            return os.stat(self.lock).st_mtime >= max(_RUN_BEGAN, time.time() - seconds)
        return False


def stored_files(directory: str) -> Iterator[tuple[int, int, str]]:
    """Last use, size and path of each file of the cache, also of unfinished ones."""
    for path in glob.iglob(os.path.join(glob.escape(directory), "*", "*")):
        if "-" in os.path.basename(path) or path.endswith(f"{os.sep}part"):
            with suppress(FileNotFoundError):
                known = os.stat(path)
                yield known.st_atime_ns, known.st_size, path


def delete_file(path: str) -> bool:
    """Delete a file of the cache, unless it is in use, and its directory if nothing else is in it."""
    lock_path = os.path.join(os.path.dirname(path), "lock")
    fetching = lock(lock_path, wait=False)
    if fetching is None:
        return False
    with fetching:
        gone = _unlink(path)
        with suppress(OSError):
            if os.listdir(os.path.dirname(path)) == ["lock"]:
                os.unlink(lock_path)
                os.rmdir(os.path.dirname(path))
        return gone


def _unlink(path: str) -> bool:
    with suppress(OSError):  # another user's
        held = lock(path, wait=False)
        if held is not None:
            with held:
                os.unlink(path)
            return True
    return False
