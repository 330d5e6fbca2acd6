"""`patience=`: a lane that is late idles and goes on; against a serial model, by threads and by processes."""

import itertools
import json
import math
import os
import threading
import time
from collections import deque

import pytest
import torch
from helpers import make_loader, random_cases
from hypothesis import given
from hypothesis import strategies as st
from worker_streams import Broken, acting, few, kill_self, raising, waiting

from stream_dataloader import StreamDataLoader, StreamDataset, side_by_side
from stream_dataloader._loader import collector
from stream_dataloader._reading.activity import WorkerStatus
from stream_dataloader._schedule.rules import NEVER
from stream_dataloader._workers.channel import Begin
from stream_dataloader._workers.shared import Rows, Shared
from stream_dataloader.errors import ReadError, WorkerError, WorkerTimeoutError
from stream_dataloader.recurrent import RecurrentState

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

THREADS = {"num_workers": 1, "worker_method": "thread"}
# older ones ask slow workers too often
PROCESSES = [{"num_workers": 1}, {"num_workers": 2}] if torch.__version__ >= "2.7" else []
KINDS = [THREADS, *PROCESSES]


class Serial:
    """Who comes in time is in the batch. Numbers in a script say which lane has its next window; -1: none, in time."""

    def __init__(self, lengths, lanes, time_steps, windows):
        self.lengths, self.time_steps, self.windows = lengths, time_steps, windows
        self.left = list(range(len(lengths)))  # what no batch has a part of
        self.at = [(None, 0)] * lanes  # the source in each lane, and its next item; math.inf: no source is left

    def window(self, at, left):
        """A lane's next window, where it stands behind that, and what it has begun."""
        window, begun, (source, position) = [], [], at
        while len(window) < self.time_steps and source != math.inf:
            if source is not None and position < self.lengths[source]:
                window.append((source, position))
                position += 1
            elif window and source is not None and self.windows == "aligned":
                source, position = None, 0
                break
            else:
                source, position = (left.pop(0), 0) if left else (math.inf, 0)
                begun.append(source)
        return window, (source, position), begun

    def batches(self, script):
        """Those that follow; the next call goes on behind the last one taken."""
        at, left, fifos = [*self.at], [*self.left], [deque() for _ in self.at]
        ended = [False] * len(at)
        while True:
            while not all(fifo or end for fifo, end in zip(fifos, ended, strict=True)):
                lane = next(script)
                if lane < 0 and any(fifo and fifo[0][0] for fifo in fifos):
                    break
                if lane >= 0 and not ended[lane]:
                    window, at[lane], begun = self.window(at[lane], left)
                    fifos[lane].append((window, at[lane], begun))
                    ended[lane] = not window
            batch = []
            for lane, fifo in enumerate(fifos):
                window, self.at[lane], begun = fifo.popleft() if fifo else ([], self.at[lane], [])
                self.left = [source for source in self.left if source not in begun]
                batch.append(window)
            if not any(batch):
                return
            yield batch


class ScriptedPool:
    """Reads the next window of the lane that a script says, and hands it out."""

    def __init__(self, work, script):
        self.work, self.script, self.owner = work, script, os.getpid()

    def start(self, start, recovery):
        dataset, readers, meters = self.work.dataset, self.work.readers, self.work.counts.meters
        rows = Rows(dataset.rules, shared=False) if len(readers) > 1 else None
        shared = Shared(dataset, readers, WorkerStatus(readers), meters, rows, None, in_threads=True)
        begin = Begin(1, start, recovery, NEVER, 0)
        self.readers = [shared.enter(number, lambda: False, begin) for number in range(len(readers))]
        return self

    def receive(self, step, seconds):
        for lane in self.script:
            if lane < 0 and seconds < math.inf:
                return ()
            if lane >= 0 and not self.readers[lane].ended:
                return (next(self.readers[lane]),)
        raise AssertionError("the script has an end")

    def slot(self, step):
        return None

    def give_credit(self, step, reader):
        pass

    def close(self):
        for reader in self.readers:
            reader.close()


def loader_of(lengths, lanes, options=THREADS, factory=range, **others):
    given = {"patience": 0, "time_steps": 2, "deterministic": False} | options | others
    return make_loader(lengths, factory, lanes, **given)


def cells(batch):
    """Each lane's items, as source and position, after a look at what else the batch has."""
    assert batch.mask.any()
    assert torch.equal(batch.mask, batch.source_index >= 0)
    assert torch.equal(batch.is_first, batch.mask & (batch.position == 0))
    assert torch.equal(batch.reset, batch.is_first[0])
    assert torch.equal(batch.data * ~batch.mask, torch.zeros_like(batch.data))
    lanes = zip(batch.source_index.T.tolist(), batch.position.T.tolist(), strict=True)
    return [[cell for cell in zip(*lane, strict=True) if cell[0] >= 0] for lane in lanes]


@random_cases(2000, quick=40)
@given(st.data())
def test_batches_are_those_of_the_model_also_after_a_resume(data):
    lanes = data.draw(st.integers(1, 3))
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=8))
    time_steps, windows = data.draw(st.integers(1, 3)), data.draw(st.sampled_from(["aligned", "packed"]))
    model, state, found, shape = Serial(lengths, lanes, time_steps, windows), None, [], (lengths, lanes)
    more = True
    while more:
        drawn = data.draw(st.lists(st.integers(-1, lanes - 1), max_size=20))
        scripts = [itertools.chain(drawn, itertools.cycle(range(lanes))) for _ in range(2)]
        loader = loader_of(*shape, time_steps=time_steps, windows=windows, lookahead=0)
        if state is not None:
            loader.load_state_dict(state)
        loader._starter.pool = ScriptedPool(loader._starter.pool.work, scripts[0])
        expected, batches = model.batches(scripts[1]), iter(loader)
        for _ in range(data.draw(st.integers(1, 6))):
            batch = next(batches, None)
            assert (batch and cells(batch)) == next(expected, None)
            more = batch is not None
            if not more:
                break
            found += [cell for lane in cells(batch) for cell in lane]
        state = json.loads(json.dumps(loader.state_dict()))
    assert sorted(found) == [(n, i) for n, length in enumerate(lengths) for i in range(length)]


ALL = [(n, i) for n in range(4) for i in range(20)]


def read(batches):
    return sorted(cell for batch in batches for lane in cells(batch) for cell in lane)


@pytest.mark.parametrize("options", KINDS)
def test_nobody_is_held_up_by_who_waits(options, tmp_path):
    """Source 0 waits until three others were read to their ends; with one worker beside it, in the same process."""
    come, found, counts = tmp_path / "come", [], RecurrentState(batch_dim=0)
    batches = iter(loader_of(range(4), 2, options, factory=acting({(0, 3): waiting(come)}, 20), time_steps=1))
    while len(found) < 3 + 60:
        found += (batch := next(batches)) and read([batch])
        count = batch.mask[0] + (0 if (before := counts.before(batch)) is None else before)
        counts.after(batch, count)
        assert (count[batch.mask[0]] == batch.position[batch.mask] + 1).all(), "the state is kept while its lane idles"
        if len(found) == 3 + 60:
            state = json.loads(json.dumps(batch.state_dict()))
    come.touch()
    assert sorted([*found, *read(batches)]) == ALL
    assert sorted([*found, *read(resumed(state, options))]) == ALL


def resumed(state, options):
    loader = loader_of(range(4), 2, options, factory=acting({}, 20), time_steps=1)
    loader.load_state_dict(state)
    return loader


@pytest.mark.parametrize("options", KINDS)
def test_a_state_after_any_batch_goes_on_with_what_was_not_in_one(options):
    acts = {(n, i): lambda: time.sleep(0.002) for n in range(4) for i in range(0, 20, n + 1)}
    for _ in range(50):
        found, states = [], []
        for batch in loader_of(range(4), 2, options, factory=acting(acts, 20), time_steps=1):
            found.append(cells(batch))
            states.append(batch.state_dict())
        if len(found) > 40:
            break
    assert len(found) > 40, "no lane was ever late"
    for step in (0, len(found) // 2, len(found) - 2):
        for again in ({"patience": None}, options):
            rest = list(resumed(states[step], again))
            before = [cell for batch in found[: step + 1] for lane in batch for cell in lane]
            assert sorted([*before, *read(rest)]) == ALL
            for lane in range(2):
                last = [cell for batch in found[: step + 1] for cell in batch[lane]][-1:]
                source, position = next((cell for batch in rest for cell in cells(batch)[lane]), (None, 0))
                assert last == [(source, position - 1)] if position else not last or last[0][1] == 19


@pytest.mark.parametrize("options", KINDS)
def test_windows_for_a_collate_fn_parts_and_ends(options):
    slow = acting({(n, i): lambda: time.sleep(0.003) for n in (1, 3) for i in range(20)}, 20)
    dataset = StreamDataset(range(4), slow, 2, time_steps=3, deterministic=False, fill_value=-1)
    windows = list(StreamDataLoader(dataset, collate_fn=list, patience=0, **options))
    items = [item for batch in windows for window in batch for item in window.tolist() if item >= 0]
    assert sorted(items) == [100 * n + i for n, i in ALL]
    assert sum(int(batch.is_last.sum()) for batch in loader_of(range(4), 2, options, factory=slow, mark_ends=True)) == 4
    assert sum(int(part.mask.sum()) for part in loader_of(range(4), 2, options, factory=slow).parts()) == 80


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("mode", ["drop", "data", "cycle"])
def test_padding_modes(options, mode):
    slow = acting({(0, i): lambda: time.sleep(0.002) for i in range(20)}, 20)
    of_dataset = {"factory": slow, "time_steps": 3, "padding_mode": mode}
    if mode == "cycle":
        loader = loader_of(range(4), 3, options, **of_dataset, batches_per_epoch=15, persistent_workers=True)
        assert [sum(bool(batch.mask.any()) for batch in loader) for _ in range(3)] == [15, 15, 15]
        loader._stop_workers()
        return
    batches = list(loader_of(range(4), 3, options, **of_dataset))
    items = [item for batch in batches for item in batch.data[batch.mask].tolist()]
    assert all(batch.mask.any() for batch in batches)
    assert len(items) == len(set(items))
    assert len(items) == 80 if mode == "data" else 40 <= len(items) < 80, "the first two lanes with 20 items end it"


@pytest.mark.parametrize("options", KINDS)
def test_a_fast_lane_does_not_run_away(options, tmp_path):
    """Each batch waits a while for lane 0, in which lane 1 could read thousands of items."""
    count, come = tmp_path / "count", tmp_path / "come"

    def stream(n):
        for i in range(60):
            waiting(come)() if n == 0 else note()
            yield i

    def note():
        with count.open("ab") as file:
            file.write(b".")

    batches = iter(loader_of(range(2), 2, options, factory=stream, time_steps=1, patience=0.02))
    for step in range(10):
        assert next(batches).mask.sum() == 1
        assert count.stat().st_size <= step + 1 + 8
    come.touch()
    assert sum(int(batch.mask.sum()) for batch in batches) == 110


@pytest.mark.parametrize("options", KINDS)
def test_errors_come_with_their_own_items(options):
    broken = acting({(0, 5): raising(Broken), (0, 4): lambda: time.sleep(0.02)}, 20)
    found = []
    with pytest.raises(ReadError) as raised:
        found += loader_of(range(2), 2, options, factory=broken, time_steps=1)
    assert (raised.value.source_index, raised.value.position) == (0, 5)
    stuck = acting({(n, 5): lambda: time.sleep(1.5) for n in range(2)}, 20)
    with pytest.raises(WorkerTimeoutError, match="lane 1, step 5"):
        list(loader_of(range(2), 2, options, factory=stuck, time_steps=1, timeout=0.5))


def test_a_worker_that_dies_while_another_is_late(tmp_path):
    for options in PROCESSES[1:]:
        acts = {(2, 5): few(tmp_path / "deaths", kill_self), (0, 7): lambda: time.sleep(0.1)}
        assert read(loader_of(range(4), 2, options, factory=acting(acts, 20), time_steps=1, max_restarts=1)) == ALL


def test_members_side_by_side():
    members = [(loader_of(range(n), 1, factory=range).dataset, lanes) for n, lanes in ((9, 2), (5, 1))]
    loader = side_by_side(members, 2, worker_method="thread", patience=0, ends_with="longest")
    found = [
        (m, *cell)
        for batch in loader
        for m, lane in zip(batch.member.tolist(), cells(batch), strict=True)
        for cell in lane
    ]
    assert sorted(found) == [(m, n, i) for m in range(2) for n in range((9, 5)[m]) for i in range(n)]


@pytest.mark.parametrize(
    ("options", "of_dataset"),
    [
        ({"num_workers": 0}, {}),
        ({"num_workers": 1}, {"deterministic": True}),
        ({"num_workers": 1, "patience": -1}, {}),
        ({"num_workers": 1, "transport": "shared_memory"}, {}),
    ],
)
def test_what_cannot_be(options, of_dataset):
    with pytest.raises(ValueError, match="patience is"):
        loader_of([3], 1, options, **of_dataset)


def test_nobody_knows_how_many_batches_come():
    with pytest.raises(TypeError):
        len(loader_of([3], 1, lengths=[3]))


def stalled(come, options):
    """Batches of a loader of which a lane waits for a file behind its first window; ten without it were read."""
    factory = acting({(1, 3): waiting(come)}, 100_000)
    loader = loader_of(range(2), 2, options, factory=factory, time_steps=2)
    batches, sources = iter(loader), []
    while not any(1 in lanes for lanes in sources[:-10]):
        sources.append(next(batches).source_index[0].tolist())
    return loader, batches, sources


@pytest.mark.parametrize("options", KINDS)
def test_a_lane_that_is_late_is_told_of_while_it_is(options, tmp_path):
    loader, batches, sources = stalled(tmp_path / "come", options)
    stats = loader.stats()
    ((lane, seconds, index, source),) = stats.late
    assert (lane, index, source) == (next(lanes.index(1) for lanes in sources if 1 in lanes), 1, "1")
    assert stats.late_cells == 2 * sum(lanes.count(-1) for lanes in sources)
    assert stats.advice().kind == "late lanes"
    time.sleep(0.2)
    later = loader.stats()
    assert later.late[0].seconds >= seconds + 0.2
    assert f"lane {lane} is late for {later.late[0].seconds:.0f} s, source 1 (1)" in str(later)
    assert (later - stats).late == later.late
    assert json.loads(json.dumps(later.as_dict()))["late"][0][0] == lane
    (tmp_path / "come").touch()
    next(batch for batch in batches if batch.mask.all())
    assert loader.stats().late == ()


@pytest.mark.parametrize("options", KINDS)
def test_a_lane_that_stays_late_is_logged_again_after_twice_the_time(options, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(collector, "REPORT_SECONDS", 0.05)
    batches = stalled(tmp_path / "come", options)[1]
    caplog.clear()
    begin = time.monotonic()
    while time.monotonic() < begin + 0.6:
        next(batches)
    (tmp_path / "come").touch()
    told = [message for record in caplog.records if "late lanes: lane" in (message := record.getMessage())]
    assert 2 <= len(told) <= 5, "about 0.05, 0.1, 0.2 and 0.4 s after it was late"
    assert all(text.endswith("s, source 1 (1)") for text in told)


@pytest.mark.parametrize("act", [(1, 3), (1, None)], ids=["reading", "opening"])
@pytest.mark.parametrize("options", [{"num_workers": 0}, THREADS, *PROCESSES[:1]])
def test_a_wait_counts_while_it_goes_on(options, act, tmp_path):
    """Without patience all lanes wait for one; who asks meanwhile is another thread."""
    come, waits = tmp_path / "come", tmp_path / "waits"
    acts = {act: lambda: waits.touch() or waiting(come)()}
    loader = loader_of(range(2), 1, options, factory=acting(acts, 8), time_steps=1, patience=None)
    reads = threading.Thread(target=list, args=(loader,))
    reads.start()
    try:
        waiting(waits)()
        before = loader.stats()
        time.sleep(0.2)
        since = loader.stats() - before
    finally:
        come.touch()
        reads.join()
    assert min(since.wait_seconds, since.seconds) > 0.15
    (worker,) = since.workers
    assert (worker.reading_seconds if act[1] else worker.opening_seconds) > 0.15
    assert min(worker.reading_seconds, worker.opening_seconds) < 0.05
    after = loader.stats()
    time.sleep(0.05)
    assert (loader.stats() - after).seconds == 0


@pytest.mark.parametrize("options", PROCESSES[:1])
def test_the_time_of_a_worker_that_was_killed_ends(options, tmp_path):
    """The next worker waits while it starts: what passes until then is no reading."""
    come, deaths = tmp_path / "come", tmp_path / "deaths"
    factory = acting({(0, 3): few(deaths, kill_self)}, 8)
    init = {"worker_init_fn": lambda _: deaths.exists() and waiting(come)()}
    loader = loader_of(range(2), 1, options | init, factory=factory, time_steps=1, patience=None)
    with pytest.raises(WorkerError):
        list(loader)
    before = loader.stats()
    time.sleep(0.3)
    reads = threading.Thread(target=list, args=(loader,))
    reads.start()
    try:
        while loader.stats().wait_seconds == before.wait_seconds:
            time.sleep(0.01)
        (worker,) = (loader.stats() - before).workers
    finally:
        come.touch()
        reads.join()
    assert worker.reading_seconds < 0.2
