"""Epochs of n batches, which are stretches of one endless run: which of them a step of the run belongs to.

::

    n = 4                step    0 1 2 3 4 5 6 7 8 9
    each read to its end         0 0 0 0|1 1 1 1|2 2
    1 left after step 5          0 0 0 0|1 1|2 2 2 2        an epoch that was left is over; the next has n batches

Guarantee: pure numbers; what was read to its end takes no memory, however many epochs there were.
"""

from __future__ import annotations

from bisect import bisect_left

from stream_dataloader._schedule.stretch import StretchPlace


class Stretches:
    """The epochs of a run that was begun, or gone on with, at some place.

    Args:
        length: Number of batches n of an epoch.
        step: The step of the run where it was begun or gone on with.
        place: The place in an epoch that this is.
    """

    def __init__(self, length: int, step: int, place: StretchPlace) -> None:
        self._length = length
        self._begins: list[int] = []  # steps at which an epoch begins, but for those that follow a whole one
        self._numbers: list[int] = []  # of these epochs
        self.begin(step, place)

    def begin(self, step: int, place: StretchPlace) -> None:
        """An epoch begins at a step, or what is left of it does.

        Args:
            step: The step.
            place: Where in the epoch that is.
        """
        if not self._begins or self.at(step) != place:
            self._begins.append(step - place.delivered)
            self._numbers.append(place.number)

    def at(self, step: int) -> StretchPlace:
        """The place where a step is next: behind an epoch's last batch, the beginning of the epoch after it."""
        last = max(bisect_left(self._begins, step) - 1, 0)
        whole, delivered = divmod(step - self._begins[last], self._length)
        return StretchPlace(self._numbers[last] + whole, delivered)
