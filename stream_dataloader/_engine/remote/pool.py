"""`RayPool`: workers that are tasks of a Ray cluster. Ray places and starts them, and tells when one has died.

Guarantees: a worker that ends, with its process or its node, is a `WorkerDeathError` that names the node. A task that
Ray lost before it began is replaced, and counts as no death. Tasks end with the iteration, unless they are kept.
"""

from __future__ import annotations

import time as clock
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from stream_dataloader._engine.memory.pickling import ByValue, dumps, for_other_machine
from stream_dataloader._engine.notices import log
from stream_dataloader._engine.reading.activity import WorkerStatus
from stream_dataloader._engine.reading.plan import Reading
from stream_dataloader._engine.remote.ledger import RemoteLedger
from stream_dataloader._engine.remote.mail import RemoteMail
from stream_dataloader._engine.remote.messages import Reports
from stream_dataloader._engine.remote.worker import RemoteJob, library_version, run_worker
from stream_dataloader._engine.workers.channel import CLOSE, EXIT, Begin
from stream_dataloader._engine.workers.pool import Pool
from stream_dataloader._engine.workers.session import LONGEST_START_SECONDS
from stream_dataloader._engine.workers.workers import SHUTDOWN_SECONDS, Assignment, Workers
from stream_dataloader.errors import WorkerError, WorkerTimeoutError, shorten

_WORD_SECONDS = 10.0  # for Ray to tell why a connection broke
_MOST_STARTS = 20  # of a task that Ray loses before it begins; a lost node stays in Ray's view for some seconds

#: Options of the tasks. Ray may not give their processes, which `prepare` changed, to other tasks, nor restart one.
_TASK = {"num_cpus": 1, "max_calls": 1, "max_retries": 0}


class RayPool(Pool):
    """The workers of one loader, as tasks."""

    def __init__(self, work: Assignment) -> None:
        _ray()
        super().__init__(work)
        self._uses_slots = False  # another machine has no shared memory

    def _start_workers(self, begin: Begin) -> None:
        check_initialized()
        self.status.clear()
        workers = self._take_up(RayWorkers(self.work, self.status, begin))
        workers.start(begin)

    @property
    def method_of_start(self) -> str:
        return "ray"


def _ray() -> Any:
    """Return Ray, which is imported only where it is used."""
    try:
        import ray
    except ImportError:
        raise ImportError(
            'worker_method="ray" needs Ray, which is not installed; pip install "stream-dataloader[ray]"'
        ) from None
    return ray


def check_initialized() -> None:
    """Refuse to start Ray by accident: its first call would start a cluster of this machine alone."""
    if not _ray().is_initialized():
        raise RuntimeError(
            'worker_method="ray" needs a Ray cluster, and Ray is not initialized; call ray.init(address="auto") before '
            "the first batch, or ray.init() for this machine alone"
        )


class RayWorkers(Workers):
    """The current workers, each a task."""

    def __init__(self, work: Assignment, status: WorkerStatus, begin: Begin) -> None:
        reports = {number: Reports(number, status, work.counts.meters) for number in range(len(work.readers))}
        self._work, self.status = work, status
        has_ledger = len(work.readers) > 1 and self._reading(begin).known_lengths is None
        ledger = RemoteLedger(self._reading) if has_ledger else None
        super().__init__(work, status, "ray", RemoteMail(_ray().util.get_node_ip_address(), reports, ledger))
        self._is_cautious = begin.recovery.cautious
        self._begin = clock.monotonic()
        self._options = _TASK | dict(work.settings.ray_remote_args or {})
        self._tasks: dict[int, Any] = {}  # of workers that are not known to have ended
        self._starts = dict.fromkeys(self.readers, 0)
        self._dead: dict[int, str] = {}
        self._lost_nodes = False

    def _reading(self, begin: Begin) -> Reading:
        plan, work = self._work.dataset._plan(), self._work
        return Reading(plan, begin.place, work.readers, self.status, work.counts.meters, recovery=begin.recovery)

    def start(self, begin: Begin) -> None:
        init = ByValue(self._work.settings.worker_init_fn, "worker_init_fn")
        job = RemoteJob(self._work.dataset, init, torch.get_default_dtype(), begin.seed)
        with for_other_machine():
            self._job = _ray().put(dumps(job))
        self._run = _ray().remote(**self._options)(run_worker)
        for number in self.readers:
            self.mail.send(number, begin)
            self._start_task(number)

    def _start_task(self, number: int) -> None:
        self._starts[number] += 1
        meters, _ = self._work.counts.meters.copy_of(number, 0)
        self._tasks[number] = self._run.remote(
            self.mail.address, number, library_version(), self._work.readers, self._job, meters
        )

    def died(self) -> dict[int, str]:
        """See `Workers`. Tasks that Ray lost before they began are replaced here."""
        if self.left:
            return {}
        if not _ray().is_initialized():
            return dict.fromkeys(self.readers, "all workers ended with ray.shutdown()")
        broken = [number for number in self._tasks if number in self.mail.broken]
        if broken:
            _ray().wait([self._tasks[number] for number in broken], num_returns=len(broken), timeout=_WORD_SECONDS)
        for number, task in list(self._tasks.items()):
            if _ray().wait([task], timeout=0)[0]:
                del self._tasks[number]
                self._take_end(number, task)
        for number in broken:
            if number in self._tasks:  # a network may fail while both ends live
                self._dead[number] = self._named(number, "lost its connection")
        self._check_places()
        return self._dead

    def _take_end(self, number: int, task: Any) -> None:
        """Take note of the end of a worker's task."""
        errors, is_of_node, how = _ray().exceptions, False, "ended"
        try:
            _ray().get(task)
        except errors.RayTaskError as error:
            cause = error.cause
            raise (cause if isinstance(cause, WorkerError) else WorkerError(f"worker {number}: {error}")) from None
        except (errors.RayError, OSError) as error:
            is_of_node = isinstance(error, errors.NodeDiedError)
            how = f"died ({str(error).partition('. ')[0].strip().rstrip('.')})"
        never_began = number not in self.ready and (is_of_node or number not in self.mail.processes)
        if never_began and self._starts[number] < _MOST_STARTS:
            log.warning("worker %d %s before it began; Ray places it anew", number, how)
            self.mail.expect(number)
            self._start_task(number)
        else:
            self._lost_nodes |= is_of_node
            self._dead[number] = self._named(number, how)

    def _named(self, number: int, how: str) -> str:
        process = self.mail.processes.get(number)
        return f"worker {number} ({process or 'not placed'}) {how}"

    def _check_places(self) -> None:
        missing = [number for number in self.readers if number not in self.mail.processes]
        if missing and clock.monotonic() - self._begin > LONGEST_START_SECONDS:
            raise WorkerTimeoutError(
                f"worker {missing[0]} {self.why_missing(missing[0])}, {LONGEST_START_SECONDS:g} s after its start; add "
                "nodes, or lower num_workers or ray_remote_args"
            )

    def why_missing(self, worker: int) -> str:
        """See `Workers`."""
        if worker in self.mail.processes:
            return f"({self.mail.processes[worker]}) {super().why_missing(worker)}"
        if any(number not in self.mail.processes for number in range(worker)):
            return "has not begun"  # what is missing is said of the first
        asked = {name: value for name, value in self._options.items() if name not in ("max_calls", "max_retries")}
        free = {
            name: amount
            for name, amount in _ray().available_resources().items()
            if ":" not in name and (name in asked or "memory" not in name)
        }
        return f"has not begun: its process starts, or Ray has no place for {shorten(asked)}; free are {_amounts(free)}"

    def is_stopped(self, worker: int) -> bool:  # noqa: ARG002
        """See `Workers`; a signal on another machine is not seen."""
        return False

    def doing(self, worker: int, sources: Sequence[Any]) -> str:
        """See `Workers`."""
        word = "" if worker not in self._dead or self._knows(worker) else "soon after it was "
        return word + super().doing(worker, sources)

    def _knows(self, worker: int) -> bool:
        """Return whether the last activity of a dead worker is known, not only that of some milliseconds before."""
        return self._is_cautious or bool(self.status.exiting[worker])

    def suspects(self, worker: int) -> frozenset[tuple[int, int]]:
        """See `Workers`; a node that died was not killed by a source."""
        return super().suspects(worker) if self._knows(worker) and not self._lost_nodes else frozenset()

    def advice(self, died: Iterable[int]) -> str:  # noqa: ARG002
        """See `Workers`."""
        if self._lost_nodes:
            return "Its node is gone"
        return "Ray's logs of the worker say more; if it was out of memory, pass memory= in ray_remote_args"

    def leave(self) -> None:
        """End the workers; wait a limited time for them, then kill them."""
        with self._turn:
            if self._over:
                return
            self.left = True
            try:
                self.order(CLOSE)
                self.order(EXIT)
                # Workers that outlive the death of another can end by themselves: Ray may use their processes again.
                may_wait = bool(self._dead) or not self.hurries
                deadline = clock.monotonic() + SHUTDOWN_SECONDS * may_wait
                while self._connected() and clock.monotonic() < deadline:
                    self.mail.get(0.01)
            finally:
                connected = self._connected()
                self.mail.close()
                if _ray().is_initialized():
                    for number, task in self._tasks.items():
                        if number in connected or number in self._dead or number not in self.mail.processes:
                            _ray().cancel(task, force=True)
            self._over = True

    def _connected(self) -> set[int]:
        """Return the workers that were placed and whose connection has not ended."""
        connected: set[int] = set(self.mail.processes) - self.mail.broken
        return connected


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(resources.items())) or "no resources"
