"""How many steps one message from a worker carries: one, or several where steps are cheap.

A message takes some 50 microseconds, often more than the step that it carries. All workers of a session put the same
steps into their n-th messages. The first worker to begin a message decides how many, by how long the last ones took. So
messages keep the order that single steps have: a worker that waits for another one waits for a message that was
requested earlier, and a fast worker is ahead of a slow one by no more than the messages that may be on their way.

Guarantee: no batch depends on it. A message takes a few milliseconds to fill, or carries one step, unless steps
suddenly get slower. If a worker has threads, which read ahead, slow steps may also come two in a message.
"""

from __future__ import annotations

import numpy as np

from stream_dataloader._assembly.slots import MOST_STEPS_A_MESSAGE
from stream_dataloader._memory.fields import Carver, SharedFields

_SHORT_SECONDS, _LONG_SECONDS = 2e-3, 8e-3


def steps_of_next(steps: int, slowest_seconds: float, most: int) -> int:
    """How many steps the next message carries, at most `most`."""
    if slowest_seconds < _SHORT_SECONDS:
        steps *= 2
    elif slowest_seconds > _LONG_SECONDS:
        steps //= 2
    return max(1, min(steps, most))


class Pace(SharedFields):
    """How the workers of one loader agree on the sizes of their messages."""

    def __init__(self, workers: int, messages: int) -> None:
        self._workers = workers
        self._messages = messages
        super().__init__()

    def _lay_out(self, carve: Carver) -> None:
        self._seconds = carve(self._workers, dtype=np.float64)  # how long each worker's last message took to fill
        self._most = carve(self._workers)  # how many steps a message like it may carry
        self._decided = carve(self._messages + 1)  # for the last messages: session, number and steps in a word

    def filled(self, worker: int, seconds: float, most_steps: int) -> None:
        """Note how long a worker's message took, and how many steps one may carry."""
        self._seconds[worker] = seconds
        self._most[worker] = min(most_steps, MOST_STEPS_A_MESSAGE)

    def agreed(self, session: int, number: int, steps: int) -> int:
        """How many steps the session's n-th messages carry: what the first worker to come to one decided.

        Those before had `steps`.
        """
        key = (session & 0x7FFF) << 32 | (number & 0xFFFFFFFF)
        place = number % len(self._decided)
        word = int(self._decided[place])
        if word >> 16 != key:
            with self._memory.locked():
                word = int(self._decided[place])
                if word >> 16 != key:
                    steps = steps_of_next(steps, float(self._seconds.max()), int(self._most.min()))
                    word = self._decided[place] = key << 16 | steps
        return word & 0xFFFF
