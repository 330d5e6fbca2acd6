"""`Epochs`: which epoch comes next, and from which place; used by the loader and by the sampler of indices.

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

from stream_dataloader._engine.schedule.place import EpochPlace, Place

_RUN_BEGINS = Place(0, counted=EpochPlace(0, 0))


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


class Epochs:
    """The epochs of a loader or sampler, from one to the next.

    Args:
        length: Number of batches n in an epoch of an endless run; None: each epoch is scheduled by itself.

    Attributes:
        begun: Start of the epoch that began last; None if none began since these were built or a state was loaded.
        of_run: The epochs of the current run; None if epochs are not part of a run.
        wanted: The number that `set_epoch` gave the coming epoch; None if it was not called.
    """

    def __init__(self, length: int | None = None) -> None:
        self.length = length
        self.begun: Place | None = None
        self.of_run: EpochsOfRun | None = None
        self._origin = Place(0) if length is None else _RUN_BEGINS  # the coming start until an epoch begins
        self._unnumbered = False  # the origin has no epoch number: its state was of a run that was not read in epochs
        self.wanted: int | None = None
        self._reached: Callable[[], Place] | None = None  # returns the current place of the epoch that began last

    def set_epoch(self, number: int) -> None:
        """Set the number of the epoch that comes next."""
        self.wanted = number

    def load(self, place: Place) -> None:
        """Continue from a saved place, which may have been saved with or without epochs of n batches."""
        self.begun = self.of_run = self._reached = self.wanted = None
        if self.length is None:
            self._origin = place._replace(counted=None)
            return
        self._unnumbered = place.counted is None and place.step > 0
        number, delivered = place.counted or (0, 0)
        # The state may be of longer epochs. With fewer batches an epoch, the saved one may be over already.
        if delivered >= self.length:
            number, delivered = number + 1, 0
        self._origin = place._replace(counted=EpochPlace(number, delivered))

    def forget_place(self) -> None:
        """Forget the loaded or reached place, because it belongs to another rank."""
        if self.length is None:
            self._origin = Place(self._origin.epoch)
            return
        self._origin, self._unnumbered = _RUN_BEGINS, self.begun is not None
        self.begun = self.of_run = self._reached = None

    def coming(self) -> Place:
        """Return the coming start, with the number that `set_epoch` gave it."""
        own, wanted = self._by_itself(), self.wanted
        if wanted is None or wanted == own.number:
            return own
        if self.length is None:
            return Place(wanted)
        if wanted == 0:
            return _RUN_BEGINS
        return own._replace(counted=EpochPlace(wanted, 0))

    def _by_itself(self) -> Place:
        """Return the coming start as if `set_epoch` had not been called."""
        if self.begun is None:
            return self._origin
        if self.length is None:
            return Place(self.begun.epoch + 1)
        assert self._reached is not None
        reached = self._reached()
        if reached.step == self.begun.step:  # no batch of the last epoch was delivered, so that epoch comes again
            return reached._replace(counted=self.begun.counted)
        return reached._replace(counted=EpochPlace(self.begun.number + 1, 0))

    @property
    def is_by_itself(self) -> bool:
        """Whether the coming start is the same as without a call of `set_epoch`."""
        return self.wanted is None or self.coming() == self._by_itself()

    @property
    def continues(self) -> bool:
        """Whether the coming epoch continues the current run."""
        return self.length is not None and self.begun is not None and self.coming() is not _RUN_BEGINS

    @property
    def was_left(self) -> bool:
        """Whether a state describes the coming epoch, not the one that was read last."""
        if self._reached is None:
            return True
        return self.wanted is not None if self.length is None else not self.is_by_itself

    @property
    def left(self) -> int | None:
        """Number of batches of the last epoch from its start here; None if epochs are not part of a run."""
        if self.length is None or self.begun is None:
            return self.length
        return self.length - self.begun.delivered

    def renaming(self, what: str) -> str | None:
        """Return a warning if `set_epoch` gave the coming epoch of a run a number that does not match; None if not."""
        if self.length is None or self.wanted is None or self._unnumbered:
            return None
        coming = self.coming()
        number, own = coming.number, self._by_itself().number
        if number == own or coming is _RUN_BEGINS:
            return None
        return (
            f"set_epoch({number}) was called, and epoch {own} comes next. An endless run cannot jump to epoch "
            f"{number}: it continues where it is, and its next {self.length} batches are called epoch {number}. To "
            f"continue where another {what} stopped, load its state; set_epoch(0) starts over"
        )

    def begin(self, reached: Callable[[], Place]) -> Place:
        """Begin the coming epoch; this uses up the number or state that was set or loaded.

        Args:
            reached: Returns the place that the epoch has reached.
        """
        start = self.coming()
        if self.length is not None:
            assert start.counted is not None
            if self.continues and self.of_run is not None:
                self.of_run.begin(start.step, start.counted)
            else:
                self.of_run = EpochsOfRun(self.length, start.step, start.counted)
        self.begun, self._reached = start, reached
        self.wanted, self._unnumbered = None, False
        return start

    def for_copy(self) -> Epochs:
        """Return independent epochs with the same coming one, for a copy that has read nothing yet."""
        epochs = Epochs(self.length)
        epochs._origin, epochs._unnumbered, epochs.wanted = self._by_itself(), self._unnumbered, self.wanted
        return epochs
