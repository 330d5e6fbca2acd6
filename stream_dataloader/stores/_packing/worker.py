"""What packs streams: in a worker process, or in the main one.

A worker is handed streams, tells what became of each, and syncs now and then. What it tells, by the first of each::

    ready                       it has started, and waits for streams
    read n bytes                n more time steps were read
    packed number steps place   a stream is written, not necessarily on the disk
    failed number report        a stream could not be read
    synced count                so many more of the streams that it has written are on the disk
    broken report               the store cannot be written; it ends
    closed                      its part is finished; it ends

A message that arrives while a stream is read means: leave that stream, finish the part, and end.

Guarantee: a worker ends soon after the process that started it, and before another run writes to the same folder.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch

from stream_dataloader._memory.pickling import ByValue
from stream_dataloader.errors import ErrorReport
from stream_dataloader.stores._base.packing import Packer
from stream_dataloader.stores._packing.items import Items, Task, bytes_of_step
from stream_dataloader.stream_info import StreamInfo
from stream_dataloader.streams.cache.file_lock import lock

__all__ = ["Job", "PartWriter", "Stopped", "Tasks", "run_worker"]

SYNC_SECONDS, SYNC_BYTES = 1.0, 256 << 20
_TOLD_SECONDS = 0.25
_WATCH_SECONDS = 1.0


class Stopped(BaseException):
    """Packing is to end in the middle of a stream; user code is not to catch it."""


class Job(NamedTuple):
    """What is the same for all workers and streams."""

    packer: Packer
    open_stream: Callable[[Any], Any]
    transform: Callable[[Any], Any] | None
    windowed: bool
    seed: int


class Tasks(NamedTuple):
    """Streams for a worker."""

    tasks: list[Task]


class PartWriter:
    """Packs streams into one part of the store.

    Args:
        job: How.
        part: The part's number.
        worker: The worker's.
        send: Tells the main process.
        stopped: Whether to end; asked a few times a second.
        beside: Syncs may be told by another thread.
    """

    def __init__(
        self,
        job: Job,
        part: int,
        worker: int,
        send: Callable[[tuple[Any, ...]], Any],
        stopped: Callable[[], bool] = lambda: False,
        *,
        beside: bool = False,
    ) -> None:
        self._job = job
        self._part = job.packer.part(part)
        self._worker = worker
        self._send = send
        self._stopped = stopped
        self._lock = threading.Lock()  # over `_written`
        self._synced = self._told = time.perf_counter()
        self._steps = self._unsynced_bytes = 0
        self._step_bytes = 0
        self._written = 0  # streams of which it is not known whether the disk holds them
        self._syncer: _Syncer | None = None
        if beside and getattr(self._part, "syncs_beside", False):
            self._syncer = _Syncer(self.sync)
            self._syncer.start()

    def pack(self, task: Task) -> None:
        """Pack a stream, and tell what became of it.

        Raises:
            Exception: The store cannot be written.
            Stopped: It was to end; the stream is not packed.
        """
        job = self._job
        info = StreamInfo(task.number, 0, 0, self._worker, job.seed)
        with Items(task, job.open_stream, job.transform, job.windowed, info, self._tick) as items:
            try:
                steps, place = self._part.write(task.number, task.key, items)
            except Exception as error:
                if (failure := items.failure(error)) is None:
                    raise
                self._tell()
                self._send(("failed", task.number, ErrorReport(failure)))
                return
        self._tell()
        self._send(("packed", task.number, steps, place))
        with self._lock:
            self._written += 1
        self._see_to_sync()

    def _tick(self, steps: int, item: Any) -> None:
        if not self._step_bytes and item is not None:
            self._step_bytes = bytes_of_step(item)
        self._steps += steps
        self._unsynced_bytes += steps * self._step_bytes
        if time.perf_counter() - self._told >= _TOLD_SECONDS:
            self._tell()
            if self._stopped():
                raise Stopped

    def _tell(self) -> None:
        if self._steps:
            self._send(("read", self._steps, self._steps * self._step_bytes))
        self._steps, self._told = 0, time.perf_counter()

    @property
    def due_seconds(self) -> float | None:
        """In how many seconds to call `sync`; None if there is nothing to sync, or it is done beside."""
        return SYNC_SECONDS - (time.perf_counter() - self._synced) if self._written and self._syncer is None else None

    def _see_to_sync(self) -> None:
        """Sync if it is time, or have that done beside."""
        if self._syncer is not None:
            if self._syncer.error is not None:
                raise self._syncer.error
            if self._unsynced_bytes >= SYNC_BYTES:
                self._unsynced_bytes = 0
                self._syncer.wake.set()
            return
        due = self.due_seconds
        if due is not None and (due <= 0 or self._unsynced_bytes >= SYNC_BYTES):
            self.sync()

    def sync(self) -> None:
        """Have the disk hold what was written, and tell that."""
        if streams := self._written:
            self._part.sync()
            self._unsynced_bytes = 0
            self._tell_synced(streams)

    def _tell_synced(self, streams: int) -> None:
        with self._lock:
            self._written -= streams
        self._synced = time.perf_counter()
        self._send(("synced", streams))

    def close(self) -> None:
        """Finish the part, and tell that."""
        try:
            if self._syncer is not None:
                self._syncer.end()
        finally:
            self._part.close()
        self._tell_synced(self._written)


class _Syncer(threading.Thread):
    """Syncs a part now and then beside its worker, also while that is stuck in a stream.

    Args:
        sync: Syncs what there is to sync, and tells it.

    Attributes:
        wake: Sync now.
        error: What syncing raised.
    """

    def __init__(self, sync: Callable[[], None]) -> None:
        super().__init__(name="pack-sync", daemon=True)
        self._sync = sync
        self._ending = False
        self.wake = threading.Event()
        self.error: Exception | None = None

    def run(self) -> None:
        """Sync now and then."""
        while not self._ending:
            self.wake.wait(SYNC_SECONDS or 0.001)
            self.wake.clear()
            if self._ending:
                return
            try:
                self._sync()
            except Exception as error:
                self.error = error
                return

    def end(self) -> None:
        """Let it end.

        Raises:
            Exception: What syncing raised.
        """
        self._ending = True
        self.wake.set()
        self.join()
        if self.error is not None:
            raise self.error


def run_worker(
    job: ByValue, part: int, worker: int, connection: Connection, folder_lock: str, inherited: tuple[int, ...]
) -> None:
    """A worker process.

    Args:
        job: The `Job`.
        part: The number of its part.
        worker: Its own number.
        connection: To the main process.
        folder_lock: A file that is locked while any worker of the run lives.
        inherited: Descriptors that a forked worker has of the main process and must not keep.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for descriptor in inherited:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _watch_parent()
    torch.set_num_threads(1)
    os.environ.setdefault("OPENCV_FOR_THREADS_NUM", "1")  # workers together are as many as there are cores
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(0)

    one_at_a_time = threading.Lock()

    def send(message: tuple[Any, ...]) -> None:
        with one_at_a_time:
            connection.send_bytes(pickle.dumps(message))

    with contextlib.suppress(BrokenPipeError, EOFError, ConnectionResetError):  # the main process has gone
        held = lock(folder_lock, shared=True, create=True)
        try:
            _serve(PartWriter(job.value, part, worker, send, connection.poll, beside=True), connection, send)
            send(("closed",))
        except (BrokenPipeError, EOFError, ConnectionResetError):
            raise
        except Exception as error:
            send(("broken", ErrorReport(error)))
        finally:
            if held is not None:
                held.close()


def _serve(writer: PartWriter, connection: Connection, send: Callable[[tuple[Any, ...]], None]) -> None:
    """Pack what one is handed, until there is no more."""
    send(("ready",))
    with contextlib.suppress(Stopped):
        while True:
            due = writer.due_seconds
            if due is not None and not connection.poll(max(due, 0)):
                writer.sync()
            received = pickle.loads(connection.recv_bytes())
            if received is None:
                break
            for task in received.tasks:
                if connection.poll():
                    raise Stopped
                writer.pack(task)
    writer.close()


def _watch_parent() -> None:
    """Have this process end soon after the one that started it, also if it is stuck in user code."""
    parent, started_by = os.getppid(), multiprocessing.parent_process()

    def watch() -> None:  # a forkserver, the parent of its children, outlives the process that asked for them
        while os.getppid() == parent:
            if started_by is not None and wait([started_by.sentinel], _WATCH_SECONDS):
                break
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
