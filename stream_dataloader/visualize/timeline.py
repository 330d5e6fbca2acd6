"""Timeline of an epoch: lanes down, time steps across.

Guarantee: a timeline computed from `lengths` alone shows what a loader with these lengths reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from stream_dataloader._engine.html import runs_of
from stream_dataloader._engine.schedule.order import Order
from stream_dataloader._engine.schedule.place import Place
from stream_dataloader._engine.schedule.replay import Replay
from stream_dataloader._engine.schedule.rules import deal_lanes
from stream_dataloader.batch import StreamBatch
from stream_dataloader.dataloader import StreamDataLoader
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.visualize.picture import Segment, Timeline

__all__ = ["timeline"]

_MOST_BATCHES = 100_000


def timeline(
    what: StreamDataset | StreamDataLoader | Iterable[StreamBatch],
    *,
    batches: int | None = None,
    num_workers: int | None = None,
    epoch: int = 0,
) -> Timeline:
    """Return the streams that each lane reads over time.

    Args:
        what: A dataset, a loader, or batches. Nothing is read from a dataset or a loader with `lengths`.
        batches: Largest number of batches; needed for an endless epoch (`padding_mode="cycle"`).
        num_workers: Number of workers to deal the lanes to; None: that of the loader or the batches.
        epoch: Number of the epoch, if nothing is read.

    Raises:
        ValueError: The epoch is endless, and `batches` is None.
        TypeError: `what` is none of these.

    Example:
        >>> from stream_dataloader import StreamDataset, visualize
        >>> dataset = StreamDataset(range(5), range, batch_size=2, time_steps=4, lengths=[5, 2, 9, 3, 4])
        >>> print(visualize.timeline(dataset).text(60))
        4 batches of 4 time steps, 2 lanes, 5 streams, padding 28.1%
                  0   1   2   3
        lane 0    Aaaaa···Ddd·Eeee
        lane 1    Bb··Ccccccccc···
        padding would be 4% with windows="packed"
    """
    dataset = what.dataset if isinstance(what, StreamDataLoader) else what
    if isinstance(what, StreamDataLoader) and num_workers is None:
        num_workers = what.num_workers
    if isinstance(dataset, StreamDataset) and dataset.lengths is not None:
        return _of_lengths(dataset, batches, num_workers or 0, epoch)
    if isinstance(what, StreamDataset):
        what = StreamDataLoader(what)
    return _of_batches(what, batches, num_workers)


def _of_lengths(dataset: StreamDataset, most: int | None, workers: int, epoch: int) -> Timeline:
    plan = dataset._plan()
    if most is None and dataset._is_endless:
        raise ValueError('with padding_mode="cycle" an epoch has no end; give batches=')
    lengths = plan.scheduled_lengths
    assert lengths is not None
    assert dataset.lengths is not None
    if (dataset.lengths < 0).any():
        raise ValueError("the lengths of some sources are not known; give batches")
    count = _MOST_BATCHES if most is None else most
    if not dataset._is_endless:
        count = min(count, dataset._steps_of(epoch))
    time_steps = plan.rules.time_steps or 1  # of a window that a stream cuts
    rules = replace(plan.rules, time_steps=time_steps, deterministic=True)
    place = Place(epoch)
    order = Order(rules, place, lengths)
    segments = []
    for lane, run in Replay(rules, order, lengths, place).sources_before(count):
        taken = order[run.draw]
        section = plan.section(taken.source, taken.epoch)
        stop = min(run.end, count * time_steps)
        fields = section.source, section.start, True, run.fresh
        segments.append(Segment(lane, run.begin, stop, *fields))
    owners = _workers(rules.lanes, workers)
    drawn = tuple(sorted(segments))
    return Timeline(drawn, rules.lanes, count, time_steps, owners, plan.forecast(epoch))


def _of_batches(batches: Iterable[StreamBatch], most: int | None, workers: int | None) -> Timeline:
    windows, owners = [], np.zeros(0, np.int64)
    for batch in itertools.islice(batches, _MOST_BATCHES if most is None else most):
        host = batch.host
        fields = host.source_index, host.position, host.is_first, host.mask
        windows.append([field.numpy() for field in fields])
        owners = host.worker_id.numpy()
    lanes = len(owners)
    time_steps = max((len(source) for source, *_ in windows), default=1)
    for window in windows:
        missing = (0, time_steps - len(window[0])), (0, 0)
        window[:] = [np.pad(field, missing, constant_values=-1) for field in window]
    segments = []
    for lane in range(lanes):
        parts = ([field[:, lane] for field in window] for window in windows)
        source, position, starts, mask = map(np.concatenate, zip(*parts, strict=True))
        for begin, stop in runs_of(source, starts):
            of = source[begin], position[begin], starts[begin], mask[begin]
            segments.append(Segment(lane, begin, stop, *(value.item() for value in of)))
    edges = [0, *(np.flatnonzero(np.diff(owners)) + 1).tolist(), lanes]
    given = tuple(itertools.starmap(range, itertools.pairwise(edges)))
    owned = given if workers is None else _workers(lanes, workers)
    return Timeline(tuple(segments), lanes, len(windows), time_steps, owned)


def _workers(lanes: int, workers: int) -> tuple[range, ...]:
    return tuple(reader.lanes for reader in deal_lanes(lanes, workers))
