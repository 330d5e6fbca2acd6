"""Requests for sources that a thread of the loader decides, for workers that share no memory, without Ray."""

import socket
import threading

import pytest
from cases import cases, key, keys
from helpers import random_cases
from hypothesis import given
from hypothesis import strategies as st

from stream_dataloader import StreamDataLoader
from stream_dataloader._engine.reading.plan import NO_RECOVERY
from stream_dataloader._engine.remote import ledger
from stream_dataloader._engine.remote.frames import FrameSocket
from stream_dataloader._engine.workers.channel import Begin


def connected():
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return FrameSocket(one), FrameSocket(server.accept()[0])


class RowsByLedger:
    """In place of the rows that threads share: each reader has a connection to the ledger."""

    def __init__(self):
        self._turn, self._reading, self._session = threading.Lock(), None, 0
        self._ledger = ledger.LedgerThread(lambda begin: self._reading)
        self._rows, self._ends = {}, []

    def enter(self, reading, session, place, closed, *, gives_up):
        with self._turn:
            if session != self._session:
                self._session, self._reading = session, reading
                self._ledger.begin(Begin(session, reading.start, NO_RECOVERY, 0, 0))
            if place not in self._rows:
                here, there = connected()
                self._ledger.add(place, there)
                self._rows[place] = ledger.LedgerRows(here)
                self._ends.append(here)
        return self._rows[place].enter(reading, session, place, closed, gives_up=gives_up)

    def close(self):
        self._ledger.close()
        for end in self._ends:
            end.close()


@pytest.fixture(autouse=True)
def _tells_each_time(monkeypatch):
    monkeypatch.setattr(ledger, "_LEAST_SECONDS", 0)  # a thread does not tell before it waits for credit


def decided_by_ledger(case, workers, rows):
    loader = StreamDataLoader(case.dataset(), min(workers, case.lanes), worker_method="thread", persistent_workers=True)
    loader._starter.pool._rows = rows
    return loader


@random_cases(300, 15)
@given(case=cases(min_lanes=2, max_lanes=6, max_streams=12), workers=st.integers(2, 4), cut=st.integers(1, 5))
def test_the_batches_are_those_of_one_reader_epoch_after_epoch(case, workers, cut):
    alone = StreamDataLoader(case.dataset())
    rows = RowsByLedger()
    loader = decided_by_ledger(case, workers, rows)
    try:
        for one, other in zip(loader, alone, strict=False):
            assert key(one) == key(other)
            if one.batch_index == cut:
                break
        assert keys(loader) == keys(alone)  # the rest of it, or the next epoch
    finally:
        loader._stop_workers()
        rows.close()
