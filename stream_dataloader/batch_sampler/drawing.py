"""Batches of `LaneBatchSampler`: `Drawing` draws the batches of an epoch, and a `LaneIndex` is one cell.

Guarantees: the state after each batch is known. Code in C that reads a batch (NumPy, torch, `json`) sees plain
integers, and iteration yields `LaneIndex`es.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, SupportsIndex, overload

import numpy as np
import numpy.typing as npt

from stream_dataloader._engine.assembly.part import Run, runs_of
from stream_dataloader._engine.map_style.index_groups import IndexGroups
from stream_dataloader._engine.schedule.order import Order
from stream_dataloader._engine.schedule.place import Place
from stream_dataloader._engine.schedule.replay import Piece, Replay
from stream_dataloader._engine.schedule.rules import IntArray, Rules
from stream_dataloader._engine.schedule.sections import Cuts, Lengths
from stream_dataloader.stream_info import StreamInfo, source_key, stream_seed

__all__ = ["LaneIndex"]

_KEPT_PLACES = 8  # one place is kept per block of steps
_KEPT_ORIGINS = 1 << 12  # kept because a long group is in many batches
_ALL = 1 << 62


class LaneIndex(int):
    """An index that `LaneBatchSampler` drew: an `int` with the cell of the batch that its item fills.

    A dataset's `__getitem__` may read these attributes. In calculations it is a plain `int`.

    Attributes:
        lane: Row of the batch, 0 to B - 1.
        t: Time step of the window, 0 to T - 1; with `context=k`, up to k + T - 1.
        is_first: The item is the first of its group, or section, so the state carried in this lane must be reset.
        mask: The item is read for the first time this epoch. False: it is padding or context, or is read again.
        source_index: Number of the item's group; -1 is padding.
        position: Index of the item within its group; -1 is padding.
        is_last: The item is the last of its group, or section.
        epoch: Number of the batch's epoch.
        batch_index: Number of the batch in its epoch, from 0.

    Example:
        >>> from stream_dataloader import LaneIndex
        >>> index = LaneIndex(7, lane=1, t=0, is_first=True, mask=True, source_index=2, position=0)
        >>> index, index + 1, index.lane, index.is_first, "abcdefghi"[index]
        (7, 8, 1, True, 'h')
    """

    lane: int
    t: int
    is_first: bool
    mask: bool
    source_index: int
    position: int
    is_last: bool
    epoch: int
    batch_index: int

    def __new__(
        cls,
        index: int,
        lane: int,
        t: int,
        is_first: bool,
        mask: bool,
        source_index: int = -1,
        position: int = -1,
        is_last: bool = False,
        epoch: int = 0,
        batch_index: int = 0,
    ) -> LaneIndex:
        """Build an index with its cell."""
        made = super().__new__(cls, index)
        made.lane, made.t, made.is_first, made.mask = lane, t, is_first, mask
        made.source_index, made.position, made.is_last = source_index, position, is_last
        made.epoch, made.batch_index = epoch, batch_index
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        where = self.lane, self.t, self.is_first, self.mask, self.source_index, self.position, self.is_last
        return type(self), (int(self), *where, self.epoch, self.batch_index)


class LaneIndices(list[int]):
    """The `T * B` indices of a batch, time-major: those of all lanes at t = 0, then at t = 1, and so on.

    Attributes:
        lanes: Number of lanes, B.
        runs: The numbers of `Run`s, in lane order; all other cells are padding.
        ends: Lane and time step of groups' last items, one pair after the other.
        epoch: Number of the epoch.
        batch_index: Number of the batch in the epoch.
        context: Number of time steps that the batch begins with, of the window before.
    """

    __slots__ = ("batch_index", "context", "ends", "epoch", "lanes", "runs")

    lanes: int
    runs: array[int]
    ends: array[int]
    epoch: int
    batch_index: int
    context: int

    @classmethod
    def of(cls, indices: Iterable[int], runs: array[int], ends: array[int], **place: int) -> LaneIndices:
        """Build a batch; `place`: the other attributes."""
        made = cls(indices)
        made.runs, made.ends = runs, ends
        for name, number in place.items():
            setattr(made, name, number)
        return made

    def __iter__(self) -> Iterator[int]:
        lanes, place = self.lanes, (self.epoch, self.batch_index)
        known: list[tuple[Any, ...]] = [(False, False, -1, -1, False)] * len(self)
        ends = {t * lanes + lane for lane, t in zip(self.ends[::2], self.ends[1::2], strict=True)}
        for run in runs_of(self.runs):
            for step in range(run.steps):
                cell, is_first = (run.t + step) * lanes + run.lane, step == 0 and bool(run.starts)
                known[cell] = is_first, bool(run.fresh), run.source, run.position + step, cell in ends
        for number, (index, cell_knows) in enumerate(zip(super().__iter__(), known, strict=True)):
            t, lane = divmod(number, lanes)
            is_first, mask, source, position, is_last = cell_knows
            yield LaneIndex(index, lane, t, is_first, mask, source, position, is_last, *place)

    @overload
    def __getitem__(self, place: SupportsIndex) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> list[int]: ...
    def __getitem__(self, place: SupportsIndex | slice) -> int | list[int]:
        return list(self)[place]

    def copy(self) -> list[int]:
        return list(self)

    def __reduce__(self) -> tuple[Any, ...]:
        packed = [numbers.tobytes() for numbers in (array("q", self), self.runs, self.ends)]
        return _unpack, (self.lanes, self.epoch, self.batch_index, self.context, *packed)


def _unpack(lanes: int, epoch: int, batch_index: int, context: int, *packed: bytes) -> LaneIndices:
    indices, runs, ends = (array("q", numbers) for numbers in packed)
    return LaneIndices.of(indices, runs, ends, lanes=lanes, epoch=epoch, batch_index=batch_index, context=context)


class Drawing:
    """Draws one epoch, from `start` on.

    Args:
        starts: The index of each dataset's first group.
        lengths: Numbers of items of the units that the schedule hands out: groups, or sections of them.
        total: Number of the epoch's batches; None without an end.
        context: Number of items of the window before that each window begins with.

    Attributes:
        fetched: Number of batches drawn so far, including those before a resume.
    """

    def __init__(
        self,
        groups: IndexGroups,
        starts: Sequence[int],
        rules: Rules,
        lengths: Lengths,
        start: Place,
        total: int | None,
        context: int = 0,
    ) -> None:
        self.start = start
        self.total = total
        self.fetched = start.delivered
        self._groups, self._starts, self._rules, self._lengths, self._context = groups, starts, rules, lengths, context
        self._kept: deque[Place] = deque(maxlen=_KEPT_PLACES)
        self._origins: dict[tuple[int, ...], tuple[int, int, int]] = {}

    def batches(self) -> Iterator[LaneIndices]:
        replay = self._replay(self.start)
        lanes, flat, epoch = self._rules.lanes, self._groups.flat, self.start.number
        while (left := (_ALL if self.total is None else self.total) - self.fetched) > 0:
            self._kept.append(replay.place())
            places, pieces = replay.read(left)
            if isinstance(self._lengths, Cuts) and self._lengths.skips(0):
                places, flat = self._indices_of_anchors(self._lengths, places.shape, pieces), None
            elif self._context:
                places = np.concatenate([self._places_before(places[:, 0], pieces), places], axis=1)
            indices: npt.NDArray[Any] = (places if flat is None else flat[places]).reshape(len(places), -1)
            for row, of_batch in zip(indices.tolist(), pieces, strict=True):
                runs, ends = self._runs(of_batch)
                place = {"lanes": lanes, "epoch": epoch, "batch_index": self.fetched, "context": self._context}
                batch = LaneIndices.of(row, runs, ends, **place)
                self.fetched += 1
                yield batch

    def _before(self, piece: Piece) -> int:
        """Return the number of items of context that a window begins with, given one of its pieces."""
        return min(piece.item, self._context) if piece.t == 0 else 0

    def _places_before(self, firsts: IntArray, pieces: Sequence[Sequence[Piece]]) -> IntArray:
        """Return the places of the context's items, `(steps, context, lanes)`; padding repeats the window's first.

        Args:
            firsts: `(steps, lanes)`, the place of each window's first item.
        """
        back = np.zeros((len(firsts), self._context, firsts.shape[1]), np.int64)
        for step, of_batch in enumerate(pieces):
            for piece in of_batch:
                if count := self._before(piece):
                    back[step, -count:, piece.lane] = np.arange(count, 0, -1)
        return firsts[:, None] - back

    def _indices_of_anchors(self, anchors: Cuts, shape: tuple[int, ...], pieces: Sequence[Sequence[Piece]]) -> IntArray:
        """Return the indices of some steps, `(steps, context + T, lanes)`; padding repeats the window's."""
        steps, window, lanes = shape
        first = self._groups[0]
        found = np.full((steps, self._context + window, lanes), int(first[0]) if len(first) else 0, np.int64)
        for step, of_batch in enumerate(pieces):
            for piece in of_batch:
                before, begin = self._before(piece), self._context + piece.t
                items = anchors.items(piece.run.source, piece.run.epoch)[piece.item - before : piece.item + piece.steps]
                own = np.asarray(self._groups[piece.run.source])[items]
                column = found[step, :, piece.lane]
                if piece.t == 0:
                    column[:] = own[0]
                column[begin - before : begin + piece.steps] = own
                column[begin + piece.steps :] = own[-1]
        return found

    def _runs(self, pieces: Iterable[Piece]) -> tuple[array[int], array[int]]:
        """Return the runs of a batch, and the lanes and time steps of last items."""
        runs, ends = array("q"), array("q")
        for piece in pieces:
            lane, t, steps, item, run = piece
            source, begin, seed = self._origin(run.source, run.epoch, run.repeat)
            t += self._context
            if before := self._before(piece):
                first = item - before
                runs.extend(Run(lane, t - before, before, source, begin + first, False, first == 0, seed))
            runs.extend(Run(lane, t, steps, source, begin + item, run.fresh, item == 0, seed))
            if piece.ends:
                ends.extend((lane, t + steps - 1))
        return runs, ends

    def _origin(self, *drawn: int) -> tuple[int, int, int]:
        """Return the group of a unit of the schedule, the unit's first item in the group, and its stream seed.

        Args:
            drawn: The number of a group or section, the epoch and the repeat, as in `Assignment`.
        """
        if (known := self._origins.get(drawn)) is not None:
            return known
        if len(self._origins) >= _KEPT_ORIGINS:
            self._origins.clear()
        number, epoch, repeat = drawn
        source, begin = number, 0
        if isinstance(self._lengths, Cuts):
            source, begin, *_ = self._lengths.section(number, epoch)
        key = source_key(self._starts, source)
        info = StreamInfo(source, epoch, 0, 0, self._rules.seed, repeat, source_key=key)
        found = self._origins[drawn] = source, begin, stream_seed(info)
        return found

    def reached(self) -> Place:
        """Return the place after all batches that were drawn."""
        return self.place(self.fetched)

    def place(self, batches: int) -> Place:
        """Return the place after some of the epoch's batches.

        Raises:
            ValueError: It is not known.
        """
        number, first = self.start.number, self.start.delivered
        if not first <= batches <= self.fetched:
            what = f"the state after {batches} batches is not known: batches {first} to {self.fetched}"
            raise ValueError(f"{what} of epoch {number} were drawn; pass the number that the trainer has used")
        step = self.start.step + batches - first
        before = [place for place in self._kept if place.step <= step]
        replay = self._replay(before[-1] if before else self.start)
        replay.skip_to(step)
        return replay.place()

    def _replay(self, place: Place) -> Replay:
        return Replay(self._rules, Order(self._rules, place, self._lengths), self._lengths, place)
