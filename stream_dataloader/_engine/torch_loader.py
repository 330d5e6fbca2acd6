"""Regrouping of the parts that torch's own `DataLoader` yields over a `StreamDataset`, with a FIFO for each worker.

::

    torch yields       worker 0  step 0 | worker 1  step 0 | worker 0  step 1 | worker 0  step 2
                           |                 |                 |                  |
    step 0             lanes 0 and 1     lane 2            worker 1 has ended: lane 2 is padded from now on

Guarantee: only torch's public interface is used, and the batches are those of a `StreamDataLoader`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from stream_dataloader._engine.assembly.block import Block
from stream_dataloader._engine.assembly.layout_check import LayoutCheck
from stream_dataloader._engine.assembly.part import Contents, Part
from stream_dataloader._engine.assembly.regroup import Regrouper
from stream_dataloader._engine.items.layout import Layout, Spec, as_array
from stream_dataloader._engine.items.structure import flatten
from stream_dataloader._engine.reading.deferred import UntilEnd
from stream_dataloader._engine.schedule.follower import LaneReports
from stream_dataloader._engine.schedule.rules import deal_lanes
from stream_dataloader.batch import StreamBatch
from stream_dataloader.dataset import StreamDataset


def regroup(torch_loader: DataLoader[Any]) -> Iterable[StreamBatch]:
    """Regroup torch's own `DataLoader` over a `StreamDataset` into Time x Batch batches.

    Each worker yields parts: the windows of its own lanes. This function puts the parts of one step side by side, in
    lane order. The batches are the same as those of `StreamDataLoader`, which is faster, resumes, replaces dead workers
    and agrees with other ranks. Use `regroup` if other code has to build or wrap the `DataLoader`.

    Each iteration reads an epoch of `torch_loader`, and holds at most one part of each worker.

    Args:
        torch_loader: `DataLoader(dataset, batch_size=None, num_workers=n, ...)` over a `StreamDataset`.

    Returns:
        An iterable of `StreamBatch`, one for each step. Their `state_dict()` raises, as that of a part does.

    Raises:
        TypeError: `torch_loader` is not such a `DataLoader`, or its `collate_fn` changes the parts.
        ValueError: It has `in_order=False`: a late worker could not be distinguished from one that has ended.
        ItemError: Streams that two workers read have different layouts.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> dataset = StreamDataset([3, 2, 4], range, batch_size=2, time_steps=2)
        >>> for batch in regroup(DataLoader(dataset, batch_size=None)):
        ...     print(batch.data.tolist(), batch.reset.tolist())
        [[0, 0], [1, 1]] [True, True]
        [[2, 0], [0, 1]] [False, True]
        [[0, 2], [0, 3]] [False, False]
    """
    dataset = getattr(torch_loader, "dataset", None)
    if not isinstance(torch_loader, DataLoader) or not isinstance(dataset, StreamDataset):
        what = type(torch_loader).__name__ + (f" over a {type(dataset).__name__}" if dataset is not None else "")
        raise TypeError(f"regroup takes torch's DataLoader over a StreamDataset, and got a {what}")
    if torch_loader.batch_size is not None or torch_loader.batch_sampler is not None:
        raise TypeError("the DataLoader collates several parts into one; build it with batch_size=None")
    if not getattr(torch_loader, "in_order", True):  # torch 2.6 and later
        raise ValueError("the DataLoader has in_order=False, so its parts cannot be regrouped; leave it out")
    return _Regrouped(torch_loader, dataset)


class _Regrouped:
    """The batches of each iteration over torch's `DataLoader`."""

    def __init__(self, torch_loader: DataLoader[Any], dataset: StreamDataset) -> None:
        self._loader = torch_loader
        self._dataset = dataset
        self._readers = deal_lanes(dataset.batch_size, torch_loader.num_workers)

    def __iter__(self) -> Iterator[StreamBatch]:
        return UntilEnd(self._batches())

    def _batches(self) -> Iterator[StreamBatch]:
        layout_check = LayoutCheck(self._readers, self._dataset.sources)
        regrouper = Regrouper(
            self._readers,
            self._dataset._window_steps,
            self._dataset.fill_value,
            layout_check,
            mark_ends=bool(self._dataset.mark_ends),
            context=self._dataset.context,
        )

        def regrouped() -> StreamBatch:
            """Make the batch of the oldest step that has parts."""
            step = min(fifo[0].batch_index for fifo in fifos.values() if fifo)
            taken = {worker: fifo.popleft() for worker, fifo in fifos.items() if fifo and fifo[0].batch_index == step}
            parts = [_as_read(number, taken.get(reader.worker_id)) for number, reader in enumerate(self._readers)]
            layout_check.check(parts, None)
            batch = regrouper.batch(step, next(iter(taken.values())).epoch, parts, None)
            return batch.pin_memory() if self._loader.pin_memory else batch

        fifos: dict[int, deque[StreamBatch]] = {reader.worker_id: deque() for reader in self._readers}
        for part in self._loader:
            if not isinstance(part, StreamBatch):
                kind = type(part).__name__
                raise TypeError(
                    f"the DataLoader's collate_fn turned a part into a {kind}; regroup first, and convert batches"
                )
            # Torch asks its workers in turn. A worker that is passed over has ended, and must not be waited for again.
            if any(fifo and fifo[0].batch_index < part.batch_index for fifo in fifos.values()):
                fifos = {worker: fifo for worker, fifo in fifos.items() if fifo}
                yield regrouped()
            fifos[part.worker].append(part)
            if all(fifos.values()):
                yield regrouped()
        if any(fifos.values()):
            yield regrouped()


def _as_read(number: int, part: StreamBatch | None) -> Part | None:
    """Turn a part back into the form in which the worker read it; None for a worker that has ended."""
    if part is None:
        return None
    runs, counts = _runs_of(part)
    contents = Contents()
    if max(counts) > 0:
        structure, leaves = flatten(part.data)
        specs = [Spec(None, ()) if type(leaf) is list else Spec(leaf.dtype, tuple(leaf.shape[2:])) for leaf in leaves]
        layout = Layout(structure, tuple(specs), windowed=False)
        block = Block(layout, list(map(as_array, leaves)), counts, part.time_steps, part.time_steps)
        ends = [] if part.is_last is None else [(row, t) for t, row in part.is_last.nonzero().tolist()]
        contents = Contents(False, part.time_steps, runs, [block], {}, [layout], ends)
    return Part(number, part.batch_index, bool(part.mask.any()), 0, 0, 0, LaneReports((), b"", {}), contents)


def _runs_of(part: StreamBatch) -> tuple[list[int], list[int]]:
    """Return the numbers of a part's runs, and the number of time steps that they fill in each lane."""
    source, position, mask, is_first, seed = (
        getattr(part, name).numpy().T for name in ("source_index", "position", "mask", "is_first", "stream_seed")
    )
    begins, ends = source >= 0, source >= 0
    follows = (source[:, 1:] == source[:, :-1]) & (position[:, 1:] == position[:, :-1] + 1)
    follows &= (mask[:, 1:] == mask[:, :-1]) & ~is_first[:, 1:]
    begins[:, 1:] &= ~follows
    ends[:, :-1] &= ~follows
    (rows, first), last = np.nonzero(begins), np.nonzero(ends)[1]
    at = rows, first
    lanes = part.lane.numpy()[rows]
    runs = np.stack(
        [lanes, first, last - first + 1, source[at], position[at], mask[at], is_first[at], seed[at]], axis=1
    )
    counts = np.where(source >= 0, np.arange(1, source.shape[1] + 1), 0).max(axis=1)
    return runs.ravel().tolist(), counts.tolist()
