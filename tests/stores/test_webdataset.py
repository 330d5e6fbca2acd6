"""WebDataset's tars."""

import io
import os
import pickle
import sys
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import FULL
from store_tests import StoreTests
from tars import npy, png, samples, write_tar

from stream_dataloader import StreamDataLoader, StreamDataset, stores
from stream_dataloader.errors import StoreError
from stream_dataloader.stores import WebDatasetStore
from stream_dataloader.stores._base.files import expanded
from stream_dataloader.streams import FileCache

pytestmark = pytest.mark.usefixtures("own_cache")

A, B, C = samples("video_0001/", 23), samples("video_0002/", 9, 1), samples("video_0003/", 31, 2)


def two_tars(folder):
    """Three streams in two tars; the second of them goes on in the second tar."""
    os.makedirs(folder, exist_ok=True)
    write_tar(folder / "train-000.tar", A[0] + B[0][: 4 * 5])
    write_tar(folder / "train-001.tar", B[0][4 * 5 :] + C[0])
    return str(folder)


class TestWebDatasetStore(StoreTests):
    damages = 500 if FULL else 12

    def make(self, tmp_path):
        return WebDatasetStore(two_tars(tmp_path / "tars"))

    streams = (A[1], B[1], C[1])


def texts(*names):
    return [(f"{name}.txt", name.encode()) for name in names]


def streams(store):
    return {store.key(number): [item["txt"] for item in store(number)] for number in store.sources}


def test_a_stream_is_a_directory_or_a_tar_that_has_none(tmp_path):
    write_tar(tmp_path / "s-2.tar", texts("a/0", "a/1", "b.c/0"))
    write_tar(tmp_path / "s-10.tar", texts("0", "1", "./2"))
    assert streams(WebDatasetStore(tmp_path)) == {
        "a": ["a/0", "a/1"],
        "b.c": ["b.c/0"],
        "s-10.tar": ["0", "1", "./2"],
    }


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        ("_", {"x/ep3_1": ["x/ep3_1_0", "x/ep3_1_1"], "x/ep4_1": ["x/ep4_1_0"]}),
        (r".*(ep\d+)_", {"ep3": ["x/ep3_1_0", "x/ep3_1_1"], "ep4": ["x/ep4_1_0"]}),
        ("shard", {"a.tar": ["x/ep3_1_0", "x/ep3_1_1", "x/ep4_1_0"]}),
        (None, {"x": ["x/ep3_1_0", "x/ep3_1_1", "x/ep4_1_0"]}),
    ],
)
def test_what_a_stream_is_can_be_said(tmp_path, stream, expected):
    path = write_tar(tmp_path / "a.tar", texts("x/ep3_1_0", "x/ep3_1_1", "x/ep4_1_0"))
    assert streams(WebDatasetStore(path, stream=stream)) == expected


@pytest.mark.parametrize("stream", ["", 3, "(", "(?:ep)"])
def test_a_rule_that_says_nothing_is_refused(tmp_path, stream):
    with pytest.raises(ValueError, match="stream is "):
        WebDatasetStore(write_tar(tmp_path / "a.tar", texts("x")), stream=stream)


def test_samples_that_belong_to_no_stream_or_to_two_are_named(tmp_path):
    path = write_tar(tmp_path / "0.tar", texts("ep1_1", "zz_1"))
    with pytest.raises(StoreError, match="key 'zz_1'"):
        WebDatasetStore(path, stream=r"(ep\d+)_")
    for number, names in enumerate([("a/0", "a/1"), ("a/1", "a/2")]):
        write_tar(tmp_path / f"{number}.tar", texts(*names))
    with pytest.raises(StoreError, match=r"1\.tar: 'a/1' .*0\.tar"):
        WebDatasetStore(tmp_path)


def test_tars_are_found_by_patterns_lists_and_urls(tmp_path):
    for number in (1, 2, 10):
        write_tar(tmp_path / f"t-{number}.tar", texts(str(number)))
    keys = [["t-1.tar", "t-2.tar", "t-10.tar"]] * 3 + [["t-10.tar", "t-1.tar"]] * 2
    stored = [
        stores.open(tmp_path).open_stream,
        stores.open(str(tmp_path / "t-*.tar")).open_stream,
        stores.open(str(tmp_path / "t-{1,2,10}.tar")).open_stream,
        WebDatasetStore(tmp_path, shards=["t-10.tar", str(tmp_path / "t-1.tar")]),
        WebDatasetStore(f"file://{tmp_path}", shards=["t-{10,1}.tar"]),
    ]
    assert [[store.key(number) for number in store.sources] for store in stored] == keys
    with pytest.raises(FileNotFoundError, match=r"no file at .*t-3"):
        WebDatasetStore(str(tmp_path / "t-{1..3}.tar"))
    with pytest.raises(ValueError, match="may have at most 1,000,000"):
        expanded("{0..99999999999}")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError):
        WebDatasetStore(tmp_path / "empty")


def test_tars_on_a_server_are_fetched_when_they_are_read(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    memory.put(two_tars(tmp_path), "/webdataset", recursive=True)
    store = stores.open("memory://webdataset/train-{000..001}.tar").open_stream
    assert [len(list(store(number))) for number in store.sources] == [23, 9, 31]
    assert store.info().disk_bytes is None
    sizes = [path.stat().st_size for path in tmp_path.glob("train-*.tar")]
    small = FileCache(directory=tmp_path / "small", size_limit_bytes=max(sizes))
    store = WebDatasetStore("memory://webdataset/train-{000..001}.tar", cache=small)
    assert len(list(store(1))) == 9
    kept = [path.name[-13:] for path in (tmp_path / "small").glob("*/*-*")]
    assert kept == ["train-001.tar"]  # the other is let go of before it is fetched
    before = WebDatasetStore("memory://webdataset/train-{000..001}.tar", cache=FileCache(check_seconds=0))
    os.remove(tmp_path / "train-000.tar")
    write_tar(tmp_path / "train-000.tar", texts("other/0"))
    memory.put(str(tmp_path / "train-000.tar"), "/webdataset/train-000.tar")
    with pytest.raises(StoreError):
        list(before(0))
    new = WebDatasetStore("memory://webdataset/train-{000..001}.tar", cache=FileCache(check_seconds=0))
    assert [new.key(number) for number in new.sources] == ["other", "video_0002", "video_0003"]


def test_batches_hold_what_the_columns_say(tmp_path):
    store = WebDatasetStore(two_tars(tmp_path), columns=["png", "cls"], size=(8, 6), layout="HWC")
    dataset = StreamDataset(*stores.OpenedStore(store.sources, store), batch_size=3, time_steps=8)
    batch = next(iter(StreamDataLoader(dataset, num_workers=2)))
    assert (batch.data["png"].shape, batch.data["cls"].T.tolist()) == ((8, 3, 8, 6, 3), [list(range(8))] * 3)
    keyed = WebDatasetStore(two_tars(tmp_path), columns=["__key__", "cls"])
    assert next(iter(keyed(1))) == {"__key__": "video_0002/000000", "cls": 0}
    with pytest.raises(StoreError, match="column"):
        WebDatasetStore(tmp_path, columns=["depth"])


def test_columns_are_decoded_by_their_last_extension(tmp_path):
    members = [
        ("a/0.depth.PNG", png(np.zeros((3, 2, 2), np.uint8))),
        ("a/0.npy", npy(np.asfortranarray(np.arange(6, dtype=">i2").reshape(2, 3)))),
        ("a/0.txt", "naïve".encode()),
        ("a/0.json", b'{"a": [1, 2]}'),
        ("a/0.raw", b"\0\1"),
        ("a/0.id", b" 17\n"),
    ]
    path = write_tar(tmp_path / "a.tar", members)
    (item,) = WebDatasetStore(path)(0)
    assert item.pop("depth.png").shape == (3, 2, 2)
    array = item.pop("npy")
    assert (array.dtype, array.tolist()) == (np.int16, [[0, 1, 2], [3, 4, 5]])
    assert item == {"txt": "naïve", "json": {"a": [1, 2]}, "raw": b"\0\1", "id": 17}
    (item,) = WebDatasetStore(path, decode=False)(0)
    assert item == {name[4:].lower(): data for name, data in members}


class Evil:
    def __reduce__(self):
        return os.mkdir, (os.environ["EVIL"],)


def test_columns_are_decoded_by_functions_of_ones_own(tmp_path, monkeypatch):
    arrays = {"x": np.arange(6.0).reshape(2, 3), "y": np.ones(4, np.int16)}
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    with zipfile.ZipFile(file, "a") as archive:  # as macOS leaves behind
        for name in ("._x.npy", "__MACOSX/._x.npy", ".DS_Store"):
            archive.writestr(name, b"\0\5\x16\7")
    members = [("a/0.npz", file.getvalue()), ("a/0.ply", b"12"), ("a/0.mp", b"34"), ("a/0.x.png", b"5")]
    path = write_tar(tmp_path / "a.tar", members)
    monkeypatch.setitem(sys.modules, "msgpack", SimpleNamespace(unpackb=lambda data: [data]))
    store = WebDatasetStore(path, decode={"ply": int, "x.png": float})
    (item,) = store(0)
    assert (item["ply"], item["mp"], item["x.png"]) == (12, [b"34"], 5.0)
    assert item["npz"].keys() == arrays.keys()
    differing = [name for name, array in arrays.items() if not np.array_equal(item["npz"][name], array)]
    assert not differing, "these arrays have other values than were written"
    with pytest.raises(StoreError, match=r"0\.ply: decode= raised ZeroDivisionError"):
        list(WebDatasetStore(path, decode={"ply": lambda _: 1 / 0})(0))
    monkeypatch.setitem(sys.modules, "msgpack", None)
    with pytest.raises(ImportError, match="pip install msgpack"):
        list(store(0))


def test_what_runs_code_is_refused_unless_allowed(tmp_path, monkeypatch):
    monkeypatch.setenv("EVIL", str(tmp_path / "ran"))
    path = write_tar(tmp_path / "a.tar", [("0.pkl", pickle.dumps(Evil())), ("0.cls", b"1")])
    with pytest.raises(StoreError, match=r"0\.pkl is pickled.*allow_pickle=True"):
        list(WebDatasetStore(path)(0))
    assert list(WebDatasetStore(path, columns=["cls"])(0)) == [{"cls": 1}]
    assert not (tmp_path / "ran").exists()
    list(WebDatasetStore(path, allow_pickle=True)(0))
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("0.npy", npy(np.zeros(9))[:-8]),
        ("0.npy", npy(np.zeros(9)).replace(b"(9,), }", b"(9999999999999999,), }")),
        ("0.npy", b""),
        ("0.npy", npy(np.array(["a"]))),
        ("0.cls", b"cat"),
        ("0.json", b"[1,"),
        ("0.json", b"[" * 100_000),
        ("0.txt", b"\xff"),
        ("0.jpg", b"\xff\xd8\xff\xe0\0"),
        ("0.png", b""),
    ],
)
def test_a_member_that_cannot_be_decoded_is_named(tmp_path, name, data):
    store = WebDatasetStore(write_tar(tmp_path / "a.tar", [(name, data)]))
    with pytest.raises(StoreError, match=rf"a\.tar: {name} "):
        list(store(0))
    assert len(store.verify()) == 1


@pytest.mark.parametrize(
    ("members", "out", "message"),
    [
        ([("0.png", png(np.zeros((3, 2, 2), np.uint8)))], {"png": np.zeros((1, 3, 4, 4), np.uint8)}, "give size="),
        ([("0.npy", npy(np.zeros(1)))], {"npy": np.zeros((1, 3))}, r"float64 \(1,\).* float64 \(3,\)"),
        ([("0.json", b"1.5")], {"json": np.zeros(1, np.int64)}, r"float64 \(\).*int64 \(\)"),
        ([("0.json", b'{"a": 1}')], {"json": np.zeros(1, np.int64)}, "another structure"),
        ([("0.cls", b"1")], {"id": np.zeros(1, np.int64)}, "columns="),
    ],
)
def test_a_sample_unlike_those_before_it_is_an_error(tmp_path, members, out, message):
    store = WebDatasetStore(write_tar(tmp_path / "a.tar", members))
    with pytest.raises(StoreError, match=message):
        store(0).read_into(out)


def member(name, kind=tarfile.REGTYPE, size=0, **fields):
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    for field, value in fields.items():
        setattr(info, field, value)
    return info, b""


@pytest.mark.parametrize(
    "members",
    [
        [member("/etc/0.txt")],
        [member("a/../../0.txt")],
        [member("0.txt", tarfile.SYMTYPE, linkname="/etc/passwd")],
        [member("0.txt", tarfile.LNKTYPE, linkname="1.txt")],
        [member("0.txt", tarfile.CHRTYPE)],
        [member("0.txt", tarfile.FIFOTYPE)],
        [("0.txt", b"a"), ("0.TXT", b"b")],
        [("0.txt", b"a"), ("1.txt", b"a"), ("0.cls", b"1")],
        [member("0.txt", pax_headers={"GNU.sparse.major": "1", "GNU.sparse.minor": "0"})],
        [("b/0.txt", b"a"), ("a/0.txt", b"a"), ("b/1.txt", b"a")],
    ],
)
def test_members_that_make_no_samples_are_refused(tmp_path, members):
    path = write_tar(tmp_path / "a.tar", members)
    with pytest.raises(StoreError, match=r"a\.tar"):
        WebDatasetStore(path)


def test_directories_hidden_notes_and_names_without_a_dot_are_no_samples(tmp_path):
    members = [member("a", tarfile.DIRTYPE), ("__meta__/0.txt", b""), ("README", b"x"), *texts("a/0")]
    assert streams(WebDatasetStore(write_tar(tmp_path / "a.tar", members))) == {"a": ["a/0"]}


def claim(path, place, text):
    """Write into the first header, and mend its checksum."""
    data = bytearray(Path(path).read_bytes())
    data[place : place + len(text)] = text
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    Path(path).write_bytes(data)


@pytest.mark.parametrize(
    ("place", "text"),
    [
        (124, b"77777777777\0"),
        (124, b"\x80\0\0\0\x7f" + b"\xff" * 7),
        (124, b"\xff" * 12),
        (156, b"x"),
        (156, b"L"),
    ],
)
def test_absurd_sizes_in_headers_are_refused_at_once(tmp_path, place, text):
    path = write_tar(tmp_path / "a.tar", texts("a/0", "a/1"))
    claim(path, place, text)
    if place == 156:
        claim(path, 124, b"77777777777\0")
    with pytest.raises(StoreError, match=r"a\.tar"):
        WebDatasetStore(path)


def test_a_tar_that_is_cut_off_is_an_error(tmp_path):
    path = write_tar(tmp_path / "a.tar", texts("a/0", "a/1", "a/2"))
    stream = WebDatasetStore(path)(0)
    next(stream)
    for size in (3 * 1024, 1500, 1024, 700, 512, 100, 0):
        os.truncate(path, size)
        with pytest.raises(StoreError):
            WebDatasetStore(path)
    with pytest.raises(StoreError):
        list(stream)


def test_a_compressed_tar_is_refused(tmp_path):
    with pytest.raises(StoreError, match="unpack it"):
        WebDatasetStore(write_tar(tmp_path / "a.tar", texts("a/0"), "w:gz"))


def test_a_damaged_header_does_not_end_a_tar(tmp_path):
    path = write_tar(tmp_path / "a.tar", texts("a/0", "a/1", "a/2"))
    content = Path(path).read_bytes()
    for damaged in (content[:1024] + b"Q" + content[1025:], content[:1024] + bytes(1024) + content[2048:]):
        Path(path).write_bytes(damaged)
        with pytest.raises(StoreError, match="byte 1,024"):
            WebDatasetStore(path)
    Path(path).write_bytes(content + content)
    with pytest.raises(StoreError):
        WebDatasetStore(path)


def test_the_index_is_kept_and_made_anew_when_the_tar_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("STREAM_DATALOADER_CACHE", str(tmp_path / "cache"))
    path = write_tar(tmp_path / "a.tar", texts("a/0"))
    WebDatasetStore(path)
    (kept,) = (tmp_path / "cache" / "tars").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr("stream_dataloader.stores.webdataset.store.scan", None)
        assert streams(WebDatasetStore(path)) == {"a": ["a/0"]}
    for damage in (kept.read_bytes()[:-1], b"", kept.read_bytes().replace(b"a/0", b"b/0")):
        kept.write_bytes(damage)
        assert streams(WebDatasetStore(path)) == {"a": ["a/0"]}
    write_tar(path, texts("b/0", "b/1"))
    assert streams(WebDatasetStore(path)) == {"b": ["b/0", "b/1"]}


def test_names_of_any_bytes_and_length_come_back(tmp_path):
    name = "d" * 120 + "/\udcffé" + "x" * 130
    path = write_tar(tmp_path / "a.tar", [(f"{name}.txt", b"x")], format=tarfile.GNU_FORMAT)
    (item,) = WebDatasetStore(path, columns=["__key__"])(0)
    assert item == {"__key__": name}


def test_a_tar_that_is_replaced_is_not_read_by_workers_that_start_later(tmp_path):
    """Its headers are equal: names, sizes, times of members."""
    path = write_tar(tmp_path / "a.tar", [("ep/0.cls", b"1"), ("ep/1.cls", b"2")])
    store = WebDatasetStore(path)
    sent = pickle.dumps(store)
    assert len(list(pickle.loads(sent)(0))) == 2
    os.unlink(path)
    write_tar(tmp_path / "a.tar", [("ep/0.cls", b"7"), ("ep/1.cls", b"8")])
    with pytest.raises(StoreError, match=r"a\.tar was replaced"):
        pickle.loads(sent)(0)
    assert WebDatasetStore(path).sources.fingerprint == store.sources.fingerprint
