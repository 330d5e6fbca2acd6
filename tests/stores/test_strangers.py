"""Data of strangers: what it names, and what it claims."""

import contextlib
import errno
import fcntl
import io
import json
import os
import pickle
import resource
import struct
import tracemalloc
import wave
import zipfile
import zlib

import av
import cv2
import fsspec
import h5py
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from clips import write_clip
from small_stores import SMALL
from tars import npy, write_tar

from stream_dataloader import StreamDataLoader, StreamDataset, stores
from stream_dataloader.errors import StoreError
from stream_dataloader.stores import Hdf5Store, MdsStore, ParquetStore, WebDatasetStore
from stream_dataloader.stores._base import codecs
from stream_dataloader.stores._base.files import inside, plain
from stream_dataloader.stores.memmap.packed import _digest
from stream_dataloader.streams import ArrayStream, AudioStream, FileCache, Limits, VideoStream
from stream_dataloader.streams._media.limits import picture_size

PLAYLISTS = {
    "clip.m3u8": "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile://{clip}\n#EXT-X-ENDLIST\n",
    "called.mp4": "\ufeff#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nprivate.mp4\n#EXT-X-ENDLIST\n",
    "a.ffconcat": "ffconcat version 1.0\nfile private.mp4\n",
    "a.sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 9 RTP/AVP 96\n",
    "a.mpd": '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static"><Period><AdaptationSet '
    'mimeType="video/mp4"><Representation id="1" bandwidth="1"><BaseURL>private.mp4</BaseURL></Representation>'
    "</AdaptationSet></Period></MPD>",
}


@pytest.mark.parametrize("name", PLAYLISTS)
@pytest.mark.parametrize("kind", [VideoStream(), AudioStream(window=9)], ids=["video", "audio"])
def test_playlists_are_refused(tmp_path, kind, name):
    write_clip(clip := tmp_path / "private.mp4", 2)
    (tmp_path / name).write_text(PLAYLISTS[name].format(clip=clip))
    with pytest.raises(ValueError, match="is a playlist, which names other files; join"):
        next(iter(kind(str(tmp_path / name))))


def nested(kind, depth):
    return {"dicts": b'{"a":', "lists": b"["}[kind] * depth + b"1" + {"dicts": b"}", "lists": b"]"}[kind] * depth


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["dicts", "lists"])
@pytest.mark.parametrize("depth", [70, 300, 100_000])
def test_deep_nesting_is_an_error_of_its_stream(tmp_path, kind, depth, workers):
    write_tar(tmp_path / "a.tar", [("v/0.json", b'{"a":1}'), ("w/0.json", nested(kind, depth))])
    store = WebDatasetStore(tmp_path / "a.tar")
    dataset = StreamDataset(store.sources, store, batch_size=1, time_steps=1, on_error="skip")
    loader = StreamDataLoader(dataset, num_workers=workers)
    with pytest.warns(RuntimeWarning, match="skipped"):
        assert len(list(loader)) == 1
    (failure,) = loader.failures
    assert "nested" in str(failure) or "recursion" in str(failure)


def npz_of_zeros(size):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", npy(np.zeros(size, np.uint8)))
    return file.getvalue()


def test_an_archive_in_a_sample_unpacks_to_no_more_than_it_claims(tmp_path):
    """Python's zipfile unpacks all at once, and cuts it to the size that is claimed afterwards."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", npy(np.zeros(10, np.uint8)) + bytes(32 << 20))
    content = bytearray(file.getvalue())
    entry = content.index(b"PK\1\2")
    content[entry + 24 : entry + 28] = struct.pack("<I", 138)
    store = in_tar(tmp_path, "npz", bytes(content))
    tracemalloc.start()
    try:
        with pytest.raises(StoreError, match=r"a.tar: v/0.npz cannot be decoded"):
            first_of(store)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def black(suffix, *size, **options):
    return bytes(cv2.imencode(suffix, np.zeros(size, np.uint8), **options)[1])


def png_that_claims(width, height):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def in_tar(folder, suffix, data, **options):
    return WebDatasetStore(write_tar(folder / "a.tar", [(f"v/0.{suffix}", data)]), **options)


def shard_of_zeros(folder, size, **options):
    """An MDS dataset of one sample, compressed."""
    shard = np.zeros(size, np.uint8)
    shard[:16] = np.array([1, 12, size, size - 16], "<u4").view(np.uint8)
    packed = codecs.pack("zstd", shard.tobytes())
    (folder / "s.zst").write_bytes(packed)
    files = {
        name: {"basename": f"s.{kind}", "bytes": count, "hashes": {}}
        for name, kind, count in (("raw_data", "mds", size), ("zip_data", "zst", len(packed)))
    }
    columns = {"column_names": ["b"], "column_encodings": ["bytes"], "column_sizes": [None]}
    entry = {"version": 2, "format": "mds", "samples": 1, "compression": "zstd", "hashes": [], **columns, **files}
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [entry]}))
    return MdsStore(folder, **options)


def lmdb_of_zeros(folder, size, **options):
    if not (folder / "s").exists():
        stores.pack(([0], lambda _: [{"x": np.zeros(size, np.uint8)}]), folder / "s", format="lmdb", codec="zstd")
    return stores.open(folder / "s", **options).open_stream


def wav(folder, rate, **options):
    with wave.open(str(folder / "a.wav"), "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes(bytes(2000))
    return AudioStream(window=100, rate=16000, **options), str(folder / "a.wav")


def first_of(store, source=0):
    return next(iter(store(source)))


def growing(path, *sizes):
    """A video of JPEG that says it is of 8 x 8, and has frames of these sizes."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mjpeg", rate=25)
        stream.width, stream.height, stream.pix_fmt = 8, 8, "yuvj420p"
        for number, side in enumerate(sizes):
            packet = av.Packet(black(".jpg", side, side))
            packet.stream, packet.pts, packet.dts, packet.is_keyframe = stream, number, number, True
            container.mux(packet)
    return str(path)


@pytest.mark.parametrize("suffix", ["avi", "mkv"])
def test_frames_of_a_video_grow_no_larger_than_the_limit(tmp_path, suffix):
    path = growing(tmp_path / f"a.{suffix}", 8, 8, 2000, 8)
    assert len(list(VideoStream(size=(8, 8))(path))) == 4
    limits = Limits(picture_pixels=10**6)
    with pytest.raises(
        ValueError, match=rf"a.{suffix}: a frame .* more than 1,000,000 pixels, see Limits\(picture_pix"
    ):
        list(VideoStream(size=(8, 8), limits=limits)(path))
    assert len(list(VideoStream(size=(8, 8), limits=limits, on_corrupt="drop")(path))) == 3
    with pytest.raises(ValueError, match="is 2000 x 2000, 4,000,000 pixels, and may have 1,000,000"):
        VideoStream(limits=limits)(growing(tmp_path / "b.mkv", 2000))


#: What makes each bomb, given a folder and options; and the limit that it exceeds by default.
BOMBS = {
    "npz": (lambda folder, **options: (in_tar(folder, "npz", npz_of_zeros(65 << 20), **options), 0), "unpacked_ratio"),
    "png": (
        lambda folder, **options: (in_tar(folder, "png", png_that_claims(12_000, 12_000), **options), 0),
        "picture",
    ),
    "mds": (lambda folder, **options: (shard_of_zeros(folder, 65 << 20, **options), 0), "unpacked_ratio"),
    "wav": (lambda folder, **options: wav(folder, 1, **options), "sample_rate_ratio"),
}


@pytest.mark.parametrize(("bomb", "limit"), BOMBS.values(), ids=BOMBS)
def test_little_data_does_not_become_much(tmp_path, bomb, limit):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    store, source = bomb(tmp_path)
    made = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=rf"a\.tar.*|s\.zst.*|a\.wav.*; raise Limits\({limit}"):
        first_of(store, source)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - max(before, made) < 32 << 10  # KiB


#: What passes by default, and is refused by a limit that is just too low.
LIMITED = {
    "png": (lambda folder, **options: in_tar(folder, "png", black(".png", 8, 6), **options), "picture_pixels", 48),
    "jpeg": (lambda folder, **options: in_tar(folder, "jpg", black(".jpg", 8, 6), **options), "picture_pixels", 48),
    "webp": (
        lambda folder, **options: in_tar(folder, "webp", black(".webp", 8, 6, 3), **options),
        "picture_pixels",
        48,
    ),
    "tiff": (lambda folder, **options: in_tar(folder, "tif", black(".tiff", 8, 6), **options), "picture_pixels", 48),
    "bmp": (lambda folder, **options: in_tar(folder, "bmp", black(".bmp", 8, 6), **options), "picture_pixels", 48),
    "pgm": (lambda folder, **options: in_tar(folder, "pgm", black(".pgm", 8, 6), **options), "picture_pixels", 48),
    "npz": (lambda folder, **options: in_tar(folder, "npz", npz_of_zeros(872), **options), "unpacked_bytes", 1000),
    "mds": (lambda folder, **options: shard_of_zeros(folder, 1000, **options), "unpacked_bytes", 1000),
    "json": (lambda folder, **options: in_tar(folder, "json", nested("dicts", 8), **options), "json_levels", 8),
    "lmdb": (lambda folder, **options: lmdb_of_zeros(folder, 1000, **options), "unpacked_bytes", 1000),
}


@pytest.mark.parametrize(("made", "limit", "least"), LIMITED.values(), ids=LIMITED)
def test_limits_are_set_by_their_names(tmp_path, made, limit, least):
    first_of(made(tmp_path, limits=Limits(**{limit: least})))
    with pytest.raises(StoreError, match=f"{least - 1}|{limit}"):
        first_of(made(tmp_path, limits=Limits(**{limit: least - 1})))


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp", ".bmp", ".gif", ".ppm", ".pam", ".tiff", ".jp2", ".hdr"])
def test_sizes_in_headers_are_those_of_the_pictures(suffix):
    assert picture_size(bytes(cv2.imencode(suffix, np.zeros((37, 53, 3), np.uint8))[1])) == (53, 37)


def test_the_size_of_a_jpeg_is_not_that_of_its_thumbnail():
    small, large = black(".jpg", 8, 8), black(".jpg", 300, 200)
    app = b"\xff\xe1" + (len(small) + 2).to_bytes(2, "big") + small
    assert picture_size(large[:2] + app + b"\xff" + large[2:]) == (200, 300)


@pytest.mark.parametrize("value", [0, -1, 1.5, None, "1"])
def test_limits_are_whole_numbers(value):
    with pytest.raises((TypeError, ValueError), match="chunk_bytes is"):
        Limits(chunk_bytes=value)


@pytest.fixture
def private(tmp_path):
    """Files of the user, outside of the folder `data` that a stranger sent."""
    (tmp_path / "data").mkdir()
    (tmp_path / "id_rsa").write_bytes(b"TOP-SECRET-LINE\n")
    cv2.imwrite(str(tmp_path / "private.png"), np.full((4, 4, 3), 77, np.uint8))
    with h5py.File(tmp_path / "private.h5", "w") as file:
        file["data/demo_0/x"] = np.full(2, 42)
    return tmp_path


def virtual(file, path, name, shape=(2,)):
    layout = h5py.VirtualLayout(shape, "i8")
    layout[:] = h5py.VirtualSource(str(path), name, shape)
    file.create_group("data/demo_0").create_virtual_dataset("x", layout)


def external(file, path):
    file.create_dataset("data/demo_0/x", (2,), "i8", external=[(str(path), 0, 16)])


def linked(place, link):
    def write(file):
        above, _, name = place.rpartition("/")
        (file.require_group(above) if above else file)[name] = link
        file.require_group("data")

    return write


PRIVATE, BELOW = "../private.h5", "/data/demo_0/x"

#: How HDF5 names another file; each is written into `data/a.h5`.
NAMING = {
    "external storage": lambda file: external(file, os.path.abspath("id_rsa")),
    "a link to a dataset": linked("data/demo_0/x", h5py.ExternalLink(PRIVATE, BELOW)),
    "a link to a stream": linked("data/demo_0", h5py.ExternalLink(PRIVATE, "/data/demo_0")),
    "a link to all": linked("data", h5py.ExternalLink(PRIVATE, "/data")),
    "a soft link over it": lambda file: (
        linked("other", h5py.ExternalLink(PRIVATE, "/data"))(file),
        linked("data/demo_0/x", h5py.SoftLink("/other/demo_0/x"))(file),
    ),
    "a virtual dataset": lambda file: virtual(file, PRIVATE, BELOW),
    "a virtual dataset, by its whole path": lambda file: virtual(file, os.path.abspath("private.h5"), BELOW),
    "a virtual dataset of a file with a link": lambda file: virtual(file, "linked.h5", "y"),
    "a virtual dataset of a link": lambda file: virtual(file, "symlink.h5", BELOW),
    "a virtual dataset of a pipe": lambda file: virtual(file, "pipe", BELOW),
}


@pytest.mark.parametrize("write", NAMING.values(), ids=NAMING)
@pytest.mark.parametrize("read", ["store", "array"])
def test_hdf5_reads_no_other_file(private, monkeypatch, read, write):
    monkeypatch.chdir(private)
    with h5py.File("data/linked.h5", "w") as file:
        file["y"] = h5py.ExternalLink("../private.h5", BELOW)
    os.symlink("../private.h5", "data/symlink.h5")
    os.mkfifo("data/pipe")
    with h5py.File("data/a.h5", "w") as file:
        write(file)

    def rows(**options):
        if read == "array":
            return [int(row) for row in ArrayStream(dataset="data/demo_0/x", **options)("data/a.h5")]
        return [int(item["x"]) for item in Hdf5Store("data/a.h5", columns=["x"], **options)(0)]

    with pytest.raises(
        (ValueError, OSError), match=r"lies in another file|outside of|is a pipe|no dataset|no streams|no arrays"
    ):
        rows()
    if "pipe" in str(write.__code__.co_consts):
        return
    with contextlib.suppress(StoreError):  # a soft link is no stream of its own
        assert rows(files="anywhere") in ([42, 42], np.frombuffer(b"TOP-SECRET-LINE\n", "i8").tolist())


def parts_of(folder, count=2):
    """`all.hdf5`, whose streams are virtual datasets of files beside it."""
    for part in range(count):
        with h5py.File(folder / f"part{part}.h5", "w") as file:
            file["x"] = np.arange(1, 4) + 10 * part
    with h5py.File(folder / "all.hdf5", "w") as file:
        for part in range(count):
            layout = h5py.VirtualLayout((3,), "i8")
            layout[:] = h5py.VirtualSource(f"part{part}.h5", "x", (3,))
            file.create_group(f"data/demo_{part}").create_virtual_dataset("x", layout)
    return folder / "all.hdf5"


def test_virtual_datasets_read_files_beside_theirs(tmp_path):
    path = parts_of(tmp_path)
    store = Hdf5Store(path)
    assert [[int(item["x"]) for item in store(number)] for number in (0, 1)] == [[1, 2, 3], [11, 12, 13]]
    assert [int(row) for row in ArrayStream(dataset="data/demo_1/x")(str(path))] == [11, 12, 13]
    assert store.verify() == []


def rewritten(path, **content):
    os.remove(path)
    with h5py.File(path, "w") as file:
        for name, values in content.items():
            file[name] = values


CHANGES = {
    "gone": (os.remove, "part1.h5.*missing"),
    "without the dataset": (lambda path: rewritten(path, y=np.arange(3)), "part1.h5:x is missing"),
    "shorter": (lambda path: rewritten(path, x=np.arange(2)), r"part1.h5:x is \(2,\), and does not fit"),
    "longer": (lambda path: rewritten(path, x=np.arange(4)), r"part1.h5:x is \(4,\), and does not fit"),
}


@pytest.mark.parametrize(("change", "told"), CHANGES.values(), ids=CHANGES)
def test_a_source_that_is_missing_or_changed_is_an_error(tmp_path, change, told):
    path = parts_of(tmp_path)
    store, stream = Hdf5Store(path), ArrayStream(dataset="data/demo_1/x")(str(path))
    sent = pickle.dumps(store)
    change(tmp_path / "part1.h5")
    with pytest.raises(StoreError, match=told):
        ArrayStream(dataset="data/demo_1/x")(str(path))
    with pytest.raises(StoreError, match=r"part1\.h5"):
        list(stream)
    with pytest.raises(StoreError, match=r"part1\.h5"):
        list(store(1))
    (problem,) = store.verify()
    assert "part1.h5" in problem
    for opened in (lambda: Hdf5Store(path), lambda: pickle.loads(sent).index):
        with pytest.raises(StoreError, match=told):
            opened()


def test_a_source_of_the_same_shape_is_another_store(tmp_path):
    store = Hdf5Store(parts_of(tmp_path))
    sent = pickle.dumps(store)
    rewritten(tmp_path / "part1.h5", x=np.arange(3))
    with pytest.raises(StoreError, match=r"part1\.h5 is another file now"):
        list(store(1))
    with pytest.raises(StoreError, match="was replaced or written to"):
        pickle.loads(sent)(1)


def test_values_without_a_source_are_found(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        layout = h5py.VirtualLayout((9,), "i8")
        layout[:2] = h5py.VirtualSource(".", "source", (2,))
        file["source"] = np.arange(2)
        file.create_group("data/demo_0").create_virtual_dataset("x", layout)
        file.create_group("data/demo_1").create_virtual_dataset("x", h5py.VirtualLayout((1 << 50,), "i8"))
    (half, empty) = Hdf5Store(tmp_path / "a.h5").verify()
    assert "half written: 2 of 9 values" in half
    assert "but the file has only 0 of 1,125,899,906,842,624 values" in empty
    with pytest.raises(StoreError, match="0 of 1,125"):
        ArrayStream(dataset="data/demo_1/x")(str(tmp_path / "a.h5"))


def test_chunks_have_a_limit(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("data/demo_0/x", data=np.zeros((64, 16)), chunks=(64, 16), compression="gzip")
    assert len(list(Hdf5Store(tmp_path / "a.h5", limits=Limits(chunk_bytes=8192))(0))) == 64
    for read in (
        lambda: Hdf5Store(tmp_path / "a.h5", limits=Limits(chunk_bytes=8191))(0),
        lambda: ArrayStream(limits=Limits(chunk_bytes=8191))(str(tmp_path / "a.h5")),
    ):
        with pytest.raises(StoreError, match="chunks of 8,192 bytes"):
            read()


def test_groups_of_hdf5_are_not_nested_without_end(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["/".join(["g"] * 60 + ["x"])] = np.zeros((3, 2))
    assert len(list(ArrayStream()(str(tmp_path / "a.h5")))) == 3
    with h5py.File(tmp_path / "a.h5", "a") as file:
        file["/".join(["g"] * 200 + ["x"])] = np.zeros((3, 2))
    for read in (Hdf5Store, lambda path: ArrayStream()(str(path))):
        with pytest.raises(StoreError, match=r"a\.h5 has groups that are nested more than 64 deep"):
            read(tmp_path / "a.h5")


def table_naming(folder, *names):
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    rows = pyarrow.array([{"bytes": None, "path": str(name)} for name in names], kind)
    pyarrow.parquet.write_table(pyarrow.table({"image": rows}), folder / "a.parquet")
    return folder / "a.parquet"


@pytest.mark.parametrize(
    "name", ["../private.png", "{0}/private.png", "file://{0}/private.png", "link.png", "down/p.png"]
)
def test_tables_name_no_picture_elsewhere(private, name):
    (private / "link.png").symlink_to(private / "private.png")
    (private / "data/link.png").symlink_to(private / "private.png")
    (private / "p.png").write_bytes((private / "private.png").read_bytes())
    (private / "data/down").symlink_to(private)
    path = table_naming(private / "data", name.format(private))
    with pytest.raises(StoreError, match=r"row 0.*(outside of|is not read)"):
        first_of(ParquetStore(path, decode={"image": "image"}))
    cache = FileCache(directory=private / "cache")
    opened = ParquetStore(path, decode={"image": "image"}, files="anywhere", cache=cache)
    assert (first_of(opened)["image"] == 77).all()
    url = f"memory://{private.name}/p.png"
    fsspec.filesystem("memory").pipe(url, (private / "p.png").read_bytes())
    opened = ParquetStore(table_naming(private / "data", url), decode={"image": "image"}, files="anywhere", cache=cache)
    assert (first_of(opened)["image"] == 77).all()
    assert list((private / "cache").glob("*/*-p.png"))


def test_tables_name_pictures_beside_them(private):
    (private / "data/pictures").mkdir()
    (private / "data/pictures/a.png").write_bytes((private / "private.png").read_bytes())
    os.mkfifo(private / "data/pipe")
    names = ["pictures/a.png", private / "data/pictures/a.png", "pictures/none.png", "pipe", "a\0b"]
    stream = ParquetStore(table_naming(private / "data", *names), decode={"image": "image"})(0)
    items = iter(stream)
    assert all((next(items)["image"] == 77).all() for _ in range(2))
    for row, told in ((2, "missing"), (3, "is a pipe"), (4, "is no file")):
        with pytest.raises((StoreError, OSError), match=told):
            next(iter(ParquetStore(private / "data/a.parquet", decode={"image": "image"})(0, start=row)))


def test_tables_from_a_server_name_pictures_of_its_folder(private, server, tmp_path):
    server.put("d/a.png", (private / "private.png").read_bytes())
    names = [
        "a.png",
        f"{server.url}/d/a.png",
        "../a.png",
        f"{server.url}/d/../x",
        "http://h/x",
        r"..\a.png",
        "1::http://h/x",
    ]
    server.put("d/a.parquet", table_naming(private, *names).read_bytes())
    cache = FileCache(directory=tmp_path / "cache")
    opened = ParquetStore(f"{server.url}/d/a.parquet", decode={"image": "image"}, cache=cache)
    items = iter(opened(0))
    assert all((next(items)["image"] == 77).all() for _ in range(2))
    for row in range(2, len(names)):
        with pytest.raises(StoreError, match=r"outside of|is no file"):
            next(iter(opened(0, start=row)))


@pytest.mark.parametrize("name", ["..", "a/../../b", "/a", "a\0b", "C:x", "12::http://host/x", ".a", "", None, 1])
def test_names_in_data_are_of_files_below_it(name):
    with pytest.raises(StoreError, match=r"index\.json names a (hidden )?file"):
        inside("folder", name, "index.json")
    assert inside("folder", r"a\b.c", "index.json") == os.path.join("folder", "a", "b.c")


def arrow_of(folder, table, suffix=".arrow", **options):
    """A file, or a stream, of Arrow IPC."""
    new = pyarrow.ipc.new_file if suffix == ".arrow" else pyarrow.ipc.new_stream
    with (
        pyarrow.OSFile(str(folder / f"a{suffix}"), "wb") as file,
        new(file, table.schema, options=pyarrow.ipc.IpcWriteOptions(**options)) as writer,
    ):
        writer.write(table)
    return folder / f"a{suffix}"


def repeated(value, count=1 << 10):
    """A table of one long value, which each row names by its number in a dictionary."""
    indices = pyarrow.array(np.zeros(count, np.int8))
    return pyarrow.table({"x": pyarrow.DictionaryArray.from_arrays(indices, value)})


def parquet_of(folder, table, path="a.parquet"):
    (folder / path).parent.mkdir(exist_ok=True)
    pyarrow.parquet.write_table(table, folder / path, row_group_size=1 << 24)
    return folder / path


ZEROS = pyarrow.table({"x": np.zeros(9 << 20)})

#: Tables that unpack to more than 64 MiB, of which each takes less than 300 kB.
TABLES = {
    "compressed by zstd": lambda folder: arrow_of(folder, ZEROS, compression="zstd"),
    "a compressed stream": lambda folder: arrow_of(folder, ZEROS, ".arrows", compression="zstd"),
    "a compressed dictionary": lambda folder: arrow_of(
        folder, repeated(pyarrow.array(np.zeros(9 << 20)), 2), compression="zstd"
    ),
    "a text that all rows repeat": lambda folder: arrow_of(folder, repeated(pyarrow.array(["x" * (1 << 17)]))),
    "a list that all rows repeat": lambda folder: arrow_of(folder, repeated(pyarrow.array([np.zeros(1 << 14)]))),
    "a vector that all rows repeat": lambda folder: arrow_of(
        folder, repeated(pyarrow.FixedSizeListArray.from_arrays(np.zeros(1 << 14), 1 << 14))
    ),
    "a run in Parquet": lambda folder: parquet_of(folder, ZEROS),
    "lists of a run in Parquet": lambda folder: parquet_of(
        folder, pyarrow.table({"x": pyarrow.FixedSizeListArray.from_arrays(np.zeros(9 << 20), 8)})
    ),
    "a folder's name in each row": lambda folder: parquet_of(folder, ZEROS, "k=1/a.parquet").parent.parent,
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_unpack_to_no_more_than_the_limits(tmp_path, name):
    path = TABLES[name](tmp_path)
    options = {"columns": ["k"]} if path.is_dir() else {}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(StoreError, match=r"a\.(arrow|parquet).* unpacks from .*; raise Limits\(unpacked_ratio=\)"):
        first_of(ParquetStore(path, **options))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10  # KiB
    assert first_of(ParquetStore(path, **options, limits=Limits(unpacked_ratio=10**6))).keys() <= {"x", "k"}


def test_tables_of_arrow_before_its_messages_had_a_mark_are_read(tmp_path):
    table = pyarrow.table({"x": np.arange(9), "d": pyarrow.array(["a", "b", "a"] * 3).dictionary_encode()})
    path = arrow_of(tmp_path, table, use_legacy_format=True, metadata_version=pyarrow.ipc.MetadataVersion.V4)
    assert [(int(row["x"]), row["d"]) for row in ParquetStore(path)(0)][:2] == [(0, "a"), (1, "b")]


def empty_arrow(folder, rows):
    kind = pyarrow.list_(pyarrow.float32(), 0)
    none = pyarrow.FixedSizeListArray.from_buffers(kind, rows, [None], children=[pyarrow.array([], pyarrow.float32())])
    return ParquetStore(arrow_of(folder, pyarrow.record_batch([none], ["x"])))


def empty_npy(folder, rows):
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, 0)}}".encode()
    (folder / "a.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)
    return stores.open(folder / "a.npy")[1]


def empty_hdf5(folder, rows):
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("data/demo_0/x", (rows, 0), "f4")
    return Hdf5Store(folder / "a.h5")


def empty_packed(folder, rows, name):
    """A store in which a stream is said to have more steps than were written, with checksums that fit."""
    stores.pack(([2], lambda n: iter([np.zeros((0, 3))] * n)), path := folder / "a.store", format=name)
    table = np.fromfile(path / "streams.bin", "<i8")
    table[1] = rows
    table.tofile(path / "streams.bin")
    content = json.loads((path / "store.json").read_text())
    content["checksums"]["streams.bin"][0] = zlib.crc32(table.tobytes())
    content |= {"steps": rows} if name == "memmap" else {"window": rows}
    del content["check"]
    (path / "store.json").write_text(json.dumps(content | {"check": _digest(content)}))
    return stores.open(path)[1]


EMPTY = {
    "arrow": empty_arrow,
    "npy": empty_npy,
    "hdf5": empty_hdf5,
    "memmap": lambda folder, rows: empty_packed(folder, rows, "memmap"),
    "lmdb": lambda folder, rows: empty_packed(folder, rows, "lmdb"),
}


@pytest.mark.parametrize("make", EMPTY.values(), ids=EMPTY)
def test_rows_of_no_bytes_are_not_without_end(tmp_path, make):
    with pytest.raises(StoreError, match=r"a\..* has 1,000,000,000 rows of 0 bytes, and may have"):
        first_of(make(tmp_path, 10**9))


def contents(path, options):
    sources, store = stores.open(path, **options)
    with contextlib.closing(store):
        found = []
        for number in sources:
            with contextlib.closing(store(number)) as steps:
                found.append(repr(plain(list(steps))))
        return found


@pytest.mark.one_of_each
@pytest.mark.usefixtures("no_zarr_threads")
@pytest.mark.parametrize("name", [name for name in SMALL if "." not in name or name.endswith(".zarr")])
@pytest.mark.parametrize("of_folder", [False, True], ids=["files", "folders"])
def test_links_in_a_folder_lead_nowhere_else(tmp_path, name, of_folder):
    options, path, out = SMALL[name].options, tmp_path / "data" / name, tmp_path / "out"
    path.parent.mkdir()
    SMALL[name].make(str(path), 0)
    assert path.is_dir()
    before = contents(path, options)
    moved = list(path.iterdir()) if of_folder else [one for one in path.rglob("*") if one.is_file()]
    for number, one in enumerate(moved):  # all of them lie within the folder, which is allowed
        if not of_folder:
            one.rename(one.with_name(f"kept{number}.moved"))
            one.symlink_to(f"kept{number}.moved")
    assert of_folder or any("moved" in str(one) for one in path.rglob("*"))
    with contextlib.suppress(StoreError):
        assert len(contents(path, options)) >= 1
    for number, one in enumerate(moved):
        place = one if of_folder else one.with_name(f"kept{number}.moved")
        out.mkdir(exist_ok=True)
        place.rename(out / f"{number}")
        if one.is_symlink():
            one.unlink()
        one.symlink_to(out / f"{number}")
    with pytest.raises(StoreError, match=rf"a link to .*outside of {path}; .*files='anywhere'"):
        contents(path, options)
    assert contents(path, {**options, "files": "anywhere"}) == before


def test_snapshots_of_the_hub_are_links_to_its_blobs(tmp_path):
    commit = tmp_path / "datasets--a--b" / "snapshots" / ("0123456789" * 4)
    commit.mkdir(parents=True)
    (tmp_path / "datasets--a--b/blobs").mkdir()
    np.arange(8, dtype=np.uint16).tofile(tmp_path / "datasets--a--b/blobs/1f")
    (commit / "a.bin").symlink_to("../../blobs/1f")
    assert len(list(stores.open(commit, stored_dtype="uint16")[1](0))) == 8
    (commit / "b.bin").symlink_to("../../../secret")
    (tmp_path / "secret").write_bytes(bytes(16))
    with pytest.raises(StoreError, match=r"b\.bin, a link to .*secret, outside of"):
        stores.open(commit, stored_dtype="uint16")


@pytest.mark.usefixtures("no_zarr_threads")
def test_chunks_of_zarr_have_a_limit(tmp_path):
    path = str(tmp_path / "a.zarr")
    SMALL["two.zarr"].make(path, 0)
    with pytest.raises(StoreError, match=r"has chunks of .* and may of 1; raise Limits"):
        stores.open(path, limits=Limits(chunk_bytes=1))


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
@pytest.mark.parametrize("kind", ["flock", "lockf"])
def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch, kind, number):
    """As NFS without its lock daemon, and some file systems of containers, refuse them."""

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, kind, refuse)
    message = rf"{tmp_path}/packed\S* cannot be locked \({os.strerror(number)}\).*use a folder of a local disk"
    with pytest.raises(OSError, match=message) as raised:
        stores.pack((["a"], lambda _: iter([np.zeros(2)])), str(tmp_path / "packed"))
    assert raised.value.errno == number


def test_a_cache_whose_link_leads_nowhere_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "cache").symlink_to(tmp_path / "gone" / "cache")
    monkeypatch.setenv("STREAM_DATALOADER_CACHE", str(tmp_path / "cache"))
    with pytest.raises(OSError, match=r"cache of remote files cannot be written .*set STREAM_DATALOADER_CACHE"):
        FileCache().open("memory://a/b")
