"""A pool of workers that are threads, of which one runs at a time, for as long as the test says.

All but processes and messages between them is real: loader, iteration, restarts, the session that workers share,
lanes and parts. A worker runs from one *pause* to the next: its streams pause around each item, and it pauses while
it waits for a decision on a request. So the order in which workers move is a list of numbers, and a run that fails can
be run again.

What this knows of the engine's insides is here: `SimulatedLoader._start_anew`, `SimulatedPool.start` and
`_Worker._read`.
"""

import itertools
import os
import threading
from collections import deque

from stream_dataloader import StreamDataLoader
from stream_dataloader._engine.reading.plan import Reading
from stream_dataloader._engine.schedule.rules import NEVER
from stream_dataloader._engine.workers.channel import Begin
from stream_dataloader._engine.workers.shared import Rows, Shared
from stream_dataloader.errors import WorkerDeathError

_here = threading.local()


def pause():
    """Let another worker go on, if this is one."""
    worker = getattr(_here, "worker", None)
    if worker is not None:
        worker.pause()


class SimulatedLoader(StreamDataLoader):
    """A loader whose workers are simulated.

    Args:
        prefetch: How many parts each worker reads ahead of what was received from it.

    Attributes:
        deaths: How many deaths of workers it was told of.
        doomed: A worker that dies when a part of a step is there, and another is not; None if none does.
        order: Who moves first when a batch is waited for, by worker number; then they take turns.
    """

    def __init__(self, dataset, num_workers, *, prefetch=1, max_restarts=0):
        self.prefetch, self.deaths, self.order, self.doomed = prefetch, 0, (), None
        super().__init__(dataset, num_workers, max_restarts=max_restarts)

    def _start_anew(self):
        super()._start_anew()
        self._simulated = SimulatedPool(self)
        if self.num_workers:
            self._starter.pool = self._simulated

    def move(self, worker):
        """Let a worker go on to its next pause."""
        if self._simulated.feed is not None:
            self._simulated.feed.move(worker)

    def kill(self, worker, *, noticed_late):
        """Let a worker die where it stands; noticed late, what others have sent is received before that is known."""
        if self._simulated.feed is not None:
            self._simulated.feed.kill(worker, noticed_late)


class SimulatedPool:
    """Starts simulated workers; see `_engine.workers.pool.Pool`."""

    def __init__(self, loader):
        self.owner, self.feed, self._loader = os.getpid(), None, loader

    def died(self):
        return {}

    def start(self, place, recovery, *, whole_windows):
        dataset, workers = self._loader._ranks.dataset, self._loader.num_workers
        alone = Reading.alone(dataset._plan(), place.epoch, workers)
        rows = Rows(dataset._rules, shared=False) if workers > 1 else None
        shared = Shared(dataset, alone.readers, alone.status, alone.meters, rows, None, in_threads=False)
        begin = Begin(1, place, whole_windows, recovery, NEVER, 0)

        def open_reader(worker, closed):
            return shared.enter(worker, closed, begin)

        self.feed = SimulatedFeed(self._loader, [_Worker(number, open_reader) for number in range(workers)])
        return self.feed


class SimulatedFeed:
    """One iteration's parts; see `_engine.workers.session.Session`."""

    def __init__(self, loader, workers):
        self._loader, self._workers = loader, workers
        self._noticed = False
        self._step = NEVER  # the one that is put together

    def move(self, number):
        """Let a worker go on, if it was asked for a further part: torch asks for one when one is yielded, in order."""
        worker, prefetch = self._workers[number % len(self._workers)], self._loader.prefetch
        if worker.alive and len(worker.parts) < prefetch and worker.last_step < self._step + prefetch:
            worker.move()

    def kill(self, number, noticed_late):
        worker = self._workers[number % len(self._workers)]
        if worker.alive:
            worker.kill()
            self._noticed |= not noticed_late

    def receive(self, step):
        if step == self._step and self._loader.doomed is not None:  # some part of it is there
            self.kill(self._loader.doomed, noticed_late=False)
            self._loader.doomed = None
        self._step = step
        turns = itertools.chain(self._loader.order, itertools.islice(itertools.cycle(range(len(self._workers))), 3_000))
        for number in turns:
            ready = [worker for worker in self._workers if worker.parts]
            dead = [worker.number for worker in self._workers if worker.dead]
            if dead and (self._noticed or not ready):
                self._loader.deaths += 1
                raise WorkerDeathError(f"worker {dead[0]} died at step {step}")
            if ready:
                return (min(ready, key=lambda worker: worker.sent_at).send(),)
            self.move(number)
        raise AssertionError(f"the workers wait for each other at step {step}")

    def slot(self, step):
        return None

    def give_credit(self, step):
        pass

    def close(self):
        for worker in self._workers:
            worker.close()


class _Worker:
    """One worker: a thread that runs only while `move` waits for it.

    Attributes:
        alive: It has not ended.
        dead: It was killed.
        parts: What it has sent and nobody has received, each with a number that says when.
        last_step: The step of the last of its parts.
    """

    _sendings = itertools.count()

    def __init__(self, number, open_reader):
        self.number, self.alive, self.dead = number, True, False
        self.parts = deque()
        self.last_step = -1
        self._open_reader, self._reader = open_reader, None
        self._closed, self._error = False, None
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name=f"simulated-worker-{number}", daemon=True)
        self._thread.start()

    @property
    def sent_at(self):
        return self.parts[0][0]

    def send(self):
        return self.parts.popleft()[1]

    def move(self):
        self._go.release()
        self._stopped.acquire()
        if self._error is not None:
            raise AssertionError(f"worker {self.number} failed") from self._error

    def pause(self):
        if self._closed:
            return
        self._stopped.release()
        self._go.acquire()
        if self.dead:
            raise _Killed

    def kill(self):
        self.dead = True
        self.move()
        self._thread.join()

    def close(self):
        """The end of the session: a worker that waits learns of it, one that reads comes to the end of its part."""
        if self._closed:
            return
        self._closed = True
        if self.alive:
            self.move()
        self._thread.join()
        if self._reader is not None:  # of one that was killed: its files are closed with its process
            self._reader.close()

    def _run(self):
        _here.worker = self
        self._go.acquire()
        try:
            if not (self._closed or self.dead):
                self._read()
        except _Killed:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self.alive = False
            self._stopped.release()

    def _read(self):
        self._reader = self._open_reader(self.number, self._is_closed)
        for part in self._reader:
            self.parts.append((next(self._sendings), part))
            self.last_step = part.step
            self.pause()
            if self._closed:
                return

    def _is_closed(self):
        """Asked by the engine while it waits for others."""
        self.pause()
        return self._closed


class _Killed(BaseException):
    """Ends a worker's thread where it stands."""
