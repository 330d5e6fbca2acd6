"""What goes wrong when stores are opened, read and packed is told by one kind of error, and in words that are true."""

import io
import json
import os
import pathlib
import shutil

import fsspec
import numpy as np
import pytest
from episodes import episodes, write_robomimic
from tars import png, samples, write_tar

from stream_dataloader import stores
from stream_dataloader.errors import ItemError, StoreError
from stream_dataloader.stores._base.handles import Handles
from stream_dataloader.testing._items import items_of

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def memory():
    yield (system := fsspec.filesystem("memory"))
    system.store.clear()


def test_a_file_url_is_a_path(tmp_path):
    """Rewritten under an index of the same bytes, a new store reads what is there now."""
    for first in (0, 100):
        with stores.MdsWriter(str(tmp_path / f"{first}"), columns={"y": "int"}) as writer:
            for number in range(first, first + 3):
                writer.write({"y": number})
        shutil.copytree(tmp_path / f"{first}", tmp_path / "a", dirs_exist_ok=True)
        found = stores.open(f"file://{tmp_path}/a").open_stream
        assert [int(item["y"]) for item in found(0)] == list(range(first, first + 3))


@pytest.mark.parametrize("stream", ["shard", "sample"])
def test_verify_lists_a_shard_once(tmp_path, stream):
    columns = {"x": "ndarray:float32:2,3", "y": "int"}
    with stores.MdsWriter(str(tmp_path / "a"), columns=columns, size_limit=640, hashes=["sha1"]) as writer:
        for number in range(40):
            writer.write({"x": np.full((2, 3), number, np.float32), "y": number})
    for name in ("shard.00000.mds", "shard.00001.mds"):
        content = bytearray((tmp_path / "a" / name).read_bytes())
        content[-1] ^= 1
        (tmp_path / "a" / name).write_bytes(content)
    assert len(stores.verify(tmp_path / "a", stream=stream)) == 2


def test_a_file_that_shrank_says_so(tmp_path):
    path = write_robomimic(tmp_path / "without_suffix", episodes((60, 60)))
    store = stores.open(path).open_stream
    next(store(0))  # the file stays open
    os.truncate(path, 4096)
    for read in (store, store.metadata):
        with pytest.raises(StoreError, match="cut off"):
            read(1)
    store.close()


def test_images_of_the_package_datasets_name_their_option(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    images = [{"bytes": png(np.zeros((3, 4, 5), np.uint8)), "path": None}] * 3
    pq.write_table(pa.table({"image": images}), tmp_path / "a.parquet")
    with pytest.raises(StoreError, match=r"decode=\{'image': 'image'\}"):
        next(stores.open(tmp_path / "a.parquet").open_stream(0))


def test_a_dataset_dict_lists_its_splits(tmp_path):
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    (tmp_path / "train").mkdir()
    with pytest.raises(StoreError, match=r"'train', 'test'"):
        stores.open(tmp_path)


def test_folders_of_arrays_may_have_an_equals_sign_in_their_names(tmp_path):
    for name in ("a=1", "a=2"):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "x.npy", np.arange(4))
    assert stores.inspect(tmp_path).format == "npy"


def test_a_child_opens_files_of_its_own():
    handles = Handles(lambda _: io.BytesIO())
    lease = handles.lease("a")
    if not (child := os.fork()):
        os._exit(handles.lease("a").handle is lease.handle)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    handles.close()
    assert not lease.handle.closed
    lease.close()
    assert lease.handle.closed


def test_a_section_may_be_a_list_as_json_has_it(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(5))
    store = stores.open(tmp_path).open_stream
    assert [int(item) for item in items_of(store([0, 1, 3]))] == [1, 2]
    assert store.length([0, 1, 3]) == 2


def test_a_pattern_of_urls_is_expanded(memory, tmp_path):
    for number in (1, 2, 10):
        tar = write_tar(tmp_path / f"{number}.tar", samples(f"v{number}/", 2)[0])
        memory.pipe(f"/tars/train-{number}.tar", pathlib.Path(tar).read_bytes())
    sources, store = stores.open("memory://tars/train-*.tar")
    assert [store.key(number) for number in sources] == ["v1", "v2", "v10"]
    with pytest.raises(FileNotFoundError, match="none-"):
        stores.open("memory://tars/none-*.tar")


@pytest.mark.parametrize("format", ["memmap", "lmdb", "mds"])
def test_an_unknown_option_of_packing_is_named_with_those_there_are(tmp_path, format):
    with pytest.raises(TypeError, match=r"no option 'blah'; it has .*metadata"):
        stores.pack(([1], range), tmp_path / "a", format=format, blah=3)


@pytest.mark.parametrize("format", ["memmap", "lmdb", "mds"])
def test_an_item_in_which_there_is_nothing_is_refused(tmp_path, format):
    with pytest.raises(ItemError, match="nothing to keep"):
        stores.pack(([1], lambda _: iter([{}])), tmp_path / "a", format=format)


@pytest.mark.parametrize("format", ["memmap", "lmdb", "mds"])
def test_an_empty_dict_among_numbers_is_packed(tmp_path, format):
    stores.pack(([3], lambda steps: ({"a": step, "b": {}} for step in range(steps))), tmp_path / "a", format=format)
    _, store = stores.open(tmp_path / "a")
    assert list(store(0)) == [{"a": step, "b": {}} for step in range(3)]
