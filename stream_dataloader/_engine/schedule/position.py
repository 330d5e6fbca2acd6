"""The coming epoch and the place where it begins, shared by the loader and the sampler of indices.

::

    length None      epochs of their own      each is scheduled by itself, and the next one follows
    length n         run    0 1 2 3 4 5 ...   one endless epoch of `padding_mode="cycle"`, with its steps and passes
                     epochs |- 0 -|- 1 -|     n batches each, counted for trainers

    set_epoch, or a state is loaded ---> the coming epoch ---+
                                                             | begin: an iterator claims it
    the epoch after it is the coming one <--- it is read  <--+

Guarantees: a number or state is used once after it was set or loaded. In a run only a loaded state and `set_epoch(0)`
move the place.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any, NamedTuple


class EpochPlace(NamedTuple):
    """A place in an epoch.

    Attributes:
        number: The epoch's number.
        delivered: Number of its batches before the place.
    """

    number: int
    delivered: int


class EpochStart(NamedTuple):
    """The start of an epoch, at its beginning or in the middle of it.

    Attributes:
        run: Number of the scheduled epoch, or of the endless run if epochs are n batches of a run.
        place: Place in it, an object with a `step`; None at its beginning.
        epoch: The epoch, and the number of its batches that come before.
    """

    run: int
    place: Any
    epoch: EpochPlace


BEGINNING = EpochStart(0, None, EpochPlace(0, 0))


class EpochsOfRun:
    """Map from the steps of an endless run to epochs of n batches.

    ::

        n = 4                step    0 1 2 3 4 5 6 7 8 9
        each read to its end         0 0 0 0|1 1 1 1|2 2
        1 left after step 5          0 0 0 0|1 1|2 2 2 2        an epoch that was left is over; the next has n batches
    """

    def __init__(self, length: int, step: int, place: EpochPlace) -> None:
        self._length = length
        self._begins: list[int] = []  # steps at which epochs begin, except for epochs that follow a whole one
        self._numbers: list[int] = []  # numbers of these epochs
        self.begin(step, place)

    def begin(self, step: int, place: EpochPlace) -> None:
        """Note that an epoch, or the rest of one, begins at a step."""
        if not self._begins or self._in(len(self._begins) - 1, step) != place:
            self._begins.append(step - place.delivered)
            self._numbers.append(place.number)

    def at(self, step: int) -> EpochPlace:
        """Return the place where a step comes next; after an epoch's last batch, the beginning of the next epoch."""
        return self._in(max(bisect_left(self._begins, step) - 1, 0), step)

    def _in(self, begun: int, step: int) -> EpochPlace:
        whole, delivered = divmod(step - self._begins[begun], self._length)
        return EpochPlace(self._numbers[begun] + whole, delivered)


class Position:
    """Position of a loader or sampler, from one epoch to the next.

    Args:
        length: Number of batches n in an epoch of an endless run; None: each epoch is scheduled by itself.

    Attributes:
        begun: Start of the epoch that began last; None if none began since the position was built or loaded.
        epochs: The epochs of the current run; None if epochs are not part of a run.
    """

    def __init__(self, length: int | None = None) -> None:
        self.length = length
        self.begun: EpochStart | None = None
        self.epochs: EpochsOfRun | None = None
        self._origin = BEGINNING  # the coming start until an epoch begins
        self._unnumbered = False  # the origin has no epoch number: its state was of a run that was not read in epochs
        self._wanted: int | None = None  # the number that set_epoch gave the coming epoch
        self._first_step = 0  # of the epoch that began last
        self._reached: Callable[[], Any] | None = None  # returns the current place of the epoch that began last

    def set_epoch(self, number: int) -> None:
        """Set the number of the epoch that comes next."""
        self._wanted = number

    def load(self, run: int, place: Any, saved: EpochPlace | None) -> None:
        """Continue from a saved place.

        Args:
            saved: Place in an epoch of n batches; None if the state was saved without such epochs.
        """
        self.begun = self.epochs = self._reached = self._wanted = None
        if self.length is None:
            self._origin = EpochStart(run, place, EpochPlace(run, 0 if place is None else place.step))
            return
        self._unnumbered = saved is None and place is not None
        number, delivered = saved or (0, 0)
        # The state may be of longer epochs. With fewer batches an epoch, the saved one may be over already.
        if delivered >= self.length:
            number, delivered = number + 1, 0
        self._origin = EpochStart(run, place, EpochPlace(number, delivered))

    def forget_place(self) -> None:
        """Forget the loaded or reached place, because it belongs to another rank."""
        if self.length is None:
            self._origin = EpochStart(self._origin.run, None, EpochPlace(self._origin.run, 0))
            return
        self._origin, self._unnumbered = BEGINNING, self.begun is not None
        self.begun = self.epochs = self._reached = None

    def coming(self) -> EpochStart:
        """Return the coming start, with the number that `set_epoch` gave it."""
        own, wanted = self._by_itself(), self._wanted
        if wanted is None or wanted == own.epoch.number:
            return own
        if self.length is None:
            return EpochStart(wanted, None, EpochPlace(wanted, 0))
        if wanted == 0 and not self._unnumbered:
            return BEGINNING
        return own._replace(epoch=EpochPlace(wanted, 0))

    def _by_itself(self) -> EpochStart:
        """Return the coming start as if `set_epoch` had not been called."""
        if self.begun is None:
            return self._origin
        run, _, epoch = self.begun
        if self.length is None:
            return EpochStart(run + 1, None, EpochPlace(run + 1, 0))
        assert self._reached is not None
        reached = self._reached()
        place = reached if reached.step else None
        if reached.step == self._first_step:  # no batch of the last epoch was delivered, so that epoch comes again
            return EpochStart(run, place, epoch)
        return EpochStart(run, place, EpochPlace(epoch.number + 1, 0))

    @property
    def is_by_itself(self) -> bool:
        """Whether the coming start is the same as without a call of `set_epoch`."""
        return self._wanted is None or self.coming() == self._by_itself()

    @property
    def is_set(self) -> bool:
        """Whether `set_epoch` was called for the coming epoch."""
        return self._wanted is not None

    @property
    def continues(self) -> bool:
        """Whether the coming epoch continues the current run."""
        return self.length is not None and self.begun is not None and self.coming() is not BEGINNING

    @property
    def was_left(self) -> bool:
        """Whether a state describes the coming epoch, not the one that was read last."""
        if self._reached is None:
            return True
        return self._wanted is not None if self.length is None else not self.is_by_itself

    @property
    def left(self) -> int | None:
        """Number of batches of the last epoch from its start here; None if epochs are not part of a run."""
        if self.length is None or self.begun is None:
            return self.length
        return self.length - self.begun.epoch.delivered

    def renaming(self, what: str) -> str | None:
        """Return a warning if `set_epoch` gave the coming epoch of a run a number that does not match; None if not."""
        if self.length is None or self._wanted is None or self._unnumbered:
            return None
        coming = self.coming()
        number, own = coming.epoch.number, self._by_itself().epoch.number
        if number == own or coming is BEGINNING:
            return None
        return (
            f"set_epoch({number}) was called, and epoch {own} comes next. An endless run cannot jump to epoch "
            f"{number}: it continues where it is, and its next {self.length} batches are called epoch {number}. To "
            f"continue where another {what} stopped, load its state; set_epoch(0) starts over"
        )

    def begin(self, step: int, reached: Callable[[], Any]) -> EpochStart:
        """Begin the coming epoch; this uses up the number or state that was set or loaded."""
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
        """Return an independent position with the same coming epoch, for a copy that has read nothing yet."""
        position = Position(self.length)
        position._origin, position._unnumbered, position._wanted = self._by_itself(), self._unnumbered, self._wanted
        return position
