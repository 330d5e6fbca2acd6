"""`LoaderPosition`: where a loader stands, from one epoch to the next.

::

    set_epoch, or a state is loaded ──►  the coming epoch, and the place in it  ──┐
                                                                                  │ begin: an iterator claims them
    the epoch after it is the coming one  ◄──  progress of the epoch being read  ◄┘

Guarantee: a state tells what was delivered, not what workers have read ahead; what was set or loaded is used once.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Protocol

from stream_dataloader import _options as options
from stream_dataloader._items.layout import Layout
from stream_dataloader._items.plain import layout_from_plain, layout_to_plain
from stream_dataloader._loader.ends import EpochEnds
from stream_dataloader._ranks.ranks import Ranks, identity_of
from stream_dataloader._schedule.progress import Progress
from stream_dataloader._schedule.saved_state import LoadedState, to_plain
from stream_dataloader._schedule.snapshot import PackedSnapshot, Snapshot
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import FailureLimitError, StreamError


class IterationPosition(Protocol):
    """Where the loader stands that an iteration is one of.

    Attributes:
        layout: What the items of the epoch look like, as far as is known.
    """

    layout: Layout | None

    def state(self, epoch: int, place: PackedSnapshot) -> dict[str, Any]:
        """The state of an epoch at a place, as plain data."""

    def note_failure(self, failure: StreamError) -> None:
        """A stream was skipped.

        Raises:
            FailureLimitError: It was one too many.
        """


class LoaderPosition:
    """Where a loader stands.

    Args:
        dataset: What is read.
        ranks: Who reads it.

    Attributes:
        loaded: The state that was loaded, as long as it may turn out to be another rank's.
        failures: Errors of streams that were skipped, here.
        progress: Follows the last epoch that began; None after another one was set or a state was loaded.
        layout: What the items of that epoch look like, or those of the loaded state; None if that is not known.
    """

    def __init__(self, dataset: StreamDataset, ranks: Ranks) -> None:
        self._dataset = dataset
        self._ranks = ranks
        self._ends = EpochEnds(dataset, ranks)
        self._next_epoch = 0
        self._requests_heeded = 0  # of the dataset's set_epoch
        self.loaded: Mapping[str, Any] | None = None
        self._resume: tuple[int, Snapshot | None] | None = None  # epoch and place that were loaded
        self._resumed_at: int | None = None  # the step at which the last epoch went on from a state
        self.progress: Progress | None = None
        self.layout: Layout | None = None
        self.failures: list[StreamError] = []
        self._failed: dict[int, set[int]] = {}  # sources that were skipped, also before a loaded state, by group hosted

    @property
    def is_between_epochs(self) -> bool:
        """No epoch is being read."""
        return self.progress is None or self.progress.over

    @property
    def _epoch_was_set(self) -> bool:
        """The dataset's `set_epoch` was called since."""
        return self._dataset.epoch_request[0] != self._requests_heeded

    @property
    def coming_number(self) -> int:
        """The number of the epoch that comes next."""
        return self.coming()[0]

    @property
    def left(self) -> int | None:
        """How many batches the epoch that began last has, if its number of batches is set; None if it has an end."""
        return None

    @property
    def goes_on(self) -> bool:
        """The next iterator goes on with what was read last."""
        return False

    @property
    def is_ahead(self) -> bool:
        """A batch was taken that was not handed out yet."""
        return self.progress is not None and self.progress.is_ahead

    @property
    def end_is_ahead(self) -> bool:
        """The epoch's end was seen, and not by the user yet."""
        return self.progress is not None and self.progress.end_is_ahead

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that comes next."""
        self._set_next(options.integer("epoch", epoch, 0, 2**62))

    def _set_next(self, epoch: int) -> None:
        self._next_epoch = epoch
        self.progress = None
        self._requests_heeded = self._dataset.epoch_request[0]

    def coming(self) -> tuple[int, Snapshot | None]:
        """The epoch that comes next, and the place in it to go on from; None at its beginning."""
        epoch = self._dataset.epoch_request[1] if self._epoch_was_set else self._next_epoch
        if self._resume is not None and self._resume[0] == epoch:
            return self._resume
        return epoch, None

    def begin(self, progress: Progress, resume: Snapshot | None) -> IterationPosition:
        """The coming epoch has begun, and the loaded state is used.

        Args:
            progress: Follows it.
            resume: The place where it begins; None at its beginning.

        Returns:
            What knows the states of this iteration.
        """
        self._set_next(progress.epoch + 1)
        self._resume = None
        self.loaded = None
        self.progress = progress
        self._resumed_at = None if resume is None else resume.step
        if resume is None:
            self.layout = None
        return self

    def go_on(self) -> None:
        """The coming epoch has begun, in the same reading of a run."""
        raise NotImplementedError("an epoch of its own begins with `begin`")

    def load(self, loaded: LoadedState, epoch: int, place: Snapshot | None, state: Mapping[str, Any]) -> None:
        """Go on with an epoch from a place in it.

        Args:
            loaded: What the state says.
            epoch: The epoch.
            place: Where to go on; None at its beginning.
            state: The state itself.
        """
        self._resume = epoch, place
        self._failed = dict(enumerate(loaded.failures))
        self._set_next(epoch)
        self.loaded = state
        self.layout = layout_from_plain(loaded.items)

    def forget_place(self) -> None:
        """What was loaded was said of another rank."""
        self._resume = None
        self._failed = {}

    def state_dict(self, step: int | None) -> dict[str, Any]:
        """See `StreamDataLoader.state_dict`."""
        progress = self.progress
        if progress is not None and not self._epoch_was_set:
            record = progress.record(step)
            if not (progress.over and record.step == progress.step):
                return self.state(progress.epoch, record)
            step = None
        epoch, place = self.coming()
        self._check_begin(step, epoch, place)
        return self.state(epoch, place)

    def _check_begin(self, step: int | None, epoch: int, place: Snapshot | None) -> None:
        """Refuse a step of an epoch that has not begun, but for the one where it begins."""
        if step is not None and step != (begin := 0 if place is None else place.step):
            raise ValueError(
                f"the state as of step {step} is not known: epoch {epoch} has not begun, and begins at step {begin}"
            )

    def state(self, epoch: int, place: Snapshot | PackedSnapshot | None) -> dict[str, Any]:
        """The state at a place in an epoch, as plain data; at an end, that of the next epoch's beginning."""
        rules = self._ranks.reading.rules
        if isinstance(place, PackedSnapshot):
            place = place.unpack(rules)
            if self._ends.is_end(epoch, place):
                epoch, place = epoch + 1, None
        failed = [self._failed.get(group, ()) for group in range(rules.groups.count)]
        items = None if self.layout is None else layout_to_plain(self.layout)
        return to_plain(rules, epoch, place, identity_of(self._dataset), failed, items)

    def note_failure(self, failure: StreamError) -> None:
        """A stream was skipped.

        Raises:
            FailureLimitError: It was one too many.
        """
        self.failures.append(failure)
        group = failure.lane // self._ranks.reading.rules.lanes_of_a_group
        self._failed.setdefault(group, set()).add(failure.source_index)
        most = self._dataset.max_failures
        count = len(set().union(*self._failed.values()))
        if most is not None and count > most:
            found = "1 source was" if count == 1 else f"{count} sources were"
            raise FailureLimitError(
                f"{found} skipped, and max_failures is {most}; the last one: {failure}",
                **failure.place,
            ) from failure

    def warn_of_rest(self) -> None:
        """Tell who looked at a batch of a loaded state that the state is used up."""
        progress = self.progress
        if progress is None or progress.over or self._resumed_at is None or self._epoch_was_set:
            return
        count = progress.step - self._resumed_at
        if count <= 1 and not self._ends.is_end(progress.epoch, progress.record().unpack(self._ranks.reading.rules)):
            warnings.warn(
                f"the iteration that went on from the loaded state was left after {count} "
                f"batch{'' if count == 1 else 'es'} of epoch {progress.epoch}, and this one reads epoch "
                f"{progress.epoch + 1} from its beginning; who looks at a batch beforehand loads the state again",
                RuntimeWarning,
                stacklevel=4,
            )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"progress": None, "layout": None}
