"""Memory that a loader's processes share, free of `/dev/shm` and of names.

`SharedMemory` is an anonymous file: `memfd_create` on Linux, an unlinked temporary file elsewhere. Forked
workers inherit it; `spawn` and `forkserver` workers are passed its descriptor while they start. The kernel
frees it with its last user, however that one ends.

The file also carries locks: `fcntl.lockf` locks belong to a process and are freed by the kernel when it
dies, even by SIGKILL, so a dead worker cannot leave the others locked out.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import reduction
from types import ModuleType
from typing import Any

import numpy as np

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # pragma: no cover - no POSIX: num_workers=0 still works
    fcntl = None


def _anonymous_file(size: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("stream_dataloader", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd


class SharedMemory:
    """A block of zeroed memory shared with workers, and a lock that covers it.

    Args:
        size: Bytes; memory is taken from the system as pages are written, not before.
    """

    def __init__(self, size: int, fd: int | None = None) -> None:
        self.size = max(size, 1)
        self._fd = _anonymous_file(self.size) if fd is None else fd
        self._close = weakref.finalize(self, os.close, self._fd)
        self._close.atexit = False
        self._map = mmap.mmap(self._fd, self.size)
        self._thread_lock = threading.Lock()

    def array(self, dtype: Any = np.int64) -> np.ndarray[Any, Any]:
        """The memory as a flat numpy array, which keeps the mapping alive on its own."""
        return np.frombuffer(self._map, dtype=dtype, count=self.size // np.dtype(dtype).itemsize)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other threads and other processes out."""
        with self._thread_lock:
            if fcntl is None:  # pragma: no cover - no workers without it
                yield
                return
            fcntl.lockf(self._fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def __reduce__(self) -> tuple[Callable[..., SharedMemory], tuple[Any, ...]]:
        return _attach, (reduction.DupFd(self._fd), self.size)


def _attach(handle: Any, size: int) -> SharedMemory:
    return SharedMemory(size, handle.detach())
