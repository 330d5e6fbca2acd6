"""Plain descriptions of reading: `ReadingPlan` holds a `StreamDataset`'s options, `Reading` adds those of a session.

Guarantee: neither of them does anything by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from stream_dataloader._engine.assembly.slots import Slots
from stream_dataloader._engine.reading.activity import Meters, WorkerStatus
from stream_dataloader._engine.reading.anchors import OpenAnchors
from stream_dataloader._engine.reading.lists import SourceLists
from stream_dataloader._engine.schedule.draws import Draws
from stream_dataloader._engine.schedule.forecast import Forecast
from stream_dataloader._engine.schedule.order import Order
from stream_dataloader._engine.schedule.place import Place
from stream_dataloader._engine.schedule.rules import Reader, Rules, deal_lanes
from stream_dataloader._engine.schedule.sections import Cuts, Lengths, Section
from stream_dataloader.errors import ReadError, StreamError, shorten

#: A policy is given a `StreamError` and returns "raise" or "skip"; it runs in the worker.
ErrorPolicy = Callable[[Any], Literal["raise", "skip"]]
OnError = Literal["raise", "skip"] | ErrorPolicy


@dataclass(frozen=True)
class ReadingPlan:
    """Sources and options of a `StreamDataset`, resolved.

    Attributes:
        rules: The rules that assign sources to lanes.
        lists: The sources, with the functions that open them.
        fill_value: Fills cells without an item.
        on_error: Decides whether an error ends the epoch or the stream.
        retries: How often in a row a broken stream is opened again.
        retry_on: The exceptions after which it is opened again.
        mark_ends: Whether streams' last steps are marked.
        seed_globals: Whether the global generators of `random`, numpy and torch are seeded for each stream.
        cuts: The sections that sources are cut into, which the schedule then numbers; None if sources are read whole.
        context: Number of items of the window before that each window begins with.
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
    context: int = 0

    @property
    def window_steps(self) -> int | None:
        """Number of time steps of a batch: those of the context, and T; None if streams cut their own windows."""
        return None if self.rules.time_steps is None else self.context + self.rules.time_steps

    @property
    def scheduled_lengths(self) -> Lengths | None:
        """Number of items of each unit that the schedule hands out, a source or a section, if known."""
        return self.lists.lengths if self.cuts is None else self.cuts

    def forecast(self, epoch: int = 0) -> Forecast | None:
        """Forecast an epoch's padding from the lengths; None if they do not suffice."""
        return Forecast.of(self.rules, self.lists.lengths, self.scheduled_lengths, epoch)

    def factories(self) -> list[Callable[..., Any]]:
        """Return the functions that open the streams of each list as lanes read them."""
        cuts = self.cuts
        return [
            one.open_stream if cuts is None or one.anchors is None else OpenAnchors(one.open_stream, cuts)
            for one in self.lists.lists
        ]

    def section(self, number: int, epoch: int) -> Section:
        """Return the unit with a number in the schedule: a section, or a whole source."""
        if self.cuts is not None:
            return self.cuts.section(number, epoch)
        lengths = self.lists.lengths
        length = -1 if lengths is None else int(lengths[number])
        return Section(number, 0, length, length)

    def skips(self, error: StreamError) -> bool:
        """Return whether a lane goes on with its next source after an error.

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


class Recovery(NamedTuple):
    """Changed behaviour of workers after one of them died.

    Attributes:
        killers: Sources that killed their worker, with the time from which on they are not read; -1: not even opened.
        cautious: Open no source early, so that a source that kills its worker is identified for sure.
        number: How often workers were started again in this epoch.
    """

    killers: Mapping[int, int]
    cautious: bool
    number: int = 0


NO_RECOVERY = Recovery({}, cautious=False)


@dataclass(frozen=True)
class Reading:
    """A session of reading a dataset: everything that its readers have in common.

    Attributes:
        plan: The dataset's sources and options.
        place: The place to begin at.
        readers: The readers, each with its lanes.
        status: Shows the current work of each reader.
        meters: Count the work of each reader.
        slots: Creates the slots to write to; the argument is `whole_windows`.
        recovery: Changes after a worker died.
        whole_windows: A `collate_fn` takes windows lane by lane: windows that streams cut themselves unchanged, others
            in one piece each.
        locally: Whether the thread that asks for batches also reads.
        by_loader: Whether a `StreamDataLoader` reads, which passes over steps without an item.
    """

    plan: ReadingPlan
    place: Place
    readers: Sequence[Reader]
    status: WorkerStatus
    meters: Meters
    slots: Callable[[bool], Slots] = Slots
    recovery: Recovery = NO_RECOVERY
    whole_windows: bool = False
    locally: bool = False
    by_loader: bool = True

    @classmethod
    def alone(cls, plan: ReadingPlan, epoch: int, num_workers: int = 0) -> Reading:
        """Create the reading of a dataset that is used without a loader."""
        readers = deal_lanes(plan.rules.lanes, num_workers)
        status, meters = WorkerStatus(readers, shared=False), Meters(len(readers), shared=False)
        return cls(plan, Place(epoch), readers, status, meters, locally=not num_workers, by_loader=False)

    def order(self) -> Order:
        """Return the order in which the epoch's sources are drawn."""
        return Order(self.plan.rules, self.place, self.plan.scheduled_lengths)

    def draws(self, cursors: memoryview[int] | None = None) -> Draws:
        """Return the draws from the place on; several processes may share the memory of the cursors."""
        return Draws(self.plan.rules, self.place, cursors)

    @property
    def times(self) -> list[int]:
        """The time at which each reader begins; no reader makes a request earlier, so nothing waits for it."""
        begin = self.place.step * self.plan.rules.lanes
        return [begin + reader.lanes.start for reader in self.readers]

    @cached_property
    def known_lengths(self) -> Lengths | None:
        """The lengths from which each reader computes all requests; None if a stream may end at another item.

        With `time_steps`, and if every error ends the epoch, streams have exactly these lengths or reading stops.
        """
        plan, lengths = self.plan, self.plan.lists.lengths
        if lengths is None or not plan.lists.knows_lengths:  # interleaved datasets may have lengths for some
            return None
        if not plan.rules.deterministic or plan.rules.time_steps is None:
            return None
        if plan.on_error != "raise" or self.recovery.killers:
            return None
        # With empty sources, "cycle" may find no item for a lane and raise. A reader may raise that for its own lanes
        # only, and here it would also compute the lanes of others.
        if plan.rules.padding_mode == "cycle" and (plan.lists.has_anchors or not lengths.all()):
            return None
        return plan.scheduled_lengths

    @cached_property
    def why_none_waits(self) -> str | None:
        """Why no stream may yield `NOTHING_YET` here; None if all may."""
        if self.plan.rules.deterministic:
            return "the dataset is deterministic, which batches that depend on time are not; pass deterministic=False"
        if not self.by_loader:
            return "torch's DataLoader would take it for the end of an epoch; read the dataset by a StreamDataLoader"
        return None

    @cached_property
    def marks_ends(self) -> bool:
        """Whether streams' last steps are marked; windows for a `collate_fn` have no field to show it."""
        return self.plan.mark_ends and not self.whole_windows
