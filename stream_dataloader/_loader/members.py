"""Where a loader stands whose batch has lanes of one member, or of several: those of `side_by_side`.

A member has rules, an order, an epoch and a place in it as a loader of its own has, so each has a `LoaderPosition`.
What all have in common is the step, and where the epoch ends.

Guarantee: a state is that of all members after the same batch.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from stream_dataloader import _options as options
from stream_dataloader._items.layout import Layout
from stream_dataloader._loader.courses import Course, MembersProgress
from stream_dataloader._loader.position import LoaderPosition
from stream_dataloader._ranks.ranks import Ranks, known_count
from stream_dataloader._schedule.progress import Progress
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import StateError, StreamError
from stream_dataloader.members import SideBySide

VERSION = 1


class OnePosition(LoaderPosition):
    """Where a loader of one member stands, who is the whole of it; see `MembersPosition`."""

    @property
    def members(self) -> tuple[LoaderPosition, ...]:
        """Where each member stands."""
        return (self,)

    def coming_step(self) -> tuple[int, tuple[bool, ...]]:
        """The step where the coming epoch begins, and which members have ended by then."""
        _, place = self.coming()
        return 0 if place is None else place.step, (False,)

    def leave(self) -> None:
        """Leave what was read last."""

    def begin_all(self, courses: Sequence[Course]) -> Progress:
        """The coming epoch has begun; returns what follows it."""
        self.begin(courses[0].progress)
        return courses[0].progress

    def go_on(self) -> None:
        """The coming epoch has begun, and goes on with the run that is being read."""
        assert self.progress is not None
        self.begin(self.progress)

    def is_end(self, step: int, courses: Sequence[Course]) -> bool:  # noqa: ARG002
        """Whether the epoch ends before a step, for which some members may have nothing."""
        return courses[0].ended is not None

    def count(self, epoch: int) -> int:
        """Number of batches of an epoch.

        Raises:
            TypeError: It is not known.
        """
        return self._ranks.reading.steps_of(epoch)

    def states_of(self, state: Any) -> list[Any]:
        """The members' own states in a state."""
        return [state]

    def loaded_all(self, state: Mapping[str, Any]) -> None:
        """All members stand where the state says."""


class MembersPosition:
    """Where a loader of several members stands; see `OnePosition`, which has the same face.

    Args:
        sides: What is read, and when an epoch ends.
        ranks: Who reads it, of each member.
        length: Number of batches of an epoch, if no member ends.

    Attributes:
        members: Where each member stands.
        loaded: The state that was loaded, as long as it may turn out to be another rank's.
        number: The number of the epoch that began last.
        progress: Follows that epoch; None if it was left, or another one was set or a state loaded.
    """

    goes_on = False
    left = None  # an epoch is an iteration of its own

    def __init__(self, sides: SideBySide, ranks: Sequence[Ranks], length: int | None) -> None:
        self.members = tuple(LoaderPosition(own, of) for own, of in zip(sides.members, ranks, strict=True))
        self._sides = sides
        self._ranks = ranks
        self._length = length
        self.number = 0
        self._epoch = 0  # the one that comes by itself
        self._wanted: int | None = None  # the one that was set
        self._step = 0  # where it begins
        self._over = (False,) * len(self.members)  # then
        self.loaded: Mapping[str, Any] | None = None
        self.progress: MembersProgress | None = None

    @property
    def failures(self) -> list[StreamError]:
        """Errors of streams that were skipped, member after member."""
        return [failure for member in self.members for failure in member.failures]

    @failures.setter
    def failures(self, failures: list[StreamError]) -> None:
        for member in self.members:
            member.failures = failures
            failures = []

    @property
    def layout(self) -> Layout | None:
        """See `LoaderPosition`: all members' items look alike."""
        return next((member.layout for member in self.members if member.layout is not None), None)

    @property
    def is_between_epochs(self) -> bool:
        """See `LoaderPosition`, as the others."""
        return self.progress is None or self.progress.over

    @property
    def is_ahead(self) -> bool:
        return self.progress is not None and self.progress.is_ahead

    @property
    def end_is_ahead(self) -> bool:
        return self.progress is not None and self.progress.end_is_ahead

    @property
    def coming_number(self) -> int:
        return self._epoch if self._wanted is None else self._wanted

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that comes next.

        The number of the epoch that comes anyhow changes nothing. With another one, endless members begin anew, too.
        """
        self._wanted = options.integer("epoch", epoch, 0, 2**62)
        if not self.is_between_epochs:
            self._leave()

    def _come(self, epoch: int, *, anew: bool) -> None:
        """Have an epoch come next, from its beginning; endless members go on where they stand, or begin anew."""
        self._epoch, self._step, self._over = epoch, 0, (False,) * len(self.members)
        for member, endless in zip(self.members, self._sides.endless, strict=True):
            if anew or not endless:
                member.go_to(epoch)

    def leave(self) -> None:
        """See `OnePosition`; what was set counts from here on."""
        self._leave()
        if self._wanted not in (None, self._epoch):
            self._come(self.coming_number, anew=True)
        self._wanted = None

    def _leave(self) -> None:
        """Leave what was read last: endless members go on from there."""
        if self.progress is not None:
            record = self.progress.record()
            for member, course, own in zip(self.members, self.progress.courses, record.members, strict=True):
                if course.goes_on and own is not None:
                    member.go_to(course.progress.epoch, own)
            self.progress = None
            self._come(self._epoch, anew=False)

    def coming_step(self) -> tuple[int, tuple[bool, ...]]:
        if self.progress is not None or self._wanted not in (None, self._epoch):
            return 0, (False,) * len(self.members)
        return self._step, self._over

    def begin_all(self, courses: Sequence[Course]) -> MembersProgress:
        for course, endless in zip(courses, self._sides.endless, strict=True):
            course.position.begin(course.progress)
            course.goes_on = endless
        self.progress = MembersProgress(self._epoch, self._step, courses)
        self.number, self._epoch, self.loaded = self._epoch, self._epoch + 1, None
        return self.progress

    def go_on(self) -> None:
        raise NotImplementedError("each epoch is an iteration of its own")

    def is_end(self, step: int, courses: Sequence[Course]) -> bool:
        return step == self._length or self._sides.is_end([course.ended is not None for course in courses])

    def count(self, epoch: int) -> int:
        return self._sides.count(lambda member: self._ranks[member].reading.steps_of(epoch))

    def _sure_count(self, epoch: int) -> int | None:
        """The same, if no stream may change it; None otherwise."""

        def steps(member: int) -> int:
            count = known_count(self._ranks[member].reading, epoch)
            if count is None:
                raise TypeError
            return count

        try:
            return self._length or self._sides.count(steps)
        except TypeError:
            return None

    def state_dict(self, step: int | None) -> dict[str, Any]:
        """See `StreamDataLoader.state_dict`."""
        if self.progress is not None:
            record = self.progress.record(step)
            if not (self.progress.over and record.step == self.progress.step):
                return self.state_of(self.progress, record)
            self._leave()
            step = None
        epoch, (begin, over) = self.coming_number, self.coming_step()
        if step not in (None, begin):
            raise ValueError(
                f"the state as of step {step} is not known: epoch {epoch} has not begun, and begins at step {begin}"
            )
        if epoch == self._epoch:
            states = [member.coming_state() for member in self.members]
        else:
            states = [member.state_at_beginning(epoch) for member in self.members]
        return self._plain(epoch, begin, over, states)

    def state_of(self, progress: Any, record: Any) -> dict[str, Any]:
        """The state at a place in an epoch that was followed; at its end, that of the next one's beginning."""
        count = self._sure_count(progress.epoch)
        is_end = count is not None and record.step >= count
        states = []
        for course, own, endless in zip(progress.courses, record.members, self._sides.endless, strict=True):
            if own is None or (is_end and not endless):
                states.append(course.position.state_at_beginning(progress.epoch + 1))
            else:
                states.append(course.position.state_of(course.progress, own))
        if is_end:
            return self._plain(progress.epoch + 1, 0, [False] * len(states), states)
        ends = zip(states, self._sides.endless, strict=True)
        over = [not endless and state["epoch"] > progress.epoch for state, endless in ends]  # some know it beforehand
        return self._plain(progress.epoch, record.step, over, states)

    def _plain(
        self, epoch: int, step: int, over: Sequence[bool], states: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        return {
            "version": VERSION,
            "side_by_side": len(self.members),
            "ends_with": self._sides.ends_with,
            "epoch": epoch,
            "step": step,
            "over": list(over),
            "members": list(states),
        }

    def states_of(self, state: Any) -> list[Any]:
        """The members' own states in a state.

        Raises:
            StateError: It is no state of such a loader, or of one of other members.
        """
        if not isinstance(state, Mapping) or "side_by_side" not in state:
            raise StateError(
                "this is no state of a side_by_side loader; pass what its state_dict() returned (a StreamDataset's "
                "loader loads its own)"
            )
        if state.get("version") != VERSION:
            raise StateError(f"the state is of version {state.get('version')}, and this library reads {VERSION}")
        here = {"side_by_side": len(self.members), "ends_with": self._sides.ends_with}
        for name, value in here.items():
            if state.get(name) != value:
                told = "the number of members" if name == "side_by_side" else name
                raise StateError(f"the state was saved with {told} {state.get(name)!r}, and this loader has {value!r}")
        if missing := {"epoch", "step", "over", "members"} - state.keys():
            raise StateError(f"the state is not whole: it has no {sorted(missing)[0]}; pass all of it")
        return list(state["members"])

    def loaded_all(self, state: Mapping[str, Any]) -> None:
        self.progress = self._wanted = None
        self._epoch, self._step = int(state["epoch"]), int(state["step"])
        self._over = tuple(
            bool(over) or (not endless and member.coming_number > self._epoch)
            for over, endless, member in zip(state["over"], self._sides.endless, self.members, strict=True)
        )
        self.loaded = state

    def forget_place(self) -> None:
        """What was loaded was of another rank."""
        for member in self.members:
            member.forget_place()
        self._step, self._over, self.progress = 0, (False,) * len(self.members), None

    def warn_of_rest(self) -> None:
        """Nothing: endless members go on in any case."""

    def __getstate__(self) -> dict[str, Any]:
        """A copy goes on where this one stands."""
        if self.progress is None:
            return self.__dict__
        resting = copy.copy(self.__dict__)
        resting["members"] = tuple(map(copy.copy, self.members))
        twin = object.__new__(MembersPosition)
        twin.__dict__.update(resting)
        twin._leave()
        return twin.__dict__


#: Where a loader stands.
AnyPosition: TypeAlias = OnePosition | MembersPosition


def position_of(dataset: StreamDataset | SideBySide, ranks: Sequence[Ranks], length: int | None) -> AnyPosition:
    """The position of a loader at its beginning.

    Args:
        dataset: What is read.
        ranks: Who reads it, of each member.
        length: Number of batches of an epoch of an endless run; None: epochs end by themselves.
    """
    if isinstance(dataset, SideBySide):
        return MembersPosition(dataset, ranks, length)
    return OnePosition(dataset, ranks[0], length)
