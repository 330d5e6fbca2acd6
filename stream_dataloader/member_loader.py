"""`SideBySideLoader`: what `side_by_side` returns.

Guarantee: a state is that of all members after the same batch.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import torch

from stream_dataloader import _options as options
from stream_dataloader._assembly.beside import Joiner
from stream_dataloader._ranks.ranks import known_count
from stream_dataloader._reading.deferred import Deferred, Turn
from stream_dataloader._workers.iteration import NEWER_HAS_BEGUN
from stream_dataloader.batch import StreamBatch
from stream_dataloader.dataloader import StreamDataLoader
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import StaleIteratorError, StateError, StreamError
from stream_dataloader.member_iteration import MemberIteration, Place, Saved
from stream_dataloader.protocols import Transport, WorkerMethod

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext

    from typing_extensions import Self

__all__ = ["SideBySideLoader"]

VERSION = 1
_RECORDS = 64  # places of the last batches that are kept, as those of a `StreamDataLoader`


class LoaderOptions(TypedDict, total=False):
    """Options of `StreamDataLoader` that all members share."""

    prefetch_factor: int | None
    pin_memory: bool
    persistent_workers: bool
    multiprocessing_context: str | BaseContext | None
    worker_init_fn: Callable[[int], Any] | None
    timeout: float
    device: torch.device | str | int | None
    transport: Transport
    max_restarts: int
    groups: int | None
    rank: int | None
    world_size: int | None
    process_group: Any
    worker_method: WorkerMethod
    threads_per_worker: int


class SideBySideLoader:
    """What `side_by_side` returns: iterates over batches of all members' lanes, as a `StreamDataLoader` does.

    Attributes:
        loaders: The loader of each member.
        ends_with: When an epoch ends.
        batches_per_epoch: How many batches it has, if no member ends.
        endless: Which members never end.
        joiner: Puts their batches side by side.
    """

    def __init__(
        self,
        datasets: Sequence[StreamDataset],
        num_workers: Sequence[int],
        ends_with: Literal["first", "longest"] | int,
        batches_per_epoch: int | None,
        loader_options: LoaderOptions,
    ) -> None:
        self.loaders = tuple(
            StreamDataLoader(dataset, count, **loader_options)
            for dataset, count in zip(datasets, num_workers, strict=True)
        )
        self.ends_with = ends_with
        self.batches_per_epoch = batches_per_epoch
        self.joiner = Joiner(
            [dataset.fill_value for dataset in datasets],
            [dataset.batch_size for dataset in datasets],
            mark_ends=all(dataset.mark_ends for dataset in datasets),
        )
        self.endless = [dataset.rules.padding_mode == "cycle" for dataset in datasets]
        self._goes_on: list[Saved | None] = [None] * len(datasets)  # where endless members stopped
        self._epoch = 0  # the one that comes
        self._resume: Mapping[str, Any] | None = None  # what was loaded
        self._reading: int | None = None  # the epoch of `_places`
        self._places: deque[Place] = deque(maxlen=_RECORDS)
        self._iteration: weakref.ref[MemberIteration] | None = None
        self._turn = Turn()
        self._asked = self._newest = 0  # iterators asked for; the number of the newest that has begun

    @property
    def batch_size(self) -> int:
        """Number of lanes, of all members together."""
        return sum(loader.batch_size for loader in self.loaders)

    @property
    def num_workers(self) -> int:
        """Number of worker processes, of all members together."""
        return sum(loader.num_workers for loader in self.loaders)

    @property
    def epoch(self) -> int:
        """The number of the epoch that is being read, or else of the one that `iter()` would begin."""
        return self._epoch if self._reading is None else self._reading

    @property
    def failures(self) -> list[StreamError]:
        """Errors of the streams that were skipped, member after member."""
        return [failure for loader in self.loaders for failure in loader.failures]

    def to(self, device: torch.device | str | int) -> Self:
        """Move batches to `device` from now on; returns the loader."""
        for loader in self.loaders:
            loader.to(device)
        return self

    def __bool__(self) -> bool:
        """Always true; Python would ask `len`, which may not be known."""
        return True

    def __len__(self) -> int:
        """Number of batches of the epoch being read, or of the next one; exact.

        Raises:
            TypeError: A member's number is needed and not known without its `lengths`, or no member ends.
        """
        return self._count(self.epoch, self._steps)

    def _count(self, epoch: int, steps: Callable[[StreamDataLoader[Any], int], int]) -> int:
        if self.batches_per_epoch is not None:
            return self.batches_per_epoch
        if isinstance(self.ends_with, int):
            return steps(self.loaders[self.ends_with], epoch)
        counts = [
            steps(loader, epoch) for loader, endless in zip(self.loaders, self.endless, strict=True) if not endless
        ]
        if not counts:
            raise TypeError('all members have padding_mode="cycle", so there is no len(); pass batches_per_epoch=')
        return min(counts) if self.ends_with == "first" else max(counts)

    @staticmethod
    def _steps(loader: StreamDataLoader[Any], epoch: int) -> int:
        loader._find_place()
        return loader._ranks.reading.steps_of(epoch)

    @staticmethod
    def _sure_steps(loader: StreamDataLoader[Any], epoch: int) -> int:
        if (count := known_count(loader._ranks.reading, epoch)) is None:
            raise TypeError
        return count

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch that the next iteration reads; later iterations count on from it.

        The number of the epoch that comes anyhow changes nothing. With another one, endless members begin anew, too.
        """
        epoch = options.integer("epoch", epoch, 0, 2**62)
        if self._reading is None and epoch == self._epoch:
            return
        self._leave()
        if epoch != self._epoch:
            self._goes_on = [None] * len(self.loaders)
        self._epoch, self._resume = epoch, None

    def _leave(self) -> None:
        """End what is being read; endless members go on from there."""
        running = None if self._iteration is None else self._iteration()
        if running is not None:
            running.close()
            running.stale = True
        if self._places:
            last = self._places[-1]
            self._goes_on = [saved if own else None for own, saved in zip(self.endless, last.saved, strict=True)]
        self._places.clear()
        self._reading = None

    def __iter__(self) -> Iterator[StreamBatch]:
        """Read the next epoch. It begins with the first `next`; the iterator before is closed then."""
        self._asked += 1
        return Deferred(functools.partial(self._begin, self._asked), self._turn)

    def _begin(self, number: int) -> Iterator[StreamBatch]:
        """Begin the next epoch, for the iterator that was the `number`-th to be asked for."""
        if number < self._newest:
            raise StaleIteratorError(NEWER_HAS_BEGUN)
        self._newest = number
        self._leave()
        epoch, resume = self._epoch, self._resume
        step, over = 0, [False] * len(self.loaders)
        if resume is not None:
            step, over = resume["step"], self._over_in(resume)
        saved = self._members_at(epoch, resume)
        self._epoch, self._resume, self._reading = epoch + 1, None, epoch
        self._places.append(Place(step, tuple(over), tuple(saved)))
        iteration = MemberIteration(self, epoch, self._places[-1])
        self._iteration = weakref.ref(iteration)
        return iteration

    def _over_in(self, state: Mapping[str, Any]) -> list[bool]:
        """Which members had ended; one whose end was known beforehand stands at its next epoch."""
        return [
            bool(over) or (not endless and member["epoch"] > state["epoch"])
            for over, endless, member in zip(state["over"], self.endless, state["members"], strict=True)
        ]

    def _members_at(self, epoch: int, resume: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
        """Have all members stand where the epoch is to begin, and say where that is."""
        for number, loader in enumerate(self.loaders):
            goes_on = self._goes_on[number] if resume is None else resume["members"][number]
            if goes_on is None:
                loader.set_epoch(epoch)
            else:
                loader.load_state_dict(_made(goes_on))
        return [loader.state_dict() for loader in self.loaders] if resume is None else list(resume["members"])

    def note(self, place: Place) -> None:
        """A batch was handed out."""
        self._places.append(place)

    def ended(self) -> None:
        """The epoch was read to its end."""
        self._leave()

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Where the loader stands, after what was delivered: the states of all members, as plain data.

        Args:
            step: Number of batches after which it is wanted; None stands for all that were delivered. The last 64 are
                known.

        Raises:
            ValueError: Batch `step` was not delivered, or is too long ago.
        """
        if self._reading is not None:
            for place in reversed(self._places):
                if step is None or place.step == step:
                    return self.state_at(self._reading, place)
            known = f"{self._places[0].step} to {self._places[-1].step}"
            raise ValueError(f"the state as of step {step} is not known; known are steps {known}")
        if step is not None and step != (begin := 0 if self._resume is None else self._resume["step"]):
            raise ValueError(f"the state as of step {step} is not known: epoch {self._epoch} begins at step {begin}")
        if self._resume is not None:
            return dict(self._resume)
        return self._plain(self._epoch, 0, [False] * len(self.loaders), self._members_at(self._epoch, None))

    def state_at(self, epoch: int, place: Place) -> dict[str, Any]:
        """The state at a place; at an end that is known beforehand, that of the next epoch's beginning."""
        members = [dict(_made(saved)) for saved in place.saved]
        try:
            is_end = place.step >= self._count(epoch, self._sure_steps)
        except TypeError:
            is_end = False
        if not is_end:
            return self._plain(epoch, place.step, list(place.over), members)
        for number, (member, endless) in enumerate(zip(members, self.endless, strict=True)):
            if not endless:
                members[number] = _at_beginning(member, epoch + 1)
        return self._plain(epoch + 1, 0, [False] * len(members), members)

    def _plain(
        self, epoch: int, step: int, over: Sequence[bool], members: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        return {
            "version": VERSION,
            "side_by_side": len(self.loaders),
            "ends_with": self.ends_with,
            "epoch": epoch,
            "step": step,
            "over": list(over),
            "members": list(members),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state with the next `iter()`, bit for bit, with any number of workers.

        Args:
            state: What `state_dict()` returned, on this rank, with the same number of ranks.

        Raises:
            StateError: It is no state of such a loader, or one of other members; the message says which.
        """
        self._check_state(state)
        with self._turn:
            self._leave()
            for number, (loader, member) in enumerate(zip(self.loaders, state["members"], strict=True)):
                try:
                    loader.load_state_dict(member)
                except StateError as error:
                    raise StateError(f"members[{number}]: {error}") from error
            self._resume, self._epoch = state, int(state["epoch"])
            self._goes_on = [None] * len(self.loaders)

    def _check_state(self, state: Any) -> None:
        if not isinstance(state, Mapping) or "side_by_side" not in state:
            raise StateError(
                "this is no state of a side_by_side loader; pass what its state_dict() returned (a StreamDataLoader's "
                "state is loaded by a StreamDataLoader)"
            )
        if state.get("version") != VERSION:
            raise StateError(f"the state is of version {state.get('version')}, and this library reads {VERSION}")
        here = {"side_by_side": len(self.loaders), "ends_with": self.ends_with}
        for name, value in here.items():
            if state.get(name) != value:
                told = "the number of members" if name == "side_by_side" else name
                raise StateError(f"the state was saved with {told} {state.get(name)!r}, and this loader has {value!r}")
        if missing := {"epoch", "step", "over", "members"} - state.keys():
            raise StateError(f"the state is not whole: it has no {sorted(missing)[0]}; pass all of it")


def _made(saved: Saved) -> Mapping[str, Any]:
    return saved() if callable(saved) else saved


def _at_beginning(state: Mapping[str, Any], epoch: int) -> dict[str, Any]:
    """A member's state, at the beginning of an epoch."""
    groups = {name: tuple(own[:1]) for name, own in state.items() if name.startswith("group_")}  # but for failures
    return {**state, **groups, "epoch": epoch, "step": 0}
