"""What a signal's handler raises arrives in the user's code, wherever the loader was hit."""

import contextlib
import gc
import itertools
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from helpers import FULL, PATIENCE, ROOT, SHARE, soon, times

import stream_dataloader
from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader._engine.loader import collector
from stream_dataloader._engine.memory import endings
from stream_dataloader._engine.memory.shared_memory import BLOCKS

LIBRARY = str(Path(stream_dataloader.__file__).parent)

WAYS = {
    "0": {},
    "1": {"num_workers": 1},
    "2": {"num_workers": 2},
    "kept": {"num_workers": 2, "persistent_workers": True},
    "threads": {"num_workers": 2, "worker_method": "thread"},
    "kept threads": {"num_workers": 2, "worker_method": "thread", "persistent_workers": True, "timeout": 30},
    "forkserver": {"num_workers": 2, "multiprocessing_context": "forkserver"},
    "spawn": {"num_workers": 2, "multiprocessing_context": "spawn"},
}


class Arrived(BaseException):
    """Nothing that anybody handles."""


class Signals:
    """Sends this process a signal, whose handler raises, a while after it is asked for."""

    def __init__(self, number):
        self.number, self.handled = number, 0
        self.random = random.Random(number)
        self.before = signal.signal(number, self.handle)

    def handle(self, *_):
        self.handled += 1
        raise Arrived

    def survives(self, work, longest_seconds):
        """Whether what the handler raises comes here, from work that is done until it has run."""
        before = self.handled
        wait = self.random.random() ** 2 * longest_seconds
        sender = threading.Thread(target=lambda: (time.sleep(wait), signal.raise_signal(self.number)))
        try:
            sender.start()
            while self.handled == before:
                work()
        except Arrived:
            return True
        finally:
            sender.join()
        return False


@pytest.fixture(params=[signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)], ids=["SIGTERM", "SIGINT"])
def signals(request):
    gc.collect()  # what other tests left may have callbacks, in which Python throws away what is raised
    signals, callbacks = Signals(request.param), gc.callbacks[:]
    gc.callbacks.clear()  # these, too, and hypothesis has one
    yield signals
    gc.callbacks[:] = callbacks
    signal.signal(request.param, signals.before)


def loader_of(way="0"):
    def read(n):
        return iter(np.arange(n, n + 12))  # nothing of the user's runs where it goes

    return StreamDataLoader(StreamDataset(range(6), read, 3, time_steps=2), **WAYS[way])


def epochs_of(loader, draws):
    while True:
        works, leaves, held = draws.random() < 0.5, draws.random() < 0.5, []
        for batch in loader:
            held = [*held, batch][-draws.randrange(4) :]
            if works:
                sum(range(draws.randrange(3000)))
            loader.state_dict()
            if leaves and draws.random() < 0.2:
                break
        yield


@pytest.mark.parametrize("way", WAYS)
def test_no_signal_is_lost(way, signals):
    loader, draws, lost = loader_of(way), random.Random(0), 0
    slow = way in ("forkserver", "spawn")
    for _ in range(times(25, 2) if slow else times(250, 10)):
        epochs = epochs_of(loader, draws)
        lost += not signals.survives(epochs.__next__, 2.0 if slow else 0.05)
    assert lost == 0


@pytest.mark.one_of_each
@pytest.mark.filterwarnings("ignore:the iteration that continued")
@pytest.mark.parametrize("way", ["0", "2", "kept", "threads"])
@pytest.mark.parametrize("at", ["start", "close", "drop", "state"])
def test_none_is_lost_at_the_edges(way, at, signals):
    loader = loader_of(way)

    def work():
        iterator = iter(loader)
        if at != "drop":
            next(iterator, None)
        if at == "state":
            loader.load_state_dict(loader.state_dict())
        if at == "close":
            iterator.close()

    assert all(signals.survives(work, 0.03) for _ in range(times(60, 6)))


def interrupted(iterator, line, code=LIBRARY):
    """Whether a `next` was interrupted, before the given line of the library's code, or a file of it, that it runs."""
    lines = itertools.count()

    def trace(frame, event, _):
        if not frame.f_code.co_filename.startswith(code):
            return None
        if event == "line" and next(lines) == line:
            raise Arrived
        return trace

    sys.settrace(trace)
    try:
        next(iterator)
    except Arrived:
        return True
    finally:
        sys.settrace(None)
    return False


def test_a_state_may_be_saved_wherever_a_batch_was_interrupted():
    def data_of(loader):
        return [batch.data.tolist() for batch in loader]

    expected = data_of(loader_of())
    for line in itertools.count(step=round(1 / SHARE) if FULL else 8):
        broken, going_on = loader_of(), loader_of()
        iterator = iter(broken)
        next(iterator), next(iterator)
        if not interrupted(iterator, line):
            break
        going_on.load_state_dict(broken.state_dict())
        assert data_of(going_on) in (expected[2:], expected[3:]), f"before line {line}"
        assert data_of(broken) in (expected[2:], expected[3:], expected), f"before line {line}"
    assert line > 50


def test_kept_workers_read_on_wherever_the_begin_of_their_second_epoch_was_interrupted():
    expected = len(list(loader_of()))
    for line in itertools.count():
        loader = loader_of("kept threads")
        assert len(list(loader)) == expected
        if not interrupted(iter(loader), line, collector.__file__):
            break
        assert [batch.batch_index for batch in loader] == list(range(expected)), f"before line {line}"
    assert line > 20


def signalled(number, at, work, code):
    """Whether `work` runs so many lines of the given code; a signal is raised before the last of them."""
    lines = itertools.count()

    def trace(frame, event, _):
        if not frame.f_code.co_filename.startswith(code):
            return None
        if event == "line" and next(lines) == at:
            signal.raise_signal(number)
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(None)
    return next(lines) > at


def what_is_left():
    """How many descriptors of each kind are open, and what signals do.

    Files of small blocks are left out: the newest one lives as long as the process, and a full one as long as any block
    in it, such as those of loaders that other tests keep.
    """
    gc.collect()
    found = Counter(f"blocked: {number}" for number in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    found.update(f"{number!r}: {signal.getsignal(number)}" for number in signal.valid_signals())
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            target = os.readlink(link)
            found[re.sub(r"\d+", "*", target)] += BLOCKS not in target
    return found


@pytest.mark.parametrize(
    ("way", "code"),
    [("1", str(Path(multiprocessing.__file__).parent)), ("1", endings.__file__), ("threads", threading.__file__)],
    ids=["processes", "holds", "threads"],
)
def test_a_signal_anywhere_in_a_start_or_an_end_arrives_and_leaves_nothing(way, code, signals, request):
    def work():
        iterator = iter(loader_of(way))
        next(iterator)
        iterator.close()

    request.addfinalizer(lambda: signal.signal(signal.SIGURG, signal.SIG_DFL))
    signal.signal(signal.SIGURG, print)  # a handler that is replaced after, and restored after, the one that raises
    work()  # what is opened once for the whole program is open from here on
    before = what_is_left()

    def nothing_is_left():
        return what_is_left() <= before

    for line in itertools.count(step=round(1 / SHARE) if FULL else 17):
        handled, came = signals.handled, False
        try:
            reached = signalled(signals.number, line, work, code)
        except Arrived:
            reached = came = True
        if not reached:
            break
        assert came, f"the signal at line {line} was lost"
        assert signals.handled == handled + 1
        assert soon(nothing_is_left, 20), f"line {line} left {what_is_left() - before}"
    assert line > 100


@pytest.mark.parametrize("way", ["1", "kept"])
def test_a_handler_that_only_takes_note_disturbs_no_start(way):
    noted, expected = [], len(list(loader_of()))
    before = signal.signal(signal.SIGUSR1, lambda *_: noted.append(1))
    try:
        for milliseconds in range(8):
            sender = threading.Timer(milliseconds * 1e-3, signal.raise_signal, (signal.SIGUSR1,))
            sender.start()
            assert [batch.batch_index for batch in loader_of(way)] == list(range(expected))
            sender.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(noted) == 8


AT_THE_END = """
from stream_dataloader import StreamDataLoader, StreamDataset

def steps_of(**options):
    loader = StreamDataLoader(StreamDataset([range(9)] * 2, iter, 2, time_steps=2), 2, **options)
    held.append((loader, iter(loader)))
    return next(held[-1][1]).batch_index

held, keep, thread = [], {"persistent_workers": True}, {"worker_method": "thread"}
print([steps_of(**options) for options in ({}, keep, thread, thread | keep)])
"""


def test_what_goes_at_the_programs_end_goes_in_silence():
    command = [sys.executable, "-c", AT_THE_END]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "[0, 0, 0, 0]\n", "")
