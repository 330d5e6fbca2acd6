"""What passes between torch's `DataLoader` and its workers: queues of packets, and a flag, without any lock.

Those of multiprocessing have locks, which a killed process never gives back. Here a message is one packet, which the
kernel takes whole or not at all::

    put --- up to 16 KiB ---------------------> packet --+--> get
     |                                                   |
     +--- more: into a file without a name ---> packet --+    which carries the file's descriptor

Guarantees: a process that is killed leaves no message half sent and no lock held. In the process that built it, a queue
never waits in `put`, and `get` ends as soon as its `Watch` gives up. Messages of one process keep their order.
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
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from queue import Empty
from typing import IO, Any, Protocol

from stream_dataloader._descriptors import above_standard, has_standard
from stream_dataloader._memory.endings import when_gone
from stream_dataloader._memory.shared_memory import SharedMemory

_LINUX = sys.platform == "linux"
_KIND = socket.SOCK_SEQPACKET if _LINUX else socket.SOCK_DGRAM
_PACKET_BYTES = 1 << 14 if _LINUX else 1 << 11
_BUFFER_BYTES = 1 << 20  # of messages on their way; the system may allow less
_DESCRIPTOR_BYTES = socket.CMSG_SPACE(array.array("i", [0]).itemsize)
_TRUNCATED = int(socket.MSG_CTRUNC)
_FULL = (errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS)
_CLOSED = (errno.EBADF, errno.ECONNREFUSED, errno.ECONNRESET, errno.ENOTCONN, errno.EPIPE)  # nobody reads it
_FULL_SECONDS = 0.05  # between looks whether anybody still reads
_END_SECONDS = 1.0  # a process's end shows a little before its exit code
_NOTHING = object()


class Unanswered(BaseException):
    """Nothing will come any more. It passes through torch, which would handle an `Exception`."""


class Watch(Protocol):
    """Looks after those that write, while nothing comes."""

    @property
    def look_seconds(self) -> float:
        """How long nothing may come before it is asked."""

    def gives_up(self, waited_seconds: float) -> bool:
        """Whether nothing is awaited any more; asked when a process has ended, and every `look_seconds`."""


class Flag:
    """An event that nobody waits for: a byte that all processes see."""

    def __init__(self) -> None:
        self._memory = SharedMemory(1)

    def set(self) -> None:
        self._memory.buffer[0] = 1

    def is_set(self) -> bool:
        return bool(self._memory.buffer[0])


class PacketQueue:
    """Messages from many processes to one, with the face of `multiprocessing.Queue`."""

    def __init__(self, context: PacketContext, ended: Flag) -> None:
        self._context: PacketContext | None = context
        self._owner = os.getpid()
        self._ended = ended
        with above_standard():
            self._reader, self._writer = socket.socketpair(socket.AF_UNIX, _KIND)
        self._writer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        self._open()

    def _open(self) -> None:
        """Set up what each process has for itself."""
        self._has_standard = has_standard()
        for end in (self._reader, self._writer):
            end.setblocking(False)
            when_gone(self, functools.partial(_socket.socket.close, end))  # of C
        self._buffer = bytearray(_PACKET_BYTES)
        self._unsent: deque[tuple[bytes, IO[bytes] | None]] = deque()

    def put(self, message: Any) -> None:
        """Send a message. Where the queue was built, what there is no room for is sent later."""
        pickled = pickle.dumps(message)  # a `Message` has pickled itself
        self._unsent.append((b"_", _file_of(pickled)) if len(pickled) > _PACKET_BYTES else (pickled, None))
        while not self.send_all():
            if self._context is not None and self._owner == os.getpid():
                self._context.full.add(self)
                return
            if self._ended.is_set():
                return
            _is_ready(self._writer, select.POLLOUT, _FULL_SECONDS)

    def send_all(self) -> bool:
        """Send what is still to be sent; False if there is no room for it."""
        while self._unsent:
            packet, file = self._unsent[0]
            try:
                if file is None:
                    self._writer.send(packet)
                else:
                    socket.send_fds(self._writer, [packet], [file.fileno()])
            except OSError as error:
                if error.errno in _FULL:
                    return False
                if error.errno not in _CLOSED:
                    raise
            self._unsent.popleft()
            if file is not None:
                file.close()
        return True

    def get(self, timeout: float | None = None) -> Any:
        """The next message. Where the queue was built, its `Watch` limits the wait."""
        begin = 0.0
        while (message := self._receive()) is _NOTHING:
            begin = begin or time.monotonic()
            if self._context is not None and self._owner == os.getpid():
                self._context.wait(self._reader.fileno(), begin)
            elif not _is_ready(self._reader, select.POLLIN, timeout):
                raise Empty
        return message

    def _receive(self) -> Any:
        if self._has_standard:
            return self._receive_any()
        with above_standard():  # for the file that is received, and for memory of torch that a message opens
            return self._receive_any()

    def _receive_any(self) -> Any:
        try:
            size, with_it, flags, _ = self._reader.recvmsg_into([self._buffer], _DESCRIPTOR_BYTES)
        except BlockingIOError:
            return _NOTHING
        if flags & _TRUNCATED:
            raise OSError(errno.EMFILE, "a message from a worker cannot be taken, as too many files are open")
        if not with_it:
            return pickle.loads(memoryview(self._buffer)[:size])
        (descriptor,) = array.array("i", with_it[0][2])
        try:
            with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as pickled:
                return pickle.loads(pickled)
        finally:
            os.close(descriptor)

    def cancel_join_thread(self) -> None:
        """There is no thread."""

    def close(self) -> None:
        """Nothing is sent any more in this process; what is open is closed with the last reference."""
        self._unsent.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("_owner", "_ended", "_reader", "_writer")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _context=None)
        self._open()


class PacketContext(BaseContext):
    """A context that starts processes as `base` does, with queues of this module."""

    def __init__(self, base: BaseContext) -> None:
        self._base: Any = base
        self._ended = Flag()
        self._poll = select.poll()
        self._awaited: dict[int, BaseProcess | None] = {}
        self.processes: list[BaseProcess] = []
        self.full: set[PacketQueue] = set()  # queues that have to send what there was no room for
        self.watch: Watch  # says how long to wait; to be set before anything is awaited

    def Process(self, *args: Any, **options: Any) -> BaseProcess:  # noqa: N802
        options["target"] = functools.partial(run_untraced, options["target"])
        process: BaseProcess = self._base.Process(*args, **options)
        self.processes.append(process)
        return process

    def Queue(self, maxsize: int = 0) -> Any:  # noqa: ARG002, N802
        return PacketQueue(self, self._ended)

    def Event(self) -> Any:  # noqa: N802
        """The one event; set when nobody reads any more."""
        return self._ended

    def get_start_method(self, allow_none: bool = False) -> Any:
        return self._base.get_start_method(allow_none)

    def forget(self) -> None:
        self.processes.clear()
        self._awaited.clear()
        self.full.clear()

    def _await(self, descriptor: int, process: BaseProcess | None = None) -> None:
        self._awaited[descriptor] = process
        self._poll.register(descriptor, select.POLLIN)

    def wait(self, reader: int, begin: float) -> None:
        """Wait for something to read; raises `Unanswered` if the `Watch` gives up."""
        if not self._awaited:
            self._await(reader)
            for one in self.processes:
                self._await(one.sentinel, one)
        self.full = {queue for queue in self.full if not queue.send_all()}
        ready = [descriptor for descriptor, _ in self._poll.poll(1000 * self.watch.look_seconds)]
        if reader in ready:
            return
        for descriptor in ready:
            if (process := self._awaited[descriptor]) is not None:
                _wait_for_end(process)
        if not self.watch.gives_up(time.monotonic() - begin):
            for descriptor in ready:  # it was done
                self._poll.unregister(descriptor)
        elif not any(descriptor == reader for descriptor, _ in self._poll.poll(0)):
            raise Unanswered


def run_untraced(run: Callable[..., object], *args: Any) -> None:
    """Run what begins with torch's seeding: for three kinds of devices it formats the stack, half of a start's time."""
    sys.tracebacklimit = 0  # `WorkerInit` takes it back
    run(*args)


def _is_ready(end: socket.socket, event: int, seconds: float | None) -> bool:
    poll = select.poll()  # `select.select` has a limit of 1024 descriptors
    poll.register(end, event)
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
