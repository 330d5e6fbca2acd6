"""Parquet and Arrow files."""

import json
import multiprocessing
import os
import resource

import cv2
import numpy as np
import pytest
import torch
from helpers import FULL, PATIENCE
from store_tests import StoreTests

from stream_dataloader import StreamDataLoader, StreamDataset, stores
from stream_dataloader._engine.kept_fields import map_leaves
from stream_dataloader.errors import StoreError
from stream_dataloader.stores import ParquetStore

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
feather = pytest.importorskip("pyarrow.feather")

pytestmark = pytest.mark.usefixtures("own_cache")


def episodes(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [
        [
            {
                "episode": np.int64(10 * number),
                "state": rng.standard_normal(6).astype(np.float32),
                "grid": rng.integers(0, 9, (2, 3)),
                "pose": {"x": np.float64(step / 2), "ok": np.bool_(step % 2)},
                "time": np.int64(1_000_000 * step),
            }
            for step in range(length)
        ]
        for number, length in enumerate(lengths)
    ]


STREAMS = episodes((23, 3, 31, 8))


SCHEMA = pa.schema(
    {
        "episode": pa.int64(),
        "state": pa.list_(pa.float32(), 6),
        "grid": pa.list_(pa.list_(pa.int64())),
        "pose": pa.struct({"x": pa.float64(), "ok": pa.bool_()}),
        "time": pa.timestamp("us"),
    }
)
ROWS = [map_leaves(item, lambda leaf: leaf.tolist()) for items in STREAMS for item in items]
TABLE = pa.Table.from_pylist(ROWS, SCHEMA)


def two_parquets(folder):
    os.makedirs(folder)
    options = {"row_group_size": 7, "write_page_checksum": True}
    pq.write_table(TABLE.slice(0, 30), folder / "data-2.parquet", **options)
    pq.write_table(TABLE.slice(30), folder / "data-10.parquet", **options)
    return str(folder)


def write_ipc(path, table, kind, rows=7):
    new = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return str(path)


class ParquetContract(StoreTests):
    damages = 500 if FULL else 12

    streams = STREAMS

    def test_damage_is_noticed(self, open_stream, expected):
        """In a process of its own, as it may crash, with less memory than a damaged size may claim."""

        def check():
            resource.setrlimit(resource.RLIMIT_AS, (32 << 30, 32 << 30))
            super(ParquetContract, self).test_damage_is_noticed(open_stream, expected)

        process = multiprocessing.get_context("fork").Process(target=check)
        process.start()
        process.join(PATIENCE)
        assert process.exitcode == 0


class TestParquetStore(ParquetContract):
    def make(self, tmp_path):
        return ParquetStore(two_parquets(tmp_path / "a"), stream="episode", cache_bytes=2000)


class TestArrowFile(ParquetContract):
    def make(self, tmp_path):
        return ParquetStore(write_ipc(tmp_path / "a.arrow", TABLE, "file"), stream="episode")


class TestSavedDataset(ParquetContract):
    def make(self, tmp_path):
        write_ipc(tmp_path / "data-00000-of-00002.arrow", TABLE.slice(0, 25), "stream")
        write_ipc(tmp_path / "data-00001-of-00002.arrow", TABLE.slice(25), "stream")
        write_ipc(tmp_path / "cache-of-some-map.arrow", TABLE.slice(1, 2), "stream")
        names = [{"filename": f"data-0000{i}-of-00002.arrow"} for i in range(2)]
        (tmp_path / "state.json").write_text(json.dumps({"_data_files": names, "_indices_data_files": None}))
        return ParquetStore(tmp_path, stream="episode")


def written(path, columns, **options):
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), path, **options)
    return str(path)


def test_without_a_key_files_are_streams_in_the_order_of_their_names(tmp_path):
    for number in (10, 9, 1):
        written(tmp_path / f"a{number}.parquet", {"x": [number] * number})
    written(tmp_path / "a0.parquet", {"x": pa.array([], pa.int64())})
    (tmp_path / "_metadata.parquet").write_bytes(b"no table")
    store = stores.open(tmp_path).open_stream
    assert [(store.key(i), store.length(i)) for i in store.sources] == [
        (f"a{number}.parquet", number) for number in (0, 1, 9, 10)
    ]
    assert [len(list(store(number))) for number in store.sources] == [0, 1, 9, 10]
    some = stores.open(str(tmp_path / "a{9,1}.parquet")).open_stream
    assert some.lengths.tolist() == [9, 1]


@pytest.mark.parametrize("keys", [["b", "b", "a", "c", "c"], [3, 3, 1, 2, 2], [True, True, False, None, None]])
def test_runs_of_a_key_are_streams(tmp_path, keys):
    path = written(tmp_path / "a.parquet", {"k": keys, "x": range(5)}, row_group_size=2)
    if None in keys:
        with pytest.raises(StoreError, match=r"a\.parquet, row 3: k is null"):
            ParquetStore(path, stream="k")
        return
    store = ParquetStore(path, stream="k", columns=["x"])
    found = {store.key(number): [int(item["x"]) for item in store(number)] for number in store.sources}
    assert found == {str(keys[0]): [0, 1], str(keys[2]): [2], str(keys[3]): [3, 4]}
    assert store.number(str(keys[2])) == 1


def test_a_key_in_several_places_is_an_error(tmp_path):
    path = written(tmp_path / "a.parquet", {"k": [1, 1, 2, 1]}, row_group_size=2)
    with pytest.raises(StoreError, match=r"row 3: rows with k = 1 are in several places.*sort_by"):
        ParquetStore(path, stream="k")


def test_folders_may_tell_columns(tmp_path):
    for episode, task in ((2, "lift"), (10, "drop")):
        folder = tmp_path / f"episode={episode}" / f"task={task}"
        folder.mkdir(parents=True)
        for part in range(2):
            written(folder / f"part-{part}.parquet", {"x": [part, episode]})
    store = stores.open(tmp_path, stream="episode").open_stream
    assert [store.key(number) for number in store.sources] == ["2", "10"]
    assert list(store(1))[3] == {"x": 10, "episode": 10, "task": "drop"}
    batch = next(iter(StreamDataLoader(StreamDataset([0, 1], store, batch_size=2, time_steps=4))))
    assert batch.data["episode"].T.tolist() == [[2] * 4, [10] * 4]


@pytest.mark.one_of_each
@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.array([1, 2], pa.uint8()), np.uint8(2)),
        (pa.array(np.array([1, 2], np.float16)), np.float16(2)),
        (pa.array([0, 5], pa.date32()), np.int64(5)),
        (pa.array([0, 5], pa.time32("ms")), np.int64(5)),
        (pa.array([0, 5], pa.duration("ns")), np.int64(5)),
        (pa.array([0, 5], pa.timestamp("ns", "UTC")), np.int64(5)),
        (pa.array([[], []], pa.list_(pa.int8())), np.zeros(0, np.int8)),
        (pa.array([[[1], [2]], [[3], [4]]], pa.large_list(pa.list_(pa.int8(), 1))), np.array([[3], [4]], np.int8)),
        (pa.array([[{"a": 1}], [{"a": 2}]]), {"a": np.array([2])}),
        (pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(8).reshape(2, 2, 2)), np.arange(4, 8).reshape(2, 2)),
        (pa.array(["a", "b"]).dictionary_encode(), "b"),
        (pa.array([b"a", b"b"], pa.binary(1)), b"b"),
        (pa.array([["a"], ["b", "c"]]), ["b", "c"]),
        (pa.array([[{"a": "x", "b": 1}], []]), []),
    ],
    ids=lambda value: str(getattr(value, "type", ""))[:40],
)
@pytest.mark.parametrize("kind", ["parquet", "arrow", "lz4"])
def test_types_come_back(tmp_path, array, expected, kind):
    table = pa.table({"x": array})
    path = str(tmp_path / f"a.{kind}")
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        feather.write_feather(table, path, compression="lz4" if kind == "lz4" else "uncompressed")
    with pa.memory_map(path):
        (_, item) = ParquetStore(path)(0)
    np.testing.assert_equal(item["x"], expected)
    assert getattr(item["x"], "dtype", None) == getattr(expected, "dtype", None)


@pytest.mark.parametrize(
    ("array", "place"),
    [
        (pa.array([1, None]), "column 'x', row 1"),
        (pa.array([[1], [None]]), "column 'x', row 1"),
        (pa.array([[1], None]), "column 'x', row 1"),
        (pa.array([{"a": 1}, {"a": None}]), "column 'x.a', row 1"),
        (pa.array([[1], [2, 3]]), "column 'x', row 1"),
        (pa.array([1, 2]).cast(pa.decimal128(20)), "column 'x'"),
        (pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int8())), "column 'x'"),
        (pa.nulls(2), "column 'x', row 0"),
        (pa.StringArray.from_buffers(2, *map(pa.py_buffer, (np.arange(3, dtype="i4"), b"a\xff"))), "column 'x', row 1"),
    ],
    ids=str,
)
def test_what_is_not_read_is_named_by_column_and_row(tmp_path, array, place):
    store = ParquetStore(written(tmp_path / "a.parquet", {"x": array, "y": [1, 2]}))
    with pytest.raises(StoreError, match=rf"a\.parquet, {place}"):
        list(store(0))
    assert len(list(ParquetStore(store.path, columns=["y"])(0))) == 2


def test_nulls_are_filled_if_asked(tmp_path):
    path = written(tmp_path / "a.parquet", {"x": [1, None], "s": ["a", None], "l": [[1.0], [None]]})
    assert list(ParquetStore(path, fill_null={"x": -1, "s": "", "l": 0})(0))[1] == {"x": -1, "s": "", "l": [0]}
    with pytest.raises(StoreError, match="nulls cannot be -1"):
        list(ParquetStore(path, fill_null=-1)(0))


def test_lists_of_another_length_in_another_row_group_are_no_broadcast(tmp_path):
    path = written(tmp_path / "a.parquet", {"x": [[1, 2], [1, 2], [3], [3]]}, row_group_size=2)
    with pytest.raises(StoreError, match=r"int64 \(1,\), but the rows before it are int64 \(2,\)"):
        ParquetStore(path)(0).read_into({"x": np.zeros((4, 2), np.int64)})
    with pytest.raises(StoreError, match="float64"):
        ParquetStore(path)(0).read_into({"x": np.zeros((2, 2))})


@pytest.mark.parametrize("nested", [False, True])
def test_images_are_decoded(tmp_path, nested):
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (9, 3, 4, 5), np.uint8)
    encoded = [cv2.imencode(".png", frame.transpose(1, 2, 0)[..., ::-1].copy())[1].tobytes() for frame in frames]
    column = [{"bytes": data, "path": None} for data in encoded] if nested else encoded
    path = written(tmp_path / "a.parquet", {"image": column, "x": range(9)}, row_group_size=4)
    store = ParquetStore(path, decode={"image": "image"})
    assert all((item["image"] == frame).all() for item, frame in zip(store(0), frames, strict=True))
    batch = next(iter(StreamDataLoader(StreamDataset([0], store, batch_size=1, time_steps=9))))
    assert (batch.data["image"][:, 0].numpy() == frames).all()
    small = ParquetStore(path, decode={"image": "image"}, size=(2, 2), layout="HWC", color="gray")
    assert next(iter(small(0)))["image"].shape == (2, 2, 1)
    with pytest.raises(StoreError, match="decode= takes columns of binary"):
        list(ParquetStore(path, decode={"x": "image"}, columns=["x"])(0))
    broken = written(tmp_path / "b.parquet", {"image": [encoded[0], encoded[1][:40]]})
    with pytest.raises(StoreError, match=r"b\.parquet, column 'image', row 1 cannot be decoded"):
        list(ParquetStore(broken, decode={"image": "image"})(0))


def test_options_are_checked(tmp_path):
    path = written(tmp_path / "a.parquet", {"x": [1], "y": [2]})
    for options in ({"columns": ["z"]}, {"stream": "z"}, {"decode": {"z": "image"}}):
        with pytest.raises(StoreError, match=r"no column \['z'\]; it has \['x', 'y'\]"):
            ParquetStore(path, **options)
    for options in ({"decode": {"x": "sound"}}, {"cache_bytes": -1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            ParquetStore(path, **options)
    assert [list(item) for item in ParquetStore(path, columns=["y", "x"])(0)] == [["y", "x"]]


@pytest.mark.parametrize("content", [b"", b"PK\3\4....", b"PAR1....PAR1", b"ARROW1\0\0", b"\xff" * 7 + b"\x7f"])
def test_what_is_no_table_is_named(tmp_path, content):
    with pytest.raises(StoreError, match="has no tables"):
        ParquetStore(tmp_path)
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(StoreError, match=r"a\.parquet"):
        ParquetStore(tmp_path)


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_what_is_cut_off_is_an_error(tmp_path, kind):
    path = write_ipc(tmp_path / "a.arrow", TABLE, kind)
    stream = ParquetStore(path)(0)
    next(stream)
    size = os.stat(path).st_size
    for cut in (8, size // 2):
        os.truncate(path, size - cut)
        with pytest.raises(StoreError):
            list(stream)
        with pytest.raises(StoreError):
            ParquetStore(path)


@pytest.mark.parametrize(
    "state",
    [
        {"_data_files": [{"filename": "../a.arrow"}]},
        {"_data_files": [{"filename": "missing.arrow"}]},
        {"_data_files": []},
        {"_data_files": "a.arrow"},
        {"_data_files": [{"filename": "a.arrow"}], "_indices_data_files": [{}]},
    ],
)
def test_a_saved_dataset_is_what_its_state_says(tmp_path, state):
    (tmp_path / "state.json").write_text(json.dumps(state))
    with pytest.raises(StoreError, match=str(tmp_path)):
        ParquetStore(tmp_path)


def test_row_groups_are_read_once_for_all_streams_within_the_limit(tmp_path, monkeypatch):
    path = written(tmp_path / "a.parquet", {"k": np.arange(100) // 5, "x": np.zeros(100)}, row_group_size=25)
    read = []
    whole = stores.parquet.tables.TableFile.read

    def counted(self, columns, group=None):
        if group is not None:  # the key is read at once
            read.append(group)
        return whole(self, columns, group)

    monkeypatch.setattr(stores.parquet.tables.TableFile, "read", counted)
    store = ParquetStore(path, stream="k")
    for number in store.sources:
        list(store(number))
    assert read == [0, 1, 2, 3]
    store = ParquetStore(path, stream="k", cache_bytes=0)
    list(store(0))
    list(store(0))
    assert read[4:] == [0, 0]
    store = ParquetStore(path, stream="k", columns=["x"], cache_bytes=2 * 25 * 8)
    for number in (0, 5, 0, 10, 0):  # of groups 0, 1, 0, 2, 0: the one used last stays
        list(store(number))
    assert read[6:] == [0, 1, 2]


def test_tables_on_a_server_are_fetched(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").put(two_parquets(tmp_path / "a"), "/tables", recursive=True)
    store = ParquetStore("memory://tables/data-{2,10}.parquet", stream="episode", columns=["state"])
    assert store.lengths.tolist() == [23, 3, 31, 8]
    assert len(list(store(2))) == 31
    store.close()


DOCUMENTS = [[5, 6, 7], [], [1], list(range(40)), [9, 9]]


def documents(path, **columns):
    table = pa.table({"input_ids": pa.array(DOCUMENTS, pa.list_(pa.int32())), **columns})
    writes = feather.write_feather if path.suffix == ".arrow" else pq.write_table
    writes(table, path, **({"chunksize": 2} if path.suffix == ".arrow" else {"row_group_size": 2}))
    return path


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_row_of_tokens_is_a_stream(suffix, tmp_path):
    masks = pa.array([[n % 2 == 0 for n in document] for document in DOCUMENTS])
    for number in range(2):
        documents(tmp_path / f"{number}.{suffix}", mask=masks, text=["a"] * 5)
    sources, store = stores.open(tmp_path, elements=True, columns=["input_ids", "mask"])
    assert store.lengths.tolist() == [3, 0, 1, 40, 2] * 2
    loader = StreamDataLoader(StreamDataset(sources, store, 1, time_steps=8, windows="packed"))
    batches = list(loader)
    tokens, marks = (torch.cat([batch.data[name][batch.mask] for batch in batches]) for name in ("input_ids", "mask"))
    assert tokens.tolist() == [token for document in DOCUMENTS * 2 for token in document]
    assert torch.equal(marks, tokens % 2 == 0)
    starts = torch.cat([batch.is_first[batch.mask] for batch in batches]).nonzero()[:, 0]
    assert starts.tolist() == [0, 3, 4, 44, 46, 49, 50, 90]
    assert store.metadata(9) == {"file": str(tmp_path / f"1.{suffix}")}
    assert [row["input_ids"] for row in store((3, 2, 5))] == [2, 3, 4]


def test_rows_whose_lists_differ_are_refused(tmp_path):
    path = documents(tmp_path / "a.parquet", text=["a"] * 5, labels=pa.array([[1]] * 5))
    for columns, what in (None, "text"), (["input_ids", "labels"], "row 0"):
        with pytest.raises(StoreError, match=what):
            stores.open(path, elements=True, columns=columns)
    for options in {"elements": True, "stream": "text"}, {"targets": True}:
        with pytest.raises(ValueError, match="elements=True"):
            stores.open(path, **options)


def test_a_token_of_a_row_has_the_next_one_as_its_target(tmp_path):
    sources, store = stores.open(documents(tmp_path / "a.parquet"), elements=True, targets=True)
    loader = StreamDataLoader(StreamDataset(sources, store, 1, time_steps=8, windows="packed"))
    data = [(batch.data["input"][batch.mask], batch.data["target"][batch.mask]) for batch in loader]
    found = [pair for tokens, targets in data for pair in zip(tokens.tolist(), targets.tolist(), strict=True)]
    assert found == [pair for row in DOCUMENTS if row for pair in zip(row, [*row[1:], -100], strict=True)]
    assert [(int(item["input"]), int(item["target"])) for item in store((3, 2, 4))] == [(2, 3), (3, 4)]
    given = ({}, {"targets": True}, {"targets": True, "ignore_index": -1})
    others = [ParquetStore(tmp_path / "a.parquet", elements=True, **options).index.fingerprint for options in given]
    assert len({*others}) == 3
    assert others[1] == sources.fingerprint
    more = documents(tmp_path / "b.parquet", more=pa.array(DOCUMENTS))
    with pytest.raises(StoreError, match="one column"):
        next(stores.open(more, elements=True, targets=True).open_stream(3))


def test_a_column_that_only_later_files_have_is_not_left_out_in_silence(tmp_path):
    for name, columns in (("0", {"a": [1]}), ("1", {"a": [2], "b": [3]})):
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    with pytest.raises(StoreError, match=r"1.parquet has columns \['b'\], which .*0.parquet lacks; .* by columns="):
        ParquetStore(tmp_path)
    store = ParquetStore(tmp_path, columns=["a"])
    assert [item["a"] for source in store.sources for item in store(source)] == [1, 2]
