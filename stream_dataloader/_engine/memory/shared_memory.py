"""Memory that a loader's processes share, without `/dev/shm` and without names.

`SharedFile` is an anonymous file, which the kernel frees with its last user. It also has locks, which the kernel
releases when a process dies: `fcntl.lockf`.

Small blocks of memory lie side by side in one file, and each locks its own bytes::

    arena   | rows | status | list of sources | rows | ...            a descriptor for some hundred loaders

A block is never reused, because a worker of a loader that is gone may still write to it.
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
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from types import ModuleType
from typing import Any

from stream_dataloader._engine.descriptors import above_standard, limits_named
from stream_dataloader._engine.memory.endings import WeakItems, interrupts_held, when_gone

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # pragma: no cover - without POSIX, num_workers=0 still works
    fcntl = None


#: Name that the system shows for files of small blocks.
BLOCKS = "stream_dataloader_blocks"

_AGAIN_SECONDS = 50e-6
_ARENA_BYTES = 1 << 26  # address space; memory is taken from the system page by page, when written to
_SMALL_BYTES = 1 << 18  # blocks up to this size share arenas
_ALIGNMENT = 64


def anonymous_file(label: str = "stream_dataloader") -> int:
    """Create an empty, nameless file in memory and return its descriptor; raise OSError if the system has none."""
    if hasattr(os, "memfd_create"):
        with above_standard():
            return os.memfd_create(label, os.MFD_CLOEXEC)
    try:
        import _posixshmem  # multiprocessing.shared_memory is built on this, but cannot grow its files
    except ImportError:
        raise OSError("there is neither memfd_create nor POSIX shared memory") from None
    name = f"/stream_{secrets.token_hex(8)}"
    with above_standard():
        fd: int = _posixshmem.shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    _posixshmem.shm_unlink(name)
    return fd


class SharedFile:
    """An anonymous file, empty at first, shared with workers, with a lock that covers it."""

    _start = _length = 0  # range of bytes that the lock covers; length 0 means the whole file

    def __init__(self, fd: int | None = None) -> None:
        # An interrupt between the creation of the descriptor and `when_gone` would leak the descriptor.
        with interrupts_held():
            self._fd = self._make() if fd is None else fd
            when_gone(self, functools.partial(os.close, self._fd))
        self._thread_lock = threading.Lock()
        _files.add(self)

    def _make(self) -> int:
        return anonymous_file()

    def grow(self, size: int) -> None:
        """Make room for `size` bytes, all zero; may be called once.

        Where memory is limited (`/dev/shm`), all of it is taken now: a write to a page that the system cannot provide
        later would be a SIGBUS.

        Raises:
            OSError: There is not enough memory.
        """
        os.ftruncate(self._fd, size)
        if not hasattr(os, "memfd_create") and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._fd, 0, size)

    def map(self) -> mmap.mmap:
        with above_standard():  # mmap duplicates the descriptor
            return mmap.mmap(self._fd, os.fstat(self._fd).st_size)

    @contextmanager
    def locked(self) -> Iterator[None]:
        with self._thread_lock:
            if fcntl is None:  # pragma: no cover - without it there are no workers
                yield
                return
            self._acquire(fcntl)
            try:
                yield
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN, self._length, self._start)

    def _acquire(self, fcntl: ModuleType) -> None:
        """Lock the file; try again if the kernel reports a deadlock (EDEADLK), which is a false alarm here.

        The kernel looks at processes, not at threads. It sees a cycle if two processes each hold one of two locks in
        one thread and wait for the other lock in a second thread.
        """
        while True:
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX, self._length, self._start)
                return
            except OSError as error:
                if error.errno != errno.EDEADLK:
                    raise
                time.sleep(_AGAIN_SECONDS)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _attach_file, (reduction.DupFd(self._fd),)


_files: WeakItems[SharedFile] = WeakItems()


def _renew_thread_locks() -> None:
    """Make new thread locks in a forked process, where a thread of the parent may have held the old ones."""
    global _taking
    _taking = threading.Lock()
    for file in list(_files):
        file._thread_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_thread_locks)


def _attach_file(handle: Any) -> SharedFile:
    return SharedFile(handle.detach())


class _Arena(SharedFile):
    """A file of fixed size, new or attached, from which blocks are handed out."""

    def __init__(self, size: int | None, fd: int | None = None) -> None:
        with limits_named(f"{size or 0:,} bytes of memory that processes share"):
            super().__init__(fd)
            if size is not None:
                os.ftruncate(self._fd, size)
            self.map_ = self.map()
        self.owner = os.getpid()  # a forked process has arenas of its own
        self._used = 0

    def _make(self) -> int:
        try:
            return anonymous_file(BLOCKS)
        except OSError:  # a file on disk will do for small blocks, as its page cache is shared, too
            with above_standard(), tempfile.TemporaryFile() as file:
                return os.dup(file.fileno())

    def take(self, size: int) -> int | None:
        """Take a new block and return its start; None if there is no room for it."""
        start = self._used
        if self.owner != os.getpid() or start + size > len(self.map_):
            return None
        self._used = start + -(-size // _ALIGNMENT) * _ALIGNMENT
        return start


_newest: _Arena | None = None  # the arena that small blocks are taken from
_attached: dict[tuple[int, int], _Arena] = {}  # arenas that this process was started with, by device and inode
_taking = threading.Lock()


def _take(size: int) -> tuple[_Arena, int]:
    """Take a new block: return its arena and its start in it."""
    global _newest
    if size > _SMALL_BYTES:
        return _Arena(size), 0
    with _taking:
        start = None if _newest is None else _newest.take(size)
        if _newest is None or start is None:
            _newest = _Arena(_ARENA_BYTES)
            start = _newest.take(size)
        assert start is not None
        return _newest, start


class SharedMemory(SharedFile):
    """A block of zeroed memory of a known size, new or at a given place."""

    def __init__(self, size: int, place: tuple[_Arena, int] | None = None) -> None:
        self.size = self._length = max(size, 1)
        self._arena, self._start = place or _take(self.size)
        self._fd = self._arena._fd
        self._thread_lock = threading.Lock()
        _files.add(self)

    @property
    def buffer(self) -> memoryview:
        return memoryview(self._arena.map_)[self._start : self._start + self.size]

    def find(self, byte: int, start: int, stop: int) -> int | None:
        """Return the offset from `start` of the first such byte before `stop`; None if there is none."""
        found = self._arena.map_.find(bytes((byte,)), self._start + start, self._start + stop)
        return found - self._start - start if found >= 0 else None

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _attach_memory, (_handle_of(self._fd), self._start, self.size)


_handles: tuple[weakref.ref[Any], dict[int, Any]] | None = None  # of the process that is being started


def _handle_of(fd: int) -> Any:
    """Return the handle with which another process finds a descriptor.

    A process that is being started gets each descriptor once, although many blocks refer to the same one.
    """
    global _handles
    starting = get_spawning_popen()
    if starting is None:
        return reduction.DupFd(fd)
    if _handles is None or _handles[0]() is not starting:
        _handles = weakref.ref(starting), {}
    if fd not in _handles[1]:
        _handles[1][fd] = reduction.DupFd(fd)
    return _handles[1][fd]


def _attach_memory(handle: Any, start: int, size: int) -> SharedMemory:
    """Return a block of an arena that this process was started with."""
    fd = handle.detach()
    status = os.fstat(fd)
    key = status.st_dev, status.st_ino
    if (arena := _attached.get(key)) is None:
        arena = _attached[key] = _Arena(None, fd)
    elif arena._fd != fd:
        os.close(fd)  # releases all locks of this process on the file; while it starts, it holds none
    return SharedMemory(size, (arena, start))
