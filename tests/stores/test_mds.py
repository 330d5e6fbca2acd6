"""MDS datasets: written, packed, read from folders and servers, damaged."""

import decimal
import errno
import gzip
import itertools
import json
import multiprocessing
import os
import pathlib
import pickle
import shutil
import signal
from typing import ClassVar

import numpy as np
import pytest
from helpers import FULL
from packed import finish_here, images, pack_here
from store_tests import StoreTests
from test_images import jpeg_turned

from stream_dataloader import StreamDataLoader, StreamDataset, stores
from stream_dataloader.errors import StoreError, StreamError
from stream_dataloader.stores import MdsStore, MdsWriter
from stream_dataloader.stores._base.packing import StreamRecord
from stream_dataloader.stores.mds import MdsPacker
from stream_dataloader.stores.mds import streams as mds_streams

STREAMS = images((23, 0, 7, 31))
COMPRESSIONS = ["zstd", "gz", "bz2", "br", "snappy"]
fork = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("STREAM_DATALOADER_CACHE", str(tmp_path / "cache"))


def packed(folder, streams, workers=1, **options):
    os.makedirs(folder)
    pack_here(MdsPacker(str(folder), **options), streams, workers)
    return str(folder)


def rows(count=20, **options):
    return [{"x": np.full((2, 3), n, np.float32), "y": n, "episode": f"no. {n // 6}"} for n in range(count)]


COLUMNS = {"x": "ndarray:float32:2,3", "y": "int", "episode": "str"}
EPISODES = [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 16, 17], [18, 19]]


def written(folder, samples=None, columns=COLUMNS, **options):
    options = {"size_limit": 640, "hashes": ["sha1"]} | options
    with MdsWriter(folder, columns=columns, **options) as writer:
        for sample in rows() if samples is None else samples:
            writer.write(sample)
    return str(folder)


def numbers(store):
    return [[item["y"] for item in store(number)] for number in store.sources]


def changed_index(folder, change):
    """Change index.json as somebody else might have written it."""
    path = pathlib.Path(folder) / "index.json"
    content = json.loads(path.read_text())
    content.pop("stream_dataloader", None)
    change(content)
    path.write_text(json.dumps(content))


class TestMdsStore(StoreTests):
    has_checksums = True
    damages = 500 if FULL else 12

    def make(self, tmp_path):
        return MdsStore(packed(tmp_path / "images.mds", STREAMS, workers=2, size_limit=2000))

    streams = STREAMS


class TestSamples(StoreTests):
    """A stream is what one sample holds; its arrays differ in length."""

    damages = 200 if FULL else 6
    arrays: ClassVar = [
        (np.arange(3 * n, dtype=np.int16).reshape(n, 3) + n, np.arange(float(n))) for n in (9, 30, 1, 12)
    ]

    @pytest.fixture
    def expected(self):
        return [
            [{"label": np.int64(number), "x": row, "z": np.float64(value)} for row, value in zip(x, z, strict=True)]
            for number, (x, z) in enumerate(self.arrays)
        ]

    def make(self, tmp_path):
        samples = [{"label": number, "x": x, "z": z} for number, (x, z) in enumerate(self.arrays)]
        return MdsStore(
            written(tmp_path / "a", samples, {"x": "ndarray:int16", "label": "int", "z": "ndarray"}), stream="sample"
        )


# what a stream is


def test_a_stream_is_a_shard_or_the_samples_that_share_a_column(tmp_path):
    store = MdsStore(written(tmp_path / "a"))
    assert store.info().metadata["shards"] == len(store) == 3
    assert list(itertools.chain(*numbers(store))) == list(range(20))
    assert store.key(1) == "shard.00001.mds"
    store = MdsStore(store.path, stream="episode")
    assert numbers(store) == EPISODES
    assert (store.key(2), store.number("no. 3"), store.lengths.tolist()) == ("no. 2", 3, [6, 6, 6, 2])
    assert set(next(store(0))) == {"x", "y"}
    assert set(next(MdsStore(store.path, stream="column:episode", columns=["episode", "y"])(0))) == {"y", "episode"}
    assert len(MdsStore(store.path, stream="y")) == 20


def test_a_key_that_comes_again_is_another_stream(tmp_path):
    samples = [{"x": n, "k": key} for n, key in enumerate([5, 5, 6, 5, 5, 5])]
    store = MdsStore(written(tmp_path / "a", samples, {"x": "uint8", "k": "int"}), stream="k")
    assert [store.key(number) for number in store.sources] == ["5", "6", "5@3"]
    assert store.lengths.tolist() == [2, 1, 3]


def test_a_pass_over_a_column_is_made_once(tmp_path, monkeypatch):
    path = written(tmp_path / "a")
    assert len(MdsStore(path, stream="episode")) == 4
    passes = []
    scan = mds_streams.MdsShards.scan
    monkeypatch.setattr(mds_streams.MdsShards, "scan", lambda *args: (passes.append(args), scan(*args))[1])
    assert len(pickle.loads(pickle.dumps(MdsStore(path, stream="episode")))) == 4
    assert not passes
    shutil.rmtree(path)
    assert len(MdsStore(written(path, rows(30)), stream="episode")) == 5
    assert len(passes) == 1


def test_a_sample_may_be_a_list_of_pictures(tmp_path):
    pictures = list(np.random.default_rng(0).integers(0, 256, (5, 6, 8, 3), np.uint8))
    columns = {"film": "list[png]", "title": "str", "speed": "ndarray:float32"}
    samples = [
        {"film": pictures[:count], "title": str(count), "speed": np.arange(count, dtype=np.float32)}
        for count in (5, 1, 3)
    ]
    store = MdsStore(written(tmp_path / "a", samples, columns), stream="sample")
    assert store.lengths.tolist() == [5, 1, 3]
    for number, sample in enumerate(samples):
        for step, item in enumerate(store(number)):
            np.testing.assert_equal(item, {"film": pictures[step], "title": sample["title"], "speed": step})
    out = {"film": np.zeros((2, 6, 8, 3), np.uint8), "speed": np.zeros(2, np.float32)}
    assert MdsStore(store.path, stream="sample", columns=["speed", "film"])(0, start=2).read_into(out) == 2
    np.testing.assert_equal(out, {"film": pictures[2:4], "speed": [2, 3]})


def test_a_sample_whose_arrays_differ_in_length_is_no_stream(tmp_path):
    samples = [{"x": np.zeros((3, 2)), "z": np.zeros(4)}]
    path = written(tmp_path / "a", samples, {"x": "ndarray", "z": "ndarray"})
    with pytest.raises(StoreError, match=r"stream 0.*\{'x': 3, 'z': 4\}"):
        MdsStore(path, stream="sample")(0)
    with pytest.raises(StoreError, match=r"no column of .* is an array or a list"):
        MdsStore(written(tmp_path / "b", [{"x": 1}], {"x": "int"}), stream="sample")


# what samples hold


VALUES = [
    ("bytes", [b"", b"\0abc"]),
    ("str", ["", "häß\U0001f600"]),
    ("int", [-(2**63), 7]),
    ("str_int", [10**40, -1]),
    ("str_float", [0.1, float("inf")]),
    ("str_decimal", [decimal.Decimal("1.000000000000000000000001"), decimal.Decimal(2)]),
    ("json", [{"a": [1, None, "x"]}, [0.5]]),
    ("uint64", [np.uint64(2**64 - 1), np.uint64(0)]),
    ("float16", [np.float16(0.5), np.float16(-1)]),
    ("ndarray", [np.arange(600, dtype=np.int8).reshape(300, 2), np.ones((1, 1, 1))]),
    ("ndarray:int32", [np.arange(3, dtype=np.int32), np.ones((2, 2), np.int32)]),
    ("ndarray:float64:2", [np.array([1.0, 2.0]), np.array([np.nan, 0.0])]),
    ("png", [np.arange(24, dtype=np.uint8).reshape(4, 6), np.full((3, 3, 4), 7, np.uint8)]),
    ("pil", [np.arange(24, dtype=np.uint8).reshape(2, 4, 3), np.full((3, 3), 70000, np.int32)]),
    ("list[pil]", [[], [np.zeros((2, 2), np.float32), np.ones((3, 1, 4), np.uint8)]]),
]


def test_values_come_back(tmp_path):
    for encoding, values in VALUES:
        path = tmp_path / encoding.replace(":", "-")
        store = MdsStore(written(path, [{"x": value} for value in values], {"x": encoding}, size_limit=None))
        found = [item["x"] for item in store(0)]
        for one, value in zip(found, values, strict=True):
            assert type(one) is type(value), encoding
            np.testing.assert_equal(one, value, encoding)


def test_jpeg_comes_back_but_for_a_few_shades_and_upright(tmp_path):
    image = np.add.outer(np.arange(40), np.arange(60))[..., None].repeat(3, -1).astype(np.uint8)
    image[..., 1] //= 2
    samples = [{"x": one} for one in (image, image[..., 0], jpeg_turned(image))]
    path = written(tmp_path / "a", samples, {"x": "jpeg"}, size_limit=None)
    for upright in (True, False):
        *found, turned = [item["x"] for item in MdsStore(path, upright=upright)(0)]
        assert turned.shape == ((60, 40, 3) if upright else (40, 60, 3))
        for one, value in zip(found, (image, image[..., 0]), strict=True):
            assert np.abs(one.astype(int) - value).max() < 9


REFUSED = [
    ("int", "7"),
    ("uint8", 256),
    ("int", 0.5),
    ("str", 7),
    ("ndarray:uint8", np.zeros(3)),
    ("ndarray:uint8:4", np.zeros(3, np.uint8)),
    ("ndarray", np.zeros((3, 0))),
    ("ndarray", np.zeros(3, complex)),
    ("jpeg", np.zeros((3, 3), np.float64)),
    ("ndarray:uint8:4", b"abc"),
]


@pytest.mark.parametrize(("encoding", "value"), REFUSED)
def test_what_an_encoding_does_not_take_is_refused(tmp_path, encoding, value):
    with MdsWriter(tmp_path, columns={"x": encoding}) as writer:
        with pytest.raises((TypeError, ValueError), match=f"sample 0: column 'x', encoding '{encoding}': "):
            writer.write({"x": value})
        with pytest.raises(ValueError, match=r"sample 0: a sample has no 'x'; it has \['y'\]"):
            writer.write({"y": value})
    assert len(MdsStore(tmp_path)) == 0


def test_windows_of_samples_of_all_sizes_are_written(tmp_path):
    rng = np.random.default_rng(0)
    columns = {"a": "ndarray", "b": "ndarray:int16", "c": "str", "d": "float32"}
    samples = [
        {
            "a": rng.standard_normal((2, 2)),
            "b": rng.integers(0, 9, 5, np.int16),
            "c": "x" * (n // 7 % 3 * 5 + (n > 40) * (n % 2)),
            "d": np.float32(n),
        }
        for n in range(60)
    ]
    store = MdsStore(written(tmp_path / "a", samples, columns, size_limit=None), columns=["b", "a", "d"])
    for start, count in itertools.product((0, 3, 39, 55), (1, 4, 16)):
        out = {name: np.repeat(np.zeros_like(samples[0][name])[None], count, 0) for name in "abd"}
        room = store(0, start=start).read_into(out)
        assert room == min(count, 60 - start)
        for name, found in out.items():
            np.testing.assert_equal(found[:room], [sample[name] for sample in samples[start : start + room]])


UNLIKE = [
    ("ndarray:int8", np.zeros(3, np.int8), np.zeros(1, np.int8)),
    ("ndarray", np.arange(6, dtype=np.int16).reshape(2, 3), np.arange(6, dtype=np.int16).reshape(3, 2)),
    ("ndarray", np.zeros(3, np.int16), np.zeros(3, np.int32)),
    ("json", 1, 1.5),
    ("png", np.zeros((3, 3), np.uint8), np.zeros((3, 1), np.uint8)),
]


@pytest.mark.parametrize(("encoding", "one", "other"), UNLIKE)
def test_a_sample_that_is_unlike_the_first_is_an_error_not_converted(tmp_path, encoding, one, other):
    sources, store = stores.open(written(tmp_path / "a", [{"x": one}] * 3 + [{"x": other}] * 3, {"x": encoding}))
    with pytest.raises(StreamError):
        list(StreamDataLoader(StreamDataset(sources, store, 1, time_steps=6)))


def test_columns_are_chosen_and_missing_ones_named(tmp_path):
    path = written(tmp_path / "a")
    assert set(next(MdsStore(path, columns=["y"])(0))) == {"y"}
    with pytest.raises(StoreError, match=r"no column 'z'; it has \['episode', 'x', 'y'\]"):
        MdsStore(path, columns=["z"])
    for stream in ("z", "x"):
        with pytest.raises(StoreError):
            MdsStore(path, stream=stream)


def test_pickles_are_refused_unless_allowed(tmp_path):
    class Harmful:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "harm"),))

    path = written(tmp_path / "a", [{"x": Harmful(), "y": 1}], {"x": "pkl", "y": "int"})
    with pytest.raises(StoreError, match="'pkl' is refused"):
        MdsStore(path)
    assert list(MdsStore(path, columns=["y"])(0)) == [{"y": 1}]
    assert not (tmp_path / "harm").exists()
    list(MdsStore(path, allow_pickle=True)(0))
    assert (tmp_path / "harm").exists()


# compression and hashes


@pytest.mark.parametrize("compression", [*COMPRESSIONS, "zstd:1"])
def test_compressed_shards_are_unpacked_once(tmp_path, compression, monkeypatch):
    path = written(tmp_path / "a", compression=compression, hashes=["xxh64", "blake2b"])
    store = MdsStore(path, stream="episode")
    assert numbers(store) == EPISODES
    monkeypatch.setattr("stream_dataloader.stores.mds.shards.unpack", None)
    assert numbers(MdsStore(path, stream="episode")) == numbers(store)
    assert store.verify() == []


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_what_unpacks_to_another_size_than_the_index_says_is_refused(tmp_path, compression):
    options = {"compression": compression, "size_limit": None, "hashes": None}
    path = written(tmp_path / "a", [{"x": np.zeros(3 << 20, np.uint8)}], {"x": "ndarray:uint8"}, **options)
    for size in (5000, 4 << 20):
        changed_index(path, lambda content, size=size: content["shards"][0]["raw_data"].update(bytes=size))
        with pytest.raises(StoreError, match=rf"shard.00000.mds\.\w+ .* to {size:,} bytes"):
            list(MdsStore(path)(0))


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_damaged_zip_is_named(tmp_path, compression):
    path = written(tmp_path / "a", compression=compression, hashes=None)
    zipped = pathlib.Path(path, f"shard.00001.mds.{compression}")
    data = zipped.read_bytes()
    for damaged in (data[: len(data) // 2] + b"\xff" * (len(data) - len(data) // 2), bytes(len(data))):
        zipped.write_bytes(damaged)
        store = MdsStore(path)
        assert [item["y"] for item in store(0)] == list(range(len(store(0)._steps)))
        with pytest.raises(StoreError, match=r"stream 1 .*shard.00001.mds"):
            list(store(1))
    changed_index(path, lambda content: content["shards"][0]["raw_data"].update(hashes={"md5": "0"}))
    with pytest.raises(StoreError, match=r"shard.00000.mds is damaged: its md5 is .* and should be 0"):
        list(MdsStore(path)(0))
    changed_index(path, lambda content: content["shards"][1].update(compression="lzma"))
    with pytest.raises(StoreError, match=r"shard 1.*no compression 'lzma'"):
        MdsStore(path)


def test_a_zip_beside_its_shard_is_verified_too(tmp_path):
    path = written(tmp_path / "a", compression="gz")
    zipped = tmp_path / "a" / "shard.00001.mds.gz"
    zipped.with_suffix("").write_bytes(gzip.decompress(zipped.read_bytes()))
    assert MdsStore(path).verify() == []
    zipped.write_bytes(zipped.read_bytes()[:-1])
    assert numbers(MdsStore(path, stream="episode")) == EPISODES
    problems = MdsStore(path).verify()
    assert [zipped.name in problem for problem in problems] == [True], problems


# damage


WRONG_INDEXES = [
    lambda c: c.update(version=3),
    lambda c: c["shards"][1].update(format="csv"),
    lambda c: c["shards"][1].update(samples=1 << 40),
    lambda c: c["shards"][1]["raw_data"].update(bytes=1 << 60),
    lambda c: c["shards"][1]["raw_data"].update(basename="../x"),
    lambda c: c["shards"][1]["raw_data"].update(basename=None),
    lambda c: c["shards"][1].update(compression="zstd"),
    lambda c: c["shards"][1].update(column_names=["episode", "x", "z"]),
    lambda c: c["shards"][1].update(column_sizes=[None]),
    lambda c: c["shards"][1].pop("samples"),
    lambda c: c["shards"].append(7),
    lambda c: [s.update(column_encodings=["str", "ndarray:int8:9", "int"]) for s in c["shards"]],
    lambda c: [s.update(column_encodings=["str", "what", "int"]) for s in c["shards"]],
]


@pytest.mark.parametrize("change", WRONG_INDEXES)
def test_an_index_that_cannot_be_is_refused(tmp_path, change):
    path = written(tmp_path / "a")
    changed_index(path, change)
    with pytest.raises(StoreError, match=r"index.json"):
        MdsStore(path)


def test_an_index_that_was_changed_is_noticed_if_this_package_wrote_it(tmp_path):
    index = pathlib.Path(path := written(tmp_path / "a"), "index.json")
    index.write_text(index.read_text().replace('"episode"', '"episude"'))
    with pytest.raises(StoreError):
        MdsStore(path)


WRONG_PLACES = [
    (0, 99, "it holds 99 samples, and the index says 9"),
    (4, 0, "sample 0 does not end where its columns do"),
    (8, 1 << 31, ""),
    (4 + 4 * 8, 1 << 30, ""),
    (lambda data: int.from_bytes(data[8:12], "little"), 1 << 30, "sample 1 does not end where its columns do"),
]


@pytest.mark.parametrize(("place", "value", "message"), WRONG_PLACES)
def test_a_shard_whose_samples_do_not_lie_end_to_end_is_refused(tmp_path, place, value, message):
    path = written(tmp_path / "a")
    shard = pathlib.Path(path, "shard.00000.mds")
    data = shard.read_bytes()
    place = place(data) if callable(place) else place
    shard.write_bytes(data[:place] + value.to_bytes(4, "little") + data[place + 4 :])
    with pytest.raises(StoreError, match=rf"stream 0 .*shard.00000.mds cannot be read: .*{message}"):
        MdsStore(path)(0)
    with pytest.raises(StoreError, match=r"shard.00000.mds"):
        MdsStore(path, stream="episode")


def test_streams_of_a_shard_are_read_apart(tmp_path, monkeypatch):
    monkeypatch.setattr("stream_dataloader.stores.mds.shards._MOST_SAMPLES", 4)
    streams = [[{"x": np.arange(3), "y": step} for step in range(n, n + 6)] for n in (0, 10, 20)]
    shard = pathlib.Path(path := packed(tmp_path / "a", streams), "shard.0.00000.mds")
    data = bytearray(shard.read_bytes())
    damaged = int.from_bytes(data[4 * 11 : 4 * 12], "little")
    data[damaged : damaged + 4] = bytes(4)
    shard.write_bytes(data)
    store = MdsStore(path)
    for number in (0, 2):
        np.testing.assert_equal(list(store(number)), streams[number])
    stream = store(1)
    np.testing.assert_equal(list(itertools.islice(stream, 4)), streams[1][:4])  # as many as are looked at together
    with pytest.raises(StoreError, match="sample 10 does not end"):
        next(stream)


@pytest.mark.parametrize("together", [1, 99])
def test_a_shard_that_is_cut_off_while_it_is_read_is_an_error(tmp_path, monkeypatch, together):
    monkeypatch.setattr("stream_dataloader.stores.mds.shards._MOST_SAMPLES", together)
    path = written(tmp_path / "a")
    stream = MdsStore(path, columns=["y"])(0)
    next(stream)
    os.truncate(tmp_path / "a" / "shard.00000.mds", 10)
    for read in (stream.__next__, lambda: stream.read_into({"y": np.zeros(2, np.int64)})):
        with pytest.raises(StoreError, match=r"shard.00000.mds was cut off"):
            read()
    with pytest.raises(StoreError, match=r"10 bytes of "):
        MdsStore(path)(0)
    os.unlink(tmp_path / "a" / "shard.00000.mds")
    with pytest.raises(StoreError, match=r"shard.00000.mds is missing"):
        MdsStore(path)(0)


# servers


def test_a_shard_on_a_server_that_is_another_is_refused_and_not_kept(tmp_path, server):
    url = server.put_folder(written(tmp_path / "a"))
    store, good = MdsStore(url), server.files["data/shard.00000.mds"]
    for wrong, message in ((good[:-1] + b"?", "its sha1 is"), (good + b"more", f"has {len(good) + 4} bytes, and")):
        server.put("data/shard.00000.mds", wrong)
        with pytest.raises(StoreError, match=rf"stream 0 .*shard.00000.mds.*{message}"):
            store(0)
    server.put("data/shard.00000.mds", good)
    assert len(list(store(0))) == store.lengths[0]
    del server.files["data/shard.00001.mds"]
    with pytest.raises(StoreError, match=r"shard.00001.mds is missing"):
        store(1)


def test_a_split_is_a_folder_below(tmp_path):
    written(tmp_path / "a" / "train")
    assert len(MdsStore(tmp_path / "a", split="train")) == 3
    assert len(MdsStore(f"file://{tmp_path}/a", split="train")) == 3
    with pytest.raises(StoreError):
        MdsStore(tmp_path / "a", split="../a/train")
    with pytest.raises(FileNotFoundError):
        MdsStore(tmp_path / "a", split="test")


# writing


def test_nothing_is_left_where_writing_broke_off_and_nothing_is_overwritten(tmp_path):
    with pytest.raises(RuntimeError, match="broke off"):
        written(tmp_path / "a", broken(rows()))
    assert os.listdir(tmp_path / "a") == []
    path = written(tmp_path / "a", rows(50))
    with pytest.raises(FileExistsError):
        MdsWriter(path, columns=COLUMNS)
    assert len(MdsStore(path)) > 3


WRONG_OPTIONS = [
    {"compression": "lzma"},
    {"compression": "zstd:99"},
    {"hashes": ["sha0"]},
    {"size_limit": "1 pound"},
    {"size_limit": 1 << 40},
    {"columns": {}},
    {"columns": {"x": "ndarray:int3"}},
]


@pytest.mark.parametrize("options", WRONG_OPTIONS)
def test_options_that_cannot_be_are_refused(tmp_path, options):
    with pytest.raises(ValueError, match=r"compression|hash|size_limit|column"):
        MdsWriter(tmp_path / "a", **{"columns": COLUMNS} | options)


def test_shards_are_as_large_as_they_may_be(tmp_path):
    for limit in ("1kb", 1024):
        path = written(tmp_path / str(limit), rows(100), size_limit=limit)
        sizes = [os.stat(f"{path}/{name}").st_size for name in sorted(os.listdir(path)) if name != "index.json"]
        assert max(sizes) <= 1024
        assert min(sizes[:-1]) > 1024 - 60
    assert len(MdsStore(written(tmp_path / "one", rows(100), size_limit=None))) == 1


# packing


def test_packed_streams_are_found_again_with_their_keys_and_metadata(tmp_path, server):
    path = packed(tmp_path / "a", STREAMS, workers=3, metadata={"made": "here"}, size_limit=3000, compression="br")
    for place in (path, server.put_folder(path)):
        sources, store = stores.open(place, format="mds")
        assert [store.key(number) for number in sources] == [f"stream/{number}" for number in range(4)]
        assert [len(list(store(number))) for number in sources] == store.lengths.tolist() == [23, 0, 7, 31]
        assert store.metadata(2) == {"n": 2}
        assert store.info().metadata["made"] == "here"
        assert store.info().leaves["['pose'][1]"] == "bool ()"
    batches = StreamDataLoader(StreamDataset(sources, store, 2, time_steps=8, lengths=store.lengths), 2)
    assert sum(int(batch.mask.sum()) for batch in batches) == 61
    by_key = MdsStore(path, stream="__key__")
    assert sorted(by_key.key(number) for number in by_key.sources) == ["stream/0", "stream/2", "stream/3"]
    assert set(next(MdsStore(path, columns=["label", "pose.0"])(3))) == {"label", "pose.0"}


@pytest.mark.parametrize("item", [7, np.float32(3), np.arange(3, dtype=np.int8), "text", (1, {"a": "b", "c": [1, 2]})])
def test_items_of_one_leaf_and_of_text_are_packed(tmp_path, item):
    store = MdsStore(packed(tmp_path / "a", [[item, item], [item]]))
    assert store.lengths.tolist() == [2, 1]
    (found,) = store(1)
    assert type(found) is type(item)
    np.testing.assert_equal(found, item)


def test_pictures_are_packed_as_png_where_that_is_asked_for(tmp_path):
    streams = images((5, 4), size=(6, 7, 3))
    store = MdsStore(packed(tmp_path / "a", streams, encodings={"image": "png"}))
    assert store.info().metadata["columns"]["image"] == "png"
    for number, items in enumerate(streams):
        np.testing.assert_equal([item["image"] for item in store(number)], [item["image"] for item in items])
    out = {"image": np.zeros((2, 6, 7, 3), np.uint8)}
    assert MdsStore(store.path, columns=["image"])(1, start=1).read_into(out) == 2
    np.testing.assert_equal(out["image"], [item["image"] for item in streams[1][1:3]])
    with pytest.raises(ValueError, match=r"encodings names \['picture'\]"):
        packed(tmp_path / "b", streams, encodings={"picture": "png"})


def test_items_are_packed_whose_keys_are_in_no_order(tmp_path):
    """Each process may have its own."""
    streams = [[{"b": np.float32(n), "a": np.int64(n)} for n in range(3)], [{"a": np.int64(7), "b": np.float32(7)}]]
    store = MdsStore(packed(tmp_path / "a", streams, workers=2))
    found = [list(store(number)) for number in store.sources]
    assert found == streams
    assert list(found[0][0]) == list(found[1][0]) == ["b", "a"]
    with pytest.raises(ValueError, match=r"an item has the leaves .*'c'.*, and the store's first has"):
        packed(tmp_path / "b", [streams[0], [{"c": np.int64(7)}]], workers=2)


@pytest.mark.parametrize("value", [np.zeros(3, complex), {1, 2}], ids=type)
def test_what_the_format_does_not_hold_is_refused(tmp_path, value):
    with pytest.raises(TypeError, match=r"item\['x'\] is .*, which MDS does not hold"):
        MdsPacker(str(tmp_path)).part(0).write(0, "x", iter([{"x": value}]))


def broken(items):
    yield from items
    raise RuntimeError("broke off")


@pytest.mark.parametrize("size_limit", [900, None])
def test_streams_that_broke_off_are_not_in_the_store(tmp_path, size_limit):
    folder = tmp_path / "a"
    folder.mkdir()
    packer = MdsPacker(str(folder), size_limit=size_limit, compression="zstd")
    part, records = packer.part(0), []
    for number, items in enumerate(STREAMS):
        records.append(StreamRecord(number, str(number), *part.write(number, str(number), iter(items)), {}))
        with pytest.raises(RuntimeError, match="broke off"):
            part.write(9, "broken", broken(STREAMS[3]))
        with pytest.raises(ValueError, match=r"step 1: item\['image'\] is uint8"):
            part.write(9, "odd", iter([STREAMS[0][0], STREAMS[0][0] | {"image": np.zeros(2, np.uint8)}]))
    finish_here(packer, records, [part.close()])
    check_store(folder)


def check_store(folder):
    store = MdsStore(folder)
    assert store.verify() == []
    assert store.info().metadata["samples"] == sum(map(len, STREAMS))
    labels = [[item["label"] for item in store(number)] for number in store.sources]
    assert labels == [[item["label"] for item in items] for items in STREAMS]


def test_what_a_worker_has_synced_is_in_the_store_once_if_it_dies_then(tmp_path, monkeypatch):
    monkeypatch.setattr("stream_dataloader.stores.mds.packer._Part.sync_seconds", 0.0)

    def open_stream(number):
        yield from STREAMS[number]
        if number == 3 and not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    stores.pack((range(4), open_stream), tmp_path / "a", format="mds", num_workers=1, size_limit=900)
    check_store(tmp_path / "a")


@pytest.mark.parametrize("compression", [None, "gz"])
def test_a_dataset_that_is_replaced_is_not_read_on(tmp_path, compression):
    """Without hashes the indices are equal, and all sizes."""
    options = {"hashes": [], "compression": compression}
    path = written(tmp_path / "a", **options)
    written(tmp_path / "b", [row | {"y": row["y"] + 100} for row in rows()], **options)
    store = MdsStore(path, stream="episode")
    stream, sent = store(1), pickle.dumps(store)
    assert next(stream)["y"] == 6
    os.rename(path, tmp_path / "c")
    os.rename(tmp_path / "b", path)
    store.index.shards.close()  # as in a worker that is forked now
    with pytest.raises(StoreError):
        list(store(3))
    with pytest.raises(StoreError):
        pickle.loads(sent)(0)
    assert [item["y"] for item in MdsStore(path, stream="episode")(0)] == list(range(100, 106))


def test_a_full_disk_of_the_cache_is_an_error_that_names_the_shard(tmp_path, monkeypatch):
    def full(path, *_):
        return real("/dev/full" if os.path.basename(path) == "part" else path, *_)

    real = open
    store = MdsStore(written(tmp_path / "a", compression="gz"))
    monkeypatch.setattr("stream_dataloader.stores.mds.shards.open", full, raising=False)
    with pytest.raises(OSError, match=r"shard.00000.mds cannot be kept in the cache") as error:
        store(0)
    assert error.value.errno == errno.ENOSPC


def test_a_packed_store_whose_table_is_gone_or_another_is_refused(tmp_path):
    path, other = packed(tmp_path / "a", STREAMS), packed(tmp_path / "b", images((3, 4)))
    shutil.copy(f"{other}/streams.mdst", path)
    with pytest.raises(StoreError):
        MdsStore(path)
    os.unlink(f"{path}/streams.mdst")
    with pytest.raises(StoreError, match=r"streams.mdst is missing"):
        MdsStore(path)
