"""Stores on a server: what is fetched and when, what goes wrong on the way, and packing to a URL."""

import itertools
import os
import threading

import fsspec
import numpy as np
import pytest
from helpers import PATIENCE
from packed import images, pack_here
from store_tests import StoreTests

from stream_dataloader import StreamDataLoader, StreamDataset, stores
from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.formats import FORMATS, INDEXES
from stream_dataloader.streams import FileCache
from stream_dataloader.testing import check_resume

STREAMS = images((23, 0, 7, 31))
#: Packed so that each stream of some length has several pieces or shards.
SMALL = {"memmap": {}, "mds": {"size_limit": 1200}}


pytestmark = pytest.mark.usefixtures("tries_follow_at_once")


@pytest.fixture(autouse=True)
def _fast_and_small(tmp_path, monkeypatch):
    monkeypatch.setenv("STREAM_DATALOADER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("stream_dataloader.stores.memmap.store._PIECE_BYTES", 600)  # ten images


@pytest.fixture(params=INDEXES)
def url(request, tmp_path, server):
    """A store of `STREAMS` on the server."""
    os.makedirs(folder := tmp_path / request.param)
    packer = FORMATS[request.param].load(FORMATS[request.param].packer)
    pack_here(packer(str(folder), **SMALL[request.param]), STREAMS)
    return server.put_folder(folder)


def numbers(store):
    return [[int(item["label"]) for item in store(number)] for number in store.sources]


EXPECTED = [[int(item["label"]) for item in items] for items in STREAMS]


def labels(batches):
    return sorted(label for batch in batches for label in batch.data["label"][batch.mask].tolist())


def loader(url, workers=0, **options):
    dataset = StreamDataset(*stores.open(url), batch_size=2, time_steps=4, shuffle=True, seed=1, **options)
    return StreamDataLoader(dataset, num_workers=workers)


def fetched(server):
    """What the server has sent of each file."""
    return {name: server.sent[name] for name in server.files}


def whole(server):
    return {name: len(content) for name, content in server.files.items()}


class TestRemoteStore(StoreTests):
    @pytest.fixture
    def made(self, url):
        return stores.open(url).open_stream

    @pytest.fixture
    def expected(self):
        return STREAMS


# what is fetched


def test_each_byte_is_fetched_once_by_two_loaders_with_two_workers(server, url):
    first, second = loader(url, 2), loader(url, 2)
    for _ in range(2):
        both = zip(*zip(first, second, strict=True), strict=True)
        assert list(map(labels, both)) == [sorted(itertools.chain(*EXPECTED))] * 2
    assert fetched(server) == whole(server)
    assert stores.open(url).open_stream.info().disk_bytes is None


def test_what_is_not_read_is_not_fetched(server, url):
    _, store = stores.open(url, columns=["label"], predownload=0)
    before = server.sent.total()
    assert len(next(store((3, 0, 5)))) == 1
    assert 0 < server.sent.total() - before < sum(whole(server).values()) / 4
    store.close()


def ahead_is_done():
    for thread in threading.enumerate():
        if thread.name == "stream_dataloader shard":
            thread.join(PATIENCE)


def test_the_next_parts_of_a_stream_are_fetched_ahead(server, url):
    _, store = stores.open(url, columns=["image"], predownload=9)
    stream = store(3)
    next(stream)
    ahead_is_done()
    before = server.sent.total()
    assert len(list(stream)) == 30
    assert server.sent.total() == before


def test_parts_are_deleted_to_make_room(tmp_path, server, url):
    limit = max(whole(server).values()) + 4000
    cache = FileCache(directory=tmp_path / "small", size_limit_bytes=limit)
    _, store = stores.open(url, cache=cache, predownload=0)
    for _ in range(2):
        assert numbers(store) == EXPECTED
    assert sum(path.stat().st_size for path in (tmp_path / "small").glob("*/*-*")) <= limit


@pytest.mark.parametrize("url", ["memmap"], indirect=True)
def test_training_is_resumed_exactly(url):
    assert check_resume(lambda workers: loader(url, workers), epochs=1)


# what goes wrong


@pytest.mark.one_of_each
@pytest.mark.parametrize("scheme", ["http", "s3"])
@pytest.mark.parametrize("wrong", ["cut", 503])
def test_a_server_that_fails_now_and_then_is_asked_again(tmp_path, server, url, monkeypatch, scheme, wrong):
    options = {}
    if scheme == "s3":
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "testing")
        url, options = "s3://data", {"s3": {"endpoint_url": server.url}}
    cache = FileCache(directory=tmp_path / "c", storage_options=options, timeout_seconds=PATIENCE)
    _, store = stores.open(url, cache=cache, predownload=0)
    server.plan += [wrong, None, wrong, wrong, None]
    assert numbers(store) == EXPECTED
    assert not server.plan


def test_a_server_that_is_silent_is_an_error_of_the_network(server, url):
    _, store = stores.open(url, cache=FileCache(timeout_seconds=0.1), predownload=0)
    server.always = "silent"
    with pytest.raises(ConnectionError):
        next(store(3))


def test_a_slow_server_is_waited_for(server, url):
    _, store = stores.open(url, predownload=0)
    server.plan.append("slow")
    timer = threading.Timer(0.05, server.go_on.set)
    timer.start()
    assert numbers(store) == EXPECTED
    timer.join()


def test_a_store_that_is_replaced_is_an_error(tmp_path, server, url):
    _, store = stores.open(url, predownload=0)
    for name in list(server.files):
        if "store.json" not in name and "index.json" not in name:
            content = bytearray(server.files[name])
            content[-1] ^= 1
            server.put(name, bytes(content))
    with pytest.raises(StoreError):
        numbers(store)


def test_a_file_that_is_missing_or_of_another_size_is_an_error(tmp_path, server, url):
    name = next(name for name in server.files if name.endswith(("/0.bin", ".00000.mds")))
    content = server.files.pop(name)
    for other in (None, content + b"more", content[:-1]):
        if other is not None:
            server.put(name, other)
        with pytest.raises((StoreError, FileNotFoundError), match=os.path.basename(name)):
            numbers(stores.open(url).open_stream)


def test_a_place_without_a_store_is_an_error(server):
    with pytest.raises(StoreError):
        stores.open(f"{server.url}/nothing")
    for name in INDEXES:
        with pytest.raises(FileNotFoundError):
            stores.open(f"{server.url}/nothing", format=name)


# packing


@pytest.fixture
def place():
    """A folder of fsspec's memory."""
    system = fsspec.filesystem("memory")
    yield "memory://bucket/out"
    system.store.clear()
    system.pseudo_dirs[:] = [""]


def open_images(number):
    yield from STREAMS[number]


def refuse(number):
    raise AssertionError


@pytest.mark.parametrize("format", INDEXES)
def test_what_is_packed_to_a_url_is_there_whole_or_not_at_all(tmp_path, place, monkeypatch, format):
    system, path, index = fsspec.filesystem("memory"), "/bucket/out", INDEXES[format]
    put, sent, dies_at = type(system).put_file, [], None

    def put_file(self, local, name, **more):
        if os.path.basename(name) == dies_at:
            raise ConnectionError("lost")
        sent.append(os.path.basename(name))
        put(self, local, name, **more)

    monkeypatch.setattr(type(system), "put_file", put_file)
    pack = {"format": format, **SMALL[format]}
    stores.pack((range(4), open_images), "memory://bucket/first", **pack)
    names = sent[:]
    assert names[-1] == index
    sent.clear()
    for dies_at in names:
        with pytest.raises(ConnectionError, match="4 of 4 streams are packed"):
            stores.pack((range(4), open_images if dies_at == names[0] else refuse), f"{place}/", **pack)
        assert not system.exists(f"{path}/{index}")
    dies_at = None
    report = stores.pack((range(4), refuse), place, **pack)
    assert {os.path.basename(name) for name in system.ls(path, detail=False)} == {*names}
    data = [name for name in sent if name.endswith((".mds", "0.bin"))]
    assert len(data) == len({*data}), "sent again"
    assert (report.path, report.packed_before) == (place, 4)
    assert report.bytes == sum(system.size(f"{path}/{name}") for name in names)
    _, store = stores.open(place)
    assert numbers(store) == EXPECTED
    assert store.verify() == []
    assert os.listdir(tmp_path / "cache" / "packing") == []
    with pytest.raises(FileExistsError):
        stores.pack((range(4), refuse), place, **pack)


def test_a_bucket_that_answers_503_is_sent_to_again(server, tmp_path, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    options = {"s3": {"endpoint_url": server.url}}
    server.puts += [503, None, 503, 503, None]
    stores.pack((range(4), open_images), "s3://data/out", storage_options=options)
    _, store = stores.open("s3://data/out", cache=FileCache(storage_options=options))
    assert numbers(store) == EXPECTED
    assert server.count("PUT") == len(server.files) + 3


def test_numbers_without_bytes_are_not_asked_for(tmp_path, server):
    os.makedirs(folder := tmp_path / "a")
    pack_here(FORMATS["memmap"].load("MemmapPacker")(str(folder)), [[{"x": np.zeros((0, 3)), "y": np.int8(1)}] * 5])
    _, store = stores.open(server.put_folder(folder))
    assert [item["x"].shape for item in store(0)] == [(0, 3)] * 5
    assert store.verify() == []
