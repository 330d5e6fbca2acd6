"""How many steps one message from a worker carries: one, or several where steps are cheap.

A message takes some 50 microseconds, often more than the step that it carries. All workers of a session put the same
steps into their n-th messages. The first worker to begin a message decides how many, by how long the last ones took. So
messages keep the order that single steps have: a worker that waits for another one waits for a message that was
requested earlier, and a fast worker is ahead of a slow one by no more than the messages that may be on their way.

Guarantee: no batch depends on it. A message takes a few milliseconds to fill, or carries one step, unless steps
suddenly get slower. If a worker has threads, which read ahead, slow steps may also come two in a message.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from stream_dataloader._assembly.slots import MOST_STEPS_A_MESSAGE
from stream_dataloader._memory.fields import Carver, SharedFields

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


class Pace(SharedFields):
    """How the workers of one loader agree on the sizes of their messages.

    Args:
        workers: How many there are.
        messages: Most messages of one worker that can be on their way at once.

    Attributes:
        seconds: How long each worker's last message took to fill.
        most: How many steps a message like it may carry at most, by worker.
        decided: What was decided for the last messages: session, number and steps in one word each.
    """

    def __init__(self, workers: int, messages: int) -> None:
        self._workers = workers
        self._messages = messages
        super().__init__()

    def _lay_out(self, carve: Carver) -> None:
        self.seconds = carve(self._workers, dtype=np.float64)
        self.most = carve(self._workers)
        self.decided = carve(self._messages + 1)

    def agreed(self, session: int, number: int, steps: int) -> int:
        """How many steps the session's n-th messages carry: what the first worker to come to one decided.

        Args:
            session: The session's number.
            number: The messages'.
            steps: Steps of the message before.
        """
        key = (session & 0x7FFF) << 32 | (number & 0xFFFFFFFF)
        place = number % len(self.decided)
        word = int(self.decided[place])
        if word >> 16 != key:
            with self._memory.locked():
                word = int(self.decided[place])
                if word >> 16 != key:
                    steps = steps_of_next(steps, float(self.seconds.max()), int(self.most.min()))
                    word = self.decided[place] = key << 16 | steps
        return word & 0xFFFF


class MessageSizes(Iterator[int]):
    """How many steps each of one worker's messages carries, one after the other, endlessly.

    Args:
        pace: What the workers share.
        session: The session's number.
        worker: The worker's number.
    """

    def __init__(self, pace: Pace, session: int, worker: int) -> None:
        self._pace = pace
        self._session = session
        self._worker = worker
        self._steps = 1  # of the message before
        self._number = 0  # of the message that comes next
        self.filled(0.0, 1)

    def filled(self, seconds: float, most_steps: int) -> None:
        """Say how long the last message took, and how many steps at most one like it may carry."""
        self._pace.seconds[self._worker] = seconds
        self._pace.most[self._worker] = min(most_steps, MOST_STEPS_A_MESSAGE)

    def __next__(self) -> int:
        self._steps = self._pace.agreed(self._session, self._number, self._steps)
        self._number += 1
        return self._steps
