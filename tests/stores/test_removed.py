"""A field that a store loses between saving a state and loading it is never left out in silence."""

import json
import os
import pathlib
import shutil
import tarfile
import zipfile

import pytest
from clips import write_clip
from small_stores import SMALL
from tars import write_tar

from stream_dataloader import StreamDataLoader, StreamDataset, stores
from stream_dataloader.errors import StateError, StoreError
from stream_dataloader.streams.video.frame_index import frame_index

pytestmark = pytest.mark.usefixtures("no_zarr_threads")


def without_array(path):
    shutil.rmtree(path / "data" / "dones")


def without_members(path):
    with zipfile.ZipFile(path) as archive:
        kept = {name: archive.read(name) for name in archive.namelist() if not name.startswith("data/dones/")}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in kept.items():
            archive.writestr(name, content)


def without_key(path):
    described = path / "meta.json"
    content = json.loads(described.read_text())
    del content["action"]
    described.write_text(json.dumps(content))


def without_dataset(path):
    import h5py

    with h5py.File(path, "r+") as file:
        for group in file["data"].values():
            del group["dones"]


def without_column(path):
    import pyarrow.feather
    import pyarrow.parquet

    if path.suffix == ".arrow":
        table = pyarrow.feather.read_table(path, memory_map=False).drop_columns(["reward"])
        pyarrow.feather.write_feather(table, path, compression="uncompressed", chunksize=7)
    else:
        pyarrow.parquet.write_table(pyarrow.parquet.read_table(path).drop_columns(["reward"]), path, row_group_size=7)


def renamed_members(path):
    for tar in path.glob("*.tar"):
        with tarfile.open(tar) as found, tarfile.open(f"{tar}.new", "w") as written:
            for member in found:
                content = found.extractfile(member)
                member.name = member.name.replace(".cls", ".cls2")
                written.addfile(member, content)
        os.replace(f"{tar}.new", tar)


def without_files(path):
    for folder in path.iterdir():
        (folder / "dones.npy").unlink()


def without_feature(path):
    described = path / "meta" / "info.json"
    content = json.loads(described.read_text())
    del content["features"]["observation.state"]
    described.write_text(json.dumps(content))


def without_packed_leaf(path):
    described = path / "index.json"
    content = json.loads(described.read_text())
    content["stream_dataloader"]["items"]["columns"].pop()
    described.write_text(json.dumps(content))


REMOVED = {
    "two.zarr": without_array,
    "three.zarr": without_array,
    "zipped.zarr.zip": without_members,
    "tensordict": without_key,
    "demos.hdf5": without_dataset,
    "plain.parquet": without_column,
    "table.arrow": without_column,
    "webdataset": renamed_members,
    "npy-folders": without_files,
    "lerobot": without_feature,
    "mds": without_packed_leaf,
}


def loader_of(path, name):
    sources, store = stores.open(path, **SMALL[name].options)
    return store, StreamDataLoader(StreamDataset(sources, store, batch_size=2, time_steps=2))


@pytest.mark.parametrize("name", REMOVED)
def test_a_state_is_refused_if_a_field_is_gone(tmp_path, name):
    """Times and names of files say nothing here: a copy may keep the times, and an array's folder has its own."""
    path = tmp_path / name
    SMALL[name].make(str(path), 0)
    store, loader = loader_of(path, name)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    batches.close()
    store.close()
    files = [path, *path.rglob("*")] if path.is_dir() else [path]
    times = {file: file.stat().st_mtime_ns for file in files}
    REMOVED[name](pathlib.Path(path))
    for file, time in times.items():
        if file.exists():
            os.utime(file, ns=(time, time))

    def resumed():
        _, loader = loader_of(path, name)
        loader.load_state_dict(state)

    with pytest.raises((StateError, StoreError), match=r"other sources|is damaged"):
        resumed()


@pytest.mark.parametrize("replaced", [True, False])
def test_a_tar_of_the_same_size_and_time_is_scanned_again(tmp_path, replaced):
    """Its members are kept for the next opening, and archives, images of containers and copies keep times."""
    path = tmp_path / "a.tar"
    for field, number in (("cls", 1), ("inx", 2)):
        if number == 2 and replaced:
            path.unlink()
        write_tar(path, [(f"s/{step}.{field}", str(number + step).encode()) for step in range(3)])
        os.utime(path, (1, 1))
        _, store = stores.open(path)
        assert [dict(item) for item in store(0)] == [{field: number + step} for step in range(3)]
        store.close()


def test_a_video_of_the_same_size_and_time_has_its_own_frames(tmp_path):
    path = tmp_path / "a.mp4"
    write_clip(path, 5)
    size = path.stat().st_size
    os.utime(path, (1, 1))
    assert len(frame_index(str(path)).times) == 5
    write_clip(tmp_path / "b.mp4", 3)
    content = (tmp_path / "b.mp4").read_bytes()
    assert len(content) < size
    (tmp_path / "b.mp4").write_bytes(
        content + (size - len(content)).to_bytes(4, "big") + b"free" + bytes(size - len(content) - 8)
    )
    os.utime(tmp_path / "b.mp4", (1, 1))
    os.replace(tmp_path / "b.mp4", path)
    assert path.stat().st_size == size
    assert len(frame_index(str(path)).times) == 3
