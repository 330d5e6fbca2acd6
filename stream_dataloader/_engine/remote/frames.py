"""A TCP connection that carries frames, each a list of buffers.

::

    n | size of buffer 1 | ... | size of buffer n | buffer 1 | ... | buffer n

Guarantees: frames keep their order, and arrive whole or not at all. A broken connection is an error of `receive` only.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

_MOST_BUFFERS = 64  # in one call of the system, which has a limit


class Connection:
    """One end of a connection. A thread receives at each end all the time, so sending waits for the network only."""

    def __init__(self, end: socket.socket) -> None:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._end = end

    def send(self, frame: Sequence[Any]) -> None:
        """Send a frame; one thread at a time may do so."""
        views = [memoryview(buffer).cast("B") for buffer in frame]
        head = struct.pack(f"<I{len(views)}Q", len(views), *map(len, views))
        left = [memoryview(head), *filter(len, views)]
        with contextlib.suppress(OSError):  # the connection is broken, which `receive` reports
            while left:
                sent = self._end.sendmsg(left[:_MOST_BUFFERS])
                while left and sent >= len(left[0]):
                    sent -= len(left.pop(0))
                if sent:
                    left[0] = left[0][sent:]

    def receive(self) -> list[Any]:
        """Wait for the next frame and return it. Raise EOFError if none will come."""
        (count,) = struct.unpack("<I", self.receive_bytes(4))
        sizes = struct.unpack(f"<{count}Q", self.receive_bytes(8 * count))
        return [self.receive_bytes(size) for size in sizes]

    def receive_bytes(self, size: int) -> Any:
        """Wait for a number of bytes and return them."""
        found = np.empty(size, np.uint8)  # not cleared
        left = found.data
        while left:
            try:
                received = self._end.recv_into(left, len(left), socket.MSG_WAITALL)
            except OSError:
                raise EOFError from None
            if not received:
                raise EOFError
            left = left[received:]
        return found

    def close(self) -> None:
        """Close it; a thread that waits in `receive` gets an EOFError."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()

    @property
    def is_open(self) -> bool:
        return self._end.fileno() >= 0
