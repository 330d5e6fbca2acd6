"""Packing: what comes out is what was read, whatever happens on the way."""

import contextlib
import errno
import functools
import multiprocessing
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import threading
import time
import types

import numpy as np
import pytest
import torch
from helpers import PATIENCE, START_METHODS, random_cases, times
from hypothesis import given
from hypothesis import strategies as st
from packed import images
from store_tests import StoreTests

from stream_dataloader import StreamDataLoader, StreamDataset, get_stream_info, interleave, stores
from stream_dataloader.errors import (
    ItemError,
    LengthError,
    OpenError,
    ReadError,
    StoreError,
    WorkerDeathError,
)
from stream_dataloader.stores._packing import part as parts
from stream_dataloader.stores._packing import run as reports
from stream_dataloader.stores._packing.partial import Partial, begin_part, enter, packed_in
from stream_dataloader.stores.memmap import MemmapStore
from stream_dataloader.stores.memmap.writer import MemmapPacker
from stream_dataloader.streams import ArrayStream

LENGTHS = (23, 0, 7, 31, 5, 12)
STREAMS = images(LENGTHS)
NUMBERS = list(range(len(LENGTHS)))
LEFT = ".partial"


def open_images(number):
    yield from STREAMS[number]


def content(path):
    store = stores.open(path).open_stream
    assert store.verify() == []
    found = [(store.key(n), [repr(item) for item in store(n)]) for n in range(len(store))]
    store.close()
    return found


def expected(numbers=NUMBERS, streams=STREAMS):
    return [(str(n), [repr(item) for item in streams[n]]) for n in numbers]


class TestPackedStore(StoreTests):
    has_checksums = True
    damages = 4

    def make(self, tmp_path):
        stores.pack((NUMBERS, open_images), tmp_path / "images.store", num_workers=2)
        return MemmapStore(tmp_path / "images.store")

    streams = STREAMS


# ---- what comes out


@pytest.mark.parametrize("method", START_METHODS)
def test_every_way_to_start_workers_packs_the_same(tmp_path, method):
    streams = [list(range(10 * n, 10 * n + n)) for n in range(9)]
    report = stores.pack(
        (list(range(9)), lambda n: iter(streams[n])),  # what only cloudpickle takes along
        tmp_path / "a",
        num_workers=2,
        transform=lambda item: item + 1,
        multiprocessing_context=method,
    )
    store = MemmapStore(tmp_path / "a")
    assert [list(store(n)) for n in range(9)] == [[item + 1 for item in items] for items in streams]
    assert (report.streams, report.steps, report.packed_before, report.skipped) == (9, 36, 0, ())
    assert os.listdir(tmp_path) == ["a"]
    assert sorted(os.listdir(tmp_path / "a")) == ["0.bin", "keys.bin", "notes.bin", "store.json", "streams.bin"]


ITEMS = [
    lambda n, t: np.float32(n + t / 8),
    lambda n, t: {"b": np.arange(6, dtype=np.int16).reshape(2, 3) * t + n, "a": (100 * n + t, t % 2 == 0)},
    lambda n, t: (torch.tensor([n, t], dtype=torch.bfloat16), {"empty": np.zeros((0, 2))}),
]


@random_cases(200, 8)
@given(
    item=st.sampled_from(ITEMS),
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=7).filter(any),
    workers=st.sampled_from([0, 0, 2]),
    lanes=st.integers(1, 3),
    steps=st.integers(1, 4),
    seed=st.integers(0, 9),
)
def test_batches_of_the_store_are_those_of_the_streams(tmp_path_factory, item, lengths, workers, lanes, steps, seed):
    def open_stream(number):
        return (item(number, t) for t in range(lengths[number]))

    path = tmp_path_factory.mktemp("pack") / "a"
    stores.pack((range(len(lengths)), open_stream), path, num_workers=workers)
    sources, store = stores.open(path)
    options = {"time_steps": steps, "shuffle": True, "seed": seed, "windows": "packed"}
    direct = StreamDataLoader(StreamDataset(range(len(lengths)), open_stream, lanes, **options))
    packed = StreamDataLoader(StreamDataset(sources, store, lanes, **options))
    pairs = list(zip(direct, packed, strict=True))
    assert pairs
    for one, other in pairs:
        for name in ("data", "mask", "source_index", "position", "reset"):
            assert repr(getattr(one, name)) == repr(getattr(other, name)), name
    store.close()
    shutil.rmtree(path)


def test_streams_draw_as_in_the_first_epoch_of_a_loader(tmp_path):
    def open_noise(length):
        info = get_stream_info()
        yield from (info.rng_at(t).standard_normal(2) for t in range(length))

    dataset = StreamDataset([4, 2, 3], open_noise, batch_size=1, time_steps=2, seed=7)
    stores.pack(dataset, tmp_path / "a", num_workers=2)
    sources, store = stores.open(tmp_path / "a")
    again = StreamDataset(sources, store, batch_size=1, time_steps=2)
    for one, other in zip(StreamDataLoader(dataset), StreamDataLoader(again), strict=True):
        assert torch.equal(one.data, other.data)
    stores.pack(([4, 2, 3], open_noise), tmp_path / "b", seed=7, transform=lambda item: item + get_stream_info().seed)
    assert np.array_equal(next(MemmapStore(tmp_path / "b")(2)), next(store(2)) + 7)


def test_windows_of_a_dataset_are_taken_apart(tmp_path):
    def open_windows(number):
        for first in range(0, 5, 2):
            count = min(2, 5 - first)
            yield {"x": np.arange(first, first + count) + 10 * number, "camera": np.int8(number)}

    stores.pack(StreamDataset([1, 2], open_windows, batch_size=2, windows="given"), tmp_path / "a", transform=dict)
    store = MemmapStore(tmp_path / "a")
    assert [(int(item["x"]), int(item["camera"])) for item in store(1)] == [(20 + t, 2) for t in range(5)]
    with pytest.raises(ItemError):
        stores.pack(StreamDataset([7], lambda n: [n], batch_size=1, windows="given"), tmp_path / "b")


def test_datasets_put_together_are_packed_each_by_its_factory(tmp_path):
    parts = [StreamDataset([3, 1], lambda n, sign=sign: [sign * n] * n, 2, time_steps=2) for sign in (1, -1)]
    stores.pack(interleave(parts, batch_size=2), tmp_path / "a", num_workers=1)
    store = MemmapStore(tmp_path / "a")
    assert [list(store(n)) for n in range(4)] == [[3, 3, 3], [1], [-3, -3, -3], [-1]]


@pytest.mark.parametrize(("format", "calls"), [("memmap", 4), ("lmdb", 6)])
def test_a_stream_that_writes_into_memory_is_packed_by_that(tmp_path, format, calls):
    arrays = [np.arange(2000 * n).reshape(-1, 2) for n in (3, 0, 1)]
    asked = []

    class Watched(ArrayStream):
        def __call__(self, source, *, start=0):
            rows = super().__call__(source, start=start)
            read_into = rows.read_into
            rows.read_into = lambda out: asked.append(len(out)) or read_into(out)
            return rows

    stores.pack((arrays, Watched()), tmp_path / "a", format=format)
    store = stores.open(tmp_path / "a").open_stream
    assert store.verify() == []
    for number, array in enumerate(arrays):
        assert np.array_equal(np.array(list(store(number))).reshape(-1, 2), array)
    assert len(asked) == calls  # a block each, and to the end of two streams; the third is empty


def test_a_store_is_converted_with_its_keys_and_metadata(tmp_path):
    stores.pack(
        (["b.mp4", pathlib.Path("a"), ("c", 0, 3), "b.mp4"], lambda source: range(4)),
        tmp_path / "a",
        metadata={"made": "here"},
        stream_metadata=lambda source: {"source": str(source)},
    )
    opened = stores.open(tmp_path / "a")
    assert [opened.open_stream.key(n) for n in range(4)] == ["b.mp4", "a", "('c', 0, 3)", "b.mp4#3"]
    stores.pack(opened, tmp_path / "b", num_workers=2)
    again = MemmapStore(tmp_path / "b")
    assert [again.key(n) for n in range(4)] == [opened.open_stream.key(n) for n in range(4)]
    assert again.metadata(2) == {"source": "('c', 0, 3)"}
    assert again.info().metadata == {"made": "here"}
    stores.pack(([(3, 1, 3), 0], opened.open_stream), tmp_path / "c", keys=["x", "y"])
    part = MemmapStore(tmp_path / "c")
    assert (part.lengths.tolist(), part.key(1), list(part(0))) == ([2, 4], "y", [1, 2])


def test_no_streams_make_an_empty_store(tmp_path):
    report = stores.pack(([], open_images), tmp_path / "a", num_workers=2)
    assert (report.streams, len(MemmapStore(tmp_path / "a"))) == (0, 0)


# ---- what cannot be packed


def refuse(number):
    raise OSError(f"no such thing as {number}")


def broken(number):
    yield from STREAMS[number][:3]
    if number == 3:
        raise RuntimeError("broke off")


def ragged(number):
    for t in range(3):
        yield {"image": np.zeros((2, 3 + (number == 2 and t == 1)))}


@pytest.mark.parametrize(
    ("open_stream", "options", "kind", "place"),
    [
        (refuse, {}, OpenError, (0, 0)),
        (broken, {}, ReadError, (3, 3)),
        (ragged, {}, ItemError, (2, 1)),
        (lambda n: ["text"], {}, ItemError, (0, 0)),
        (open_images, {"transform": lambda item: 1 // (int(item["label"]) - 2)}, ReadError, (0, 2)),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_has_the_source_and_the_step(tmp_path, open_stream, options, kind, place, workers):
    with pytest.raises(kind) as raised:
        stores.pack((NUMBERS, open_stream), tmp_path / "a", num_workers=workers, **options)
    assert (raised.value.source_index, raised.value.position) == place
    kept = os.listdir(tmp_path)
    assert kept == (["a.partial"] if "a.partial: pack again" in str(raised.value) else [])
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("length", [3, 5])
def test_a_stream_of_another_length_is_an_error(tmp_path, length):
    dataset = StreamDataset([0], lambda n: range(4), 1, time_steps=2, lengths=[length])
    with pytest.raises(LengthError):
        stores.pack(dataset, tmp_path / "b")


def test_what_is_packed_before_an_error_is_kept(tmp_path):
    with pytest.raises(ReadError, match=r"3 of 6 streams are packed, in .*a.partial: pack again"):
        stores.pack((NUMBERS, broken), tmp_path / "a")
    report = stores.pack((NUMBERS, broken), tmp_path / "a", on_error="skip")
    assert (report.packed_before, report.streams, report.skipped[0].source_index) == (3, 5, 3)
    assert re.match(r"packed 5 streams, 3 of them before, 12 steps, .* \(memmap\)\nskipped source 3", str(report))
    store = MemmapStore(tmp_path / "a")
    assert [store.key(n) for n in range(5)] == ["0", "1", "2", "4", "5"]


class Closing:
    """Notes in `events` when a stream is opened and closed; stream 3 breaks, and closing stream 4 fails."""

    def __init__(self, events, number):
        self.number, self.items, self.note = number, broken(number), lambda what: events.append((what, number))
        self.note("open")

    def __iter__(self):
        return self.items

    def close(self):
        self.note("close")
        assert self.number != 4, "it cannot be closed"


def test_a_stream_is_closed_before_the_next_is_opened(tmp_path):
    events = []
    with pytest.warns(RuntimeWarning, match=r"closing the stream of source 4 .*it cannot be closed"):
        stores.pack((NUMBERS, functools.partial(Closing, events)), tmp_path / "a", on_error="skip")
    assert events == [(what, number) for number in NUMBERS for what in ("open", "close")]


@pytest.mark.usefixtures("syncs_at_once")
@pytest.mark.parametrize("format", ["memmap", "lmdb", "mds"])
def test_each_stream_is_in_the_journal_once(tmp_path, format):
    with pytest.raises(ReadError):
        stores.pack((NUMBERS, broken), tmp_path / "a", format=format)
    numbers = re.findall(rb"\[(\d+), \d+, (?:\{|null)", journals_of(tmp_path / "a"))
    assert numbers == [b"0", b"1", b"2"]


def test_lengths_are_those_of_a_stores_own_sources(tmp_path):
    for name, numbers in (("a", NUMBERS), ("b", NUMBERS[2:])):
        stores.pack((numbers, open_images), tmp_path / name)
    (sources, store), (others, _) = (stores.open(tmp_path / name) for name in "ab")
    assert store.lengths_of(sources).tolist() == list(LENGTHS)
    assert store.lengths_of(others) is store.lengths_of(sources[1:]) is None


def test_on_error_may_decide(tmp_path):
    seen = []

    def decide(error):
        seen.append((os.getpid(), error.source_index, type(error), error.position))
        return "skip"

    stores.pack((NUMBERS, broken), tmp_path / "a", on_error=decide, num_workers=2)
    assert seen == [(os.getpid(), 3, ReadError, 3)]
    seen.clear()
    stores.pack((range(30), lambda number: iter(()) if number % 3 else 1 / 0), tmp_path / "d", on_error=decide)
    assert [source for _, source, *_ in seen] == [*range(0, 30, 3)], "each error is decided once"
    with pytest.raises(ValueError, match="on_error returned None"):
        stores.pack((NUMBERS, broken), tmp_path / "b", on_error=lambda error: None)
    with pytest.raises(StoreError, match="none of 6 streams"):
        stores.pack((NUMBERS, refuse), tmp_path / "c", on_error="skip")


@pytest.mark.parametrize(
    ("arguments", "kind", "word"),
    [
        ({"streams": 5}, TypeError, "StreamDataset"),
        ({"streams": ("a.mp4", open_images)}, TypeError, "sources"),
        ({"streams": (NUMBERS, 3)}, TypeError, "open_stream"),
        ({"format": "tfds"}, ValueError, "only read"),
        ({"format": "zip"}, ValueError, "unknown"),
        ({"on_error": "ignore"}, ValueError, "on_error"),
        ({"num_workers": -1}, ValueError, "num_workers"),
        ({"multiprocessing_context": "thread", "num_workers": 1}, ValueError, "thread"),
        ({"keys": ["a"]}, ValueError, "keys"),
        ({"keys": ["a", "b", "a", "c", "d", "e"]}, ValueError, "'a' twice"),
        ({"compression": "zstd"}, TypeError, "compression"),
        ({"metadata": {"a": object()}}, TypeError, "JSON"),
        ({"stream_metadata": [{}]}, ValueError, "stream_metadata"),
        ({"stream_metadata": lambda source: {"a": {1}}}, TypeError, "source 0"),
        ({"path": "memory://bucket/a", "format": "lmdb"}, ValueError, "URL"),
    ],
)
def test_wrong_arguments_are_refused_before_a_stream_is_opened(tmp_path, arguments, kind, word):
    given_ = {"streams": (NUMBERS, refuse), "path": tmp_path / "a"} | arguments
    with pytest.raises(kind, match=word):
        stores.pack(given_.pop("streams"), given_.pop("path"), **given_)
    assert os.listdir(tmp_path) == []


# ---- one process at a time, and nothing is overwritten


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "a").write_text("text")
    with pytest.raises(FileExistsError):
        stores.pack((NUMBERS, open_images), tmp_path / "a")
    assert os.listdir(tmp_path) == ["a"]


def test_what_comes_to_exist_meanwhile_is_left_alone(tmp_path):
    def open_late(number):
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a" / "file").touch()
        yield number

    with pytest.raises(FileExistsError, match="has come to exist while it was packed"):
        stores.pack(([1, 2], open_late), tmp_path / "a")
    shutil.rmtree(tmp_path / "a")
    assert stores.pack(([1, 2], open_late), tmp_path / "a").packed_before == 2


def test_going_on_with_something_else_is_an_error(tmp_path):
    def attempt(sources=NUMBERS, **options):
        stores.pack((sources, broken), tmp_path / "a", **options)

    for options in ({}, {"keys": str}):
        with pytest.raises(ReadError):
            attempt(**options)
    for options, what in [
        ({"sources": [*NUMBERS, 6]}, "number of sources was 6, and is 7"),
        ({"sources": [9, *NUMBERS[1:]]}, "fingerprint of sources"),
        ({"keys": "abcdef"}, "keys"),
        ({"metadata": {"a": 1}}, "options"),
        ({"seed": 3}, "seed was None, and is 3"),
    ]:
        with pytest.raises(StoreError, match=rf"{what}.*delete that folder to start again"):
            attempt(**options)


class Child:
    """A process that packs, forked from this one."""

    def __init__(self, **arguments):
        context = multiprocessing.get_context("fork")
        self._ours, theirs = context.Pipe()
        self.process = context.Process(target=self._run, args=(theirs, arguments))
        self.process.start()
        theirs.close()

    @staticmethod
    def _run(connection, arguments):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            connection.send(str(stores.pack(**arguments)))
        except BaseException as error:
            connection.send(f"{type(error).__name__}: {error}")

    def kill(self, number=signal.SIGKILL):
        os.kill(self.process.pid, number)

    def told(self):
        try:
            return self._ours.recv() if self._ours.poll(PATIENCE) else "stuck"
        except EOFError:
            return ""
        finally:
            self._ours.close()
            self.process.join()


def wait_for(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("workers", [0, 2])
def test_of_two_processes_the_second_is_refused_at_once(tmp_path, workers):
    def open_slowly(number):
        yield number
        wait_for((tmp_path / "go").exists)

    child = Child(streams=([1, 2], open_slowly), path=tmp_path / "a", num_workers=workers)
    wait_for((tmp_path / f"a{LEFT}" / "journal").exists)
    wait_for((tmp_path / f"a{LEFT}" / "lock").read_text)
    with pytest.raises(StoreError, match=rf"another process \(process {child.process.pid} of"):
        stores.pack(([1, 2], open_slowly), tmp_path / "a")
    (tmp_path / "go").touch()
    assert child.told().startswith("packed 2 streams")
    assert sorted(os.listdir(tmp_path)) == ["a", "go"]


# ---- interrupts


def noted(folder, number):
    with open(os.path.join(folder, "opened"), "a") as file:
        file.write(f"{number}\n")
    for item in STREAMS[number]:
        time.sleep(0.0005)
        yield item


def opened(folder):
    path = pathlib.Path(folder) / "opened"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def journals_of(path):
    return b"".join(file.read_bytes() for file in sorted(path.with_name(path.name + LEFT).glob("journal*")))


@pytest.fixture
def syncs_at_once(monkeypatch):
    monkeypatch.setattr(parts, "SYNC_SECONDS", 0.0)
    monkeypatch.setattr("stream_dataloader.stores.mds.packer._Part.sync_seconds", 0.0)


def workers_of(pid):
    with contextlib.suppress(FileNotFoundError):
        return list(map(int, pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    return []


@pytest.mark.parametrize("seed", range(times(100, 6)))
@pytest.mark.usefixtures("syncs_at_once")
def test_killed_at_any_moment_it_goes_on_and_gives_the_same(tmp_path, seed):
    rng = random.Random(seed)
    workers = rng.choice([0, 1, 2, 3])
    streams, format = (NUMBERS, functools.partial(noted, tmp_path)), ("memmap", "lmdb", "mds")[seed % 3]
    arguments = {"streams": streams, "path": tmp_path / "a", "format": format}
    journaled = []
    for _ in range(4):
        child = Child(**arguments, num_workers=workers)
        time.sleep(rng.choice([0.02, 0.1, 0.2]) * rng.random())
        if rng.random() < 0.5 and (pids := workers_of(child.process.pid)):
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(rng.choice(pids), signal.SIGKILL)
            time.sleep(0.1 * rng.random())
        child.kill()
        child.told()
        if (tmp_path / "a").exists():
            break
        journaled.append(set(map(int, re.findall(rb"\[(\d+), \d+, (?:\{|null)", journals_of(tmp_path / "a")))))
        before = len(opened(tmp_path))
    else:
        report = stores.pack(**arguments, num_workers=workers)
        assert report.packed_before >= len(journaled[-1])
        assert not set(opened(tmp_path)[before:]) & journaled[-1]
    assert content(tmp_path / "a") == expected()
    if (tmp_path / f"a{LEFT}").exists():  # killed between the two last things
        shutil.rmtree(tmp_path / f"a{LEFT}")
    assert sorted(os.listdir(tmp_path)) == ["a", "opened"]


@pytest.mark.parametrize("workers", [0, 2])
def test_ctrl_c_ends_all_workers_soon_and_says_how_to_go_on(tmp_path, workers, syncs_at_once):
    def open_stream(number):
        yield from STREAMS[number][:2]
        if number == 3 and not (tmp_path / "go").exists():
            (tmp_path / "there").touch()
            while True:  # a signal just before a sleep begins does not end that sleep
                time.sleep(0.01)

    arguments = {"streams": (NUMBERS, open_stream), "path": tmp_path / "a", "num_workers": workers}
    child = Child(**arguments)
    wait_for(lambda: (tmp_path / "there").exists() and journals_of(tmp_path / "a").count(b'"streams"') >= 3)
    child.kill(signal.SIGINT)
    told = child.told()
    assert re.match(r"KeyboardInterrupt: packing was interrupted\. [345] of 6 streams are packed, in .*: pack", told)
    (tmp_path / "go").touch()
    assert stores.pack(**arguments).packed_before >= int(told.split(". ")[1][0])
    assert MemmapStore(tmp_path / "a").lengths.tolist() == [min(2, length) for length in LENGTHS]


def crash():
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # pytest's handler would print the stack
    os.kill(os.getpid(), signal.SIGSEGV)


def test_a_worker_that_dies_is_replaced_and_its_stream_packed_again(tmp_path):
    def open_stream(number):
        yield from STREAMS[number]
        if number in (2, 3) and not (tmp_path / f"{number}").exists():
            (tmp_path / f"{number}").touch()
            crash() if number == 2 else os.kill(os.getpid(), signal.SIGKILL)

    report = stores.pack((NUMBERS, open_stream), tmp_path / "a", num_workers=2)
    assert report.skipped == ()
    assert content(tmp_path / "a") == expected()


def test_a_stream_that_kills_twice_is_an_error_that_names_it(tmp_path):
    def open_stream(number):
        yield from STREAMS[number]
        if number == 3:
            crash()
        if number == 4:
            os._exit(3)

    with pytest.raises(WorkerDeathError, match=r"source 3 \(3\) killed its worker 3 times.*SIGSEGV"):
        stores.pack((NUMBERS[:4], open_stream), tmp_path / "a", num_workers=1)
    report = stores.pack((NUMBERS, open_stream), tmp_path / "b", num_workers=2, on_error="skip")
    assert [error.source_index for error in report.skipped] == [3, 4]
    assert content(tmp_path / "b") == expected([0, 1, 2, 5])


def test_workers_of_a_killed_process_are_waited_for(tmp_path):
    def open_stream(number):
        yield number
        (tmp_path / "open").touch()
        wait_for((tmp_path / "go").exists)

    arguments = {"streams": ([1], open_stream), "path": tmp_path / "a", "num_workers": 1}
    child = Child(**arguments)
    wait_for((tmp_path / "open").exists)
    (worker,) = workers_of(child.process.pid)
    os.kill(worker, signal.SIGSTOP)  # so that it does not see that the process is gone
    child.kill()
    child.process.join()
    (tmp_path / "go").touch()
    threading.Timer(0.2, os.kill, (worker, signal.SIGCONT)).start()
    assert stores.pack(**arguments).streams == 1
    child.told()


def test_what_a_worker_had_packed_and_not_synced_is_packed_again(tmp_path):
    def open_stream(number):
        yield number
        if number == 4:
            time.sleep(2 * parts._REPORT_SECONDS)  # so that it is reported, with those before
        if number == 5 and not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    told = []
    stores.pack((NUMBERS, open_stream), tmp_path / "a", num_workers=1, progress=lambda *n: told.append(n))
    assert [list(MemmapStore(tmp_path / "a")(n)) for n in NUMBERS] == [[n] for n in NUMBERS]
    assert told == [(n + 1, 6) for n in NUMBERS]


@pytest.mark.one_of_each
@pytest.mark.parametrize("at", [(Partial, "publish"), (os, "rename")])
@pytest.mark.parametrize("format", ["memmap", "lmdb", "mds"])
def test_interrupted_while_it_is_finished_it_goes_on(tmp_path, monkeypatch, format, at):
    def fail(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(*at, fail)
        with pytest.raises(KeyboardInterrupt, match="6 of 6 streams are packed"):
            stores.pack((NUMBERS, open_images), tmp_path / "a", format=format)
    assert not (tmp_path / "a").exists()
    report = stores.pack((NUMBERS, refuse), tmp_path / "a", format=format)
    assert report.packed_before == 6
    assert content(tmp_path / "a") == expected()
    assert os.listdir(tmp_path) == ["a"]


# ---- the disk


def test_a_full_disk_is_a_clear_error_and_packing_goes_on_later(tmp_path):
    here, size = os.getpid(), sum(item["image"].nbytes for items in STREAMS for item in items)

    def open_stream(number):
        if os.getpid() != here:  # not before, as a loader's memory are files, too
            resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        yield from STREAMS[number]

    arguments = {"streams": (NUMBERS, open_stream), "path": tmp_path / "a"}
    for workers in (0, 2):
        told = Child(**arguments, num_workers=workers).told()
        assert re.match(rf"OSError: \[Errno {errno.EFBIG}\].*a.partial: pack again", told)
    assert stores.pack(**arguments).packed_before >= 1
    assert content(tmp_path / "a") == expected()


def test_a_disk_that_will_be_too_small_is_told_before_it_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(reports, "LOOKED_SECONDS", 0)
    monkeypatch.setattr(reports.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(0, 0, 1000))
    with pytest.warns(RuntimeWarning, match="the streams that are left take about"):
        stores.pack((NUMBERS, open_images), tmp_path / "b")
    assert content(tmp_path / "b") == expected()

    # Streams that were packed before took their room before.
    looked = reports.Run.__new__(reports.Run)
    looked.before, looked._done, looked._used_before, looked._looked, looked._has_warned = (
        8,
        set(range(10)),
        800,
        0,
        False,
    )
    looked._bar = types.SimpleNamespace(total=110, disable=True)
    looked._partial = types.SimpleNamespace(store="", folder="")
    monkeypatch.setattr(reports, "disk_bytes", lambda _: 1000)
    with pytest.warns(RuntimeWarning, match=r"the streams that are left take about 10\.0 kB"):
        looked._look()


def test_damage_on_the_disk_is_found_by_verify(tmp_path, monkeypatch):
    finish = MemmapPacker.finish

    def damage(packer, records, synced):
        files = finish(packer, records, synced)
        with open(os.path.join(packer._folder, "0.bin"), "rb+") as file:
            file.write(b"damage")
        return files

    monkeypatch.setattr(MemmapPacker, "finish", damage)
    with pytest.raises(StoreError, match="checksum"):
        stores.pack((NUMBERS, open_images), tmp_path / "a", verify=True)
    assert os.listdir(tmp_path) == ["a.partial"]


# ---- progress


def test_a_bar_shows_rates_and_is_quiet_without_a_terminal(tmp_path, capsys):
    stores.pack((NUMBERS, open_images), tmp_path / "a")
    assert capsys.readouterr().err == ""
    stores.pack((NUMBERS, open_images), tmp_path / "b", progress=True)
    shown = capsys.readouterr().err
    assert re.search(r"packing b: 100%.*6/6 \[.*stream/s, [\d,]+ steps/s, [\d.]+ \wB/s\]", shown)


# ---- journals


@random_cases(200, 10)
@given(st.data())
def test_a_journal_that_was_cut_or_damaged_keeps_what_is_whole(tmp_path_factory, data):
    path = str(tmp_path_factory.mktemp("journal") / "journal")
    entries = [[n, n + 1, {"start": n, "crcs": [1, np.int64(2)]}] for n in range(5)]
    number, file = begin_part(path)
    with file:
        for entry in entries:
            enter(file, {"synced": None, "streams": [entry]})
        cut = data.draw(st.integers(0, os.path.getsize(file.name)))
    os.truncate(file.name, cut)
    if data.draw(st.booleans()) and cut:
        content = bytearray(pathlib.Path(file.name).read_bytes())
        content[data.draw(st.integers(0, cut - 1))] ^= 16
        pathlib.Path(file.name).write_bytes(content)
    found = packed_in(path)[0]
    assert all([n, *entry] == entries[n] for n, entry in found.items())
    again, file = begin_part(path)
    assert (number, again) == (0, 1)
    with file, open(f"{path}.0", "ab") as cut_off:
        enter(
            data.draw(st.sampled_from([file, cut_off])),
            {"synced": None, "streams": [entry for entry in entries if entry[0] not in found]},
        )
    assert [[n, *entry] for n, entry in sorted(packed_in(path)[0].items())] == entries
