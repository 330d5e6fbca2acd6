"""A stream has one thread for its whole life; an epoch that is left early leaves nothing behind for the next."""

import itertools
import json
import os
import threading
import time

import numpy as np
import pytest
from helpers import declared, soon

from stream_dataloader import StreamDataLoader, StreamDataset, get_stream_info
from stream_dataloader._engine.schedule.rules import deal_lanes

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:num_workers is")


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
    {"num_workers": 2, "worker_method": "thread"},
]


@pytest.mark.parametrize(
    ("early", "keep", "steps"), [(False, False, None), (False, True, 1), (True, True, None), (True, False, 1)]
)
@pytest.mark.parametrize("options", READERS, ids=str)
def test_a_stream_is_opened_read_and_closed_once_in_the_one_thread_of_its_lane(options, early, keep, steps, tmp_path):
    log, workers = Logged(tmp_path / "log"), options.get("num_workers", 0)
    dataset = StreamDataset(range(20), declared(log, early=early), 7, time_steps=2, lookahead=1 + early)
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
    expected = {lane: {r.worker_id} for r in deal_lanes(7, workers) for lane in r.lanes}
    assert workers_of_lanes == expected


@pytest.mark.parametrize("method", ["process", "thread"])
def test_an_epoch_left_while_a_worker_is_busy_does_not_spoil_the_next(method):
    """The workers may still write to slots that the new epoch uses."""

    def read(n):
        for i in range(40):
            if n == 0 and i % 4 == 3:
                time.sleep(0.01)
            yield np.full(1000, n * 100 + i)

    dataset = StreamDataset(range(4), read, 4, time_steps=2)
    loader = StreamDataLoader(dataset, 2, persistent_workers=True, worker_method=method)
    expected = [[[n * 100 + 2 * step + t for n in range(4)] for t in range(2)] for step in range(20)]
    for steps in (1, 3, 2, 5, 1, None):
        iterator = iter(loader)
        found = [batch.data.unique(dim=-1).squeeze(-1).tolist() for batch in itertools.islice(iterator, steps)]
        assert found == expected[:steps]
        iterator.close()
