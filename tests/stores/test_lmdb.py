"""LMDB stores: windows of steps as values, and LMDB files that are there already."""

import errno
import itertools
import json
import os
import resource
import shutil
import struct
import zlib
from typing import ClassVar

import numpy as np
import pytest
import torch
from helpers import FULL
from packed import images, pack_here
from store_tests import StoreTests

from stream_dataloader import stores
from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.packing import StreamRecord
from stream_dataloader.stores.lmdb import LmdbPacker, LmdbStore
from stream_dataloader.stores.lmdb import writer as lmdb_writer
from stream_dataloader.stores.lmdb.windows import check_value
from stream_dataloader.stores.memmap.packed import _digest
from stream_dataloader.testing._items import assert_same

lmdb = pytest.importorskip("lmdb")

STREAMS = images((23, 0, 7, 31))


def written(folder, streams=STREAMS, workers=1, **options):
    os.makedirs(folder)
    pack_here(LmdbPacker(str(folder), **options), streams, workers)
    return str(folder)


def plain(path, values, subdir=False):
    """An LMDB as people have them: keys in order, no header."""
    with lmdb.open(str(path), subdir=subdir, lock=False, map_size=1 << 24) as opened, opened.begin(write=True) as txn:
        for key, value in values.items():
            txn.put(key, value)
    return str(path)


def same(store, streams=STREAMS):
    for number, items in enumerate(streams):
        assert_same(list(store(number)), list(items), number, "read from the store")


class Contract(StoreTests):
    has_checksums = True
    damages = 500 if FULL else 12
    options: ClassVar = {}
    read_with: ClassVar = {}

    def make(self, tmp_path):
        return LmdbStore(written(tmp_path / "a", **self.options), **self.read_with)

    streams = STREAMS


class TestLmdbStore(Contract):
    options: ClassVar = {"workers": 2, "window": 5}


class TestLmdbStoreOneDatabaseAtATime(Contract):
    options: ClassVar = {"codec": "zstd", "window": 4, "databases": 3}
    read_with: ClassVar = {"open_databases": 1}


class TestPlainLmdb(StoreTests):
    damages = 500 if FULL else 12
    streams: ClassVar = [
        [number * np.arange(step + 3, step + 5000, dtype=np.int32)[:1200] for step in range(n)]
        for n, number in ((40, 1), (3, 2))
    ]

    def make(self, tmp_path):
        for number, values in enumerate(self.streams):
            plain(tmp_path / f"{number}.lmdb", {b"%06d" % i: value.tobytes() for i, value in enumerate(values)})
        return LmdbStore(tmp_path, decode=lambda value: np.frombuffer(value, np.int32).copy())


@pytest.mark.one_of_each
@pytest.mark.parametrize("window", [1, 3, 8, 100, None])
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_windows_are_read_from_windows_of_any_length(tmp_path, codec, window):
    store = LmdbStore(written(tmp_path / "a", codec=codec, window=window))
    items = STREAMS[3]
    for start, count in itertools.product((0, 5, 30), (1, 4, 50)):
        out = {"image": np.zeros((count, 3, 4, 5), np.uint8), "label": np.zeros(count, np.int64)}
        out["pose"] = (np.zeros((count, 6), np.float32), np.zeros(count, bool))
        room = min(count, len(items) - start)
        assert store(3, start=start).read_into(out) == room
        for name in ("image", "label"):
            np.testing.assert_equal(out[name][:room], [item[name] for item in items[start : start + room]])


@pytest.mark.parametrize(
    "item", [np.float32(3), True, torch.arange(6, dtype=torch.bfloat16), np.zeros((2, 0))], ids=repr
)
def test_items_of_any_numbers_come_back(tmp_path, item):
    store = LmdbStore(written(tmp_path / "a", [[item] * 3], window=2))
    found = list(store(0))
    assert len(found) == 3
    assert repr(found[2]) == repr(item if not isinstance(item, bool) else np.True_)


def smooth(shape, seed):
    """An image that JPEG keeps well."""
    y, x = np.mgrid[0:32, 0:48]
    planes = [128 + 100 * np.sin((x * (c + 1) + y + seed * 5) / 20) for c in range(3)]
    rgb = np.stack(planes, -1).astype(np.uint8)
    return {"hwc": rgb, "chw": rgb.transpose(2, 0, 1), "hw": rgb[..., 0], "hw1": rgb[..., :1]}[shape]


@pytest.mark.parametrize("shape", ["hwc", "chw", "hw", "hw1"])
def test_images_can_be_kept_as_jpeg(tmp_path, shape):
    streams = [[{"image": smooth(shape, i), "label": np.int32(i)} for i in range(n)] for n in (9, 2)]
    raw = LmdbStore(written(tmp_path / "raw", streams, window=4))
    store = LmdbStore(written(tmp_path / "a", streams, window=4, codec="jpeg", quality=95))
    assert store.info().disk_bytes < raw.info().disk_bytes
    for number, items in enumerate(streams):
        for one, other in zip(store(number, start=1), items[1:], strict=True):
            assert one["label"] == other["label"]
            assert np.abs(one["image"].astype(int) - other["image"]).mean() < 3
    assert store.verify() == []


def test_jpeg_without_an_image_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r'codec="jpeg" is for images.*float32 \(3,\).*"zstd"'):
        written(tmp_path / "a", [[np.zeros(3, np.float32)]], codec="jpeg")


@pytest.mark.parametrize("options", [{"window": 0}, {"codec": "gzip"}, {"quality": 101}, {"databases": 0}])
def test_wrong_options_are_refused(tmp_path, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        LmdbPacker(str(tmp_path), **options)


def test_the_map_grows_when_it_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(lmdb_writer, "_FIRST_MAP_BYTES", 1 << 16)
    monkeypatch.setattr(lmdb_writer, "_MOST_PENDING_BYTES", 1 << 17)
    streams = images((100, 300), size=(3, 20, 20))
    store = LmdbStore(written(tmp_path / "a", streams))
    assert store.info().disk_bytes > 400 * 1200
    same(store, streams)


def test_a_stream_that_breaks_off_is_not_in_the_store(tmp_path, monkeypatch):
    monkeypatch.setattr(lmdb_writer, "_MOST_PENDING_BYTES", 1 << 10)
    (tmp_path / "a").mkdir()
    packer = LmdbPacker(str(tmp_path / "a"), window=2)
    part = packer.part(0)

    def broken():
        yield from STREAMS[0]
        raise RuntimeError("broke off")

    records = []
    for number, items in enumerate(STREAMS):
        with pytest.raises(RuntimeError, match="broke off"):
            part.write(number, "x", broken())
        with pytest.raises(ValueError, match=r"step 1: item\['image'\] is uint8 \(2,\)"):
            part.write(number, "x", iter([STREAMS[0][0], STREAMS[0][0] | {"image": np.zeros(2, np.uint8)}]))
        records.append(StreamRecord(number, str(number), *part.write(number, "x", iter(items))))
    part.close()
    packer.finish(records)
    store = LmdbStore(tmp_path / "a")
    same(store)
    assert store.verify() == []
    with lmdb.open(str(tmp_path / "a" / "0.lmdb"), subdir=False, readonly=True, lock=False) as environment:
        assert environment.stat()["entries"] == sum(-(-len(items) // 2) for items in STREAMS)


def test_a_full_disk_is_an_error_that_says_so(tmp_path, monkeypatch):
    """LMDB may say "Input/output error" where a disk has no room for all of a transaction."""
    monkeypatch.setattr(lmdb_writer.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 100, 0))
    part = LmdbPacker(str(tmp_path)).part(0)
    part.write(0, "a", iter([np.zeros(1 << 18)] * 4))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(OSError, match=r"if the disk is full, make room.*0\.lmdb") as caught:
            part.sync()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.ENOSPC


def test_as_many_databases_are_open_as_allowed(tmp_path):
    store = LmdbStore(written(tmp_path / "a", images((9,) * 8), databases=8, window=2), open_databases=2)
    streams = [store(number) for number in range(8)]
    for stream in streams * 2:
        next(stream)
        links = map("/proc/self/fd/{}".format, os.listdir("/proc/self/fd"))
        files = {os.readlink(link) for link in links if os.path.islink(link)}
        assert 1 <= sum(file.endswith(".lmdb") for file in files) <= 2


# what is wrong


def test_a_damaged_value_is_noticed_when_it_is_read(tmp_path):
    path = written(tmp_path / "a", images((40,), size=(3, 40, 40)), window=4)
    file = tmp_path / "a" / "0.lmdb"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    store = LmdbStore(path)
    for _ in range(2):  # that it was looked at does not make it right
        with pytest.raises(
            StoreError, match=r"stream 0 .*value of steps from \d+ on, in .*0\.lmdb.*its checksum is another"
        ):
            list(store(0))
    assert len(list(LmdbStore(path, check=False)(0))) == 40
    assert len(store.verify()) == 1


def test_a_value_is_checked_once(tmp_path, monkeypatch):
    checked = []
    monkeypatch.setattr("stream_dataloader.stores.lmdb.store.check_value", checked.append)
    store = LmdbStore(written(tmp_path / "a", images((40,)), window=4))
    for _ in range(2):
        assert len(list(store(0))) == 40
    assert len(checked) == 10


@pytest.mark.parametrize("body", [bytes(9000), bytes(range(250)) * 36], ids=["zeros", "numbers"])
def test_a_value_has_the_checksum_that_the_format_says(body):
    sums = np.frombuffer(body[:8192], "<u8").reshape(2, -1).sum(axis=1, dtype="<u8")
    checksum = zlib.crc32(sums.tobytes(), zlib.crc32(body[8192:], zlib.crc32(b"\3\0\0\0")))
    assert check_value(struct.pack("<II", checksum, 3) + body) == checksum


def test_a_value_of_another_stream_is_noticed(tmp_path):
    path = written(tmp_path / "a", images((5, 5), size=(3, 50, 50)), window=5)
    other = written(tmp_path / "b", images((5, 5), seed=1, size=(3, 50, 50)), window=5)
    shutil.copy(os.path.join(other, "0.lmdb"), os.path.join(path, "0.lmdb"))  # same tree, same keys, right values
    problems = LmdbStore(path).verify()
    assert len(problems) == 2
    assert all("its values are those of another stream" in problem for problem in problems)


DAMAGES = {
    "gone": lambda content: None,
    "short": lambda content: content[:-4096],
    "long": lambda content: content + b"0",
    "tree": lambda content: content[:8204] + bytes([content[8204] ^ 1]) + content[8205:],
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_database_is_named(tmp_path, how):
    path, file = written(tmp_path / "a", window=4), tmp_path / "a" / "0.lmdb"
    content = file.read_bytes()
    file.unlink()
    if (damaged := DAMAGES[how](content)) is not None:
        file.write_bytes(damaged)
    store = LmdbStore(path)
    with pytest.raises(StoreError, match=r"0\.lmdb"):
        next(store(0))
    assert len(store.verify()) == 1  # which all streams are in


def test_a_database_that_was_replaced_is_an_error_when_it_is_opened(tmp_path):
    store = LmdbStore(written(tmp_path / "a", databases=2), open_databases=1)
    stream = store(0)
    next(stream)
    os.rename(tmp_path / "a", tmp_path / "old")
    written(tmp_path / "a", images((23, 0, 7, 31), seed=1), databases=2)
    with pytest.raises(StoreError, match=r"1\.lmdb is another file now"):
        store.check_stream(3)
    assert_same(list(stream), STREAMS[0][1:], 0, "read from the file that was open")
    store.index.databases.file.cache_clear()
    with pytest.raises(StoreError, match=r"0\.lmdb is another file now"):
        store.check_stream(0)


def test_sizes_that_are_absurd_are_refused_before_anything_is_allocated(tmp_path):
    path = written(tmp_path / "a", codec="zstd")
    file = tmp_path / "a" / "store.json"
    content = json.loads(file.read_text())
    for change in (
        {"streams": 1 << 60},
        {"window": 0},
        {"window": -1},
        {"streams": 1 << 30},
        {"databases": []},
        {"databases": [{"file": "../0.lmdb", "size": 1, "entries": 1, "crc": 0}]},
        {"codec": "x"},
    ):
        changed = {name: value for name, value in (content | change).items() if name != "check"}
        file.write_text(json.dumps(changed | {"check": _digest(changed)}))
        with pytest.raises(StoreError):
            stores.open(path)


# LMDB files that are there already


def test_a_plain_lmdb_needs_decode(tmp_path):
    path = plain(tmp_path / "a.lmdb", {b"%d" % i: b"%d" % i for i in range(5)})
    with pytest.raises(StoreError, match="give decode="):
        stores.open(path)
    with pytest.raises(ValueError, match="decode= is for an LMDB that was not packed"):
        LmdbStore(written(tmp_path / "b"), decode=int)
    for wrong in ({"stream": "/"}, {"open_databases": 0}, {"order": "natural"}, {"order": "x", "decode": int}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            LmdbStore(path, **wrong)


def test_keys_may_be_in_natural_order(tmp_path):
    values = {b"%s/f_%d" % (clip, i): b"%d" % i for clip in (b"c2", b"c10") for i in range(8, 13)}
    (tmp_path / "a").mkdir()
    for name in ("2.lmdb", "10.lmdb"):
        plain(tmp_path / "a" / name, values)
    found = {order: LmdbStore(tmp_path / "a", decode=int, stream="/", order=order) for order in ("bytes", "natural")}
    assert list(found["bytes"](0)) == [10, 11, 12, 8, 9]
    assert list(found["natural"](0, start=1)) == [9, 10, 11, 12]
    keys = {order: [store.key(i) for i in store.sources] for order, store in found.items()}
    assert keys["natural"] == ["2.lmdb/c2", "2.lmdb/c10", "10.lmdb/c2", "10.lmdb/c10"]
    assert keys["bytes"] == keys["natural"][::-1]
    with pytest.warns(UserWarning, match="b'c10/f_8' after b'c10/f_12'; give order='natural'"):
        fingerprint = LmdbStore(tmp_path / "a", decode=int, stream="/").sources.fingerprint
    assert fingerprint == found["bytes"].sources.fingerprint != found["natural"].sources.fingerprint


@pytest.mark.parametrize("subdir", [True, False])
def test_keys_that_share_a_prefix_are_a_stream(tmp_path, subdir):
    values = {b"clip%d/%06d" % (clip, i): b"%d" % (100 * clip + i) for clip in range(3) for i in range(4 + clip)}
    path = plain(tmp_path / "a.lmdb", values | {b"__len__": b"15"}, subdir=subdir)
    store = LmdbStore(path, decode=int, stream="/")
    assert [store.key(number) for number in store.sources] == ["clip0", "clip1", "clip2"]
    assert list(store.lengths) == [4, 5, 6]
    assert list(store(2, start=1)) == [201, 202, 203, 204, 205]
    out = np.zeros(3, np.int64)
    assert store(1).read_into(out) == 3
    assert out.tolist() == [100, 101, 102]


def test_keys_that_tell_of_others_are_no_steps(tmp_path):
    values = {b"%d" % i: b"%d" % i for i in range(5)} | {b"a": b"7", b"__": b"8", b"_x__": b"9"}
    path = plain(tmp_path / "a.lmdb", values | {b"__len__": b"no number", b"__keys__": b"[1, 2]"})
    assert list(LmdbStore(path, decode=int)(0)) == [0, 1, 2, 3, 4, 8, 9, 7]


def test_a_value_that_cannot_be_decoded_is_named(tmp_path):
    store = LmdbStore(plain(tmp_path / "a.lmdb", {b"%d" % i: b"x" if i == 2 else b"1" for i in range(5)}), decode=int)
    with pytest.raises(StoreError, match=r"step 2 \(key b'2'\): decode= raised ValueError: invalid literal"):
        list(store(0))


def test_many_levels_of_pages_are_walked(tmp_path):
    values = {b"%0200d" % i: b"%d" % i for i in range(9000)}
    store = LmdbStore(plain(tmp_path / "a.lmdb", values), decode=int)
    assert list(store(0, start=8990)) == list(range(8990, 9000))
    assert store.lengths.tolist() == [9000]


def test_a_wrong_count_of_entries_is_noticed(tmp_path):
    path = plain(tmp_path / "a.lmdb", {b"%d" % i: b"1" for i in range(5)})
    with open(path, "rb+") as file:
        for meta in (0, os.sysconf("SC_PAGESIZE")):  # `md_entries` of the main database
            file.seek(meta + 120)
            file.write((4).to_bytes(8, "little"))
    with pytest.raises(StoreError, match="it has 5 values, and says 4"):
        LmdbStore(path, decode=int)


def test_one_of_the_named_databases_is_read(tmp_path):
    path = str(tmp_path / "a.lmdb")
    values = {b"%03d" % i: b"%d" % i for i in range(700)} | {b"zz": b" " * 9000 + b"7"}
    with lmdb.open(path, subdir=False, max_dbs=4, lock=False, map_size=1 << 24) as environment:
        for name, options in (b"train", {}), (b"val", {}), (b"many", {"dupsort": True}):
            database = environment.open_db(name, **options)
            with environment.begin(write=True, db=database) as transaction:
                for key, value in values.items() if name == b"train" else [(b"k", b"1"), (b"k", b"2")]:
                    transaction.put(key, value)
    assert list(LmdbStore(path, decode=int, db="train")(0)) == [*range(700), 7]
    assert list(LmdbStore(path, decode=int, db="val")(0)) == [2]
    for name, what in (None, "named databases"), ("test", "no database 'test'"), ("many", "several values a key"):
        with pytest.raises(StoreError, match=what):
            LmdbStore(path, decode=int, db=name)
    with pytest.raises(ValueError, match="db is 'train'"):
        LmdbStore(path, db="train")
