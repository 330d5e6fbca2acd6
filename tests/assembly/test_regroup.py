"""Parts become a batch, or windows: from runs and blocks made here, without workers or streams."""

import copy
import dataclasses
import itertools
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from stream_dataloader import ItemError, StreamDataLoader, StreamDataset
from stream_dataloader._assembly import bookkeeping
from stream_dataloader._assembly.judge import Judge
from stream_dataloader._assembly.part import Part, Run
from stream_dataloader._assembly.slot_pool import PooledSlots, SlotLeases, SlotPool
from stream_dataloader._assembly.writer import PartWriter
from stream_dataloader._items.layout import Layout
from stream_dataloader._schedule.rules import deal_members
from stream_dataloader._schedule.snapshot import LaneReports

TIME_STEPS = 3
READERS = deal_members([3], [2])  # two workers: lanes 0 and 1, and lane 2
LANES = [reader.lanes for reader in READERS]


def part_of(worker, runs, pool, item):
    """What a worker sends whose lanes read these runs."""
    writer = PartWriter(LANES[worker], TIME_STEPS, -5, PooledSlots(pool, 1, False))
    draft = writer.begin(0)
    for run in runs:
        row = run.lane - LANES[worker].start
        for i in range(run.steps):
            layout, leaves = Layout.of(item(run.source, run.position + i), windowed=False)
            layout = writer.intern(layout)
            if i == 0:
                writer.met(layout)
            writer.put_step(row, run.t + i, layout, leaves)
    draft.runs += itertools.chain(*runs)
    return Part(worker, 0, True, items=0, lanes_read=0, reports=LaneReports((), b"", {}), contents=writer.finish())


def full(lane, source):
    return Run(lane, 0, TIME_STEPS, source, 0, True, starts=True)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_field_is_made_once_and_what_a_user_writes_into_it_is_in_no_other_batch(workers):
    dataset = StreamDataset([12, 12], range, 2, time_steps=3)
    for step, batch in enumerate(StreamDataLoader(dataset, workers)):
        assert not vars(batch).keys() & {"reset", "is_start", "mask", "source", "position"}
        assert batch.position.T.tolist() == batch.data.T.tolist() == [[3 * step + t for t in range(3)]] * 2
        assert batch.source.T.tolist() == [[0] * 3, [1] * 3]
        assert batch.mask.all()
        assert batch.reset.tolist() == batch.is_start[0].tolist() == [step == 0] * 2
        assert not batch.is_start[1:].any()
        for field in (batch.data, batch.position, batch.source, batch.mask, batch.is_start):
            field.fill_(1)
        assert batch.reset.all()
        assert batch.position.eq(1).all()
        assert pickle.loads(pickle.dumps(batch)).source.eq(1).all()


def test_fields_that_nobody_asked_for_go_with_copies_and_through_pickle():
    (batch,) = StreamDataLoader(StreamDataset([3, 2], range, 2, time_steps=3))
    others = [pickle.loads(pickle.dumps(batch)), copy.copy(batch), copy.deepcopy(batch), batch.cpu(), batch.host]
    for other in [*others, dataclasses.replace(batch, data=None)]:
        assert other.position.T.tolist() == [[0, 1, 2], [0, 1, -1]]
    with pytest.raises(AttributeError):
        batch.masks  # noqa: B018


def test_threads_may_ask_for_a_field_at_once():
    for batch in StreamDataLoader(StreamDataset([40, 40], range, 2, time_steps=2)):
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda _, batch=batch: batch.position, range(4)))
        assert all(field is batch.position for field in found)


def of_width(source, position):
    return np.full(2 if source < 5 else 3, position)


def test_who_came_first_to_the_slots_does_not_decide_what_fits():
    pool = SlotPool(3, messages=2)
    late = part_of(1, [full(2, 6)], pool, item=of_width)
    early = part_of(0, [full(0, 1), full(1, 2)], pool, item=of_width)
    assert (early.contents.in_slot, late.contents.in_slot) == (False, True)
    slot = SlotLeases(pool).lease(1, 0)
    with pytest.raises(ItemError, match="lane 2, worker 1"):
        Judge(READERS, [range(9)]).judge([early, late], slot)


@pytest.mark.slow
@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("length", [2, 7])
def test_a_compiled_function_of_batches_is_not_compiled_for_each(monkeypatch, fullgraph, length):
    monkeypatch.setattr(bookkeeping._asked, "by_compiled", False)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    def function(batch):
        return (batch.data * batch.mask).sum(), batch.reset.any(), batch.source.max(), batch.position.sum()

    torch.compiler.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=fullgraph)
    dataset = StreamDataset([length, 7] * 20, range, 2, time_steps=3)
    for batch in StreamDataLoader(dataset):
        torch.testing.assert_close(compiled(batch), function(batch))
    assert len(graphs) <= (2 if fullgraph else 6)  # with what is done once for the first batch
