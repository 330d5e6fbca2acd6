"""Folders that this library writes to, and locks on files in them.

If other users may write to a folder, they can prepare it: with a file that is then read as if it were fetched, or with
a link that redirects a write to a private file. So a folder must belong to this user, unless it is declared as shared.

Guarantee: no file is opened through a link. A wait for a lock names the process that holds it, and ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import pwd
import stat
import time
import weakref
from collections.abc import Callable

from stream_dataloader._engine.descriptors import above_standard

__all__ = ["LocalFile", "Wait", "check_own_folder", "holder_of", "lock", "make_own_folder", "new_file", "no_locks"]

_log = logging.getLogger("stream_dataloader")

_LOOK_SECONDS = 0.01
_SAY_AFTER_SECONDS = 10.0

#: Mode bits that let others than the owner write to a folder.
_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def make_own_folder(path: str, *, shared: bool = False) -> None:
    """Create a folder for this user alone, or check that an existing one belongs to the user.

    Args:
        path: The folder. Its parents are created with the usual permissions.
        shared: Users who trust each other share the folder: it has the usual permissions, and is not checked.

    Raises:
        PermissionError: The folder belongs to another user (the message names the owner), or others may write to it.
    """
    if shared:
        os.makedirs(path, exist_ok=True)
        return
    if not check_own_folder(path):
        with contextlib.suppress(FileExistsError):
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            os.mkdir(path, 0o700)
        check_own_folder(path)


def check_own_folder(path: str) -> bool:
    """Check that a folder belongs to the user; return whether it exists.

    Raises:
        PermissionError: The folder belongs to another user (the message names the owner), or others may write to it.
    """
    try:
        known = os.lstat(path)
        _check_owner(path, known)
        if stat.S_ISLNK(known.st_mode):  # the user's own link may lead to another disk
            known = os.stat(path)
            _check_owner(path, known)
    except (FileNotFoundError, NotADirectoryError):
        return False
    if known.st_mode & _OTHERS:
        raise _refused(path, f"others may write to it (mode {stat.S_IMODE(known.st_mode):o}), so chmod go-w it")
    return True


def _check_owner(path: str, known: os.stat_result) -> None:
    if known.st_uid != (own := os.geteuid()):
        raise _refused(path, f"it is {_user(known.st_uid)}'s, and this process is {_user(own)}'s")


def _refused(path: str, why: str) -> PermissionError:
    remedy = "name another folder, or say that users who trust each other share it (FileCache(shared=True))"
    return PermissionError(f"{path} cannot be used: {why}; {remedy}")


def _user(number: int) -> str:
    with contextlib.suppress(KeyError):
        return f"user {pwd.getpwuid(number).pw_name}"
    return f"user {number}"


def new_file(path: str, *, shared: bool = False) -> None:
    """Replace a file, which may be a link, by a new empty one."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o666 if shared else 0o600))


class LocalFile:
    """A local file that the cache does not delete while it is open; `fd` is a locked descriptor, or -1."""

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
        # Closing is not enough, because a forked process may have a copy of the descriptor.
        with contextlib.suppress(OSError):  # of a file system without locks
            fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


class Wait:
    """A wait for locks that ends after some time without progress.

    Args:
        seconds: Longest time without progress.
        progress: Function whose value changes while the holder works, such as the size of the file that it fetches.
    """

    def __init__(self, seconds: float, progress: Callable[[], object] = lambda: None) -> None:
        self._seconds, self._progress = seconds, progress
        self._began = self._since = time.monotonic()
        self._seen: object = None
        self._said = False

    def once(self, path: str, fd: int) -> None:
        """Wait a moment for a lock on a file.

        Raises:
            TimeoutError: There was no progress for too long; the message names the process that holds the lock.
        """
        now, seen = time.monotonic(), self._progress()
        if seen != self._seen:
            self._seen, self._since = seen, now
        if now - self._since > self._seconds:
            what = f"{path} is locked by {holder_of(fd)}, which made no progress for {self._seconds:g} s"
            raise TimeoutError(f"{what}; end it, or give FileCache more wait_seconds")
        if not self._said and now - self._began > _SAY_AFTER_SECONDS:
            self._said = True
            _log.info("waiting for %s, which is locked by %s", path, holder_of(fd))
        time.sleep(_LOOK_SECONDS)


def holder_of(fd: int) -> str:
    """Return a description of the process that holds a lock on an open file."""
    inode, found = os.fstat(fd).st_ino, ""
    with contextlib.suppress(OSError), open("/proc/locks", encoding="utf-8") as locks:
        for line in locks:  # "1: FLOCK  ADVISORY  WRITE 708 08:01:2359 0 EOF"; "->" marks one that waits
            words = line.split()
            if words[1] == "FLOCK" and words[5].rpartition(":")[2] == str(inode) and int(words[4]) > 0:
                found = f"process {words[4]}"
                with contextlib.suppress(OSError):
                    found += f" of {_user(os.stat(f'/proc/{words[4]}').st_uid)}"
    return found or "a process that cannot be named here, in another container or on another machine"


def no_locks(path: str, error: OSError) -> OSError:
    """Return the error to raise where a file system refuses to lock a file."""
    why = f"{path} cannot be locked ({error.strerror}): its file system has no locks"
    return OSError(error.errno, f"{why}; use a folder of a local disk, or mount it with locks")


def lock(
    path: str, *, shared: bool = False, wait: Wait | None = None, create: bool = False, mode: int = 0o600
) -> LocalFile | None:
    """Lock a file against other processes and threads; return None if it does not exist, or is locked.

    Args:
        path: The file.
        shared: Others may hold such a lock at the same time.
        wait: The wait for other holders; None: do not wait.
        create: Create the file if it does not exist.
        mode: Permissions of a file that is created.
    """
    # Opening a pipe in its place would block for ever.
    flags = (os.O_RDONLY if shared else os.O_RDWR) | (os.O_CREAT if create else 0) | os.O_NOFOLLOW | os.O_NONBLOCK
    while True:
        try:
            with above_standard():
                held = LocalFile(path, os.open(path, flags, mode))
        except FileNotFoundError:
            if create:
                raise
            return None
        kind = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
        try:
            while True:
                try:
                    fcntl.flock(held.fd, kind)
                    break
                except BlockingIOError:
                    if wait is None:
                        held.close()
                        return None
                    wait.once(path, held.fd)
                except OSError as error:
                    raise no_locks(path, error) from error
            if os.path.samestat(os.fstat(held.fd), os.stat(path)):
                return held
        except FileNotFoundError:
            pass
        except TimeoutError:
            held.close()
            raise
        held.close()  # the file was deleted during the wait
