"""Workers that are threads: the same batches as of processes, the same errors, and nothing left behind."""

import collections
import gc
import itertools
import json
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import time

import cv2
import numpy as np
import pytest
import torch
from cases import Case, cases, cells, check_fields, key
from helpers import FOREVER, PATIENCE, check_interrupted, random_cases, soon
from hypothesis import given
from hypothesis import strategies as st
from worker_streams import ITEMS, Broken, failing, odd

from stream_dataloader import (
    ItemError,
    OpenError,
    ReadError,
    StreamDataLoader,
    StreamDataset,
    StreamError,
    WorkerDeathError,
    WorkerTimeoutError,
    get_stream_info,
    side_by_side,
)
from stream_dataloader._workers import memory, thread_feed, threads

CASE = Case([14, 0, 19, 12, 2, 17, 1, 13, 5, 18, 16, 9], lanes=5, time_steps=3, shuffle=True, seed=4)
THREADS = {"worker_method": "thread"}


def by_threads(dataset, workers, *args, **options):
    return StreamDataLoader(dataset, workers, *args, **THREADS, **options)


def workers_alive():
    return [thread for thread in threading.enumerate() if thread.name.startswith("stream-worker")]


# The same batches


@random_cases(1_500, 40)
@given(cases(), st.integers(1, 5), st.integers(1, 4), st.booleans(), st.booleans())
@pytest.mark.filterwarnings("ignore:num_workers is")
def test_threads_give_the_batches_of_the_serial_model(case, workers, prefetch_factor, jitter, keep):
    case.jitter = jitter and sum(case.lengths) < 60
    dataset = case.dataset()
    loader = by_threads(dataset, workers, prefetch_factor=prefetch_factor, persistent_workers=keep)
    for epoch in range(2):
        batches = list(loader)
        assert [cells(batch) for batch in batches] == list(case.expected(dataset, epoch))
        for batch in batches:
            check_fields(batch)


@random_cases(800, 25)
@given(cases(max_streams=14), st.lists(st.integers(-3, 4), min_size=2, max_size=4), st.data())
@pytest.mark.filterwarnings("ignore:num_workers is")
def test_any_place_is_resumed_by_another_number_of_threads(case, workers, data):
    """Below 0 are processes, which are seldom drawn: they take long."""
    expected = [key(batch) for batch in StreamDataLoader(case.dataset())]
    found, state = [], None
    for count in workers:
        loader = by_threads(case.dataset(), abs(count))
        if state is not None:
            loader.load_state_dict(state)
        iterator = iter(loader)
        found += [key(batch) for batch in itertools.islice(iterator, data.draw(st.integers(0, 4)))]
        state = json.loads(json.dumps(loader.state_dict())) if len(found) < len(expected) else state
        iterator.close()
        if len(found) == len(expected):
            return
    loader = by_threads(case.dataset(), 2)
    loader.load_state_dict(state)
    assert found + [key(batch) for batch in loader] == expected


@pytest.mark.parametrize("way", ["from processes to threads", "from threads to processes"])
def test_a_state_goes_from_processes_to_threads_and_back(way):
    options = [{}, THREADS] if way.startswith("from processes") else [THREADS, {}]
    first, second = (StreamDataLoader(CASE.dataset(), 2, **given) for given in options)
    iterator = iter(first)
    found = [key(batch) for batch in itertools.islice(iterator, 4)]
    second.load_state_dict(first.state_dict())
    iterator.close()
    assert found + [key(batch) for batch in second] == [key(batch) for batch in StreamDataLoader(CASE.dataset())]


@pytest.mark.parametrize("windows", ["aligned", pytest.param("packed", marks=pytest.mark.slow)])
@pytest.mark.parametrize("padding_mode", ["zeros", "data", pytest.param("drop", marks=pytest.mark.slow)])
def test_every_field_is_that_of_processes(padding_mode, windows):
    case = Case(CASE.lengths, 5, 3, windows, padding_mode, 2, shuffle=True, seed=7, jitter=True, mark_ends=True)

    def read(**options):
        loader = StreamDataLoader(case.dataset(), **options)
        return [key(batch, worker_id=True) for _ in range(2) for batch in loader]

    assert read(num_workers=3, **THREADS) == read(num_workers=3)


def test_parts_are_those_of_processes():
    parts, those = (
        [(part.worker, key(part)) for part in StreamDataLoader(CASE.dataset(), 3, **options).parts()]
        for options in ({}, THREADS)
    )
    assert parts == those


@pytest.mark.parametrize("padding_mode", ["zeros", "data", "drop"])
def test_without_determinism_every_item_comes_once_and_in_order(padding_mode):
    case = Case(CASE.lengths, 4, 2, padding_mode=padding_mode, shuffle=True, jitter=True)
    read = collections.Counter()
    for batch in by_threads(case.dataset(deterministic=False), 3):
        check_fields(batch)
        read.update(cell[:2] for lane in cells(batch) for cell in lane if cell and cell[2])
    assert set(read.values()) == {1}
    if padding_mode != "drop":
        assert len(read) == sum(case.lengths)


@pytest.mark.parametrize("time_steps", [2, None])
@pytest.mark.parametrize("collate_fn", [None, list])
@pytest.mark.parametrize("kind", ITEMS)
def test_all_kinds_of_items_come_as_from_processes(kind, collate_fn, time_steps):
    def windows(n):
        for i in range(4):
            item = ITEMS[kind](n, i)
            if time_steps is None:
                item = np.stack([np.full(3, n + i)] * (1 + n % 2)) if kind != "object" else {"name": ["a"], "n": [i]}
            yield item

    def read(**options):
        dataset = StreamDataset([1, 2, 3, 4, 5], windows, 2, time_steps=time_steps)
        return [repr(getattr(b, "data", b)) for b in StreamDataLoader(dataset, 2, collate_fn, **options)]

    assert read(**THREADS) == read()


def test_windows_for_a_collate_fn_may_be_one_buffer():
    def windows(n):
        buffer = np.zeros((2, 3))
        for i in range(60):
            buffer[:] = n * 100 + i
            yield {"x": buffer, "name": "a"}

    def collate(windows):
        return [float(np.asarray(window["x"])[-1, -1]) for window in windows]

    batches = by_threads(StreamDataset([1, 2], windows, 2), 2, collate, prefetch_factor=5)
    assert list(batches) == [[100 + i, 200 + i] for i in range(60)]


def test_batches_that_are_held_stay_as_they_are():
    batches = list(by_threads(CASE.dataset(), 3))
    assert [key(batch) for batch in batches] == [key(batch) for batch in StreamDataLoader(CASE.dataset())]


def test_without_slots_batches_are_the_same(monkeypatch, caplog):
    def no_memory(*_):
        raise OSError("no room")

    monkeypatch.setattr(memory, "SlotPool", no_memory)
    with pytest.warns(RuntimeWarning, match="no shared memory for batches .no room.; they are put together in new mem"):
        batches = list(by_threads(CASE.dataset(), 3))
    assert [key(batch) for batch in batches] == [key(batch) for batch in StreamDataLoader(CASE.dataset())]
    with pytest.raises(RuntimeError, match="to have them put together in new memory each time"):
        next(iter(by_threads(CASE.dataset(), 3, transport="shared_memory")))


def test_threads_read_ahead_no_further_than_asked():
    far = collections.Counter()

    def count(n):
        for i in range(100):
            far[n] = i
            yield i

    iterator = iter(by_threads(StreamDataset([0, 1], count, 2, time_steps=1), 2, prefetch_factor=3))
    next(iterator)
    time.sleep(0.2)
    assert max(far.values()) <= 1 + 3, "the batch that was taken, and three more"
    iterator.close()


# The life of threads


def threads_of_streams(loader):
    """Which threads read each epoch."""
    return [{int(number) for batch in loader for number in batch.data.unique() if number} for _ in range(3)]


@pytest.mark.parametrize("keep", [False, True])
def test_worker_init_fn_runs_once_in_each_thread(keep):
    begun = []

    def init(worker):
        begun.append((worker, threading.get_ident()))

    def read(n):
        for _ in range(3):
            assert threading.get_ident() in [ident for worker, ident in begun if worker == get_stream_info().worker_id]
            time.sleep(0.001)
            yield n

    loader = by_threads(StreamDataset([1, 2, 3, 4], read, 2), 2, list, worker_init_fn=init, persistent_workers=keep)
    for _ in range(3):
        list(loader)
    assert sorted(worker for worker, _ in begun) == [0, 1] if keep else [0, 0, 0, 1, 1, 1]


def test_a_stream_is_opened_read_and_closed_in_one_thread():
    seen = collections.defaultdict(set)

    class Stream:
        def __init__(self, n):
            self.n, self.items = n, iter(range(4))
            seen[n].add(threading.get_ident())

        def __iter__(self):
            return self

        def __next__(self):
            seen[self.n].add(threading.get_ident())
            return next(self.items)

        def close(self):
            seen[self.n].add(threading.get_ident())

    for batch in by_threads(StreamDataset(range(9), Stream, 4, time_steps=2), 2):
        if batch.step == 2:
            break
    del batch
    gc.collect()
    assert all(len(threads) == 1 for threads in seen.values())
    assert threading.get_ident() not in set().union(*seen.values())


@pytest.mark.parametrize("keep", [False, True])
def test_an_epoch_left_early_leaves_no_thread_but_those_kept(keep):
    loader = by_threads(CASE.dataset(), 3, persistent_workers=keep)
    expected = StreamDataLoader(CASE.dataset())
    for epoch in range(6):
        expected.set_epoch(epoch)
        for batch, same in zip(loader, expected, strict=False):
            assert key(batch) == key(same)
            if batch.step == epoch % 3:
                break
        assert soon(lambda: bool(workers_alive()) == keep)
    del loader
    gc.collect()
    while workers_alive():
        time.sleep(0.001)


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
    while workers_alive():
        time.sleep(0.001)


def test_many_loaders_of_one_dataset_at_once():
    dataset = CASE.dataset()
    loaders = [by_threads(dataset, workers) for workers in (1, 2, 3)]
    expected = [[key(batch) for batch in StreamDataLoader(CASE.dataset())]] * 3
    assert [list(map(key, batches)) for batches in zip(*zip(*loaders, strict=True), strict=True)] == expected


def test_a_loader_inside_the_loop_of_another_and_inside_a_stream():
    def nested(n):
        for batch in by_threads(StreamDataset([n], range, 1, time_steps=2), 1):
            assert get_stream_info().source_index == n - 3
            yield batch.data[:, 0]

    loader = by_threads(StreamDataset([3, 4, 5], nested, 3), 2)
    for _ in loader:
        (inner,) = by_threads(StreamDataset([2], range, 1, time_steps=2), 1)
        assert inner.data.tolist() == [[0], [1]]
    assert [batch.data[:, 2].tolist() for batch in loader] == [[0, 1], [2, 3], [4, 0]]


def test_threads_inside_a_worker_process():
    def nested(n):
        for batch in by_threads(StreamDataset([n, n], range, 2, time_steps=2), 2):
            yield from batch.data[:, 1]

    batches = list(StreamDataLoader(StreamDataset([4, 2], nested, 2, time_steps=2), 2))
    assert [batch.data.T.tolist() for batch in batches] == [[[0, 1], [0, 1]], [[2, 3], [0, 0]]]


def test_side_by_side_members_have_threads():
    loader = side_by_side([(CASE.dataset(), 5), (CASE.dataset(), 5)], num_workers=4, **THREADS)
    same = side_by_side([(CASE.dataset(), 5), (CASE.dataset(), 5)])
    assert [batch.data.tolist() for batch in loader] == [batch.data.tolist() for batch in same]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_process_forked_in_the_middle_has_loaders_of_its_own(workers):
    loader = by_threads(CASE.dataset(), 3, persistent_workers=True)
    iterator = iter(loader)
    next(iterator)
    processes = StreamDataLoader(CASE.dataset(), workers)
    assert len(list(processes)) == len(list(StreamDataLoader(CASE.dataset())))
    answers = multiprocessing.get_context("fork").Queue()

    def count():
        answers.put(len(list(loader)))
        iterator.close()

    child = multiprocessing.get_context("fork").Process(target=count)
    child.start()
    assert answers.get(timeout=PATIENCE) > 5
    child.join()
    assert child.exitcode == 0
    assert len(list(iterator)) > 5
    answers.close()
    answers.join_thread()


@pytest.mark.slow
def test_a_program_ends_with_threads_at_work():
    code = """
        import time
        from stream_dataloader import StreamDataLoader, StreamDataset
        def read(n):
            for i in range(1000):
                yield i
        for keep in (False, True):
            dataset = StreamDataset(range(4), read, 4, time_steps=2)
            loader = StreamDataLoader(dataset, 2, worker_method="thread", persistent_workers=keep)
            iterator = iter(loader)
            print(next(iterator).data.shape[0])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], timeout=PATIENCE, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n2\n", "")


# What goes wrong


def told(**options):
    """What a loader says of an error, and after how many batches."""
    found = []
    try:
        for batch in StreamDataLoader(num_workers=2, **options):
            found.append(batch.step)
    except StreamError as error:
        return len(found), type(error), str(error), error.source_index, error.position, error.lane, error.worker_id


@pytest.mark.parametrize(
    ("read", "kind"),
    [
        (failing((2, 5), Broken, "what"), ReadError),
        (failing((3, 0), Broken, "what"), OpenError),
        (odd, ItemError),
        (lambda n: [0, 1] if n else ["a"], ItemError),
        (lambda n: n, OpenError),
    ],
)
def test_errors_come_at_their_own_step_with_the_same_text(read, kind):
    def dataset():
        return StreamDataset(range(4), read, 4, time_steps=1)

    by_processes, by_thread = told(dataset=dataset()), told(dataset=dataset(), **THREADS)
    assert by_thread == by_processes
    assert issubclass(by_thread[1], kind) or kind is OpenError


@pytest.mark.filterwarnings("ignore:skipped the rest")
def test_broken_streams_are_skipped_as_by_processes():
    def read(**options):
        dataset = StreamDataset(range(7), failing((2, 5), Broken, "what"), 3, time_steps=2, on_error="skip")
        loader = StreamDataLoader(dataset, 2, **options)
        return [key(batch) for batch in loader], [str(failure) for failure in loader.failures]

    assert read(**THREADS) == read()


@pytest.mark.parametrize("prefetch_factor", [1, 5])
@pytest.mark.parametrize("place", ["reading", "opening"])
@pytest.mark.parametrize("keep", [False, True])
def test_a_stream_that_exits_is_named_at_its_own_step(place, keep, prefetch_factor):
    exits = [True]

    def read(n):
        if n == 5 and place == "opening" and exits:
            sys.exit(3)
        for i in range(4):
            time.sleep(0.001 * (n == 1))  # the other worker is ahead
            if (n, i) == (5, 2) and exits:
                sys.exit(3)
            yield i

    dataset = StreamDataset([1, 2, 3, 5], read, 2, time_steps=1, lookahead=0)
    loader = by_threads(dataset, 2, persistent_workers=keep, prefetch_factor=prefetch_factor)
    steps = []
    with pytest.raises(WorkerDeathError, match=rf"r \d \(a thread\) exited with status 3 .*{place} source 3 \(5\)"):
        steps.extend(batch.step for batch in loader)
    assert len(steps) == (4 if place == "opening" else 6)
    exits.clear()
    assert len(list(loader)) == 8, "the next epoch is read as ever"


def test_what_is_no_exception_is_told():
    dataset = StreamDataset([1, 2], failing((2, 3), KeyboardInterrupt), 2, time_steps=1)
    with pytest.raises(
        WorkerDeathError, match=r"worker 1 \(a thread\) was ended by KeyboardInterrupt\(\) in lane 1, st"
    ):
        list(by_threads(dataset, 2))


def test_an_error_in_a_policy_or_in_worker_init_fn_is_raised_as_it_is():
    def policy(failure):
        raise Broken("of the policy")

    dataset = StreamDataset([1, 2], failing((2, 3), Broken, "what"), 2, time_steps=1, on_error=policy)
    with pytest.raises(Broken, match="of the policy"):
        list(by_threads(dataset, 2))

    def init(worker):
        if worker == 1 and broken:
            raise Broken("of the start")

    broken = [True]
    loader = by_threads(CASE.dataset(), 2, worker_init_fn=init, persistent_workers=True)
    with pytest.raises(Broken, match="of the start"):
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
                if (n, i) == self.at:
                    self.hangs.set()
                    self.go_on.wait(PATIENCE)
                yield n * 100 + i
        finally:
            self.closed.append(n)

    def let_go(self):
        self.go_on.set()
        while workers_alive():
            time.sleep(0.001)


@pytest.mark.parametrize("keep", [False, True])
def test_a_timeout_is_an_error_and_the_thread_is_left_alone(keep):
    hanging = Hanging((3, 5))
    loader = by_threads(StreamDataset(range(4), hanging, 4, time_steps=1), 2, timeout=0.2, persistent_workers=keep)
    steps = []
    with pytest.raises(WorkerTimeoutError, match=r"within 0.2 s, at step 5: worker 1 is in lane 3, step 5, reading s"):
        steps.extend(batch.step for batch in loader)
    assert steps == list(range(5))
    assert sorted(hanging.closed) == [0, 1]
    hanging.at = None
    assert len(list(loader)) == 9, "other threads read the next epoch"
    del loader
    hanging.let_go()
    assert sorted(hanging.closed) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_timeout_does_not_count_while_something_moves():
    def slow(n):
        time.sleep(0.4)
        yield n

    dataset = StreamDataset(range(4), slow, 4, time_steps=1)
    assert len(list(by_threads(dataset, 1, timeout=1))) == 1


def test_a_timeout_does_not_count_while_threads_start(monkeypatch):
    given = {"timeout": 0.05, "worker_init_fn": lambda _: time.sleep(0.3)}
    assert len(list(by_threads(StreamDataset([2], range, 1, time_steps=1), 1, **given))) == 2
    monkeypatch.setattr(thread_feed, "LONGEST_START_SECONDS", 0)
    loader = by_threads(StreamDataset([2], range, 1, time_steps=1), 1, **given)
    with pytest.raises(WorkerTimeoutError, match=r"at step 0: worker 0 has not started \(worker_init_fn\)"):
        list(loader)
    while workers_alive():
        time.sleep(0.001)


@pytest.mark.parametrize("keep", [False, True])
def test_a_thread_that_hangs_is_left_alone_with_a_warning(keep, monkeypatch):
    monkeypatch.setattr(thread_feed, "_FAREWELL_SECONDS", 0.1)
    hanging = Hanging((3, 2))
    loader = by_threads(StreamDataset(range(4), hanging, 4, time_steps=1), 2, persistent_workers=keep)
    iterator = iter(loader)
    next(iterator)
    assert hanging.hangs.wait(PATIENCE)
    with pytest.warns(
        RuntimeWarning, match=r"worker 1 \(a thread\) is still in lane 3, step 2, reading source 3 \(3\)"
    ):
        iterator.close()
    del iterator, loader
    hanging.let_go()


def test_a_thread_left_alone_writes_to_memory_that_nobody_else_has(monkeypatch):
    monkeypatch.setattr(thread_feed, "_FAREWELL_SECONDS", 0.1)

    class Writing(Hanging):
        def __call__(self, n):
            return WritingStream(self, n)

    class WritingStream:
        def __init__(self, hanging, n):
            self.hanging, self.n, self.i = hanging, n, 0

        def __iter__(self):
            self.i = 1
            yield np.full(3, self.n)

        def read_into(self, out):
            if (self.n, self.i) == self.hanging.at:
                self.hanging.at = None
                self.hanging.hangs.set()
                self.hanging.go_on.wait(PATIENCE)
                out[:] = -77
                self.hanging.wrote.set()
            count = min(len(out), 40 - self.i)
            out[:count] = self.n
            self.i += count
            return count

    hanging = Writing((1, 2))
    hanging.wrote = threading.Event()
    loader = by_threads(StreamDataset([0, 1], hanging, 2, time_steps=1), 2)
    iterator = iter(loader)
    next(iterator)
    assert hanging.hangs.wait(PATIENCE)
    with pytest.warns(RuntimeWarning, match="is left alone"):
        iterator.close()
    found = []
    for batch in loader:
        hanging.go_on.set()
        assert hanging.wrote.wait(PATIENCE)
        found.append(batch.data.unique().tolist())
    assert found == [[0, 1]] * 40
    hanging.let_go()


INTERRUPTED = """
    import os, signal, sys, threading, time
    from stream_dataloader import StreamDataLoader, StreamDataset

    def read(n):
        while True:
            yield n
            time.sleep(0.01 if len(sys.argv) < 2 else 1000)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
    loader = StreamDataLoader(StreamDataset([0, 1, 2], read, 3, time_steps=1), 2, OPTIONS)
    for batch in loader:
        if batch.step == 0:
            threading.Timer(0.2, os.killpg, (0, signal.SIGINT)).start()
"""


@pytest.mark.parametrize("stuck", [pytest.param([], marks=pytest.mark.slow), ["stuck"]])
@pytest.mark.parametrize(
    "options", ['worker_method="thread"', pytest.param("threads_per_worker=2", marks=pytest.mark.slow)]
)
def test_ctrl_c_leaves_next_also_if_a_stream_hangs(options, stuck, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(INTERRUPTED).replace("OPTIONS", options))
    begin = time.monotonic()
    check_interrupted([sys.executable, script, *stuck])
    assert time.monotonic() - begin < FOREVER / 1000


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_restarts": 2}, 'max_restarts is 2, and worker_method="thread" has no workers that can die alone'),
        ({"multiprocessing_context": "fork"}, "multiprocessing_context is 'fork', and worker_method=.* no process"),
        ({"transport": "queue"}, 'transport is "queue", which is a way between processes'),
        ({"worker_method": "threads"}, "worker_method is 'threads', and must be one of 'process', 'thread'"),
    ],
)
def test_what_is_for_processes_is_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        StreamDataLoader(CASE.dataset(), 2, **(THREADS | options))


# What threads share


def drawing(n):
    info = get_stream_info()
    for position in range(6):
        time.sleep(0.0005)
        assert get_stream_info() is info
        assert info.source_index == n
        yield np.array([info.rng.integers(1 << 30), info.rng_at(position).integers(1 << 30)])


def test_random_draws_of_streams_are_the_same_in_any_thread():
    def read(**options):
        dataset = StreamDataset(range(12), drawing, 4, time_steps=2, seed=5)
        return [batch.data.tolist() for batch in StreamDataLoader(dataset, **options)]

    assert read(num_workers=4, **THREADS) == read()


def test_global_generators_and_settings_are_the_programs_own():
    """Threads neither seed nor set anything: what is global is one for all of them, and for the trainer."""

    def state():
        return (
            hash(tuple(torch.random.get_rng_state().tolist())),
            repr(np.random.get_state()),  # noqa: NPY002
            torch.get_num_threads(),
            cv2.getNumThreads(),
            dict(os.environ),
            os.getcwd(),
            signal.getsignal(signal.SIGINT),
            signal.getsignal(signal.SIGCHLD),
            sys.getswitchinterval(),
        )

    seen, before = queue.SimpleQueue(), state()

    def read(n):
        seen.put(torch.utils.data.get_worker_info())
        yield from range(5)

    list(by_threads(StreamDataset(range(6), read, 3, time_steps=2, seed=0), 3))
    assert state() == before
    assert {seen.get() for _ in range(6)} == {None}


def test_stats_count_each_thread():
    loader = by_threads(CASE.dataset(), 3)
    list(loader)
    stats = loader.stats()
    assert len(stats.workers) == 3
    assert sum(worker.items for worker in stats.workers) == sum(CASE.lengths)
    assert all(worker.steps > 1 for worker in stats.workers)


def test_a_garbage_collection_in_a_thread_may_close_an_iteration():
    """An iteration in a circle is collected wherever that is due, also in a thread that it would wait for."""
    collected = threading.Event()

    def read(n):
        for i in range(200):
            if dropped.is_set() and not collected.is_set():
                collected.set()
                gc.collect()
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
    while workers_alive():
        time.sleep(0.001)


@pytest.mark.parametrize(("owner", "name"), [(threads.ThreadPool, "start"), (threads._Thread, "start")])
def test_an_epoch_is_read_after_ctrl_c_in_the_midst_of_a_start(monkeypatch, owner, name):
    loader = StreamDataLoader(
        StreamDataset([9, 9], range, 2, time_steps=1), 2, worker_method="thread", persistent_workers=True
    )
    original, begun = getattr(owner, name), []

    def interrupted(*args, **options):
        begun.append(original(*args, **options))  # what has begun lives on, as in a notebook's traceback
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(iter(loader))
    assert begun
    assert len(list(loader)) == 9


class Uncopied(dict):
    """A window that holds a lock."""

    def __init__(self, values):
        super().__init__(values)
        self.lock = threading.Lock()


def uncopied(source):
    for step in range(2):
        yield Uncopied({"a": np.full(3, source * 10 + step), "b": "text"})


def test_a_window_that_cannot_be_copied_is_named():
    dataset = StreamDataset([4, 7], uncopied, 2)
    loader = StreamDataLoader(dataset, 2, collate_fn=list, worker_method="thread")
    with pytest.raises(ItemError, match=r"source 0 \(4\), item 0, lane 0, worker 0: the window, a Uncopied, cannot be"):
        next(iter(loader))
