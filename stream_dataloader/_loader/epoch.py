"""`Epoch`: what is read between two `iter()`s, of each member of the batch, and how far it was delivered.

::

    member 0            0 1 2 3 4 |                ends with the epoch, or is padded behind its end
    member 1, endless   7 8 9 10 11 | 12 13 ...    its own epoch goes on from one epoch of the loader to the next
    loader's step       0 1 2 3 4 |  0  1

A run that is read in epochs of n batches is one `Epoch`.

Guarantees: a record is that of all members after the same batch. A place is taken for an epoch's end only where the
lengths of streams say so beforehand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from stream_dataloader._items.layout import Layout
from stream_dataloader._items.plain import layout_from_plain, layout_to_plain
from stream_dataloader._ranks.agreement import Steps
from stream_dataloader._ranks.ranks import Ranks, identity_of, known_count
from stream_dataloader._reading.plan import Start
from stream_dataloader._schedule.order import Order
from stream_dataloader._schedule.position import EpochPlace, EpochsOfRun
from stream_dataloader._schedule.replay import has_rest
from stream_dataloader._schedule.rules import Rules
from stream_dataloader._schedule.saved_state import LoadedState, plain_epoch, to_plain
from stream_dataloader._schedule.snapshot import PackedSnapshot, Progress, Snapshot, nothing_left
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import FailureLimitError, StateError, StreamError

_KEPT_RECORDS = 64  # trainers fetch ahead: the state can be had as of so many batches ago


class Member:
    """What a loader knows of a member over all epochs; `length` is that of an endless run's."""

    def __init__(self, dataset: StreamDataset, ranks: Ranks, length: int | None) -> None:
        self.ranks = ranks
        self.layout: Layout | None = None  # of the epoch's items, or of those of the loaded state
        self._dataset = dataset
        self._length = length
        self._order: tuple[Rules, int, Any, Order] | None = None  # of the epoch whose end was asked for last
        self._failed: dict[int, set[int]] = {}  # sources that were skipped, also before a loaded state, by group hosted

    def load(self, loaded: LoadedState) -> Start:
        self._failed = dict(enumerate(loaded.failures))
        self.layout = None
        self._know_layout(loaded.items)
        return Start(*self.ranks.resumed(loaded))

    def forget_place(self) -> None:
        """What was loaded was of another rank."""
        self._failed = {}

    def is_end(self, epoch: int, record: PackedSnapshot) -> bool:
        """Whether an epoch is known to have no batch behind a place in it.

        The order of very many sources takes seconds to make, and is only looked at near the epoch's end.
        """
        plan = self.ranks.reading.plan()
        rules, lists = plan.rules, plan.lists
        if not lists.knows_lengths or rules.padding_mode == "cycle":
            return False
        if not self.ranks.alone or rules.padding_mode == "drop":
            changed = record.unpack_changed(rules)
            steps = known_count(self.ranks.reading, epoch, changed)  # for all ranks, if no stream can change it
            return steps is not None and record.step >= steps
        to_come = sum(max(0, share - cursor) for share, cursor in zip(rules.shares, record.cursors, strict=True))
        if rules.mix is None and to_come > lists.most_empty:
            return False
        place = record.unpack(rules)
        growth = () if place.changed is None else place.changed.growth
        if self._order is None or self._order[:3] != (rules, epoch, growth):
            self._order = rules, epoch, growth, Order(rules, epoch, plan.scheduled_lengths, place)
        return not has_rest(place, rules, self._order[3], plan.section)

    def state_of(self, epoch: int, record: PackedSnapshot, at: EpochPlace | None = None) -> dict[str, Any]:
        """The state at a place in an epoch; at its end, that of the next one's beginning."""
        if self.is_end(epoch, record):
            return self.state(Start(epoch + 1), at)
        return self.state(Start(epoch, record.unpack(self.ranks.reading.rules)), at)

    def state(self, start: Start, at: EpochPlace | None = None) -> dict[str, Any]:
        rules, length = self.ranks.reading.rules, self._length
        failed = [self._failed.get(group, ()) for group in range(rules.groups.count)]
        items = None if self.layout is None else layout_to_plain(self.layout)
        state = to_plain(rules, start.epoch, start.resume, identity_of(self._dataset), failed, items)
        return state if length is None or at is None else state | plain_epoch(at, length)

    def count_failure(self, failure: StreamError) -> None:
        """A stream was skipped; raises `FailureLimitError` if it was one too many."""
        group = failure.lane // self.ranks.reading.rules.lanes_of_a_group
        self._failed.setdefault(group, set()).add(failure.source_index)
        most = self._dataset.max_failures
        count = len(set().union(*self._failed.values()))
        if most is not None and count > most:
            found = "1 source was" if count == 1 else f"{count} sources were"
            raise FailureLimitError(
                f"{found} skipped, and max_failures is {most}; the last one: {failure}",
                **failure.place,
            ) from failure

    def _know_layout(self, items: Any) -> None:
        if items is not None:
            with suppress(StateError):  # a class is not imported; only a rank without items needs to know
                self.layout = layout_from_plain(items)

    def __getstate__(self) -> Mapping[str, Any]:
        items = None if self.layout is None else layout_to_plain(self.layout)
        return self.__dict__ | {"layout": items, "_order": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, layout=None)
        self._know_layout(state["layout"])


class Course:
    """What is read of one member in an epoch, and how far.

    Args:
        readers: Which of the readers are its own.
        ended: It has nothing for the step that comes next.
        goes_on: It never ends, and goes on in the loader's next epoch: it is asked only for steps that are delivered.
    """

    def __init__(self, member: Member, start: Start, readers: slice, *, ended: bool, goes_on: bool) -> None:
        self.member = member
        self.dataset = member.ranks.reading
        self.readers = readers
        parts = readers.stop - readers.start
        self.progress = Progress(self.dataset.rules, start.epoch, start.resume, parts)  # of its own epoch
        self.steps = Steps()  # decides which steps belong to that
        self.ended = ended
        self.goes_on = goes_on

    def start(self, record: PackedSnapshot | None) -> Start:
        """Where it is from a record on; None: it had ended."""
        rules = self.dataset.rules
        if record is None:
            return Start(self.progress.epoch, nothing_left(rules))
        return Start(self.progress.epoch, record.unpack(rules) if record.step else None)


class Record(NamedTuple):
    """Where all members stand between two steps."""

    step: int  # the loader's step that comes next
    members: tuple[PackedSnapshot | None, ...]  # None: it has ended


class Epoch:
    """An epoch, or a run, as it is delivered; `stop` is where it ends, None if unknown until read."""

    def __init__(self, number: int, step: int, courses: Sequence[Course], stop: int | None = None) -> None:
        self.number = number
        self.courses = courses
        self.stop = stop
        self.epochs: EpochsOfRun | None = None  # of n batches, in which a run is read
        self.finished = False  # the end was seen
        self.is_ahead = self._end_held = False  # the last batch, or the end, was taken and not handed out yet
        self._records: deque[Record] = deque(maxlen=_KEPT_RECORDS)
        self._keep(step)

    def _keep(self, step: int) -> None:
        members: list[PackedSnapshot | None] = []
        for course in self.courses:
            members.append(None if course.ended else course.progress.last)
        self.last = Record(step, tuple(members))
        self._records.append(self.last)
        self.step = step  # the last, as Ctrl-C may come between any two lines: the step's record is there

    def advance(self, reports: Sequence[Any]) -> None:
        for course in self.courses:
            if not course.ended:
                course.progress.advance(reports[course.readers])
        self._keep(self.step + 1)

    def hold(self, batch: bool, end: bool) -> None:
        """Say what was taken and not handed out yet: the last batch, the epoch's end."""
        self.is_ahead, self._end_held = batch, end

    @property
    def changed(self) -> list[Snapshot | None]:
        """Where members stand for which it began under other options."""
        return [course.progress.last.unpack_changed(course.dataset.rules) for course in self.courses]

    @property
    def end_is_ahead(self) -> bool:
        return self.finished and self._end_held

    @property
    def over(self) -> bool:
        """The epoch is over for the user too."""
        return self.finished and not self._end_held

    def record(self, step: int | None = None) -> Record:
        """Where the epoch stands for the user, or stood before `step`."""
        if step is None:
            step = self.step - self.is_ahead
        record: Record
        records = tuple(self._records)  # another thread may be reading on
        for record in reversed(records):
            if record.step == step:
                return record
        raise ValueError(
            f"the state after {step} batches is not known: those after {records[0].step} to {self.step} are; save it "
            "sooner, or ask the batch for it"
        )
