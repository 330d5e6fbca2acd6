"""Streams that have nothing yet: those of users' code that say so, and those that `streams.live` reads in threads."""

import io
import itertools
import json
import logging
import pickle
import threading
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import make_loader, random_cases, soon
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from worker_streams import Broken, acting, few, kill_self, raising, waiting

from stream_dataloader import (
    StreamDataLoader,
    StreamDataset,
    get_stream_info,
    interleave,
    regroup,
    side_by_side,
    streams,
)
from stream_dataloader.errors import ItemError, ReadError, WorkerError
from stream_dataloader.recurrent import RecurrentState
from stream_dataloader.streams import NOTHING_YET, background

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

THREADS = {"num_workers": 2, "worker_method": "thread"}
KINDS = [{"num_workers": 0}, THREADS, {"num_workers": 1}, {"num_workers": 2}]


class Script:
    """A factory of numbers; before number i of source n it has nothing yet, `waits[n][i]` times."""

    def __init__(self, waits):
        self.waits = waits

    def __call__(self, n):
        for i, times in enumerate(self.waits[n]):
            for _ in range(times):
                yield NOTHING_YET
            if i < len(self.waits[n]) - 1:  # the last wait is before the end
                yield 100 * n + i


class Serial:
    """A plain loop over lanes: what each lane reads until its window is full, or it has nothing yet."""

    def __init__(self, waits, lanes, time_steps, windows):
        self.waits, self.time_steps, self.windows = waits, time_steps, windows
        self.left, self.at = list(range(len(waits))), [None] * lanes  # per lane: source, what it yields next

    def _open(self, n, behind=0):
        return list(itertools.dropwhile(lambda item: behind and item != 100 * n + behind - 1, Script(self.waits)(n)))

    def resume(self):
        """The streams are opened again at their places, and have nothing yet as often as at first."""
        for lane, at in enumerate(self.at):
            if at is not None:
                behind = len(self.waits[at[0]]) - 1 - sum(item is not NOTHING_YET for item in at[1])
                self.at[lane] = at[0], self._open(at[0], behind)[bool(behind) :]

    def _window(self, lane):
        window = []
        while len(window) < self.time_steps:
            if self.at[lane] is None:
                if not self.left or (window and self.windows == "aligned"):
                    return window, False
                source = self.left.pop(0)
                self.at[lane] = source, self._open(source)
            source, to_come = self.at[lane]
            if not to_come:
                self.at[lane] = None
                if window and self.windows == "aligned":
                    return window, False
                continue
            if (item := to_come.pop(0)) is NOTHING_YET:
                return window, True
            window.append((source, item - 100 * source))
        return window, False

    def next_batch(self):
        """The next batch with an item; None at the end."""
        while True:
            windows, late = zip(*map(self._window, range(len(self.at))), strict=True)
            if any(windows):
                return list(windows)
            if not any(late):
                return None


def cells(batch):
    """Each lane's items, as source and position, after a look at what else the batch has."""
    assert batch.mask.any(), "a batch without an item"
    assert torch.equal(batch.mask, batch.source_index >= 0)
    assert not (batch.mask[1:] & ~batch.mask[:-1]).any(), "what has not arrived is missing at a window's end only"
    assert torch.equal(batch.is_first, batch.mask & (batch.position == 0))
    assert torch.equal(batch.reset, batch.is_first[0])
    assert torch.equal(batch.data, (100 * batch.source_index + batch.position) * batch.mask)
    lanes = zip(batch.source_index.T.tolist(), batch.position.T.tolist(), strict=True)
    return [[cell for cell in zip(*lane, strict=True) if cell[0] >= 0] for lane in lanes]


WAITS = st.lists(st.lists(st.sampled_from([0, 0, 1, 3]), min_size=1, max_size=6), min_size=1, max_size=7)


@random_cases(2000, quick=50)
@given(st.data(), WAITS, st.integers(1, 3), st.integers(1, 3), st.sampled_from(["aligned", "packed"]))
def test_batches_are_those_of_a_plain_loop_also_after_a_resume(data, waits, lanes, time_steps, windows):
    model, state, count, found = Serial(waits, lanes, time_steps, windows), None, 0, []
    while True:
        options = {"time_steps": time_steps, "windows": windows, "deterministic": False, "lookahead": 0}
        loader = make_loader(range(len(waits)), Script(waits), lanes, **options)
        if state is not None:
            loader.load_state_dict(state)
            model.resume()
        batches = iter(loader)
        for _ in range(data.draw(st.integers(1, 6))):
            batch, expected = next(batches, None), model.next_batch()
            assert (batch and cells(batch)) == expected
            if batch is None:
                break
            assert batch.batch_index == count, "batches are counted without those that would have been empty"
            count += 1
            found += [cell for lane in cells(batch) for cell in lane]
        if batch is None:
            break
        state = json.loads(json.dumps(loader.state_dict()))
    assert sorted(found) == [(n, i) for n, times in enumerate(waits) for i in range(len(times) - 1)]


@random_cases(300, quick=10)
@given(
    WAITS, st.integers(1, 4), st.integers(1, 3), st.sampled_from(["zeros", "data", "drop"]), st.sampled_from(KINDS[:2])
)
def test_padding_modes_lose_and_double_nothing(waits, lanes, time_steps, mode, options):
    lanes = min(lanes, len(waits)) if mode == "drop" else lanes
    options = options | {"num_workers": min(options["num_workers"], lanes)}
    how = {"time_steps": time_steps, "padding_mode": mode, "deterministic": False}
    found = []
    for batch in make_loader(range(len(waits)), Script(waits), lanes, **how, **options):
        assert batch.mask.any()
        found += batch.data[batch.mask].tolist()
    every = [100 * n + i for n, times in enumerate(waits) for i in range(len(times) - 1)]
    assert len(found) == len(set(found))
    assert set(found) <= set(every)
    assert mode == "drop" or len(found) == len(every)


@pytest.mark.parametrize("options", KINDS)
def test_windows_have_no_gaps_whoever_waits_for_whom(options):
    """Workers read the first items of all lanes first while others wait for them."""
    waits = [[n % 3, 0, n % 2, 0, 0] for n in range(12)]
    batches = loader_of(range(12), 4, options, Script(waits), time_steps=3)
    assert read(batches) == [(n, i) for n in range(12) for i in range(4)]


def numbers(acts, items=20, seconds=0.0, **options):
    return streams.live(acting(acts, items), seconds, **options)


def loader_of(sources, lanes, options, factory, **others):
    return make_loader(sources, factory, lanes, **{"time_steps": 2, "deterministic": False} | options | others)


ALL = [(n, i) for n in range(4) for i in range(20)]


def read(batches):
    return sorted(cell for batch in batches for lane in cells(batch) for cell in lane)


@pytest.mark.parametrize("options", KINDS)
def test_nobody_is_held_up_by_a_stream_that_waits(options, tmp_path):
    """Source 0 has nothing from item 3 on, until three others were read to their ends."""
    come, found, counts = tmp_path / "come", [], RecurrentState(batch_dim=0)
    factory = numbers({(0, 3): waiting(come)})
    batches = iter(loader_of(range(4), 2, options, factory, time_steps=1))
    while len(found) < 3 + 60:
        found += (batch := next(batches)) and read([batch])
        count = batch.mask[0] + (0 if (before := counts.before(batch)) is None else before)
        counts.after(batch, count)
        assert (count[batch.mask[0]] == batch.position[batch.mask] + 1).all(), "the state is kept meanwhile"
        if len(found) == 3 + 60:
            state = json.loads(json.dumps(batch.state_dict()))
    come.touch()
    assert sorted([*found, *read(batches)]) == ALL
    again = loader_of(range(4), 2, options, numbers({}), time_steps=1)
    again.load_state_dict(state)
    assert sorted([*found, *read(again)]) == ALL


@pytest.mark.parametrize("options", KINDS)
def test_a_state_after_any_batch_goes_on_with_what_was_in_none(options):
    factory = numbers({(n, i): lambda: time.sleep(0.003) for n in range(4) for i in range(0, 20, n + 1)})
    found, states = [], []
    for batch in loader_of(range(4), 2, options, factory, time_steps=1):
        found.append(cells(batch))
        states.append(batch.state_dict())
    for step, again in ((0, options), (len(found) // 2, {"num_workers": 1}), (len(found) - 2, options)):
        before = [cell for batch in found[: step + 1] for lane in batch for cell in lane]
        rest = loader_of(range(4), 2, again, factory, time_steps=1)
        rest.load_state_dict(states[step])
        assert sorted([*before, *read(rest)]) == ALL


@pytest.mark.parametrize("options", KINDS)
def test_windows_for_a_collate_fn_windows_that_are_given_and_parts(options):
    slow = numbers({(n, i): lambda: time.sleep(0.003) for n in (1, 3) for i in range(20)})
    windows = list(loader_of(range(4), 2, options, slow, time_steps=3, fill_value=-1, collate_fn=list))
    items = [item for batch in windows for window in batch for item in window.tolist() if item >= 0]
    assert sorted(items) == [100 * n + i for n, i in ALL]
    assert sum(int(part.mask.sum()) for part in loader_of(range(4), 2, options, slow).parts()) == 80

    def pairs(n):
        for i in range(0, 20, 2):
            yield NOTHING_YET
            yield np.array([100 * n + i, 100 * n + i + 1])

    given_by_streams = {"time_steps": None, "windows": "given"}
    assert read(loader_of(range(4), 2, options, pairs, **given_by_streams)) == ALL
    yielded = loader_of(range(4), 2, options, pairs, **given_by_streams, collate_fn=list, fill_value=None)
    kept = [item for batch in yielded for window in batch if window is not None for item in window.tolist()]
    assert sorted(kept) == [100 * n + i for n, i in ALL]


def test_objects_and_ends_that_lengths_tell():
    words = loader_of(
        ["ab", "c"], 2, {}, lambda word: itertools.chain([NOTHING_YET], word, [NOTHING_YET]), lengths=[2, 1]
    )
    found = [batch for batch in words if batch.mask.any()]
    assert [letter for batch in found for row in batch.data for letter in row if letter] == ["a", "c", "b"]
    assert sum(int(batch.is_last.sum()) for batch in found) == 2


@pytest.mark.parametrize("options", KINDS)
def test_epochs_of_n_batches_of_streams_without_end(options):
    def endless(n):
        for i in itertools.count():
            yield from [NOTHING_YET] * ((n + i) % 3)
            yield i

    kept = {"persistent_workers": True} if options["num_workers"] else {}
    how = {"padding_mode": "cycle", "batches_per_epoch": 7, "time_steps": 1}
    loader = loader_of(range(3), 3, options | kept, endless, **how)
    found = [[], [], []]
    for _ in range(3):
        batches = list(loader)
        assert len(batches) == 7
        for batch in batches:
            for lane, position in enumerate(batch.position[0].tolist()):
                if position >= 0:
                    found[lane].append(position)
    assert found == [list(range(len(lane))) for lane in found]
    loader._stop_workers()


@pytest.mark.parametrize("options", KINDS)
def test_a_stream_reads_ahead_as_much_as_its_buffer_holds(options, tmp_path):
    """Lane 0 has nothing until the end, while lane 1 could read thousands of items."""
    count, come = tmp_path / "count", tmp_path / "come"

    def stream(n):
        for i in range(60):
            waiting(come)() if n == 0 else note()
            yield 100 * n + i

    def note():
        with count.open("ab") as file:
            file.write(b".")

    factory = streams.live(stream, 0.02, buffer_items=4)
    batches = iter(loader_of(range(2), 2, options, factory, time_steps=1))
    for step in range(5):
        assert next(batches).mask.sum() == 1
        ahead = 3 if options["num_workers"] else 0  # batches of the loader
        assert count.stat().st_size <= step + 1 + ahead + 4 + 1
    come.touch()
    assert sum(int(batch.mask.sum()) for batch in batches) == 115


def test_a_batch_waits_once_for_all_of_its_lanes(tmp_path):
    silent = {(n, 1): waiting(tmp_path / "come") for n in range(1, 8)}
    batches = iter(loader_of(range(8), 8, {}, numbers(silent, seconds=0.1), time_steps=1))
    begin = time.monotonic()
    for _ in range(5):
        next(batches)
    taken = time.monotonic() - begin
    (tmp_path / "come").touch()
    assert 0.3 < taken < 2, "five batches wait 0.1 s each, and not 0.1 s for each of seven lanes"
    assert sum(int(batch.mask.sum()) for batch in batches) > 8 * 20 - 5 * 8


@pytest.mark.parametrize("options", KINDS)
def test_errors_come_with_their_own_items(options):
    broken = numbers({(0, 5): raising(Broken, "unplugged"), (0, 4): lambda: time.sleep(0.02)})
    found = []
    with pytest.raises(ReadError, match="unplugged") as raised:
        found += loader_of(range(2), 2, options, broken, time_steps=1)
    assert (raised.value.source_index, raised.value.position) == (0, 5)
    with pytest.raises(ReadError, match="refused"):
        list(loader_of(range(2), 2, options, numbers({(1, None): raising(OSError, "refused")})))
    with pytest.raises(ReadError, match=r"open_stream raised StopIteration; pass a default to next\(\)"):
        list(loader_of(range(2), 2, options, numbers({(1, None): raising(StopIteration)})))
    left_out = loader_of(range(2), 2, options, broken, on_error="skip")
    with pytest.warns(RuntimeWarning, match="unplugged"):
        assert read(left_out) == [(n, i) for n, i in ALL if n == 1 or (n == 0 and i < 5)]


@pytest.mark.slow
def test_a_worker_that_dies_while_another_waits(tmp_path):
    acts = {(2, 5): few(tmp_path / "deaths", kill_self), (0, 7): lambda: time.sleep(0.1)}
    assert read(loader_of(range(4), 2, KINDS[3], numbers(acts), time_steps=1, max_restarts=1)) == ALL
    always = numbers({(2, 5): kill_self})
    with pytest.raises(WorkerError, match="SIGKILL"):
        list(loader_of(range(4), 2, KINDS[3], always, time_steps=1))


def test_side_by_side_and_interleaved():
    def dataset(count):
        return loader_of(range(count), 1, {}, numbers({(0, 2): lambda: time.sleep(0.05)}, 3)).dataset

    joined = side_by_side([(dataset(4), 2), (dataset(2), 1)], ends_with="longest")
    found = Counter()
    for batch in joined:
        assert batch.mask.any()
        for member, *lane in zip(batch.member.tolist(), batch.mask.T, batch.data.T, strict=True):
            found.update((member, item) for item in lane[1][lane[0]].tolist())
    assert found == Counter((m, 100 * n + i) for m, count in enumerate((4, 2)) for n in range(count) for i in range(3))
    mixed = interleave([dataset(4), dataset(2)], batch_size=2)
    assert sum(int(batch.mask.sum()) for batch in StreamDataLoader(mixed)) == 18


def reusing(n):
    """Yields one array again and again, with other numbers."""
    item = np.zeros(1, np.int64)
    for i in range(20):
        item[0] = i
        yield item


def test_items_whose_memory_is_used_again_are_copied():
    batches = list(loader_of(range(2), 2, {}, streams.live(reusing, 0.2), time_steps=5))
    for lane in range(2):
        read = [int(item) for batch in batches for item in batch.data[:, lane, 0][batch.mask[:, lane]]]
        assert read == list(range(20))


def test_a_stream_runs_in_one_thread_that_ends_with_it():
    """It is opened, read and closed there, with what it may ask about itself."""
    seen = []

    class Stream:
        def __init__(self, n):
            seen.append(("open", n, get_stream_info().source_index, threading.get_ident()))

        def __iter__(self):
            yield from range(1000)

        def close(self):
            seen.append(("close", threading.get_ident()))

    batches = iter(loader_of([7, 8], 2, {}, streams.live(Stream)))
    next(batches)
    batches.close()
    del batches
    assert [event[0] for event in seen] == ["open", "open", "close", "close"]
    assert {event[1:3] for event in seen[:2]} == {(7, 0), (8, 1)}
    threads = {event[-1] for event in seen}
    assert len(threads) == 2
    assert threading.get_ident() not in threads
    assert soon(lambda: not any(thread.name == "live stream" for thread in threading.enumerate()))


def test_start_is_passed_on_so_a_resume_reads_nothing_twice():
    starts = []

    def recording(n, start=0):
        starts.append(start)
        yield from range(100 * n + start, 100 * n + 20)

    batches = iter(loader_of(range(2), 2, {}, streams.live(recording, 0.2)))
    state = next(batches).state_dict()
    starts.clear()
    again = loader_of(range(2), 2, {}, streams.live(recording, 0.2))
    again.load_state_dict(state)
    positions = next(iter(again)).position[0].tolist()
    assert starts == positions
    assert min(starts) > 0


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda: loader_of([3], 1, {}, Script([[1, 0]] * 4), deterministic=True),
            ItemError,
            "pass deterministic=False",
        ),
        (
            lambda: loader_of([3], 1, {}, Script([[0, 1, 0]] * 4), mark_ends=True, time_steps=1),
            ItemError,
            "mark_ends=True",
        ),
        (
            lambda: DataLoader(loader_of([3], 1, {}, Script([[1, 0]] * 4)).dataset, None),
            ItemError,
            "by a StreamDataLoader",
        ),
        (
            lambda: regroup(DataLoader(loader_of([3], 1, {}, Script([[1, 0]] * 4)).dataset, None)),
            ItemError,
            "by a StreamDataLoader",
        ),
        (lambda: loader_of([3], 1, {}, lambda n: [{"x": NOTHING_YET}]), ItemError, "in place of the whole item"),
        (
            lambda: loader_of([3], 1, {}, lambda n: [{"x": n}, {"x": NOTHING_YET}]),
            ItemError,
            "in place of the whole item",
        ),
        (lambda: loader_of([3], 1, {}, streams.live(range), seed_globals=True), ValueError, r"rng_at\(position\)"),
        (lambda: streams.live(3), TypeError, "open_stream must be a function"),
        (lambda: streams.live(range, -0.1), ValueError, r"max_wait_seconds must be 0 or more, and is -0\.1"),
        (lambda: streams.live(range, "1"), TypeError, "max_wait_seconds must be a number, and is '1'"),
        (lambda: streams.live(range, buffer_items=0), ValueError, "buffer_items must be 1 or more, and is 0"),
        (lambda: streams.live(range, buffer_items=2.5), TypeError, "buffer_items must be an integer"),
        (
            lambda: loader_of([3], 1, {}, streams.live(streams.ArrayStream()), time_steps=None),
            ValueError,
            "time_steps=",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_a_remedy(make, error, text):
    with pytest.raises(error, match=text):
        list(make())


def test_it_is_the_same_object_after_pickling_and_says_what_it_is():
    assert pickle.load(io.BytesIO(pickle.dumps(NOTHING_YET))) is NOTHING_YET
    assert "NOTHING_YET" in repr(NOTHING_YET)
    factory = pickle.loads(pickle.dumps(streams.live(reusing, 0.5)))
    assert "max_wait_seconds=0.5" in repr(factory)


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 2}], ids=str)
def test_late_cells_are_counted_and_advised_upon(options):
    """Lane 0 has 40 items, lane 1 has an item in every other step, and none at the end."""
    loader = loader_of(range(2), 2, options, Script([[1] + [0] * 40, [1] * 20 + [0]]), time_steps=1)
    assert sum(int(batch.mask.sum()) for batch in loader) == 60  # the first step has no item, and is passed over
    stats = loader.stats()
    assert (stats.batches, stats.cells, stats.items, stats.late_cells) == (40, 80, 60, 19)
    assert stats.begun == 2
    assert stats.advice(padding_share=0.0).kind == "late streams"
    assert "max_wait_seconds" in str(stats.advice(padding_share=0.0))


@pytest.mark.parametrize("options", KINDS[:2])
def test_a_stream_that_stays_silent_is_logged_again_after_twice_the_time(options, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(background, "_REPORT_SECONDS", 0.05)
    batches = iter(loader_of(range(2), 2, options, numbers({(1, 3): waiting(tmp_path / "come")}, 1000), time_steps=1))
    begin = time.monotonic()
    with caplog.at_level(logging.WARNING):
        while time.monotonic() < begin + 0.6:
            next(batches)
            time.sleep(0.001)
    (tmp_path / "come").touch()
    told = [text for record in caplog.records if "a live stream had no item for" in (text := record.getMessage())]
    assert 2 <= len(told) <= 5, "about 0.05, 0.1, 0.2 and 0.4 s after its last item"
    assert all(text.endswith("s: 1") for text in told)


def test_a_stream_that_becomes_silent_again_is_logged_as_soon_as_the_first_time(tmp_path, caplog, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(background, "time", SimpleNamespace(monotonic=lambda: now[0]))
    stream = numbers({(0, n): waiting(tmp_path / str(n)) for n in (1, 2)}, 3, seconds=0.01)(0)
    assert next(stream) == 0
    for silences in ((9, 10, 19, 20, 39, 40), (9, 10)):
        begin, item = now[0], len(caplog.records) and 2
        for seconds in silences:
            now[0] = begin + seconds
            assert next(stream) is NOTHING_YET
        (tmp_path / str(item or 1)).touch()
        while next(stream) is NOTHING_YET:
            pass
    assert [record.args[0] for record in caplog.records] == [10, 20, 40, 10]
    stream.close()


def test_a_loop_without_a_loader_waits_anew_for_each_item(tmp_path):
    stream = numbers({(0, 1): waiting(tmp_path / "come")}, 2, seconds=0.05)(0)
    assert next(stream) == 0
    begin = time.monotonic()
    assert [next(stream) for _ in range(3)] == [NOTHING_YET] * 3
    assert time.monotonic() - begin > 0.14
    (tmp_path / "come").touch()
    assert [item for item in stream if item is not NOTHING_YET] == [1]
    stream.close()


class EndsForAWhile:
    """Two cameras: the first ends after an item, until a worker has died; the second has nothing, and ends the worker.

    So the death comes in a step that made no batch, but in which the lane took another source.
    """

    def __init__(self, path):
        self.path = path

    def __call__(self, source, start=0):
        if source == 0:
            yield from range(start, 3 if self.path.exists() else 1)
        elif self.path.exists():
            yield from range(100 + start, 102)
        else:
            for _ in range(3):
                yield NOTHING_YET
            time.sleep(0.2)  # the steps without an item have arrived by then
            self.path.touch()
            kill_self()


def test_a_state_after_a_death_forgets_what_was_drawn_in_steps_without_a_batch(tmp_path):
    def loader(**options):
        dataset = StreamDataset([0, 1], EndsForAWhile(tmp_path / "died"), 1, time_steps=1, deterministic=False)
        return StreamDataLoader(dataset, **options)

    read = [(batch.data.item(), batch.state_dict()) for batch in loader(num_workers=1, max_restarts=1)]
    assert [item for item, _ in read] == [0, 1, 2, 100, 101]
    for number, (_, state) in enumerate(read[1:], 2):
        resumed = loader()
        resumed.load_state_dict(state)
        assert [batch.data.item() for batch in resumed] == [item for item, _ in read[number:]]
