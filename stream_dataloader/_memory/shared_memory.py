"""Memory that a loader's processes share, free of `/dev/shm` and of names.

`SharedFile` is an anonymous file: `memfd_create` on Linux, elsewhere a POSIX shared-memory object that loses
its name at once. Forked workers inherit it; `spawn` and `forkserver` workers are passed its descriptor while
they start. The kernel frees it with its last user, however that one ends.

The file also carries a lock: `fcntl.lockf` locks belong to a process and are freed by the kernel when it
dies, even by SIGKILL, so a dead worker cannot leave the others locked out.
"""

from __future__ import annotations

import errno
import functools
import mmap
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import reduction
from types import ModuleType
from typing import Any

import numpy as np

from stream_dataloader._memory.endings import WeakItems, when_gone
from stream_dataloader._memory.interrupts import deliver, interrupts_held

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # pragma: no cover - no POSIX: num_workers=0 still works
    fcntl = None


_AGAIN_SECONDS = 50e-6


def anonymous_file() -> int:
    """A descriptor of an empty file in memory, without a name.

    Raises:
        OSError: The system offers none.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create("stream_dataloader", os.MFD_CLOEXEC)
    try:
        import _posixshmem  # what multiprocessing.shared_memory is made of, which cannot grow what it made
    except ImportError:
        raise OSError("there is neither memfd_create nor POSIX shared memory") from None
    name = f"/stream_{secrets.token_hex(8)}"
    fd: int = _posixshmem.shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    _posixshmem.shm_unlink(name)
    return fd


class SharedFile:
    """An anonymous file, empty at first, shared with workers, and a lock that covers it."""

    def __init__(self, fd: int | None = None) -> None:
        with interrupts_held("fork") as interrupts:  # nobody would close what has no owner yet
            self._fd = self._make() if fd is None else fd
            when_gone(self, functools.partial(os.close, self._fd))
        self._thread_lock = threading.Lock()
        _files.add(self)
        deliver(interrupts)

    def _make(self) -> int:
        return anonymous_file()

    def grow(self, size: int) -> None:
        """Make room for `size` bytes, all zero; once.

        With `memfd_create` the system gives memory as pages are written. Where memory is limited (`/dev/shm`) all of it
        is taken now, as writing to a page that the system cannot give is a fatal SIGBUS.

        Raises:
            OSError: There is not enough.
        """
        os.ftruncate(self._fd, size)
        if not hasattr(os, "memfd_create") and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._fd, 0, size)

    def map(self) -> mmap.mmap:
        """The file's memory, which lives on its own from now on."""
        return mmap.mmap(self._fd, os.fstat(self._fd).st_size)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other threads and other processes out."""
        with self._thread_lock:
            if fcntl is None:  # pragma: no cover - no workers without it
                yield
                return
            self._acquire(fcntl)
            try:
                yield
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def _acquire(self, fcntl: ModuleType) -> None:
        """Lock the file; ask again if the kernel reports a deadlock (EDEADLK), which here is never one.

        The kernel looks at processes, not at threads. Suppose one process holds this lock in one thread and waits for
        another lock in a second thread, and another process does the opposite. The kernel sees a circle, but each
        thread that holds a lock releases it soon.
        """
        while True:
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX)
                return
            except OSError as error:
                if error.errno != errno.EDEADLK:
                    raise
                time.sleep(_AGAIN_SECONDS)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _attach_file, (reduction.DupFd(self._fd),)


_files: WeakItems[SharedFile] = WeakItems()


def _renew_thread_locks() -> None:
    """Another thread may have held one, which is not in the process that was forked."""
    for file in list(_files):
        file._thread_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_thread_locks)


def _attach_file(handle: Any) -> SharedFile:
    return SharedFile(handle.detach())


class SharedMemory(SharedFile):
    """A block of zeroed memory of a size that is known beforehand.

    Args:
        size: Bytes.
    """

    def __init__(self, size: int, fd: int | None = None) -> None:
        self.size = max(size, 1)
        super().__init__(fd)
        self._map = mmap.mmap(self._fd, self.size)

    def _make(self) -> int:
        try:
            fd = anonymous_file()
        except OSError:  # a small block may lie on a disk: the page cache is shared as well
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, self.size)
        return fd

    @property
    def buffer(self) -> mmap.mmap:
        """The memory as it is, for `fields.Carver`."""
        return self._map

    def array(self, dtype: Any = np.int64) -> np.ndarray[Any, Any]:
        """The memory as a flat numpy array, which keeps the mapping alive on its own."""
        return np.frombuffer(self._map, dtype=dtype, count=self.size // np.dtype(dtype).itemsize)

    def find(self, byte: int, start: int, stop: int) -> int | None:
        """How far behind `start` the first such byte lies, before `stop`; None if there is none."""
        found = self._map.find(bytes((byte,)), start, stop)
        return found - start if found >= 0 else None

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _attach_memory, (reduction.DupFd(self._fd), self.size)


def _attach_memory(handle: Any, size: int) -> SharedMemory:
    return SharedMemory(size, handle.detach())
