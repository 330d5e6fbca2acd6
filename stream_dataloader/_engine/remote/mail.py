"""The loader's ends of its workers' connections. A thread receives from each.

::

    worker    token, number, hello: pid, host, node     READY, PARTS, ... with reports     requests
    loader    the messages so far                       CREDIT, ...                        decisions

A frame that begins with an empty buffer has numbers from or for the `ledger`.

Guarantees: nothing that a stranger sends is unpickled. A message to a worker that has not started is sent once it has
connected, and again if another task takes its place.
"""

from __future__ import annotations

import functools
import hmac
import pickle
import secrets
import select
import socket
import struct
import threading
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from stream_dataloader._engine.descriptors import above_standard
from stream_dataloader._engine.memory.endings import start_thread
from stream_dataloader._engine.memory.pickling import dumps, for_other_machine
from stream_dataloader._engine.remote.frames import Connection
from stream_dataloader._engine.remote.ledger import RemoteLedger
from stream_dataloader._engine.remote.messages import Reports, loads
from stream_dataloader._engine.workers.channel import FAILED, READY, Begin, Mail
from stream_dataloader._engine.workers.packet_socket import Unreadable

_TOKEN_BYTES = 32
_CONNECT_SECONDS = 30.0
_CLOSE_SECONDS = 0.5  # within which the server notices that it is closed


class Address(NamedTuple):
    """Address that a worker connects to, with the secret of one pool of workers, which Ray hands out."""

    host: str
    port: int
    token: bytes

    def connect(self, number: int) -> Connection:
        """Connect as a worker."""
        with above_standard():
            end = socket.create_connection((self.host, self.port), _CONNECT_SECONDS)
        end.settimeout(None)
        end.sendall(self.token + struct.pack("<I", number))
        return Connection(end)


class WorkerProcess(NamedTuple):
    """Process and node of a worker."""

    pid: int
    host: str
    node: str

    def __str__(self) -> str:
        return f"pid {self.pid} on node {self.host}, {self.node[:12]}"


class RemoteMail:
    """The loader's ends of the connections; also notices when one breaks.

    Args:
        ledger: Decides the workers' requests; None if they need none decided.

    Attributes:
        processes: Where workers run that have connected.
        broken: Workers whose connection has ended.
    """

    def __init__(self, host: str, reports: dict[int, Reports], ledger: RemoteLedger | None) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with above_standard():
            self._server = socket.create_server((host, 0), family=family)
        self.address = Address(host, self._server.getsockname()[1], secrets.token_bytes(_TOKEN_BYTES))
        self.processes: dict[int, WorkerProcess] = {}
        self.broken: set[int] = set()
        self._reports, self._ledger = reports, ledger
        self._early: dict[int, list[list[bytes]]] = {number: [] for number in reports}  # until a worker is ready
        self._ends: dict[int, Connection] = {}  # of workers
        self._all: set[Connection] = set()  # also of strangers
        self._turn = threading.RLock()  # for the attributes above, and to send; reentrant for handlers of signals
        self._mail: SimpleQueue[tuple[int, Any] | None] = SimpleQueue()
        self._is_over = False
        start_thread(self._accept, "stream-connections")

    def send(self, reader: int, message: Any) -> None:
        with for_other_machine():
            frame = [dumps(message)]
        with self._turn:
            if self._ledger is not None and isinstance(message, Begin):
                self._ledger.begin(message)
            if reader in self._early:
                self._early[reader].append(frame)
            if (end := self._ends.get(reader)) is not None:
                end.send(frame)

    def get(self, seconds: float) -> Mail | None:
        """Return the next message; None if none came in time, or if a connection ended."""
        try:
            found = self._mail.get(timeout=seconds)
        except Empty:
            return None
        if found is None:
            return None
        number, frame = found
        try:
            message: tuple[Any, ...] = loads(frame)
        except Exception as error:
            return number, (FAILED, Unreadable(error))
        if message[0] == READY:
            self._early.pop(number, None)
        return number, message

    def expect(self, number: int) -> None:
        """Expect another task in the place of one that has not started."""
        with self._turn:
            self.processes.pop(number, None)
            self.broken.discard(number)
            end = self._ends.pop(number, None)
        if end is not None:
            end.close()

    def close(self) -> None:
        """Close all connections; workers end."""
        with self._turn:
            self._is_over = True
            for end in self._all:
                end.close()

    # The threads

    def _accept(self) -> None:
        poll = select.poll()
        poll.register(self._server, select.POLLIN)
        while not self._is_over:
            if poll.poll(1000 * _CLOSE_SECONDS):
                try:
                    with above_standard():
                        end = Connection(self._server.accept()[0])
                except OSError as error:  # too many files are open, for example
                    self._mail.put((0, [pickle.dumps((FAILED, error))]))
                    break
                start_thread(functools.partial(self._receive, end), "stream-connection")
        self._server.close()

    def _receive(self, end: Connection) -> None:
        with self._turn:
            self._all.add(end)
            if self._is_over:
                end.close()
        number = -1
        try:
            if (number := self._number_of(end)) >= 0:
                self._serve(number, end)
        except EOFError:
            pass
        finally:
            with self._turn:
                self._all.discard(end)
                if self._ends.get(number) is end:
                    del self._ends[number]
                    self.broken.add(number)
                    self._mail.put(None)
            end.close()

    def _number_of(self, end: Connection) -> int:
        """Return the number of the worker at the other end; -1 if it does not show the token, or is not expected."""
        shown = end.receive_bytes(_TOKEN_BYTES + 4).tobytes()
        number = int.from_bytes(shown[_TOKEN_BYTES:], "little")
        is_right = hmac.compare_digest(shown[:_TOKEN_BYTES], self.address.token)
        with self._turn:
            if not is_right or number not in self._early or number in self._ends:
                return -1
            self._ends[number] = end
            for frame in self._early[number]:
                end.send(frame)
            return number

    def _serve(self, number: int, end: Connection) -> None:
        """Receive from a worker until its connection ends."""
        self.processes[number] = WorkerProcess(*loads(end.receive()))
        while True:
            first, *others = end.receive()
            if len(first):
                self._reports[number].take(first)
                if others:
                    self._mail.put((number, others))
            elif self._ledger is not None:
                with self._turn:
                    decisions = self._ledger.take(number, np.frombuffer(others[0], np.int64))
                    for worker, numbers in decisions.items():
                        if worker in self._ends:
                            self._ends[worker].send([b"", numbers])
