"""How many steps one message from a worker carries: one, or several where steps are cheap.

A message costs some 100 microseconds on its way through torch's queue, often more than the step it carries.
All workers of a session put the same steps into their n-th messages; the first to begin one decides, by how
long the last ones took. So messages stay in step as single steps would, and a worker that waits for another
waits for a message that was asked for before.

Guarantee: what is in a batch does not depend on it; a message takes a few milliseconds to fill, or carries one
step, unless steps suddenly get slower.
"""

from __future__ import annotations

from collections.abc import Iterator

from stream_dataloader._assembly.slots import MOST_STEPS_A_MESSAGE
from stream_dataloader._memory.shared_memory import SharedMemory

_SHORT_SECONDS, _LONG_SECONDS = 1e-3, 4e-3


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


class Pace:
    """What the workers of one loader share.

    Args:
        workers: How many there are.
        messages: Most messages of one worker that can be on their way at once.
    """

    def __init__(self, workers: int, messages: int) -> None:
        self._workers, self._messages = workers, messages
        self._memory = SharedMemory(8 * (2 * workers + messages + 1))

    def messages(self, session: int, worker: int, *, together: bool) -> Messages:
        """A worker's messages of one session; see `Messages`."""
        return Messages(self._memory, self._workers, session, worker, together=together)


class Messages(Iterator[int]):
    """How many steps each of one worker's messages carries, one after the other, endlessly.

    Args:
        memory: What the workers share.
        workers: How many there are.
        session: The session's number.
        worker: The worker's number.
        together: All workers put the same steps into their n-th messages; needed if they wait for each other.
    """

    def __init__(self, memory: SharedMemory, workers: int, session: int, worker: int, *, together: bool) -> None:
        self._memory, self._session, self._worker = memory, session, worker
        self._seconds, words = memory.array(float)[:workers], memory.array()[workers:]
        self._most, self._decided = words[:workers], words[workers:]
        self._together = together
        self._steps, self._number = 1, 0
        self.filled(0.0, 1)

    def filled(self, seconds: float, most_steps: int) -> None:
        """Say how long the last message took, and how many steps at most one like it may carry."""
        self._seconds[self._worker], self._most[self._worker] = seconds, min(most_steps, MOST_STEPS_A_MESSAGE)

    def __next__(self) -> int:
        if self._together:
            self._steps = self._agreed(self._number)
        else:
            self._steps = steps_of_next(self._steps, float(self._seconds[self._worker]), int(self._most[self._worker]))
        self._number += 1
        return self._steps

    def _agreed(self, number: int) -> int:
        """What the first worker to come to a message decided; a word holds session, number and steps."""
        key = (self._session & 0x7FFF) << 32 | (number & 0xFFFFFFFF)
        place = number % len(self._decided)
        word = int(self._decided[place])
        if word >> 16 != key:
            with self._memory.locked():
                word = int(self._decided[place])
                if word >> 16 != key:
                    steps = steps_of_next(self._steps, float(self._seconds.max()), int(self._most.min()))
                    word = self._decided[place] = key << 16 | steps
        return word & 0xFFFF
