"""All numbers of `stats()` and of the trace are those that the factory and the user of the batches count."""

import itertools
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from cases import cases, ways
from helpers import declared, loader_of, random_cases
from hypothesis import given
from hypothesis import strategies as st
from ledger import ITEM_BYTES, Counted, Ledger

from stream_dataloader import StreamDataLoader, StreamDataset


class Told(NamedTuple):
    """What is kept of a batch: all but its data, which would take up its slot."""

    batch_index: int
    source_index: torch.Tensor
    mask: torch.Tensor
    is_first: torch.Tensor


def numbers(events, kind):
    return [event.number for event in events if event.kind == kind]


def check_batches(stats, batches):
    """The loader's numbers, and those of the trainer's row."""
    assert stats.batches == len(batches)
    assert stats.items == sum((batch.source_index >= 0).sum().item() for batch in batches)
    assert stats.cells == sum(batch.mask.numel() for batch in batches)
    assert stats.bytes == ITEM_BYTES * stats.items
    assert numbers(stats.events, "batch") == [batch.batch_index for batch in batches]
    assert numbers(stats.events, "train") == [batch.batch_index - 1 for batch in batches]
    row = [event for event in stats.events if event.worker == -1]
    assert all(one.stop_ns <= other.start_ns for one, other in itertools.pairwise(row)), "they overlap"
    spans = sum(event.stop_ns - event.start_ns for event in row) / 1e9
    assert sum(e.stop_ns - e.start_ns for e in row if e.kind == "batch") / 1e9 <= stats.wait_seconds + 1e-9
    assert spans <= stats.seconds + 1e-9


def check_workers(stats, ledger, epochs, retried, workers):
    """The workers' numbers, and their rows of the trace: those of their threads in the factory."""
    opened = [event for event in ledger.of("open") if not event.name.endswith("+")]
    assert stats.opened + retried == len(opened)
    assert stats.retried == retried
    for number, worker in enumerate(stats.workers):
        here = [event for event in stats.events if event.worker == number]
        found = [event.number for event in here if event.kind == "step"]
        assert worker.steps == len(found)
        jumps = [pair for pair in itertools.pairwise(found) if pair[1] not in (0, pair[0] + 1)]
        assert (found[0], found.count(0), jumps) == (0, epochs, []), "each epoch's steps, one after the other"
        own = Counter(event.source for event in opened if event.worker == number)
        if not retried:
            assert Counter(numbers(here, "open") + numbers(here, "open ahead")) == own
            assert worker.opened == own.total()
            yielded = sum(event.what == "item" and event.worker == number for event in ledger.of("item"))
            assert worker.items <= yielded <= worker.items + worker.opened, "all but first items that were taken ahead"
        assert worker.retried <= retried
    if not workers:
        assert stats.sent == 0
    return opened


@random_cases(1_000, 20)
@given(
    cases(max_streams=12, max_length=6, max_lanes=4),
    ways(),
    st.integers(0, 3),
    st.sampled_from([None, "skip", "retry"]),
    st.booleans(),
)
@pytest.mark.filterwarnings("ignore:num_workers is", "ignore:skipped the rest of a stream:RuntimeWarning")
def test_numbers_are_the_factorys_own(case, way, apart, fault, messages):
    case.mark_ends = False  # which takes an item ahead
    broken = {} if fault is None else {0: (case.lengths[0] // 2, 1 if fault == "retry" else 99)}
    retries = 1 if fault == "retry" else 0
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder) / "ledger")
        dataset = case.dataset(open_stream=Counted(ledger, broken), on_error="skip", retries=retries)
        in_processes = "num_workers" in way and "worker_method" not in way
        loader = loader_of(dataset, messages=messages and in_processes, **way)
        batches, before = [], None
        for _ in range(2):
            for batch in loader:
                batches.append(Told(batch.batch_index, batch.source_index, batch.mask, batch.is_first))
                if len(batches) == apart:
                    before = loader.stats()
        stats = loader.stats()
        check_batches(stats, batches)
        raised = {event.source for event in ledger.of("raise")}
        retried = len(ledger.of("raise")) if fault == "retry" else 0
        opened = check_workers(stats, ledger, 2, retried, loader.num_workers)
        assert stats.skipped == (2 * len(raised) if fault == "skip" and case.padding_mode == "zeros" else stats.skipped)
        assert stats.restarts == stats.copies == 0
        if min(case.lengths) and not broken:
            assert stats.begun == sum(batch.is_first.sum().item() for batch in batches) <= len(opened)
        if in_processes and messages:
            assert stats.sent == sum(worker.steps for worker in stats.workers)
        if before is not None:
            since = stats - before
            assert since.batches == len(batches) - apart
            assert numbers(since.events, "batch") == [batch.batch_index for batch in batches[apart:]]
            assert [one.items for one in since.workers] == [
                now.items - then.items for now, then in zip(stats.workers, before.workers, strict=True)
            ]


def test_what_is_opened_ahead_is_told_so():
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder) / "ledger")
        case_sources = [(number, 5) for number in range(30)]
        dataset = StreamDataset(case_sources, declared(Counted(ledger)), 2, time_steps=2, lookahead=2)
        loader = StreamDataLoader(dataset, 1, worker_method="thread")
        for _ in loader:
            pass
        stats = loader.stats()
        threads = {}
        for event in ledger.of("item"):
            threads.setdefault(event.name.rstrip("+"), []).append(event.thread)
        opened = {event.name: event for event in ledger.of("open") if not event.name.endswith("+")}
        ahead = [opened[name].source for name, seen in threads.items() if seen[-1] != opened[name].thread]
        assert sorted(numbers(stats.events, "open ahead")) == sorted(ahead)
        assert ahead, "nothing was opened ahead"
        assert sum(worker.opening_ahead_seconds for worker in stats.workers) > 0


def test_each_retry_counts_also_of_what_is_opened_ahead(ledger):
    sources, broken = [(number, 5) for number in range(10)], (4, 5, 6)
    counted = Counted(ledger, dict.fromkeys(broken, (0, 2)))
    dataset = StreamDataset(sources, declared(counted), 2, time_steps=2, lookahead=2, retries=2)
    loader = StreamDataLoader(dataset, 1, worker_method="thread")
    for _ in loader:
        time.sleep(0.002)  # so that some are opened meanwhile
    stats = loader.stats()
    assert stats.retried == len(ledger.of("raise")) == 2 * len(broken)
    assert not {*broken}.isdisjoint(numbers(stats.events, "open ahead"))
