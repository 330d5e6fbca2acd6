"""A worker on another machine: a task of Ray that serves one loader until it is told to end."""

from __future__ import annotations

import os
import pickle
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stream_dataloader._engine.memory.endings import start_thread
from stream_dataloader._engine.memory.pickling import ByValue
from stream_dataloader._engine.reading.activity import Meters, WorkerStatus
from stream_dataloader._engine.reading.opening import name_node
from stream_dataloader._engine.reading.plan import Reading
from stream_dataloader._engine.reading.source_queue import SourceQueue
from stream_dataloader._engine.remote.frames import Connection
from stream_dataloader._engine.remote.ledger import RemoteQueue
from stream_dataloader._engine.remote.mail import Address
from stream_dataloader._engine.remote.messages import Pickled, Reports, dumps_home
from stream_dataloader._engine.schedule.rules import IntArray, Reader
from stream_dataloader._engine.workers.channel import EXIT, Begin, QueuePort
from stream_dataloader._engine.workers.process import prepare, serve_reader
from stream_dataloader._engine.workers.shared import Shared
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import WorkerError, shorten

_REPORT_SECONDS = 1.0


def library_version() -> str:
    """Return the version of this library."""
    return str(sys.modules["stream_dataloader"].__version__)


@dataclass
class RemoteJob:
    """Work of a worker, pickled in one piece because its parts refer to each other."""

    dataset: StreamDataset
    init: ByValue
    dtype: torch.dtype
    seed: int


class RemotePort(QueuePort):
    """A worker's end of its connection. One thread receives, and one reports every second.

    Attributes:
        is_cautious: Whether each change of the status is reported, after a worker died.
    """

    def __init__(self, end: Connection, report: Callable[[], bytes]) -> None:
        super().__init__()
        self._end, self._report = end, report
        self._queue: RemoteQueue | None = None
        self._turn = threading.Lock()
        self._over = threading.Event()
        self.is_cautious = False
        start_thread(self._receive, "stream-orders")
        start_thread(self._report_on, "stream-reports")

    def _receive(self) -> None:
        try:
            while True:
                first, *others = self._end.receive()
                if len(first):
                    self.orders.put(first)
                elif self._queue is not None:
                    self._queue.hear(np.frombuffer(others[0], np.int64))
        except EOFError:
            self.orders.put(pickle.dumps(EXIT))

    def _report_on(self) -> None:
        while not self._over.wait(_REPORT_SECONDS):
            self.report()

    def close(self) -> None:
        self._over.set()
        self._end.close()

    def _next(self, seconds: float | None) -> Any:
        if seconds != 0 and self._queue is not None:  # others may wait for this worker, which waits now
            self._queue.flush()
        found = super()._next(seconds)
        message = None if found is None else pickle.loads(found)
        if isinstance(message, Begin):
            self.is_cautious = message.recovery.cautious
        return message

    def _send(self, frame: Callable[[], Sequence[Any]]) -> None:
        with self._turn:
            self._end.send(frame())

    def send(self, message: Any) -> bool:
        """See `Port`."""
        buffers = (message if isinstance(message, Pickled) else dumps_home(message)).buffers
        self._send(lambda: [self._report(), *buffers])
        return True

    def report(self) -> None:
        """Report now."""
        self._send(lambda: [self._report()])

    def enter(
        self,
        reading: Reading,
        session: int,
        number: int,
        closed: Callable[[], bool],
        *,
        gives_up: bool,  # noqa: ARG002
    ) -> SourceQueue:
        """Join a session, as `Rows.enter` does on one machine."""
        self._queue = RemoteQueue(
            lambda numbers: self._send(lambda: [b"", numbers]),
            *(session, reading.readers[number].lanes, reading.order(), reading.draws(), closed),
        )
        return self._queue


class _ReportedField:
    """A field of a status that reports each change after a death, so that a source that kills its worker is known."""

    def __init__(self, numbers: Any, port: RemotePort) -> None:
        self._numbers, self._port = numbers, port
        self.data = self

    def __getitem__(self, place: Any) -> Any:
        return self._numbers[place]

    def __setitem__(self, place: Any, number: Any) -> None:
        is_new = self._port.is_cautious and self._numbers[place] != number
        self._numbers[place] = number
        if is_new:
            self._port.report()


def run_worker(
    address: Address, number: int, version: str, readers: Sequence[Reader], pickled: bytes, meters: IntArray
) -> None:
    """Serve a loader until it sends `EXIT`.

    Args:
        address: The loader's.
        number: Number of this worker.
        version: The loader's version of this library.
        readers: All readers.
        pickled: A `RemoteJob`.
        meters: Numbers from which this worker counts on.
    """
    import ray

    host, node = socket.gethostname(), ray.get_runtime_context().get_node_id()
    check_version(version, host)
    try:
        end = address.connect(number)
    except OSError as error:
        raise WorkerError(
            f"node {host} cannot reach the trainer at {address.host}:{address.port} ({error}); workers connect to "
            "the trainer's node by TCP"
        ) from error
    name_node(host)
    end.send(dumps_home((os.getpid(), host, node)).buffers)
    status, counts = WorkerStatus(readers, shared=False), Meters(len(readers), shared=False)
    counts.put(number, meters, np.zeros((0, 4), np.int64))
    port = RemotePort(end, Reports(number, status, counts).make)
    for name in ("reading", "opening", "working"):
        setattr(status, name, _ReportedField(getattr(status, name), port))
    try:
        job: RemoteJob = unpickled(pickled, host)
        shared = Shared(job.dataset, readers, status, counts, port, None, in_threads=False)
        if prepare(number, len(readers), port, shared, job.init, job.dtype, job.seed):
            serve_reader(number, port, shared, dumps_home)
    except KeyboardInterrupt:  # a stream raised it, which Ray would take for a cancelled task
        sys.exit(1)
    finally:  # also of sys.exit() in a stream
        port.report()
        port.close()


def check_version(version: str, host: str) -> None:
    """Raise unless this node has the trainer's version of this library."""
    if version != (own := library_version()):
        raise WorkerError(
            f"node {host} has stream_dataloader {own}, and the trainer has {version}; install the same "
            "version on all nodes, or send it with ray.init(runtime_env=...)"
        )


def unpickled(pickled: bytes, host: str) -> Any:
    """Return the trainer's work."""
    try:
        return pickle.loads(pickled)
    except Exception as error:
        raise WorkerError(
            f"node {host} cannot unpickle the dataset ({shorten(error)}); install its packages on all nodes, or "
            "send them with ray.init(runtime_env=...)"
        ) from error
