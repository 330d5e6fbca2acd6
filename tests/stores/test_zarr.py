"""Zarr replay buffers."""

import gzip
import json
import os
import pathlib
import shutil
import struct
import sys
import zipfile

import numpy as np
import pytest
from episodes import check_read_beside_workers, columns, episodes
from helpers import FULL, seldom
from store_tests import StoreTests

from stream_dataloader import stores
from stream_dataloader._engine.items.structure import flatten, unflatten
from stream_dataloader.errors import StoreError
from stream_dataloader.stores import ZarrStore
from stream_dataloader.streams import Limits
from stream_dataloader.testing._items import assert_same, items_of

zarr, numcodecs = pytest.importorskip("zarr"), pytest.importorskip("numcodecs")

STREAMS = episodes((23, 0, 7, 31))
SHORT = episodes((9, 0, 3))
BLOSC = numcodecs.Blosc("lz4", clevel=5, shuffle=numcodecs.Blosc.SHUFFLE)


@pytest.fixture(autouse=True)
def no_threads_left(_no_leaks):
    """zarr's threads stay until they are ended; they are few, so that they are all there at once."""
    with zarr.config.set({"threading.max_workers": 1}):
        yield
    zarr.core.sync.cleanup_resources()


def write_buffer(path, streams, rows=10, version=2, **options):
    like = next(items[0] for items in streams if items)
    root = zarr.open_group(path, mode="w", zarr_format=version)
    for name, found in columns([item for items in streams for item in items], like).items():
        sharded = {"shards": (2 * rows, *found.shape[1:])} if options.get("sharded") else {}
        given = {key: value for key, value in options.items() if key != "sharded"}
        root.create_array(f"data/{name}", data=found, chunks=(rows, *found.shape[1:]), **sharded, **given)
    root.create_array("meta/episode_ends", data=np.cumsum([len(items) for items in streams]))
    return str(path)


def zipped(folder, path, packed=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", packed) as archive:
        for root, _, names in os.walk(folder):
            for name in names:
                archive.write(os.path.join(root, name), os.path.relpath(os.path.join(root, name), folder))
    return str(path)


class ZarrContract(StoreTests):
    damages = 500 if FULL else 12

    streams = STREAMS


class TestFolder(ZarrContract):
    def make(self, tmp_path):
        store = ZarrStore(write_buffer(tmp_path / "demos.zarr", STREAMS, compressors=BLOSC))
        list(store(0))
        return store


class TestArchive(ZarrContract):
    def make(self, tmp_path):
        write_buffer(tmp_path / "folder", STREAMS, rows=16, version=3)
        store = ZarrStore(zipped(tmp_path / "folder", tmp_path / "demos.zarr.zip"))
        list(store(0))
        return store


@pytest.fixture
def buffer(tmp_path):
    return write_buffer(tmp_path / "demos.zarr", STREAMS)


@pytest.mark.one_of_each
@pytest.mark.parametrize("rows", [1, 3, 1000])
@pytest.mark.parametrize(
    "options",
    [
        {"compressors": BLOSC},
        {"compressors": None},
        {"compressors": numcodecs.Zstd(), "order": "F"},
        {"version": 3},
        {"version": 3, "sharded": True},
    ],
    ids=repr,
)
def test_buffers_of_all_kinds_are_read(tmp_path, rows, options):
    store = ZarrStore(write_buffer(tmp_path / "a.zarr", SHORT, rows, **options))
    for number, items in enumerate(SHORT):
        assert_same(items_of(store(number)), items, number, "read")
        stream = store(number)
        found = [next(stream)] if items else []
        for room in (2, 5, 100):
            structure, leaves = flatten(SHORT[0][0])
            rooms = [np.empty((room, *np.shape(leaf)), np.asarray(leaf).dtype) for leaf in leaves]
            count = stream.read_into(unflatten(structure, iter(rooms)))
            found += [unflatten(structure, (rows[t] for rows in rooms)) for t in range(count)]
        assert_same(found, items, number, "written")


def test_chunks_are_unpacked_once(buffer, monkeypatch):
    store = ZarrStore(buffer, columns="obs/image")
    asked = []
    unpack = zarr.Array.__getitem__
    monkeypatch.setattr(zarr.Array, "__getitem__", lambda self, rows: asked.append(rows) or unpack(self, rows))
    assert len(list(store(0))) == 23
    assert asked == [slice(0, 10), slice(10, 20), slice(20, 30)]
    asked.clear()
    first, second = store((3, 0, 5)), store((3, 5, 9))  # both in the chunk of steps 30 to 39
    next(first), next(second)
    assert asked == [slice(30, 40)]


def test_arrays_anywhere_can_be_read(tmp_path):
    root = zarr.open_group(tmp_path / "a.zarr", mode="w")
    root.create_array("img", data=np.arange(12).reshape(6, 2))
    root.create_array("stops", data=np.array([2, 6], np.uint8))
    root.attrs["made"] = "here"
    store = ZarrStore(tmp_path / "a.zarr", data="/", ends="stops")
    assert [item["img"].tolist() for item in store(0)] == [[0, 1], [2, 3]]
    assert store.info().metadata == {"made": "here"}
    assert store.info().version == "3"
    assert [item.tolist() for item in ZarrStore(tmp_path / "a.zarr", data="/", ends="stops", columns="img")(0)]


def test_some_leaves_can_be_read_alone(buffer):
    assert next(ZarrStore(buffer, columns=["obs/pose", "dones"])(0)).keys() == {"obs", "dones"}
    assert next(ZarrStore(buffer, columns="obs/pose")(0)).shape == (3,)
    with pytest.raises(StoreError, match=r"demos\.zarr, data has no leaf 'depth'; it has \['actions', "):
        ZarrStore(buffer, columns=["depth"])


def ends(*values, dtype=np.int64):
    return lambda root: root.create_array("meta/episode_ends", data=np.array(values, dtype), overwrite=True)


def added(name, **options):
    return lambda root: root.create_array(name, overwrite=True, **options)


BROKEN = {
    r"episode_ends .* \[23, 20, 61\]": ends(23, 20, 61),
    r"episode_ends .* \[-3, 61\]": ends(-3, 61),
    "'actions': 61": ends(23, 62),
    r"float64 \(2,\)": ends(23.0, 61.0, dtype=np.float64),
    r"int64 \(2, 2\)": ends((1, 2), (3, 4)),
    "no array 'meta/episode_ends'": lambda root: root.__delitem__("meta/episode_ends"),
    "no group 'data'": lambda root: root.__delitem__("data"),
    "data/task is of dtype <U1": added("data/task", data=np.array(["a"] * 61)),
    "'extra': 7": added("data/extra", data=np.zeros(7)),
    "2,147,483,648 bytes": added("data/x", shape=(61, 2**31), chunks=(1, 1 << 20), dtype="u1"),
    r"int64 \(1000000000,\); it should": added("meta/episode_ends", shape=(10**9,), chunks=(1 << 20,), dtype="i8"),
}


@pytest.mark.parametrize("message", BROKEN)
def test_what_does_not_fit_together_is_an_error(buffer, message):
    BROKEN[message](zarr.open_group(buffer, mode="a"))
    with pytest.raises(StoreError, match=message) as raised:
        ZarrStore(buffer)
    assert buffer in str(raised.value)


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize(
    ("archive", "consolidated"),
    seldom([(False, True), (True, False), (False, False), (True, True)], (False, True)),
)
@pytest.mark.parametrize(
    ("id", "message"),
    [
        ("pickle", "pickle"),
        ("imagecodecs_jpegxl", r"data/dones needs the codec 'imagecodecs_jpegxl'.*register_codecs.*columns="),
        ("own_codec", r"data/dones needs the codec 'own_codec'.*the package that has it"),
        (None, "data/dones cannot be read"),
    ],
)
def test_a_codec_that_runs_code_or_is_not_there_concerns_its_array_alone(
    tmp_path, version, archive, consolidated, id, message
):
    path = write_buffer(tmp_path / "a.zarr", SHORT, version=version)
    if consolidated:
        zarr.consolidate_metadata(path)
    described = pathlib.Path(path, "data", "dones", ".zarray" if version == 2 else "zarr.json")
    content = json.loads(described.read_text())
    key, codecs = ("filters", [{"id": id}]) if version == 2 else ("codecs", [{"name": id, "configuration": {}}])
    described.write_text("{" if id is None else json.dumps(content | {key: codecs}))
    if archive:
        path = zipped(path, tmp_path / "a.zarr.zip")
    store = ZarrStore(path, columns="obs/pose")
    assert_same(items_of(store(0)), [item["obs"]["pose"] for item in SHORT[0]], 0, "read")
    for chosen in (None, ["dones"]):
        with pytest.raises(StoreError, match=message):
            ZarrStore(path, columns=chosen)


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
@pytest.mark.parametrize("version", [2, 3])
def test_what_was_appended_since_metadata_was_consolidated_is_read(tmp_path, version):
    streams = episodes((9, 3, 4))
    path = write_buffer(tmp_path / "a.zarr", streams[:2], version=version)
    zarr.consolidate_metadata(path)
    whole = write_buffer(tmp_path / "whole.zarr", streams, version=version)
    root = zarr.open_group(path, mode="r+", use_consolidated=False)
    for name, array in zarr.open_group(whole, mode="r").members(max_depth=None):
        if hasattr(array, "chunks"):
            root[name].resize(array.shape)
            root[name][:] = array[:]
    store = ZarrStore(path)
    assert store.lengths.tolist() == [9, 3, 4]
    assert_same(items_of(store(2)), streams[2], 2, "read")


def test_a_damaged_chunk_is_named(tmp_path):
    buffer = write_buffer(tmp_path / "a.zarr", STREAMS, compressors=BLOSC)
    (tmp_path / "a.zarr" / "data" / "obs" / "image" / "2.0.0.0").write_bytes(b"not a chunk at all")
    store = ZarrStore(buffer)
    with pytest.raises(StoreError, match=r"a\.zarr, array data/obs/image, rows 20 to 30 cannot be read"):
        next(store(2))
    assert len(store.verify()) == 1  # streams 0 and 2 share the chunk
    assert_same(items_of(store(3)), STREAMS[3], 3, "read all the same")


def test_what_is_no_store_is_named(tmp_path):
    (tmp_path / "a.zarr").mkdir()
    (tmp_path / "a.zarr.zip").write_bytes(b"no archive")
    for name in ("a.zarr", "a.zarr.zip"):
        with pytest.raises(StoreError, match=name):
            stores.open(tmp_path / name)


def test_a_stream_that_is_open_does_not_go_on_in_another_store(tmp_path):
    streams = episodes((23, 7))
    path = write_buffer(tmp_path / "a", streams, 4)
    stream = ZarrStore(path)(0)
    assert_same([next(stream)], streams[0][:1], 0, "read")
    store = ZarrStore(path)
    os.rename(path, tmp_path / "b")
    write_buffer(path, episodes((23, 7), seed=1), 4)
    with pytest.raises(StoreError, match=r"a, data/\w+ is another file now"):
        list(stream)
    store._opened.close()  # as in a process that is forked: it opens the other store, with the index of this one
    with pytest.raises(StoreError, match=r"a, data/\w+ is another file now"):
        store(0)


def test_workers_read_an_archive_that_is_open_here(tmp_path):
    streams = episodes((40, 30, 35, 50))
    write_buffer(tmp_path / "folder", streams, compressors=BLOSC)
    check_read_beside_workers(ZarrStore(zipped(tmp_path / "folder", tmp_path / "a.zarr.zip")), streams)


def test_a_missing_package_is_named(buffer, monkeypatch):
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(ImportError, match=r"needs zarr: pip install 'stream-dataloader\[zarr\]'"):
        ZarrStore(buffer)


@pytest.mark.parametrize("archive", [False, True])
@pytest.mark.parametrize("kind", ["x", 1, None])
def test_a_node_of_another_kind_is_not_left_out_in_silence(tmp_path, archive, kind):
    path = write_buffer(tmp_path / "a.zarr", SHORT, version=3)
    described = pathlib.Path(path, "data", "dones", "zarr.json")
    described.write_text(json.dumps(json.loads(described.read_text()) | {"node_type": kind}))
    if archive:
        path = zipped(path, tmp_path / "a.zarr.zip")
    with pytest.raises(StoreError, match="array data/dones cannot be read"):
        ZarrStore(path)
    assert len(list(ZarrStore(path, columns="obs/pose")(0))) == len(SHORT[0])


@pytest.mark.parametrize("steps", [2**63, 10**30])
def test_more_time_steps_than_a_number_holds_are_an_error_of_the_array(tmp_path, steps):
    path = write_buffer(tmp_path / "a.zarr", SHORT, version=2)
    described = pathlib.Path(path, "data", "dones", ".zarray")
    described.write_text(json.dumps(json.loads(described.read_text()) | {"shape": [steps]}))
    with pytest.raises(StoreError, match=r"array data/dones.*time steps"):
        ZarrStore(path)


def blosc_chunk(folder, kind):
    """Write a buffer whose chunks Blosc packed; return the file of the first chunk of data/obs/pose, and its place."""
    blosc = BLOSC if kind == "v2" else zarr.codecs.BloscCodec()
    if kind == "shard":
        blosc = None  # below
    write_buffer(folder, SHORT, version=2 if kind == "v2" else 3, compressors=blosc)
    below = folder / "data" / "obs" / "pose"
    if kind == "shard":
        shutil.rmtree(below)
        chunks = zarr.codecs.ShardingCodec(
            chunk_shape=(10, 3),
            codecs=[zarr.codecs.BytesCodec(), zarr.codecs.BloscCodec()],
            index_codecs=[zarr.codecs.BytesCodec()],
        )
        rows = np.array([item["obs"]["pose"] for items in SHORT for item in items])
        root = zarr.open_group(folder, mode="a")
        root.create_array("data/obs/pose", data=rows, chunks=(20, 3), serializer=chunks, compressors=None)
    (first,) = [one for one in below.rglob("*") if one.is_file() and one.as_posix().endswith(("/0.0", "/c/0/0"))]
    content = first.read_bytes()
    start, size = struct.unpack_from("<2Q", content, len(content) - 32) if kind == "shard" else (0, len(content))
    return first, start, size


def cut_to(size):
    return lambda chunk: chunk[: size % len(chunk)]


def claimed(place, size):
    return lambda chunk: chunk[:place] + struct.pack("<I", size) + chunk[place + 4 :]


DAMAGED_BLOSC = {
    "head": (cut_to(5), "is cut off"),
    "half": (cut_to(37), "is cut off"),
    "last byte": (cut_to(-1), "is cut off"),
    "packed size": (claimed(12, 100_000), "is cut off: it has .* bytes of 100,000"),
    "unpacked size": (claimed(4, 1 << 30), "unpacks to 1,073,741,824 bytes, and the array's have at most"),
}


@pytest.mark.parametrize("archive", [False, True])
@pytest.mark.parametrize("kind", ["v2", "v3", "shard"])
@pytest.mark.parametrize("damage", DAMAGED_BLOSC)
def test_a_chunk_whose_header_tells_blosc_something_else_is_an_error(tmp_path, damage, kind, archive):
    """Blosc trusts the header: it reads memory behind the chunk and delivers that, or allocates what is claimed."""
    file, start, size = blosc_chunk(tmp_path / "a.zarr", kind)
    change, message = DAMAGED_BLOSC[damage]
    content = file.read_bytes()
    chunk = change(content[start : start + size])
    index = struct.pack("<2Q", start, len(chunk)) + content[-16:] if kind == "shard" else b""
    file.write_bytes(content[:start] + chunk + content[start + size : len(content) - len(index)] + index)
    path = zipped(tmp_path / "a.zarr", tmp_path / "a.zarr.zip") if archive else tmp_path / "a.zarr"
    with pytest.raises(StoreError, match=rf"{path}, array data/obs/pose, rows 0 to 10 cannot be read.*{message}"):
        list(ZarrStore(path)(0))


PACKED_ZEROS = {
    "gzip": (2, numcodecs.GZip()),
    "zlib": (2, numcodecs.Zlib()),
    "zstd": (2, numcodecs.Zstd()),
    "lz4": (2, numcodecs.LZ4()),
    "blosc": (2, BLOSC),
    "gzip, version 3": (3, zarr.codecs.GzipCodec()),
    "zstd, version 3": (3, zarr.codecs.ZstdCodec()),
}


@pytest.mark.parametrize("name", PACKED_ZEROS)
def test_a_chunk_that_unpacks_to_more_than_the_array_holds_is_an_error(tmp_path, name):
    """Three chunks: right, of many zeros, and cut off; each is an error of its own rows."""
    version, codec = PACKED_ZEROS[name]
    path = write_buffer(tmp_path / "a.zarr", STREAMS, version=version, compressors=codec)
    pose = tmp_path / "a.zarr" / "data" / "obs" / "pose"
    chunks = [pose / (f"{number}.0" if version == 2 else f"c/{number}/0") for number in range(3)]
    plain = codec if version == 2 else {"gzip": numcodecs.GZip(), "zstd": numcodecs.Zstd()}[name[:4]]
    chunks[1].write_bytes(plain.encode(np.zeros(1 << 20, np.uint8)))
    chunks[2].write_bytes(chunks[2].read_bytes()[:-5])
    store = ZarrStore(path, columns="obs/pose")
    assert_same(items_of(store((0, 0, 10))), [item["obs"]["pose"] for item in STREAMS[0][:10]], 0, "read")
    largest = f"{8 * 10 * 3 * STREAMS[0][0]['obs']['pose'].itemsize:,}"
    with pytest.raises(StoreError, match=rf"pose, rows 10 to 20 .*unpacks to .*the array's have at most {largest}"):
        list(store((0, 10, 20)))
    with pytest.raises(StoreError, match="pose, rows 20 to 30 cannot be read"):
        list(store((0, 20, 23)))


def test_members_of_gzip_end_to_end_are_one_chunk(tmp_path):
    path = write_buffer(tmp_path / "a.zarr", STREAMS, compressors=numcodecs.GZip())
    chunk = tmp_path / "a.zarr" / "data" / "obs" / "pose" / "0.0"
    content = gzip.decompress(chunk.read_bytes())
    chunk.write_bytes(gzip.compress(content[:50]) + gzip.compress(b"") + gzip.compress(content[50:]))
    assert_same(items_of(ZarrStore(path)(0)), STREAMS[0], 0, "read")


def test_members_of_an_archive_that_unpack_to_too_much_are_an_error_before_they_are_read(tmp_path):
    write_buffer(tmp_path / "folder", SHORT)
    path = zipped(tmp_path / "folder", tmp_path / "a.zarr.zip")
    largest = max(file.stat().st_size for file in (tmp_path / "folder").rglob("*") if file.is_file())
    assert len(ZarrStore(path, limits=Limits(unpacked_bytes=largest))) == 3
    with pytest.raises(StoreError, match=rf"{path}, \S+ unpacks to [\d,]+ bytes.*raise Limits\(unpacked_bytes=\)"):
        ZarrStore(path, limits=Limits(unpacked_bytes=largest - 1))


@pytest.mark.parametrize("archive", [False, True])
def test_chunks_that_are_claimed_and_not_there_take_no_hours(tmp_path, archive):
    path = write_buffer(tmp_path / "a.zarr", SHORT)
    root = zarr.open_group(path, mode="a")
    root.create_array("meta/many", shape=(10**7,), chunks=(1,), dtype=np.int64)
    root.create_array("wide/x", shape=(12, 10**7), chunks=(1, 1), dtype=np.int8)
    if archive:
        path = zipped(path, tmp_path / "a.zarr.zip")
    with pytest.raises(StoreError, match=rf"{path}, array meta/many claims 10,000,000 chunks, and has at most"):
        ZarrStore(path, ends="meta/many")
    with pytest.raises(StoreError, match=rf"{path}, array wide/x has 10,000,000 chunks a step.*columns="):
        ZarrStore(path, data="wide")
    assert len(ZarrStore(path)) == 3


def test_a_member_of_an_archive_that_claims_too_little_is_an_error_before_it_is_read(tmp_path):
    """Its compressed bytes would all be unpacked, although its size says otherwise."""
    write_buffer(tmp_path / "folder", SHORT)
    path = zipped(tmp_path / "folder", tmp_path / "a.zarr.zip", zipfile.ZIP_DEFLATED)
    assert len(ZarrStore(path)) == 3
    (tmp_path / "folder" / "data" / "obs" / "pose" / "0.0").write_bytes(bytes(5_000_000))
    path = zipped(tmp_path / "folder", tmp_path / "b.zarr.zip", zipfile.ZIP_DEFLATED)
    content = bytearray(pathlib.Path(path).read_bytes())
    entry = content.rindex(b"data/obs/pose/0.0") - 46  # in the directory of the archive
    content[entry + 24 : entry + 28] = struct.pack("<I", 120)
    pathlib.Path(path).write_bytes(content)
    with pytest.raises(StoreError, match=r"pose/0.0 has 4,\d+ packed bytes, and claims 120 unpacked"):
        ZarrStore(path)
