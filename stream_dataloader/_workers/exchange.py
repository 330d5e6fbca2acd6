"""Several readers at once: where threads put the parts that they have read, a FIFO each.

::

    reader 0   part 3 | part 4 |                 full, with room for two: the thread waits
    reader 1   part 3 |                          it reads step 4
                  |
               step 3 is taken: a part of each reader

Guarantees: a reader's streams are opened, read and closed in one thread; what ends that comes in the place of its part;
nobody waits once the exchange is closed.
"""

from __future__ import annotations

import itertools
import threading
import time as clock
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

from stream_dataloader._assembly.part import Part
from stream_dataloader._reading.reader import PartReader
from stream_dataloader._schedule.rules import IntArray

#: How many steps a thread of a worker reads before they are asked for; with 1 jittery batches take a sixth longer.
ROOM = 2

_LOOK_SECONDS = 2e-3  # between looks at what batches have taken
_FAREWELL_SECONDS = 4.0  # to all threads together, after a failure


class Failure(NamedTuple):
    """What ended a thread's reading: no stream's error, which travels in a part."""

    worker_id: int
    error: BaseException


class Exchange:
    """Parts that were read and not taken yet; there is `room` for so many a worker.

    With `taken`, by batches of each worker, parts are had as they come, up to `room` more.
    """

    def __init__(self, workers: int, room: int, taken: IntArray | None = None) -> None:
        self.closed = False
        self._most = room
        self._taken = taken
        self.look_seconds = None if taken is None else _LOOK_SECONDS  # that changes without a word
        self._given = [0] * workers if taken is None else taken.tolist()
        self._read: list[deque[Part | Failure]] = [deque() for _ in range(workers)]
        self._ended = [False] * workers
        lock = threading.RLock()  # one that `close` can take again, if garbage is collected while it is held
        self._ready = threading.Condition(lock)
        self._room = threading.Condition(lock)

    def put(self, worker: int, part: Part | None) -> bool:
        """Hand over a part, None at the end, and wait for room; False if none is wanted."""
        read = self._read[worker]
        last = part is None or part.end or bool(part.faults)
        with self._ready:
            if part is not None:
                read.append(part)
            self._ended[worker] = last
            if self._step_is_ready():
                self._ready.notify()
            while len(read) >= self._most and not self.closed and not last:
                self._room.wait()
            return not self.closed

    def fail(self, worker: int, error: BaseException) -> None:
        """Hand over what a worker failed with, and wait until nothing is wanted any more.

        Its queue may be left only then: others that wait for its tickets would take that for the end of the session,
        and their parts for those of lanes without data.
        """
        with self._ready:
            self._read[worker].append(Failure(worker, error))
            self._ended[worker] = True
            self._ready.notify()
            while not self.closed:
                self._room.wait()

    def _step_is_ready(self) -> bool:
        ready = True
        for worker, (read, ended) in enumerate(zip(self._read, self._ended, strict=True)):
            if read and type(read[0]) is Failure:
                return True
            if self._taken is None:
                ready = ready and (bool(read) or ended)
            elif read and self._has_credit(worker):
                return True
            else:
                ready = ready and ended and not read
        return ready

    def _has_credit(self, worker: int) -> bool:
        return self._taken is None or self._given[worker] < self._taken[worker] + self._most

    def take(self, seconds: float | None = None) -> list[Part] | Failure | None:
        """The next part of each worker that has not ended, or a failure; None after so many seconds.

        None of them has one once all have ended.
        """
        with self._ready:
            if not self._ready.wait_for(self._step_is_ready, seconds):
                return None
            parts: list[Part] = []
            for worker, read in enumerate(self._read):
                if read and (type(read[0]) is Failure or self._has_credit(worker)):
                    part = read.popleft()
                    if isinstance(part, Failure):
                        return part
                    parts.append(part)
                    self._given[worker] += 1
            self._room.notify_all()
            return parts

    def close(self) -> None:
        """No part is wanted any more: threads that wait go on, and end."""
        with self._ready:
            self.closed = True
            self._room.notify_all()


def deliver(worker: int, reader: PartReader, exchange: Exchange) -> None:
    """Read as long as parts are wanted, and close all streams."""
    try:
        for part in reader:
            if not exchange.put(worker, part):
                return
        exchange.put(worker, None)
    except BaseException as error:
        exchange.fail(worker, error)
    finally:
        reader.close()


def read_in_turn(readers: Sequence[PartReader]) -> Generator[list[Part], None, None]:
    """The parts that readers make of each step, read one after the other."""
    try:
        while parts := [part for reader in readers for part in itertools.islice(reader, 1)]:
            yield parts
    finally:
        for reader in readers:
            reader.close()


def read_in_threads(
    readers: Sequence[PartReader], exchange: Exchange, threads: list[threading.Thread], is_over: Callable[[], bool]
) -> Generator[list[Part], None, None]:
    """The same, each reader read in a thread of its own, which is put into `threads`."""
    failed = True
    try:
        for number, reader in enumerate(readers):
            name, how = f"stream-reader-{number}", (number, reader, exchange)
            thread = threading.Thread(target=deliver, args=how, name=name, daemon=True)
            thread.start()
            threads.append(thread)
        failed = False
        while (found := exchange.take(exchange.look_seconds)) != []:
            if isinstance(found, Failure):
                failed = True
                raise found.error
            if found is not None:
                yield found
            elif is_over():
                return
    finally:
        exchange.close()
        join(threads, _FAREWELL_SECONDS if failed else None)


def join(threads: Sequence[threading.Thread], seconds: float | None = None) -> None:
    """Wait until threads have closed all streams, for some time; None: also those that hang."""
    deadline = None if seconds is None else clock.monotonic() + seconds
    for thread in threads:
        if thread is not threading.current_thread():  # garbage is collected in any thread
            thread.join(None if deadline is None else max(deadline - clock.monotonic(), 0))
