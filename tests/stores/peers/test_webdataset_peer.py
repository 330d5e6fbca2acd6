"""Tars as the package webdataset writes and groups them; runs where it is installed."""

import random

import numpy as np
import pytest
from tars import samples, write_tar

webdataset = pytest.importorskip("webdataset")

from stream_dataloader.stores import WebDatasetStore  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # webdataset leaves files open until they are collected


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("STREAM_DATALOADER_CACHE", str(tmp_path / "cache"))


def test_samples_that_webdataset_wrote_come_back(tmp_path):
    rng = np.random.default_rng(0)
    written = {}
    with webdataset.ShardWriter(str(tmp_path / "s-%04d.tar"), maxcount=7, verbose=0) as writer:
        for video in range(3):
            for step in range(9):
                sample = {
                    "__key__": f"video_{video}/{step:04d}",
                    "png": rng.integers(0, 256, (4, 5, 3), np.uint8),
                    "pose.npy": rng.standard_normal(3).astype(np.float32),
                    "cls": step,
                    "json": {"a": step},
                    "txt": f"é{step}",
                    "bin": bytes([step]),
                }
                writer.write(sample)
                written.setdefault(f"video_{video}", []).append(sample)
    store = WebDatasetStore(tmp_path, columns=["__key__", "png", "pose.npy", "cls", "json", "txt", "bin"], layout="HWC")
    assert [store.key(number) for number in store.sources] == list(written)
    for number, listed in enumerate(written.values()):
        for found, expected in zip(store(number), listed, strict=True):
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                np.testing.assert_array_equal(found[name], value)


@pytest.mark.parametrize("seed", range(20))
def test_groups_are_those_of_webdataset(tmp_path, seed):
    """Names with dots and slashes in any place, and capitals, sorted by what webdataset takes for the key.

    Hidden ones are left out: no store here takes them for data, and webdataset does.
    """
    rng = random.Random(seed)
    names = {"".join(rng.choices("ab./_", k=rng.randrange(1, 6))) + rng.choice((".txt", ".X.txt", ".BIN", ".a.b", "."))}
    while len(names) < 40:
        names.add(
            "".join(rng.choices("ab./_", k=rng.randrange(1, 6))) + rng.choice((".txt", ".X.txt", ".BIN", ".", ""))
        )
    members = {}
    for name in sorted(names):
        parts = name.split("/")
        if not (name.startswith("/") or name.endswith("/") or any(part.startswith(".") for part in parts)):
            key, extension = webdataset.tariterators.base_plus_ext(name)
            members.setdefault((str(key), (extension or name).lower()), name)
    found = [(members[place], members[place].encode()) for place in sorted(members)]
    path = write_tar(tmp_path / "a.tar", [*found, ("__notes__/0.txt", b"x")])
    pipeline = webdataset.DataPipeline(webdataset.SimpleShardList([path]), webdataset.tarfile_to_samples())
    theirs = [
        {name: sample[name] for name in sample if name not in ("__url__", "__local_path__")} for sample in pipeline
    ]
    store = WebDatasetStore(path, stream="shard", decode=False)
    keys = store.index.tars[0].all_keys()
    assert [{"__key__": key, **item} for key, item in zip(keys, store(0), strict=True)] == theirs


def test_webdatasets_own_loader_reads_the_same(tmp_path):
    path = write_tar(tmp_path / "a.tar", samples("a/", 12)[0])
    pipeline = webdataset.WebDataset(path, shardshuffle=False, empty_check=False).decode("rgb8")
    theirs = list(pipeline.to_tuple("png", "pose.npy", "cls"))
    store = WebDatasetStore(path, columns=["png", "pose.npy", "cls"], layout="HWC")
    for found, expected in zip(store(0), theirs, strict=True):
        for one, other in zip(found.values(), expected, strict=True):
            np.testing.assert_array_equal(one, other)
