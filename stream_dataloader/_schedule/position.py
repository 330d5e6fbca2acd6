"""Which epoch comes next, and from which place in it: the same for a loader and for a sampler of indices.

::

    length None      epochs of their own      each is scheduled by itself, and the next one follows
    length n         run    0 1 2 3 4 5 ...   one endless epoch of `padding_mode="cycle"`, with its steps and passes
                     epochs |- 0 -|- 1 -|     n batches each, counted for trainers

    set_epoch, or a state is loaded ---> the coming epoch ---+
                                                             | begin: an iterator claims it
    the epoch after it is the coming one <--- what is read <-+

Guarantees: what was set or loaded is used once. In a run only a loaded state and `set_epoch(0)` move the place.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any, NamedTuple


class EpochPlace(NamedTuple):
    """A place in an epoch.

    Attributes:
        number: The epoch's number.
        delivered: How many of its batches come before.
    """

    number: int
    delivered: int


class EpochStart(NamedTuple):
    """Where an epoch begins, or is continued.

    Attributes:
        run: The number of the epoch that is scheduled; of the endless run, if epochs are n batches of one.
        place: Where in it, which has a `step`; None at its beginning.
        epoch: The epoch, and how many of its batches come before.
    """

    run: int
    place: Any
    epoch: EpochPlace


BEGINNING = EpochStart(0, None, EpochPlace(0, 0))


class EpochsOfRun:
    """Which epoch of n batches a step of an endless run belongs to.

    ::

        n = 4                step    0 1 2 3 4 5 6 7 8 9
        each read to its end         0 0 0 0|1 1 1 1|2 2
        1 left after step 5          0 0 0 0|1 1|2 2 2 2        an epoch that was left is over; the next has n batches
    """

    def __init__(self, length: int, step: int, place: EpochPlace) -> None:
        self._length = length
        self._begins: list[int] = []  # steps at which an epoch begins, but for those that follow a whole one
        self._numbers: list[int] = []  # of these epochs
        self.begin(step, place)

    def begin(self, step: int, place: EpochPlace) -> None:
        """An epoch, or what is left of it, begins at a step."""
        if not self._begins or self._in(len(self._begins) - 1, step) != place:
            self._begins.append(step - place.delivered)
            self._numbers.append(place.number)

    def at(self, step: int) -> EpochPlace:
        """The place where a step is next: behind an epoch's last batch, the beginning of the epoch after it."""
        return self._in(max(bisect_left(self._begins, step) - 1, 0), step)

    def _in(self, begun: int, step: int) -> EpochPlace:
        whole, delivered = divmod(step - self._begins[begun], self._length)
        return EpochPlace(self._numbers[begun] + whole, delivered)


class Position:
    """Where what is read in epochs stands, from one epoch to the next.

    Args:
        length: Number of batches n of an epoch of an endless run; None: epochs are scheduled each by itself.

    Attributes:
        begun: Where the epoch that began last did; None if none did since the position was built or loaded.
        epochs: The epochs of the run that is read; None if epochs are no part of a run.
    """

    def __init__(self, length: int | None = None) -> None:
        self.length = length
        self.begun: EpochStart | None = None
        self.epochs: EpochsOfRun | None = None
        self._origin = BEGINNING  # what comes, as long as none has begun
        self._unnumbered = False  # the origin has no number of its own: the state was of a run not read in epochs
        self._wanted: int | None = None  # the number that set_epoch gave the coming epoch
        self._first_step = 0  # of the epoch that began last
        self._reached: Callable[[], Any] | None = None  # where what is read stands

    def set_epoch(self, number: int) -> None:
        """Set the number of the epoch that comes next."""
        self._wanted = number

    def load(self, run: int, place: Any, saved: EpochPlace | None) -> None:
        """Continue from a saved place.

        Args:
            saved: Where in an epoch of n batches; None if it was saved without such.
        """
        self.begun = self.epochs = self._reached = self._wanted = None
        if self.length is None:
            self._origin = EpochStart(run, place, EpochPlace(run, 0 if place is None else place.step))
            return
        self._unnumbered = saved is None and place is not None
        number, delivered = saved or (0, 0)
        if delivered >= self.length:  # epochs may have been longer
            number, delivered = number + 1, 0
        self._origin = EpochStart(run, place, EpochPlace(number, delivered))

    def forget_place(self) -> None:
        """Forget the place that was loaded, or reached in a run: it is of another rank."""
        if self.length is None:
            self._origin = EpochStart(self._origin.run, None, EpochPlace(self._origin.run, 0))
            return
        self._origin, self._unnumbered = BEGINNING, self.begun is not None
        self.begun = self.epochs = self._reached = None

    def coming(self) -> EpochStart:
        """What comes next, with the number that was set."""
        own, wanted = self._by_itself(), self._wanted
        if wanted is None or wanted == own.epoch.number:
            return own
        if self.length is None:
            return EpochStart(wanted, None, EpochPlace(wanted, 0))
        if wanted == 0 and not self._unnumbered:
            return BEGINNING
        return own._replace(epoch=EpochPlace(wanted, 0))

    def _by_itself(self) -> EpochStart:
        """What comes next if no number was set."""
        if self.begun is None:
            return self._origin
        run, _, epoch = self.begun
        if self.length is None:
            return EpochStart(run + 1, None, EpochPlace(run + 1, 0))
        assert self._reached is not None
        reached = self._reached()
        place = reached if reached.step else None
        if reached.step == self._first_step:  # nothing of the epoch that began last was delivered
            return EpochStart(run, place, epoch)
        return EpochStart(run, place, EpochPlace(epoch.number + 1, 0))

    @property
    def is_by_itself(self) -> bool:
        """What comes next is what comes if no number was set."""
        return self._wanted is None or self.coming() == self._by_itself()

    @property
    def is_set(self) -> bool:
        """`set_epoch` was called for the coming epoch."""
        return self._wanted is not None

    @property
    def continues(self) -> bool:
        """The coming epoch continues the run that is being read."""
        return self.length is not None and self.begun is not None and self.coming() is not BEGINNING

    @property
    def was_left(self) -> bool:
        """A state is that of the coming epoch, not that of what was read last."""
        if self._reached is None:
            return True
        return self._wanted is not None if self.length is None else not self.is_by_itself

    @property
    def left(self) -> int | None:
        """How many batches the epoch that began last has here; None if epochs are no part of a run."""
        if self.length is None or self.begun is None:
            return self.length
        return self.length - self.begun.epoch.delivered

    def renaming(self, what: str) -> str | None:
        """What to tell whoever gave the coming epoch of a run another number than its own; None if nobody did."""
        if self.length is None or self._wanted is None or self._unnumbered:
            return None
        coming = self.coming()
        number, own = coming.epoch.number, self._by_itself().epoch.number
        if number == own or coming is BEGINNING:
            return None
        return (
            f"set_epoch({number}) was called, and epoch {own} comes next. An endless run has no other place for epoch "
            f"{number}: it goes on where it stands, and its next {self.length} batches are called epoch {number}. To "
            f"go on where another {what} stopped, load its state; set_epoch(0) begins anew"
        )

    def begin(self, step: int, reached: Callable[[], Any]) -> EpochStart:
        """The coming epoch begins: what was set or loaded is used."""
        start = self.coming()
        if self.length is not None:
            if self.continues and self.epochs is not None:
                self.epochs.begin(step, start.epoch)
            else:
                self.epochs = EpochsOfRun(self.length, step, start.epoch)
        self.begun, self._first_step, self._reached = start, step, reached
        self._wanted, self._unnumbered = None, False
        return start

    def at_rest(self) -> Position:
        """A position of its own with the same coming epoch, for a copy that reads nothing yet."""
        position = Position(self.length)
        position._origin, position._unnumbered, position._wanted = self._by_itself(), self._unnumbered, self._wanted
        return position
