"""Locks on files, between any processes and threads; shared ones admit other shared ones.

Guarantee: a lock is released when its holder dies, also by SIGKILL. A file may be deleted while it is locked; the next
`lock` makes a new one.
"""

from __future__ import annotations

import fcntl
import os

__all__ = ["FileLock", "lock"]


class FileLock:
    """A lock that is held, until `close`."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._pid = os.getpid()

    def close(self) -> None:
        """Release the lock; also a second time."""
        fd, self.fd = self.fd, -1
        if fd < 0:
            return
        if os.getpid() == self._pid:  # a forked copy must not release its parent's lock
            # Closing is not enough: the lock stays while a forked process has a copy of the descriptor.
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def lock(path: str, *, shared: bool = False, wait: bool = True, create: bool = False) -> FileLock | None:
    """Lock a file, which is created if `create`; None if there is none, or if it is held and `wait` is False."""
    flags = (os.O_RDONLY if shared else os.O_RDWR) | (os.O_CREAT if create else 0)
    while True:
        try:
            held = FileLock(os.open(path, flags, 0o666))
        except FileNotFoundError:
            if create:
                raise
            return None
        try:
            fcntl.flock(held.fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
            if os.path.samestat(os.fstat(held.fd), os.stat(path)):
                return held
        except BlockingIOError:
            held.close()
            return None
        except FileNotFoundError:
            pass
        except BaseException:
            held.close()
            raise
        held.close()  # it was deleted while we waited
