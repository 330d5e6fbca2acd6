"""A TCP connection that carries frames, each a list of buffers.

::

    n | size of buffer 1 | ... | size of buffer n | buffer 1 | ... | buffer n

Guarantees: `put`, `flush` and `take` never wait. Frames keep their order, and arrive whole or not at all.
"""

from __future__ import annotations

import select
import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

_MOST_BUFFERS = 64  # in one call of the system, which has a limit


class FrameSocket:
    """One end of a connection."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._end = end
        self.fileno = end.fileno
        self.close = end.close
        self._unsent: deque[list[memoryview]] = deque()
        self._is_begun = False  # whether a part of the first unsent frame was sent
        self._rooms = _rooms()
        self._room: Any = next(self._rooms)

    def put(self, frame: Sequence[Any]) -> None:
        """Queue a frame for `flush`."""
        views = [memoryview(buffer).cast("B") for buffer in frame]
        head = struct.pack(f"<I{len(views)}Q", len(views), *map(len, views))
        self._unsent.append([memoryview(head), *views])

    def flush(self) -> bool:
        """Send queued frames; return False if there is no room for all of them."""
        while self._unsent:
            frame = self._unsent[0]
            try:
                sent = self._end.sendmsg(frame[:_MOST_BUFFERS])
            except BlockingIOError:
                return False
            except OSError:  # the connection is broken, which `take` reports
                self._unsent.clear()
                return True
            self._is_begun = True
            while frame and sent >= len(frame[0]):
                sent -= len(frame.pop(0))
            if frame:
                frame[0] = frame[0][sent:]
            else:
                self._unsent.popleft()
                self._is_begun = False
        return True

    def drop_unsent(self) -> None:
        """Forget the queued frames, except for one that was sent in part."""
        while len(self._unsent) > self._is_begun:
            self._unsent.pop()

    def take(self) -> list[Any] | None:
        """Return the next frame; None if it is not there yet. Raise EOFError if none will come."""
        while True:
            if isinstance(self._room, list):
                frame, self._room = self._room, next(self._rooms)
                return frame
            try:
                received = self._end.recv_into(self._room)
            except BlockingIOError:
                return None
            except OSError:
                raise EOFError from None
            if not received:
                raise EOFError
            self._room = self._room[received:] or next(self._rooms)

    def wait(self, event: int, seconds: float | None) -> None:
        """Wait for an event of `select.poll`."""
        poll = select.poll()
        poll.register(self._end, event)
        poll.poll(None if seconds is None else 1000 * seconds)


def _rooms() -> Iterator[memoryview | list[Any]]:
    """Yield memory for what comes next, and each frame once it is complete."""
    while True:
        count = bytearray(4)
        yield memoryview(count)
        sizes = bytearray(8 * int.from_bytes(count, "little"))
        if sizes:
            yield memoryview(sizes)
        frame: list[Any] = [np.empty(size, np.uint8) for (size,) in struct.iter_unpack("<Q", sizes)]  # not cleared
        yield from (buffer.data for buffer in frame if len(buffer))
        yield frame
