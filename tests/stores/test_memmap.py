"""The memory-mapped store."""

import collections
import dataclasses
import json
import os
import pickle

import numpy as np
import pytest
import torch
from helpers import FULL
from packed import images, pack_here
from store_tests import StoreTests

from stream_dataloader import stores
from stream_dataloader.errors import StoreError
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

    @pytest.fixture
    def made(self, tmp_path):
        return MemmapStore(written(tmp_path / "images.store", STREAMS, workers=2))

    @pytest.fixture
    def expected(self):
        return STREAMS


def test_a_stream_has_its_key_and_metadata(tmp_path):
    store = MemmapStore(written(tmp_path / "a", STREAMS, metadata={"made": "here"}))
    assert [store.key(number) for number in range(4)] == [f"stream/{number}" for number in range(4)]
    assert store.metadata(2) == {"n": 2}
    assert store.info().metadata == {"made": "here"}


def test_some_leaves_of_dicts_can_be_read_alone(tmp_path):
    store = MemmapStore(written(tmp_path / "a", STREAMS), columns=["pose", "label"])
    assert [sorted(item) for item in store(2)] == [["label", "pose"]] * 7
    with pytest.raises(StoreError, match=r"no leaf \['depth'\].*'image', 'label', 'pose'"):
        MemmapStore(store.path, columns=["depth"])


@pytest.mark.parametrize(
    "item",
    [
        np.float32(3),
        7,
        True,
        torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        torch.tensor([1 + 2j]),
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
    assert repr(pickle.loads(pickle.dumps(again(0).__next__()))) == repr(found)


def test_a_step_may_be_large_and_a_stream_longer_than_memory_should_hold(tmp_path, monkeypatch):
    monkeypatch.setattr("stream_dataloader.stores.memmap.writer._MOST_COLLECTED_BYTES", 1 << 10)
    streams = images((50, 3), size=(3, 8, 8))
    store = MemmapStore(written(tmp_path / "a", streams))
    assert store.verify() == []
    assert [item["label"] for item in store(0)] == [item["label"] for item in streams[0]]


def test_a_stream_that_breaks_off_is_not_in_the_store(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    packer = MemmapPacker(str(folder))
    part = packer.part(0)

    def broken():
        yield from STREAMS[0]
        raise RuntimeError("broke off")

    with pytest.raises(RuntimeError, match="broke off"):
        part.write(0, "x", broken())
    with pytest.raises(ValueError, match=r"step 1: item\['image'\] is uint8 \(2,\)"):
        part.write(0, "x", iter([STREAMS[0][0], STREAMS[0][0] | {"image": np.zeros(2, np.uint8)}]))
    part.close()
    pack_here(packer, STREAMS)
    assert MemmapStore(folder).info().disk_bytes < 2 * sum(len(items) for items in STREAMS) * 100 + 4096


def test_an_object_is_refused_when_it_is_written(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(TypeError, match=r"item\['text'\].*an object such as a string.*transform"):
        MemmapPacker(str(tmp_path / "a")).part(0).write(0, "x", iter([{"text": "hello", "x": 1}]))


def test_a_file_that_is_cut_off_while_it_is_read_is_an_error(tmp_path):
    store = MemmapStore(written(tmp_path / "a", STREAMS))
    stream = store(3)
    next(stream)
    os.truncate(tmp_path / "a" / "0.bin", 10)
    with pytest.raises(StoreError, match=r"0\.bin was cut off"):
        next(stream)


def test_a_store_that_was_replaced_is_an_error_in_a_worker(tmp_path):
    store = MemmapStore(written(tmp_path / "a", STREAMS))
    sent = pickle.dumps(store)
    os.rename(tmp_path / "a", tmp_path / "old")
    written(tmp_path / "a", images((23, 0, 7, 31), seed=1))
    assert len(list(store(0))) == 23  # what is open stays
    with pytest.raises(StoreError):
        pickle.loads(sent)(0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2, and this release reads version 1"),
        ({"kind": "something"}, "is not of a"),
        ({"steps": 10**30}, "its checksum is another"),
    ],
)
def test_a_header_of_another_kind_is_named(tmp_path, change, message):
    path = written(tmp_path / "a", STREAMS)
    header = json.loads((tmp_path / "a" / "store.json").read_text())
    (tmp_path / "a" / "store.json").write_text(json.dumps(header | change))
    with pytest.raises(StoreError, match=message):
        stores.open(path)
