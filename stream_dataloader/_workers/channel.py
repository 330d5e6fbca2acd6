"""Channels: how the loader and one reader of a worker talk. Each has one writer at each end, so it needs no lock.

::

    loader -> worker    Begin     CREDIT: read up to a step    CLOSE     EXIT
    worker -> loader    READY     PARTS, packed, wish     FAILED, error         ENDED

Between processes a message is one packet of a socket, which the kernel takes whole or not at all::

    send --- up to 16 KiB ---------------------> packet --+--> receive
      |                                                   |
      +--- more: into a file without a name ---> packet --+    which carries the file's descriptor

Guarantees: a process that is killed leaves no message half sent, and can spoil only its own channel. The loader never
waits in `send`. A worker that waits for room notices that its parts are not wanted any more. Messages keep their order.
"""

from __future__ import annotations

import _socket
import array
import errno
import functools
import mmap
import os
import pickle
import select
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from queue import Empty, SimpleQueue
from typing import IO, Any, NamedTuple, TypeAlias

from stream_dataloader._descriptors import above_standard, has_standard
from stream_dataloader._memory.endings import when_gone
from stream_dataloader._memory.pickling import dumps_by_value, mentions_hidden
from stream_dataloader._reading.plan import Recovery, Start

_LINUX = sys.platform == "linux"
_KIND = socket.SOCK_SEQPACKET if _LINUX else socket.SOCK_DGRAM
_PACKET_BYTES = 1 << 14 if _LINUX else 1 << 11
_BUFFER_BYTES = 1 << 20  # of messages on their way; the system may allow less
_DESCRIPTOR_BYTES = socket.CMSG_SPACE(array.array("i", [0]).itemsize)
_FULL = (errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS)
_CLOSED = (errno.EBADF, errno.ECONNREFUSED, errno.ECONNRESET, errno.ENOTCONN, errno.EPIPE)  # nobody reads it
_FULL_SECONDS = 0.05  # between looks for room, where descriptors and not bytes are too many
_END_SECONDS = 1.0  # a process's end shows a little before its exit code

CLOSE, EXIT = -1, -2  # to a worker; a number from 0 on is credit
READY, PARTS, FAILED, ENDED = range(4)  # from a worker; the first of a tuple

#: A message from a reader, by its number.
Mail: TypeAlias = tuple[int, tuple[Any, ...]]


class Begin(NamedTuple):
    """Tells a reader to read from a place on.

    Attributes:
        session: The number of the iteration, among those of the pool.
        start: The place, of the reader's member.
        recovery: What is different after a worker died.
        limit: The step to read up to, as credit.
        seed: Seeds the global generators of a worker process that is kept, beside its number.
    """

    session: int
    start: Start
    recovery: Recovery
    limit: int
    seed: int


class Port:
    """A worker's end of a channel."""

    def __init__(self) -> None:
        self._inbox: deque[Any] = deque()

    def _next(self, seconds: float | None) -> Any:
        """The next message; None if none came in time."""
        raise NotImplementedError

    def receive(self) -> Any:
        """The next message; waits for it."""
        return self._inbox.popleft() if self._inbox else self._next(None)

    def has_mail(self) -> bool:
        """Whether `receive` need not wait."""
        while (message := self._next(0)) is not None:
            self._inbox.append(message)
            if message == EXIT:
                break
        return bool(self._inbox)

    def is_closed(self) -> bool:
        """Whether the session that is read is not wanted any more."""
        return self.has_mail() and any(type(message) is int and message < 0 for message in self._inbox)

    def send(self, message: tuple[Any, ...] | bytes) -> bool:
        """Send a message, maybe pickled; False if the session is not wanted any more, and there is no room."""
        raise NotImplementedError


class ThreadPort(Port):
    """A thread's end of a channel."""

    def __init__(self, number: int, mail: SimpleQueue[Mail]) -> None:
        super().__init__()
        self._number, self._mail = number, mail
        self.orders: SimpleQueue[Any] = SimpleQueue()

    def _next(self, seconds: float | None) -> Any:
        try:
            return self.orders.get(timeout=seconds) if seconds != 0 else self.orders.get_nowait()
        except Empty:
            return None

    def send(self, message: Any) -> bool:
        self._mail.put((self._number, message))
        return True


class ThreadMail:
    """The loader's end of the channels of threads."""

    def __init__(self, readers: int) -> None:
        self._mail: SimpleQueue[Mail] = SimpleQueue()
        self.ports = [ThreadPort(number, self._mail) for number in range(readers)]

    def send(self, reader: int, message: Any) -> None:
        self.ports[reader].orders.put(message)

    def get(self, seconds: float) -> Mail | None:
        """The next message; None if none came in time."""
        try:
            return self._mail.get(timeout=seconds)
        except Empty:
            return None


class _End:
    """One end of a socket that carries packets."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._open()

    def _open(self) -> None:
        self._end.setblocking(False)
        when_gone(self, functools.partial(_socket.socket.close, self._end))  # of C
        self._buffer = bytearray(_PACKET_BYTES)
        self._has_standard = has_standard()
        self._unsent: deque[tuple[bytes, IO[bytes] | None]] = deque()
        self.fileno = self._end.fileno

    def close(self) -> None:
        self._end.close()

    def put(self, pickled: bytes) -> None:
        """Have a message sent by `flush`."""
        self._unsent.append((b"_", _file_of(pickled)) if len(pickled) > _PACKET_BYTES else (pickled, None))

    def flush(self) -> bool:
        """Send what is still to be sent; False if there is no room for it."""
        while self._unsent:
            packet, file = self._unsent[0]
            try:
                if file is None:
                    self._end.send(packet)
                else:
                    socket.send_fds(self._end, [packet], [file.fileno()])
            except OSError as error:
                if error.errno in _FULL:
                    return False
                if error.errno not in _CLOSED:
                    raise
            self._unsent.popleft()
            if file is not None:
                file.close()
        return True

    def drop_unsent(self) -> None:
        self._unsent.clear()

    def take(self) -> Any:
        """The next message; None if there is none, EOFError if none will come."""
        if self._has_standard:
            return self._take_any()
        with above_standard():  # for the file that is received, and for memory of torch that a message opens
            return self._take_any()

    def _take_any(self) -> Any:
        try:
            size, with_it, flags, _ = self._end.recvmsg_into([self._buffer], _DESCRIPTOR_BYTES)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            raise EOFError from None
        if flags & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, "a message from a worker cannot be taken, as too many files are open")
        if not size:
            raise EOFError
        if not with_it:
            return _loads(memoryview(self._buffer)[:size])
        (descriptor,) = array.array("i", with_it[0][2])
        try:
            with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as pickled:
                return _loads(pickled)
        finally:
            os.close(descriptor)

    def __getstate__(self) -> dict[str, Any]:
        return {"_end": self._end}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()


def _dumps(message: Any) -> bytes:
    try:
        pickled = pickle.dumps(message)
    except Exception:
        return dumps_by_value(message)
    return dumps_by_value(message) if mentions_hidden(pickled) else pickled


def _loads(pickled: Any) -> Any:
    try:
        return pickle.loads(pickled)
    except Exception as error:
        return FAILED, Unreadable(error)


class Unreadable(NamedTuple):
    """What unpickling a message raised."""

    error: Exception


class ProcessPort(Port):
    """A worker process's end of a channel."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__()
        self._end = _End(end)

    def close(self) -> None:
        self._end.close()

    def _next(self, seconds: float | None) -> Any:
        try:
            while (message := self._end.take()) is None:
                if seconds == 0:
                    return None
                _is_ready(self._end, select.POLLIN, seconds)
        except EOFError:  # the loader is gone
            return EXIT
        return message

    def send(self, message: tuple[Any, ...] | bytes) -> bool:
        self._end.put(message if isinstance(message, bytes) else pickle.dumps(message))
        while not self._end.flush():
            if self.is_closed():
                self._end.drop_unsent()
                return False
            _is_ready(self._end, select.POLLOUT | select.POLLIN, _FULL_SECONDS)
        return True


class ProcessMail:
    """The loader's ends of the channels of worker processes; it also sees their ends."""

    def __init__(self, readers: int) -> None:
        self.processes: list[BaseProcess] = []
        self.ports: list[ProcessPort] = []
        self._ends: list[_End] = []
        self._turn = threading.RLock()  # one thread may end the workers while another reads
        self._ready: deque[int] = deque()  # readers that have sent something
        self._poll = select.poll()
        self._numbers: dict[int, int] = {}  # of readers, by descriptors
        self._awaited: dict[int, BaseProcess] = {}
        for number in range(readers):
            with above_standard():
                here, there = socket.socketpair(socket.AF_UNIX, _KIND)
            for end in (here, there):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            self._ends.append(_End(here))
            self.ports.append(ProcessPort(there))
            self._numbers[here.fileno()] = number
            self._poll.register(here, select.POLLIN)

    def close_in_worker(self, own: Sequence[ProcessPort]) -> None:
        """In a worker that was forked, close what is the loader's, and other workers'."""
        for end in self._ends:
            end.close()
        for port in self.ports:
            if port not in own:
                port.close()

    def watch(self, process: BaseProcess) -> None:
        """Notice the end of a process."""
        self._awaited[process.sentinel] = process
        self._poll.register(process.sentinel, select.POLLIN)

    def send(self, reader: int, message: Any) -> None:
        pickled = _dumps(message)
        with self._turn:
            self._ends[reader].put(pickled)
            self._ends[reader].flush()

    def get(self, seconds: float) -> Mail | None:
        """The next message; None if none came in time, or a process ended and left none."""
        while True:
            while self._ready:
                number = self._ready.popleft()
                try:
                    message = self._ends[number].take()
                except EOFError:
                    self._poll.unregister(self._ends[number])
                    continue
                if message is not None:
                    return number, message
            with self._turn:
                for end in self._ends:
                    end.flush()
            found = [descriptor for descriptor, _ in self._poll.poll(1000 * seconds)]
            self._ready.extend(self._numbers[descriptor] for descriptor in found if descriptor in self._numbers)
            ended = [descriptor for descriptor in found if descriptor in self._awaited]
            for descriptor in ended:
                _wait_for_end(self._awaited[descriptor])
            if not self._ready:
                return None


def _is_ready(end: _End, event: int, seconds: float | None) -> bool:
    poll = select.poll()  # `select.select` has a limit of 1024 descriptors
    poll.register(end.fileno(), event)
    return bool(poll.poll(None if seconds is None else 1000 * seconds))


def _file_of(content: bytes) -> IO[bytes]:
    memory = hasattr(os, "memfd_create")
    with above_standard():
        file: IO[bytes] = open(os.memfd_create("message"), "wb") if memory else tempfile.TemporaryFile()  # noqa: SIM115
    try:
        file.write(content)
        file.flush()
    except BaseException:
        file.close()
        raise
    return file


def _wait_for_end(process: BaseProcess) -> None:
    """Wait until the exit code is known of a process whose sentinel is ready."""
    deadline = time.monotonic() + _END_SECONDS
    while process.exitcode is None and time.monotonic() < deadline:
        time.sleep(_END_SECONDS / 1000)
