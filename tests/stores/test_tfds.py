"""TFDS datasets, as far as the package is not needed; `peers/test_tfds.py` is the rest."""

import json
import sys

import pytest

from stream_dataloader import stores
from stream_dataloader.errors import StoreError
from stream_dataloader.stores.tfds import TfdsStore


def written(folder, **info):
    split = {
        "name": "train",
        "shardLengths": ["2"],
        "filepathTemplate": "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}",
    }
    folder.mkdir(parents=True)
    (folder / "dataset_info.json").write_text(
        json.dumps({"name": "robot", "version": "1.0.0", "splits": [split]} | info)
    )
    (folder / "features.json").write_text("{}")
    return folder


@pytest.mark.parametrize("info", [{}, {"fileFormat": "tfrecord"}, {"fileFormat": "riegeli"}, {"fileFormat": "parquet"}])
def test_files_without_random_access_are_refused_with_the_remedy(tmp_path, info):
    with pytest.raises(StoreError, match=r"prepare it with file_format='array_record'.*stores.pack"):
        stores.open(written(tmp_path / "robot" / "1.0.0", **info))


@pytest.mark.parametrize("info", [{"fileFormat": "array_record"}, {"alternativeFileFormats": ["array_record"]}])
def test_a_dataset_is_recognised_and_the_missing_package_is_named(tmp_path, monkeypatch, info):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'stream-dataloader\[tfds\]'"):
        stores.open(written(tmp_path / "1.0.0", **info))


def test_what_is_no_dataset_is_told(tmp_path):
    with pytest.raises(StoreError, match=r"dataset_info.json is missing"):
        TfdsStore(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"on this machine at gs:"):
        TfdsStore("gs://bucket/robot/1.0.0")
    folder = written(tmp_path / "1.0.0", fileFormat="array_record")
    (folder / "features.json").write_text("{")
    with pytest.raises(StoreError, match=r"features.json cannot be read"):
        TfdsStore(folder)


OURS = {"pythonClassName": "tensorflow_datasets.core.features.features_dict.FeaturesDict"}


@pytest.mark.parametrize(
    "features",
    [
        {"pythonClassName": "evil_feature.Feature"},
        {"python_class_name": "evil_feature.Feature"},
        {"type": "evil_feature.Feature", "content": {}},
        OURS | {"featuresDict": {"features": {"steps": {"sequence": {"pythonClassName": "evil_feature.Feature"}}}}},
        OURS | {"jsonFeature": {"json": json.dumps({"inner": [{"type": "evil_feature.Feature"}]})}},
        {"pythonClassName": "evil_feature.tensorflow_datasets.Feature"},
    ],
    ids=["json name", "proto name", "legacy", "nested", "json in json", "prefix"],
)
def test_no_module_that_features_name_is_imported(tmp_path, monkeypatch, features):
    (tmp_path / "evil_feature.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    folder = written(tmp_path / "1.0.0", fileFormat="array_record")
    (folder / "features.json").write_text(json.dumps(features))
    with pytest.raises(StoreError, match=r"names the class 'evil_feature.*import its module before"):
        TfdsStore(folder)
    assert "evil_feature" not in sys.modules


def test_a_feature_of_ones_own_is_taken_once_its_module_is_imported(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "own_feature", sys)
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    folder = written(tmp_path / "1.0.0", fileFormat="array_record")
    (folder / "features.json").write_text(json.dumps(OURS | {"type": {"pythonClassName": "own_feature.Feature"}}))
    with pytest.raises(ImportError):  # the package is asked next
        TfdsStore(folder)
