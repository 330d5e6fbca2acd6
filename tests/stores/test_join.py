"""Stores that were packed in parts and joined, compared with the store that is packed at once."""

import itertools
import multiprocessing
import os
import random
import shutil
import signal
import time

import numpy as np
import pytest
from helpers import PATIENCE, random_cases
from hypothesis import given
from hypothesis import strategies as st
from packed import STREAMS, images
from store_tests import StoreTests

from stream_dataloader import StreamDataLoader, StreamDataset, get_stream_info, stores
from stream_dataloader.cli.main import main
from stream_dataloader.errors import StreamError
from stream_dataloader.stores import StoreError
from stream_dataloader.stores._packing.part import StreamPacker
from stream_dataloader.streams import FileCache
from stream_dataloader.testing._items import assert_same

OPTIONS = {"memmap": {}, "mds": {"size_limit": 1200}, "lmdb": {"window": 3}}


def content(path, **options):
    """All that a reader of a store sees, but for its path, format and size."""
    sources, store = stores.open(path, **options)
    places = [(source, step) for source in sources for step in range(store.length(source))]
    info = store.info()
    try:
        return {
            "keys": [store.key(source) for source in sources],
            "metadata": [store.metadata(source) for source in sources],
            "lengths": store.lengths.tolist(),
            "items": [list(store(source)) for source in sources],
            "item": [store.item(*place) for place in places],
            "second halves": [list(store((n, store.length(n) // 2, None), start=0)) for n in sources],
            "of the store": (info.streams, info.steps, dict(info.leaves), info.metadata.get("of")),
            "problems": store.verify(),
        }
    finally:
        store.close()


def assert_equal(found, expected):
    for name, value in expected.items():
        assert_same([found[name]], [value], name, "joined, and packed at once")


class TestJoinedStore(StoreTests):
    has_checksums = True
    damages = 4
    streams = STREAMS

    def make(self, tmp_path):
        pack_parts(tmp_path / "a", 3, (list(range(len(STREAMS))), lambda number: iter(STREAMS[number])))
        stores.join(tmp_path / "a")
        return stores.JoinedStore(tmp_path / "a")


class Streams:
    """A factory of random streams, of which some fail."""

    def __init__(self, lengths, failing=()):
        self.streams, self.failing = images(lengths, size=(1, 2, 2)), failing

    def __call__(self, number):
        if number in self.failing:
            raise OSError("unreadable")
        noise = np.random.default_rng(get_stream_info().seed).integers(0, 1 << 30)
        for item in self.streams[number]:
            yield item | {"noise": noise}


def pack_parts(path, parts, streams, order=None, **options):
    numbers = list(range(parts)) if order is None else order
    return [stores.pack(streams, path, part=(number, parts), **options) for number in numbers]


def problems(path, **options):
    try:
        return stores.verify(path, **options)
    except StoreError as error:  # it is found when the store is opened
        return [str(error)]


@pytest.mark.parametrize("format", sorted(OPTIONS))
@pytest.mark.parametrize("deltas", [None, {"label": (-1, 0)}], ids=["plain", "deltas"])
def test_a_damaged_byte_of_any_part_is_found_by_verify(tmp_path, format, deltas):
    streams = list(range(len(STREAMS))), lambda number: iter(STREAMS[number])
    pack_parts(tmp_path, 2, streams, format=format, **OPTIONS[format])
    stores.join(tmp_path)
    assert stores.verify(tmp_path, deltas=deltas) == []
    for file in sorted(path for path in tmp_path.glob("?-of-2/**/*") if path.stat().st_size > 1000):
        content = bytearray(file.read_bytes())
        content[-20] ^= 1
        file.write_bytes(content)
        assert problems(tmp_path, deltas=deltas), f"{file.name} is damaged"
        content[-20] ^= 1
        file.write_bytes(content)


@random_cases(150, 8)
@given(
    format=st.sampled_from(sorted(OPTIONS)),
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=9).filter(any),
    parts=st.integers(1, 6),
    workers=st.sampled_from([0, 0, 0, 2]),
    data=st.data(),
)
def test_parts_that_are_joined_are_the_store_that_is_packed_at_once(
    tmp_path_factory, format, lengths, parts, workers, data
):
    folder = tmp_path_factory.mktemp("join")
    failing = data.draw(st.sets(st.integers(0, len(lengths) - 1), max_size=len(lengths) - 1))
    order = data.draw(st.permutations(range(parts)))
    how = {
        "format": format,
        "on_error": "skip",
        "seed": 5,
        "metadata": {"of": "all"},
        "stream_metadata": lambda number: {"n": number},
        **OPTIONS[format],
    }
    streams = list(range(len(lengths))), Streams(lengths, failing)
    whole = stores.pack(streams, folder / "whole", **how)
    reports = pack_parts(folder / "parts", parts, streams, order, num_workers=workers, **how)
    info = stores.join(folder / "parts")
    assert_equal(content(folder / "parts"), content(folder / "whole"))
    assert (info.streams, info.steps) == (whole.streams, whole.steps)
    assert sum(report.steps for report in reports) == whole.steps
    assert sorted(error.source_index for report in reports for error in report.skipped) == sorted(failing)
    shutil.rmtree(folder)


def packed_sources(monkeypatch):
    """Keep the numbers of the sources that packers are given."""
    given, pack = [], StreamPacker.__call__

    def noted(self, source):
        given.append((get_stream_info().epoch, get_stream_info().source_index))
        return pack(self, source)

    monkeypatch.setattr(StreamPacker, "__call__", noted)
    return given


def test_a_part_is_given_its_own_sources_only(tmp_path, monkeypatch):
    given = packed_sources(monkeypatch)
    stores.pack((range(100_000), open_numbers), tmp_path / "a", part=(7, 20_000))
    assert given == [*((0, number) for number in range(35, 40)), (1, 35)]


def test_after_an_error_only_sources_that_are_left_are_given_again(tmp_path, monkeypatch):
    given, broken = packed_sources(monkeypatch), {7}

    def open_stream(number):
        if number in broken:
            raise OSError("unreadable")
        return open_numbers(number)

    with pytest.raises(StreamError, match="source 7"):
        stores.pack((range(20), open_stream), tmp_path / "a", part=(0, 2))
    given.clear()
    broken.clear()
    stores.pack((range(20), open_stream), tmp_path / "a", part=(0, 2))
    assert given == [*((0, number) for number in range(7, 10)), (1, 7)]


def open_numbers(number):
    for step in range(number % 4 + 1):
        yield {"x": np.float32(100 * number + step)}


NUMBERS = list(range(20)), open_numbers


@pytest.mark.parametrize("format", OPTIONS)
def test_it_is_read_by_loaders_with_workers_deltas_and_columns_as_any_store(tmp_path, format):
    pack_parts(tmp_path / "parts", 3, NUMBERS, format=format, **OPTIONS[format])
    stores.join(tmp_path / "parts")
    stores.pack(NUMBERS, tmp_path / "whole", format=format, **OPTIONS[format])

    def batches(name, workers, **options):
        opened = stores.open(tmp_path / name, **options)
        loader = StreamDataLoader(StreamDataset(*opened, 4, time_steps=3), workers)
        return [{key: leaf.tolist() for key, leaf in batch.data.items()} for batch in loader]

    for options in ({}, {"columns": ["x"]}, {"deltas": {"x": [-1, 0, 2]}}):
        assert batches("parts", 2, **options) == batches("whole", 0, **options)
    with pytest.raises(TypeError, match=f"the format '?{format}.* no option 'colums'|no option 'colums'"):
        stores.open(tmp_path / "parts", colums=["x"])
    with pytest.raises(StoreError, match="y"):
        stores.open(tmp_path / "parts", columns=["y"])


@pytest.mark.parametrize("format", OPTIONS)
def test_nothing_is_copied(tmp_path, format):
    pack_parts(tmp_path / "a", 3, NUMBERS, format=format, **OPTIONS[format])
    before = {file: file.stat().st_ino for file in (tmp_path / "a").rglob("*") if file.is_file()}
    stores.join(tmp_path / "a")
    after = {file: file.stat().st_ino for file in (tmp_path / "a").rglob("*") if file.is_file()}
    assert before.items() <= after.items()
    assert sorted(file.name for file in after.keys() - before) == [
        "joined.json",
        "keys.bin",
        "notes.bin",
        "streams.bin",
    ]


# what interrupts


def pack_slowly(folder, opened, workers, alone=False):
    """Pack three parts one after another; return how many streams of each were there. `alone`: it may be killed."""

    def open_slowly(number):
        with open(opened, "a") as file:
            print(number, file=file)
        time.sleep(0.01 * alone)
        yield from range(number)

    if alone:
        os.setsid()
    sources = list(range(24))
    packed = [stores.pack((sources, open_slowly), folder, part=(n, 3), num_workers=workers) for n in range(3)]
    return [part.packed_before for part in packed]


@pytest.mark.parametrize("workers", [0, 2])
def test_after_a_kill_only_what_is_unfinished_is_packed_again(tmp_path, workers):
    opened = tmp_path / "opened"
    arguments = tmp_path / "a", opened, workers
    child = multiprocessing.get_context("fork").Process(target=pack_slowly, args=(*arguments, True))
    child.start()
    deadline = time.monotonic() + PATIENCE
    while not (tmp_path / "a" / "1-of-3.partial").exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    os.killpg(child.pid, signal.SIGKILL)
    child.join()
    assert (tmp_path / "a" / "0-of-3").exists()
    with pytest.raises(StoreError, match=r"lacks 2 of 3 parts: pack part=\(1, 3\), \(2, 3\)"):
        stores.join(tmp_path / "a")
    with pytest.raises(StoreError, match=r"has the parts 0-of-3; call stores.join"):
        stores.open(tmp_path / "a")
    opened.unlink(missing_ok=True)
    assert pack_slowly(*arguments)[0] == 8
    assert not set(range(8)) & set(map(int, opened.read_text().split())), "the finished part was packed again"
    assert stores.join(tmp_path / "a").steps == sum(range(24))
    sources, store = stores.open(tmp_path / "a")
    assert [list(store(source)) for source in sources] == [list(range(number)) for number in range(24)]


def join_until(folder, dies_at, kills):
    """Join, but for the given file of the index and those behind it."""
    replace, calls = os.replace, itertools.count()

    def dying(*names):
        if next(calls) == dies_at:
            if kills:
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyboardInterrupt
        replace(*names)

    os.replace = dying
    stores.join(folder)


@pytest.mark.one_of_each
@pytest.mark.parametrize("kills", [False, True])
@pytest.mark.parametrize("repacked", [False, True])
def test_a_join_that_is_cut_off_anywhere_leaves_no_store_and_is_repeated(tmp_path, repacked, kills):
    expected = None
    for dies_at in itertools.count():
        folder = tmp_path / str(dies_at)
        pack_parts(folder, 2, NUMBERS)
        if repacked:  # it was joined before, and a part is another now
            stores.join(folder)
            shutil.rmtree(folder / "1-of-2")
            stores.pack(NUMBERS, folder, part=(1, 2), num_workers=2)
        child = multiprocessing.get_context("fork").Process(target=join_until, args=(folder, dies_at, kills))
        child.start()
        child.join()
        if not child.exitcode:
            break
        try:
            found = content(folder)
        except StoreError:
            found = None
        if not repacked:
            assert found is None, f"there is a store, though file {dies_at} of its index was not written"
        stores.join(folder)
        expected = expected or content(folder)
        assert_equal(found or expected, expected)
        assert_equal(content(folder), expected)
        stores.join(folder)  # once more does no harm
        assert_equal(content(folder), expected)
        assert not [name for name in os.listdir(folder) if "joining" in name], "something is left behind"
    assert dies_at == 4


def join_slowly(folder, began, may_end):
    replace = os.replace

    def waiting(*names):
        began.set()
        may_end.wait(PATIENCE)
        replace(*names)

    os.replace = waiting
    stores.join(folder)


def test_while_another_process_joins_the_error_says_what_to_do(tmp_path):
    fork = multiprocessing.get_context("fork")
    began, may_end = fork.Event(), fork.Event()
    pack_parts(tmp_path / "a", 2, NUMBERS)
    child = fork.Process(target=join_slowly, args=(tmp_path / "a", began, may_end))
    child.start()
    assert began.wait(PATIENCE)
    with pytest.raises(StoreError, match=rf"/a is being joined by another process \(process {child.pid} .*call again"):
        stores.join(tmp_path / "a")
    may_end.set()
    child.join(PATIENCE)
    assert child.exitcode == 0
    assert stores.join(tmp_path / "a").streams == 20


def test_a_part_that_was_packed_again_is_noticed_by_those_who_read_it(tmp_path):
    pack_parts(tmp_path / "a", 2, NUMBERS)
    stores.join(tmp_path / "a")
    _, before = stores.open(tmp_path / "a")
    shutil.rmtree(tmp_path / "a" / "1-of-2")
    with pytest.raises((StoreError, FileNotFoundError), match="1-of-2"):
        list(before(15))
    stores.pack(NUMBERS, tmp_path / "a", part=(1, 2), metadata={"another": 1})
    with pytest.raises(StoreError, match="replaced"):
        list(before(15))
    _, now = stores.open(tmp_path / "a")
    with pytest.raises(StoreError, match="replaced"):
        list(now(15))


# what is refused


def test_parts_that_do_not_belong_together_are_refused(tmp_path):
    def refused(what, change, **options):
        folder = tmp_path / "a"
        pack_parts(folder, 3, NUMBERS)
        change(folder)
        with pytest.raises(StoreError, match=what):
            stores.join(folder)
        assert not (folder / "joined.json").exists()
        shutil.rmtree(folder)

    def again(folder, number=1, parts=3, streams=NUMBERS, **options):
        shutil.rmtree(folder / f"{number}-of-{parts}", ignore_errors=True)
        stores.pack(streams, folder, part=(number, parts), **options)

    numbers, open_stream = NUMBERS
    refused(r"lacks 1 of 3 parts: pack part=\(1, 3\)", lambda folder: shutil.rmtree(folder / "1-of-3"))
    refused("has parts of 3 and of 4", lambda folder: again(folder, 0, 4))
    refused("is a copy of part 1-of-3", lambda folder: shutil.copytree(folder / "1-of-3", folder / "3-of-3"))
    refused("1-of-3 was packed with other arguments: format", lambda folder: again(folder, format="mds"))
    refused("number of sources was 19, not 20", lambda folder: again(folder, streams=(numbers[1:], open_stream)))
    refused("fingerprint of sources", lambda folder: again(folder, streams=(numbers[::-1], open_stream)))
    refused("seed was 3, not None", lambda folder: again(folder, seed=3))
    refused("fingerprint of options", lambda folder: again(folder, metadata={"a": 1}))
    refused("items of .*1-of-3 are", lambda folder: again(folder, streams=(numbers, range)))
    refused("1-of-3", lambda folder: (folder / "1-of-3" / "store.json").write_text("{}"))
    refused("part.json", lambda folder: (folder / "1-of-3" / "part.json").write_text('{"kind": 1}'))
    with pytest.raises(StoreError, match="no finished part"):
        stores.join(tmp_path / "nowhere")


@pytest.mark.parametrize("part", [3, (0,), (0, 1, 2), (0.0, 2), "ab", (2, 2), (-1, 2), (0, 0)])
def test_what_is_no_part_is_refused(tmp_path, part):
    with pytest.raises((TypeError, ValueError), match=r"part is .*\(i, n\)"):
        stores.pack(NUMBERS, tmp_path / "a", part=part)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"worker_method": "thread"}, "worker_method"),
        ({"worker_method": "ray", "part": (0, 2)}, r"part is \(0, 2\).*leave it out"),
        (
            {"worker_method": "ray", "multiprocessing_context": "fork"},
            "context is 'fork'.*leave it out",
        ),
        ({"ray_remote_args": {"num_cpus": 2}}, 'ray_remote_args is .*needs worker_method="ray"'),
    ],
)
def test_options_of_a_cluster_that_do_not_go_together_are_refused(tmp_path, options, text):
    with pytest.raises(ValueError, match=text):
        stores.pack(NUMBERS, tmp_path / "a", **options)
    assert os.listdir(tmp_path) == []


def test_a_finished_part_is_not_packed_with_other_arguments(tmp_path):
    pack_parts(tmp_path / "a", 2, NUMBERS)
    (report, _) = pack_parts(tmp_path / "a", 2, NUMBERS)
    assert (report.streams, report.packed_before, report.steps) == (10, 10, 23)
    with pytest.raises(StoreError, match=r"fingerprint of options .* delete that folder"):
        stores.pack(NUMBERS, tmp_path / "a", part=(0, 2), metadata={"a": 1})
    with pytest.raises(FileExistsError):
        stores.pack(NUMBERS, tmp_path / "a")


# servers


@pytest.fixture
def bucket(server, tmp_path, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    monkeypatch.setenv("STREAM_DATALOADER_CACHE", str(tmp_path / "cache"))
    return {"s3": {"endpoint_url": server.url}}


@pytest.mark.parametrize("format", ["memmap", pytest.param("mds", marks=pytest.mark.slow)])
def test_in_a_bucket_only_the_index_is_sent(server, bucket, tmp_path, format):
    how = {"format": format, "storage_options": bucket, **OPTIONS[format]}
    pack_parts("s3://data/out", 3, NUMBERS, **how)
    with pytest.raises(FileExistsError):
        stores.pack(NUMBERS, "s3://data/out/1-of-3", **how)
    (again, *_) = pack_parts("s3://data/out", 3, NUMBERS, **how)
    assert again.packed_before == again.streams
    server.requests.clear()
    stores.join("s3://data/out", storage_options=bucket)
    sent = [path.partition("?")[0].removeprefix("/data/out/") for asked, path in server.requests if asked == "PUT"]
    assert sent == ["streams.bin", "keys.bin", "notes.bin", "joined.json"]
    stores.pack(NUMBERS, tmp_path / "whole", format=format, **OPTIONS[format])
    cache = FileCache(storage_options=bucket)
    assert_equal(content("s3://data/out", cache=cache), content(tmp_path / "whole"))
    with pytest.raises(FileExistsError):
        stores.pack(NUMBERS, "s3://data/out", **how)


# the command


def test_the_command_packs_parts_and_joins_them(tmp_path, capsys):
    stores.pack(NUMBERS, tmp_path / "first")
    for number in random.Random(1).sample(range(3), 3):
        assert not main(
            ["pack", f"{tmp_path / 'first'}", f"{tmp_path / 'a'}", "--part", f"{number}/3", "--workers", "0"]
        )
    capsys.readouterr()
    assert not main(["join", str(tmp_path / "a")])
    assert "20 streams, 50 steps" in capsys.readouterr().out
    assert_equal(content(tmp_path / "a"), content(tmp_path / "first"))
