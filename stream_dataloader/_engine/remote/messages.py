"""Messages between a loader and its workers on other machines, with arrays out of band.

A frame from a worker begins with a report: the numbers that workers of one machine share with the loader in memory. ::

    report | pickle | array | array | ...        report              (a sign of life, if there is nothing to send)

Guarantee: an array that was sent is copied once, into memory that belongs to it.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from stream_dataloader._engine.memory.pickling import dumps_by_value
from stream_dataloader._engine.reading.activity import HEAD, Meters, WorkerStatus
from stream_dataloader._engine.schedule.rules import IntArray

_HEAD = 3  # numbers before the others in a report: the clock, and how many come of the status and of the meters


class Pickled:
    """A message as buffers; its length is in bytes."""

    def __init__(self, buffers: Sequence[Any]) -> None:
        self.buffers = [memoryview(buffer).cast("B") for buffer in buffers]

    def __len__(self) -> int:
        return sum(map(len, self.buffers))


def dumps_home(content: Any) -> Pickled:
    """Pickle for the loader; objects that it has go by reference."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = dumps_by_value(content, home=True, buffer_callback=buffers.append)
    return Pickled([pickled, *(buffer.raw() for buffer in buffers)])


def loads(frame: Sequence[Any]) -> Any:
    """Unpickle a frame's content, whose arrays stay in the frame's buffers."""
    return pickle.loads(frame[0], buffers=frame[1:])


class Reports:
    """The reports of one reader, on either machine."""

    def __init__(self, number: int, status: WorkerStatus, meters: Meters) -> None:
        self._number, self._status, self._meters = number, status, meters
        self._events = int(meters.copy_of(number, 0)[0][HEAD])  # those that were reported
        self._later_ns: int | None = None

    def make(self) -> bytes:
        """Return a report."""
        status = self._status.copy_of(self._number)
        numbers, events = self._meters.copy_of(self._number, self._events)
        self._events = int(numbers[HEAD])
        head = time.monotonic_ns(), len(status), len(numbers)
        return np.concatenate([head, status, numbers, events.ravel()]).astype(np.int64).tobytes()

    def take(self, report: Any) -> None:
        """Take over the numbers of a report; times are converted to this machine's clock."""
        numbers: IntArray = np.frombuffer(report, np.int64).copy()
        clock, status, meters = numbers[:_HEAD].tolist()
        if self._later_ns is None:  # of the first one, which is the sooner here the less was under way
            self._later_ns = time.monotonic_ns() - clock
        self._status.put(self._number, numbers[_HEAD : _HEAD + status])
        rest = numbers[_HEAD + status :]
        self._meters.put(self._number, rest[:meters], rest[meters:].reshape(-1, 4), self._later_ns)
