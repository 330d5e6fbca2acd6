"""Whoever reads, processes, threads, or threads of processes: the same batches, parts, failures and errors."""

import asyncio
import itertools
import json
import math
import multiprocessing
import os
import sys
import threading
import time
from collections import Counter

import numpy as np
import pytest
import torch
from cases import cases, keys, ways
from helpers import START_METHODS, make_loader, random_cases
from hypothesis import given
from hypothesis import strategies as st
from kinds_of_loaders import KINDS, plain
from worker_streams import ITEMS, Broken, acting, few, odd, raising, waiting

from stream_dataloader import StreamDataLoader, StreamDataset, errors, get_stream_info
from stream_dataloader._engine.workers import session

pytestmark = pytest.mark.filterwarnings("ignore:num_workers is")

PROCESSES = {"num_workers": 2}
WAYS = {
    "threads": {"num_workers": 2, "worker_method": "thread"},
}
ALL = WAYS | {"processes": PROCESSES}


@pytest.mark.one_of_each
@pytest.mark.parametrize("way", [PROCESSES, WAYS["threads"]], ids=str)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "sampler" not in kind])
def test_batches_of_every_kind_of_loader_do_not_depend_on_who_reads(kind, way):
    def read(**options):
        loader = KINDS[kind](**options)
        return [plain(batch) for _ in range(2) for batch in itertools.islice(loader, 9)]

    assert read(**way) == read()


@pytest.mark.parametrize("method", START_METHODS)
@pytest.mark.parametrize("kind", ["sections", "mixed, repeated", "side by side"])
def test_nor_on_how_processes_start(kind, method):
    found = KINDS[kind](num_workers=2, multiprocessing_context=method)
    expected = KINDS[kind]()
    assert [plain(batch) for batch in found] == [plain(batch) for batch in expected]


@pytest.mark.one_of_each
@pytest.mark.parametrize("taken", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_loader_goes_on_from_its_state(kind, taken):
    def read(loader, count):
        """The next batches, over as many epochs as they take."""
        return [
            plain(batch) for batch in itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), count)
        ]

    loader, other = KINDS[kind](), KINDS[kind]()
    read(loader, taken)
    other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    for number, batches in enumerate(zip(read(other, 4), read(KINDS[kind](), taken + 4)[taken:], strict=True), taken):
        assert batches[0] == batches[1], f"batch {number}"


@random_cases(800, 12)
@given(cases(max_streams=14), st.lists(ways(), min_size=2, max_size=4), st.data())
def test_any_place_is_resumed_in_another_way_by_another_number(case, legs, data):
    expected = keys(StreamDataLoader(case.dataset()), seeds=True)
    found, state = [], None
    for last, options in enumerate(legs, 1 - len(legs)):
        loader = StreamDataLoader(case.dataset(), **options)
        if state is not None:
            loader.load_state_dict(state)
        iterator = iter(loader)
        found += keys(itertools.islice(iterator, data.draw(st.integers(0, 4)) if last else None), seeds=True)
        state = json.loads(json.dumps(loader.state_dict()))
        iterator.close()
        if len(found) == len(expected):
            break
    assert found == expected


WINDOWS = {
    "window": lambda n, i: np.full((1 + n % 3, 2), n + i),
    "window of objects": lambda n, i: {"name": ["a"] * (1 + n % 2), "n": [i] * (1 + n % 2)},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("collate_fn", [None, list])
@pytest.mark.parametrize("kind", [*ITEMS, *WINDOWS])
def test_all_kinds_of_items_come_as_without_workers(kind, collate_fn, way):
    def stream(n):
        for i in range(n):
            yield (ITEMS | WINDOWS)[kind](n, i)

    def read(**options):
        cut = {"windows": "given"} if kind in WINDOWS else {"time_steps": 2}
        dataset = StreamDataset([5, 2, 3, 4, 1, 2], stream, 4, seed=5, **cut)
        loader = StreamDataLoader(dataset, collate_fn=collate_fn, **options)
        return [repr(getattr(batch, "data", batch)) for batch in loader]

    expected = read()
    assert read(**WAYS[way]) == expected


#: What breaks, and how.
BREAKING = {
    "reading": (acting({(2, 5): raising(Broken, "what")}), errors.ReadError),
    "opening": (acting({(3, 0): raising(Broken, "what")}), errors.ReadError),
    "no stream": (lambda n: n, errors.OpenError),
    "one shape": (odd, errors.ItemError),
    "one kind": (lambda n: [0, 1] if n else ["a"], errors.ItemError),
    "cannot be sent": (lambda n: iter([lambda: n]) if n == 2 else iter([n]), errors.ItemError),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("what", BREAKING)
@pytest.mark.filterwarnings("ignore:skipped the rest")
def test_errors_come_at_their_own_step_with_the_same_text(what, way):
    if (what, way) == ("cannot be sent", "threads"):
        return  # which send nothing
    read, kind = BREAKING[what]

    def told(options):
        steps, dataset = [], StreamDataset(range(6), read, 6, time_steps=1)
        with pytest.raises(kind) as error:
            steps.extend(batch.batch_index for batch in StreamDataLoader(dataset, **options))
        dataset = StreamDataset(range(6), read, 3, time_steps=2, on_error="skip")
        skipping = StreamDataLoader(dataset, **options)
        left = [] if kind is errors.ItemError else keys(skipping)
        failures = [str(failure) for failure in skipping.failures]
        return steps, type(error.value), str(error.value), vars(error.value), left, failures

    assert told(WAYS[way]) == told(PROCESSES)


# What goes wrong in a worker


@pytest.mark.one_of_each
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(("place", "position"), [("opening", 0), ("reading", 2)])
@pytest.mark.parametrize("way", ["processes", "threads"])
def test_a_stream_that_exits_is_named(way, place, position, keep, tmp_path):
    acts = {(1, 1): lambda: time.sleep(0.01)}  # the other worker is ahead
    acts[3, position] = few(tmp_path / "exits", lambda: sys.exit(3))
    dataset = StreamDataset(range(4), acting(acts, 4), 2, time_steps=1, lookahead=int(keep))
    loader = StreamDataLoader(dataset, persistent_workers=keep, **ALL[way])
    steps = []
    with pytest.raises(
        errors.WorkerDeathError, match=rf"worker 1.* exited with status 3 .*{place} source 3 \(3\)"
    ) as error:
        steps.extend(batch.batch_index for batch in loader)
    assert "memory" not in str(error.value)
    assert len(steps) == 4 + position if way == "threads" else len(steps) <= 4 + position
    assert len(list(loader)) == 8, "the next epoch is read as ever"


@pytest.mark.parametrize("way", ALL)
def test_an_error_in_a_policy_names_the_stream_though_other_streams_are_slow(way):
    def policy(failure):
        raise Broken("of the policy")

    read = acting({(1, 3): raising(ValueError), (0, 3): lambda: time.sleep(0.1)})
    loader = make_loader([0, 1], read, 2, time_steps=1, on_error=policy, persistent_workers=True, **ALL[way])
    for _ in range(2):
        with pytest.raises(errors.ReadError, match=r"on_error raised Broken\('of the policy'\).*source 1 .*item 3"):
            list(loader)


def test_a_thread_that_exits_keeps_no_other_from_the_steps_before(tmp_path):
    """Lane 0 waits for lane 2, which is slow, to draw its next source, while that of lane 1 has exited."""

    def leave():
        (tmp_path / "left").touch()
        sys.exit(3)

    def wait():
        waiting(tmp_path / "left")()
        time.sleep(0.1)  # for the thread that failed to come to its next order

    def read(n):
        return itertools.islice(stream(n), 2 if n == 0 else None)

    stream = acting({(2, 1): wait, (1, 2): leave})
    threads = ALL["threads"] | {"num_workers": 3, "timeout": 20}
    loader, steps = make_loader(range(4), read, 3, time_steps=1, lookahead=0, **threads), []
    with pytest.raises(errors.WorkerDeathError, match=r"exited with status 3 .*source 1"):
        steps.extend(batch.source_index.tolist() for batch in loader)
    assert steps == [[[0, 1, 2]]] * 2


class SlowToSend:
    """An item that takes a while to pickle, during which its worker is in no step."""

    def __reduce__(self):
        time.sleep(0.3)
        return int, (0,)


def test_a_timeout_does_not_count_while_the_trainer_works(monkeypatch):
    monkeypatch.setattr(session, "_LOOK_SECONDS", 0.1)
    loader = make_loader(
        [2], lambda _: iter([SlowToSend() for _ in range(4)]), 1, time_steps=1, num_workers=1, timeout=1
    )
    for batch in loader:
        if batch.batch_index == 0:
            time.sleep(1)
    assert batch.batch_index == 3


@pytest.mark.parametrize(("method", "seconds"), [("process", 1), ("thread", 0.2)])
def test_a_timeout_does_not_count_while_workers_start(method, seconds, monkeypatch, tmp_path):
    def loader(init):
        dataset = StreamDataset([2], range, 1, time_steps=1)
        return StreamDataLoader(dataset, 1, timeout=seconds, worker_method=method, worker_init_fn=init)

    assert len(list(loader(lambda _: time.sleep((1.5 if method == "process" else 4) * seconds)))) == 2
    monkeypatch.setattr(session, "LONGEST_START_SECONDS", 0)
    with pytest.raises(errors.WorkerTimeoutError, match="at step 0: worker 0 has not started"):
        list(loader(lambda _: waiting(tmp_path / "go on")()))
    (tmp_path / "go on").touch()


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("way", ALL)
@pytest.mark.usefixtures("two_cores")
def test_worker_init_fn_runs_once_in_each_worker(way, keep, tmp_path):
    def init(worker):
        with open(tmp_path / f"{worker} {os.getpid()}", "a") as file:
            file.write(f"{threading.get_ident()} ")

    def read(n):
        (begun,) = tmp_path.glob(f"{get_stream_info().worker_id} {os.getpid()}")
        assert way != "threads" or str(threading.get_ident()) in begun.read_text().split()
        yield get_stream_info().worker_id, 1 if way == "threads" else torch.get_num_threads()

    loader = make_loader(range(4), read, 4, time_steps=1, worker_init_fn=init, persistent_workers=keep, **ALL[way])
    workers = [0, 0, 1, 1]
    for _ in range(3):
        (batch,) = loader
        numbers, cores = batch.data
        assert (numbers[0].tolist(), cores[0].tolist()) == (workers, [1] * 4)
    begun = [path.name.split()[0] for path in tmp_path.iterdir() for _ in path.read_text().split()]
    assert sorted(begun) == ["0", "1"] if keep else ["0"] * 3 + ["1"] * 3


class Awkward(Exception):
    """Its constructor takes other arguments than those that pickle passes."""

    def __init__(self, code):
        super().__init__(code, "two")


class Locked(Exception):
    def __init__(self):
        super().__init__("locked")
        self.lock = threading.Lock()


class Bewildered(Exception):
    def __getattr__(self, name):
        raise KeyError(name)


#: Errors that would be lost on their way, and a part of the message.
LOST = {
    "no more items": (lambda: next(iter(())), r"StopIteration\(\); a next\(\) inside"),
    "awkward": (raising(Awkward, 1), "1, 'two'"),
    "locked": (raising(Locked), "locked"),
}


@pytest.mark.parametrize("way", ALL)
@pytest.mark.parametrize("kind", LOST)
def test_an_error_in_worker_init_fn_is_neither_lost_nor_an_end(kind, way):
    act, told = LOST[kind]
    loader = make_loader([1, 2], range, 2, time_steps=1, worker_init_fn=lambda _: act(), **ALL[way])
    with pytest.raises(Exception, match=told) as found:
        list(loader)
    text = errors.format_traceback(found.value)
    assert way == "threads" or "RemoteTraceback" in text, "the traceback of the worker"


def in_a_process(n):
    with multiprocessing.get_context("fork").Pool(1) as pool:
        yield from pool.map(abs, range(-n, 0))


def test_a_stream_that_starts_a_process_in_a_worker_is_told_the_way():
    dataset = StreamDataset([3, 2], in_a_process, 1, time_steps=5)
    with pytest.raises(errors.ReadError, match=r'source 0 \(3\), item 0, .*daemonic.*worker_method="thread"'):
        list(StreamDataLoader(dataset, 1, multiprocessing_context="fork"))
    batches = list(StreamDataLoader(dataset, 1, worker_method="thread"))
    assert [batch.data[batch.mask].tolist() for batch in batches] == [[3, 2, 1], [2, 1]]


@pytest.mark.parametrize("way", ALL)
def test_an_error_whose_attributes_raise_names_the_stream(way):
    loader = make_loader([0, 1], acting({(1, 2): raising(Bewildered, "lost")}), 2, time_steps=1, **ALL[way])
    with pytest.raises(errors.ReadError, match=r"source 1 .*item 2, .*Bewildered\('lost'\)"):
        list(loader)


@pytest.mark.parametrize("kind", [GeneratorExit, asyncio.CancelledError, type("Odd", (BaseException,), {})])
def test_what_ends_a_worker_and_is_no_exception_is_named(kind):
    loader = make_loader([0, 1], acting({(1, 2): raising(kind)}), 2, time_steps=1, **ALL["processes"])
    name = "a BaseException" if kind.__name__ == "Odd" else kind.__name__
    with pytest.raises(
        errors.WorkerDeathError, match=rf"reading source 1 .*A stream raised {name}, which ends a worker"
    ):
        list(loader)


@pytest.mark.parametrize("way", ["processes", "threads"])
def test_a_wait_says_whom_it_is_for(way, monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(session, "REPORT_SECONDS", 0.02)
    monkeypatch.setattr(session, "_LOOK_SECONDS", 0.01)
    read, begun = acting({(3, 2): waiting(tmp_path / "go on")}), time.monotonic()

    def told():
        return "worker 1 is in lane 3" in caplog.text

    def go_on():  # the first records may be of workers that have not started yet
        until = time.monotonic() + 30
        while not told() and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.4)
        (tmp_path / "go on").touch()

    thread = threading.Thread(target=go_on)
    thread.start()
    assert len(list(StreamDataLoader(StreamDataset(range(4), read, 4, time_steps=1), **ALL[way]))) == 9
    thread.join()
    assert told(), caplog.text
    waits = Counter(record.args[1] for record in caplog.records if record.msg.startswith("waited"))
    most = 2 * (1 + math.log2((time.monotonic() - begun) / 0.02))  # of two workers' parts
    assert max(waits.values()) <= most, "each further report comes after twice the time"


@pytest.mark.parametrize(
    ("method", "position", "hint"), [("fork", 0, True), ("fork", 3, False), ("forkserver", 0, False)]
)
def test_a_wait_for_the_first_step_after_a_fork_names_other_methods(method, position, hint, tmp_path):
    dataset = StreamDataset(range(2), acting({(1, position): waiting(tmp_path / "never")}), 2, time_steps=1)
    loader = StreamDataLoader(dataset, 2, timeout=0.5, multiprocessing_context=method)
    with pytest.raises(errors.WorkerTimeoutError) as told:
        list(loader)
    assert ('multiprocessing_context="forkserver"' in str(told.value)) is hint
