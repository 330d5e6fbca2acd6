"""A worker on another machine: an actor of Ray that serves one loader at a time."""

from __future__ import annotations

import os
import pickle
import select
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stream_dataloader._engine.memory.pickling import ByValue
from stream_dataloader._engine.reading.activity import Meters, WorkerStatus
from stream_dataloader._engine.reading.opening import name_node
from stream_dataloader._engine.reading.reader import PartReader
from stream_dataloader._engine.remote.frames import FrameSocket
from stream_dataloader._engine.remote.ledger import LedgerRows
from stream_dataloader._engine.remote.mail import Address
from stream_dataloader._engine.remote.messages import Pickled, Reports, dumps_home
from stream_dataloader._engine.schedule.rules import IntArray, Reader
from stream_dataloader._engine.workers.channel import EXIT, FAILED, Begin, Port
from stream_dataloader._engine.workers.process import prepare, serve_reader
from stream_dataloader._engine.workers.shared import Shared
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import ErrorReport, WorkerError, shorten

_REPORT_SECONDS = 1.0  # between reports if no message is sent
_FULL_SECONDS = 0.05


def library_version() -> str:
    """Return the version of this library."""
    return str(sys.modules["stream_dataloader"].__version__)


@dataclass
class RemoteJob:
    """Work of a worker, pickled in one piece because its parts refer to each other."""

    dataset: StreamDataset
    readers: Sequence[Reader]
    init: ByValue
    dtype: torch.dtype
    seed: int


class RemotePort(Port):
    """A worker's end of its connection. A thread sends reports if nothing else is sent."""

    def __init__(self, end: FrameSocket, report: Callable[[], bytes]) -> None:
        super().__init__()
        self._end, self._report = end, report
        self.rows: LedgerRows | None = None
        self._turn = threading.Lock()
        self._over = threading.Event()
        threading.Thread(target=self._report_on, name="stream-reports", daemon=True).start()

    def _report_on(self) -> None:
        while not self._over.wait(_REPORT_SECONDS):
            with self._turn:
                if self._end.flush():
                    self._end.put([self._report()])
                    self._end.flush()

    def close(self) -> None:
        self._over.set()
        with self._turn:
            self._end.close()

    def _next(self, seconds: float | None) -> Any:
        try:
            while (frame := self._end.take()) is None:
                if seconds == 0:
                    return None
                if self.rows is not None:  # others may wait for this worker, which waits now
                    self.rows.flush()
                self._end.wait(select.POLLIN, seconds)
        except EOFError:
            return EXIT
        return pickle.loads(frame[0])

    def send(self, message: Any) -> bool:
        """See `Port`."""
        return self._send((message if isinstance(message, Pickled) else dumps_home(message)).buffers)

    def report(self) -> None:
        """Report now, before user code that may end this process runs."""
        self._send([])

    def _send(self, buffers: list[memoryview]) -> bool:
        with self._turn:
            self._end.put([self._report(), *buffers])
        while not self._flush():
            if self.is_closed():
                with self._turn:
                    self._end.drop_unsent()
                return False
            self._end.wait(select.POLLOUT | select.POLLIN, _FULL_SECONDS)
        return True

    def _flush(self) -> bool:
        with self._turn:
            return self._end.flush()


class _ReportedField:
    """A field of a status that reports each change."""

    def __init__(self, numbers: Any, report: Callable[[], None]) -> None:
        self._numbers, self._report = numbers, report
        self.data = self

    def __getitem__(self, place: Any) -> Any:
        return self._numbers[place]

    def __setitem__(self, place: Any, number: Any) -> None:
        is_same = bool(self._numbers[place] == number)
        self._numbers[place] = number
        if not is_same:
            self._report()


@dataclass
class RemoteShared(Shared):
    """State of a worker that is alone on its machine.

    Attributes:
        reported: The status after a death: it reports each change, so that a source that kills its worker is known.
        usual: The status otherwise.
    """

    reported: WorkerStatus
    usual: WorkerStatus

    def enter(self, number: int, closed: Callable[[], bool], begin: Begin) -> PartReader:
        """See `Shared`."""
        self.status = self.reported if begin.recovery.cautious else self.usual
        return super().enter(number, closed, begin)


class StreamWorker:
    """The actor."""

    def run(
        self, address: Address, number: int, version: str, readers: Sequence[Reader], pickled: bytes, meters: IntArray
    ) -> None:
        """Serve a loader until it sends `EXIT`.

        Args:
            pickled: A `RemoteJob`.
            meters: Numbers from which this worker counts on.
        """
        import ray

        host, node = socket.gethostname(), ray.get_runtime_context().get_node_id()
        if version != (own := library_version()):
            raise WorkerError(
                f"node {host} has stream_dataloader {own}, and the trainer has {version}; install the same "
                "version on all nodes, or send it with ray.init(runtime_env=...)"
            )
        try:
            end = address.connect(number)
        except OSError as error:
            raise WorkerError(
                f"node {host} cannot reach the trainer at {address.host}:{address.port} ({error}); workers connect to "
                "the trainer's node by TCP"
            ) from error
        name_node(host)
        end.put([pickle.dumps((os.getpid(), host, node))])
        status, counts = WorkerStatus(readers, shared=False), Meters(len(readers), shared=False)
        counts.put(number, meters, np.zeros((0, 4), np.int64))
        port = RemotePort(end, Reports(number, status, counts).make)
        ledger = address.connect(number, to_ledger=True) if address.has_ledger else None
        try:
            port.rows = None if ledger is None else LedgerRows(ledger)
            self._serve(port, number, pickled, host, status, counts)
        except KeyboardInterrupt:  # a stream raised it, which Ray would take for a cancelled task
            sys.exit(1)
        finally:
            port.close()
            if ledger is not None:
                ledger.close()

    def _serve(
        self, port: RemotePort, number: int, pickled: bytes, host: str, status: WorkerStatus, meters: Meters
    ) -> None:
        try:
            job: RemoteJob = pickle.loads(pickled)
        except Exception as error:
            told = WorkerError(
                f"node {host} cannot unpickle the dataset ({shorten(error)}); install its packages on all nodes, or "
                "send them with ray.init(runtime_env=...)"
            )
            told.__cause__ = error
            port.send((FAILED, ErrorReport(told)))
            while port.receive() != EXIT:
                pass
            return
        reported_status = WorkerStatus(job.readers, shared=False)
        reported_status.exiting, reported_status.interrupted = status.exiting, status.interrupted
        for name in ("reading", "opening", "working"):
            setattr(reported_status, name, _ReportedField(getattr(status, name), port.report))
        shared = RemoteShared(job.dataset, job.readers, status, meters, port.rows, None, False, reported_status, status)
        workers = len(job.readers)
        try:
            if prepare(number, workers, port, shared, job.init, job.dtype, job.seed):
                serve_reader(number, port, shared, dumps_home)
        except BaseException:  # such as sys.exit() in a stream, which ends this process
            port.report()
            raise
