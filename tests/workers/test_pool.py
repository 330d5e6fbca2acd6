"""Kept workers, and what they are told: a place, an epoch's number, another `collate_fn`; messages of all sizes."""

import itertools
import multiprocessing
import os
import threading
import time

import numpy as np
import pytest
from cases import Case, keys
from helpers import PATIENCE, START_METHODS, loader_of, make_loader, seldom, soon

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.errors import WorkerDeathError

CASE = Case([14, 0, 19, 12, 2, 17, 1, 13, 5, 18, 16, 9], lanes=5, time_steps=2, shuffle=True, seed=4)


def kept_pids():
    return {process.pid for process in multiprocessing.active_children()}


@pytest.mark.parametrize("method", START_METHODS)
def test_kept_workers_are_told_where_to_begin(method):
    def of(count, **options):
        return StreamDataLoader(CASE.dataset(), count, **options)

    loader, serial = of(2, persistent_workers=True, multiprocessing_context=method), of(0)
    iterator = iter(loader)
    found = keys(itertools.islice(iterator, 3))
    pids, state = kept_pids(), loader.state_dict()
    assert len(pids) == 2
    expected = keys(serial)
    assert found + keys(iterator) == expected
    loader.load_state_dict(state)
    assert keys(loader) == expected[3:]
    loader.set_epoch(7)
    serial.set_epoch(7)
    assert keys(loader) == keys(serial)
    for left in range(4):  # sooner than workers have left the epoch before
        next(itertools.islice(iter(loader), left, None))
    loader.load_state_dict(state)
    loader.collate_fn = len
    assert list(loader) == [5] * len(expected[3:])
    loader.collate_fn = None
    loader.set_epoch(7)
    serial.set_epoch(7)
    assert keys(loader) == keys(serial)
    assert kept_pids() == pids


def test_a_kept_worker_that_is_slow_to_leave_an_epoch_is_waited_for():
    """Each epoch is left while source 0 is being read; rows of requests are used again only once it was left."""

    def read(n):
        for i in range(3):
            time.sleep(0.1 if n == 0 else 0)
            yield 10 * n + i

    loader = make_loader(range(4), read, 2, time_steps=1, num_workers=2, persistent_workers=True)
    for _ in range(6):
        iterator = iter(loader)
        started = threading.Event()
        threading.Timer(0.02, started.set).start()
        assert next(iterator).data[0].tolist() == [0, 10]
        iterator.close()
    assert sorted(item for batch in loader for item in batch.data[batch.mask].tolist()) == [
        10 * n + i for n in range(4) for i in range(3)
    ]


@pytest.mark.parametrize("method", START_METHODS)
@pytest.mark.parametrize("size", seldom([1, 2000, 16_300, 17_000, 500_000], 1, 17_000))
def test_messages_of_all_sizes_arrive_in_order(size, method):
    def read(n):
        for i in range(12):
            yield np.full(size + i % 3, (n + i) % 251, np.uint8)  # of no one shape, so they are sent

    options = {"messages": True, "multiprocessing_context": method}
    loader = loader_of(StreamDataset(range(3), read, 3), 3, collate_fn=list, **options)
    for step, windows in enumerate(loader):
        assert [(len(window), int(window[0])) for window in windows] == [
            (size + step % 3, (n + step) % 251) for n in range(3)
        ]
    assert step == 11


def test_a_context_of_the_users_own_starts_the_processes():
    started = []

    class Own(type(multiprocessing.get_context("fork"))):
        def Process(self, *args, **options):
            started.append(args)
            return super().Process(*args, **options)

    own = Own()
    loader = make_loader([[1, 2], [3]], iter, 2, time_steps=2, num_workers=1, multiprocessing_context=own)
    assert [batch.data.tolist() for batch in loader] == [[[1, 3], [2, 0]]]
    assert loader.multiprocessing_context is own
    assert len(started) == 1


def test_a_death_is_found_though_a_child_of_the_dead_holds_all_that_it_had_open(tmp_path):
    def read(n):
        yield n
        child = os.fork()
        if not child:
            soon((tmp_path / "over").exists)
            os._exit(0)
        os._exit(1)

    begun = time.monotonic()
    with pytest.raises(WorkerDeathError, match="exited with status 1"):
        list(make_loader([0], read, 1, time_steps=1, num_workers=1))
    (tmp_path / "over").touch()
    assert time.monotonic() - begun < PATIENCE / 2


def test_without_workers_there_is_no_pool():
    loader = StreamDataLoader(CASE.dataset())
    assert len(list(loader)) > 5
    assert loader._starter.pool is None
    assert loader.stats().slots == 0
