"""Worker processes that read with several threads: what they yield, how they end, and what is told of them."""

import itertools
import json
import os
import sys
import threading
import time

import numpy as np
import pytest
from cases import Case
from helpers import PATIENCE, soon
from worker_streams import acting, hang, kill_self

from stream_dataloader import StreamDataLoader, StreamDataset, WorkerDeathError, get_stream_info
from stream_dataloader._schedule.rules import deal_members
from stream_dataloader._workers import exchange

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:num_workers is")

CASE = Case([14, 0, 19, 12, 2, 17, 1, 13, 5, 18, 16, 9], lanes=5, time_steps=3, shuffle=True, seed=4)


def with_threads(dataset, workers=1, threads=2, **options):
    return StreamDataLoader(dataset, workers, threads_per_worker=threads, **options)


def test_slots_are_as_many_as_with_one_thread():
    slots = []
    for threads in (1, 4):
        loader = with_threads(CASE.dataset(), 1, threads)
        held = list(loader)
        assert len(held) > 5
        assert loader.stats().sent <= threads, "all but the parts that say that lanes are idle"
        slots.append(loader.stats().slots)
    assert slots[0] == slots[1] > 0


class Logged:
    """Streams that write down which thread of which process does what, and for which lane of which worker."""

    def __init__(self, path):
        self.path = path

    def __call__(self, n):
        return LoggedStream(self, n)

    def note(self, n, what):
        info = get_stream_info()
        place = (None, None) if info is None else (info.lane, info.worker_id)
        with open(self.path, "a") as file:
            file.write(json.dumps([n, what, os.getpid(), threading.get_ident(), *place]) + "\n")

    def read(self):
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def all_closed(self):
        whats = [what for _, what, *_ in self.read()]
        return whats.count("open") == whats.count("close")


class LoggedStream:
    def __init__(self, log, n):
        self.log, self.n, self.items = log, n, iter(range(6))
        self.is_free = threading.Lock()
        log.note(n, "open")

    def __iter__(self):
        return self

    def __next__(self):
        assert self.is_free.acquire(blocking=False), "another thread is at it"
        self.log.note(self.n, "next")
        self.is_free.release()
        return next(self.items)

    def close(self):
        self.log.note(self.n, "close")


READERS = [
    {},
    {"num_workers": 2},
    {"num_workers": 2, "threads_per_worker": 2},
    {"num_workers": 2, "worker_method": "thread"},
]


@pytest.mark.parametrize(
    ("early", "keep", "steps"), [(False, False, None), (False, True, 1), (True, True, None), (True, False, 1)]
)
@pytest.mark.parametrize("options", READERS, ids=str)
def test_a_stream_is_opened_read_and_closed_once_in_the_one_thread_of_its_lane(options, early, keep, steps, tmp_path):
    log, workers = Logged(tmp_path / "log"), options.get("num_workers", 0)
    dataset = StreamDataset(range(20), log, 7, time_steps=2, open_early=early, lookahead=1 + early)
    loader = StreamDataLoader(dataset, persistent_workers=keep and workers > 0, **options)
    for _ in range(2):
        iterator = iter(loader)
        for _batch in itertools.islice(iterator, steps):
            pass
        iterator.close()
    del loader, iterator, _batch
    assert soon(log.all_closed) if workers or early else log.all_closed()
    whats, threads_of_streams, workers_of_lanes = {}, {}, {}
    for n, what, pid, thread, lane, worker in log.read():
        whats.setdefault(n, []).append(what)
        threads_of_streams.setdefault(n, set()).add((pid, thread))
        if lane is not None:
            workers_of_lanes.setdefault(lane, set()).add(worker)
    assert len(whats) == 20 if steps is None else len(whats) > 6
    assert all(of_stream.count("open") == of_stream.count("close") <= 2 for of_stream in whats.values())
    assert early or max(map(len, threads_of_streams.values())) <= 2, "one an epoch"
    expected = {lane: {r.worker_id} for r in deal_members([7], [workers]) for lane in r.lanes}
    assert workers_of_lanes == expected


MEETING = threading.Barrier(2)


def test_lanes_of_one_process_are_read_at_the_same_time():
    def read(n):
        for i in range(6):
            if i > 0:  # the sources are granted one after the other
                MEETING.wait(PATIENCE)
            yield n * 10 + i

    batches = [batch.data.tolist() for batch in with_threads(StreamDataset([0, 1], read, 2, time_steps=1))]
    assert batches == [[[i, 10 + i]] for i in range(6)]


@pytest.mark.parametrize(("place", "position"), [("opening", 0), ("reading", 2)])
def test_a_stream_that_exits_ends_its_worker_though_another_thread_hangs(place, position, monkeypatch):
    monkeypatch.setattr(exchange, "_FAREWELL_SECONDS", 0.1)  # of workers that are forked now
    read = acting({(1, position): lambda: sys.exit(3), (0, 3): hang}, 4)
    loader, steps = with_threads(StreamDataset([0, 1], read, 2, time_steps=1, lookahead=0)), []
    text = rf"worker 0 \(pid \d+\) exited with status 3 [^;]*{place} source 1 \(1\)"
    with pytest.raises(WorkerDeathError, match=text):
        steps.extend(batch.step for batch in loader)
    assert steps == list(range(len(steps)))
    assert len(steps) <= position


def test_a_death_names_what_each_thread_did():
    read = acting({(3, 5): lambda: (time.sleep(0.05), kill_self()), (0, 5): hang})
    with pytest.raises(WorkerDeathError) as death:
        list(with_threads(StreamDataset(range(4), read, 4, time_steps=1)))
    both = (
        "was killed by SIGKILL in lane 0, step 5, reading source 0 (0), with sources 0 (0), 1 (1) open, "
        "and in lane 3, step 5, reading source 3 (3), with sources 2 (2), 3 (3) open; batch"
    )
    assert both in str(death.value)
    assert death.value.suspects == {(0, 20), (3, 23)}


@pytest.mark.filterwarnings("ignore:skipped the rest")
def test_of_several_threads_sources_only_the_one_that_kills_is_blamed():
    """Whenever source 3 kills, source 0 is read, at one place of it: twice, both may have done it."""

    def loader(on_error):
        acts = {(3, 4): lambda: (time.sleep(0.1), kill_self()), (0, 4): lambda: time.sleep(0.3)}
        dataset = StreamDataset(range(4), acting(acts, 6), 4, time_steps=1, on_error=on_error)
        return with_threads(dataset, max_restarts=3)

    with pytest.raises(WorkerDeathError, match=r"^source 3 \(3\) killed its worker 3 times"):
        list(loader("raise"))
    skipping = loader("skip")
    batches = list(skipping)
    assert [failure.source_index for failure in skipping.failures] == [3]
    assert batches[-1].data.tolist() == [[5, 105, 205, 0]]
    assert skipping.stats().restarts == 3


def test_an_epoch_left_while_a_thread_is_busy_does_not_spoil_the_next():
    """The old threads may still write to slots that the new epoch uses."""

    def read(n):
        for i in range(40):
            if n == 0 and i % 4 == 3:
                time.sleep(0.01)
            yield np.full(1000, n * 100 + i)

    loader = with_threads(StreamDataset(range(4), read, 4, time_steps=2), 2, 2, persistent_workers=True)
    expected = [[[n * 100 + 2 * step + t for n in range(4)] for t in range(2)] for step in range(20)]
    for steps in (1, 3, 2, 5, 1, None):
        iterator = iter(loader)
        found = [batch.data.unique(dim=-1).squeeze(-1).tolist() for batch in itertools.islice(iterator, steps)]
        assert found == expected[:steps]
        iterator.close()


def test_threads_that_cannot_be_started_leave_none_behind(monkeypatch):
    started, original = [], threading.Thread.start

    def start(thread):
        if os.getpid() != here and started:
            raise RuntimeError("can't start new thread")
        started.extend([thread] * (os.getpid() != here))
        original(thread)

    here = os.getpid()
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start"):
        list(with_threads(StreamDataset([9, 9], range, 2, time_steps=1)))
