"""`LoaderPosition`: where a loader stands, from one epoch to the next, as the loader's methods say it.

Which epoch comes and where it begins is decided by `_schedule/position.py`. Here that meets what is read.

Guarantee: a state is of what was delivered, not what workers have read ahead.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

from stream_dataloader import _options as options
from stream_dataloader._items.layout import Layout
from stream_dataloader._loader.epoch import Epoch
from stream_dataloader._loader.skipping import place_later
from stream_dataloader._loader.standing import KeptLanes, Standing
from stream_dataloader._loader.states import States
from stream_dataloader._ranks.ranks import Ranks, known_count
from stream_dataloader._reading.plan import Start
from stream_dataloader._schedule.position import EpochPlace
from stream_dataloader._schedule.rules import NONE
from stream_dataloader._schedule.saved_state import LoadedState
from stream_dataloader._schedule.snapshot import PackedSnapshot, Snapshot
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import StreamError


def _kept_lanes(ranks: Ranks, loaded: LoadedState) -> KeptLanes:
    """Return the lanes that go on: each group keeps its first ones.

    ::

    saved    0 1 | 2 3          two groups here, of two lanes
    here     0 1 - | 2 3 -      of three; lanes 2 and 5 are new
    """
    rules, width = ranks.reading.rules, loaded.lanes_of_a_group
    lanes = [
        group * width + lane if lane < width else -1
        for group in range(rules.groups.count)
        for lane in range(rules.lanes_of_a_group)
    ]
    return KeptLanes(rules.groups.count * width, lanes)


class LoaderPosition(Standing[Epoch]):
    """Where a loader stands.

    Args:
        dataset: What is read.
        ranks: The ranks that read it.
        length: Number of batches n of an epoch, if what is read has no end; None: epochs are the dataset's.
    """

    def __init__(self, dataset: StreamDataset, ranks: Ranks, length: int | None) -> None:
        self._dataset, self._ranks, self._length = dataset, ranks, length
        self.states = States(dataset, ranks, length)
        super().__init__(length)
        self._requests_heeded = 0  # of the dataset's set_epoch
        self._resumed_at: int | None = None  # the step at which the last epoch went on from a state

    @property
    def left(self) -> int | None:
        """How many batches the epoch that began last has, if it is part of a run; None if it has an end."""
        return self._position.left

    @property
    def goes_on(self) -> bool:
        """The next iterator goes on with the run that is being read."""
        self._heed_dataset()
        return self._position.continues

    @property
    def layout(self) -> Layout | None:
        """What items look like; None if that is not known."""
        return self.states.layout

    def set_epoch(self, epoch: int) -> None:
        epoch = options.integer("epoch", epoch, 0, 2**62)
        self._requests_heeded = self._dataset.epoch_request[0]
        self._set_epoch(epoch)

    def _set_epoch(self, epoch: int) -> None:
        self._position.set_epoch(epoch)
        if self._position.length is None:  # a run goes on
            self.epoch = None

    def _heed_dataset(self) -> None:
        """The dataset's `set_epoch` counts like the loader's; the last call wins."""
        count, epoch = self._dataset.epoch_request
        if count != self._requests_heeded:
            self._requests_heeded = count
            self._set_epoch(epoch)

    def coming(self) -> tuple[Start, EpochPlace]:
        """What comes next: from where it is read, and which epoch that is."""
        self._heed_dataset()
        run, place, epoch = self._position.coming()
        return Start(run, place), epoch

    @property
    def coming_step(self) -> int:
        place = self.coming()[0].resume
        return 0 if place is None else place.step

    @property
    def coming_count(self) -> int:
        """How many batches of the coming epoch come before its place."""
        return self.coming_step if self._position.length is None else self.coming()[1].delivered

    @property
    def coming_begun(self) -> int:
        """How many sources lanes have begun before the coming epoch's place."""
        if (at := self.coming()[0].resume) is None:
            return 0
        reserved = sum(grant != NONE for lane in at.lanes for grant in lane.reserved or ())
        return sum(at.cursors) - len(at.returned) - reserved

    def coming_epoch(self, readers: int) -> Epoch:
        """What is to be read next, by so many readers; `begin` says that it has begun."""
        return Epoch(self._ranks.reading, self.coming()[0], readers)

    def begin(self, epoch: Epoch) -> None:
        """The coming epoch, or its run, has begun; the loaded state is used."""
        continued = self.goes_on
        if (text := self._position.renaming("loader")) is not None:
            warnings.warn(text, RuntimeWarning, stacklevel=7)
        record = epoch.record()
        start = self._position.begin(record.step, lambda: epoch.record().unpack(epoch.dataset.rules))
        epoch.epochs = self._position.epochs
        self._resumed_at = record.step if start.epoch.delivered and not continued else None
        self.loaded, self.epoch = None, epoch
        if not record.step:
            self.states.layout = None

    def note_failure(self, failure: StreamError) -> None:
        """A stream was skipped; raises `FailureLimitError` if it was one too many."""
        self.failures.append(failure)
        self.states.count_failure(failure)

    def read(self, state: Any, changes: Collection[str] = ()) -> LoadedState:
        """What a state says; nothing changes but what ranks adopt.

        Args:
            changes: Which differences are meant.

        Raises:
            StateError: It is no state of such a loader.
        """
        return self._ranks.load(state, changes)

    def load(self, state: Mapping[str, Any], changes: Collection[str], loaded: LoadedState) -> None:
        self._requests_heeded = self._dataset.epoch_request[0]
        start = self.states.load(loaded)
        self._position.load(start.epoch, start.resume, loaded.epoch_place)
        self.epoch, self.loaded = None, (state, changes)
        self.kept_lanes = _kept_lanes(self._ranks, loaded)

    def later(self, state: Mapping[str, Any], count: int) -> tuple[dict[str, Any], int] | None:
        """The state some batches after another, and how many they are; None if only reading tells."""
        loaded, length = self.read(state), self._length
        at = loaded.epoch_place
        if length is not None:  # the run goes on behind the epoch's end, where this must stop
            count = min(count, length - (0 if at is None else at.delivered))
        later = place_later(self.states, Start(loaded.epoch, loaded.snapshot), count)
        if later is None:
            return None
        if at is not None and length is not None:
            whole, delivered = divmod(at.delivered + count, length)
            at = EpochPlace(at.number + whole, delivered)
        return self.states.of(later[0], at), later[1]

    def forget_place(self) -> None:
        """What was loaded, or reached in a run, was of another rank."""
        self._position.forget_place()
        self.states.forget_place()
        if self._position.length is not None:
            self.epoch = None

    def begin_anew(self, epoch: int) -> None:
        """Have an epoch come next, from its beginning, whatever was read or loaded."""
        self._position.load(epoch, None, None)
        self.epoch = self.loaded = None

    def coming_state(self) -> dict[str, Any]:
        """The state of what comes next."""
        return self.states.of(*self.coming())

    def state_of(self, epoch: Epoch, record: PackedSnapshot) -> dict[str, Any]:
        """The state at a place in an epoch; at its end, that of the next one's beginning."""
        at = None if epoch.epochs is None else epoch.epochs.at(record.step)
        return self.states.of_record(epoch.number, record, at)

    def state_later(self) -> Callable[[], dict[str, Any]]:
        """What makes the state after the last batch, also when others have followed."""
        epoch = self.epoch
        if epoch is None:
            state = self.coming_state()
            return lambda: state
        return functools.partial(self.state_of, epoch, epoch.last)

    def count(self, epoch: int) -> int:
        """Number of batches of an epoch; raises TypeError if it is not known."""
        return self._ranks.reading.steps_of(epoch, self._changed_in(epoch))

    def sure_count(self, epoch: int) -> int:
        """The same, if no stream may change it; raises TypeError otherwise."""
        count = known_count(self._ranks.reading, epoch, self._changed_in(epoch))
        if count is None:
            raise TypeError("the number of batches depends on what streams yield")
        return count

    def _changed_in(self, epoch: int) -> Snapshot | None:
        """Where an epoch stands that is read, or comes next, if it began under other options."""
        if self.epoch is not None and not self.epoch.over and self.epoch.number == epoch:
            return self.epoch.changed
        start = self.coming()[0]
        place = start.resume if start.epoch == epoch else None
        return None if place is None or place.changed is None else place

    def warn_of_rest(self) -> None:
        """Warn if one batch of a loaded state was looked at: the rest of its epoch is not read."""
        self._heed_dataset()
        epoch = self.epoch
        if epoch is None or epoch.over or self._resumed_at is None or self._position.was_left:
            return
        record, length, left = epoch.record(), self._position.length, self._position.left
        count = record.step - self._resumed_at
        if left is None:
            is_used_up = count <= 1 and not self.states.is_end(epoch.number, record)
            of, then = f"epoch {epoch.number}", f"reads epoch {epoch.number + 1} from its beginning"
        else:
            is_used_up = count == 1 and left > 1
            of, then = f"the {left} that its epoch had left", f"reads the {length} batches behind it"
        if is_used_up:
            warnings.warn(
                f"the iteration that went on from the loaded state was left after {count} "
                f"batch{'' if count == 1 else 'es'} of {of}, and this one {then}; who looks at a batch beforehand "
                "loads the state again",
                RuntimeWarning,
                stacklevel=5,
            )
