"""How many steps one message from a worker carries: one, or several where steps are cheap.

A message takes some 50 microseconds, often more than the step that it carries. All workers of
a session put the same steps into their n-th messages. The first worker to begin a message decides how many, by how long
the last ones took. So messages keep the order that single steps have, and a worker that waits for another one waits for
a message that was requested earlier.

Guarantee: no batch depends on it. A message takes a few milliseconds to fill, or carries one step, unless steps
suddenly get slower. If a worker has threads, which read ahead, slow steps may also come two in a message.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from stream_dataloader._assembly.slots import MOST_STEPS_A_MESSAGE
from stream_dataloader._memory.fields import Carver, bytes_of
from stream_dataloader._memory.shared_memory import SharedMemory

_SHORT_SECONDS, _LONG_SECONDS = 2e-3, 8e-3


def steps_of_next(steps: int, slowest_seconds: float, most: int) -> int:
    """How many steps the next message carries.

    Args:
        steps: Steps of the message before.
        slowest_seconds: How long the slowest worker's last took to fill.
        most: The most there may be.
    """
    if slowest_seconds < _SHORT_SECONDS:
        steps *= 2
    elif slowest_seconds > _LONG_SECONDS:
        steps //= 2
    return max(1, min(steps, most))


class _Shared:
    """What the workers of one loader share.

    Attributes:
        seconds: How long each worker's last message took to fill.
        most: How many steps a message like it may carry at most, by worker.
        decided: What was decided for the last messages: session, number and steps in one word each.
    """

    def __init__(self, carve: Carver, workers: int, messages: int) -> None:
        self.seconds = carve(workers, dtype=np.float64)
        self.most = carve(workers)
        self.decided = carve(messages + 1)


class Pace:
    """How the workers of one loader agree on the sizes of their messages.

    Args:
        workers: How many there are.
        messages: Most messages of one worker that can be on their way at once.
    """

    def __init__(self, workers: int, messages: int) -> None:
        self._workers = workers
        self._messages = messages
        self._memory = SharedMemory(bytes_of(self._lay_out))

    def _lay_out(self, carve: Carver) -> _Shared:
        return _Shared(carve, self._workers, self._messages)

    def sizes(self, session: int, worker: int, *, together: bool) -> MessageSizes:
        """A worker's messages of one session; see `MessageSizes`."""
        return MessageSizes(
            self._memory, self._lay_out(Carver(self._memory.buffer)), session, worker, together=together
        )


class MessageSizes(Iterator[int]):
    """How many steps each of one worker's messages carries, one after the other, endlessly.

    Args:
        memory: What the workers share, and its lock.
        shared: What lies in it.
        session: The session's number.
        worker: The worker's number.
        together: All workers put the same steps into their n-th messages; needed if they wait for each other.
    """

    def __init__(self, memory: SharedMemory, shared: _Shared, session: int, worker: int, *, together: bool) -> None:
        self._memory = memory
        self._shared = shared
        self._session = session
        self._worker = worker
        self._together = together
        self._steps = 1  # of the message before
        self._number = 0  # of the message that comes next
        self.filled(0.0, 1)

    def filled(self, seconds: float, most_steps: int) -> None:
        """Say how long the last message took, and how many steps at most one like it may carry."""
        self._shared.seconds[self._worker] = seconds
        self._shared.most[self._worker] = min(most_steps, MOST_STEPS_A_MESSAGE)

    def __next__(self) -> int:
        if self._together:
            self._steps = self._agreed(self._number)
        else:
            own, shared = self._worker, self._shared
            self._steps = steps_of_next(self._steps, float(shared.seconds[own]), int(shared.most[own]))
        self._number += 1
        return self._steps

    def _agreed(self, number: int) -> int:
        """What the first worker to come to a message decided; a word holds session, number and steps."""
        key = (self._session & 0x7FFF) << 32 | (number & 0xFFFFFFFF)
        shared = self._shared
        place = number % len(shared.decided)
        word = int(shared.decided[place])
        if word >> 16 != key:
            with self._memory.locked():
                word = int(shared.decided[place])
                if word >> 16 != key:
                    steps = steps_of_next(self._steps, float(shared.seconds.max()), int(shared.most.min()))
                    word = shared.decided[place] = key << 16 | steps
        return word & 0xFFFF
