"""Folders that this library writes to, and locks on files in them.

What others may write to, they can prepare: a file of theirs that is read as fetched, or a link that leads a write to a
private file. So such a folder must be this user's own, unless users say that they share it.

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

from stream_dataloader._descriptors import above_standard

__all__ = ["LocalFile", "Wait", "check_own_folder", "holder_of", "lock", "make_own_folder", "new_file"]

_log = logging.getLogger("stream_dataloader")

_LOOK_SECONDS = 0.01
_SAY_AFTER_SECONDS = 10.0

#: Who may write to a folder besides its owner.
_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def make_own_folder(path: str, *, shared: bool = False) -> None:
    """Make a folder for this user alone, or check that one that is there is the user's own.

    Args:
        path: The folder; those above it are made as usual.
        shared: Users who trust each other share it: it is made as usual, and not checked.

    Raises:
        PermissionError: It is another user's, or others may write to it; names the user.
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
    """Check that a folder is the user's own; whether it is there.

    Raises:
        PermissionError: It is another user's, or others may write to it; names the user.
    """
    try:
        known = os.lstat(path)
        _check_owner(path, known)
        if stat.S_ISLNK(known.st_mode):  # a link of one's own may lead to another disk
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
    """Make an empty file in place of what is there, which may be a link."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o666 if shared else 0o600))


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


class Wait:
    """A wait for locks that ends once nothing has happened for some time.

    Args:
        seconds: How long nothing may happen.
        progress: What changes as the holder gets on, such as the size of the file that it fetches.
    """

    def __init__(self, seconds: float, progress: Callable[[], object] = lambda: None) -> None:
        self._seconds, self._progress = seconds, progress
        self._began = self._since = time.monotonic()
        self._seen: object = None
        self._said = False

    def once(self, path: str, fd: int) -> None:
        """Wait a moment for a lock on a file.

        Raises:
            TimeoutError: Nothing has happened for too long; names the process that holds the lock.
        """
        now, seen = time.monotonic(), self._progress()
        if seen != self._seen:
            self._seen, self._since = seen, now
        if now - self._since > self._seconds:
            what = f"{path} is locked by {holder_of(fd)}, which did not get on for {self._seconds:g} s"
            raise TimeoutError(f"{what}; end it, or give FileCache more wait_seconds")
        if not self._said and now - self._began > _SAY_AFTER_SECONDS:
            self._said = True
            _log.info("waiting for %s, which is locked by %s", path, holder_of(fd))
        time.sleep(_LOOK_SECONDS)


def holder_of(fd: int) -> str:
    """The process that holds a lock on an open file, as text."""
    inode, found = os.fstat(fd).st_ino, ""
    with contextlib.suppress(OSError), open("/proc/locks", encoding="utf-8") as locks:
        for line in locks:  # "1: FLOCK  ADVISORY  WRITE 708 08:01:2359 0 EOF"; "->" marks one that waits
            words = line.split()
            if words[1] == "FLOCK" and words[5].rpartition(":")[2] == str(inode) and int(words[4]) > 0:
                found = f"process {words[4]}"
                with contextlib.suppress(OSError):
                    found += f" of {_user(os.stat(f'/proc/{words[4]}').st_uid)}"
    return found or "a process that cannot be named here, in another container or on another machine"


def lock(
    path: str, *, shared: bool = False, wait: Wait | None = None, create: bool = False, mode: int = 0o600
) -> LocalFile | None:
    """Lock a file, also against threads; None if there is none, or it is held.

    Args:
        shared: Others may hold such a lock, too.
        wait: How to wait for others; None: not at all.
        create: Make the file if there is none.
        mode: Permissions of a file that is made.
    """
    # A pipe in its place would be waited for without an end.
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
            if os.path.samestat(os.fstat(held.fd), os.stat(path)):
                return held
        except FileNotFoundError:
            pass
        except TimeoutError:
            held.close()
            raise
        held.close()  # it was deleted while we waited
