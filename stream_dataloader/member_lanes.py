"""`side_by_side`: some lanes of a batch read one dataset, the others another, each with a queue of its own.

::

    member 0: whole videos     lane 0   a a a a | a a a a | a a b b        each member is read by a StreamDataLoader of
                               lane 1   c c c c | c c . . | d d d d        its own, with workers of its own
    member 1: random windows   lane 2   x x x x | y y y y | z z z z        their batches are put side by side, which is
                               lane 3   u u u u | v v v v | w w w w        one more copy of the data

Guarantees: each member's lanes are bit for bit those that it has alone, so all promises of `StreamDataLoader` hold for
them; and a state is that of all members after the same batch.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypedDict

import torch

from stream_dataloader import _options as options
from stream_dataloader._assembly.beside import Joiner, SideBySideBatch
from stream_dataloader._ranks.ranks import known_steps
from stream_dataloader._reading.deferred import Deferred
from stream_dataloader._schedule.step_count import count_steps
from stream_dataloader._workers.iteration import NEWER_HAS_BEGUN
from stream_dataloader.dataloader import StreamDataLoader
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import StaleIteratorError, StateError, StreamError, shorten
from stream_dataloader.protocols import Transport

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext

    from typing_extensions import Self, Unpack

__all__ = ["SideBySideBatch", "SideBySideLoader", "side_by_side"]

VERSION = 1
_RECORDS = 64  # places of the last batches that are kept, as those of a `StreamDataLoader`

#: A member's state, or what makes it.
Saved: TypeAlias = "Mapping[str, Any] | Callable[[], Mapping[str, Any]]"


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


class _Place(NamedTuple):
    """Where an epoch stands between two steps.

    Attributes:
        step: The step that comes next.
        over: Which members have nothing more to read in the epoch.
        saved: Each member's state.
    """

    step: int
    over: tuple[bool, ...]
    saved: tuple[Saved, ...]


def side_by_side(
    members: Iterable[tuple[StreamDataset, int]],
    num_workers: int | Sequence[int] = 0,
    *,
    ends_with: Literal["first", "longest"] | int = "first",
    batches_per_epoch: int | None = None,
    **loader_options: Unpack[LoaderOptions],
) -> SideBySideLoader:
    """Read several datasets in the lanes of one batch: a loader, in place of `StreamDataLoader`.

    Unlike `interleave`, where any lane may draw from any dataset, each dataset has lanes of its own. Streaming lanes
    and lanes of random windows in one batch are the mixed sampling of Gehrig and Scaramuzza, Recurrent Vision
    Transformers for Object Detection with Event Cameras (CVPR 2023).

    Args:
        members: Datasets, each with its number of lanes, which replaces its `batch_size`. All need the same
            `time_steps`, and items of one structure, dtypes and shapes. Everything else is each member's own. A member
            that ends before the epoch does is padded with its `fill_value`. With `padding_mode="cycle"` a member never
            ends: in the next epoch it goes on where it stopped.
        num_workers: Number of worker processes: one number for each member, or a number that is shared by lanes, with
            at least one for each member. 0 reads in this process.
        ends_with: When an epoch ends: with the `"first"` or the `"longest"` of the members that end, or with a member,
            by its index.
        batches_per_epoch: Number of batches of an epoch, if all members have `padding_mode="cycle"`. None: such a run
            has no end.
        **loader_options: `prefetch_factor`, `pin_memory`, `persistent_workers`, `multiprocessing_context`,
            `worker_init_fn`, `timeout`, `device`, `transport`, `max_restarts`, `groups`, `rank`, `world_size` and
            `process_group`, as for `StreamDataLoader`, for each member.

    Raises:
        ValueError: There are no members; they disagree on `time_steps`, or have none; `ends_with` names a member that
            never ends or is not there; or an option is out of range.
        TypeError: A member is no pair of a `StreamDataset` and a number, or there is no such option.

    Example:
        >>> from stream_dataloader import StreamDataset, side_by_side
        >>> whole = StreamDataset(["abcde", "fgh"], iter, 1, time_steps=2)
        >>> parts = StreamDataset(["xy", "uv", "w"], iter, 1, time_steps=2, padding_mode="cycle")
        >>> for batch in side_by_side([(whole, 1), (parts, 1)]):
        ...     print(batch.member.tolist(), batch.data, batch.source[0].tolist())
        [0, 1] [['a', 'x'], ['b', 'y']] [0, 0]
        [0, 1] [['c', 'u'], ['d', 'v']] [0, 1]
        [0, 1] [['e', 'w'], [None, None]] [0, 2]
        [0, 1] [['f', 'x'], ['g', 'y']] [1, 0]
        [0, 1] [['h', 'u'], [None, 'v']] [1, 1]
    """
    datasets = _check_members(members)
    counts = _workers_of(num_workers, [dataset.batch_size for dataset in datasets])
    if unknown := sorted(loader_options.keys() - LoaderOptions.__annotations__.keys()):
        raise TypeError(
            f"side_by_side has no option {unknown[0]!r}; there are {', '.join(LoaderOptions.__annotations__)}"
        )
    for number, dataset in enumerate(datasets):
        if batches_per_epoch is not None and dataset.rules.padding_mode != "cycle":
            raise ValueError(
                f"batches_per_epoch is {batches_per_epoch}, and members[{number}] ends by itself, with padding_mode="
                f'{dataset.rules.padding_mode!r}; leave it out, or give all members padding_mode="cycle"'
            )
    length = None if batches_per_epoch is None else options.integer("batches_per_epoch", batches_per_epoch, 1)
    return SideBySideLoader(datasets, counts, _check_end(ends_with, datasets), length, loader_options)


def _check_members(members: Any) -> list[StreamDataset]:
    """The members' datasets, each with the lanes that it is given here."""
    datasets: list[StreamDataset] = []
    for number, member in enumerate(members):
        if not isinstance(member, (tuple, list)) or len(member) != 2 or not isinstance(member[0], StreamDataset):
            raise TypeError(
                f"members[{number}] must be a StreamDataset and its number of lanes, (dataset, lanes), and is "
                f"{shorten(member)}"
            )
        dataset, lanes = member[0], options.integer(f"members[{number}][1], the number of lanes,", member[1], 1)
        rules = replace(dataset.rules, lanes=lanes)
        options.check_groups(rules)
        datasets.append(dataset.under(rules))
    if not datasets:
        raise ValueError("members is empty; pass at least one (dataset, lanes)")
    for number, dataset in enumerate(datasets):
        own, first = dataset.rules.time_steps, datasets[0].rules.time_steps
        if own is None:
            raise ValueError(
                f"members[{number}] has no time_steps, which members share; pass time_steps= to its dataset"
            )
        if own != first:
            raise ValueError(
                f"members[0] has time_steps={first}, and members[{number}] time_steps={own}; give both one"
            )
    return datasets


def _workers_of(given: Any, lanes: Sequence[int]) -> list[int]:
    """The number of workers of each member."""
    if isinstance(given, Sequence):
        if len(given) != len(lanes):
            raise ValueError(f"num_workers has {len(given)} numbers, and there are {len(lanes)} members; give one each")
        return list(given)
    count = options.integer("num_workers", given, 0)
    return [min(own, max(1, round(count * own / sum(lanes)))) if count else 0 for own in lanes]


def _check_end(ends_with: Any, datasets: Sequence[StreamDataset]) -> Literal["first", "longest"] | int:
    if isinstance(ends_with, str):
        checked: Literal["first", "longest"] = options.choice("ends_with", ends_with, Literal["first", "longest"])
        return checked
    number = options.integer("ends_with", ends_with, 0, len(datasets) - 1)
    if datasets[number].rules.padding_mode == "cycle":
        raise ValueError(
            f'ends_with is {number}, and members[{number}] has padding_mode="cycle", which never ends; name another'
        )
    return number


class SideBySideLoader:
    """What `side_by_side` returns: iterates over batches of all members' lanes, as a `StreamDataLoader` does.

    Attributes:
        loaders: The loader of each member.
        ends_with: When an epoch ends.
        batches_per_epoch: How many batches it has, if no member ends.
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
        self._joiner = Joiner(
            [dataset.fill_value for dataset in datasets],
            [dataset.batch_size for dataset in datasets],
            mark_ends=all(dataset.mark_ends for dataset in datasets),
        )
        self._endless = [dataset.rules.padding_mode == "cycle" for dataset in datasets]
        self._goes_on: list[Saved | None] = [None] * len(datasets)  # where endless members stopped
        self._epoch = 0  # the one that comes
        self._resume: Mapping[str, Any] | None = None  # what was loaded
        self._reading: int | None = None  # the epoch of `_places`
        self._places: deque[_Place] = deque(maxlen=_RECORDS)
        self._iteration: weakref.ref[_Iteration] | None = None
        self._turn = threading.RLock()
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
        return self._count(self._epoch if self._reading is None else self._reading, self._steps)

    def _count(self, epoch: int, steps: Callable[[StreamDataLoader[Any], int], int]) -> int:
        if self.batches_per_epoch is not None:
            return self.batches_per_epoch
        if isinstance(self.ends_with, int):
            return steps(self.loaders[self.ends_with], epoch)
        counts = [
            steps(loader, epoch) for loader, endless in zip(self.loaders, self._endless, strict=True) if not endless
        ]
        if not counts:
            raise TypeError('all members have padding_mode="cycle", so there is no len(); pass batches_per_epoch=')
        return min(counts) if self.ends_with == "first" else max(counts)

    @staticmethod
    def _steps(loader: StreamDataLoader[Any], epoch: int) -> int:
        loader._find_place()
        return count_steps(loader._ranks.reading.rules, loader._ranks.reading.steps_of_groups(epoch))

    @staticmethod
    def _sure_steps(loader: StreamDataLoader[Any], epoch: int) -> int:
        steps = known_steps(loader._ranks.reading, epoch)
        if steps is None:
            raise TypeError
        return count_steps(loader._ranks.reading.rules, steps)

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
            self._goes_on = [saved if own else None for own, saved in zip(self._endless, last.saved, strict=True)]
        self._places.clear()
        self._reading = None

    def __iter__(self) -> Iterator[SideBySideBatch]:
        """Read the next epoch. It begins with the first `next`; the iterator before is closed then."""
        self._asked += 1
        return Deferred(functools.partial(self._begin, self._asked), self._turn)

    def _begin(self, number: int) -> Iterator[SideBySideBatch]:
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
        self._places.append(_Place(step, tuple(over), tuple(saved)))
        iteration = _Iteration(self, epoch, self._places[-1])
        self._iteration = weakref.ref(iteration)
        return iteration

    def _over_in(self, state: Mapping[str, Any]) -> list[bool]:
        """Which members had ended; one whose end was known beforehand stands at its next epoch."""
        return [
            bool(over) or (not endless and member["epoch"] > state["epoch"])
            for over, endless, member in zip(state["over"], self._endless, state["members"], strict=True)
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

    def note(self, place: _Place) -> None:
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

    def state_at(self, epoch: int, place: _Place) -> dict[str, Any]:
        """The state at a place; at an end that is known beforehand, that of the next epoch's beginning."""
        members = [dict(_made(saved)) for saved in place.saved]
        try:
            is_end = place.step >= self._count(epoch, self._sure_steps)
        except TypeError:
            is_end = False
        if not is_end:
            return self._plain(epoch, place.step, list(place.over), members)
        for number, (member, endless) in enumerate(zip(members, self._endless, strict=True)):
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


class _Iteration:
    """An iterator over the batches of one epoch.

    Attributes:
        stale: A newer iteration of the same loader has begun.
    """

    def __init__(self, loader: SideBySideLoader, epoch: int, place: _Place) -> None:
        self._loader, self._epoch, self._place = loader, epoch, place
        self._batches: list[Iterator[Any]] = [iter(member) for member in loader.loaders]
        self._closed = self.stale = False

    def __iter__(self) -> Iterator[SideBySideBatch]:
        return self

    def __next__(self) -> SideBySideBatch:
        if self.stale:
            raise StaleIteratorError(NEWER_HAS_BEGUN)
        if self._closed:
            raise StopIteration
        try:
            read, over = self._read()
        except BaseException:
            self.close()
            raise
        if read is None:
            self.close()
            self._loader.ended()
            raise StopIteration
        saved = tuple(
            old if batch is None else batch.__dict__["_state"]
            for batch, old in zip(read, self._place.saved, strict=True)
        )
        step = self._place.step
        self._place = _Place(step + 1, over, saved)
        try:
            batch = self._loader._joiner.join(read, step, self._epoch)
        except BaseException:
            self.close()
            raise
        batch.remember(functools.partial(self._loader.state_at, self._epoch, self._place))
        self._loader.note(self._place)
        return batch

    def _read(self) -> tuple[list[Any] | None, tuple[bool, ...]]:
        """Each member's next batch, None of one that has ended; None if the epoch ends."""
        endless, over = self._loader._endless, list(self._place.over)
        read: list[Any] = [None] * len(over)
        if self._place.step == self._loader.batches_per_epoch:
            return None, tuple(over)
        for number, batches in enumerate(self._batches):
            if not endless[number] and not over[number]:
                read[number] = next(batches, None)
                over[number] = read[number] is None
        if self._is_end([own for own, never in zip(over, endless, strict=True) if not never], over):
            return None, tuple(over)
        for number, batches in enumerate(self._batches):  # only now: what they read is not lost at the epoch's end
            if endless[number]:
                read[number] = next(batches)
        return read, tuple(over)

    def _is_end(self, ending: Sequence[bool], over: Sequence[bool]) -> bool:
        ends_with = self._loader.ends_with
        if isinstance(ends_with, int):
            return over[ends_with]
        return (any(ending) if ends_with == "first" else all(ending)) if ending else False

    def close(self) -> None:
        """End the iteration: workers that are not kept end, streams are closed."""
        self._closed = True
        for batches in self._batches:
            batches.close()  # type: ignore[attr-defined]
