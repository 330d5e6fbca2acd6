"""The position of a loader of several loaders, from one epoch to the next.

::

    member 0            0 1 2 3 4 |                ends with the epoch, or is padded behind its end
    member 1, endless   7 8 9 10 11 | 12 13 ...    its own epoch goes on from one epoch of the loader to the next
    loader's step       0 1 2 3 4 |  0  1

Guarantee: a state describes all members after the same batch. Members that end start over in each epoch. Endless
members continue where they are, unless another epoch was set.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from stream_dataloader._engine import options
from stream_dataloader._engine.items.layout import Layout
from stream_dataloader._engine.loader.base_position import BasePosition, KeptLanes
from stream_dataloader._engine.loader.delivery import Delivery
from stream_dataloader._engine.schedule.place import Place
from stream_dataloader._engine.schedule.state_check import is_same
from stream_dataloader._engine.schedule.state_check import number as check_number
from stream_dataloader.errors import StateError, shorten

if TYPE_CHECKING:
    from stream_dataloader.combine.dataset import SideBySide
    from stream_dataloader.dataloader import StreamDataLoader

State = dict[str, Any]

_VERSION = 1  # of states


class JointPlace(NamedTuple):
    """A place in an epoch of all members.

    Attributes:
        step: Number of its batches before the place.
        over: For each member, whether it has ended in the epoch.
        states: The state of each member; None at the beginning of the epoch.
    """

    step: int
    over: tuple[bool, ...]
    states: tuple[State | None, ...]


class Record(NamedTuple):
    """The place of all members between two batches.

    Attributes:
        step: Number of batches before it.
        members: For each member a function that makes its state; None for a member that has ended.
    """

    step: int
    members: tuple[Callable[[], State] | None, ...]


class JointEpoch(Delivery[Record]):
    """An epoch of all members, as it is delivered."""

    epochs = None  # the joint loader has no run; endless members continue in epochs of their own

    def __init__(self, number: int, place: JointPlace, first: Record) -> None:
        self.number = number
        self.place = place
        self.members_over = list(place.over)
        super().__init__(first)


class JointPosition(BasePosition[JointEpoch]):
    """Position of a loader of loaders, with the interface of `LoaderPosition`.

    Args:
        dataset: The members.
        loaders: Each member's own loader.
        length: Number of batches of an epoch, if all members are endless; None: epochs are the members'.
    """

    def __init__(self, dataset: SideBySide, loaders: Sequence[StreamDataLoader[Any]], length: int | None) -> None:
        self._dataset, self._loaders, self._length = dataset, loaders, length
        super().__init__(None)  # endless members continue in epochs of their own
        self._loaded_place: JointPlace | None = None
        self._resting: dict[int, State] = {}  # states of endless members, which continue in the next epoch

    @property
    def layout(self) -> Layout | None:
        """The layout of items, which all members share; None if it is not known."""
        found = (loader._position.layout for loader in self._loaders)
        return next((layout for layout in found if layout is not None), None)

    def set_epoch(self, epoch: int) -> None:
        self._epochs.set_epoch(options.integer("epoch", epoch, 0, 2**62))
        self._rest()
        self.epoch = None

    def _rest(self) -> None:
        """Note the states of endless members, which continue in the next epoch."""
        if self.epoch is not None:
            for number, state in enumerate(self.epoch.record().members):
                if self._dataset.endless[number] and state is not None:
                    self._resting[number] = state()

    def _coming(self) -> tuple[int, JointPlace]:
        """Return the number of the coming epoch, and the members' place in it."""
        self._rest()
        coming, is_by_itself = self._epochs.coming().epoch, self._epochs.is_by_itself
        if self._loaded_place is not None and is_by_itself:
            return coming, self._loaded_place
        resting = self._resting if is_by_itself else {}  # if another epoch was set, all start over
        count = len(self._loaders)
        return coming, JointPlace(0, (False,) * count, tuple(resting.get(number) for number in range(count)))

    @property
    def coming_step(self) -> int:
        return self._coming()[1].step

    coming_count = coming_step

    @property
    def coming_begun(self) -> int:
        """Number of sources that lanes have begun before the coming epoch's place."""
        return sum(loader._position.coming_begun for loader in self._loaders)

    @property
    def stop(self) -> int | None:
        """Number of batches of an epoch; None if members end it."""
        return self._length

    def ends(self, epoch: JointEpoch) -> bool:
        """Return whether an epoch ends before the next step, for which some members have no batch."""
        return self._dataset.is_end(epoch.members_over)

    def prepare(self) -> JointEpoch:
        """Move each member's loader to its place in the coming epoch, and return that epoch."""
        coming, place = self._coming()
        for loader, state, over in zip(self._loaders, place.states, place.over, strict=True):
            if state is not None:
                loader.load_state_dict(state)
            elif not over:
                loader._position.begin_anew(coming)
        return JointEpoch(coming, place, self._record(place.step, place.over))

    def begin(self, epoch: JointEpoch) -> None:
        """Note that the coming epoch has begun; this uses up the loaded state."""
        self._rest()
        self._epochs.begin(lambda: Place(epoch.number))
        self.loaded, self.epoch, self._loaded_place = None, epoch, None

    def _record(self, step: int, over: Sequence[bool]) -> Record:
        # Functions are kept, not states, as making a state of each member at each batch would take too long.
        members: list[Callable[[], State] | None] = []
        for loader, is_over in zip(self._loaders, over, strict=True):
            members.append(None if is_over else loader._position.state_later())
        return Record(step, tuple(members))

    def advance(self, epoch: JointEpoch) -> None:
        """Note that another batch is about to be delivered."""
        epoch.keep(self._record(epoch.step + 1, epoch.members_over))

    # States

    def coming_state(self) -> State:
        """Return the state of what comes next."""
        coming, place = self._coming()
        states = [
            _beginning(loader, coming) if state is None else state
            for loader, state in zip(self._loaders, place.states, strict=True)
        ]
        return self._whole(coming, place.step, place.over, states)

    def state_of(self, epoch: JointEpoch, record: Record) -> State:
        """Return the state at a place in an epoch; at its end, the state of the next epoch's beginning."""
        count = self._sure_count(epoch.number)
        is_end = count is not None and record.step >= count
        states = []
        for loader, state, endless in zip(self._loaders, record.members, self._dataset.endless, strict=True):
            if state is None or (is_end and not endless):
                states.append(_beginning(loader, epoch.number + 1))
            else:
                states.append(state())
        if is_end:
            return self._whole(epoch.number + 1, 0, [False] * len(states), states)
        ends = zip(states, self._dataset.endless, strict=True)
        # A member that knows its length has a state of the next epoch as soon as its last batch was delivered.
        over = [not endless and state["epoch"] > epoch.number for state, endless in ends]
        return self._whole(epoch.number, record.step, over, states)

    def _whole(self, epoch: int, step: int, over: Sequence[bool], states: Sequence[State]) -> State:
        state = {
            "version": _VERSION,
            "side_by_side": len(self._loaders),
            "ends_with": self._dataset.ends_with,
            "epoch": epoch,
            "step": step,
            "over": list(over),
            "members": list(states),
        }
        return state | {"checksum": _checksum(state)}

    def read(self, state: Any, changes: Collection[str] = ()) -> list[Any]:
        """Read the state of each member, without changing the position; ranks may adopt the state's seed.

        Raises:
            StateError: It is no state of such a loader, or of a loader with other members.
        """
        loaded = []
        for number, (loader, own) in enumerate(zip(self._loaders, self._members_in(state), strict=True)):
            try:
                loaded.append(loader._position.read(own, changes))
            except StateError as error:
                raise StateError(f"members[{number}]: {error}") from error
        return loaded

    def _members_in(self, state: Any) -> list[State]:
        if not isinstance(state, Mapping) or "side_by_side" not in state:
            raise StateError("this is no state of a side_by_side loader; pass what its state_dict() returned")
        if not is_same(version := state.get("version"), _VERSION):
            raise StateError(f"the state has version {shorten(version)}, and this library reads {_VERSION}")
        here = {"side_by_side": len(self._loaders), "ends_with": self._dataset.ends_with}
        for name, value in here.items():
            if not is_same(saved := state.get(name), value):
                what = "the number of members" if name == "side_by_side" else name
                raise StateError(f"the state was saved with {what} {shorten(saved)}, and this loader has {value!r}")
        if missing := {"epoch", "step", "over", "members", "checksum"} - state.keys():
            raise StateError(f"the state is not whole: it has no {sorted(missing)[0]}; pass all of it")
        for name in ("epoch", "step"):
            check_number(name, state[name])
        for name, kind in (("over", bool), ("members", Mapping)):
            row, count = state[name], len(self._loaders)
            if not isinstance(row, (list, tuple)) or [isinstance(one, kind) for one in row] != [True] * count:
                raise StateError(f"the state's {name} is {shorten(row)}, and must have an entry for each of {count}")
        if not is_same(state["checksum"], _checksum(state)):
            raise StateError("the state's epoch, step, over and members do not match their checksum: it is damaged")
        return list(state["members"])

    def load(self, state: Mapping[str, Any], changes: Collection[str], loaded: Sequence[Any]) -> None:
        run, states, over = state["epoch"], [], []
        ended = zip(self._loaders, state["members"], state["over"], self._dataset.endless, loaded, strict=True)
        for loader, own, saved, endless, read in ended:
            loader.load_state_dict(own, changes)
            states.append(loader.state_dict())
            over.append(bool(saved) or (not endless and read.place.epoch > run))
        self._epochs.load(Place(run))
        self._loaded_place = JointPlace(state["step"], tuple(over), tuple(states))
        self._resting, self.epoch, self.loaded = {}, None, (state, changes)
        saved_lanes, lanes = 0, list[int]()
        for loader in self._loaders:
            kept = loader._kept_lanes
            assert kept is not None
            lanes += [lane if lane < 0 else saved_lanes + lane for lane in kept.lanes]
            saved_lanes += kept.saved
        self.kept_lanes = KeptLanes(saved_lanes, lanes)

    def later(self, state: Mapping[str, Any], count: int) -> None:
        """Return None: the state some batches later needs reading."""

    def forget_place(self) -> None:
        """Forget the loaded or reached place, because it belongs to another rank."""
        self._epochs.forget_place()
        self._resting, self.epoch, self._loaded_place = {}, None, None

    # Lengths

    def count(self, epoch: int) -> int:
        """Return the number of batches of an epoch; raise TypeError if it is not known."""
        return self._dataset.count(lambda number: self._loaders[number]._position.count(epoch))

    def _sure_count(self, epoch: int) -> int | None:
        """Return the number of batches of an epoch if no stream can change it; None otherwise."""
        try:
            return self._length or self._dataset.count(lambda number: self._loaders[number]._position.sure_count(epoch))
        except TypeError:
            return None

    def warn_of_rest(self) -> None:
        """Do nothing, as members' loaders warn by themselves."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which goes on at the same place."""
        self._rest()
        return super().__getstate__()


def _checksum(state: Mapping[str, Any]) -> int:
    """Compute the CRC-32 of what decides which members go on; each member's state has its own."""
    numbers = [state["epoch"], state["step"], *state["over"]]
    numbers += [member.get(name) for member in state["members"] for name in ("epoch", "step")]
    return zlib.crc32(repr([one if isinstance(one, int) else None for one in numbers]).encode())


def _beginning(loader: StreamDataLoader[Any], epoch: int) -> State:
    """Return the state of a loader at the beginning of an epoch."""
    return loader._position.states.of(loader._ranks.dataset, Place(epoch))
