"""Rows of arrays: in memory, in .npy and HDF5 files, near and far; and what is wrong with some."""

import fcntl
import gc
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import h5py
import helpers
import numpy as np
import pytest
import torch

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.errors import ItemError, LengthError, OpenError, ReadError, StoreError
from stream_dataloader.protocols import ReadsInto
from stream_dataloader.streams.array import hdf5
from stream_dataloader.streams.array.stream import ArrayStream
from stream_dataloader.testing import StreamContract

TABLE = np.arange(60, dtype=np.float32).reshape(20, 3)
FRAMES = np.random.default_rng(0).integers(0, 256, (23, 2, 5, 4), np.uint8)


def saved(path, array):
    np.save(path, array)
    return path


def stored(path, mode="w", **datasets):
    with h5py.File(path, mode) as file:
        for name, given in datasets.items():
            array, options = given if isinstance(given, tuple) else (given, {})
            file.create_dataset(name.replace("__", "/"), data=array, **options)
    return path


def rows(source, start=0, **options):
    return helpers.read(ArrayStream(**options)(source, start=start))


def load(source, workers=0, open_stream=None):
    list(StreamDataLoader(StreamDataset([source], open_stream or ArrayStream(), 1, time_steps=1), workers))


def npy_of(header):
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


class TestNpy(StreamContract):
    @pytest.fixture(params=["float32", "fortran", "big-endian", "flat", "complex"])
    def sources(self, request, tmp_path):
        array = {
            "fortran": np.asfortranarray(TABLE),
            "big-endian": TABLE.astype(">f8"),
            "flat": TABLE[:, 0],
            "complex": TABLE * 1j,
        }.get(request.param, TABLE)
        path = saved(tmp_path / "a.npy", array)
        return [path, str(saved(tmp_path / "none.npy", array[:0])), (path, 3, 9), (str(path), 19, None), (path, 4, 4)]

    @pytest.fixture
    def open_stream(self):
        return ArrayStream()


class TestInMemory(StreamContract):
    @pytest.fixture(params=["array", "strided", "bool", "tensor", "bfloat16", "memmap", "list", "mapping", "paths"])
    def sources(self, request, tmp_path):
        array = {
            "strided": np.repeat(TABLE, 2, axis=1)[:, ::2],
            "bool": TABLE > 30,
            "tensor": torch.from_numpy(FRAMES),
            "bfloat16": torch.from_numpy(TABLE).bfloat16(),
        }.get(request.param, TABLE)
        if request.param == "memmap":
            array = np.load(saved(tmp_path / "a.npy", TABLE), mmap_mode="r")
        sources = [array, array[:0], (array, 3, 9), (array, 4, 4)]
        if request.param == "list":
            sources = [TABLE.tolist(), (TABLE.tolist(), 3, 9)]
        elif request.param == "mapping":
            both = {"table": TABLE, "frames": torch.from_numpy(FRAMES[:20])}
            sources = [both, (both, 3, 9), {"table": TABLE[:0], "frames": torch.from_numpy(FRAMES[:0])}]
        elif request.param == "paths":
            both = {
                "npy": saved(tmp_path / "b.npy", TABLE),
                "hdf5": str(stored(tmp_path / "b.h5", rows=FRAMES[:20])),
                3: TABLE,
            }
            sources = [both, (both, 3, 9)]
        yield sources
        sources.clear()  # closes the memory map, which is ours, before open files are counted

    @pytest.fixture
    def open_stream(self):
        return ArrayStream()


def deep_rows(tmp_path, kind):
    array, options = {
        "chunked": (FRAMES, {"chunks": (4, 1, 3, 4)}),
        "packed": (FRAMES, {"chunks": (7, 2, 5, 4), "compression": "gzip", "shuffle": True}),
        "big-endian": (TABLE.astype(">i4"), {}),
        "bool": (TABLE > 30, {}),
        "float16": (TABLE.astype(np.float16), {}),
        "flat": (TABLE[:, 0], {}),
    }.get(kind, (FRAMES, {}))
    path = stored(tmp_path / "a.h5", deep__rows=(array, options), other=TABLE)
    none = stored(tmp_path / "none.h5", deep__rows=array[:0])
    return [path, (path, 3, 9), (str(path), 17, None), none]


class TestHdf5(StreamContract):
    in_place = ("contiguous", "packed", "big-endian")
    copied = (*in_place, "chunked", "bool", "float16", "flat")
    kinds = (*copied, *(f"in place, {kind}" for kind in in_place))

    @pytest.fixture(params=helpers.seldom(kinds, "contiguous", "chunked", "bool", "flat", "in place, packed"))
    def sources(self, request, tmp_path, monkeypatch):
        place, _, kind = request.param.rpartition(", ")
        if place:
            monkeypatch.setattr(hdf5, "_IN_PLACE_BYTES", 1)  # small rows too
        return deep_rows(tmp_path, kind)

    @pytest.fixture
    def open_stream(self):
        return ArrayStream(dataset="deep/rows")


class TestHdf5SideBySide(StreamContract):
    @pytest.fixture
    def sources(self, tmp_path):
        path = stored(tmp_path / "a.h5", frames=FRAMES[:20], deep__table=(TABLE, {"chunks": (3, 2)}))
        return [path, (path, 3, 9), stored(tmp_path / "b.h5", frames=FRAMES[:4], deep__table=TABLE[:4])]

    @pytest.fixture(params=[("frames", "deep/table"), {"x": "frames", "y": "deep/table"}])
    def open_stream(self, request):
        return ArrayStream(dataset=request.param)


def test_rows_are_those_of_the_file(tmp_path):
    npy = saved(tmp_path / "a.npy", FRAMES)
    assert isinstance(ArrayStream()(FRAMES), ReadsInto)
    assert np.array_equal(rows(npy), FRAMES)
    assert np.array_equal(rows((npy, 5, 9), start=1), FRAMES[6:9])
    both = stored(tmp_path / "a.h5", frames=(FRAMES, {"chunks": (5, 1, 2, 4)}), deep__means=FRAMES.mean((1, 2, 3)))
    assert np.array_equal(rows(both, dataset="frames"), FRAMES)
    items = rows(both, dataset={"x": "frames", "mean": "/deep/means"})
    assert list(items[0]) == ["x", "mean"]
    assert np.array_equal([item["x"] for item in items], FRAMES)
    assert np.array_equal([item["mean"] for item in items], FRAMES.mean((1, 2, 3)))
    with h5py.File(tmp_path / "block.h5", "w", userblock_size=512) as file:
        file["deep/one"] = TABLE
    assert np.array_equal(rows(tmp_path / "block.h5"), TABLE)


@pytest.mark.parametrize("in_place", [True, False])
def test_rows_between_other_lanes_rows_are_written_and_nothing_else(tmp_path, monkeypatch, in_place):
    if in_place:
        monkeypatch.setattr(hdf5, "_IN_PLACE_BYTES", 1)
    for name, options in (("contiguous", {}), ("packed", {"chunks": (3, 1, 2, 4), "compression": "gzip"})):
        stream = ArrayStream()(stored(tmp_path / f"{name}.h5", rows=(FRAMES, options)))
        slot = np.full((9, 3, 2, 5, 4), 7, np.uint8)
        assert stream.read_into(slot[:, 1]) == 9
        assert np.array_equal(slot[:, 1], FRAMES[:9])
        assert (slot[:, [0, 2]] == 7).all()
        turned = np.zeros((4, 4, 5, 2), np.uint8)
        assert stream.read_into(turned.transpose(0, 3, 2, 1)) == 4
        assert np.array_equal(turned.transpose(0, 3, 2, 1), FRAMES[9:13])
        stream.close()


def test_what_was_yielded_stays_when_the_file_is_closed(tmp_path):
    for source in (saved(tmp_path / "a.npy", TABLE), stored(tmp_path / "a.h5", rows=TABLE)):
        stream = ArrayStream()(source)
        iterator = iter(stream)
        before = len(os.listdir("/proc/self/fd"))
        kept = [next(iterator), next(iterator)]
        stream.close()
        stream.close()
        assert len(os.listdir("/proc/self/fd")) < before
        assert np.array_equal(kept, TABLE[:2])
        assert list(iterator) == []


def test_files_are_opened_in_many_threads_at_once(tmp_path):
    """Python 3.11's parser gives up when a collection of garbage in it lets another thread in."""
    paths = [saved(tmp_path / f"{i}.npy", TABLE[: i + 1]) for i in range(8)]
    let_others_in, before = (lambda *_: time.sleep(0.0001)), gc.get_threshold()
    gc.callbacks.append(let_others_in)
    gc.set_threshold(20)
    try:
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(ArrayStream().length, paths * 60))
    finally:
        gc.callbacks.remove(let_others_in)
        gc.set_threshold(*before)
    assert found == [*range(1, 9)] * 60


def test_headers_of_every_version_and_writer(tmp_path):
    for version in ((1, 0), (2, 0), (3, 0)):
        with open(tmp_path / "a.npy", "wb") as file:
            np.lib.format.write_array(file, TABLE, version)
        assert np.array_equal(rows(tmp_path / "a.npy"), TABLE)
    header = b'{"shape":(20,3),"descr":"<f4","fortran_order":False}\n'
    assert np.array_equal(rows(written(tmp_path / "b.npy", npy_of(header) + TABLE.tobytes())), TABLE)


def written(path, content):
    path.write_bytes(content)
    return path


def made(path, content):
    if isinstance(content, bytes):
        return written(path, content)
    return stored(path, **content) if isinstance(content, dict) else saved(path.with_suffix(".npy"), content)


PAIRS = np.zeros(4, [("x", np.float32), ("y", np.int64)])

#: What each holds, and what tells it from the others.
BAD_FILES = {
    "text": (b"hello world", "is neither"),
    "archive": (b"PK\x03\x04...", "is a zip archive"),
    "no header": (b"\x93NUMPY\x01\x00\x20", "is not a whole"),
    "odd version": (b"\x93NUMPY\x09\x00\x20\x00", "is not a whole"),
    "no dict": (npy_of(b"abc\n"), "its header is 'abc"),
    "odd dtype": (npy_of(b"{'descr': '<f5', 'fortran_order': False, 'shape': (1,)}\n"), "<f5"),
    "number": (np.float32(1), "is a single number"),
    "objects": (np.array([{}, None], object), "is of dtype object"),
    "structured": (PAIRS, r"is of dtype \[\('x'"),
    "head of hdf5": (b"\x89HDF\r\n\x1a\n", "is not a whole HDF5 file"),
    "several": ({"a": TABLE, "deep__b": FRAMES}, r"has 2 datasets: {'a': \(20, 3\), 'deep/b'"),
    "none": ({}, "has 0 datasets"),
    "hdf5 empty": ({"a": h5py.Empty("f4")}, "dataset /a is a single"),
    "hdf5 strings": ({"a": ["x", "y"]}, "dataset /a is of dtype object"),
    "hdf5 structured": ({"a": PAIRS}, r"dataset /a is of dtype \[\('x'"),
}


@pytest.mark.parametrize(("content", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_bad_files_are_named(tmp_path, content, message):
    path = made(tmp_path / "a.bin", content)
    with pytest.raises(OpenError, match=rf"(?s)source 0 .*{path.name}.*{message}"):
        load(path)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"state": TABLE}, "the source's 'seen' is a mapping, and mappings of arrays are flat"),
        (None, "the source's 'seen' is of dtype object"),
        (7, "the source's 'seen' is a single number"),
    ],
)
def test_bad_values_of_a_mapping_are_named(tmp_path, value, message):
    for beside in (TABLE, saved(tmp_path / "action.npy", TABLE)):
        with pytest.raises(ValueError, match=message):
            ArrayStream()({"seen": value, "action": beside})


def test_files_that_are_cut_are_named(tmp_path):
    for content, message in ((TABLE, "is cut off: 328 bytes of 368"), ({"a": TABLE}, "is not a whole .*truncated")):
        path = made(tmp_path / "a.bin", content)
        with pytest.raises(OpenError, match=rf"(?s)source 0 .*{path.name}.*{message}"):
            load(written(path, path.read_bytes()[:-40]))


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ("deep", r"a\.h5 has 2 datasets: {'deep/rows': \(20, 3\), 'short': \(4, 3\)}; 'deep' is none"),
        (("deep/rows", "nope"), "'nope' is none of them"),
        (("deep/rows", "short"), r"side by side have other numbers of rows: {'deep/rows': 20, 'short': 4}"),
    ],
)
def test_bad_datasets_are_named(tmp_path, dataset, message):
    path = stored(tmp_path / "a.h5", deep__rows=TABLE, short=TABLE[:4])
    with pytest.raises(ValueError, match=message):
        ArrayStream(dataset=dataset).length(path)
    with pytest.raises(ValueError, match=r"a\.npy is a \.npy file, and dataset=.* is for HDF5"):
        ArrayStream(dataset=dataset)(saved(tmp_path / "a.npy", TABLE))


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        *((ValueError, source) for source in (np.float32(1), torch.tensor(1), np.array([None]), {})),
        (ValueError, {"a": TABLE, "b": TABLE[:3]}),
        (ValueError, {"a": np.array("x")}),
        (ValueError, (np.arange(4), 2, 9)),
        (ValueError, (np.arange(4), 5, None)),
        (TypeError, (np.arange(4), 1.5, None)),
    ],
)
def test_bad_sources_are_refused(source, kind):
    with pytest.raises(kind, match=r"source|array|start"):
        ArrayStream()(source)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.filterwarnings("ignore:num_workers is")
def test_a_file_cut_off_while_it_is_read_is_an_error(tmp_path, workers):
    path = saved(tmp_path / "a.npy", np.zeros((100, 5000)))

    def open_stream(source):
        stream = ArrayStream()(source)
        os.truncate(path, 1000)
        return stream

    with pytest.raises(ReadError, match=r"a\.npy was cut off while it was read: 1,000 bytes are left of 4,000,128"):
        load(path, workers, open_stream)


def test_a_corrupt_chunk_is_named(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (8, 1000), np.uint8)
    path = stored(tmp_path / "a.h5", rows=(noise, {"chunks": (2, 1000), "compression": "gzip", "fletcher32": True}))
    with h5py.File(path) as file:
        chunk = file["rows"].id.get_chunk_info(2)
    with open(path, "r+b") as file:
        file.seek(chunk.byte_offset + 100)
        file.write(bytes(50))
    with pytest.raises(ReadError, match=r"a\.h5, dataset /rows, rows 4 to 5: "):
        load(path)


def test_another_file_that_changes_is_an_error(tmp_path):
    np.arange(4000.0).tofile(tmp_path / "raw.bin")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (40, 100), float, external=[(str(tmp_path / "raw.bin"), 0, 32000)])
    rows = ArrayStream(files="anywhere")(tmp_path / "a.h5")
    assert (next(rows) == np.arange(100)).all()
    np.zeros(4000).tofile(tmp_path / "raw.bin")
    for read in (lambda: next(rows), lambda: rows.read_into(np.zeros((2, 100)))):
        with pytest.raises(StoreError, match=r"raw\.bin is another file now"):
            read()
    rows.close()


def test_a_file_that_is_being_written_is_told(tmp_path, monkeypatch):
    monkeypatch.delenv("HDF5_USE_FILE_LOCKING", raising=False)
    path = stored(tmp_path / "a.h5", rows=TABLE)
    with open(path, "r+b") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        with pytest.raises(OSError, match=r"a\.h5 is open for writing elsewhere; close it there, or set HDF5_USE"):
            ArrayStream()(path)


def test_h5py_is_asked_for_by_name(tmp_path, monkeypatch):
    path = stored(tmp_path / "a.h5", rows=TABLE)
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ImportError, match=r"a\.h5 needs h5py: pip install 'stream-dataloader\[hdf5\]'"):
        ArrayStream()(path)
    assert np.array_equal(rows(saved(tmp_path / "a.npy", TABLE)), TABLE)
    with pytest.raises(ValueError, match="is neither"):
        ArrayStream()(written(tmp_path / "a.txt", b"hello world"))


@pytest.mark.parametrize("other", [np.arange(4, dtype=np.int32), np.zeros((4, 2), np.int64), {"a": np.arange(4)}])
@pytest.mark.parametrize("windows", ["aligned", "packed"])
def test_arrays_of_another_kind_in_memory_are_no_neighbours(other, windows):
    dataset = StreamDataset([np.arange(3), np.arange(4), other], ArrayStream(), 1, time_steps=5, windows=windows)
    with pytest.raises(ItemError, match=r"source 2 .*item 0"):
        list(StreamDataLoader(dataset))


@pytest.mark.parametrize("rows", [3, 4, 5])
@pytest.mark.parametrize("claimed", [-1, 1])
@pytest.mark.parametrize("windows", ["aligned", "packed"])
def test_a_wrong_length_of_an_array_in_memory_is_an_error(rows, claimed, windows):
    lengths = [2, rows + claimed, 2]
    sources = [np.arange(2), np.arange(rows), np.arange(2)]
    dataset = StreamDataset(sources, ArrayStream(), 1, time_steps=4, windows=windows, lengths=lengths)
    with pytest.raises(LengthError, match=f"has {'only' if claimed > 0 else 'at least'} {rows} items") as caught:
        list(StreamDataLoader(dataset))
    assert caught.value.source_index == 1


@pytest.mark.parametrize("lengths", [None, "known"])
@pytest.mark.parametrize("windows", ["aligned", "packed"])
def test_short_arrays_in_memory_are_read_whole(lengths, windows):
    rng = np.random.default_rng(0)
    sources = [rng.integers(0, 99, length) for length in (0, 1, 4, 3, 8, 0, 5, 2)]
    known = None if lengths is None else list(map(len, sources))
    dataset = StreamDataset(sources, ArrayStream(), 2, time_steps=4, windows=windows, lengths=known)
    seen: dict[int, list[int]] = {}
    for batch in StreamDataLoader(dataset):
        for lane in range(2):
            for t in range(4):
                if batch.mask[t, lane]:
                    seen.setdefault(int(batch.source_index[t, lane]), []).append(int(batch.data[t, lane]))
    assert seen == {i: source.tolist() for i, source in enumerate(sources) if len(source)}
