"""The memory-mapped store at its limits: odd keys, leaves of no bytes, many streams, several stores, other workers."""

import multiprocessing
import os
import pickle
import time

import numpy as np
import pytest
import torch
from helpers import START_METHODS
from packed import images, pack_here

from stream_dataloader import StreamDataLoader, StreamDataset, interleave, stores
from stream_dataloader.errors import StoreError
from stream_dataloader.stores import MemmapStore
from stream_dataloader.stores._base.packing import StreamRecord
from stream_dataloader.stores.memmap import MemmapPacker


def written(folder, streams, keys=None):
    os.makedirs(folder)
    packer = MemmapPacker(str(folder))
    if keys is None:
        pack_here(packer, streams)
        return str(folder)
    part = packer.part(0)
    packed = [
        part.write(number, key, iter(items)) for number, (key, items) in enumerate(zip(keys, streams, strict=True))
    ]
    part.close()
    packer.finish([StreamRecord(n, key, *found) for n, (key, found) in enumerate(zip(keys, packed, strict=True))])
    return str(folder)


def epoch(store, workers, method=None, **options):
    dataset = StreamDataset(store.sources, store, batch_size=2, time_steps=3, seed=3, lengths=store.lengths, **options)
    return StreamDataLoader(dataset, num_workers=workers, multiprocessing_context=method if workers else None)


def labels(loader):
    return [(batch.source.tolist(), batch.data["label"].tolist(), batch.data["image"].sum().item()) for batch in loader]


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
    store = MemmapStore(written(tmp_path / "a", images([2] * len(KEYS)), KEYS))
    found = [store.key(number) for number in store.sources]
    assert found == [key if key != "\udcff" else "\\udcff" for key in KEYS]
    assert [store.number(key) for key in found] == list(store.sources)
    assert store.verify() == []


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_numbers_of_a_dtype_that_numpy_lacks_keep_it(tmp_path):
    numbers = [torch.zeros(2, dtype=dtype) for dtype in (torch.complex32, torch.float8_e4m3fn, torch.bfloat16)]
    store = MemmapStore(written(tmp_path / "a", [[tuple(numbers)]]))
    assert [leaf.dtype for leaf in next(store(0))] == [leaf.dtype for leaf in numbers]


def test_leaves_are_a_list_of_names_and_info_tells_of_them(tmp_path):
    path = written(tmp_path / "a", images((3,)))
    assert stores.inspect(path, columns=["label"]).leaves == {"['label']": "int64 ()"}
    with pytest.raises(TypeError, match="columns is 'label'; give a list of names"):
        MemmapStore(path, columns="label")
    alone = written(tmp_path / "b", [[np.zeros(3)]])
    with pytest.raises(StoreError, match=r"no leaf \['label'\]; its items are no dicts"):
        MemmapStore(alone, columns=["label"])


@pytest.mark.parametrize("method", START_METHODS)
def test_workers_do_not_matter_however_they_are_started(tmp_path, method):
    store = MemmapStore(written(tmp_path / "a", images((23, 0, 7, 31, 1, 12))))
    assert labels(epoch(store, 2, method, shuffle=True)) == labels(epoch(store, 0, shuffle=True))


def test_two_stores_are_read_side_by_side(tmp_path):
    stores_ = [MemmapStore(written(tmp_path / name, images((9, 5, 7), seed))) for name, seed in (("a", 0), ("b", 1))]
    datasets = [StreamDataset(s.sources, s, batch_size=2, time_steps=3, lengths=s.lengths) for s in stores_]
    found = {}
    mixed = interleave(datasets)
    for batch in StreamDataLoader(mixed, num_workers=2):
        for t, lane in zip(*np.nonzero(batch.mask.numpy()), strict=True):
            place = mixed.locate(int(batch.source[t, lane]))
            found.setdefault(tuple(place), []).append(int(batch.data["label"][t, lane]))
    assert found == {
        (which, number): [1000 * number + step for step in range(length)]
        for which in range(2)
        for number, length in enumerate((9, 5, 7))
    }


@pytest.mark.parametrize(("before", "after"), [(2, 0), (0, 2), (1, 2)])
def test_resumes_in_mid_stream_with_other_workers(tmp_path, before, after):
    store = MemmapStore(written(tmp_path / "a", images((23, 0, 7, 31, 1, 12))))
    whole = labels(epoch(store, 0, shuffle=True))
    loader = epoch(store, before, shuffle=True)
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    state = loader.state_dict()
    del iterator, loader
    again = epoch(MemmapStore(store.path), after, shuffle=True)
    again.load_state_dict(state)
    assert labels(again) == whole[4:]


def test_a_table_that_was_written_over_is_an_error_in_a_worker(tmp_path):
    store = MemmapStore(written(tmp_path / "a", images((4, 4))))
    sent = pickle.dumps(store)
    with open(tmp_path / "a" / "streams.bin", "rb+") as file:
        file.write(np.array([5], "<i8").tobytes())
    worker = pickle.loads(sent)
    with pytest.raises(StoreError, match="stream 0 lies outside of the store's steps"):
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
