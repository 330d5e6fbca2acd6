"""`LoaderPosition`: where a loader stands, from one epoch to the next, as the loader's methods say it.

Which epoch comes and where it begins is decided by `_schedule/position.py`. Here that meets what is read. Of members
side by side those that end begin each epoch anew, and those that never end go on where they stand.

Guarantee: a state is of what was delivered, not what workers have read ahead, of all members after the same batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from stream_dataloader import _options as options
from stream_dataloader._items.layout import Layout
from stream_dataloader._loader.epoch import Course, Epoch, Member, Record
from stream_dataloader._loader.skipping import place_later
from stream_dataloader._ranks.ranks import Ranks, known_count
from stream_dataloader._reading.plan import Start
from stream_dataloader._schedule.position import EpochPlace, EpochStart, Position
from stream_dataloader._schedule.rules import NONE, Reader
from stream_dataloader._schedule.saved_state import LoadedState
from stream_dataloader._schedule.snapshot import Snapshot
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import StateError, StreamError
from stream_dataloader.members import SideBySide


class Place(NamedTuple):
    """A place in an epoch."""

    step: int
    starts: tuple[Start, ...]
    over: tuple[bool, ...]


class KeptLanes(NamedTuple):
    """The lanes of a loaded state, as they go on here.

    Attributes:
        saved: Number of lanes of this rank's groups when the state was saved.
        lanes: For each lane here the one that it was then; -1 for one that is new.
    """

    saved: int
    lanes: list[int]


def _kept_lanes(members: Sequence[Member], loaded: Sequence[LoadedState]) -> KeptLanes:
    """Return the lanes that go on: each group keeps its first ones.

    ::

    saved    0 1 | 2 3          two groups here, of two lanes
    here     0 1 - | 2 3 -      of three; lanes 2 and 5 are new
    """
    saved, lanes = 0, list[int]()
    for member, own in zip(members, loaded, strict=True):
        rules, width = member.ranks.reading.rules, own.lanes_of_a_group
        for _ in range(rules.groups.count):
            lanes += [saved + lane if lane < width else -1 for lane in range(rules.lanes_of_a_group)]
            saved += width
    return KeptLanes(saved, lanes)


class LoaderPosition:
    """Where a loader stands.

    Args:
        dataset: What is read.
        ranks: Who reads it, of each member.
        length: Number of batches n of an epoch, if what is read has no end; None: epochs are the dataset's.
    """

    def __init__(self, dataset: StreamDataset | SideBySide, ranks: Sequence[Ranks], length: int | None) -> None:
        self._dataset = dataset
        self._sides = dataset if isinstance(dataset, SideBySide) else None
        self.is_side_by_side = self._sides is not None
        run = None if self._sides is not None else length  # members side by side go on in epochs of their own
        self.members = tuple(Member(own, of, run) for own, of in zip(dataset.members, ranks, strict=True))
        self._goes_on = (False,) if self._sides is None else self._sides.endless
        self._length = length
        self._position = Position(run)
        self._resting: dict[int, Start] = {}  # where members stand that go on in the next epoch
        self._requests_heeded = 0  # of the dataset's set_epoch
        self.kept_lanes: KeptLanes | None = None
        self.loaded: tuple[Mapping[str, Any], Collection[str]] | None = None  # while it may be another rank's
        self._resumed_at: int | None = None  # the step at which the last epoch went on from a state
        self.epoch: Epoch | None = None  # the last; None once another was set or loaded
        self.failures: list[StreamError] = []

    @property
    def is_between_epochs(self) -> bool:
        return self.epoch is None or self.epoch.over

    @property
    def number(self) -> int:
        """The number of the epoch that began last."""
        return 0 if self._position.begun is None else self._position.begun.epoch.number

    @property
    def coming_number(self) -> int:
        self._heed_dataset()
        return self._position.coming().epoch.number

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
        """What items look like, which all members' do alike; None if that is not known."""
        return next((member.layout for member in self.members if member.layout is not None), None)

    def set_epoch(self, epoch: int) -> None:
        epoch = options.integer("epoch", epoch, 0, 2**62)
        self._requests_heeded = self._dataset.epoch_request[0]
        self._set_epoch(epoch)

    def _set_epoch(self, epoch: int) -> None:
        self._position.set_epoch(epoch)
        if self._position.length is None:  # a run goes on
            self._leave()

    def _heed_dataset(self) -> None:
        """The dataset's `set_epoch` counts like the loader's; the last call wins."""
        count, epoch = self._dataset.epoch_request
        if count != self._requests_heeded:
            self._requests_heeded = count
            self._set_epoch(epoch)

    def _rest(self) -> None:
        """Note where members stand that go on in the next epoch."""
        if self.epoch is not None:
            record = self.epoch.record()
            for number, (course, own) in enumerate(zip(self.epoch.courses, record.members, strict=True)):
                if course.goes_on and own is not None:
                    self._resting[number] = course.start(own)

    def _leave(self) -> None:
        self._rest()
        self.epoch = None

    def _coming(self) -> tuple[EpochStart, Place]:
        """What comes next, and where that begins."""
        self._heed_dataset()
        self._rest()
        coming = self._position.coming()
        if coming.place is not None:
            return coming, coming.place
        resting = self._resting if self._position.is_by_itself else {}  # endless members begin another one anew, too
        starts = tuple(resting.get(number, Start(coming.run)) for number in range(len(self.members)))
        return coming, Place(0, starts, (False,) * len(starts))

    @property
    def coming_step(self) -> int:
        return self._coming()[1].step

    @property
    def coming_count(self) -> int:
        """How many batches of the coming epoch come before its place."""
        coming, place = self._coming()
        return place.step if self._position.length is None else coming.epoch.delivered

    @property
    def coming_begun(self) -> int:
        """How many sources lanes have begun before the coming epoch's place."""
        count = 0
        for start in self._coming()[1].starts:
            if (at := start.resume) is not None:
                reserved = sum(grant != NONE for lane in at.lanes for grant in lane.reserved or ())
                count += sum(at.cursors) - len(at.returned) - reserved
        return count

    def coming_epoch(self, readers: Sequence[Reader]) -> Epoch:
        """What is to be read next, and by whom; `begin` says that it has begun."""
        coming, place = self._coming()
        courses = []
        for number, member in enumerate(self.members):
            own = [index for index, reader in enumerate(readers) if reader.member == number]
            over, goes_on = place.over[number], self._goes_on[number]
            of_member = slice(own[0], own[-1] + 1)
            courses.append(Course(member, place.starts[number], of_member, ended=over, goes_on=goes_on))
        return Epoch(coming.run, place.step, courses, None if self._sides is None else self._length)

    def begin(self, epoch: Epoch) -> None:
        """The coming epoch, or its run, has begun; the loaded state is used."""
        continued = self.goes_on
        if (text := self._position.renaming("loader")) is not None:
            warnings.warn(text, RuntimeWarning, stacklevel=7)
        record = epoch.record()
        start = self._position.begin(record.step, lambda: _place_of(epoch))
        epoch.epochs = self._position.epochs
        is_resumed = self._sides is None and start.epoch.delivered and not continued
        self._resumed_at = record.step if is_resumed else None
        self.loaded, self.epoch = None, epoch
        for member, own in zip(self.members, record.members, strict=True):
            if own is None or not own.step:
                member.layout = None

    def ends(self, epoch: Epoch) -> bool:
        """Whether an epoch ends before the step that comes next, for which some members have nothing."""
        ended = [course.ended for course in epoch.courses]
        return ended[0] if self._sides is None else self._sides.is_end(ended)

    def note_failure(self, member: Member, failure: StreamError) -> None:
        """A stream was skipped; raises `FailureLimitError` if it was one too many."""
        self.failures.append(failure)
        member.count_failure(failure)

    def read(self, state: Any, changes: Collection[str] = ()) -> list[LoadedState]:
        """What a state says, of each member; nothing changes but what ranks adopt.

        Args:
            changes: Which differences are meant.

        Raises:
            StateError: It is no state of such a loader, or of one of other members.
        """
        if self._sides is None:
            return [self.members[0].ranks.load(state, changes)]
        loaded = []
        for number, (member, own) in enumerate(zip(self.members, self._sides.states_in(state), strict=True)):
            try:
                loaded.append(member.ranks.load(own, changes))
            except StateError as error:
                raise StateError(f"members[{number}]: {error}") from error
        return loaded

    def load(self, state: Mapping[str, Any], changes: Collection[str], loaded: Sequence[LoadedState]) -> None:
        self._requests_heeded = self._dataset.epoch_request[0]
        starts = tuple(member.load(own) for member, own in zip(self.members, loaded, strict=True))
        if self._sides is None:
            run, resume, _ = starts[0]
            place = None if resume is None else Place(resume.step, starts, (False,))
        else:
            run = state["epoch"]
            ended = zip(state["over"], self._goes_on, starts, strict=True)
            over = tuple(bool(saved) or (not goes_on and start.epoch > run) for saved, goes_on, start in ended)
            place = Place(state["step"], starts, over)
        self._position.load(run, place, loaded[0].epoch_place)
        self._resting, self.epoch, self.loaded = {}, None, (state, changes)
        self.kept_lanes = _kept_lanes(self.members, loaded)

    def later(self, state: Mapping[str, Any], count: int) -> tuple[dict[str, Any], int] | None:
        """The state some batches after another, and how many they are; None if only reading tells."""
        if self._sides is not None:
            return None
        member, (loaded,) = self.members[0], self.read(state)
        at, length = loaded.epoch_place, self._length
        if length is not None:  # the run goes on behind the epoch's end, where this must stop
            count = min(count, length - (0 if at is None else at.delivered))
        later = place_later(member, Start(loaded.epoch, loaded.snapshot), count)
        if later is None:
            return None
        if at is not None and length is not None:
            whole, delivered = divmod(at.delivered + count, length)
            at = EpochPlace(at.number + whole, delivered)
        return member.state(later[0], at), later[1]

    def forget_place(self) -> None:
        """What was loaded, or reached in a run, was of another rank."""
        self._position.forget_place()
        self._resting = {}
        for member in self.members:
            member.forget_place()
        if self._position.length is not None or self._sides is not None:
            self.epoch = None

    def state_dict(self, step: int | None) -> dict[str, Any]:
        self._heed_dataset()
        epoch = self.epoch
        if epoch is not None and not self._position.was_left:
            record = epoch.record(step)
            if not (epoch.over and record.step == epoch.step):
                return self.state_of(epoch, record)
            step = None
        coming, place = self._coming()
        if step not in (None, place.step):
            raise ValueError(
                f"the state after {step} batches is not known: epoch {coming.epoch.number} has not begun, and begins "
                f"with batch {place.step}"
            )
        return self._whole(coming.run, place.step, place.over, self.coming_states())

    def coming_states(self) -> list[dict[str, Any]]:
        coming, place = self._coming()
        return [member.state(start, coming.epoch) for member, start in zip(self.members, place.starts, strict=True)]

    def state_of(self, epoch: Epoch, record: Record) -> dict[str, Any]:
        """The state at a place in an epoch; at its end, that of the next one's beginning."""
        at = None if epoch.epochs is None else epoch.epochs.at(record.step)
        count = None if self._sides is None else self._sure_count(epoch)
        is_end = count is not None and record.step >= count
        states = []
        for course, own in zip(epoch.courses, record.members, strict=True):
            if own is None or (is_end and not course.goes_on):
                states.append(course.member.state(Start(epoch.number + 1), at))
            else:
                states.append(course.member.state_of(course.progress.epoch, own, at))
        if is_end:
            return self._whole(epoch.number + 1, 0, [False] * len(states), states)
        ends = zip(states, self._goes_on, strict=True)
        over = [not goes_on and state["epoch"] > epoch.number for state, goes_on in ends]  # some know it beforehand
        return self._whole(epoch.number, record.step, over, states)

    def _whole(self, epoch: int, step: int, over: Sequence[bool], states: list[dict[str, Any]]) -> dict[str, Any]:
        """A state of all members; of one that is alone, its own."""
        return states[0] if self._sides is None else self._sides.state(epoch, step, over, states)

    def count(self, epoch: int) -> int:
        """Number of batches of an epoch; raises TypeError if it is not known."""
        changed = self._changed_in(epoch)

        def steps(number: int) -> int:
            return self.members[number].ranks.reading.steps_of(epoch, changed[number])

        return steps(0) if self._sides is None else self._sides.count(steps)

    def _changed_in(self, epoch: int) -> list[Snapshot | None]:
        """Where members stand in an epoch that is read, or comes next, if it began for them under other options."""
        if self.epoch is not None and not self.epoch.over and self.epoch.number == epoch:
            return self.epoch.changed
        places = [start.resume if start.epoch == epoch else None for start in self._coming()[1].starts]
        return [None if place is None or place.changed is None else place for place in places]

    def _sure_count(self, epoch: Epoch) -> int | None:
        """The same for members side by side, if no stream may change it; None otherwise."""
        assert self._sides is not None
        changed = epoch.changed

        def steps(number: int) -> int:
            count = known_count(self.members[number].ranks.reading, epoch.number, changed[number])
            if count is None:
                raise TypeError
            return count

        try:
            return self._length or self._sides.count(steps)
        except TypeError:
            return None

    def warn_of_rest(self) -> None:
        """Warn if one batch of a loaded state was looked at: the rest of its epoch is not read."""
        self._heed_dataset()
        epoch = self.epoch
        if epoch is None or epoch.over or self._resumed_at is None or self._position.was_left:
            return
        record, length, left = epoch.record(), self._position.length, self._position.left
        count = record.step - self._resumed_at
        if left is None:
            (own,) = record.members
            is_used_up = count <= 1 and own is not None and not self.members[0].is_end(epoch.number, own)
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

    def __getstate__(self) -> dict[str, Any]:
        """A copy goes on where this one stands."""
        self._rest()
        return self.__dict__ | {"epoch": None, "_position": self._position.at_rest()}


def _place_of(epoch: Epoch) -> Place:
    record = epoch.record()
    starts = tuple(course.start(own) for course, own in zip(epoch.courses, record.members, strict=True))
    return Place(record.step, starts, tuple(own is None for own in record.members))
