"""Workers that are killed, stopped and continued at random moments: no wait is for ever, no item lost or doubled.

`STREAM_DATALOADER_KILLS=1000 pytest --full tests/workers/test_kills.py` kills as many of each kind.
"""

import contextlib
import multiprocessing
import os
import random
import signal
import threading
import time

import numpy as np
import pytest
from cases import key, keys
from helpers import loader_of, times

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.errors import WorkerDeathError

KILLS = int(os.environ.get("STREAM_DATALOADER_KILLS", times(20, 4)))


def jittery(n):
    """Streams that take their time, now and then."""
    rng = random.Random(n)
    for i in range(12 + n % 7):
        if rng.random() < 0.2:
            time.sleep(rng.uniform(0, 0.01))
        yield np.full(2000, 100 * n + i)


def hurt(rng, killed):
    """Kill a worker, stop and kill it, or stop it and have it go on; notes whom it killed."""
    how = rng.random()
    with contextlib.suppress(ProcessLookupError, IndexError):  # it ends meanwhile, or there is none
        worker = rng.choice(multiprocessing.active_children())
        if how >= 0.6:
            os.kill(worker.pid, signal.SIGSTOP)
            time.sleep(rng.uniform(0, 0.05))
        if how >= 0.8:
            os.kill(worker.pid, signal.SIGCONT)
            return
        worker.kill()
        killed.append(worker)


def read_and_kill(rng, loader):
    """The keys of an epoch's batches, and how many workers were killed meanwhile."""
    found, killed, hurting = [], [], []

    def begin(most_seconds):
        hurting.append(threading.Timer(rng.uniform(0, most_seconds), hurt, (rng, killed)))
        hurting[-1].start()

    try:
        if rng.random() < 0.3:
            begin(0.3)  # while they start
        for batch in loader:
            found.append(key(batch))
            if rng.random() < 0.1:
                begin(0.05)
    finally:
        for thread in hurting:
            thread.join()
    return found, len(killed)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("cores", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_random_kills_lose_and_double_nothing_and_keep_nobody_waiting(method, cores):
    rng, killed, blamed, before = random.Random(f"{method} {cores}"), 0, 0, os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:cores])
    try:
        while killed < KILLS:
            options = {
                "persistent_workers": rng.random() < 0.3,
                "messages": rng.random() < 0.5,
                "prefetch_factor": rng.choice([1, 2, 5]),
            }
            dataset = StreamDataset(range(15), jittery, 4, time_steps=2, shuffle=True, seed=1)
            expected = keys(StreamDataLoader(dataset))
            dataset.set_epoch(0)
            loader = loader_of(
                dataset, rng.randint(1, 3), multiprocessing_context=method, max_restarts=10_000, **options
            )
            try:
                found, killed_here = read_and_kill(rng, loader)
            except WorkerDeathError:  # as if a source had done it: there are restarts enough
                blamed, killed = blamed + 1, killed + 2
            else:
                assert found == expected
                killed += killed_here
    finally:
        os.sched_setaffinity(0, before)
    assert blamed <= 1 + killed // 100
