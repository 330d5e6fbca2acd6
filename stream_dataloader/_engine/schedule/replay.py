"""The assignment of an epoch of known lengths, replayed without reading: the item in each cell of each batch.

::

    lengths 3 2 4        places of items, the sources put one after the other:   0 1 2 | 3 4 | 5 6 7 8
    T = 2, two lanes     step        0         1         2                          -: padding
                         lane 0      0 1       2 -       5 6 ...
                         lane 1      3 4       5 6       7 8

A lane that is out of data takes its next source, in order of time. This also gives the number of steps in an epoch.

Guarantee: a pure function of rules, order and lengths, the same on every rank. A replay that begins at the place of
another gives the same cells from there on, including padding.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from stream_dataloader._engine.schedule.draws import Draws
from stream_dataloader._engine.schedule.order import Order
from stream_dataloader._engine.schedule.place import LanePlace, Place
from stream_dataloader._engine.schedule.rules import NEVER, NONE, Groups, IntArray, Rules
from stream_dataloader._engine.schedule.sections import Cuts, Lengths, Section

#: Steps are replayed several at once: a lane costs a few microseconds, however many cells it fills.
_LEAST_CELLS = 1 << 15
_LEAST_CELLS_OF_A_LANE = 1 << 8
_MOST_CELLS = 1 << 20
#: The first call replays only a few steps: a caller that waits for the first batch may want no more.
_FIRST_STEPS = 8


class SourceRun(NamedTuple):
    """A source in a lane.

    Attributes:
        draw: The draw's number.
        source: The source's index, or the section's number.
        begin: First cell that its items fill, counted over the lane's epoch.
        end: Behind the last cell.
        fresh: Whether it counts as new data.
        read: Number of its items before `begin`.
        epoch: The epoch that it is read for, see `Assignment`.
        repeat: How often it was handed out before, see `Assignment`.
    """

    draw: int
    source: int
    begin: int
    end: int
    fresh: bool
    read: int
    epoch: int
    repeat: int


class Piece(NamedTuple):
    """Consecutive items of one source in one lane's window.

    Attributes:
        t: The first time step in the window.
        steps: Number of items.
        item: The first item, counted from the source's beginning.
    """

    lane: int
    t: int
    steps: int
    item: int
    run: SourceRun

    @property
    def ends(self) -> bool:
        """Whether the last item is the source's last."""
        return self.item + self.steps == self.run.read + self.run.end - self.run.begin


class Replay:
    """Replays one epoch, from its beginning or from a place in it.

    Args:
        rules: Deterministic rules, with `time_steps`.
        order: The epoch's order.
        place: The place where the replay begins.
        draws: The draws from there on; by default it makes its own.

    Attributes:
        step: The next step.
    """

    def __init__(
        self,
        rules: Rules,
        order: Order,
        lengths: Lengths,
        place: Place,
        draws: Draws | None = None,
    ) -> None:
        assert rules.time_steps is not None
        assert rules.deterministic
        self._rules, self._order, self._lengths = rules, order, lengths
        self._window: int = rules.time_steps
        # Two passes are kept, as with `"cycle"` some lanes already read the next pass at the end of one.
        self._lengths_in = functools.lru_cache(2)(
            lambda epoch: lengths.lengths(epoch) if isinstance(lengths, Cuts) else lengths
        )
        self._firsts_in = functools.lru_cache(2)(self._find_firsts)
        # Items of a stream in a section are counted from the section's start here, and from the source's elsewhere.
        self._start = place = _within_sections(place._replace(counted=None), order, lengths, -1)
        self.step = place.step
        self._eager = _FIRST_STEPS
        self._draws = Draws(rules, place) if draws is None else draws
        lanes = place.lanes_by(rules)
        self._without_item = [lane.draws_without_item for lane in lanes]
        self._idle = [bool(lane.idle) for lane in lanes]
        # A stream that is being read began before this place: its first cell may even lie before cell 0.
        begin = self.step * self._window
        self._runs = [None if lane.draw == NONE else self._run(lane.draw, begin - lane.items, 0) for lane in lanes]
        self._times = [  # heap of the times at which lanes run out of data
            (self.step if run is None else self._step_behind(run)) * rules.lanes + lane
            for lane, run in enumerate(self._runs)
            if not self._idle[lane]
        ]
        heapq.heapify(self._times)

    def _find_firsts(self, epoch: int) -> IntArray:
        """Return the place of each source's first item in an epoch, `(num_sources,)`."""
        known = self._lengths_in(epoch)
        firsts: IntArray = np.cumsum(known) - known
        return firsts

    def place(self) -> Place:
        """Return the replay's current place."""
        if not self.step:
            return Place(self._start.epoch)
        cell = self.step * self._window
        lanes = []
        for lane, run in enumerate(self._runs):
            # A source whose last item fills a window's last cell stays open until the lane asks for one more item.
            draw, items, idle = NONE, 0, int(self._idle[lane])
            if run and run.end >= cell:
                draw, items = run.draw, run.read + min(cell, run.end) - run.begin
            lanes.append(LanePlace(draw, items, items, 0, self._without_item[lane], idle, self._draws.held[lane]))
        cursors, returned = self._draws.to_save()
        place = self._start._replace(step=self.step, cursors=cursors, returned=returned, lanes=tuple(lanes))
        return _within_sections(place, self._order, self._lengths, 1)

    def skip_to(self, step: int) -> None:
        """Go on to a step, without computing the cells before it."""
        for _ in self.sources_before(step):
            pass
        self.step = step

    def read(self, most: int) -> tuple[IntArray, list[list[Piece]]]:
        """Read the next steps, `most` at most.

        Returns:
            The place of each cell's item `(steps, T, lanes)`, counted over all sources put one after the other: a cell
            without an item repeats the place before it in its window, or has 0. And the pieces of each step, by lane
            and time step; cells that are in none are padding.

        Raises:
            EmptySourcesError: With `"cycle"`, no source has an item.
        """
        window, lanes = self._window, self._rules.lanes
        steps = max(_LEAST_CELLS // (window * lanes), _LEAST_CELLS_OF_A_LANE // window)
        steps = max(1, min(most, steps, _MOST_CELLS // (window * lanes), self._eager))
        self._eager *= 2
        places = np.zeros((lanes, steps * window), np.int64)
        first = self.step * window
        runs = [[] if run is None or run.end <= first else [run] for run in self._runs]
        for lane, run in self.sources_before(self.step + steps):
            runs[lane].append(run)
        pieces: list[list[Piece]] = [[] for _ in range(steps)]
        for lane, of_lane in enumerate(runs):
            for run in of_lane:
                self._write(run, first, places[lane])
                for step, piece in self._cut(lane, run, first, first + steps * window):
                    pieces[step - self.step].append(piece)
        self.step += steps
        return np.ascontiguousarray(places.reshape(lanes, steps, window).transpose(1, 2, 0)), pieces

    def _write(self, run: SourceRun, first: int, places: IntArray) -> None:
        """Write the part of a run that lies in a lane's cells from `first` on; pad the rest of its last window."""
        begin, end = max(run.begin - first, 0), min(run.end - first, len(places))
        if begin < end:
            place = int(self._firsts_in(run.epoch)[run.source]) + run.read + first - run.begin
            places[begin:end] = np.arange(place + begin, place + end)
            places[end : -(-end // self._window) * self._window] = place + end - 1

    def _cut(self, lane: int, run: SourceRun, first: int, stop: int) -> Iterator[tuple[int, Piece]]:
        """Cut what lies of a run in cells `[first, stop)` into windows; yields each with its step."""
        window, cell, end = self._window, max(run.begin, first), min(run.end, stop)
        while cell < end:
            step, t = divmod(cell, window)
            steps = min(window - t, end - cell)
            yield step, Piece(lane, t, steps, run.read + cell - run.begin, run)
            cell += steps

    def sources_before(self, stop: int) -> Iterator[tuple[int, SourceRun]]:
        """Yield the sources that lanes take before a step, in order of time, without empty ones."""
        lanes, window, packed = self._rules.lanes, self._window, self._rules.windows == "packed"
        times, runs, draws = self._times, self._runs, self._without_item
        while times and times[0] < stop * lanes:
            step, lane = divmod(times[0], lanes)
            draw = self._next_draw(lane)
            if draw == NONE:
                # An idle lane stays idle, so it never asks again and leaves the heap.
                heapq.heappop(times)
                draws[lane] += 1
                self._idle[lane], runs[lane] = True, None
                continue
            before = runs[lane]
            # A packed lane goes on in the cell behind its last item, an aligned one where the window begins.
            run = self._run(draw, before.end if packed and before is not None else step * window)
            if run.end > run.begin:
                runs[lane], draws[lane] = run, 0
                heapq.heapreplace(times, self._step_behind(run) * lanes + lane)
                yield lane, run
            else:
                # The source is empty. The lane keeps its time in the heap, and so draws again before all others.
                draws[lane] += 1

    def _next_draw(self, lane: int) -> int:
        draws = self._without_item[lane]
        if draws and self._rules.gives_up(lane, draws):  # without draws, the lane has just read an item
            return NONE
        return self._draws.take(lane)

    def _run(self, draw: int, begin: int, read: int | None = None) -> SourceRun:
        """Return a lane's run of a source; `read`: items read before, None: as noted for a waiting stream, or 0."""
        source, epoch, repeat, fresh = self._order[draw]
        if read is None:
            read = self._start.waiting[draw].items if draw in self._start.waiting else 0
        end = begin + int(self._lengths_in(epoch)[source]) - read
        return SourceRun(draw, source, begin, end, fresh, read, epoch, repeat)

    def open_runs(self) -> Iterator[tuple[int, SourceRun]]:
        """Return each lane that reads a source, with its run."""
        return ((lane, run) for lane, run in enumerate(self._runs) if run is not None)

    def _step_behind(self, run: SourceRun) -> int:
        """Return the step in which the lane needs another source."""
        return (run.end if self._rules.windows == "packed" else run.end + self._window - 1) // self._window


def steps_of_groups(rules: Rules, epoch: int, lengths: Lengths, order: Order | None = None) -> list[int]:
    """Count the steps for which each group of all ranks has new data; with `"drop"`, new data for all of its lanes."""
    assert rules.padding_mode != "cycle"
    place = Place(epoch)
    order = order or Order(rules, place, lengths)
    alone = [
        replace(rules, lanes=rules.lanes_of_a_group, groups=Groups(rules.groups.total, group, 1))
        for group in range(rules.groups.total)
    ]
    return [_steps_of(group, order, lengths, place) for group in alone]


def count_steps(rules: Rules, steps: Sequence[int]) -> int:
    """Return the number of batches in an epoch, given each group's number of steps."""
    return min(steps) if rules.padding_mode == "drop" else max(steps)


def steps_behind(place: Place, rules: Rules, lengths: Lengths) -> int:
    """Count the steps of an epoch that goes on from a place, if all groups are hosted here."""
    return _steps_of(rules, Order(rules, place, lengths), lengths, place)


def _steps_of(rules: Rules, order: Order, lengths: Lengths, place: Place) -> int:
    """Count the steps of one group."""
    window = rules.time_steps or 1
    replay = Replay(replace(rules, time_steps=window, deterministic=True), order, lengths, place)
    ends = [replay.step * window] * rules.lanes  # the cell behind each lane's last new item
    for lane, run in replay.open_runs():
        ends[lane] = max(ends[lane], run.end * run.fresh)
    reading_new = set(range(rules.lanes))
    for lane, run in replay.sources_before(NEVER // rules.lanes):
        if run.fresh:
            ends[lane] = run.end
        else:  # the lane is re-reading, and will read nothing new in this epoch
            reading_new.discard(lane)
            if not reading_new:
                break
    end = min(ends) if rules.padding_mode == "drop" else max(ends)
    return -(-end // window)


def _within_sections(place: Place, order: Order, lengths: Lengths, sign: int) -> Place:
    """Return a place with items counted from the start of sections (`sign` -1), or from the start of sources (1)."""
    if not isinstance(lengths, Cuts):
        return place

    def moved(lane: LanePlace) -> LanePlace:
        found = None if lane.draw == NONE else order[lane.draw]
        first = 0 if found is None else sign * lengths.section(found.source, found.epoch).start
        return lane._replace(items=lane.items + first, position=lane.position + first)

    waiting = {draw: moved(lane) for draw, lane in place.waiting.items()}
    return place._replace(lanes=tuple(map(moved, place.lanes)), waiting=waiting)


def has_unread(place: Place, rules: Rules, order: Order, section: Callable[[int, int], Section]) -> bool:
    """Return whether new data is left behind a place in an epoch's first pass, for one rank that hosts all groups.

    Args:
        section: Looks up a section by its number and the epoch.
    """

    def is_left(draw: int, stands: LanePlace | None) -> bool:
        if draw == NONE or not (found := order[draw]).fresh:
            return False
        of = section(found.source, found.epoch)
        return of.stop > (of.start if stands is None else stands.items)

    total, first = rules.groups.total, rules.groups.first
    to_come = (
        range(cursor * total + group, rules.groups.share(group, rules.draws) * total + group, total)
        for group, cursor in enumerate(place.cursors_by(rules), first)
    )
    reserved = (lane.reserved or () for lane in place.lanes)
    begun = {**place.waiting, **{lane.draw: lane for lane in place.lanes}}
    left = itertools.chain([lane.draw for lane in place.lanes], place.returned, *reserved, *to_come)
    return any(is_left(draw, begun.get(draw)) for draw in left)
