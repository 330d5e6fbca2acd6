"""`LoaderPosition`: where a loader stands, from one epoch to the next, as the loader's methods say it.

Which epoch comes and where it begins is decided by `_schedule/position.py`. Here that meets what is read: the progress
of the epoch that began last, the dataset's own `set_epoch`, streams that were skipped, ends that are known beforehand.

Guarantee: a state tells what was delivered, not what workers have read ahead.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from stream_dataloader import _options as options
from stream_dataloader._items.layout import Layout
from stream_dataloader._items.plain import layout_from_plain, layout_to_plain
from stream_dataloader._loader.ends import EpochEnds
from stream_dataloader._ranks.ranks import Ranks, identity_of
from stream_dataloader._schedule.position import EpochPlace, Position
from stream_dataloader._schedule.progress import Progress
from stream_dataloader._schedule.saved_state import LoadedState, plain_epoch, to_plain
from stream_dataloader._schedule.snapshot import PackedSnapshot, Snapshot
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import FailureLimitError, StreamError


class LoaderPosition:
    """Where a loader stands.

    Args:
        dataset: What is read.
        ranks: Who reads it.
        length: Number of batches n of an epoch of an endless run; None: epochs are the dataset's.

    Attributes:
        loaded: The state that was loaded, as long as it may turn out to be another rank's.
        failures: Errors of streams that were skipped, here.
        progress: Follows the last epoch that began; None after another one was set or a state was loaded.
        layout: What the items of that epoch look like, or those of the loaded state; None if that is not known.
    """

    def __init__(self, dataset: StreamDataset, ranks: Ranks, length: int | None = None) -> None:
        self._dataset = dataset
        self._ranks = ranks
        self._ends = EpochEnds(dataset, ranks)
        self._position = Position(length)
        self._requests_heeded = 0  # of the dataset's set_epoch
        self.loaded: Mapping[str, Any] | None = None
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
    def coming_number(self) -> int:
        """The number of the epoch that comes next."""
        self._heed_dataset()
        return self._position.coming().epoch.number

    @property
    def number(self) -> int:
        """The number of the epoch that began last."""
        return 0 if self._position.begun is None else self._position.begun.epoch.number

    @property
    def left(self) -> int | None:
        """How many batches the epoch that began last has, if its number of batches is set; None if it has an end."""
        return self._position.left

    @property
    def goes_on(self) -> bool:
        """The next iterator goes on with what was read last."""
        self._heed_dataset()
        return self._position.continues

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
        epoch = options.integer("epoch", epoch, 0, 2**62)
        self._requests_heeded = self._dataset.epoch_request[0]
        self._set_epoch(epoch)

    def _set_epoch(self, epoch: int) -> None:
        self._position.set_epoch(epoch)
        if self._position.length is None:  # a run goes on
            self.progress = None

    def _heed_dataset(self) -> None:
        """The dataset's `set_epoch` counts like the loader's; the last call wins."""
        count, epoch = self._dataset.epoch_request
        if count != self._requests_heeded:
            self._requests_heeded = count
            self._set_epoch(epoch)

    def coming(self) -> tuple[int, Snapshot | None]:
        """The epoch, or the run, that is read next, and the place in it where that begins; None at its beginning."""
        self._heed_dataset()
        return self._position.coming()[:2]

    def begin(self, progress: Progress) -> None:
        """The coming epoch has begun, and the loaded state is used.

        Args:
            progress: Follows it, or the run that it is a part of.
        """
        continued = self.goes_on
        if (text := self._position.renaming("loader")) is not None:
            warnings.warn(text, RuntimeWarning, stacklevel=5)
        step = progress.record().step
        start = self._position.begin(step, lambda: progress.record().unpack(self._ranks.reading.rules))
        progress.epochs = self._position.epochs
        self._resumed_at = None if continued or not start.epoch.delivered else step
        self.loaded = None
        self.progress = progress
        if start.place is None:
            self.layout = None

    def load(self, loaded: LoadedState, epoch: int, place: Snapshot | None, state: Mapping[str, Any]) -> None:
        """Go on with an epoch, or a run, from a place in it.

        Args:
            loaded: What the state says.
            epoch: The epoch.
            place: Where to go on; None at its beginning.
            state: The state itself.
        """
        self._failed = dict(enumerate(loaded.failures))
        self._requests_heeded = self._dataset.epoch_request[0]
        self._position.load(epoch, place, loaded.epoch_place)
        self.progress = None
        self.loaded = state
        self.layout = layout_from_plain(loaded.items)

    def forget_place(self) -> None:
        """What was loaded, or reached in a run, was of another rank."""
        self._position.forget_place()
        self._failed = {}
        if self._position.length is not None:
            self.progress = None

    def go_to(self, epoch: int, record: PackedSnapshot | None = None) -> None:
        """Have an epoch come next from a place in it that was followed; None: from its beginning."""
        place = record.unpack(self._ranks.reading.rules) if record is not None and record.step else None
        self._position.load(epoch, place, None)
        self.progress = None

    def state_dict(self, step: int | None) -> dict[str, Any]:
        """See `StreamDataLoader.state_dict`."""
        self._heed_dataset()
        progress = self.progress
        if progress is not None and not self._position.was_left:
            record = progress.record(step)
            if not (progress.over and record.step == progress.step):
                return self.state_of(progress, record)
            step = None
        run, place, epoch = self._position.coming()
        if step is not None and step != (begin := 0 if place is None else place.step):
            raise ValueError(
                f"the state as of step {step} is not known: epoch {epoch.number} has not begun, and begins at "
                f"step {begin}"
            )
        return self._plain(run, place, epoch)

    def coming_state(self) -> dict[str, Any]:
        """The state of the epoch that comes next, at its beginning."""
        return self._plain(*self._position.coming())

    def state_at_beginning(self, epoch: int) -> dict[str, Any]:
        """The state at the beginning of an epoch."""
        return self._plain(epoch, None, None)

    def state_of(self, progress: Progress, record: PackedSnapshot) -> dict[str, Any]:
        """The state at a place in an epoch that was followed; at its end, that of the next one's beginning."""
        epoch, place = progress.epoch, record.unpack(self._ranks.reading.rules)
        at = None if progress.epochs is None else progress.epochs.at(record.step)
        if self._ends.is_end(epoch, place):
            return self._plain(epoch + 1, None, at)
        return self._plain(epoch, place, at)

    def _plain(self, epoch: int, place: Snapshot | None, at: EpochPlace | None) -> dict[str, Any]:
        rules, length = self._ranks.reading.rules, self._position.length
        failed = [self._failed.get(group, ()) for group in range(rules.groups.count)]
        items = None if self.layout is None else layout_to_plain(self.layout)
        state = to_plain(rules, epoch, place, identity_of(self._dataset), failed, items)
        return state if length is None or at is None else state | plain_epoch(at, length)

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
        """Tell who looked at a batch of a loaded state that the rest of its epoch is not read as such."""
        self._heed_dataset()
        progress = self.progress
        if progress is None or progress.over or self._resumed_at is None or self._position.was_left:
            return
        record, length, left = progress.record(), self._position.length, self._position.left
        count = record.step - self._resumed_at
        if left is None:
            is_used_up = count <= 1 and not self._ends.is_end(progress.epoch, record.unpack(self._ranks.reading.rules))
            of, then = f"epoch {progress.epoch}", f"reads epoch {progress.epoch + 1} from its beginning"
        else:
            is_used_up = count == 1 and left > 1
            of, then = f"the {left} that its epoch had left", f"reads the {length} batches behind it"
        if is_used_up:
            warnings.warn(
                f"the iteration that went on from the loaded state was left after {count} "
                f"batch{'' if count == 1 else 'es'} of {of}, and this one {then}; who looks at a batch beforehand "
                "loads the state again",
                RuntimeWarning,
                stacklevel=4,
            )

    def __getstate__(self) -> dict[str, Any]:
        """A copy goes on where this one stands."""
        return self.__dict__ | {"progress": None, "layout": None, "_position": self._position.at_rest()}
