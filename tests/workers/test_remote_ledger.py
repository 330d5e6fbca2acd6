"""Requests for sources that a thread of the loader decides, for workers that share no memory, without Ray."""

import threading

import pytest
from cases import cases, key, keys
from helpers import random_cases
from hypothesis import given
from hypothesis import strategies as st

from stream_dataloader import StreamDataLoader
from stream_dataloader._engine.reading.plan import NO_RECOVERY
from stream_dataloader._engine.remote import ledger
from stream_dataloader._engine.workers.channel import Begin


class RowsByLedger:
    """In place of the rows that threads share: the ledger of another machine, without a network."""

    def __init__(self):
        self._turn, self._reading, self._queues = threading.Lock(), None, {}
        self._ledger = ledger.RemoteLedger(lambda begin: self._reading)

    def enter(self, reading, session, place, closed, *, gives_up):
        def tell(numbers):
            with self._turn:
                for worker, decisions in self._ledger.take(place, numbers).items():
                    self._queues[worker].hear(decisions)

        with self._turn:
            self._reading = reading
            self._ledger.begin(Begin(session, reading.place, False, NO_RECOVERY, 0, 0))
            lanes, draws = reading.readers[place].lanes, reading.draws()
            self._queues[place] = ledger.RemoteQueue(tell, session, lanes, reading.order(), draws, closed)
        return self._queues[place]


@pytest.fixture(autouse=True)
def _tells_each_time(monkeypatch):
    monkeypatch.setattr(ledger, "_LEAST_SECONDS", 0)  # a thread does not tell before it waits for credit


def decided_by_ledger(case, workers, rows):
    loader = StreamDataLoader(case.dataset(), min(workers, case.lanes), worker_method="thread", persistent_workers=True)
    loader._starter.pool._rows = rows
    return loader


@random_cases(300, 12)
@given(case=cases(min_lanes=2, max_lanes=6, max_streams=12), workers=st.integers(2, 4), cut=st.integers(1, 5))
def test_the_batches_are_those_of_one_reader_epoch_after_epoch(case, workers, cut):
    alone = StreamDataLoader(case.dataset())
    loader = decided_by_ledger(case, workers, RowsByLedger())
    try:
        for one, other in zip(loader, alone, strict=False):
            assert key(one) == key(other)
            if one.batch_index == cut:
                break
        assert keys(loader) == keys(alone)  # the rest of it, or the next epoch
    finally:
        loader._stop_workers()
