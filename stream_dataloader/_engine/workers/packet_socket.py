"""A socket end that carries messages as packets, which the kernel takes whole or not at all.

::

    put, flush --- up to 16 KiB ---------------------> packet --+--> take
      |                                                         |
      +--- more: into a file without a name ---------> packet --+    which carries the file's descriptor

Guarantees: nothing here waits, and messages keep their order. A process that is killed leaves no message half sent.
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
from collections import deque
from typing import IO, Any, NamedTuple

from stream_dataloader._engine.descriptors import above_standard, has_standard
from stream_dataloader._engine.memory.endings import when_gone

_LINUX = sys.platform == "linux"
_KIND = socket.SOCK_SEQPACKET if _LINUX else socket.SOCK_DGRAM
_PACKET_BYTES = 1 << 14 if _LINUX else 1 << 11
_BUFFER_BYTES = 1 << 20  # of messages in transit; the system may allow less
_DESCRIPTOR_BYTES = socket.CMSG_SPACE(array.array("i", [0]).itemsize)
_TRUNCATED = int(socket.MSG_CTRUNC)  # as `&` of two flags of Python's takes as long as to receive a message
_FULL = (errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS)
_CLOSED = (errno.EBADF, errno.ECONNREFUSED, errno.ECONNRESET, errno.ENOTCONN, errno.EPIPE)  # the other end is closed


class Unreadable(NamedTuple):
    """A received message that could not be unpickled, with the error."""

    error: Exception


def make_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets."""
    with above_standard():
        pair = socket.socketpair(socket.AF_UNIX, _KIND)
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    return pair


class PacketSocket:
    """One end of a socket that carries packets."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._open()

    def _open(self) -> None:
        self._end.setblocking(False)
        when_gone(self, functools.partial(_socket.socket.close, self._end))  # in C, so no Python code runs there
        self._buffer = bytearray(_PACKET_BYTES)
        self._has_standard = has_standard()
        self._unsent: deque[tuple[bytes, IO[bytes] | None]] = deque()
        self.fileno = self._end.fileno

    def close(self) -> None:
        self._end.close()

    def put(self, pickled: bytes) -> None:
        """Queue a message for `flush`."""
        self._unsent.append((b"_", _file_of(pickled)) if len(pickled) > _PACKET_BYTES else (pickled, None))

    def flush(self) -> bool:
        """Send queued messages; return False if there is no room for all of them."""
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
        """Return the next message, or `Unreadable`; None if there is none. Raise EOFError if none will come."""
        if self._has_standard:
            return self._take_any()
        # Without standard streams, descriptors 0 to 2 are free. A received file, or torch's memory that a message
        # opens, must not get one of them, as code that prints would write into it.
        with above_standard():
            return self._take_any()

    def _take_any(self) -> Any:
        try:
            size, with_it, flags, _ = self._end.recvmsg_into([self._buffer], _DESCRIPTOR_BYTES)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            raise EOFError from None
        if flags & _TRUNCATED:
            raise OSError(errno.EMFILE, "a message from a worker cannot be received, as too many files are open")
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

    def wait(self, event: int, seconds: float | None) -> None:
        """Wait for an event of `select.poll`."""
        poll = select.poll()  # `select.select` has a limit of 1024 descriptors
        poll.register(self._end, event)
        poll.poll(None if seconds is None else 1000 * seconds)

    def __getstate__(self) -> dict[str, Any]:
        return {"_end": self._end}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()


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


def _loads(pickled: Any) -> Any:
    try:
        return pickle.loads(pickled)
    except Exception as error:
        return Unreadable(error)
