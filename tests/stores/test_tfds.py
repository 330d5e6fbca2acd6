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
