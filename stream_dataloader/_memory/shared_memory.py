"""Memory that a loader's processes share, free of `/dev/shm` and of names.

`SharedFile` is an anonymous file, which the kernel frees with its last user. It also carries locks, which the kernel
frees when a process dies: `fcntl.lockf`.

Small blocks of memory lie side by side in one file, and each locks its own bytes::

    arena   | rows | board | list of sources | rows | ...             a descriptor for some hundred loaders

What was handed out is never handed out again: a worker of a loader that is gone may still write to it.
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

from stream_dataloader._descriptors import above_standard
from stream_dataloader._memory.endings import WeakItems, deliver, interrupts_held, when_gone

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # pragma: no cover - no POSIX: num_workers=0 still works
    fcntl = None


#: What the system shows for files of small blocks.
BLOCKS = "stream_dataloader_blocks"

_AGAIN_SECONDS = 50e-6
_ARENA_BYTES = 1 << 26  # taken from the system as they are written to
_SMALL_BYTES = 1 << 18  # blocks up to here share arenas
_ALIGNMENT = 64


def anonymous_file(label: str = "stream_dataloader") -> int:
    """A descriptor of an empty, nameless file in memory; OSError if there is none."""
    if hasattr(os, "memfd_create"):
        with above_standard():
            return os.memfd_create(label, os.MFD_CLOEXEC)
    try:
        import _posixshmem  # what multiprocessing.shared_memory is made of, which cannot grow what it made
    except ImportError:
        raise OSError("there is neither memfd_create nor POSIX shared memory") from None
    name = f"/stream_{secrets.token_hex(8)}"
    with above_standard():
        fd: int = _posixshmem.shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    _posixshmem.shm_unlink(name)
    return fd


class SharedFile:
    """An anonymous file, empty at first, shared with workers, and a lock that covers it."""

    _start = _length = 0  # of the bytes that are locked; without a length: all

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

        Where memory is limited (`/dev/shm`) all of it is taken now: a page that the system cannot give is a SIGBUS.

        Raises:
            OSError: There is not enough.
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
            if fcntl is None:  # pragma: no cover - no workers without it
                yield
                return
            self._acquire(fcntl)
            try:
                yield
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN, self._length, self._start)

    def _acquire(self, fcntl: ModuleType) -> None:
        """Lock the file; ask again if the kernel reports a deadlock (EDEADLK), which here is never one.

        The kernel looks at processes, not at threads: it sees a circle where two processes each hold one of two locks
        in one thread and wait for the other in a second one.
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
    """Another thread may have held one, which is not in the process that was forked."""
    global _taking
    _taking = threading.Lock()
    for file in list(_files):
        file._thread_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_thread_locks)


def _attach_file(handle: Any) -> SharedFile:
    return SharedFile(handle.detach())


class _Arena(SharedFile):
    """A file of one size, new or attached, that blocks are handed out of."""

    def __init__(self, size: int | None, fd: int | None = None) -> None:
        super().__init__(fd)
        if size is not None:
            os.ftruncate(self._fd, size)
        self.map_ = self.map()
        self.owner = os.getpid()  # a forked process has arenas of its own
        self._used = 0

    def _make(self) -> int:
        try:
            return anonymous_file(BLOCKS)
        except OSError:  # small blocks may lie on a disk: the page cache is shared as well
            with above_standard(), tempfile.TemporaryFile() as file:
                return os.dup(file.fileno())

    def take(self, size: int) -> int | None:
        """Where a new block begins; None if there is no room for it."""
        start = self._used
        if self.owner != os.getpid() or start + size > len(self.map_):
            return None
        self._used = start + -(-size // _ALIGNMENT) * _ALIGNMENT
        return start


_newest: _Arena | None = None  # where small blocks are handed out
_attached: dict[tuple[int, int], _Arena] = {}  # by device and inode: those that this process was started with
_taking = threading.Lock()


def _take(size: int) -> tuple[_Arena, int]:
    """An arena, and where in it a new block begins."""
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
    """A block of zeroed memory of a known size, new or at a place."""

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
        """How far behind `start` the first such byte lies, before `stop`; None if there is none."""
        found = self._arena.map_.find(bytes((byte,)), self._start + start, self._start + stop)
        return found - self._start - start if found >= 0 else None

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _attach_memory, (_handle_of(self._fd), self._start, self.size)


_handles: tuple[weakref.ref[Any], dict[int, Any]] | None = None  # of the process that is being started


def _handle_of(fd: int) -> Any:
    """What a process finds a descriptor by. One that is being started gets each once."""
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
    """A block of an arena that this process was started with."""
    fd = handle.detach()
    status = os.fstat(fd)
    key = status.st_dev, status.st_ino
    if (arena := _attached.get(key)) is None:
        arena = _attached[key] = _Arena(None, fd)
    elif arena._fd != fd:
        os.close(fd)  # which gives up locks on this file: none is held while a process starts
    return SharedMemory(size, (arena, start))
