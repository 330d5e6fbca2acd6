"""Join: batches of several loaders become one batch, or one list of windows, lanes side by side.

Guarantee: each loader's lanes keep their bits. The lanes of a loader that has ended are padding of the same layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from stream_dataloader._engine.assembly.block import new_column
from stream_dataloader._engine.assembly.lane_windows import idle_window
from stream_dataloader._engine.items.fill import FillValue
from stream_dataloader._engine.items.layout import Layout, as_tensor
from stream_dataloader._engine.items.structure import ALIKE, flatten
from stream_dataloader.batch import StreamBatch
from stream_dataloader.errors import ItemError, StreamDataLoaderError, StreamError, WorkerDeathError, shorten

#: Values of the bookkeeping in padding.
_PADDING = {"is_first": False, "mask": False, "source_index": -1, "position": -1, "stream_seed": 0}


class Side(NamedTuple):
    """A member with the numbers of its lanes and workers among those of all members."""

    number: int
    lanes: range
    first_worker: int
    sources: Sequence[Any]

    def add_member_to(self, error: Exception) -> Exception:
        """Add the member to an error of its loader, and renumber the error's lane and worker over all members."""
        if isinstance(error, StreamDataLoaderError) and error.args:
            error.args = (f"members[{self.number}]: {error.args[0]}", *error.args[1:])
        if isinstance(error, StreamError) and error.lane >= 0:
            error.lane += self.lanes.start
            error.worker_id += self.first_worker
        if isinstance(error, WorkerDeathError):
            error.member = self.number
        return error


def sides_of(lanes: Sequence[int], workers: Sequence[int], sources: Sequence[Sequence[Any]]) -> list[Side]:
    """Number lanes and workers over all members; a member without workers takes one number, as if it had a worker."""
    ends = list(accumulate(lanes))
    firsts = [0, *accumulate(max(count, 1) for count in workers)]
    return [
        Side(number, range(end - count, end), firsts[number], sources[number])
        for number, (count, end) in enumerate(zip(lanes, ends, strict=True))
    ]


class Join:
    """Puts the batches or windows of members' loaders for one step side by side."""

    def __init__(
        self, sides: Sequence[Side], time_steps: int, fill_values: Sequence[Any], *, mark_ends: bool, context: int = 0
    ) -> None:
        self._context = context
        self._sides, self.time_steps, self._mark_ends = sides, time_steps, mark_ends
        self._fill_values = fill_values
        self.new_steps = time_steps - context
        self._fills = [FillValue(value) for value in fill_values]
        self._layout: Layout | None = None
        self._first = ""  # name of the source that set the layout
        self._fitting: dict[int, Layout] = {}  # by member: the layout that was compared last
        self._lane = torch.arange(sides[-1].lanes.stop, dtype=torch.int64, device="cpu")
        self._member = self._repeated([side.number for side in sides])
        self._workers = [side.first_worker for side in sides]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, without the layout, whose classes another process may not have."""
        return self.__dict__ | {"_layout": None, "_first": "", "_fitting": {}}

    def _repeated(self, numbers: Sequence[int]) -> torch.Tensor:
        listed = [number for side, number in zip(self._sides, numbers, strict=True) for _ in side.lanes]
        return torch.tensor(listed, dtype=torch.int64, device="cpu")

    def batch(
        self,
        batches: Sequence[StreamBatch | None],
        layouts: Sequence[Layout | None],
        epoch: int,
        step: int,
        state: Callable[[], dict[str, Any]],
    ) -> StreamBatch:
        """Join the batches of a step; None stands for a member that has ended.

        Raises:
            ItemError: The items of two members differ in structure, dtype or shape.
        """
        for side, batch, layout in zip(self._sides, batches, layouts, strict=True):
            if batch is not None and layout is not None:
                self._compare(side, batch, layout)
        fields: dict[str, Any] = {
            name: torch.cat([self._field(side, batch, name) for side, batch in self._pairs(batches)], 1)
            for name in ("is_first", "mask", "source_index", "position", "stream_seed")
        }
        if self._mark_ends:
            fields["is_last"] = torch.cat([self._field(side, b, "is_last") for side, b in self._pairs(batches)], 1)
        owners = [
            torch.full((len(side.lanes),), first, device="cpu") if batch is None else batch.worker_id + first
            for (side, batch), first in zip(self._pairs(batches), self._workers, strict=True)
        ]
        return StreamBatch(
            data=self._data(batches, self._layout or next(layout for layout in layouts if layout is not None)),
            reset=fields["is_first"][self._context],
            worker_id=torch.cat(owners),
            lane=self._lane,
            member=self._member,
            batch_index=step,
            epoch=epoch,
            context=self._context,
            _state=state,
            **fields,
        )

    def _pairs(self, batches: Sequence[StreamBatch | None]) -> list[tuple[Side, StreamBatch | None]]:
        return list(zip(self._sides, batches, strict=True))

    def _field(self, side: Side, batch: StreamBatch | None, name: str) -> torch.Tensor:
        if batch is not None:
            found: torch.Tensor = getattr(batch, name)
            return found
        value = _PADDING.get(name, False)
        return torch.full((self.time_steps, len(side.lanes)), value, device="cpu")

    def _data(self, batches: Sequence[StreamBatch | None], layout: Layout) -> Any:
        all_leaves = [None if batch is None else flatten(batch.data)[1] for batch in batches]
        columns: list[Any] = []
        for i, spec in enumerate(layout.specs):
            parts = [
                self._padding(number, layout, i) if leaves is None else leaves[i]
                for number, leaves in enumerate(all_leaves)
            ]
            if spec.dtype is None:
                columns.append([[cell for part in parts for cell in part[t]] for t in range(self.time_steps)])
            else:
                columns.append(torch.cat(parts, 1))
        return layout.build(columns)

    def _padding(self, number: int, layout: Layout, i: int) -> Any:
        spec, lanes = layout.specs[i], self._sides[number].lanes
        column = new_column(spec, self.time_steps, len(lanes))
        if spec.dtype is None:
            return column
        column[:] = self._fills[number].of(layout)[i]
        return as_tensor(column, spec.dtype)

    def _compare(self, side: Side, batch: StreamBatch, layout: Layout) -> None:
        """Check that a member's items have the layout of the first member's; once for each layout object."""
        # A batch of padding is not compared, as it has no item that an error could name.
        if self._fitting.get(side.number) is layout or not (batch.source_index >= 0).any():
            return
        if self._layout is None:
            self._layout, self._first = layout, _first_item(side, batch)[1]
        elif layout != self._layout:
            place, name = _first_item(side, batch)
            raise ItemError(
                f"{name}, item {place['position']}, lane {place['lane']}, worker {place['worker_id']}: the stream does "
                f"not fit beside the epoch's first ({self._first}): {self._layout.difference(layout)}; {ALIKE}; or "
                "pass a collate_fn, which may combine different ones",
                **place,
            )
        self._fitting[side.number] = layout

    def windows(self, given: Sequence[list[Any] | None], layout: Layout | None) -> list[Any]:
        """Join the windows of a step for `collate_fn`; an idle lane has padding, or the `fill_value` itself."""
        windows: list[Any] = []
        for side, own in zip(self._sides, given, strict=True):
            if own is not None:
                windows += own
            elif layout is None:
                windows += [self._fill_values[side.number]] * len(side.lanes)
            else:
                fills = self._fills[side.number].of(layout)
                windows += [idle_window(layout, self.time_steps, fills) for _ in side.lanes]
        return windows

    def part(self, side: Side, part: StreamBatch, epoch: int, step: int) -> StreamBatch:
        """Renumber a member's part as a part of the whole batch."""
        return dataclasses.replace(
            part,
            lane=part.lane + side.lanes.start,
            worker_id=part.worker_id + side.first_worker,
            member=self._member[part.lane + side.lanes.start],
            batch_index=step,
            epoch=epoch,
        )


def _first_item(side: Side, batch: StreamBatch) -> tuple[dict[str, Any], str]:
    """Return the place of the first item of a member's batch, in lane order, and its name."""
    lane, t = (batch.source_index >= 0).T.nonzero()[0].tolist()
    index = int(batch.source_index[t, lane])
    try:
        source = shorten(side.sources[index])
    except Exception:  # the misfit must be reported even if the source cannot be unpickled
        source = "?"
    place = {
        "source_index": index,
        "source": source,
        "position": int(batch.position[t, lane]),
        "lane": side.lanes.start + lane,
        "worker_id": side.first_worker + int(batch.worker_id[lane]),
    }
    return place, f"members[{side.number}], source {index} ({source})"
