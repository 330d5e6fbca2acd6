"""`LoaderPosition`: the position of a loader, from one epoch to the next, for the loader's methods.

`schedule/epochs.py` decides which epoch comes next and where it begins. This module connects it with reading.

Guarantee: a state describes what was delivered, not what workers have read ahead.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

from stream_dataloader._engine import options
from stream_dataloader._engine.items.layout import Layout
from stream_dataloader._engine.loader.base_position import BasePosition, KeptLanes
from stream_dataloader._engine.loader.epoch import Epoch
from stream_dataloader._engine.loader.skipping import place_later
from stream_dataloader._engine.loader.states import States
from stream_dataloader._engine.ranks.ranks import Ranks, known_count
from stream_dataloader._engine.schedule.follower import PackedPlace
from stream_dataloader._engine.schedule.place import EpochPlace, Place
from stream_dataloader._engine.schedule.rules import NONE
from stream_dataloader._engine.schedule.saved_state import LoadedState
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import StreamError

#: What changes when a list grows. Where weights are shares of time steps, they follow the sources' mean length.
GROWN = "sources", "weights"


def _kept_lanes(ranks: Ranks, loaded: LoadedState) -> KeptLanes:
    """Return the lanes that go on: each group keeps its first ones.

    ::

        saved    0 1 | 2 3          two groups here, of two lanes each
        here     0 1 - | 2 3 -      of three lanes each; lanes 2 and 5 are new
    """
    rules, width = ranks.dataset._rules, loaded.lanes_of_a_group
    lanes = [
        group * width + lane if lane < width else -1
        for group in range(rules.groups.count)
        for lane in range(rules.lanes_of_a_group)
    ]
    return KeptLanes(rules.groups.count * width, lanes)


class LoaderPosition(BasePosition[Epoch]):
    """Position of a loader.

    Args:
        dataset: The dataset that is read.
        ranks: The ranks that read it.
        length: Number of batches n of an epoch of an endless run; None: epochs are the dataset's.
    """

    def __init__(self, dataset: StreamDataset, ranks: Ranks, length: int | None) -> None:
        self._dataset, self._ranks, self._length = dataset, ranks, length
        self.states = States(dataset, ranks, length)
        super().__init__(length)
        self._requests_followed = 0  # calls of the dataset's set_epoch that were taken over
        self._resumed_at: int | None = None  # the step at which the last epoch continued from a state

    @property
    def left(self) -> int | None:
        """Number of batches of the epoch that began last, if it is part of a run; None otherwise."""
        return self._epochs.left

    @property
    def goes_on(self) -> bool:
        """Whether the next iterator goes on with the current run."""
        self._follow_dataset()
        return self._epochs.continues

    @property
    def layout(self) -> Layout | None:
        """The layout of items; None if it is not known."""
        return self.states.layout

    def set_epoch(self, epoch: int) -> None:
        epoch = options.integer("epoch", epoch, 0, 2**62)
        self._requests_followed = self._dataset._epoch_request[0]
        self._set_epoch(epoch)

    def _set_epoch(self, epoch: int) -> None:
        self._epochs.set_epoch(epoch)
        if self._epochs.length is None:  # a run goes on, so its epoch is kept
            self.epoch = None

    @property
    def wanted(self) -> int | None:
        """The number that `set_epoch` gave the coming epoch."""
        self._follow_dataset()
        return self._epochs.wanted

    def _follow_dataset(self) -> None:
        """Take over the dataset's `set_epoch`, which counts like the loader's; the last call wins."""
        count, epoch = self._dataset._epoch_request
        if count != self._requests_followed:
            self._requests_followed = count
            self._set_epoch(epoch)

    def coming(self) -> Place:
        """Return the place of what comes next."""
        self._follow_dataset()
        return self._epochs.coming()

    @property
    def coming_step(self) -> int:
        return self.coming().step

    @property
    def coming_count(self) -> int:
        """Number of batches of the coming epoch before its place."""
        return self.coming().delivered

    @property
    def coming_begun(self) -> int:
        """Number of sources that lanes have begun before the coming epoch's place."""
        at = self.coming()
        reserved = sum(draw != NONE for lane in at.lanes for draw in lane.reserved or ())
        return sum(at.cursors) - len(at.returned) - reserved

    def coming_epoch(self, readers: int) -> Epoch:
        """Create the coming epoch for a number of readers; call `begin` once it has begun."""
        return Epoch(self._ranks.dataset, self.coming(), readers)

    def begin(self, epoch: Epoch) -> None:
        """Note that the coming epoch, or its run, has begun; this uses up the loaded state."""
        continued = self.goes_on  # asked before `begin` of the position, which changes the answer
        if (text := self._epochs.renaming("loader")) is not None:
            warnings.warn(text, RuntimeWarning, stacklevel=7)
        start = self._epochs.begin(lambda: epoch.place(epoch.record()))
        epoch.epochs = self._epochs.of_run
        self._resumed_at = start.step if start.delivered and not continued else None
        self.loaded, self.epoch = None, epoch
        if not start.step:  # a new epoch may have items of another layout
            self.states.layout = None

    def note_failure(self, failure: StreamError) -> None:
        """Note a skipped stream.

        Raises:
            FailureLimitError: More sources were skipped than `max_failures`.
        """
        self.failures.append(failure)
        self.states.count_failure(failure)

    def read(self, state: Any, changes: Collection[str] = (), dataset: StreamDataset | None = None) -> LoadedState:
        """Read a state, without changing the position; ranks may adopt the state's seed.

        Args:
            changes: Options that the user changed on purpose.
            dataset: The dataset that the state is for; None means the loader's own.

        Raises:
            StateError: It is no state of such a loader.
        """
        return self._ranks.load(state, changes, dataset)

    def load(self, state: Mapping[str, Any], changes: Collection[str], loaded: LoadedState) -> None:
        # The state overrules an epoch that was set on the dataset before: the last call wins.
        self._requests_followed = self._dataset._epoch_request[0]
        self._epochs.load(self.states.load(loaded))
        self.epoch, self.loaded = None, (state, changes)
        self.kept_lanes = _kept_lanes(self._ranks, loaded)

    def later(self, state: Mapping[str, Any], count: int) -> tuple[dict[str, Any], int] | None:
        """Compute the state some batches after another, and their number; None if this needs reading."""
        place, length = self.read(state).place, self._length
        at = place.counted
        if length is not None:  # the run goes on after the epoch's end, but skipping stops there
            count = min(count, length - (0 if at is None else at.delivered))
        later = place_later(self.states, place, count)
        if later is None:
            return None
        # The number of batches in the run is counted on, so that a state says which of its epochs comes next.
        if at is not None and length is not None:
            whole, delivered = divmod(at.delivered + count, length)
            at = EpochPlace(at.number + whole, delivered)
        return self.states.of(self._ranks.dataset, later[0]._replace(counted=at)), later[1]

    def forget_place(self) -> None:
        """Forget the loaded or reached place, because it belongs to another rank."""
        self._epochs.forget_place()
        self.states.forget_place()
        if self._epochs.length is not None:
            self.epoch = None

    @property
    def left_epoch(self) -> Epoch | None:
        """The epoch that began last, if it was left before its end and states still describe it; None otherwise."""
        epoch, epochs = self.epoch, self._epochs
        return epoch if epoch and not epoch.over and epochs.length is None and not epochs.was_left else None

    def restate(self, left: Epoch, loaded: LoadedState) -> None:
        """Have states describe the epoch that was left, given its state, as one that goes on with a longer list."""
        self.epoch = Epoch(self._ranks.dataset, loaded.place, left.readers)

    def mark_as_reached(self) -> None:
        """Take the place for one that was read up to, not for a loaded state that somebody may look at beforehand."""
        self._resumed_at = None

    def begin_anew(self, epoch: int) -> None:
        """Make an epoch the coming one, from its beginning, regardless of what was read or loaded."""
        self._epochs.load(Place(epoch))
        self.epoch = self.loaded = None

    def coming_state(self) -> dict[str, Any]:
        """Return the state of what comes next."""
        return self.states.of(self._ranks.dataset, self.coming())

    def state_of(self, epoch: Epoch, record: PackedPlace) -> dict[str, Any]:
        """Return the state at a place in an epoch; at its end, the state of the next epoch's beginning."""
        return self.states.of_record(epoch, record)

    def reached_state(self, epoch: Epoch) -> dict[str, Any]:
        """Return the state of an epoch that is being read, also behind what is known to be its last batch."""
        return self.states.of(epoch.dataset, epoch.place(epoch.record()))

    def state_later(self) -> Callable[[], dict[str, Any]]:
        """Return a function for the state after the last batch; it may be called after later batches, too."""
        epoch = self.epoch
        if epoch is None:
            state = self.coming_state()
            return lambda: state
        return functools.partial(self.state_of, epoch, epoch.last)

    def count(self, epoch: int) -> int:
        """Return the number of batches of an epoch; raise TypeError if it is not known."""
        return self._ranks.dataset._steps_of(epoch, self._changed_in(epoch))

    def sure_count(self, epoch: int) -> int:
        """Return the number of batches of an epoch if no stream can change it; raise TypeError otherwise."""
        count = known_count(self._ranks.dataset, epoch, self._changed_in(epoch))
        if count is None:
            raise TypeError("the number of batches depends on what streams yield")
        return count

    def _changed_in(self, epoch: int) -> Place | None:
        """Return the place of the current or coming epoch, if it began under other options; None otherwise."""
        if self.epoch is not None and not self.epoch.over and self.epoch.number == epoch:
            return self.epoch.changed
        place = self.coming()
        return place if place.epoch == epoch else None

    def warn_of_rest(self) -> None:
        """Warn if a loaded state was left after one batch, so that the rest of its epoch is not read."""
        self._follow_dataset()
        epoch = self.epoch
        if epoch is None or epoch.over or self._resumed_at is None or self._epochs.was_left:
            return
        record, length, left = epoch.record(), self._epochs.length, self._epochs.left
        count = record.step - self._resumed_at
        # Not a run: the next iteration begins another epoch. In a run it continues with the following batches instead.
        if left is None:
            is_used_up = count <= 1 and not self.states.is_end(epoch, record)
            of, then = f"epoch {epoch.number}", f"reads epoch {epoch.number + 1} from its beginning"
        else:
            is_used_up = count == 1 and left > 1
            of, then = f"the {left} left in its epoch", f"reads the {length} batches after it"
        if is_used_up:
            warnings.warn(
                f"the iteration that continued from the loaded state was left after {count} "
                f"batch{'' if count == 1 else 'es'} of {of}, and this one {then}; if you only looked at a batch, load "
                "the state again",
                RuntimeWarning,
                stacklevel=5,
            )
