"""What is read and how: `ReadingPlan` is what a `StreamDataset` makes, `Reading` how it is read in a session.

Guarantee: none of them does anything by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from stream_dataloader._assembly.slots import Slots
from stream_dataloader._reading.activity import ActivityBoard, Meters
from stream_dataloader._reading.lists import SourceLists
from stream_dataloader._schedule.order import Order
from stream_dataloader._schedule.outlook import Outlook
from stream_dataloader._schedule.rules import Reader, Rules, deal_lanes
from stream_dataloader._schedule.sections import Cuts, Lengths, Section
from stream_dataloader._schedule.snapshot import Snapshot
from stream_dataloader.errors import ReadError, StreamError, shorten
from stream_dataloader.protocols import OnError


@dataclass(frozen=True)
class ReadingPlan:
    """What is read, and how: what the options of a `StreamDataset` come to.

    Attributes:
        rules: Who reads what and when.
        lists: The sources, and what opens them.
        fill_value: Pads what no item is read for.
        on_error: Decides whether an error ends the epoch or the stream.
        retries: How often in a row a stream that breaks is opened again.
        retry_on: For which exceptions.
        mark_ends: Whether streams' last steps are marked.
        seed_globals: The global generators of `random`, numpy and torch are seeded for each stream.
        cuts: The sections that sources are cut into, which the schedule then numbers; None if they are read whole.
    """

    rules: Rules
    lists: SourceLists
    fill_value: Any
    on_error: OnError
    retries: int
    retry_on: tuple[type[Exception], ...]
    mark_ends: bool = False
    seed_globals: bool = False
    cuts: Cuts | None = None

    @property
    def scheduled_lengths(self) -> Lengths | None:
        """The number of items of what the schedule hands out, sources or sections, if that is known."""
        return self.lists.lengths if self.cuts is None else self.cuts

    def outlook(self, epoch: int = 0) -> Outlook | None:
        """What an epoch will be like, if lengths tell."""
        return Outlook.of(self.rules, self.lists.lengths, self.scheduled_lengths, epoch)

    def section(self, number: int, epoch: int) -> Section:
        """What the schedule hands out by a number: a section, or a whole source."""
        if self.cuts is not None:
            return self.cuts.section(number, epoch)
        lengths = self.lists.lengths
        length = -1 if lengths is None else int(lengths[number])
        return Section(number, 0, length, length)

    def skips(self, error: StreamError) -> bool:
        """Whether a lane goes on with its next source after an error.

        Raises:
            ReadError: The user's `on_error` raised, or returned another answer.
        """
        if not callable(self.on_error):
            return self.on_error == "skip"
        try:
            answer: Any = self.on_error(error)
        except Exception as raised:
            raise self._without_answer(error, f"raised {shorten(raised, 2000)}") from raised
        if not isinstance(answer, str) or answer not in ("raise", "skip"):
            raise self._without_answer(error, f"returned {shorten(answer)}") from error
        return answer == "skip"

    def _without_answer(self, error: StreamError, what: str) -> ReadError:
        return ReadError(
            f"on_error {what}, and must return 'raise' or 'skip'; it was asked about: {error}", **error.place
        )


class Start(NamedTuple):
    """Where an epoch begins to be read, and what for.

    Attributes:
        epoch: The epoch's number.
        resume: The place in it; None at its beginning.
        whole_windows: A `collate_fn` wants windows lane by lane: those that streams cut themselves as they are, others
            in one piece each.
    """

    epoch: int
    resume: Snapshot | None = None
    whole_windows: bool = False


class Recovery(NamedTuple):
    """What workers do differently after one of them died.

    Attributes:
        killers: Sources that killed their worker, and the time from which on they are not to be read; -1: nor opened.
        cautious: Open no source early, so that one that kills its worker is known for sure.
        number: How often workers were started again in this epoch.
    """

    killers: Mapping[int, int]
    cautious: bool
    number: int = 0


NO_RECOVERY = Recovery({}, cautious=False)


@dataclass(frozen=True)
class Reading:
    """How a dataset is read in a session: what all readers have in common.

    Attributes:
        plan: What is read, and how.
        start: Where to begin; None: with the next epoch of the process that iterates.
        readers: Who reads which lanes.
        board: Where to say what is being done.
        meters: Where to count what is done.
        slots: Makes what windows are written to, of whether they are wanted whole.
        recovery: What is different after a worker died.
        locally: It is read in the thread that asks for batches.
    """

    plan: ReadingPlan
    start: Start | None
    readers: Sequence[Reader]
    board: ActivityBoard
    meters: Meters
    slots: Callable[[bool], Slots] = Slots
    recovery: Recovery = NO_RECOVERY
    locally: bool = False

    @classmethod
    def alone(cls, plan: ReadingPlan, start: Start | None, num_workers: int = 0) -> Reading:
        """The reading of a dataset by itself, which no loader looks at."""
        readers = deal_lanes(plan.rules.lanes, num_workers)
        board, meters = ActivityBoard(readers, shared=False), Meters(range(len(readers)), shared=False)
        return cls(plan, start, readers, board, meters, locally=not num_workers)

    def order(self, epoch: int) -> Order:
        """The order in which an epoch's sources are granted."""
        return Order(self.plan.rules, epoch, self.plan.scheduled_lengths, self.resume)

    @property
    def resume(self) -> Snapshot | None:
        """Where in the epoch to begin; None at its beginning."""
        return None if self.start is None else self.start.resume

    @property
    def times(self) -> list[int]:
        """When each of them begins: nobody has to wait for it to come before that."""
        begin = self.resume.step * self.plan.rules.lanes if self.resume else 0
        return [begin + reader.lanes.start for reader in self.readers]

    @cached_property
    def known_lengths(self) -> Lengths | None:
        """The lengths by which each reader works out all tickets; None if what is read may end elsewhere than they say.

        Who reads by `time_steps` and raises all errors reads what lengths say, or nothing more at all.
        """
        plan, lengths = self.plan, self.plan.lists.lengths
        if lengths is None or self.start is None or not plan.rules.deterministic or plan.rules.time_steps is None:
            return None
        if plan.on_error != "raise" or self.recovery.killers:
            return None
        if plan.rules.padding_mode == "cycle" and not lengths.all():  # who finds no item says so for its own lanes
            return None
        return plan.scheduled_lengths

    @cached_property
    def marks_ends(self) -> bool:
        """Whether streams' last steps are marked: in windows for a `collate_fn` nobody could see it."""
        return self.plan.mark_ends and not self.whole_windows

    @cached_property
    def whole_windows(self) -> bool:
        """See `Start`."""
        return self.start is not None and self.start.whole_windows
