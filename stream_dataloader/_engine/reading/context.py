"""Context of windows: each window begins with the last items of its lane's stream that came before it.

::

    T = 3, context = 2        batch 0           batch 1           batch 2         . padding
    lane 0: a has 7 items     . .|0 1 2         1 2|3 4 5         4 5|6 . .
    lane 1: b has 2, c 4      . .|0 1 .         . .|0 1 2         1 2|3 . .

Lanes read into the time steps behind the bar. `Context` then writes what comes before it, from copies. A lane that goes
on after a resume has no copies: it opens its stream that many items earlier, and reads them into the same cells.

Guarantee: context is a function of the stream and the place in it, so it is the same after a resume. Its cells do not
count as read for the first time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from stream_dataloader._engine.assembly.block import Block
from stream_dataloader._engine.assembly.part import PartDraft, Run, runs_of
from stream_dataloader._engine.items.objects import lasting


class _Kept(NamedTuple):
    """The last items that a lane read of its stream.

    Attributes:
        runs: Their runs; time steps count from the first of them.
        leaves: Copies of their leaves, as in a block's columns.
    """

    runs: list[Run]
    leaves: list[Any]

    @property
    def steps(self) -> int:
        """Number of items."""
        return sum(run.steps for run in self.runs)


class Context:
    """Writes the context of one reader's lanes.

    Args:
        lanes: The reader's lanes.
        steps: Number of items of context.
    """

    def __init__(self, lanes: range, steps: int) -> None:
        self._lanes, self._steps = lanes, steps
        self._kept: list[_Kept | None] = [None] * len(lanes)

    def write(self, draft: PartDraft, begun: Sequence[Sequence[int]]) -> int:
        """Write the context of a step's windows, and note its runs; return the number of its items.

        Args:
            draft: The step, with the runs that lanes read, in lane order.
            begun: For each lane, the time steps at which it took another stream.
        """
        by_lane = {lane: list(runs) for lane, runs in itertools.groupby(runs_of(draft.runs), lambda run: run.lane)}
        found: list[Run] = []
        for row, lane in enumerate(self._lanes):
            block, runs = draft.block_of_row[row], by_lane.get(lane, [])
            if block is None:
                continue
            before, own = self._split(runs)
            if not own or self._steps in begun[row]:  # the stream had ended with the window before
                self._clear(before, block, row)
                before = []
            elif not before and (kept := self._kept[row]) is not None:
                before = self._put(kept, block, row, own[0])
            block.begin_at(row, self._steps - sum(run.steps for run in before))
            runs = [*before, *own]
            first = max(begun[row], default=0)
            self._kept[row] = self._last_of([run for run in runs if run.t >= first], block, row)
            found += runs
        draft.runs = list(itertools.chain.from_iterable(found))
        return sum(run.steps for run in found if run.t < self._steps)

    def _split(self, runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
        """Split a lane's runs into those that a resumed lane read as context, and the others."""
        before, own = [], []
        for run in runs:
            early = min(max(self._steps - run.t, 0), run.steps)
            if early:
                before.append(run._replace(steps=early, fresh=False))
            if early < run.steps:
                starts = run.starts and not early
                later = run._replace(t=run.t + early, steps=run.steps - early, starts=starts)
                own.append(later._replace(position=run.position + early))
        return before, own

    def _clear(self, runs: Sequence[Run], block: Block, row: int) -> None:
        """Remove objects that a resumed lane read as context; arrays are padded later."""
        for column in block.columns:
            if type(column) is list:
                for t in (t for run in runs for t in range(run.t, run.t + run.steps)):
                    column[t][row] = None

    def _put(self, kept: _Kept, block: Block, row: int, first: Run) -> list[Run]:
        """Write kept items before a lane's first run, and return their runs."""
        begin = self._steps - kept.steps
        assert kept.runs[-1].position + kept.runs[-1].steps == first.position
        for column, leaf in zip(block.columns, kept.leaves, strict=True):
            if type(column) is list:
                for t, value in enumerate(leaf):
                    column[begin + t][row] = value
            else:
                column[begin : self._steps, row] = leaf
        return [run._replace(t=begin + run.t, fresh=False) for run in kept.runs]

    def _last_of(self, runs: Sequence[Run], block: Block, row: int) -> _Kept | None:
        """Copy the last items of some runs of one stream from a window; None if there are none."""
        found: list[Run] = []
        left = self._steps
        for run in reversed(runs):
            if not left:
                break
            skipped = max(run.steps - left, 0)
            starts = run.starts and not skipped
            run = run._replace(t=run.t + skipped, steps=run.steps - skipped, starts=starts)  # noqa: PLW2901
            found.insert(0, run._replace(position=run.position + skipped))
            left -= found[0].steps
        if not found:
            return None
        begin, stop = found[0].t, found[-1].t + found[-1].steps
        leaves = [
            [lasting(column[t][row]) for t in range(begin, stop)]
            if type(column) is list
            else column[begin:stop, row].copy()
            for column in block.columns
        ]
        return _Kept([run._replace(t=run.t - begin) for run in found], leaves)
