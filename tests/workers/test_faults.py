"""What breaks, and what becomes of it: workers that die, sources that break or come back."""

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time

import pytest
from cases import Case, cells, key, keys
from helpers import FOREVER, declared, loader_of, make_loader, soon
from worker_streams import acting, few, hang, kill_self, raising

from stream_dataloader import StreamDataLoader, StreamDataset, errors, get_stream_info, streams
from stream_dataloader._engine.memory.shared_memory import SharedMemory
from stream_dataloader.errors import RemoteTraceback

CASE = Case([14, 0, 19, 12, 2, 17, 1, 13, 5, 18, 16, 9], lanes=5, time_steps=2, shuffle=True, seed=4, jitter=True)


# Workers that die


@pytest.mark.filterwarnings("ignore:.*between two epochs")  # the last death may come after the last batch
@pytest.mark.parametrize(("messages", "persistent"), [(False, True), (True, False)])
def test_new_workers_go_on_bit_for_bit(messages, persistent, caplog):
    expected = keys(StreamDataLoader(CASE.dataset()))
    options = {"messages": messages, "persistent_workers": persistent}
    loader = loader_of(CASE.dataset(), 3, max_restarts=3, **options)
    found = []
    for batch in loader:
        found.append(key(batch))
        if batch.batch_index in (2, 9, 17):
            for worker in multiprocessing.active_children()[:1]:
                os.kill(worker.pid, signal.SIGSEGV if batch.batch_index == 9 else signal.SIGKILL)
    assert found == expected
    assert loader.stats().restarts >= 1
    told = [record.message for record in caplog.records]
    assert 1 <= len(told) <= 3
    assert "was killed by SIG" in told[0]
    assert "restart 1 of 3, at step" in told[0]
    assert {batch.epoch for batch in loader} == {1}, "the next epoch is read as ever"


def exit_from_a_thread():
    threading.Thread(target=os._exit, args=(0,)).start()
    hang()


#: Ways to end with status 0, as a worker does that has read all there was.
QUIET_EXITS = {"os._exit(0)": lambda: os._exit(0), "sys.exit()": sys.exit, "by a thread": exit_from_a_thread}


# torch alone looks after `timeout` again: whatever is noticed here is noticed without it
@pytest.mark.one_of_each
@pytest.mark.timeout(120)
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("way", QUIET_EXITS)
def test_a_worker_that_exits_with_status_0_before_it_is_done_is_a_death(way, persistent, tmp_path):
    def loader(acts, workers=2, **options):
        return make_loader(range(9), acting(acts, 12), 4, time_steps=2, num_workers=workers, **options)

    leave, options = QUIET_EXITS[way], {"timeout": FOREVER, "persistent_workers": persistent}
    with pytest.raises(
        errors.WorkerDeathError, match=r"worker 1 \(pid \d+\) exited with status 0 .*source 3 .*sys\.exit or"
    ):
        list(loader({(3, 5): leave}, **options))
    restarted = loader({(n, 5): few(tmp_path / str(n), leave) for n in (3, 7)}, max_restarts=2, **options)
    expected = keys(loader({}, 0))
    assert keys(restarted) == expected
    assert restarted.stats().restarts == 2
    assert len(list(restarted)) == len(expected)


@pytest.mark.timeout(120)
def test_a_worker_that_exits_with_status_0_while_it_starts_is_a_death():
    dataset = StreamDataset(range(4), range, 4, time_steps=1)
    loader = StreamDataLoader(dataset, 2, timeout=FOREVER, worker_init_fn=lambda _: sys.exit(0))
    with pytest.raises(
        errors.WorkerDeathError, match=r"a worker( \(pid \d+\) exited with status 0| died) while it started"
    ):
        list(loader)


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_that_are_done_early_may_exit(persistent):
    """Their lanes are idle long before the others'; and other processes of the program end meanwhile."""
    dataset = StreamDataset([30, 1, 1, 1], range, 4, time_steps=1)
    loader = StreamDataLoader(dataset, 4, persistent_workers=persistent, prefetch_factor=1)
    for _ in range(3):
        steps = 0
        for batch in loader:
            steps += 1
            if batch.batch_index % 10 == 5:
                os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)
        assert steps == 30


class SlowToLeave:
    """Of source 2: its worker exits, and takes a while to close the stream. Lane 0 is slow, and lane 1 waits for it."""

    def __init__(self, n):
        self.n, self.items = n, iter(range(9 if n in (0, 2) else 1))

    def __iter__(self):
        return self

    def __next__(self):
        time.sleep(0.1 * (self.n == 0))
        item = next(self.items)
        if (self.n, item) == (2, 3):
            sys.exit(3)
        return item

    def close(self):
        time.sleep(0.5 * (self.n == 2))


def test_no_batch_is_short_of_what_lanes_would_have_read_while_a_worker_leaves():
    loader = StreamDataLoader(StreamDataset(range(9), SlowToLeave, 3, time_steps=1, lookahead=0), 3, prefetch_factor=4)
    found = []
    with pytest.raises(errors.WorkerDeathError, match="exited with status 3"):
        found.extend(batch.source_index[0].tolist() for batch in loader)
    assert found == [[0, 1, 2], [0, 3, 2], [0, 4, 2]][: len(found)]


@pytest.mark.parametrize("place", [(3, 4), (3, 0), (6, 0)], ids=["reading", "opening", "opening early"])
@pytest.mark.filterwarnings("ignore:skipped the rest")
def test_a_source_that_kills_its_worker_each_time_is_named_and_skipped(place, caplog):
    killer, kept = place

    def loader(**options):
        read = acting({place: lambda: (time.sleep(0.02), kill_self())})
        dataset = StreamDataset(range(8), declared(read, early=killer == 6), 4, time_steps=1, **options)
        return StreamDataLoader(dataset, 2, max_restarts=4)

    with pytest.raises(errors.WorkerDeathError, match=rf"source {killer} \({killer}\) killed its worker 3 times"):
        list(loader())
    skipping = loader(on_error="skip")
    read_items = {cell[:2] for batch in skipping for lane in cells(batch) for cell in lane if cell}
    assert read_items == {(n, i) for n in range(8) for i in range(9) if n != killer or i < kept}
    (failure,) = skipping.failures
    assert (failure.source_index, failure.position) == place
    assert any("killed its worker 3 times and is skipped" in record.message for record in caplog.records)


@pytest.mark.parametrize("max_restarts", [1, 2])
def test_a_source_is_not_blamed_for_two_deaths_and_max_restarts_is_a_limit(max_restarts, tmp_path):
    read = acting({(3, 4): few(tmp_path / "deaths", kill_self, 2)}, 6)
    loader = StreamDataLoader(StreamDataset(range(4), read, 4, time_steps=1), 2, max_restarts=max_restarts)
    if max_restarts == 1:
        with pytest.raises(errors.WorkerDeathError, match=r"^worker 1"):
            list(loader)
    assert len(list(loader)) == 6
    assert loader.stats().restarts == max_restarts


def test_a_later_death_is_told_by_what_that_worker_read(tmp_path):
    acts = {(2, 3): few(tmp_path / "exits", raising(SystemExit)), (3, 4): kill_self}
    loader = StreamDataLoader(StreamDataset(range(4), acting(acts, 6), 4, time_steps=1), 2, max_restarts=1)
    with pytest.raises(errors.WorkerDeathError, match=r"^worker 1 .*in lane 3, step 4, reading source 3 \(3\)"):
        list(loader)


def test_after_a_death_nothing_is_opened_ahead(tmp_path):
    dead = tmp_path / "dead"

    def die():
        dead.write_text(str(os.getpid()))
        kill_self()

    read = acting({(1, 2): few(tmp_path / "deaths", die)}, 6)

    def open_stream(n):
        (tmp_path / f"{os.getpid()} {threading.current_thread().name}").touch()
        return read(n)

    dataset = StreamDataset(range(8), declared(open_stream), 1, time_steps=3, lookahead=2)
    assert len(list(StreamDataLoader(dataset, 1, max_restarts=1))) == 16
    opened = {tuple(path.name.split()) for path in tmp_path.glob("* *")}
    assert {thread for pid, thread in opened if pid != dead.read_text()} == {"MainThread"}


def test_a_stream_that_hangs_is_named_and_not_read_again(tmp_path):
    read = acting({(1, 1): few(tmp_path / "hung", hang, 9)}, 2)
    loader = StreamDataLoader(StreamDataset([0, 1], read, 2, time_steps=1), 2, timeout=1, max_restarts=5)
    where = r"worker 1 is .*in lane 1, step 1, reading source 1 \(1\)"
    with pytest.raises(errors.WorkerTimeoutError, match=where):
        list(loader)
    assert (tmp_path / "hung").stat().st_size == 1


# Sources that break


@pytest.fixture
def no_backoff(monkeypatch):
    monkeypatch.setattr("stream_dataloader._engine.reading.stream._FIRST_BACKOFF_SECONDS", 0.01)


@pytest.mark.parametrize("workers", [0, 2])
def test_what_comes_back_is_opened_again_where_it_was(workers, tmp_path, caplog, no_backoff):
    caplog.set_level(logging.INFO, "stream_dataloader")

    def loader(items, times, workers, **options):
        drop = raising(ConnectionError, "reset")
        drops = {(n, i): few(tmp_path / f"{n} {i} {times}", drop, times) for n in range(3) for i in items}
        return StreamDataLoader(StreamDataset(range(3), acting(drops, 8), 2, seed=0, time_steps=3, **options), workers)

    assert keys(loader([None, 2, 5], 2, workers, retries=2)) == keys(loader([], 0, 0))
    if not workers:
        assert "item 5" in caplog.text
        assert "opened again in 0.0 s, try 1 of 2" in caplog.text
    with pytest.raises(errors.ReadError, match=r"item 5.*reset"):
        list(loader([5], 3, workers, retries=2))


def test_waiting_gets_longer_each_time(monkeypatch):
    waits = []
    monkeypatch.setattr("stream_dataloader._engine.reading.stream.time.sleep", waits.append)
    refused = acting({(0, 0): raising(ConnectionError)})
    with pytest.raises(errors.ReadError):
        list(StreamDataLoader(StreamDataset([0], refused, 1, time_steps=1, retries=10, lookahead=0)))
    assert waits == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:skipped the rest")
def test_max_failures_counts_sources_over_epochs_and_resumes(workers):
    def read(n):
        yield n
        if n in (1, 4) or (n == 2 and get_stream_info().epoch > 0):
            raise OSError("broken")

    def loader(most):
        return make_loader(range(6), read, 2, time_steps=1, on_error="skip", max_failures=most, num_workers=workers)

    once = loader(2)
    assert len(list(once)) == 3
    assert [failure.source_index for failure in once.failures] == [1, 4]
    state = once.state_dict()
    resumed, patient = loader(2), loader(3)
    for other in (resumed, patient, patient):  # once more changes nothing
        other.load_state_dict(state)
        assert other.state_dict() == state
    for one in (once, resumed):
        with pytest.raises(errors.FailureLimitError, match="3 sources were skipped, and max_failures is 2") as error:
            list(one)
        assert error.value.source_index == 2
    for _ in range(3):  # the same sources, each time
        list(patient)
    assert {failure.source_index for failure in patient.failures} == {1, 2, 4}


@pytest.mark.parametrize(("place", "workers"), [(None, 0), (1, 2)], ids=["opening", "reading"])
@pytest.mark.parametrize("retry_on", [OSError, (KeyError, ConnectionError)])
@pytest.mark.parametrize("kind", [ConnectionError, ValueError])
def test_chosen_exceptions_are_tried_again(kind, retry_on, place, workers, tmp_path, no_backoff):
    read = acting({(n, place): few(tmp_path / str(n), raising(kind)) for n in range(2)}, 2)
    loader = StreamDataLoader(StreamDataset(range(2), read, 2, time_steps=2, retries=2, retry_on=retry_on), workers)
    if kind is ConnectionError:
        assert sum(int(batch.mask.sum()) for batch in loader) == 4
        return
    with pytest.raises((errors.OpenError, errors.ReadError)) as error:
        list(loader)
    assert isinstance(error.value.__cause__, (ValueError, RemoteTraceback))
    assert (tmp_path / "0").stat().st_size == 1


@pytest.mark.parametrize("wrong", ["OSError", (OSError, 3), KeyboardInterrupt, OSError("x")])
def test_what_is_tried_again_are_classes_of_exceptions(wrong):
    with pytest.raises(TypeError, match="retry_on"):
        StreamDataset([1], range, 1, retry_on=wrong)


def test_a_source_that_is_opened_again_and_again_warns_once_an_epoch(caplog, monkeypatch):
    monkeypatch.setattr("stream_dataloader._engine.reading.stream.time.sleep", lambda seconds: None)
    caplog.set_level(logging.INFO, "stream_dataloader")
    broken = set()

    def read(n, start=0):
        for item in range(start, 5):
            place = get_stream_info().epoch, n, item
            if place not in broken:
                broken.add(place)
                raise OSError("once")
            yield item

    loader = StreamDataLoader(StreamDataset(range(2), read, 2, time_steps=5, retries=1))
    for epoch in range(2):
        caplog.clear()
        list(loader)
        levels = [record.levelno for record in caplog.records if "opened again" in record.getMessage()]
        assert (levels.count(logging.WARNING), levels.count(logging.INFO)) == (2, 8), epoch


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError("no text")

    __repr__ = __str__


class Locked:
    def __reduce__(self):
        return _not_here, ()


def _not_here():
    raise ValueError("not to be unpickled")


def test_errors_and_items_that_cannot_be_told():
    with pytest.raises(errors.ReadError, match=r"source 0 .*Unspeakable whose repr raised ValueError"):
        list(StreamDataLoader(StreamDataset([0, 1], acting({(0, 1): raising(Unspeakable)}), 2, time_steps=1), 2))
    with pytest.raises(errors.ItemError, match=r"unpickled in the main process, at step 0.*not to be unpickled"):
        list(make_loader([1, 2], lambda n: iter([Locked()]), 2, time_steps=1, num_workers=2, persistent_workers=True))
    assert soon(lambda: not multiprocessing.active_children(), 20), "workers are not kept after such an error"


def test_locks_of_several_threads_and_files_are_no_deadlock():
    """The kernel takes two processes with two threads each for a circle, and refuses a lock."""
    first, second = SharedMemory(8), SharedMemory(8)

    def take(one, other, times):
        def nest(held):
            try:
                for _ in range(times):
                    with held.locked():
                        pass
            except OSError:
                os._exit(1)

        threads = [threading.Thread(target=nest, args=(memory,)) for memory in (one, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    context = multiprocessing.get_context("fork")
    children = [context.Process(target=take, args=(first, second, 20_000)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0, 0]


class Breaking:
    """Source 1 breaks behind 3, once; another connection of a live one shows what there is then."""

    live = True

    def __init__(self):
        self.broken = False

    def numbers(self, n, start):
        if self.broken and n and self.live:
            yield from range(100, 105)
            return
        for number in range(start, 9):
            if n and number == 4 and not self.broken:
                self.broken = True
                raise ConnectionError("reset")
            yield number

    def __call__(self, n):
        return self.numbers(n, 0)


class BreakingFile(Breaking):
    live = False


class BreakingFileFrom(BreakingFile):
    def __call__(self, n, start=0):
        return self.numbers(n, start)


NOW, EXACT = [0, 1, 2, 3, *range(100, 105)], list(range(9))


@pytest.mark.parametrize(
    ("kind", "options", "expected", "live"),
    [
        (Breaking, {}, NOW, False),
        (Breaking, {}, NOW, True),
        (BreakingFileFrom, {}, EXACT, False),
        (BreakingFileFrom, {}, EXACT, True),
        (BreakingFile, {"lengths": [9, 9]}, EXACT, False),
        (BreakingFile, {"lengths": [9, 9]}, EXACT, True),
        (BreakingFile, {"deterministic": True}, EXACT, False),
    ],
)
def test_a_live_stream_that_breaks_goes_on_from_now_and_tells_of_the_gap(kind, options, expected, live, no_backoff):
    factory = streams.live(kind(), 0) if live else kind()
    dataset = StreamDataset(
        range(2), factory, 2, time_steps=3, retries=1, **{"deterministic": False, "max_failures": 0} | options
    )
    loader = StreamDataLoader(dataset, 1, worker_method="thread")
    found = []
    for batch in loader:
        read = batch.source_index == 1
        found += zip(batch.position[read].tolist(), batch.data[read].tolist(), strict=True)
    assert found == list(enumerate(expected))
    gaps = [(type(gap), gap.source_index, gap.position, type(gap.__cause__)) for gap in loader.failures]
    assert gaps == ([(errors.GapError, 1, 4, ConnectionError)] if expected == NOW else [])
    stats = loader.stats()
    assert (stats.gaps, stats.skipped, stats.retried) == (len(gaps), 0, 1)


class Refusing:
    """Source 1 cannot be opened a few times."""

    def __init__(self, times):
        self.times = times

    def __call__(self, n):
        if n and self.times:
            self.times -= 1
            raise ConnectionError("refused")
        return iter(range(9))


@pytest.mark.parametrize("live", [False, True])
def test_a_stream_that_could_not_be_opened_at_its_place_lost_nothing(live, no_backoff):
    """Only what was open where it was to be read from may have gone on meanwhile."""

    def loader(refused):
        factory = streams.live(Refusing(refused), 1.0) if live else Refusing(refused)
        dataset = StreamDataset(range(2), factory, 2, time_steps=3, retries=2, deterministic=False)
        return StreamDataLoader(dataset, 1, worker_method="thread")

    first = loader(0)
    for batch in first:
        if (batch.position == 2).all(1).any():
            break
    again = loader(2)
    again.load_state_dict(batch.state_dict())
    begin = int(batch.position[:, 1].max()) + 1
    found = []
    for batch in again:
        read = batch.source_index == 1
        found += zip(batch.position[read].tolist(), batch.data[read].tolist(), strict=True)
    assert found == [(number, number) for number in range(begin, 9)], "it goes on from now, as if it had been read"
    assert again.failures == []
    assert (again.stats().gaps, again.stats().retried) == (0, 2)


class Dying:
    """Source 1 kills its worker at item 4; opened again it counts from 100, as a live source does."""

    def __init__(self, path):
        self.path = path

    def __call__(self, n):
        again = self.path.exists()
        for number in range(100 * again, 100 * again + 9 - 4 * again):
            if n and number == 4:
                self.path.touch()
                kill_self()
            yield number


class DyingFrom(Dying):
    def __call__(self, n, start=0):
        for number in range(start, 9):
            if n and number == 4 and not self.path.exists():
                self.path.touch()
                kill_self()
            yield number


@pytest.mark.parametrize(
    ("kind", "options", "goes_on"),
    [
        (Dying, {}, True),
        (Dying, {"retries": 0}, False),
        (Dying, {"deterministic": True}, False),
        (DyingFrom, {}, False),
    ],
)
def test_a_live_stream_goes_on_from_now_where_workers_are_started_again(kind, options, goes_on, tmp_path):
    given = {"deterministic": False, "retries": 1, "max_failures": 0} | options
    dataset = StreamDataset(range(2), kind(tmp_path / "died"), 2, time_steps=1, **given)
    loader = StreamDataLoader(dataset, 2, max_restarts=1)
    found = []
    try:
        for batch in loader:
            read = batch.source_index == 1
            found += zip(batch.position[read].tolist(), batch.data[read].tolist(), strict=True)
    except errors.ReadError:  # it was read forward, and had too few items
        assert kind is Dying
        assert not goes_on
    delivered = sum(value < 100 for _, value in found)
    if goes_on:
        assert found == [*((i, i) for i in range(delivered)), *((delivered + i, 100 + i) for i in range(5))]
        gaps = [(gap.source_index, gap.position) for gap in loader.failures if "started again" in str(gap)]
        assert (1, delivered) in gaps
        assert loader.stats().gaps == len(loader.failures) >= 1
        assert loader.stats().skipped == 0
    else:
        assert loader.failures == []
        assert [position for position, _ in found] == list(range(len(found)))
        assert kind is Dying or found == [(i, i) for i in range(9)]


@pytest.mark.parametrize("worker_method", ["process", "thread"])
def test_retries_are_counted_while_the_stream_is_open(worker_method, tmp_path, no_backoff):
    read = acting({(0, 1): few(tmp_path / "0", raising(OSError), 2)}, 10**6)
    loader = StreamDataLoader(StreamDataset([0], read, 1, time_steps=2, retries=2), 1, worker_method=worker_method)
    batches = iter(loader)
    next(batches)
    assert loader.stats().retried == 2
    assert loader.stats().as_dict()["retried"] == 2
