"""What each worker is doing, in memory that the main process can still read when the worker is dead.

Each number has one writer, a worker or one of its threads, and only the main process looks. So no lock is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from stream_dataloader._memory.fields import Carver, SharedFields
from stream_dataloader._schedule.rules import Reader
from stream_dataloader.errors import shorten


class Activity(NamedTuple):
    """What a worker, or one of its threads, was doing when it was looked at.

    Attributes:
        time: What it worked on, as step * lanes + lane, with lanes as the schedule has them; -1 if nothing.
        step: The step of that.
        lane: The lane, as the batch has it.
        source: The source that is open in that lane, -1 if none is.
        opening: The source that is being opened, -1 if none is.
        open: All sources that are open in its lanes.
    """

    time: int
    step: int
    lane: int
    source: int
    opening: int
    open: tuple[int, ...]

    @property
    def suspects(self) -> frozenset[tuple[int, int]]:
        """Whom to blame if it died: the source it read, with the time, and the one it opened, at whatever time."""
        read = {(self.source, self.time)} if self.source >= 0 and self.time >= 0 else set()
        return frozenset(read | ({(self.opening, -1)} if self.opening >= 0 else set()))


class ActivityBoard(SharedFields):
    """What all workers of a loader do; 0 stands for nothing.

    Attributes:
        reading: For each lane of the batch, one more than the source that is open.
        opening: For each reader, one more than the source that is being opened.
        working: For each reader, one more than the time it works on.
        exiting: For each reader, one more than the source whose code had it exit, negative if that was being opened.
    """

    def __init__(self, readers: Sequence[Reader], *, shared: bool = True) -> None:
        self._readers = readers
        super().__init__(shared=shared)

    def _lay_out(self, carve: Carver) -> None:
        self.reading = carve(self._readers[-1].lanes.stop)
        self.opening = carve(len(self._readers))
        self.working = carve(len(self._readers))
        self.exiting = carve(len(self._readers))

    def clear(self) -> None:
        """Start anew; no worker may be running."""
        for numbers in (self.reading, self.opening, self.working, self.exiting):
            numbers[:] = 0

    def doing(self, worker: int) -> list[Activity]:
        """What each of a worker's threads does, or did last; of those that had it exit alone, if there are any."""
        own = [number for number, reader in enumerate(self._readers) if reader.worker_id == worker]
        return [self._doing(number) for number in [number for number in own if self.exiting[number]] or own]

    def _doing(self, number: int) -> Activity:
        reader, time = self._readers[number], int(self.working[number]) - 1
        of_member = [other.lanes for other in self._readers if other.member == reader.member]
        step, lane = divmod(time, of_member[-1].stop - of_member[0].start)
        lane += of_member[0].start
        source = int(self.reading[lane]) - 1 if time >= 0 else -1
        opening, exiting = int(self.opening[number]) - 1, int(self.exiting[number])
        if exiting:
            source, opening = (exiting - 1, -1) if exiting > 0 else (-1, -exiting - 1)
        open_sources = tuple(int(self.reading[lane]) - 1 for lane in reader.lanes if self.reading[lane])
        return Activity(time, step, lane, source, opening, open_sources)

    def member(self, worker: int) -> int:
        """The member that a worker reads for."""
        return next(reader.member for reader in self._readers if reader.worker_id == worker)

    def is_reading(self, worker: int) -> bool:
        """Whether a worker works on something."""
        return any(activity.time >= 0 for activity in self.doing(worker))

    def suspects(self, worker: int) -> frozenset[tuple[int, int]]:
        """Whom to blame if a worker died; see `Activity`."""
        return frozenset().union(*(activity.suspects for activity in self.doing(worker)))

    def describe(self, worker: int, sources: Sequence[Sequence[Any]]) -> str:
        """What a worker does, in words."""

        def named(index: int) -> str:
            try:
                return f"{index} ({shorten(sources[self.member(worker)][index], 80)})"
            except Exception:  # it cannot be unpickled
                return f"{index}"

        words = []
        for activity in self.doing(worker):
            parts = []
            if activity.time >= 0:
                at = f"reading source {named(activity.source)}" if activity.source >= 0 else "between two sources"
                parts.append(f"in lane {activity.lane}, step {activity.step}, {at}")
            if activity.opening >= 0:
                parts.append(f"opening source {named(activity.opening)}")
            if activity.open:
                parts.append(f"with source{'s' * (len(activity.open) > 1)} {', '.join(map(named, activity.open))} open")
            words.append(", ".join(parts))
        return ", and ".join(filter(None, words)) or "without a source"
