"""Queues between a loader's processes that write small messages at once, not by a thread of their own.

`multiprocessing.Queue.put` hands each message to a thread, which has to wake up, take Python's lock and write it. For
torch's `DataLoader`, which sends two small messages a step and worker, that costs more than the messages. Here, what
fits into the pipe for sure is written by `put` itself; all else goes the old way::

    put --- at most PIPE_BUF bytes, the pipe is not full ---> pipe
     |                                                          ^
     +--- more ----------------> buffer ---> thread ------------+

Guarantees: `put` never waits for a reader. Messages of one process keep their order: none is written at once while one
before it goes the old way. `get` does not wait for a process that is known to be dead, not even for the rest of a
message.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import select
import struct
import time
from collections.abc import Callable, Iterable
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from multiprocessing.reduction import ForkingPickler
from queue import Empty
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Messages = Queue[Any]
else:
    Messages = Queue

_HEADER_BYTES, _LONG_HEADER_BYTES = 4, 8  # of a message in a pipe; see `multiprocessing.connection`
_READ_BYTES = 1 << 20
_LOOK_SECONDS = 5.0  # between looks at writers of which no end was noticed
_END_SECONDS = 1.0
_LOCK_SECONDS = 1e-3  # another process that writes at once takes a few microseconds


class _Counted:
    """What the thread writes messages with, and how many it has written."""

    def __init__(self, send: Callable[[Any], None]) -> None:
        self._send = send
        self.sent = 0

    def __call__(self, message: Any) -> None:
        self._send(message)
        self.sent += 1


class DirectQueue(Messages):
    """A `multiprocessing.Queue`; see the module."""

    def _reset(self, after_fork: bool = False) -> None:
        """Set up what each process has for itself."""
        inherited: Any = super()
        inherited._reset(after_fork)
        ends: Any = self
        self._readable, self._writable = select.poll(), select.poll()
        self._by_thread, self._send_bytes = 0, _Counted(ends._writer.send_bytes)
        self._died: Callable[[], bool] = _nobody
        self._writers: dict[int, BaseProcess] = {}
        self._end = ends._reader.fileno()
        self._readable.register(self._end, select.POLLIN)
        self._writable.register(ends._writer.fileno(), select.POLLOUT)

    def put(self, obj: Any, block: bool = True, timeout: float | None = None) -> None:
        """Send a message; see `multiprocessing.Queue.put`."""
        if self._by_thread > self._send_bytes.sent or not self._put_at_once(obj):
            self._by_thread += 1
            super().put(obj, block, timeout)

    def _put_at_once(self, obj: Any) -> bool:
        """Write a message to the pipe, if it is small and there is room for it."""
        queue: Any = self
        if queue._closed:
            return False
        try:
            message = ForkingPickler.dumps(obj)
        except Exception:  # which the thread tells of
            return False
        if len(message) + _HEADER_BYTES > select.PIPE_BUF or not queue._wlock.acquire(True, _LOCK_SECONDS):
            return False
        try:
            if not self._writable.poll(0) or not queue._sem.acquire(False):
                return False
            queue._writer.send_bytes(message)
            return True
        finally:
            queue._wlock.release()

    def watch(self, writers: Iterable[BaseProcess], died: Callable[[], bool]) -> None:
        """Have `get` look after the processes that write, as long as there is nothing to read.

        Args:
            writers: The processes.
            died: Whether one ended that should not have: then `get` says at once that there is nothing.
        """
        self._died = died
        self._writers = {writer.sentinel: writer for writer in writers}
        for sentinel in self._writers:
            self._readable.register(sentinel, select.POLLIN)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """The next message; see `multiprocessing.Queue.get`, which makes a new selector for each wait."""
        queue: Any = self
        if not block or timeout is None or queue._closed:
            return super().get(block, timeout)
        deadline = time.monotonic() + timeout
        if not queue._rlock.acquire(True, timeout):
            raise Empty
        try:
            self._wait(deadline)
            (size,) = struct.unpack("!i", self._read(_HEADER_BYTES))
            if size == -1:
                (size,) = struct.unpack("!Q", self._read(_LONG_HEADER_BYTES))
            message = self._read(size)
            queue._sem.release()
        finally:
            queue._rlock.release()
        return ForkingPickler.loads(message)

    def _wait(self, deadline: float | None = None) -> None:
        """Wait until there is something to read.

        Raises:
            Empty: It takes too long, or will never be.
        """
        while True:
            left = _LOOK_SECONDS if deadline is None else max(deadline - time.monotonic(), 0)
            ends = [end for end, _ in self._readable.poll(1000 * min(left, _LOOK_SECONDS))]
            if self._end in ends:
                return
            for end in ends:
                self._readable.unregister(end)
                _wait_for_end(self._writers.pop(end))
            if (not ends and deadline is not None and left <= _LOOK_SECONDS) or self._died():
                raise Empty

    def _read(self, size: int) -> bytes:
        """So many bytes of a message that has begun."""
        pieces: list[bytes] = []
        while size:
            self._wait()
            piece = os.read(self._end, min(size, _READ_BYTES))
            if not piece:
                raise EOFError
            pieces.append(piece)
            size -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _nobody() -> bool:
    return False


def _wait_for_end(process: BaseProcess) -> None:
    """Wait for a process of which the sentinel is ready: that is a little before its exit code is known."""
    deadline = time.monotonic() + _END_SECONDS
    while process.exitcode is None and time.monotonic() < deadline:
        time.sleep(_END_SECONDS / 1000)


def with_direct_queues(context: BaseContext | None, method: str) -> BaseContext:
    """A context, but for its queues; one that the user has made is left as it is.

    Args:
        context: The user's; None is Python's default.
        method: The start method that it stands for.
    """
    plain = multiprocessing.get_context(method)
    if not hasattr(select, "poll") or (context is not None and type(context) is not type(plain)):
        return context or plain
    return _direct(method)


@functools.cache
def _direct(method: str) -> BaseContext:
    kind: type[BaseContext] = type("DirectContext", (type(multiprocessing.get_context(method)),), {"Queue": _queue})
    return kind()


def _queue(context: BaseContext, maxsize: int = 0) -> DirectQueue:
    return DirectQueue(maxsize, ctx=context.get_context())
