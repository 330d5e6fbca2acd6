"""How many steps a message carries."""

import itertools
import mmap
import time

import numpy as np
import pytest
from helpers import PATIENCE, soon

from stream_dataloader import StreamDataLoader, StreamDataset

PROCESS = {"multiprocessing_context": "fork"}


def shared_numbers(count=1):
    """An array of numbers, which what is forked shares."""
    return np.frombuffer(mmap.mmap(-1, 8 * count), np.int64)


def test_a_slow_stream_is_delivered_step_by_step(tmp_path):
    def slow(_):
        for i in range(12):
            time.sleep(0.02)
            while i >= 3 and not (tmp_path / str(i - 3)).exists():  # no message is made of four steps
                time.sleep(0.002)
            yield i

    loader = StreamDataLoader(StreamDataset([0, 1], slow, 2, time_steps=1), 2, prefetch_factor=1, timeout=60)
    for batch in loader:
        (tmp_path / str(batch.batch_index)).touch()
    assert batch.batch_index == 11


@pytest.mark.slow
def test_a_timeout_is_for_a_step_not_for_a_message():
    def slower_and_slower(_):
        for i in range(80):
            time.sleep(0 if i < 64 else 0.25)
            yield i

    loader = StreamDataLoader(StreamDataset([0, 1], slower_and_slower, 2, time_steps=1), 2, timeout=1)
    assert len(list(loader)) == 80


@pytest.mark.parametrize("options", [PROCESS, {"worker_method": "thread"}])
def test_a_step_may_take_longer_than_the_timeout_as_long_as_lanes_progress(options):
    def slow(_):
        time.sleep(0.5)
        yield 0

    begin = time.monotonic()
    assert len(list(StreamDataLoader(StreamDataset(range(8), slow, 8, time_steps=1), 1, timeout=2.5, **options))) == 1
    assert time.monotonic() - begin > 3.9


@pytest.mark.parametrize(
    ("shape", "most", "options"),
    [((1,), 64, PROCESS), ((5 << 20,), 1, PROCESS), ((1,), 1, {"worker_method": "thread"})],
)
@pytest.mark.parametrize("prefetch", [1, 3])
def test_so_many_messages_are_read_ahead(shape, most, options, prefetch):
    read = shared_numbers()
    item = np.zeros(shape, np.uint8)

    def count(_):
        for i in range(2000):
            read[0] = i + 1
            yield item

    loader = StreamDataLoader(StreamDataset([0], count, 1, time_steps=1), 1, prefetch_factor=prefetch, **options)
    furthest = 0
    for batch in itertools.islice(loader, 600 if most > 1 else 6):
        if batch.batch_index % 100 == 5:
            time.sleep(0.05)  # the worker reads as far as it may
        ahead = int(read[0]) - batch.batch_index - 1
        assert ahead <= (prefetch + 1) * most
        furthest = max(furthest, ahead)
    if most > 1:  # at some time, as messages have one step while others take the core
        assert furthest > prefetch


def test_a_worker_reads_its_first_lanes_before_others_have_come(tmp_path):
    def open_stream(source):
        (tmp_path / str(source)).touch()
        yield source

    def wait_for_the_first_worker(worker_id):
        deadline = time.monotonic() + PATIENCE
        while worker_id and len(list(tmp_path.iterdir())) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.002)

    dataset = StreamDataset(range(4), open_stream, 4, time_steps=1)
    loader = StreamDataLoader(dataset, 2, worker_init_fn=wait_for_the_first_worker, **PROCESS)
    assert [batch.data.tolist() for batch in loader] == [[[0, 1, 2, 3]]]


def test_a_fast_worker_does_not_run_away_from_a_slow_one_and_that_reads_as_far_ahead_as_it_would_alone():
    read = shared_numbers(2)

    def open_stream(source):
        for i in range(60 if source else 100_000):
            if source:
                time.sleep(0.01)
            read[source] = i + 1
            yield np.array([source, i])

    dataset = StreamDataset([0, 1], open_stream, 2, time_steps=1, deterministic=False)
    batches = iter(StreamDataLoader(dataset, 2, multiprocessing_context="fork"))
    for batch in itertools.islice(batches, 40):
        assert read[0] < batch.batch_index + 1000
    assert not soon(lambda: read[1] > batch.batch_index + 1 + 3, 0.1), "of the slow one a message has one step"
