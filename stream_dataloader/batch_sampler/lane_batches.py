"""`lane_dataset` and `collate_lanes`: torch's own `DataLoader` over a `LaneBatchSampler` yields `StreamBatch`.

Guarantee: every field except `worker_id` is the same as with a `StreamDataLoader` over the same groups. No items are
read for padded cells.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from stream_dataloader._engine.assembly.block import Block, new_column
from stream_dataloader._engine.assembly.part import runs_of
from stream_dataloader._engine.items.bookkeeping import Bookkeeping
from stream_dataloader._engine.items.fill import FillValue
from stream_dataloader._engine.items.layout import Layout, Leaves, as_tensor
from stream_dataloader._engine.items.structure import Misfit, flatten, unflatten
from stream_dataloader._engine.map_style.streams import fetch
from stream_dataloader.batch import StreamBatch
from stream_dataloader.batch_sampler.drawing import LaneIndices
from stream_dataloader.errors import ItemError, ReadError, StreamError, shorten

__all__ = ["collate_lanes", "lane_dataset"]

_UNWRAPPED = "these items do not know their lanes; wrap the dataset in lane_dataset(...)"


def lane_dataset(dataset: Any) -> Dataset[Any]:
    """Wrap a map-style dataset so that `collate_lanes` can make a `StreamBatch` from its items.

    Pass the result to torch's `DataLoader` with `batch_sampler=LaneBatchSampler(...)` and `collate_fn=collate_lanes`.
    The dataset is indexed by plain integers, by its `__getitems__` if it has one, and not at all for padded cells.

    Args:
        dataset: Any dataset with `__getitem__` and `__len__`.

    Raises:
        TypeError: It has no items by index.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from stream_dataloader import LaneBatchSampler, collate_lanes, lane_dataset
        >>> sampler = LaneBatchSampler(2, 2, lengths=[3, 2])
        >>> for batch in DataLoader(lane_dataset(range(5)), batch_sampler=sampler, collate_fn=collate_lanes):
        ...     print(batch.data.T.tolist(), batch.mask.T.tolist(), batch.reset.tolist())
        [[0, 1], [3, 4]] [[True, True], [True, True]] [True, True]
        [[2, 0], [0, 0]] [[True, False], [False, False]] [False, False]
    """
    if not hasattr(dataset, "__getitem__"):
        what = f"dataset is a {type(dataset).__name__}, which has no items by index"
        raise TypeError(f"{what}; read it with StreamDataset, which opens streams")
    return _LaneDataset(dataset)


class _Cell(NamedTuple):
    """An item's place in a batch, and in the dataset."""

    lane: int
    t: int
    source: int
    position: int
    number: int


class _LaneItems(list[Any]):
    """The items of a batch as torch's `DataLoader` hands them to `collate_fn`: one for each index.

    Attributes:
        indices: The indices that the sampler drew.
        cells: Places of the items that were read, lane by lane.
    """

    indices: LaneIndices
    cells: Sequence[_Cell]


class _LaneDataset(Dataset[Any]):
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[int(index)]

    def __getitems__(self, indices: Sequence[int]) -> _LaneItems:
        if not isinstance(indices, LaneIndices):
            what = f"index {shorten(next(iter(indices), None))} is a plain int without a lane"
            raise TypeError(f"{what}; pass batch_sampler=LaneBatchSampler(...) to the DataLoader")
        cells = _cells_of(indices)
        read = _fetch(self.dataset, cells)
        width = indices.lanes
        padding: Any = read[0]
        found = _LaneItems([padding] * len(indices))
        for cell, item in zip(cells, read, strict=True):
            found[cell.t * width + cell.lane] = item
        found.indices, found.cells = indices, cells
        return found


def _cells_of(indices: LaneIndices) -> list[_Cell]:
    """Return the cells that have an item, lane by lane; if none has, the first one, to learn the layout of items."""
    plain, width = array("q", indices), indices.lanes
    cells = [
        _Cell(run.lane, t, run.source, run.position + t - run.t, plain[t * width + run.lane])
        for run in runs_of(indices.runs)
        for t in range(run.t, run.t + run.steps)
    ]
    return cells or [_Cell(0, 0, -1, -1, plain[0])]


def _fetch(dataset: Any, cells: Sequence[_Cell]) -> list[Any]:
    """Fetch items; an error names the first that cannot be read.

    Raises:
        ReadError: The dataset raised.
    """
    read = fetch(dataset, [cell.number for cell in cells])
    found: list[Any] = []
    try:
        found.extend(read)
    except Exception as error:
        cell = cells[len(found)]
        text = f"dataset[{cell.number}], {_described(cell)}, raised {type(error).__name__}: {error}"
        raise _error_at(ReadError, text, cell) from error
    return found


def _described(cell: _Cell) -> str:
    return f"item {cell.position} of group {cell.source} in lane {cell.lane}"


def _error_at(kind: type[StreamError], text: str, cell: _Cell) -> StreamError:
    info = get_worker_info()
    worker_id = 0 if info is None else info.id
    return kind(text, source_index=cell.source, position=cell.position, lane=cell.lane, worker_id=worker_id)


def collate_lanes(
    items: Sequence[Any], collate_fn: Callable[[list[Any]], Any] | None = None, *, fill_value: Any = 0
) -> StreamBatch:
    """Make a `StreamBatch` from items of a `lane_dataset`; for torch's `DataLoader(..., collate_fn=collate_lanes)`.

    `batch.data` has tensors `(T, B, ...)`; leaves that no tensor can hold are lists `[t][b]`, None where padded. The
    state after a batch is `sampler.state_dict(batch)`.

    Args:
        items: The items that `lane_dataset` returned for one batch.
        collate_fn: Collates a list of n items, such as `torch.utils.data.default_collate`: each leaf of its result is a
            tensor `(n, ...)` or a list of n, and is put into the items' cells. None: as `StreamDataLoader` does. Pass
            `functools.partial(collate_lanes, collate_fn=...)` to the `DataLoader`.
        fill_value: Pads tensors, as for `StreamDataset`; with `collate_fn` it must be a number.

    Raises:
        TypeError: The items do not come from a `lane_dataset`, or `collate_fn` returned something else.
        ItemError: An item differs in structure, dtype or shape from the first one of the batch.
        ValueError: `fill_value` cannot pad them.
    """
    if not isinstance(items, _LaneItems):
        raise TypeError(_UNWRAPPED)
    indices, cells = items.indices, items.cells
    width = indices.lanes
    shape = len(indices) // width, width
    read = [items[cell.t * width + cell.lane] for cell in cells]
    if collate_fn is None:
        data = _laid_out(read, cells, shape, fill_value)
    else:
        data = _scattered(collate_fn(read), cells, shape, fill_value)
    is_last = torch.zeros(shape, dtype=torch.bool, device="cpu")
    for lane, t in zip(indices.ends[::2], indices.ends[1::2], strict=True):
        is_last[t, lane] = True
    info = get_worker_info()
    batch = StreamBatch._of_checked(
        Bookkeeping([indices.runs], range(width), shape[0], indices.context),
        data=data,
        worker_id=torch.full((width,), 0 if info is None else info.id, dtype=torch.int64, device="cpu"),
        lane=torch.arange(width, dtype=torch.int64, device="cpu"),
        member=None,
        batch_index=indices.batch_index,
        epoch=indices.epoch,
        context=indices.context,
        is_last=is_last,
    )
    return batch if info is None else batch._sealed()


def _laid_out(read: Sequence[Any], cells: Sequence[_Cell], shape: tuple[int, int], fill_value: Any) -> Any:
    """Lay items out as a `StreamDataLoader` does; in a batch without a real item, only the layout is used."""
    layout = None
    for item, cell in zip(read, cells, strict=True):
        try:
            if layout is None:
                layout, first = Layout.of(item, windowed=False)
                leaves: Leaves = first
                columns = [new_column(spec, *shape) for spec in layout.specs]
                block = Block(layout, columns, [0] * shape[1], shape[0], shape[0])
            else:
                leaves = layout.read(item)
        except Misfit as error:
            text = f"dataset[{cell.number}], {_described(cell)}, does not fit: {error}"
            raise _error_at(ItemError, f"{text}; return items of one structure, dtype and shape", cell) from None
        if cell.source >= 0:
            if cell.t and not block.counts[cell.lane]:
                block.begin_at(cell.lane, cell.t)
            block.put_step(cell.lane, cell.t, leaves)
    assert layout is not None  # there is at least one item
    block.pad(FillValue(fill_value).of(layout))
    pairs = zip(layout.specs, columns, strict=True)
    return layout.build([column if spec.dtype is None else as_tensor(column, spec.dtype) for spec, column in pairs])


def _scattered(collated: Any, cells: Sequence[_Cell], shape: tuple[int, int], fill_value: float) -> Any:
    """Put a `collate_fn`'s result for n items into their cells."""
    structure, leaves = flatten(collated)
    real = [(number, cell) for number, cell in enumerate(cells) if cell.source >= 0]
    rows, at = [cell.lane for _, cell in real], [cell.t for _, cell in real]
    numbers = [number for number, _ in real]
    made: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, np.ndarray):
            leaf = torch.from_numpy(leaf)  # noqa: PLW2901
        if isinstance(leaf, torch.Tensor) and leaf.ndim and len(leaf) == len(cells):
            grid: Any = leaf.new_full((*shape, *leaf.shape[1:]), fill_value)
            grid[at, rows] = leaf[numbers]
        elif isinstance(leaf, list) and len(leaf) == len(cells):
            grid = [[None] * shape[1] for _ in range(shape[0])]
            for number, cell in real:
                grid[cell.t][cell.lane] = leaf[number]
        else:
            found = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else shorten(leaf)
            what = f"collate_fn was given {len(cells)} items, and made {found}, a {type(leaf).__name__}"
            raise TypeError(f"{what}; each leaf must be a tensor or a list with one entry per item, in order")
        made.append(grid)
    return unflatten(structure, iter(made))
