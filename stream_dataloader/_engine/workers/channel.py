"""Channels between the loader and one reader of a worker. Each has one writer at each end, so it needs no lock.

::

    loader -> worker    Begin     CREDIT: read up to a step    CLOSE     EXIT
    worker -> loader    READY     PARTS, packed, wish     FAILED, error         ENDED

Between processes a message is a packet of a socket, see `packet_socket`.

Guarantees: a process that is killed leaves no message half sent, and can break only its own channel. The loader never
waits in `send`. A worker that waits for room notices when its parts are no longer needed. Messages keep their order.
"""

from __future__ import annotations

import pickle
import select
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from multiprocessing.process import BaseProcess
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeAlias

from stream_dataloader._engine.memory.pickling import dumps_by_value, mentions_hidden
from stream_dataloader._engine.reading.plan import Recovery
from stream_dataloader._engine.schedule.place import Place
from stream_dataloader._engine.workers.packet_socket import PacketSocket, Unreadable, make_pair

_FULL_SECONDS = 0.05  # between attempts to send: `poll` does not report the limit of descriptors in transit
_END_SECONDS = 1.0  # the sentinel of a process is ready a little before its exit code is known

CLOSE, EXIT = -1, -2  # to a worker; a number from 0 on is credit
READY, PARTS, FAILED, ENDED = range(4)  # from a worker; the first of a tuple

#: A message from a reader, by its number.
Mail: TypeAlias = tuple[int, tuple[Any, ...]]


class Begin(NamedTuple):
    """Tells a reader to read from a place on.

    Attributes:
        session: The number of the iteration, among those of the pool.
        place: The place.
        whole_windows: Whether a `collate_fn` takes windows lane by lane, see `Reading`.
        recovery: Changes after a worker died.
        limit: The step to read up to, as credit.
        seed: Seeds the global generators of a worker process that is kept, together with the worker's number.
    """

    session: int
    place: Place
    whole_windows: bool
    recovery: Recovery
    limit: int
    seed: int


class Port(ABC):
    """A worker's end of a channel."""

    def __init__(self) -> None:
        self._inbox: deque[Any] = deque()

    @abstractmethod
    def _next(self, seconds: float | None) -> Any:
        """Return the next message; None if none came in time."""

    def receive(self) -> Any:
        """Wait for the next message and return it."""
        return self._inbox.popleft() if self._inbox else self._next(None)

    def has_mail(self) -> bool:
        """Return whether `receive` need not wait."""
        while (message := self._next(0)) is not None:
            self._inbox.append(message)
            if message == EXIT:
                break
        return bool(self._inbox)

    def is_closed(self) -> bool:
        """Return whether the current session was closed."""
        return self.has_mail() and any(type(message) is int and message < 0 for message in self._inbox)

    @abstractmethod
    def send(self, message: tuple[Any, ...] | bytes) -> bool:
        """Send a message, pickled or not; return False if the session was closed while there was no room."""


class QueuePort(Port):
    """An end of a channel that another thread puts messages into."""

    def __init__(self) -> None:
        super().__init__()
        self.orders: SimpleQueue[Any] = SimpleQueue()

    def _next(self, seconds: float | None) -> Any:
        try:
            return self.orders.get(timeout=seconds) if seconds != 0 else self.orders.get_nowait()
        except Empty:
            return None


class ThreadPort(QueuePort):
    """A thread's end of a channel."""

    def __init__(self, number: int, mail: SimpleQueue[Mail]) -> None:
        super().__init__()
        self._number, self._mail = number, mail

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
        """Return the next message; None if none came in time."""
        try:
            return self._mail.get(timeout=seconds)
        except Empty:
            return None


def _dumps(message: Any) -> bytes:
    try:
        pickled = pickle.dumps(message)
    except Exception:
        return dumps_by_value(message)
    return dumps_by_value(message) if mentions_hidden(pickled) else pickled


class ProcessPort(Port):
    """A worker process's end of a channel."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__()
        self._end = PacketSocket(end)
        self.is_lone = False  # whether the loader's end was closed without an EXIT before

    def close(self) -> None:
        self._end.close()

    def _next(self, seconds: float | None) -> Any:
        try:
            while (message := self._end.take()) is None:
                if seconds == 0:
                    return None
                self._end.wait(select.POLLIN, seconds)
        except EOFError:
            self.is_lone = True
            return EXIT
        return message

    def send(self, message: tuple[Any, ...] | bytes) -> bool:
        self._end.put(message if isinstance(message, bytes) else pickle.dumps(message))
        while not self._end.flush():
            if self.is_closed():
                self._end.drop_unsent()
                return False
            self._end.wait(select.POLLOUT | select.POLLIN, _FULL_SECONDS)
        return True


class ProcessMail:
    """The loader's ends of the channels of worker processes; also notices when a process ends."""

    def __init__(self, readers: int) -> None:
        self.processes: list[BaseProcess] = []
        self.ports: list[ProcessPort] = []
        self._ends: list[PacketSocket] = []
        self._turn = threading.RLock()  # one thread may end the workers while another reads
        self._ready: deque[int] = deque()  # readers that have sent something
        self._poll = select.poll()
        self._numbers: dict[int, int] = {}  # of readers, by descriptors
        self._awaited: dict[int, BaseProcess] = {}
        for number in range(readers):
            here, there = make_pair()
            self._ends.append(PacketSocket(here))
            self.ports.append(ProcessPort(there))
            self._numbers[here.fileno()] = number
            self._poll.register(here, select.POLLIN)

    def close_in_worker(self, own: ProcessPort) -> None:
        """Close the ends of the loader and of other workers, in a worker that was forked."""
        for end in self._ends:
            end.close()
        for port in self.ports:
            if port is not own:
                port.close()

    def watch(self, process: BaseProcess) -> None:
        """Watch for the end of a process."""
        self._awaited[process.sentinel] = process
        self._poll.register(process.sentinel, select.POLLIN)

    def send(self, reader: int, message: Any) -> None:
        pickled = _dumps(message)
        with self._turn:
            self._ends[reader].put(pickled)
            self._ends[reader].flush()

    def get(self, seconds: float) -> Mail | None:
        """Return the next message; None if none came in time, or if a process ended and left none."""
        while True:
            while self._ready:
                number = self._ready.popleft()
                try:
                    message = self._ends[number].take()
                except EOFError:  # a closed socket would be ready for ever; the sentinel reports the process's end
                    self._poll.unregister(self._ends[number])
                    continue
                if message is not None:
                    return number, (FAILED, message) if isinstance(message, Unreadable) else message
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


def _wait_for_end(process: BaseProcess) -> None:
    """Wait until the exit code is known, for a process whose sentinel is ready."""
    deadline = time.monotonic() + _END_SECONDS
    while process.exitcode is None and time.monotonic() < deadline:
        time.sleep(_END_SECONDS / 1000)
