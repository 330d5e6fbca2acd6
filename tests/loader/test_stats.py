"""What a loader tells of itself: counts that add up, whoever reads."""

import dataclasses
import io
import itertools
import json
import multiprocessing
import re
import threading
import time

import numpy as np
import pytest
from worker_streams import acting, few, kill_self, waiting

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.errors import WorkerError
from stream_dataloader.stats import LoaderStats

LENGTHS = [5, 0, 12, 7, 3, 9, 1, 30]


def open_slowly(length):
    time.sleep(0.01)
    for i in range(length):
        yield np.full((4, 2), i, np.float32)


def loader_of(workers=0, lanes=3, time_steps=4, open_stream=open_slowly, sources=LENGTHS, loader=None, **options):
    dataset = StreamDataset(sources, open_stream, lanes, time_steps=time_steps, **options)
    return StreamDataLoader(dataset, workers, **(loader or {}))


@pytest.mark.parametrize(
    ("workers", "options"),
    [(0, {}), (1, {}), (3, {}), (3, {"worker_method": "thread"})],
)
def test_counts_are_those_of_the_batches(workers, options):
    loader = loader_of(workers, loader=options)
    batches = [(batch.mask.sum().item(), batch.mask.numel()) for batch in loader]
    stats = loader.stats()
    assert stats.batches == len(batches)
    assert stats.items == sum(items for items, _ in batches) == sum(LENGTHS)
    assert stats.cells == sum(cells for _, cells in batches)
    assert stats.bytes == sum(LENGTHS) * 4 * 2 * 4
    assert stats.padding_share == pytest.approx(1 - stats.items / stats.cells)
    assert stats.opened == stats.begun == len(LENGTHS)
    assert workers or not stats.sent
    assert [worker.items > 0 for worker in stats.workers] == [True] * max(workers, 1)
    assert sum(worker.items for worker in stats.workers) == stats.items
    for what in ("opening", "reading"):
        assert sum(getattr(worker, f"{what}_seconds") for worker in stats.workers) > 0
    assert 0 < stats.wait_seconds <= stats.seconds


def test_what_happened_between_two_moments_is_their_difference():
    loader = loader_of(2)
    batches = iter(loader)
    next(batches)
    before = loader.stats()
    rest = len(list(batches))
    since = (now := loader.stats()) - before
    assert since.batches == rest
    assert since.items == sum(LENGTHS) - before.items
    read = [[worker.items for worker in stats.workers] for stats in (now, before, since)]
    assert np.array_equal(np.subtract(*read[:2]), read[2])
    assert all(event.stop_ns > max(event.stop_ns for event in before.events) for event in since.events)
    assert since.as_dict()["batches"] == rest
    json.dumps(since.as_dict())


def test_parts_and_collated_windows_are_counted_too():
    loader, collated = loader_of(2), loader_of(2, loader={"collate_fn": list})
    assert len(list(loader.parts())) > loader.stats().batches
    assert len(list(collated)) == collated.stats().batches
    assert loader.stats().items == collated.stats().items == sum(LENGTHS)


def test_what_is_skipped_and_retried_is_told():
    tries = []

    def read(number):
        for i in range(6):
            if (number, i) == (1, 3) or ((number, i) == (2, 2) and not tries):
                tries.append(number)
                raise OSError("broken")
            yield i

    loader = loader_of(open_stream=read, sources=[0, 2, 1], lanes=1, on_error="skip", retries=1)
    with pytest.warns(RuntimeWarning, match="skipped"):
        list(loader)
    stats = loader.stats()
    assert (stats.skipped, stats.retried, stats.restarts) == (1, 2, 0)
    endless = loader_of(open_stream=read, sources=[0, 1], lanes=1, padding_mode="cycle", on_error="skip")
    with pytest.warns(RuntimeWarning, match="skipped"):
        list(itertools.islice(endless, 20))
    assert endless.stats().skipped == 1 < len(endless.failures), "a source that is skipped in each pass counts once"


def test_batches_that_are_held_are_counted_as_copies():
    loader = loader_of(1, sources=[400, 400], lanes=2)
    held = list(loader)
    stats = loader.stats()
    assert stats.copies > 0
    in_memory = stats.copies + stats.slots_in_use
    assert abs(in_memory - len(held)) <= 1, "the first one may have been sent, and the next one's slot be claimed"
    assert stats.slots >= stats.slots_in_use > 0
    held.clear()
    assert loader.stats().slots_in_use < stats.slots_in_use


def test_advice_knows_how_far_workers_read_ahead():
    assert loader_of(2, loader={"prefetch_factor": 5}).stats().setup.prefetch_factor == 5


def test_a_table_tells_the_most_of_it():
    loader = loader_of(2)
    for _ in loader:
        assert str(loader.stats())
    text = str(loader.stats())
    assert "batches/s" in text
    assert "the trainer waited" in text
    assert [line.split()[0] for line in text.splitlines()[-2:]] == ["0", "1"]
    assert str(LoaderStats())


def test_a_trace_has_a_row_for_the_trainer_and_each_thread_of_a_worker(tmp_path):
    loader = loader_of(2, lanes=4)
    list(loader)
    stats = loader.stats()
    ahead = [event._replace(kind="open ahead") for event in stats.events if event.kind == "open"]
    dataclasses.replace(stats, events=[*stats.events, *ahead]).save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"trainer", "worker 0", "worker 1"} <= set(rows.values())
    assert len(rows) == len(set(rows.values())) == 1 + 2 * 2
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["tid"] for event in spans} <= set(rows)
    assert {"batch", "train", "step", "open", "open ahead"} <= {event["name"] for event in spans}
    assert all((event["name"] == "open ahead") == rows[event["tid"]].endswith(", ahead") for event in spans)
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans)
    opened = {event["args"]["source"] for event in spans if event["name"].startswith("open")}
    assert opened == set(range(len(LENGTHS)))


def test_a_trace_keeps_the_newest_events_of_a_long_run():
    loader = loader_of(sources=[9000], lanes=1, time_steps=1, open_stream=range)
    list(loader)
    steps = [event.number for event in loader.stats().events if event.kind == "step"]
    assert 0 < len(steps) < 9000
    assert steps == sorted(steps)
    assert steps[-1] == 9000


def test_counts_go_on_after_a_worker_died():
    loader = loader_of(2, sources=[40, 40, 40], loader={"max_restarts": 1})
    batches = iter(loader)
    found = [next(batches).mask.sum().item()]
    multiprocessing.active_children()[0].kill()
    found += [batch.mask.sum().item() for batch in batches]
    assert sum(found) == loader.stats().items == 120
    assert loader.stats().restarts in (0, 1)


@pytest.fixture(autouse=True)
def _no_monitor(monkeypatch):
    """tqdm has a thread that redraws bars which stand still."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)


@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_a_progress_bar_counts_batches_or_sources(lengths, capsys):
    expected = [batch.source_index.tolist() for batch in loader_of(2, lengths=lengths)]
    bar = io.StringIO()
    batches = loader_of(2, lengths=lengths).progress(disable=False, file=bar, mininterval=0, desc="train")
    assert [batch.source_index.tolist() for batch in batches] == expected
    last = bar.getvalue().split("\r")[-1]
    total = len(LENGTHS) if lengths is None else len(expected)
    assert "train: 100%" in last
    assert f"{total}/{total}" in last
    assert "items/s, padding" in last
    assert capsys.readouterr().err == ""


def test_a_progress_bar_is_quiet_where_there_is_no_terminal(capsys):
    assert len(list(loader_of(lengths=LENGTHS).progress())) == len(loader_of(lengths=LENGTHS))
    assert capsys.readouterr() == ("", "")


def test_a_progress_bar_of_an_endless_epoch_has_no_total():
    bar = io.StringIO()
    batches = loader_of(padding_mode="cycle").progress(disable=False, file=bar, mininterval=0)
    for _ in range(5):
        next(batches)
    batches.close()
    assert "batch" in bar.getvalue()


def bar_of(loader, **options):
    bar = io.StringIO()
    batches = loader.progress(disable=False, file=bar, mininterval=0, **options)
    next(batches)
    batches.close()
    return bar.getvalue()


ENDLESS = {"padding_mode": "cycle", "loader": {"batches_per_epoch": 9}}


@pytest.mark.parametrize("options", [{"lengths": LENGTHS}, ENDLESS], ids=str)
def test_the_bar_of_a_resumed_epoch_begins_where_that_stands(options):
    loader = loader_of(**options)
    whole = len(loader)
    for batch in loader:
        if batch.batch_index == 2:
            break
    loader.load_state_dict(loader.state_dict())
    assert f" 3/{whole} " in bar_of(loader)
    assert f" 0/{whole} " in bar_of(loader_of(**options))


@pytest.mark.one_of_each
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_the_bar_of_sources_of_a_resumed_epoch_begins_where_that_stands(workers, lookahead):
    sources = [2] * 40
    loader, ended = loader_of(workers, sources=sources, lookahead=lookahead), 0
    for batch in loader:
        ended += 3  # each lane reads a stream a batch
        if batch.batch_index == 5:
            break
    loader.load_state_dict(loader.state_dict())
    text = bar_of(loader)
    assert f" {ended - 3}/40 " in text.split("\r")[1]
    bar = io.StringIO()
    loader.load_state_dict(loader.state_dict())
    list(loader.progress(disable=False, file=bar, mininterval=0))
    counts = [int(count) for count in re.findall(r" (\d+)/40 ", bar.getvalue())]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (ended, 40)
    assert max(after - before for before, after in itertools.pairwise(counts)) <= 4
    assert " 0/40 " in bar_of(loader_of(workers, sources=sources))


@pytest.mark.parametrize(
    ("place", "environment", "draws"),
    [
        ({}, {}, True),
        ({"rank": 0, "world_size": 2}, {}, True),
        ({"rank": 1, "world_size": 2}, {}, False),
        ({}, {"TORCHELASTIC_RUN_ID": "none", "RANK": "1"}, False),
        ({}, {"TORCHELASTIC_RUN_ID": "none", "RANK": "0"}, True),
        ({}, {"RANK": "1"}, True),
    ],
)
def test_one_rank_draws_the_bar(place, environment, draws, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    bar = io.StringIO()
    bar.isatty = lambda: True
    list(loader_of(lengths=LENGTHS, loader=place).progress(file=bar, mininterval=0))
    assert bool(bar.getvalue()) == draws


@pytest.mark.parametrize("act", [(1, 3), (1, None)], ids=["reading", "opening"])
@pytest.mark.parametrize(("workers", "options"), [(0, {}), (1, {"worker_method": "thread"}), (1, {})])
def test_a_wait_counts_while_it_goes_on(workers, options, act, tmp_path):
    """All lanes wait for one; who asks meanwhile is another thread."""
    come, waits = tmp_path / "come", tmp_path / "waits"
    acts = {act: lambda: waits.touch() or waiting(come)()}
    loader = loader_of(workers, 1, 1, acting(acts, 8), range(2), options)
    reads = threading.Thread(target=list, args=(loader,))
    reads.start()
    try:
        waiting(waits)()
        before = loader.stats()
        time.sleep(0.2)
        since = loader.stats() - before
    finally:
        come.touch()
        reads.join()
    assert min(since.wait_seconds, since.seconds) > 0.15
    (worker,) = since.workers
    assert (worker.reading_seconds if act[1] else worker.opening_seconds) > 0.15
    assert min(worker.reading_seconds, worker.opening_seconds) < 0.05
    after = loader.stats()
    time.sleep(0.05)
    assert (loader.stats() - after).seconds == 0


def test_the_time_of_a_worker_that_was_killed_ends(tmp_path):
    """The next worker waits while it starts: what passes until then is no reading."""
    come, deaths = tmp_path / "come", tmp_path / "deaths"
    factory = acting({(0, 3): few(deaths, kill_self)}, 8)
    init = {"worker_init_fn": lambda _: deaths.exists() and waiting(come)()}
    loader = loader_of(1, 1, 1, factory, range(2), init)
    with pytest.raises(WorkerError):
        list(loader)
    before = loader.stats()
    time.sleep(0.3)
    (worker,) = (loader.stats() - before).workers
    assert worker.reading_seconds == 0, "between two epochs no time runs"
    reads = threading.Thread(target=list, args=(loader,))
    reads.start()
    try:
        while loader.stats().wait_seconds == before.wait_seconds:
            time.sleep(0.01)
        (worker,) = (loader.stats() - before).workers
    finally:
        come.touch()
        reads.join()
    assert worker.reading_seconds < 0.2


def test_streams_that_were_opened_ahead_are_counted():
    class Early:
        open_early = True

        def __call__(self, length):
            return range(length)

    loader = loader_of(1, 1, 2, Early(), [4] * 9, lookahead=3)
    list(loader)
    assert loader.stats().opened == 9
    assert any(event.kind == "open ahead" for event in loader.stats().events)
