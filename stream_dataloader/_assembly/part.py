"""What passes from a worker to the main process: the runs of steps that lanes read, and the part of a step they make.

Guarantee: a part says all there is to know of a worker's share of one step, so that parts can be put together, and
gone on from, without asking the worker again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from stream_dataloader._assembly.block import Block
from stream_dataloader._items.layout import Layout, Leaves
from stream_dataloader._state.snapshot import LaneReports
from stream_dataloader.errors import ErrorReport


class Run(NamedTuple):
    """Consecutive steps of one stream in one lane's window."""

    lane: int
    t: int
    steps: int
    source: int
    position: int
    fresh: bool

    def continues(self, last: Run) -> bool:
        """Whether this is what comes next of the same stream, in the same lane."""
        return self.lane == last.lane and self.source == last.source and self.position == last.position + last.steps


class Sink(Protocol):
    """Where a lane puts what it reads: one worker's share of one batch."""

    def intern(self, layout: Layout) -> Layout:
        """The one object that stands for all layouts equal to `layout`; the other methods expect it.

        Raises:
            ValueError: `fill_value` cannot pad it.
        """

    def met(self, layout: Layout) -> None:
        """A stream was begun with whose first item has this layout; called in lane order."""

    def put_step(self, row: int, t: int, layout: Layout, leaves: Leaves) -> None:
        """Time step `t` of a row.

        Raises:
            Misfit: A value does not fit its dtype.
            StreamMisfit: The row's window has steps of another layout.
        """

    def room(self, row: int, t: int, stop: int, layout: Layout) -> Any:
        """Where an item's structure of time steps `[t, stop)` may be written to; see `ReadsInto.read_into`.

        Raises:
            Misfit: As `put_step`.
        """

    def wrote(self, row: int, stop: int) -> None:
        """The row's time steps before `stop` were written where there was `room`."""

    def put_window(self, row: int, layout: Layout, leaves: Leaves, count: int, padded: int) -> None:
        """A row's whole window of `count` steps, to be padded to at least `padded`.

        Raises:
            Misfit: A value does not fit its dtype.
        """

    def put_object(self, row: int, item: object) -> None:
        """A row's whole window, as it is."""


class Fault(NamedTuple):
    """A stream's error that ends the epoch, and whether the stream was read for the first time."""

    lane: int
    fresh: bool
    error: ErrorReport


class Part(NamedTuple):
    """What one worker contributes to one step.

    Attributes:
        in_slot: The windows and their bookkeeping are in the step's slot of the ring.
        time_steps: How many of its time steps count; 0 if windows are passed on as they are.
        fresh: Something in it is read for the first time.
        lanes_read: How many of its lanes are not idle; counted where it matters, with `"drop"`.
        told: What there is to know to go on from here another time.
        runs: What its lanes read, in lane order; not if it is in the slot.
        blocks: The windows, see `transport`; if they are in the slot, only leaves that are objects.
        objects: Windows passed on as they are, by row.
        failures: Errors of streams that were skipped.
        faults: Errors of streams that were not; the worker sends no further part.
        end: All of its lanes are idle; it sends no further part.
        layouts: Those with dicts that it met for the first time, in lane order: which order their keys are in.
    """

    worker_id: int
    step: int
    in_slot: bool
    time_steps: int
    fresh: bool
    lanes_read: int
    told: LaneReports
    runs: list[Run]
    blocks: list[Block]
    objects: dict[int, Any]
    failures: list[ErrorReport]
    faults: list[Fault]
    end: bool = False
    layouts: Sequence[Layout] = ()


def pack(parts: Sequence[Part]) -> list[Any]:
    """Parts of one worker for a message; those of which all is in the slot, which are most, become a few numbers."""
    return [
        (*part[:_NUMBERS], *part.told)
        if part.in_slot
        and not (part.blocks or part.objects or part.failures or part.faults or part.end or part.layouts)
        else part
        for part in parts
    ]


def unpack(packed: Sequence[Any]) -> list[Part]:
    """What `pack` was given."""
    return [entry if type(entry) is Part else _whole(*entry) for entry in packed]


def _whole(worker_id: int, step: int, in_slot: bool, time_steps: int, fresh: bool, lanes_read: int, *told: Any) -> Part:
    return Part(worker_id, step, in_slot, time_steps, fresh, lanes_read, LaneReports(*told), [], [], {}, [], [])


_NUMBERS = Part._fields.index("told")
