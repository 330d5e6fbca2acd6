"""Parts become a batch, or windows: from runs and blocks made here, without workers or streams."""

import copy
import dataclasses
import pickle
from array import array
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from stream_dataloader import ItemError, StreamDataLoader, StreamDataset
from stream_dataloader._assembly import bookkeeping
from stream_dataloader._assembly.bookkeeping import Bookkeeping
from stream_dataloader._assembly.judge import Judge
from stream_dataloader._assembly.lane_windows import LaneWindows
from stream_dataloader._assembly.part import Contents, Fault, Part, Run, numbers_of, pack, unpack
from stream_dataloader._assembly.regroup import Regrouper
from stream_dataloader._assembly.slot_leases import SlotLeases
from stream_dataloader._assembly.slot_pool import SlotPool
from stream_dataloader._assembly.slot_writer import PooledSlots, SlotWriter
from stream_dataloader._assembly.writer import PartWriter
from stream_dataloader._items.layout import Layout
from stream_dataloader._schedule.rules import deal_lanes
from stream_dataloader._schedule.snapshot import LaneReports
from stream_dataloader.errors import ErrorReport

TIME_STEPS = 3
READERS = deal_lanes(3, 2)  # two workers: lanes 0 and 1, and lane 2
LANES = [reader.lanes for reader in READERS]
SOURCES = [f"source {i}" for i in range(9)]
REPORTS = LaneReports((), b"", {})


def cell(source, position):
    return np.array([source, position], np.int32)


def part_of(worker, runs, pool=None, item=cell, step=0, time_steps=TIME_STEPS):
    """What a worker sends whose lanes read these runs."""
    slots = None if pool is None else SlotWriter(PooledSlots(pool, 1, whole_windows=False), LANES[worker])
    writer = PartWriter(len(LANES[worker]), time_steps, -5, slots, whole_windows=False)
    writer.begin(step)
    for run in runs:
        row = run.lane - LANES[worker].start
        for i in range(run.steps):
            layout, leaves = Layout.of(item(run.source, run.position + i), windowed=False)
            layout = writer.intern(layout)
            if i == 0:
                writer.met(layout)
            writer.put_step(row, run.t + i, layout, leaves)
    contents = writer.finish(runs)
    return Part(reader=worker, step=step, fresh=True, items=0, lanes_read=0, reports=REPORTS, contents=contents)


def regrouped(parts, slot=None, time_steps=TIME_STEPS):
    judge = Judge(READERS, [SOURCES])
    judge.judge(parts, slot)
    return Regrouper(READERS, time_steps, [-5], judge).batch(0, 0, parts, slot)


def full(lane, source, position=0, fresh=True):
    return Run(lane, 0, TIME_STEPS, source, position, fresh, starts=position == 0)


PACKED = [Run(0, 0, 1, 4, 7, True, False), Run(0, 1, 2, 5, 0, True, True), Run(1, 0, 3, 6, 2, False, False)]


@pytest.mark.parametrize("kept", [(), (0,), (0, 1)], ids=["both sent", "one sent", "both in the slot"])
def test_a_batch_is_the_same_however_its_parts_travelled(kept):
    pool = SlotPool(3, messages=2)
    pool.offer(Layout.of(cell(0, 0), windowed=False)[0], TIME_STEPS)
    runs = [PACKED, [Run(2, 0, 2, 8, 0, True, True)]]
    parts = [part_of(worker, runs[worker], pool if worker in kept else None) for worker in (0, 1)]
    assert [part.contents.in_slot for part in parts] == [worker in kept for worker in (0, 1)]
    slot = SlotLeases(pool).lease(1, 0, whole_windows=False)
    batch = regrouped(parts, slot)
    assert batch.source.T.tolist() == [[4, 5, 5], [6, 6, 6], [8, 8, -1]]
    assert batch.position.T.tolist() == [[7, 0, 1], [2, 3, 4], [0, 1, -1]]
    assert batch.mask.T.tolist() == [[True] * 3, [False] * 3, [True, True, False]]
    assert batch.is_start.T.tolist() == [[False, True, False], [False] * 3, [True, False, False]]
    assert batch.reset.tolist() == [False, False, True]
    assert batch.worker_id.tolist() == [0, 0, 1]
    read = torch.stack([batch.source, batch.position], -1)
    assert torch.equal(batch.data, torch.where(read >= 0, read, -5).to(torch.int32))


@pytest.mark.parametrize("in_slot", [False, True])
def test_a_worker_that_has_ended_leaves_padding(in_slot):
    pool = SlotPool(3, messages=2)
    first = part_of(0, [full(0, 1), full(1, 2)], pool if in_slot else None)
    slot = SlotLeases(pool).lease(1, 0, whole_windows=False)
    if in_slot:
        slot.columns[0][:, 2] = 99  # what a batch before left there
    batch = regrouped([first, None], slot)
    assert batch.source[:, 2].tolist() == [-1] * 3
    assert batch.mask[:, 2].any().item() is False
    assert batch.data[:, 2].tolist() == [[-5, -5]] * 3
    assert batch.data[:, 1].tolist() == [[2, 0], [2, 1], [2, 2]]


@pytest.mark.parametrize("width", [1, 9])
def test_bookkeeping_of_all_lanes_is_that_of_each_side_by_side(width):
    runs = [Run(10 + row, 0, 1 + row % 3, row, row % 2, row % 4 > 0, row % 5 == 0) for row in range(width)]
    whole = fields_of(runs, range(10, 10 + width))
    pieces = [[run] if run.steps == 1 else list(cut(run)) for run in runs]
    apart = fields_of([run for piece in pieces for run in piece], range(10, 10 + width))
    for name, written in whole.items():
        assert (written.dtype, written.tolist()) == (apart[name].dtype, apart[name].tolist())
    assert whole["source"].T.tolist() == [[row] * (1 + row % 3) + [-1] * (2 - row % 3) for row in range(width)]
    assert whole["reset"].tolist() == [row % 5 == 0 for row in range(width)]


def fields_of(runs, lanes):
    """All fields, each asked for by itself."""
    names = ("source", "position", "mask", "is_start", "reset")
    return {name: Bookkeeping([runs], lanes, TIME_STEPS)(name)[name] for name in names}


def cut(run):
    """A run as two."""
    yield run._replace(steps=1)
    yield run._replace(t=run.t + 1, steps=run.steps - 1, position=run.position + 1, starts=False)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_field_is_made_once_and_what_a_user_writes_into_it_is_in_no_other_batch(workers):
    dataset = StreamDataset([12, 12], range, 2, time_steps=3)
    for step, batch in enumerate(StreamDataLoader(dataset, workers)):
        assert not vars(batch).keys() & {"reset", "is_start", "mask", "source", "position"}
        assert batch.position.T.tolist() == [[3 * step + t for t in range(3)]] * 2
        assert batch.source.T.tolist() == [[0] * 3, [1] * 3]
        assert batch.mask.all()
        assert batch.reset.tolist() == batch.is_start[0].tolist() == [step == 0] * 2
        assert not batch.is_start[1:].any()
        for field in (batch.position, batch.source, batch.mask, batch.is_start):
            field.fill_(1)
        assert batch.reset.all()
        assert batch.position.eq(1).all()
        assert pickle.loads(pickle.dumps(batch)).source.eq(1).all()


def test_fields_that_nobody_asked_for_go_with_copies_and_through_pickle():
    (batch,) = StreamDataLoader(StreamDataset([3, 2], range, 2, time_steps=3))
    for other in (pickle.loads(pickle.dumps(batch)), copy.copy(batch), copy.deepcopy(batch), batch.cpu(), batch.host):
        assert other.position.T.tolist() == [[0, 1, 2], [0, 1, -1]]
    assert dataclasses.replace(batch, data=None).mask.sum() == 5
    with pytest.raises(AttributeError, match="'StreamBatch' object has no attribute 'masks'"):
        batch.masks  # noqa: B018


def test_threads_may_ask_for_a_field_at_once():
    for batch in StreamDataLoader(StreamDataset([40, 40], range, 2, time_steps=2)):
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda _, batch=batch: batch.position, range(4)))
        assert all(field is batch.position for field in found)


def of_width(source, position):
    return np.full(2 if source < 5 else 3, position)


def test_what_does_not_fit_is_judged_in_lane_order():
    judge = Judge(READERS, [SOURCES])
    parts = [part_of(0, [full(0, 1), full(1, 7)], item=of_width), part_of(1, [full(2, 6)], item=of_width)]
    with pytest.raises(ItemError, match=r"source 7 .*item 0, lane 1, worker 0.*first \(source 1,") as told:
        judge.judge(parts, None)
    assert (told.value.lane, told.value.worker_id) == (1, 0)


def test_who_came_first_to_the_slots_does_not_decide_what_fits():
    pool = SlotPool(3, messages=2)
    late = part_of(1, [full(2, 6)], pool, item=of_width)
    early = part_of(0, [full(0, 1), full(1, 2)], pool, item=of_width)
    assert (early.contents.in_slot, late.contents.in_slot) == (False, True)
    slot = SlotLeases(pool).lease(1, 0, whole_windows=False)
    with pytest.raises(ItemError, match="lane 2, worker 1"):
        Judge(READERS, [SOURCES]).judge([early, late], slot)


def test_the_epochs_first_layout_decides_the_order_of_keys():
    def item(source, position):
        return {"b": source, "a": position} if source < 5 else {"a": position, "b": source}

    judge = Judge(READERS, [SOURCES])
    regrouper = Regrouper(READERS, TIME_STEPS, [0], judge)
    for step, sources in enumerate([(1, 2, 6), (6, 7, 1)]):
        runs = [full(lane, source) for lane, source in enumerate(sources)]
        parts = [part_of(0, runs[:2], item=item, step=step), part_of(1, runs[2:], item=item, step=step)]
        judge.judge(parts, None)
        assert list(regrouper.batch(step, 0, parts, None).data) == ["b", "a"]


def test_windows_for_collate_fn_may_differ_and_are_padded_with_the_first_layout():
    windows = LaneWindows(READERS, TIME_STEPS, [-5], Judge(READERS, [SOURCES]))
    first, second, third = windows.of(
        [part_of(0, [full(1, 7)], item=of_width), part_of(1, [full(2, 1)], item=of_width)], None
    )
    assert (first.shape, second.shape, third.shape) == ((3, 3), (3, 3), (3, 2))
    assert first.tolist() == [[-5] * 3] * 3, "an idle lane's"


def test_a_window_that_a_stream_cut_comes_out_of_the_slot_as_it_went_in():
    pool = SlotPool(3, messages=2)
    writer = PartWriter(2, None, 0, SlotWriter(PooledSlots(pool, 1, whole_windows=True), LANES[0]), whole_windows=True)
    writer.begin(0)
    given = [{"x": np.ones((4, 2))}, {"x": torch.ones(2, 2, dtype=torch.float64)}]
    for row, window in enumerate(given):
        writer.put_object(row, window)
    contents = writer.finish([Run(0, 0, 1, 0, 0, True, True), Run(1, 0, 1, 1, 0, True, True)])
    assert contents.in_slot
    part = Part(reader=0, step=0, fresh=True, items=0, lanes_read=0, reports=REPORTS, contents=contents)
    slot = SlotLeases(pool).lease(1, 0, whole_windows=True)
    array, tensor, idle = LaneWindows(READERS, None, ["nothing"], Judge(READERS, [SOURCES])).of([part, None], slot)
    assert isinstance(array["x"], np.ndarray)
    assert np.shares_memory(array["x"], slot.columns[0])
    assert array["x"].flags.c_contiguous
    assert torch.equal(tensor["x"], given[1]["x"])
    assert idle == "nothing"


def test_a_part_that_is_in_its_slot_is_sent_as_a_few_numbers():
    reports = LaneReports(((1, 5),), b"123", {1: "state"})
    brief = Part(
        reader=1,
        step=4,
        fresh=True,
        items=0,
        lanes_read=2,
        reports=reports,
        contents=Contents(in_slot=True, time_steps=3, runs=PACKED),
    )
    fault = Fault(2, True, ErrorReport(ValueError("broken")))
    others = [
        brief._replace(faults=[fault]),
        brief._replace(end=True),
        brief._replace(contents=brief.contents._replace(objects={0: "window"})),
        brief._replace(contents=brief.contents._replace(in_slot=False)),
    ]
    packed = pack([brief, *others])
    assert packed[0] == (1, 4, True, 0, 2, 3, array("q", numbers_of(PACKED)).tobytes(), ((1, 5),), b"123", {1: "state"})
    assert all(one is other for one, other in zip(packed[1:], others, strict=True))
    first, *rest = unpack(packed)
    assert list(first.contents.runs) == PACKED
    assert [first._replace(contents=brief.contents), *rest] == [brief, *others]
    assert first.contents._replace(runs=PACKED) == brief.contents


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
