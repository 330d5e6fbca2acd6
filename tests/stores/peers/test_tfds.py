"""TFDS and RLDS datasets, against tensorflow_datasets' own `as_data_source`; made here, without TensorFlow."""

import io
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys

import cv2
import numpy as np
import pytest
from helpers import FULL, ROOT
from store_tests import StoreTests

from stream_dataloader import stores
from stream_dataloader.errors import StoreError
from stream_dataloader.testing._items import assert_same

tfds = pytest.importorskip("tensorflow_datasets")
pytest.importorskip("array_record")

from stream_dataloader.stores.tfds import TfdsStore  # noqa: E402

LENGTHS = {"train": (5, 0, 23, 3, 9, 12), "test": (2, 4)}
NUMBERS = ["action", "is_first", "observation", "points", "label", "packed", "bytes"]


def image_file(rng, suffix):
    return io.BytesIO(cv2.imencode(suffix, rng.integers(0, 256, (6, 8, 3), np.uint8))[1].tobytes())


def episode(rng, number, steps):
    return {
        "steps": [
            {
                "observation": {
                    "image": image_file(rng, ".png"),
                    "wrist": image_file(rng, ".jpg"),
                    "state": rng.random(7).astype(np.float32),
                },
                "action": rng.random(4).astype(np.float32).astype(np.float64),
                "is_first": step == 0,
                "points": rng.integers(-9, 9, (2, 3), np.int32),
                "label": step % 2,
                "packed": rng.random((3, 2)).astype(np.float32),
                "bytes": rng.integers(0, 256, 5, np.uint8),
                "instruction": f"öffne {number}",
                "raw": b"\xff\x00",
            }
            for step in range(steps)
        ],
        "reward": rng.random(steps).astype(np.float32),
        "video": [image_file(rng, ".png") for _ in range(steps)],
        "episode_metadata": {"file_path": f"/a/{number}", "number": number, "matrix": np.eye(2, dtype=np.float32)},
    }


def features():
    kinds = tfds.features
    return kinds.FeaturesDict(
        {
            "steps": kinds.Dataset(
                {
                    "observation": {
                        "image": kinds.Image(shape=(6, 8, 3), encoding_format="png"),
                        "wrist": kinds.Image(shape=(None, None, 3), encoding_format="jpeg"),
                        "state": kinds.Tensor(shape=(7,), dtype=np.float32),
                    },
                    "action": kinds.Tensor(shape=(4,), dtype=np.float64),
                    "is_first": np.bool_,
                    "points": kinds.Tensor(shape=(2, 3), dtype=np.int32),
                    "label": kinds.ClassLabel(num_classes=2),
                    "packed": kinds.Tensor(shape=(3, 2), dtype=np.float32, encoding="zlib"),
                    "bytes": kinds.Tensor(shape=(5,), dtype=np.uint8),
                    "instruction": kinds.Text(),
                    "raw": np.object_,
                }
            ),
            "reward": kinds.Sequence(np.float32),
            "video": kinds.Sequence(kinds.Image(shape=(6, 8, 3), encoding_format="png")),
            "episode_metadata": {
                "file_path": kinds.Text(),
                "number": np.int64,
                "matrix": kinds.Tensor(shape=(2, 2), dtype=np.float32),
            },
        }
    )


class Robot(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    VERSION = tfds.core.Version("1.0.0")
    name = "robot"

    def _info(self):
        return tfds.core.DatasetInfo(builder=self, features=features(), disable_shuffling=True)

    def _split_generators(self, dl_manager):
        rng = np.random.default_rng(0)
        return {
            split: [(number, episode(rng, number, steps)) for number, steps in enumerate(lengths)]
            for split, lengths in LENGTHS.items()
        }

    def _generate_examples(self):
        raise NotImplementedError


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A dataset of several files; no test writes to it."""
    builder = Robot(data_dir=tmp_path_factory.mktemp("tfds"), file_format="array_record")
    builder.download_and_prepare(download_config=tfds.download.DownloadConfig(num_shards=2))
    info = json.loads((builder.data_path / "dataset_info.json").read_text())
    info["moduleName"] = "no.such.module"  # only the builder's directory is needed
    (builder.data_path / "dataset_info.json").write_text(json.dumps(info))
    return str(builder.data_path)


@pytest.fixture
def copied(prepared, tmp_path):
    return shutil.copytree(prepared, tmp_path / "1.0.0")


@pytest.fixture
def opened():
    found = []

    def open_store(path, **options):
        found.append(TfdsStore(path, **options))
        return found[-1]

    yield open_store
    for store in found:
        store.close()


def theirs(path, split="train", steps="steps"):
    """What tensorflow_datasets reads; its text is bytes."""
    source = tfds.builder_from_directory(path).as_data_source(split)
    return [list(source[number][steps]) for number in range(len(source))]


class TestTfdsStore(StoreTests):
    damages = 500 if FULL else 8

    @pytest.fixture
    def made(self, prepared):
        return TfdsStore(prepared, columns=NUMBERS)

    @pytest.fixture
    def expected(self, prepared):
        return [[{name: item[name] for name in NUMBERS} for item in items] for items in theirs(prepared)]


@pytest.mark.parametrize("split", ["train", "test", "train[20%:60%]", "train[:2]+test", "train[-2:]", "all"])
def test_a_split_holds_what_as_data_source_reads(prepared, opened, split):
    store = opened(prepared, split=split)
    expected = theirs(prepared, split)
    assert len(store) == len(expected)
    for number, items in enumerate(expected):
        others = [item | {"instruction": item["instruction"].decode()} for item in items]
        assert_same(list(store(number)), others, number, "read from the store")


def test_tensorflow_is_not_imported(prepared):
    code = (
        "import sys; from stream_dataloader import stores; store = stores.open(sys.argv[1])[1]; next(iter(store(0))); "
        "assert not {'tensorflow', 'array_record.python.array_record_module'} & set(sys.modules); store.close()"
    )
    subprocess.run([sys.executable, "-c", code, prepared], check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})


def test_an_episode_has_its_id_and_metadata(prepared, opened):
    store = opened(prepared)
    assert store.key(3) == "robot-train.array_record-00001-of-00002__0"
    assert store.number(store.key(3)) == 3
    found = store.metadata(3)
    assert found["episode_metadata"] == {"file_path": "/a/3", "number": 3, "matrix": [[1.0, 0.0], [0.0, 1.0]]}
    assert json.loads(json.dumps(found["reward"])) == found["reward"]
    assert len(found["reward"]) == 3
    info = store.info()
    assert (info.version, info.metadata) == ("1.0.0", {"name": "robot", "config": None, "split": "train"})
    assert info.leaves["['observation']['image']"] == "uint8 (6, 8, 3)"


def test_sequences_of_any_name_are_streams(prepared, opened):
    source = tfds.builder_from_directory(prepared).as_data_source("train")
    rewards, frames = opened(prepared, stream="reward"), opened(prepared, stream="video")
    for number in range(len(source)):
        assert_same(list(rewards(number)), list(source[number]["reward"]), number, "a feature of numbers")
        assert_same(list(frames(number)), list(source[number]["video"]), number, "a feature of images")
    room = np.zeros((4, 6, 8, 3), np.uint8)
    assert frames(0, start=2).read_into(room) == 3
    np.testing.assert_array_equal(room[:3], source[0]["video"][2:])


def test_only_wanted_leaves_are_unpacked(prepared, opened):
    store = opened(prepared, columns=["observation/state", "label"])
    assert [sorted(item) for item in store(3)] == [["label", "observation"]] * 3
    assert [sorted(item["observation"]) for item in store(3)] == [["state"]] * 3
    with pytest.raises(StoreError, match=r"no leaf 'depth'; it has .*'observation/image'"):
        opened(prepared, columns=["label", "depth"])


def test_a_step_is_decoded_when_it_is_read(prepared, opened, monkeypatch):
    store = opened(prepared)
    decoded = []
    imdecode = cv2.imdecode
    monkeypatch.setattr(cv2, "imdecode", lambda *args: decoded.append(1) or imdecode(*args))
    stream = store(2)
    assert not decoded
    next(stream)
    assert len(decoded) == 2  # of 46 images in the episode
    stream.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "train[:0]"}, "no example in its split 'train\\[:0\\]'"),
        ({"split": "validation"}, r"no split 'validation' .*it has \['test', 'train'\]"),
        ({"split": "train[10:20]"}, "no split 'train\\[10:20\\]'.*incompatible with 6 examples"),
        ({"split": "train["}, "no split 'train\\['"),
        ({"stream": "frames"}, r"no feature 'frames' of several steps; give stream= one of .*'reward'"),
        ({"stream": "episode_metadata"}, "no feature 'episode_metadata' of several steps"),
    ],
)
def test_a_wrong_option_is_told_with_what_there_is(prepared, options, message):
    with pytest.raises(StoreError, match=message):
        TfdsStore(prepared, **options)


def edited(path, change, name="dataset_info.json"):
    file = path / name
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda info: info["splits"][0].update(shardLengths=["3", str(10**15)]), "bytes, and dataset_info.json says"),
        (lambda info: info["splits"][0].update(shardLengths=["-3", "3"]), "no example"),
        (
            lambda info: info["splits"][0].update(filepathTemplate="../../{SPLIT}-{SHARD_X_OF_Y}"),
            "which lies outside",
        ),
        (lambda info: info["splits"][0].update(filepathTemplate="other-{SHARD_X_OF_Y}"), "is missing"),
        (lambda info: info.update(splits="none"), "cannot be read"),
        (lambda info: info.update(version="?"), "cannot be read"),
    ],
)
def test_a_wrong_dataset_info_is_an_error_at_once(copied, change, message):
    with pytest.raises(StoreError, match=message):
        stores.open(edited(copied, change))


def test_a_number_of_records_is_compared_with_the_file(copied, opened):
    store = opened(edited(copied, lambda info: info["splits"][0].update(shardLengths=["3", "5"])))
    with pytest.raises(StoreError, match=r"stream 3 \(robot-train.*__0\): .*it has 3 records, and .* says 5"):
        store(3)


def test_features_that_do_not_fit_the_records_are_an_error(copied, opened):
    def other(content):
        steps = content["featuresDict"]["features"]["steps"]["sequence"]["feature"]["featuresDict"]["features"]
        steps["action"]["tensor"]["shape"] = {"dimensions": ["6"]}

    with pytest.raises(StoreError, match=r"stream 0 .* by features.json, cannot be read"):
        opened(edited(copied, other, "features.json"))(0)


def test_a_damaged_record_is_an_error_that_names_it(copied, opened):
    file = copied / "robot-train.array_record-00000-of-00002"
    content = bytearray(file.read_bytes())
    content[200] ^= 1  # in the first record, behind its header
    file.write_bytes(content)
    store = opened(copied)
    with pytest.raises(StoreError, match=r"stream 0 \(robot-train.*__0\): .*record 0, .*RuntimeError: .*hash mismatch"):
        store(0)
    assert len(list(store(2))) == 23
    assert len(store.verify()) == 1


def test_a_dataset_that_was_replaced_is_an_error(copied, opened):
    store = opened(copied)
    sent = pickle.dumps(store)
    with open(copied / "robot-train.array_record-00001-of-00002", "ab") as file:
        file.write(b"more")
    with pytest.raises(StoreError):
        store(4)
    with pytest.raises(StoreError):
        pickle.loads(sent)(0)


def test_a_reader_that_dies_is_an_error_and_the_next_read_starts_another(prepared, opened):
    store = opened(prepared)
    assert len(list(store(0))) == 5
    child = store._records.lease(store.path).handle._child
    child.send_signal(signal.SIGKILL)
    child.wait()
    with pytest.raises(StoreError, match=r"record 0, .*array_record ended with status -9"):
        store(0)
    assert len(list(store(0))) == 5


def test_steps_of_other_lengths_and_sequences_in_steps(tmp_path, opened):
    """As TensorFlow writes them: sequences in steps are ragged."""
    from array_record.python import array_record_module
    from tensorflow_datasets.proto import tf_example_pb2, tf_feature_pb2

    def example(numbers, row_lengths, other):
        lists = {"steps/a/ragged_flat_values": numbers, "steps/a/ragged_row_lengths_0": row_lengths, "steps/b": other}
        return tf_example_pb2.Example(
            features=tf_feature_pb2.Features(
                feature={
                    name: tf_feature_pb2.Feature(int64_list=tf_feature_pb2.Int64List(value=values))
                    for name, values in lists.items()
                }
            )
        ).SerializeToString()

    kinds = tfds.features
    kinds.FeaturesDict({"steps": kinds.Dataset({"a": kinds.Sequence(np.int64), "b": np.int64})}).save_config(tmp_path)
    writer = array_record_module.ArrayRecordWriter(
        str(tmp_path / "x-train.array_record-00000-of-00001"), "group_size:1"
    )
    writer.write(example([1, 2, 3, 4], [2, 2], [7, 8]))
    writer.write(example([1, 2, 3, 4], [2, 2], [7, 8, 9]))
    writer.close()
    split = {
        "name": "train",
        "shardLengths": ["2"],
        "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
    }
    info = {"name": "x", "version": "1.0.0", "fileFormat": "array_record", "splits": [split]}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    store = opened(tmp_path)
    assert [(item["a"].tolist(), int(item["b"])) for item in store(0)] == [([1, 2], 7), ([3, 4], 8)]
    with pytest.raises(StoreError, match=r"2 steps of \['a'\]; 3 steps of \['b'\]"):
        store(1)
