"""The memory-mapped store."""

import collections
import dataclasses
import itertools
import json
import multiprocessing
import os
import pickle
import time

import numpy as np
import pytest
import torch
from helpers import FULL
from packed import images, pack_here
from store_tests import StoreTests

from stream_dataloader import StreamDataLoader, StreamDataset, stores
from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.packing import StreamRecord
from stream_dataloader.stores.memmap import MemmapPacker, MemmapStore

STREAMS = images((23, 0, 7, 31))
Pair = collections.namedtuple("Pair", "one other")


@dataclasses.dataclass
class Sample:
    x: np.ndarray
    pair: Pair


def written(folder, streams, workers=1, **options):
    os.makedirs(folder)
    pack_here(MemmapPacker(str(folder), **options), streams, workers)
    return str(folder)


class TestMemmapStore(StoreTests):
    damages = 500 if FULL else 12
    has_checksums = True

    def make(self, tmp_path):
        return MemmapStore(written(tmp_path / "images.store", STREAMS, workers=2))

    streams = STREAMS


@pytest.mark.parametrize(
    "item",
    [
        np.float32(3),
        7,
        True,
        torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        (torch.tensor([1 + 2j]), torch.zeros(2, dtype=torch.float8_e4m3fn)),
        np.arange(3, dtype=">i4"),
        (np.zeros(2, np.float16), {"b": np.ones((1, 2)), 3: np.uint32(9)}),
        Sample(np.zeros(3), Pair(np.int8(1), np.zeros((2, 0)))),
    ],
    ids=repr,
)
def test_items_of_any_numbers_come_back(tmp_path, item):
    store = MemmapStore(written(tmp_path / "a", [[item, item]]))
    (found, _) = store(0)
    assert type(found) is type(item) or isinstance(found, (np.generic, np.ndarray))
    again = MemmapStore(written(tmp_path / "b", [[found, found]]))
    assert again.info().leaves == store.info().leaves
    assert repr(next(again(0))) == repr(found)


def test_streams_of_any_length_follow_each_other_whatever_the_blocks_they_are_collected_in(tmp_path, monkeypatch):
    """Each is a part of a block of four steps, a whole one, several, or more than memory may hold."""
    monkeypatch.setattr("stream_dataloader.stores.memmap.writer._MOST_ROWS", 4)
    monkeypatch.setattr("stream_dataloader.stores.memmap.writer._MOST_COLLECTED_BYTES", 1 << 11)
    monkeypatch.setattr("stream_dataloader.stores.memmap.writer._BLOCK_BYTES", 1 << 10)
    lengths = [length for pair in itertools.product((0, 1, 3, 4, 8, 9, 12, 13, 25), repeat=2) for length in pair]
    streams = images(lengths, size=(3, 8, 8))
    store = MemmapStore(written(tmp_path / "a", streams))
    assert store.verify() == []
    for number, items in enumerate(streams):
        found = [(item["image"].tobytes(), str(item["label"]), str(item["pose"])) for item in store(number)]
        expected = [(item["image"].tobytes(), str(item["label"]), str(item["pose"])) for item in items]
        assert found == expected, f"{lengths[number]} steps after {lengths[number - 1]}"


def test_a_stream_that_breaks_off_is_not_in_the_store(tmp_path):
    packer = MemmapPacker(str(tmp_path))
    part = packer.part(0)
    with pytest.raises(TypeError, match=r"item\['text'\].*an object such as a string.*transform"):
        part.write(0, "x", iter([{"text": "hello", "x": 1}]))
    with pytest.raises(ValueError, match="step 1: "):
        part.write(0, "x", iter([STREAMS[0][0], STREAMS[0][0] | {"image": np.zeros(2, np.uint8)}]))
    part.close()
    pack_here(packer, STREAMS)
    assert MemmapStore(tmp_path).info().disk_bytes < 2 * sum(len(items) for items in STREAMS) * 100 + 4096


def test_a_leaf_of_another_size_is_an_error_also_while_it_is_read(tmp_path):
    path = written(tmp_path / "a", STREAMS)
    stream, size = MemmapStore(path)(3), os.path.getsize(tmp_path / "a" / "0.bin")
    next(stream)
    for other in (size + 1, size - 1, 10):
        os.truncate(tmp_path / "a" / "0.bin", other)
        with pytest.raises(StoreError):
            stores.open(path)
    with pytest.raises(StoreError, match=r"0\.bin was cut off"):
        next(stream)


@pytest.mark.parametrize("change", [{"version": 2}, {"kind": "something"}, {"steps": 10**30}])
def test_a_header_that_is_another_is_named(tmp_path, change):
    path = written(tmp_path / "a", STREAMS)
    header = json.loads((tmp_path / "a" / "store.json").read_text())
    (tmp_path / "a" / "store.json").write_text(json.dumps(header | change))
    with pytest.raises(StoreError, match=r"store\.json"):
        stores.open(path)


def epoch(store, workers, method=None, **options):
    dataset = StreamDataset(store.sources, store, batch_size=2, time_steps=3, seed=3, lengths=store.lengths, **options)
    return StreamDataLoader(dataset, num_workers=workers, multiprocessing_context=method if workers else None)


@pytest.mark.parametrize("streams", [[], [[]], [[], []]])
def test_a_store_of_nothing_can_be_read(tmp_path, streams):
    store = MemmapStore(written(tmp_path / "a", streams))
    assert (store.lengths.tolist(), store.verify(), store.info().leaves) == ([0] * len(streams), [], {})
    assert [list(store(number)) for number in store.sources] == streams
    assert not streams or list(epoch(store, 0)) == []
    assert len(pickle.loads(pickle.dumps(store))) == len(streams)


def test_leaves_of_no_bytes_are_counted(tmp_path):
    store = MemmapStore(written(tmp_path / "a", [[{"x": np.zeros((0, 3)), "y": np.zeros(0, np.int8)}] * 5]))
    assert [item["x"].shape for item in store(0)] == [(0, 3)] * 5
    assert store.verify() == []
    assert [tuple(batch.data["x"].shape) for batch in epoch(store, 0)] == [(3, 2, 0, 3)] * 2


KEYS = ["", " ", "a/b", "../up", "new\nline", "nul\0", "é中🎥", "\udcff", "[0]", "%2F", "'", "0"]


def test_keys_of_any_characters_come_back(tmp_path):
    stores.pack((images([2] * len(KEYS)), iter), tmp_path / "a", keys=KEYS, num_workers=0)
    store = MemmapStore(tmp_path / "a")
    found = [store.key(number) for number in store.sources]
    assert found == [key if key != "\udcff" else "\\udcff" for key in KEYS]
    assert [store.number(key) for key in found] == list(store.sources)
    assert store.verify() == []


def test_leaves_are_a_list_of_names_and_info_tells_of_them(tmp_path):
    path = written(tmp_path / "a", images((3,)))
    assert [sorted(item) for item in MemmapStore(path, columns=["pose", "label"])(0)] == [["label", "pose"]] * 3
    assert stores.inspect(path, columns=["label"]).leaves == {"['label']": "int64 ()"}
    with pytest.raises(TypeError):
        MemmapStore(path, columns="label")
    for folder in (path, written(tmp_path / "b", [[np.zeros(3)]])):
        with pytest.raises(StoreError, match="no leaf 'depth'"):
            MemmapStore(folder, columns=["depth"])


def test_a_table_that_was_written_over_is_an_error_in_a_worker(tmp_path):
    store = MemmapStore(written(tmp_path / "a", images((4, 4))))
    sent = pickle.dumps(store)
    with open(tmp_path / "a" / "streams.bin", "rb+") as file:
        file.write(np.array([5], "<i8").tobytes())
    worker = pickle.loads(sent)
    with pytest.raises(StoreError):
        worker(0)
    assert len(list(worker(1))) == 4


def many(folder, count):
    """A store of many streams, a few of which lie in it many times over."""
    os.makedirs(folder)
    packer = MemmapPacker(str(folder))
    part = packer.part(0)
    places = [part.write(n, str(n), iter([np.int16(n), np.int16(-n)])) for n in range(10)]
    part.close()
    packer.finish([StreamRecord(n, f"stream number {n}", *places[n % 10]) for n in range(count)])
    return str(folder)


def unshared_bytes(path):
    """What workers that read a store, shuffled, hold for themselves."""
    psutil = pytest.importorskip("psutil")
    store = MemmapStore(path)
    iterator = iter(epoch(store, 2, "spawn", shuffle=True))
    for _ in range(50):
        next(iterator)
    return max(psutil.Process(child.pid).memory_full_info().uss for child in multiprocessing.active_children())


@pytest.mark.slow
def test_a_million_streams_open_in_two_seconds(tmp_path):
    path = many(tmp_path / "a", 1_000_000)
    begun = time.thread_time()
    sources, store = stores.open(path)
    assert time.thread_time() - begun < 2
    assert (len(sources), store.key(777_777)) == (1_000_000, "stream number 777777")
    assert [int(item) for item in store(999_999)] == [9, -9]


@pytest.mark.slow
def test_a_million_streams_cost_a_worker_less_than_50_megabytes(tmp_path):
    few = unshared_bytes(many(tmp_path / "few", 1000))
    assert unshared_bytes(many(tmp_path / "many", 1_000_000)) - few < 50e6
