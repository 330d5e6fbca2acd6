"""Workers that are threads: the same batches as of processes, the same errors, and nothing left behind."""

import gc
import itertools
import os
import queue
import signal
import sys
import threading
import time

import cv2
import numpy as np
import pytest
import torch
from cases import Case, keys
from helpers import PATIENCE, declared, soon
from worker_streams import Broken, Writing, acting, raising

from stream_dataloader import StreamDataLoader, StreamDataset, errors, get_stream_info
from stream_dataloader._engine.workers import pool, workers

CASE = Case([14, 0, 19, 12, 2, 17, 1, 13, 5, 18, 16, 9], lanes=5, time_steps=3, shuffle=True, seed=4)


def by_threads(dataset, workers, *args, **options):
    return StreamDataLoader(dataset, workers, *args, worker_method="thread", **options)


def workers_alive():
    return [thread for thread in threading.enumerate() if thread.name.startswith("stream-worker")]


def wait_for_the_end_of_workers():
    assert soon(lambda: not workers_alive())


def test_without_slots_batches_are_the_same(monkeypatch):
    monkeypatch.setattr(pool, "SlotPool", lambda *_: raising(OSError, "no room")())
    with pytest.warns(RuntimeWarning, match="no shared memory for batches .no room..*new memory each time"):
        batches = list(by_threads(CASE.dataset(), 3))
    assert keys(batches) == keys(StreamDataLoader(CASE.dataset()))


# The life of threads


def test_a_loader_dropped_in_the_middle_ends_its_threads():
    closed = []

    def count(n):
        try:
            yield from itertools.count()
        finally:
            closed.append(n)

    iterator = iter(by_threads(StreamDataset([0, 1, 2], count, 3, time_steps=1), 3, persistent_workers=True))
    next(iterator)
    assert len(workers_alive()) == 3
    del iterator
    gc.collect()
    assert soon(lambda: sorted(closed) == [0, 1, 2])
    wait_for_the_end_of_workers()


# What goes wrong


def test_what_is_no_exception_is_told():
    dataset = StreamDataset([1, 2], acting({(2, 3): raising(KeyboardInterrupt)}), 2, time_steps=1)
    with pytest.raises(
        errors.WorkerDeathError, match=r"worker 1 \(a thread\) was ended by KeyboardInterrupt\(\) in lane 1"
    ):
        list(by_threads(dataset, 2))


def test_an_error_in_worker_init_fn_is_raised_as_it_is():
    def init(worker):
        if worker == 1 and broken:
            raise Broken("of the start")

    broken = [True]
    loader = by_threads(CASE.dataset(), 2, worker_init_fn=init, persistent_workers=True)
    with pytest.raises(Broken):
        list(loader)
    broken.clear()
    assert len(list(loader)) > 5


class Hanging:
    """Streams of which one hangs at an item until it is let go."""

    def __init__(self, at):
        self.at, self.hangs, self.go_on, self.closed = at, threading.Event(), threading.Event(), []

    def __call__(self, n):
        try:
            for i in range(9):
                self.pause(n, i)
                yield n * 100 + i
        finally:
            self.closed.append(n)

    def pause(self, n, i):
        if hangs := (n, i) == self.at:
            self.hangs.set()
            self.go_on.wait(PATIENCE)
        return hangs

    def loader(self, sources=4, open_stream=None, **options):
        return by_threads(StreamDataset(range(sources), open_stream or self, sources, time_steps=1), 2, **options)

    def let_go(self):
        self.go_on.set()
        wait_for_the_end_of_workers()


@pytest.mark.parametrize("keep", [False, True])
def test_a_timeout_is_an_error_and_the_thread_is_left_alone(keep):
    hanging = Hanging((3, 5))
    loader = hanging.loader(timeout=0.2, persistent_workers=keep)
    steps = []
    with pytest.raises(errors.WorkerTimeoutError, match=r"at step 5: worker 1 is in lane 3, step 5, reading s"):
        steps.extend(batch.batch_index for batch in loader)
    assert steps == list(range(5))
    assert sorted(hanging.closed) == [0, 1]
    hanging.at = None
    assert len(list(loader)) == 9, "other threads read the next epoch"
    del loader
    hanging.let_go()
    assert sorted(hanging.closed) == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("keep", [False, True])
def test_a_thread_that_hangs_is_left_alone_with_a_warning(keep, monkeypatch):
    monkeypatch.setattr(workers, "SHUTDOWN_SECONDS", 0.2)
    hanging = Hanging((3, 2))
    loader = hanging.loader(persistent_workers=keep)
    iterator = iter(loader)
    next(iterator)
    assert hanging.hangs.wait(PATIENCE)
    with pytest.warns(RuntimeWarning, match=r"worker 1 \(a thread\) is still in lane 3, step 2, reading source 3"):
        iterator.close()
    del iterator, loader
    hanging.let_go()


def test_a_thread_left_alone_writes_to_memory_that_nobody_else_has(monkeypatch):
    monkeypatch.setattr(workers, "SHUTDOWN_SECONDS", 0.2)
    hanging, wrote = Hanging((1, 2)), threading.Event()

    class Stream(Writing):
        """One that hung writes nonsense when it is let go."""

        def read_into(self, out):
            if hanging.pause(self.n, self.position):
                out["y"][:] = -77
                wrote.set()
            return super().read_into(out)

    def open_stream(n):
        stream = Stream(40, may_be_iterated=True)
        stream.n = n
        return stream

    loader = hanging.loader(2, open_stream)
    iterator = iter(loader)
    next(iterator)
    assert hanging.hangs.wait(PATIENCE)
    hanging.at = None
    with pytest.warns(RuntimeWarning, match="threads cannot be killed"):
        iterator.close()
    for batch in loader:
        hanging.go_on.set()
        assert wrote.wait(PATIENCE)
        assert batch.data["y"].tolist() == [[batch.batch_index] * 2]
    assert batch.batch_index == 39
    hanging.let_go()


# What threads share


@pytest.mark.usefixtures("two_cores")
def test_global_generators_and_settings_are_the_programs_own():
    """Threads neither seed nor set anything: what is global is one for all of them, and for the trainer."""

    def state():
        generators = hash(tuple(torch.random.get_rng_state().tolist())), repr(np.random.get_state())  # noqa: NPY002
        numbers = torch.get_num_threads(), cv2.getNumThreads(), sys.getswitchinterval()
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGCHLD)]
        return generators, numbers, handlers, dict(os.environ), os.getcwd()

    seen, before = queue.SimpleQueue(), state()

    def read(n):
        seen.put(torch.utils.data.get_worker_info())
        yield from range(5)

    list(by_threads(StreamDataset(range(6), read, 3, time_steps=2, seed=0), 3))
    assert state() == before
    assert {seen.get() for _ in range(6)} == {None}


def test_a_garbage_collection_in_a_thread_may_close_an_iteration():
    """An iteration in a circle is collected wherever that is due, also in a thread that it would wait for."""
    collected = threading.Event()

    def read(n):
        yield 0
        dropped.wait(PATIENCE)  # both threads read the step after the first batch, and are here
        if not collected.is_set():
            collected.set()
            gc.collect()
        for i in range(200):
            time.sleep(0.001)
            yield i

    dropped = threading.Event()
    iterator = iter(by_threads(StreamDataset([0, 1], read, 2, time_steps=1), 2))
    next(iterator)
    circle = [iterator]
    circle.append(circle)
    gc.disable()
    try:
        del iterator, circle
        dropped.set()
        assert collected.wait(PATIENCE)
    finally:
        gc.enable()
    wait_for_the_end_of_workers()


@pytest.mark.parametrize(("owner", "name"), [(pool.Pool, "start"), (pool, "start_worker")])
def test_an_epoch_is_read_after_ctrl_c_in_the_midst_of_a_start(monkeypatch, owner, name):
    loader = by_threads(StreamDataset([9, 9], range, 2, time_steps=1), 2, persistent_workers=True)
    original, begun = getattr(owner, name), []

    def interrupted(*args, **options):
        begun.append(original(*args, **options))  # what has begun lives on, as in a notebook's traceback
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):  # noqa: PT012
        patched.setattr(owner, name, interrupted)
        next(iter(loader))
    assert begun
    assert len(list(loader)) == 9


class Uncopied(dict):
    """A window that holds a lock."""

    def __init__(self, **values):
        super().__init__(values)
        self.lock = threading.Lock()


def test_a_window_that_cannot_be_copied_is_named():
    dataset = StreamDataset([4, 7], lambda n: iter([Uncopied(a=np.full(3, n))] * 2), 2)
    with pytest.raises(errors.ItemError, match=r"source 0 \(4\), item 0, lane 0, worker 0: the window, a Uncopied"):
        next(iter(by_threads(dataset, 2, list)))


class Closing:
    """Notes by its own information which stream is closed."""

    def __init__(self, closed):
        self._items, self._closed = iter(range(9)), closed

    def __iter__(self):
        return self

    def __next__(self):
        return next(self._items)

    def close(self):
        self._closed.append(get_stream_info().source_index)


def test_a_stream_whose_opening_outlasts_the_iteration_is_closed_like_any_other(monkeypatch):
    monkeypatch.setattr("stream_dataloader._engine.reading.opener._LONGEST_JOIN_SECONDS", 0.01)
    opening, go, closed = threading.Event(), threading.Event(), []

    def open_stream(n):
        if n == 1:
            opening.set()
            go.wait(PATIENCE)
        return Closing(closed)

    dataset = StreamDataset(range(6), declared(open_stream), 1, time_steps=1, lookahead=1)
    batches = iter(by_threads(dataset, 1))
    next(batches)
    assert opening.wait(PATIENCE)
    batches.close()
    go.set()
    assert soon(lambda: closed == [0, 1], 5), closed
