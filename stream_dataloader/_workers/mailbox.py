"""What the processes of one loader say to each other in memory that all see, beside parts and requests.

All workers of a session put the same steps into their n-th messages: one, or several where steps are cheap, as the
first worker to begin a message decides.

Guarantee: each value is written by one side only, but for what is decided together, under a lock.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from stream_dataloader._assembly.slots import MOST_STEPS_A_MESSAGE
from stream_dataloader._memory.fields import Carver, SharedFields

_KEPT_SESSIONS = 4
_SHORT_SECONDS, _LONG_SECONDS = 2e-3, 8e-3


def steps_of_next(steps: int, slowest_seconds: float, most: int) -> int:
    """How many steps the next message carries, at most `most`."""
    if slowest_seconds < _SHORT_SECONDS:
        steps *= 2
    elif slowest_seconds > _LONG_SECONDS:
        steps //= 2
    return max(1, min(steps, most))


class Mailbox(SharedFields):
    """What a loader's workers and its main process know of each other; `messages` may be on their way.

    Sessions are numbered from 1. A worker that is kept may still look at one when the next is announced.
    """

    def __init__(self, workers: int, messages: int) -> None:
        self._workers = workers
        self._messages = messages
        super().__init__()

    def _lay_out(self, carve: Carver) -> None:
        self._announced = carve(1).data  # number of the last session that was announced; 0 is none
        self._ended = carve(1).data  # number of the last session that has ended
        self._epoch = carve(_KEPT_SESSIONS).data
        self.pids = carve(self._workers)  # each worker writes its own; 0 before it came
        self._done = carve(self._workers).data  # number of the last session that each worker has read to its end
        self._seconds: Any = carve(self._workers, dtype=np.float64).data  # how long each last message took to fill
        self._most = carve(self._workers).data  # how many steps a message like it may carry
        self._decided = carve(self._messages + 1).data  # for the last messages: session, number and steps in a word

    def open(self, epoch: int) -> int:
        session = self._announced[0] + 1
        self._epoch[session % _KEPT_SESSIONS] = epoch
        self._announced[0] = session
        return session

    def close(self, session: int) -> None:
        self._ended[0] = max(self._ended[0], session)

    def closed(self, session: int) -> bool:
        return self._ended[0] >= session

    def leave(self, session: int, worker: int) -> None:
        """Say that a worker has read a session to its end, so that it may exit."""
        self._done[worker] = session

    def may_exit(self, session: int, worker: int) -> bool:
        return self.closed(session) or self._done[worker] >= session

    def epoch(self, session: int) -> int:
        return self._epoch[session % _KEPT_SESSIONS]

    def filled(self, worker: int, seconds: float, most_steps: int) -> None:
        """Note how long a worker's message took, and how many steps one may carry."""
        self._seconds[worker] = seconds
        self._most[worker] = min(most_steps, MOST_STEPS_A_MESSAGE)

    def steps_of(self, session: int, number: int, steps: int) -> int:
        """How many steps the session's n-th messages carry, as the first worker to come to one decided.

        Those before had `steps`.
        """
        key = (session & 0x7FFF) << 32 | (number & 0xFFFFFFFF)
        place = number % len(self._decided)
        word = self._decided[place]
        if word >> 16 != key:
            with self._memory.locked():
                word = self._decided[place]
                if word >> 16 != key:
                    steps = steps_of_next(steps, max(self._seconds), min(self._most))
                    word = self._decided[place] = key << 16 | steps
        return word & 0xFFFF
