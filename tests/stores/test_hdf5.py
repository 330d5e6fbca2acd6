"""HDF5 files of episodes."""

import os
import pickle
import sys
import types

import cv2
import h5py
import numpy as np
import pytest
from episodes import check_read_beside_workers, episodes, write_group, write_robomimic
from helpers import FULL
from store_tests import StoreTests

from stream_dataloader import StreamDataLoader, StreamDataset, stores
from stream_dataloader.errors import StoreError
from stream_dataloader.stores import Hdf5Store
from stream_dataloader.streams import ArrayStream
from stream_dataloader.streams.array.hdf5_files import Sources
from stream_dataloader.testing._items import assert_same, items_of

STREAMS = episodes((23, 0, 7, 31))


class Hdf5Contract(StoreTests):
    damages = 500 if FULL else 12

    streams = STREAMS


class TestRobomimic(Hdf5Contract):
    def make(self, tmp_path):
        return Hdf5Store(write_robomimic(tmp_path / "demos.hdf5", STREAMS, {"train": (0, 2)}))


class TestFolderOfPackedEpisodes(Hdf5Contract):
    def make(self, tmp_path):
        return Hdf5Store(aloha(tmp_path / "a", STREAMS, compression="gzip"))


def aloha(folder, streams, **options):
    folder.mkdir()
    for number, items in enumerate(streams):
        with h5py.File(folder / f"episode_{number}.hdf5", "w") as file:
            file.attrs["sim"] = True
            write_group(file, items, streams[0][0], **(options if items else {}))
    return str(folder)


@pytest.fixture
def robomimic(tmp_path):
    return write_robomimic(tmp_path / "demos.hdf5", STREAMS, {"train": (3, 0), "none": ()})


def test_demonstrations_are_in_natural_order_and_have_their_attributes(tmp_path):
    streams = episodes((2,) * 12)
    store = Hdf5Store(write_robomimic(tmp_path / "a.hdf5", streams))
    assert [store.key(number) for number in range(12)] == [f"demo_{number}" for number in range(12)]
    assert store.metadata(10) == {"num_samples": 2}
    assert store.info().metadata == {"total": 24, "env_args": '{"env_name": "Lift"}'}
    assert store.info().leaves["['obs']['image']"] == "uint8 (4, 5, 3)"
    assert_same(items_of(store(10)), streams[10], 10, "read")


def test_a_file_that_changes_while_a_stream_is_read_is_an_error(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["data/demo/x"] = np.zeros((40, 10000))  # larger than what is read at once
    stream = Hdf5Store(path)(0)
    assert (next(stream)["x"] == 0).all()
    os.utime(path, (1, 1))
    for read in (lambda: next(stream), lambda: stream.read_into({"x": np.zeros((2, 10000))})):
        with pytest.raises(StoreError, match=r"a\.h5 is another file now"):
            read()


def test_a_filter_key_chooses_demonstrations(robomimic):
    store = Hdf5Store(robomimic, filter_key="train")
    assert [store.key(number) for number in store.sources] == ["demo_0", "demo_3"]
    assert_same(items_of(store(1)), STREAMS[3], 1, "read")
    with pytest.raises(StoreError, match=r"no filter key 'valid'; it has \['none', 'train'\]"):
        Hdf5Store(robomimic, filter_key="valid")
    with pytest.raises(StoreError, match="holds no streams"):
        Hdf5Store(robomimic, filter_key="none")


@pytest.mark.parametrize("names", [np.array([b"demo_0", b"demo_9"]), np.arange(3)])
def test_a_wrong_filter_key_is_an_error(robomimic, names):
    with h5py.File(robomimic, "a") as file:
        file["mask/m"] = names
    with pytest.raises(StoreError, match="mask/m"):
        Hdf5Store(robomimic, filter_key="m")


def test_some_leaves_can_be_read_alone(robomimic):
    assert [*Hdf5Store(robomimic, columns=["obs/image", "actions"])(2)][3].keys() == {"obs", "actions"}
    assert next(Hdf5Store(robomimic, columns="obs")(2)).keys() == {"obs"}  # a group: all in it
    image = next(Hdf5Store(robomimic, columns="obs/image")(2))  # a dataset: an item by itself
    assert np.array_equal(image, STREAMS[2][0]["obs"]["image"])
    with pytest.raises(StoreError, match=r"demos.hdf5, /data/demo_0 has no leaf 'obs/depth'; it has \['actions', "):
        Hdf5Store(robomimic, columns=["actions", "obs/depth"])


def test_files_are_streams_if_their_groups_hold_arrays(tmp_path):
    store = Hdf5Store(aloha(tmp_path / "a", STREAMS))
    assert store.key(2) == "episode_2.hdf5"
    assert store.metadata(2) == {"sim": True}
    assert_same(items_of(store(3)), STREAMS[3], 3, "read")
    single = Hdf5Store(tmp_path / "a" / "episode_3.hdf5")
    assert (len(single), single.key(0)) == (1, "episode_3.hdf5")


def test_a_folder_of_files_of_demonstrations_is_one_store(tmp_path):
    for number in (10, 9):
        (tmp_path / "a" / str(number)).mkdir(parents=True)
        write_robomimic(tmp_path / "a" / str(number) / "task.h5", STREAMS[2:])
    (tmp_path / "a" / "notes.txt").write_text("x")
    store = Hdf5Store(tmp_path / "a")
    assert [store.key(number) for number in store.sources] == [
        f"{number}/task.h5:demo_{demo}" for number in (9, 10) for demo in (0, 1)
    ]
    assert store.number("10/task.h5:demo_1") == 3


def test_a_group_can_be_named(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for number, items in enumerate(STREAMS[2:]):
            write_group(file.create_group(f"runs/traj_{number}"), items, items[0])
        file["version"] = 3
    store = Hdf5Store(tmp_path / "a.h5", group="runs")
    assert [store.key(number) for number in store.sources] == ["traj_0", "traj_1"]
    assert Hdf5Store(tmp_path / "a.h5", group="/runs/traj_1").key(0) == "a.h5"
    with pytest.raises(StoreError, match=r"has no group 'walks'; it has \['runs', 'version'\]"):
        Hdf5Store(tmp_path / "a.h5", group="walks")


def test_leaves_of_different_lengths_are_an_error_that_says_what_to_choose(robomimic, tmp_path):
    with h5py.File(robomimic, "a") as file:
        file["data/demo_0/extra"] = np.zeros(24)
    with pytest.raises(
        StoreError, match=r"24 steps of \['extra'\]; choose some that have, such as columns=\['actions', "
    ):
        Hdf5Store(robomimic)
    assert len(Hdf5Store(robomimic, columns=["actions", "obs"])) == 4
    with h5py.File(robomimic, "a") as file:
        del file["data/demo_2/dones"]
        file["data/demo_2/dones"] = np.zeros(8, int)
    store = Hdf5Store(robomimic, columns=["actions", "dones"])
    with pytest.raises(StoreError, match=r"demos.hdf5, stream 2 \(demo_2\): .* 8 steps of \['dones'\]"):
        store(2)
    assert len(store.verify()) == 1


def written(name, *given, **options):
    """Writes another dataset in a leaf's place; h5py.ExternalLink is written as it is."""

    def edit(file):
        del file[f"data/demo_2/{name}"]
        if given and isinstance(given[0], h5py.ExternalLink):
            file["data/demo_2"][name] = given[0]
        elif given or options:
            file["data/demo_2"].create_dataset(name, *given, **options)

    return edit


def write_encoded(group, name, files, kind):
    """Encoded images: padded as ALOHA has them, of any length, or as texts."""
    if kind == "vlen":
        dataset = group.create_dataset(name, (len(files),), h5py.vlen_dtype(np.uint8))
        for row, file in enumerate(files):
            dataset[row] = np.frombuffer(file, np.uint8)
    else:
        rows = np.array(files)
        group[name] = rows if kind == "text" else rows.view(np.uint8).reshape(len(rows), -1)


@pytest.mark.parametrize("kind", ["padded", "vlen", "text"])
def test_encoded_images_of_several_cameras_are_decoded(tmp_path, kind):
    rng = np.random.default_rng(0)
    depth = [rng.integers(0, 1 << 16, (6, 8), np.uint16) for _ in range(5)]
    colors = [rng.integers(0, 256, (12, 10, 3), np.uint8) for _ in range(5)]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["action"], file["compress_len"], file["depth"] = np.zeros((5, 2)), np.zeros((2, 5)), np.array(depth)
        images = file.create_group("observations/images")
        for name, suffix, shown in (("low", ".jpg", colors), ("high", ".png", colors[::-1]), ("depth", ".png", depth)):
            write_encoded(images, name, [cv2.imencode(suffix, image)[1].tobytes() for image in shown], kind)
        jpeg = [cv2.imdecode(np.frombuffer(bytes(row), np.uint8), 1) for row in images["low"]]
    options = {"cameras": ["/observations/images"], "layout": "HWC"}
    store = Hdf5Store(tmp_path / "a.h5", color="bgr", **options)
    (batch,) = StreamDataLoader(StreamDataset(store.sources, store, 1, time_steps=5))
    found = batch.data["observations"]["images"]
    np.testing.assert_equal(found["low"][:, 0].numpy(), jpeg)
    np.testing.assert_equal(found["high"][:, 0].numpy(), colors[::-1])
    np.testing.assert_equal(found["depth"][:, 0, ..., 0].numpy(), depth)
    np.testing.assert_equal(batch.data["depth"][:, 0].numpy(), depth)
    rgb = Hdf5Store(tmp_path / "a.h5", **options)(0, start=2)
    np.testing.assert_equal(next(iter(rgb))["observations"]["images"]["high"], colors[2][..., ::-1])
    with pytest.raises(StoreError, match="no cameras 'obs'"):
        Hdf5Store(tmp_path / "a.h5", cameras="obs")


def test_an_encoded_image_that_is_damaged_or_unlike_the_others_is_named(tmp_path):
    files = [cv2.imencode(".png", np.zeros((size, 4), np.uint8))[1].tobytes() for size in (3, 3, 5)]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        write_encoded(file, "image", [*files, files[0][:30]], "padded")
    store = Hdf5Store(tmp_path / "a.h5", cameras=["image"])
    for start, room in ((1, 2), (3, 1)):
        with pytest.raises(StoreError, match=rf"a.h5\), image, row {start + room - 1}"):
            store(0, start=start).read_into({"image": np.zeros((room, 1, 3, 4), np.uint8)})
    assert len(store.verify()) == 1
    with pytest.raises(ValueError, match="color"):
        Hdf5Store(tmp_path / "a.h5", cameras=["image"], color="gray")


BROKEN = {
    "num_samples 9": lambda file: file["data/demo_2"].attrs.modify("num_samples", 9),
    "no dataset 'obs/image'": written("obs/image"),
    "no dataset 'obs/pose'": lambda file: (file.pop("data/demo_2/obs/pose"), file.create_group("data/demo_2/obs/pose")),
    "/data/demo_2/dones is of dtype object": written("dones", data=["a"] * 7),
    "of dtype .S1": written("dones", data=np.full(7, b"a")),
    "2,147,483,648 bytes": written("obs/image", (7, 2**31), "u1", chunks=(1, 1024)),
    "0 of 917,504 chunks": written("obs/image", (7, 2**27), "u1", chunks=(1, 1024)),
    "'dones' lies in another file": written("dones", h5py.ExternalLink("other.h5", "/x")),
    "dones lies in another file": written("dones", (7,), "i8", external=[("raw.bin", 0, 56)]),
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_stream_that_is_unlike_the_others_is_an_error(robomimic, tmp_path, message):
    with h5py.File(tmp_path / "other.h5", "w") as other:
        other["x"] = np.zeros(7, int)
    with h5py.File(robomimic, "a") as file:
        BROKEN[message](file)
    store = Hdf5Store(robomimic)
    with pytest.raises(StoreError, match=message) as raised:
        store(2)
    assert f"{robomimic}, stream 2 (demo_2)" in str(raised.value)
    assert_same(items_of(store(3)), STREAMS[3], 3, "read all the same")
    store.close()


def test_chunks_that_were_never_written_are_found_by_verify(tmp_path):
    path = write_robomimic(tmp_path / "a.h5", STREAMS[2:])
    with h5py.File(path, "a") as file:
        del file["data/demo_1/dones"]
        file["data/demo_1"].create_dataset("dones", (31,), "i8", chunks=(10,))[:20] = 1
    (problem,) = Hdf5Store(path).verify()
    assert problem == f"{path}, stream 1 (demo_1), dones is half written: 2 of 4 chunks"


def test_checksums_of_chunks_are_compared(tmp_path):
    path = write_robomimic(tmp_path / "a.h5", STREAMS[2:], fletcher32=True, chunks=True)
    with h5py.File(path) as file:
        place = file["data/demo_1/obs/image"].id.get_chunk_info(0).byte_offset
    with open(path, "rb+") as file:
        file.seek(place)
        file.write(b"damaged!")
    store = Hdf5Store(path)
    with pytest.raises(StoreError, match="demo_1/obs/image"):
        next(store(1))
    (problem,) = store.verify()
    assert f"{path}, stream 1 (demo_1), dataset /data/demo_1/obs/image, rows " in problem


@pytest.mark.parametrize("content", [b"", b"not HDF5 at all" * 100, b"\x89HDF\r\n\x1a\n" + bytes(3000)])
def test_a_file_of_another_kind_is_named(tmp_path, content):
    (tmp_path / "a.hdf5").write_bytes(content)
    with pytest.raises(StoreError, match=r"a\.hdf5 is (empty|not a whole HDF5 file)"):
        stores.open(tmp_path / "a.hdf5")
    path = write_robomimic(tmp_path / "a.hdf5", STREAMS)
    os.truncate(path, os.stat(path).st_size // 2)
    with pytest.raises(StoreError, match=r"a\.hdf5 is not a whole HDF5 file: .*truncated"):
        Hdf5Store(path)


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(StoreError, match=r"has no files with names in \.h5 or \.hdf5"):
        Hdf5Store(tmp_path)
    with h5py.File(tmp_path / "a.h5", "w"):
        pass
    with pytest.raises(StoreError, match="holds no streams: no groups in"):
        Hdf5Store(tmp_path)


def open_files(path):
    return sum(os.path.realpath(f"/proc/self/fd/{fd}") == path for fd in os.listdir("/proc/self/fd"))


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_file_is_open_once_and_never_in_a_child_that_does_not_read_it(tmp_path):
    path = write_robomimic(tmp_path / "a.h5", STREAMS)
    store = Hdf5Store(path)
    streams = [store(number) for number in (0, 2, 3)]
    assert open_files(path) == 1
    for stream in streams:
        stream.close()
    assert open_files(path) == 1  # kept for the next
    if not (child := os.fork()):
        os._exit(open_files(path))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    stream = store(0)
    store.close()
    assert next(stream)["dones"] == 0
    stream.close()
    assert open_files(path) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_few_files_are_open_at_once(tmp_path):
    store = Hdf5Store(aloha(tmp_path / "a", episodes((2,) * 40)))
    before = len(os.listdir("/proc/self/fd"))
    assert [len(list(store(number))) for number in store.sources] == [2] * 40
    assert len(os.listdir("/proc/self/fd")) - before <= 16
    store.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_process_reads_a_stream_while_workers_that_it_forked_read_others(tmp_path):
    streams = episodes((40, 30, 35, 50, 20), size=(32, 40, 3))
    check_read_beside_workers(Hdf5Store(write_robomimic(tmp_path / "a.h5", streams)), streams)


@pytest.mark.parametrize(
    ("plugins", "text"),
    [
        (None, "which is not there: pip install hdf5plugin"),
        (types.ModuleType("hdf5plugin"), "which hdf5plugin has not: have HDF5_PLUGIN_PATH"),
    ],
)
def test_a_missing_filter_is_named(plugins, text, tmp_path, monkeypatch):
    store = Hdf5Store(write_robomimic(tmp_path / "a.h5", STREAMS, compression="lzf"))
    monkeypatch.setattr(h5py.h5z, "filter_avail", lambda number: False)
    monkeypatch.setitem(sys.modules, "hdf5plugin", plugins)
    with pytest.raises(ImportError, match=rf"a.h5.* was written with the filter 32000 \(lzf\), {text}"):
        store(0)
    store.close()


def two_steps(path, change):
    with h5py.File(path, "w") as file:
        for number in range(2):
            file[f"data/demo_{number}/x"] = np.arange(2) + number
            file[f"data/demo_{number}/obs/y"] = np.arange(2) + 10 * number
        change(file)
    return path


def both(name, link):
    def change(file):
        for number in range(2):
            group = file[f"data/demo_{number}"]
            group[name] = link if isinstance(link, h5py.SoftLink) else group[link]

    return change


NAMED_TWICE = {
    "a second name of a dataset": (both("z", "x"), "z", 1),
    "a second name of a group": (both("next_obs", "obs"), "next_obs/y", 11),
    "a link to a dataset": (both("z", h5py.SoftLink("x")), "z", 1),
    "a link to a group": (both("next_obs", h5py.SoftLink("obs")), "next_obs/y", 11),
}


@pytest.mark.parametrize(("change", "name", "value"), NAMED_TWICE.values(), ids=NAMED_TWICE)
def test_a_dataset_is_a_leaf_under_each_of_its_names(tmp_path, change, name, value):
    store = Hdf5Store(two_steps(tmp_path / "a.hdf5", change))
    assert sorted(store.info().leaves) == sorted(["['obs']['y']", "['x']", "['" + name.replace("/", "']['") + "']"])
    *_, last = store(1)
    for key in name.split("/"):
        last = last[key]
    assert last == value + (1 if name == "z" else 0)


NOT_READ = {
    "a link to nothing": (both("z", h5py.SoftLink("/no")), "'z' is a link that leads nowhere"),
    "a link to itself": (both("z", h5py.SoftLink("z")), "'z' is not read: .* without an end"),
    "a link to another file": (
        lambda file: file["data/demo_0"].__setitem__("z", h5py.ExternalLink("b.h5", "/x")),
        "'z' lies in another file",
    ),
    "a group in itself": (both("z", "/data"), "'z/demo_0' is a group that contains it"),
    "a name that is no text": (
        lambda file: h5py.h5g.create(file["data/demo_0"].id, b"\xff"),
        r"'\\udcff' is no text in UTF-8",
    ),
}


@pytest.mark.parametrize(("change", "told"), NOT_READ.values(), ids=NOT_READ)
def test_a_name_that_cannot_be_read_is_not_left_out_in_silence(tmp_path, change, told):
    path = two_steps(tmp_path / "a.hdf5", change)
    with pytest.raises(StoreError, match=rf"a\.hdf5, /data/demo_0: .*{told}.*columns="):
        Hdf5Store(path)
    assert [int(step["obs"]["y"]) for step in Hdf5Store(path, columns=["x", "obs"])(1)] == [10, 11]


@pytest.mark.parametrize("group", ["data", "other"])
def test_a_stream_whose_link_leads_nowhere_is_named(tmp_path, group):
    path = two_steps(tmp_path / "a.hdf5", lambda file: file.__setitem__(f"{group}/demo_9", h5py.SoftLink("/no")))
    with pytest.raises(StoreError, match=rf"/{group}: 'demo_9' is a link that leads nowhere"):
        Hdf5Store(path, group=group)
    if group == "data":
        with h5py.File(path, "a") as file:
            file["mask/train"] = [b"demo_0"]
        assert len(Hdf5Store(path, filter_key="train")) == 1


def test_a_stream_whose_name_is_no_text_is_named(tmp_path):
    path = two_steps(tmp_path / "a.hdf5", lambda file: h5py.h5g.create(file["data"].id, b"demo_\xff"))
    with pytest.raises(StoreError, match=r"/data: the name b'demo_\\xff' is no text in UTF-8"):
        Hdf5Store(path)
    with pytest.raises(ValueError, match=r"a\.hdf5 has 4 datasets"):
        ArrayStream()(str(path))


def test_groups_that_link_to_each_other_have_no_names_without_end(tmp_path):
    def change(file):
        group = file.create_group("data/demo_0/g")
        for _ in range(40):
            group["b"] = below = group.create_group("a")
            group = below

    with pytest.raises(StoreError, match="/data/demo_0 has more than 1,024 groups"):
        Hdf5Store(two_steps(tmp_path / "a.hdf5", change))


def test_the_only_dataset_of_a_file_may_have_two_names(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = file["z"] = np.arange(3)
        del file["z"]
        file["y"], file["link"], file["nowhere"] = file["x"], h5py.SoftLink("/x"), h5py.SoftLink("/no")
    assert [int(row) for row in ArrayStream()(str(tmp_path / "a.h5"))] == [0, 1, 2]


def test_a_dataset_without_values_is_named(tmp_path):
    def change(file):
        del file["data/demo_1/x"]
        file["data/demo_1"].create_dataset("x", data=h5py.Empty("f4"))

    with pytest.raises(StoreError, match=r"demo_1/x is a single number, without an axis for time steps"):
        Hdf5Store(two_steps(tmp_path / "a.hdf5", change))(1)


def test_a_stream_is_checked_at_its_first_opening_and_again_only_if_it_names_other_files(tmp_path, monkeypatch):
    path = two_steps(tmp_path / "a.hdf5", lambda file: None)
    with h5py.File(tmp_path / "b.hdf5", "w") as file:
        file["x"] = np.arange(2)
    with h5py.File(path, "a") as file:
        del file["data/demo_1/x"]
        layout = h5py.VirtualLayout((2,), "i8")
        layout[:] = h5py.VirtualSource("b.hdf5", "x", (2,))
        file["data/demo_1"].create_virtual_dataset("x", layout)
    whole = Hdf5Store(two_steps(tmp_path / "c.hdf5", lambda file: None))
    checked, check = [], Sources.check
    monkeypatch.setattr(Sources, "check", lambda self, one, *rest: (checked.append(one.name), check(self, one, *rest)))
    for _ in range(3):
        list(whole(1))
    assert checked == ["/data/demo_1/obs/y", "/data/demo_1/x"]
    list(pickle.loads(pickle.dumps(whole))(1))
    assert len(checked) == 4, "another process checks by itself"
    store = Hdf5Store(path)
    list(store(1))
    os.remove(tmp_path / "b.hdf5")
    with pytest.raises(StoreError, match=r"b\.hdf5"):
        list(store(1))
    os.utime(tmp_path / "c.hdf5", (1, 1))
    with pytest.raises(StoreError, match=r"c\.hdf5"):
        list(whole(1))
