"""How many calls of its own functions a batch takes: a layer that is added to the way of each batch shows here."""

import os
import sys

import numpy as np
import pytest

import stream_dataloader
from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader._engine.schedule.requests import Ledger
from stream_dataloader.streams import ArrayStream

PACKAGE = os.path.dirname(stream_dataloader.__file__)


def windows(length):
    for _ in range(length):
        yield np.ones((16, 8), np.float32)


def loader(workers):
    return StreamDataLoader(StreamDataset([60] * 4, windows, 2, windows="given"), workers)


def calls_of(function):
    """How many functions of the package are called, in this thread, and in how many files they are."""
    files = []

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            files.append(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return len(files), len(set(files))


@pytest.mark.parametrize(("workers", "most"), [(0, 58), (2, 33)])
def test_a_batch_in_the_middle_of_an_epoch(workers, most):
    batches = iter(loader(workers))
    for _ in range(10):
        next(batches)
    calls, _ = min(calls_of(lambda: next(batches)) for _ in range(9))  # one that brings no message of several batches
    assert calls <= most


def test_a_short_stream():
    sentences = [np.arange(25)] * 1000
    how = {"time_steps": 100, "windows": "packed", "padding_mode": "cycle"}
    batches = iter(StreamDataLoader(StreamDataset(sentences, ArrayStream(), 4, **how)))
    next(batches)
    calls, _ = calls_of(lambda: [next(batches) for _ in range(10)])
    assert calls / (10 * 4 * 4) <= 78


def test_the_first_batch():
    next(iter(loader(0)))  # what is made once a process
    batches = iter(loader(0))
    calls, files = calls_of(lambda: next(batches))
    assert calls <= 401
    assert files <= 48


def test_workers_that_share_short_streams_do_not_decide_on_each_by_itself(monkeypatch):
    calls, draw = [], Ledger.decide
    monkeypatch.setattr(Ledger, "decide", lambda *args: calls.append(draw(*args)))
    dataset = StreamDataset([1] * 2000, range, 4, time_steps=16, windows="packed", lookahead=16)
    steps = len(list(StreamDataLoader(dataset, 2, worker_method="thread")))
    assert len(calls) <= 6 * steps
