"""The loader's ends of its workers' connections.

::

    worker    token, number, hello: pid, host, node     READY, PARTS, ... with reports
    loader    the messages so far                       CREDIT, ...

Guarantees: nothing that a stranger sends is unpickled. A message to a worker that has not started is sent once it has
connected, and again if another actor takes its place.
"""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import struct
import threading
from collections import deque
from typing import Any, NamedTuple

from stream_dataloader._engine.descriptors import above_standard
from stream_dataloader._engine.memory.pickling import dumps, for_other_machine
from stream_dataloader._engine.remote.frames import FrameSocket
from stream_dataloader._engine.remote.ledger import LedgerThread
from stream_dataloader._engine.remote.messages import Reports, loads
from stream_dataloader._engine.workers.channel import FAILED, READY, Begin, Mail
from stream_dataloader._engine.workers.packet_socket import Unreadable

_TOKEN_BYTES = 32
_CONNECT_SECONDS = 30.0
HELLO_BYTES = _TOKEN_BYTES + 4
_LEDGER = 1 << 31  # added to the number of a worker, for its connection to the ledger


class Address(NamedTuple):
    """Address that a worker connects to, with the secret that it shows.

    Attributes:
        token: Secret of one pool of workers, which Ray hands out.
        has_ledger: Whether a worker needs a second connection, to the ledger.
    """

    host: str
    port: int
    token: bytes
    has_ledger: bool

    def connect(self, number: int, *, to_ledger: bool = False) -> FrameSocket:
        """Connect as a worker."""
        with above_standard():
            end = socket.create_connection((self.host, self.port), _CONNECT_SECONDS)
        end.sendall(self.token + struct.pack("<I", number + _LEDGER * to_ledger))
        return FrameSocket(end)


class Place(NamedTuple):
    """Process and node of a worker."""

    pid: int
    host: str
    node: str

    def __str__(self) -> str:
        return f"pid {self.pid} on node {self.host}, {self.node[:12]}"


class RemoteMail:
    """The loader's ends of the connections; also notices when one breaks.

    Attributes:
        places: Where workers run that have connected.
        broken: Workers whose connection broke.
    """

    def __init__(self, host: str, reports: dict[int, Reports], ledger: LedgerThread | None) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with above_standard():
            self._server: socket.socket | None = socket.create_server((host, 0), family=family)
        self.address = Address(
            host, self._server.getsockname()[1], secrets.token_bytes(_TOKEN_BYTES), ledger is not None
        )
        self.places: dict[int, Place] = {}
        self.broken: set[int] = set()
        self._reports, self._ledger = reports, ledger
        self._asked = {_LEDGER + number for number in reports} if ledger is not None else set()  # for the ledger
        self._early: dict[int, list[list[bytes]]] = {number: [] for number in reports}  # until a worker is ready
        self._ends: dict[int, FrameSocket] = {}
        self._numbers: dict[int, int] = {}  # of workers, by descriptors
        self._strangers: dict[int, socket.socket] = {}  # that have not shown the token, by descriptors
        self._sending, self._receiving = threading.RLock(), threading.Lock()  # one thread may end the workers
        self._is_over = False
        self._ready: deque[int] = deque()  # workers that have sent something
        self._poll = select.poll()
        self._poll.register(self._server, select.POLLIN)

    def send(self, reader: int, message: Any) -> None:
        if self._ledger is not None and isinstance(message, Begin):
            self._ledger.begin(message)
        with for_other_machine():
            frame = [dumps(message)]
        if reader in self._early:
            self._early[reader].append(frame)
        with self._sending:
            if (end := self._ends.get(reader)) is not None:
                end.put(frame)
                end.flush()

    def expect(self, number: int) -> None:
        """Expect another actor in the place of one that has not started."""
        self.places.pop(number, None)
        self.broken.discard(number)
        if (end := self._ends.pop(number, None)) is not None:
            self._poll.unregister(end)
            del self._numbers[end.fileno()]
            end.close()
        if self._ledger is not None:
            self._asked.add(_LEDGER + number)

    def get(self, seconds: float) -> Mail | None:
        """Return the next message; None if none came in time, or if a connection broke."""
        if not self._receiving.acquire(timeout=seconds):  # another thread waits, or ends the workers
            return None
        try:
            return self._get(seconds)
        finally:
            self._receiving.release()

    def _get(self, seconds: float) -> Mail | None:
        while not self._is_over:
            while self._ready:
                number = self._ready.popleft()
                if number in self._ends and (message := self._take(number)) is not None:
                    self._ready.append(number)
                    return number, message
                if number in self.broken:
                    return None
            with self._sending:
                for end in self._ends.values():
                    end.flush()
            found = [descriptor for descriptor, _ in self._poll.poll(1000 * seconds)]
            if not found:
                return None
            for descriptor in found:
                if descriptor in self._numbers:
                    self._ready.append(self._numbers[descriptor])
                elif descriptor in self._strangers:
                    self._meet(self._strangers.pop(descriptor))
                elif self._server is not None:
                    self._accept(self._server)
        return None

    def _take(self, number: int) -> tuple[Any, ...] | None:
        end = self._ends[number]
        try:
            while (frame := end.take()) is not None:
                if number not in self.places:
                    self.places[number] = Place(*loads(frame))
                    continue
                self._reports[number].take(frame[0])
                if len(frame) > 1:
                    return self._opened(number, frame[1:])
        except EOFError:
            self._poll.unregister(end)
            del self._numbers[end.fileno()], self._ends[number]
            end.close()
            self.broken.add(number)
        return None

    def _opened(self, number: int, frame: list[Any]) -> tuple[Any, ...]:
        try:
            message: tuple[Any, ...] = loads(frame)
        except Exception as error:
            return FAILED, Unreadable(error)
        if message[0] == READY:
            self._early.pop(number, None)
            self._close_server_if_done()
        return message

    def _close_server_if_done(self) -> None:
        if not self._early and not self._asked:
            self._close_server()

    def _accept(self, server: socket.socket) -> None:
        with above_standard():
            end, _ = server.accept()
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, HELLO_BYTES)  # `poll` waits for all of it
        self._strangers[end.fileno()] = end
        self._poll.register(end, select.POLLIN)

    def _meet(self, end: socket.socket) -> None:
        """Take a connection up if it shows the token."""
        try:
            shown = end.recv(HELLO_BYTES)
        except OSError:
            shown = b""
        number = int.from_bytes(shown[_TOKEN_BYTES:], "little")
        is_right = hmac.compare_digest(shown[:_TOKEN_BYTES], self.address.token)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        if is_right and number in self._asked and self._ledger is not None:
            self._poll.unregister(end)
            self._asked.discard(number)
            self._ledger.add(number - _LEDGER, FrameSocket(end))
            self._close_server_if_done()
            return
        if not is_right or number not in self._early or number in self._ends:
            self._poll.unregister(end)
            end.close()
            return
        self._ends[number] = met = FrameSocket(end)
        self._numbers[end.fileno()] = number
        self._ready.append(number)
        with self._sending:
            for frame in self._early[number]:
                met.put(frame)
            met.flush()

    def _close_server(self) -> None:
        if self._server is not None:
            self._poll.unregister(self._server)
            self._server.close()
            self._server = None

    def close(self) -> None:
        """Close all connections; workers end."""
        self._is_over = True
        self._close_server()
        if self._ledger is not None:
            self._ledger.close()
        for end in self._ends.values():
            end.close()
        for stranger in self._strangers.values():
            stranger.close()
        self._ends.clear()
        self._strangers.clear()
