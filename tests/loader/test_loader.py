"""The life of a loader: epochs, early ends, several at once, signals."""

import dataclasses
import gc
import itertools
import multiprocessing
import os
import signal
import textwrap
import threading
import time

import numpy as np
import psutil
import pytest
import torch
from cases import Case, key, keys
from helpers import FOREVER, FULL, PATIENCE, START_METHODS, declared, soon, times

from stream_dataloader import StreamDataLoader, StreamDataset, get_stream_info
from stream_dataloader.errors import WorkerError

WORKERS = [0, 2]
THREADS = {"worker_method": "thread"}
CASE = Case([4, 0, 9, 2, 2, 7, 1, 3, 5, 8, 6], lanes=4, time_steps=3, shuffle=True, seed=1)


def expected_epochs(count):
    loader = StreamDataLoader(CASE.dataset())
    return [keys(loader) for _ in range(count)]


@pytest.mark.parametrize(
    "options",
    [{}, *({"num_workers": 2, "persistent_workers": kept, **way} for kept in (False, True) for way in ({}, THREADS))],
)
def test_epochs_count_on_whole_or_left_and_can_be_set(options):
    expected = expected_epochs(6)
    assert [epoch[0][-1] for epoch in expected] == list(range(6))
    assert expected[0] != expected[1]
    loader = StreamDataLoader(CASE.dataset(), **options)
    for epoch, count in enumerate([1, 2, None, 3, 1]):
        assert keys(itertools.islice(loader, count)) == expected[epoch][:count]
    assert keys(loader) == expected[5]
    loader.set_epoch(1)
    assert [keys(loader), keys(loader)] == expected[1:3]
    loader.dataset.set_epoch(0)
    assert keys(loader) == expected[0]
    loader.set_epoch(3)
    assert keys(loader) == expected[3]


@pytest.mark.parametrize("same_dataset", [True, False])
def test_loaders_at_once_do_not_disturb_each_other(same_dataset):
    dataset = CASE.dataset()
    several = [(2, {}), (1, {}), (0, {}), (3, {}), (1, THREADS), (3, THREADS)]
    loaders = [StreamDataLoader(dataset if same_dataset else CASE.dataset(), n, **options) for n, options in several]
    (expected,) = expected_epochs(1)
    for batches in zip(*loaders, expected, strict=True):
        assert all(key(batch) == batches[-1] for batch in batches[:-1])


@pytest.mark.parametrize(("workers", "options"), [(0, {}), (2, {}), (2, THREADS)], ids=str)
def test_a_loader_inside_a_stream(workers, options):
    def read(n):
        for batch in StreamDataLoader(StreamDataset([n], range, 1, time_steps=1), workers // 2, **THREADS):
            assert get_stream_info().source_index == n - 1
            yield batch.data[0, 0]

    dataset = StreamDataset([1, 2, 3], read, 2, time_steps=2)
    assert get_stream_info() is None
    lanes = [batch.data.T.tolist() for batch in StreamDataLoader(dataset, workers, **options)]
    assert lanes == [[[0, 0], [0, 1]], [[0, 1], [0, 0]], [[2, 0], [0, 0]]]
    assert get_stream_info() is None


def test_iterating_leaves_torchs_generator_alone():
    state = torch.get_rng_state()
    for workers in WORKERS:
        list(StreamDataLoader(CASE.dataset(), workers))
    assert torch.equal(state, torch.get_rng_state())


def test_a_lane_is_granted_a_source_before_its_refused_reservation_was_looked_at():
    """The thread that opens early is kept at source 3 while lane 1 ends source 6, takes source 9 and opens that."""
    kept, taken, looked = threading.Event(), threading.Event(), threading.Event()
    opened = []

    def read(n):
        opened.append(n)
        if n == 3:  # reserved by lane 0
            kept.set()
            assert taken.wait(PATIENCE)
        if n == 9 and opened.count(9) == 1:
            taken.set()
            assert looked.wait(PATIENCE)
        if n == 4:  # reserved by lane 2, after what lane 1 was refused
            looked.set()
        yield n
        if n == 6:
            assert kept.wait(PATIENCE)
            return
        yield from range(3)

    dataset = StreamDataset(range(21), declared(read), 6, time_steps=1)
    list(StreamDataLoader(dataset, 2, virtual_ranks=3, **THREADS))
    assert sorted(opened) == list(range(21))


@pytest.mark.parametrize("workers", WORKERS)
def test_collate_fn_may_mix_layouts(workers):
    dataset = StreamDataset([2, 3, 1], lambda n: [np.ones(n)] * 2, 2, time_steps=2)
    shapes = list(StreamDataLoader(dataset, workers, lambda windows: [tuple(w.shape) for w in windows]))
    assert shapes == [[(2, 2), (2, 3)], [(2, 1), (2, 2)]]


@pytest.mark.parametrize(("workers", "options"), [(0, {}), (2, {}), (2, THREADS)])
def test_parts_are_the_batches_by_worker(workers, options):
    loader = StreamDataLoader(CASE.dataset(mark_ends=True), workers, collate_fn=len, **options)
    parts = list(loader.parts())
    batches = list(StreamDataLoader(CASE.dataset(mark_ends=True), workers))
    assert {part.worker for part in parts} == set(range(max(1, workers)))
    for part in parts:
        whole = batches[part.batch_index]
        for name in ("data", "mask", "source_index", "position", "is_first", "is_last"):
            assert torch.equal(getattr(part, name), getattr(whole, name)[:, part.lane])
        assert torch.equal(part.reset, whole.reset[part.lane])
        assert torch.equal(part.worker_id, whole.worker_id[part.lane])
    assert next(iter(loader)) == CASE.lanes


def test_leaving_early_does_not_wait_for_each_stuck_worker_in_turn(monkeypatch):
    monkeypatch.setattr("stream_dataloader._engine.workers.workers.SHUTDOWN_SECONDS", 1)

    def stuck(n):
        yield n
        time.sleep(FOREVER)

    iterator = iter(StreamDataLoader(StreamDataset(range(4), stuck, 4, time_steps=1), 4))
    next(iterator)
    started = time.monotonic()
    del iterator
    gc.collect()
    assert soon(lambda: not multiprocessing.active_children())
    assert time.monotonic() - started < 4


@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize("method", START_METHODS)
def test_a_killed_worker_is_an_error_that_names_it(in_thread, method):
    def die(n):
        for i in range(1000):
            if n == 3 and i == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            yield i

    loader = StreamDataLoader(StreamDataset(range(4), die, 4, time_steps=1), 2, multiprocessing_context=method)
    caught = []

    def run():
        where = r"worker 1 \(pid \d+\) was killed by SIGKILL in lane 3, step 5, .*source 3 \(3\)"
        with pytest.raises(WorkerError, match=where + r".*with sources 2 \(2\), 3 \(3\) open") as error:
            list(loader)
        caught.append(error)

    if in_thread:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    else:
        run()
    assert len(caught) == 1


def compute(seconds):
    """The user's own code, in which torch's handler would raise."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


@pytest.mark.parametrize("persistent", [False, True])
def test_a_death_surfaces_in_next_and_not_in_the_users_code(persistent):
    def read(n):
        yield os.getpid()
        yield from range(100)

    loader = StreamDataLoader(StreamDataset([0, 1], read, 2, time_steps=1), 2, persistent_workers=persistent)
    iterator = iter(loader)
    pid = int(next(iterator).data[0, 1])
    os.kill(pid, signal.SIGKILL)
    compute(0.5)
    with pytest.raises(WorkerError, match=f"pid {pid}"):
        list(iterator)
    assert len(list(loader)) == 101, "the next epoch is read as ever"


@pytest.mark.parametrize("length", [None, 3])
def test_a_kept_worker_that_dies_between_epochs_is_replaced_with_a_warning(length):
    case = dataclasses.replace(CASE, padding_mode="cycle" if length else "zeros")
    expected = StreamDataLoader(case.dataset(), batches_per_epoch=length)
    loader = StreamDataLoader(case.dataset(), 2, batches_per_epoch=length, persistent_workers=True)
    assert keys(loader) == keys(expected)
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    compute(0.3)
    with pytest.warns(UserWarning, match="was killed by SIGKILL between two epochs"):
        assert keys(loader) == keys(expected)
    assert keys(loader) == keys(expected)


INTERRUPTED = """
    import os, signal, sys, threading, time
    from stream_dataloader import StreamDataLoader, StreamDataset

    def read(n):
        while True:
            yield n
            time.sleep(0.01 if len(sys.argv) < 2 else 1000)

    if __name__ == "__main__":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
        loader = StreamDataLoader(StreamDataset([0, 1, 2], read, 3, time_steps=1), 2OPTIONS)
        for batch in loader:
            if batch.batch_index == 0:
                threading.Timer(0.2, os.killpg, (0, signal.SIGINT)).start()
"""


@pytest.mark.parametrize("stuck", [pytest.param([], marks=pytest.mark.slow), ["stuck"]])
@pytest.mark.parametrize("options", ["", ', worker_method="thread"'])
def test_ctrl_c_ends_at_once_without_a_word_from_the_workers(options, stuck, programs):
    done = programs(textwrap.dedent(INTERRUPTED).replace("OPTIONS", options), *stuck, alone=True)
    assert done.returncode == 128 + signal.SIGINT
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")


ORPHANED = """
    import multiprocessing, os, sys, time
    from stream_dataloader import StreamDataLoader, StreamDataset

    def read(n):
        yield os.getpid()
        time.sleep(1000)

    if __name__ == "__main__":
        multiprocessing.set_forkserver_preload(["stream_dataloader"])
        loader = StreamDataLoader(StreamDataset([0, 1], read, 2, time_steps=1), 2, multiprocessing_context=sys.argv[1])
        iterator = iter(loader)
        print(*next(iterator).data[0].tolist(), flush=True)
        os.kill(os.getpid(), 9)
"""


def is_there(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("method", START_METHODS)
def test_workers_end_when_the_main_process_is_killed(method, programs):
    done = programs(textwrap.dedent(ORPHANED), method)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(set(pids)) == 2
    assert soon(lambda: not any(map(is_there, pids)))


@pytest.mark.parametrize("workers", WORKERS)
def test_memory_and_descriptors_are_flat_over_many_epochs(workers):
    loader = StreamDataLoader(CASE.dataset(), workers, persistent_workers=workers > 0)
    process = psutil.Process()

    def run(loader, epochs):
        for _ in range(epochs):
            list(itertools.islice(loader, 4))
        gc.collect()
        return process.memory_info().rss, process.num_fds(), threading.active_count()

    before, after = [run(loader, epochs) for epochs in ((100, 300) if FULL else (30, 60))]
    assert after[0] - before[0] < 4 << 20
    assert after[1] <= before[1]
    assert soon(lambda: threading.active_count() <= before[2]), "the thread that ends an epoch may still be at it"
    next(iter(loader), None)
    del loader
    gc.collect()
    assert soon(lambda: not multiprocessing.active_children())


def test_kept_workers_are_told_apart_by_iteration_however_fast_they_follow():
    loader = StreamDataLoader(CASE.dataset(), 2, persistent_workers=True)
    (expected,) = expected_epochs(1)
    for _ in range(times(30, 10)):
        for _ in range(2):
            loader.set_epoch(0)
            iterator = iter(loader)
            first = key(next(iterator))
        assert [first, *keys(iterator)] == expected


def put_all(loader, queue):
    queue.put(keys(loader))


@pytest.mark.parametrize("method", START_METHODS)
def test_processes_that_a_loader_was_sent_to_read_each_for_themselves(method):
    context = multiprocessing.get_context(method)
    loader, queue = StreamDataLoader(CASE.dataset(), 2), context.Queue()
    processes = [context.Process(target=put_all, args=(loader, queue)) for _ in range(2)]
    for process in processes:
        process.start()
    assert [queue.get(timeout=PATIENCE) for _ in processes] == expected_epochs(1) * 2
    for process in processes:
        process.join()
        process.close()
    queue.close()
    queue.join_thread()
