"""`RunPosition`: where a loader stands that reads an endless run in epochs of n batches.

::

    run      0 1 2 3 4 5 6 7 8 9 ...        one epoch of padding_mode="cycle", with its steps, passes and states
    epochs  |-- 0 --|-- 1 --|-- 2            n batches each, counted for trainers; one goes on where the other stopped

Guarantee: only a loaded state and `set_epoch(0)` move the place in the run. To set the coming epoch's number to what it
is changes nothing, whenever it is done.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

from stream_dataloader import _options as options
from stream_dataloader._items.layout import Layout
from stream_dataloader._loader.position import LoaderPosition
from stream_dataloader._loader.stretches import Stretches
from stream_dataloader._ranks.ranks import Ranks
from stream_dataloader._schedule.progress import Progress
from stream_dataloader._schedule.saved_state import LoadedState
from stream_dataloader._schedule.snapshot import PackedSnapshot, Snapshot
from stream_dataloader._schedule.stretch import StretchPlace, renamed, taken_up
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import StreamError


class _Coming(NamedTuple):
    """What the next iterator reads.

    Attributes:
        run: The run's number.
        place: Where in the run; None at its beginning.
        epoch: The epoch, and how many of its batches were delivered before.
        any_number: The epoch has no number of its own: the state was of a run that was not read in epochs.
        anew: `set_epoch` begins the run anew.
        renamed: `set_epoch` gave the epoch another number than its own.
    """

    run: int
    place: Snapshot | None
    epoch: StretchPlace
    any_number: bool = False
    anew: bool = False
    renamed: bool = False


_BEGINNING = _Coming(0, None, StretchPlace(0, 0))


def position_of(dataset: StreamDataset, ranks: Ranks, batches_per_epoch: int | None) -> LoaderPosition:
    """The position of a loader at its beginning.

    Args:
        dataset: What is read.
        ranks: Who reads it.
        batches_per_epoch: Number of batches of an epoch that is a stretch of a run; None: epochs are the dataset's.
    """
    return (
        LoaderPosition(dataset, ranks) if batches_per_epoch is None else RunPosition(dataset, ranks, batches_per_epoch)
    )


class RunPosition(LoaderPosition):
    """Where a loader stands that reads an endless run in epochs of n batches.

    Args:
        dataset: What is read.
        ranks: Who reads it.
        length: Number of batches n of an epoch.
    """

    def __init__(self, dataset: StreamDataset, ranks: Ranks, length: int) -> None:
        super().__init__(dataset, ranks)
        self._length = length
        self._wanted: int | None = None  # the number that set_epoch gave the coming epoch
        self._origin = _BEGINNING  # where the run is gone on with, as long as there is no progress
        self._begun = _BEGINNING  # the epoch that began last
        self._first_step = 0  # of that epoch, here
        self._stretches: Stretches | None = None  # the epochs of the run that progress follows

    @property
    def coming_number(self) -> int:
        """The number of the epoch that comes next."""
        return self._coming().epoch.number

    @property
    def left(self) -> int:
        """How many batches the epoch that began last has here: all n, or the rest of a loaded state's."""
        return self._length - self._begun.epoch.delivered

    @property
    def goes_on(self) -> bool:
        """The next iterator goes on with the run that was read last."""
        return self.progress is not None and not self._coming().anew

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch that comes next; see `StreamDataLoader.set_epoch`."""
        self._wanted = options.integer("epoch", epoch, 0, 2**62)
        self._requests_heeded = self._dataset.epoch_request[0]

    def coming(self) -> tuple[int, Snapshot | None]:
        """The run, and the place in it where the next epoch begins; None at its beginning."""
        return self._coming()[:2]

    def _coming(self) -> _Coming:
        coming = self._by_itself()
        wanted = self._dataset.epoch_request[1] if self._epoch_was_set else self._wanted
        if wanted is None or wanted == coming.epoch.number:
            return coming
        if coming.any_number:
            return coming._replace(epoch=StretchPlace(wanted, 0))
        if wanted == 0:
            return _BEGINNING._replace(anew=True)
        return coming._replace(epoch=StretchPlace(wanted, 0), renamed=True)

    def _by_itself(self) -> _Coming:
        """What comes next if no number was set."""
        if self.progress is None:
            return self._origin
        record = self.progress.record()
        place = record.unpack(self._ranks.reading.rules) if record.step else None
        if record.step == self._first_step:  # an error: nothing was delivered of the epoch that began last
            return self._begun._replace(place=place)
        return _Coming(self.progress.epoch, place, StretchPlace(self._begun.epoch.number + 1, 0))

    def begin(self, progress: Progress, resume: Snapshot | None) -> _Follower:  # noqa: ARG002
        """The coming epoch has begun, with a new reading of the run; see `LoaderPosition.begin`."""
        went_on, coming = self.goes_on, self._claim()
        self._resumed_at = None if went_on or not coming.epoch.delivered else progress.step
        self.progress = progress
        self._resume = self.loaded = None
        if went_on and self._stretches is not None:
            self._stretches.begin(progress.step, coming.epoch)
        else:
            self._stretches = Stretches(self._length, progress.step, coming.epoch)
        self._first_step = progress.step
        return _Follower(self, self._stretches)

    def go_on(self) -> None:
        """The coming epoch has begun, in the same reading of the run."""
        coming = self._claim()
        assert self.progress is not None
        assert self._stretches is not None
        self._resumed_at = None
        self._first_step = self.progress.record().step
        self._stretches.begin(self._first_step, coming.epoch)

    def _claim(self) -> _Coming:
        coming, own = self._coming(), self._by_itself()
        if coming.renamed:
            warnings.warn(
                renamed(coming.epoch.number, own.epoch.number, self._length, "loader"),
                RuntimeWarning,
                stacklevel=5,
            )
        self._wanted = None
        self._requests_heeded = self._dataset.epoch_request[0]
        self._begun = coming._replace(any_number=False, anew=False, renamed=False)
        return coming

    def load(self, loaded: LoadedState, epoch: int, place: Snapshot | None, state: Mapping[str, Any]) -> None:
        """Go on with a run from a place in it; see `LoaderPosition.load`."""
        super().load(loaded, epoch, place, state)
        unnumbered = loaded.stretch is None and place is not None
        self._origin = _Coming(epoch, place, taken_up(loaded.stretch, self._length), any_number=unnumbered)
        self._wanted = None

    def forget_place(self) -> None:
        """What was loaded or read was of another rank."""
        super().forget_place()
        self._origin = _BEGINNING._replace(any_number=self.progress is not None)
        self.progress = None

    def state_dict(self, step: int | None) -> dict[str, Any]:
        """See `StreamDataLoader.state_dict`."""
        coming = self._coming()
        if self.progress is None or coming.anew or coming.renamed:
            self._check_begin(step, coming.run, coming.place)
            return self.state(coming.run, coming.place)
        assert self._stretches is not None
        record = self.progress.record(step)
        return self.state(self.progress.epoch, record, self._stretches.at(record.step))

    def state(
        self, epoch: int, place: Snapshot | PackedSnapshot | None, stretch: StretchPlace | None = None
    ) -> dict[str, Any]:
        """The state at a place in a run, as plain data.

        Args:
            epoch: The run's number.
            place: Where in the run.
            stretch: Where in an epoch that is; None: where the coming epoch begins.
        """
        at = self._coming().epoch if stretch is None else stretch
        return super().state(epoch, place) | at.plain(self._length)

    def warn_of_rest(self) -> None:
        """Tell who looked at a batch of a loaded state that the rest of its epoch is not read as such."""
        progress, coming = self.progress, self._coming()
        if progress is None or self._resumed_at is None or coming.anew or coming.renamed:
            return
        count = progress.record().step - self._resumed_at
        if count == 1 and self.left > 1:
            warnings.warn(
                f"the iteration that went on from the loaded state was left after 1 batch of the {self.left} that its "
                f"epoch had left, and this one reads the {self._length} batches behind it; who looks at a batch "
                "beforehand loads the state again",
                RuntimeWarning,
                stacklevel=4,
            )

    def __getstate__(self) -> dict[str, Any]:
        """A copy goes on where this one stands."""
        return super().__getstate__() | {"_origin": self._by_itself(), "_stretches": None}


class _Follower:
    """The position of one reading of a run: it knows the run's epochs also when another run is read since.

    Args:
        position: That of the loader.
        stretches: The run's epochs.
    """

    def __init__(self, position: RunPosition, stretches: Stretches) -> None:
        self._position = position
        self._stretches = stretches
        self.layout: Layout | None = None  # a run never ends, so that nobody is without an item

    def state(self, epoch: int, place: PackedSnapshot) -> dict[str, Any]:
        """The state of a run at a place, as plain data."""
        return self._position.state(epoch, place, self._stretches.at(place.step))

    def note_failure(self, failure: StreamError) -> None:
        """A stream was skipped."""
        self._position.note_failure(failure)
