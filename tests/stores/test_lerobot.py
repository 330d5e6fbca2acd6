"""LeRobot datasets."""

import json
import os
import pickle
import shutil

import cv2
import lerobot_data as data
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import FULL, read
from store_tests import StoreTests

from stream_dataloader import StreamDataLoader, StreamDataset, stores
from stream_dataloader.errors import StoreError
from stream_dataloader.stores import LeRobotStore
from stream_dataloader.stores.parquet.tables import TableFile
from stream_dataloader.streams import VideoStream
from stream_dataloader.streams.video.frames import FrameReader

LENGTHS = (9, 0, 14, 5)
TOP, WRIST = data.CAMERAS


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Datasets that tests read, and copy before they change them."""
    folder = tmp_path_factory.mktemp("lerobot")
    data.write_v3(folder / "v3", LENGTHS)
    data.write_v3(folder / "file", (6, 11, 4), files=1, groups="file")
    data.write_v3(folder / "image", (6, 11, 20), kind="image")
    data.write_v21(folder / "v21", (6, 9, 4))
    return folder


@pytest.fixture
def copy(written, tmp_path):
    return shutil.copytree(written / "v3", tmp_path / "copy")


def decoded(folder, lengths, cameras=tuple(data.CAMERAS), **options):
    """What each camera shows in each episode, by reading whole videos from their beginning."""
    found = {}
    for camera in cameras:
        videos = sorted(folder.glob(f"**/{camera}/**/*.mp4"))
        frames = [frame for video in videos for frame in read(VideoStream(**options)(str(video)))]
        found[camera] = np.split(np.array(frames), np.cumsum(lengths)[:-1])
    return found


def assert_right_frames(store, lengths):
    """Each picture is that of its camera, episode and step."""
    for episode, length in enumerate(lengths):
        steps = 0
        for step, item in enumerate(read(store(episode))):
            for camera in data.CAMERAS:
                assert data.code_of(item[camera]) == data.code(camera, episode, step)
            assert (item["episode_index"], item["frame_index"]) == (episode, step)
            steps += 1
        assert steps == length


class TestLeRobotStore(StoreTests):
    damages = 500 if FULL else 12

    @pytest.fixture
    def made(self, written):
        return LeRobotStore(written / "v3", task=False)

    @pytest.fixture
    def expected(self, written):
        return data.expected_items(LENGTHS, decoded(written / "v3", LENGTHS), task=False)


@pytest.mark.parametrize(
    ("name", "lengths", "version"),
    [("v3", LENGTHS, "v3.0"), ("file", (6, 11, 4), "v3.0"), ("image", (6, 11, 20), "v3.0"), ("v21", (6, 9, 4), "v2.1")],
)
def test_each_layout_gives_the_right_frames_and_rows(written, name, lengths, version):
    _, store = stores.open(written / name)
    assert (type(store), store.info().version, list(store.lengths)) == (LeRobotStore, version, list(lengths))
    assert_right_frames(store, lengths)
    for number, items in enumerate(data.expected_items(lengths)):
        for found, item in zip(read(store(number)), items, strict=True):
            assert list(found) == [*data.CAMERAS, *item]
            differing = [name for name, value in item.items() if not np.array_equal(found[name], value)]
            assert not differing, "these names have other values than were written"
    assert store.metadata(1) == {"episode_index": 1, "tasks": [data.TASKS[1]]}
    assert store.tasks == dict(enumerate(data.TASKS))
    assert store.verify() == []


def test_the_text_of_a_task_is_in_batches(written):
    sources, store = stores.open(written / "v3", cameras=())
    dataset = StreamDataset(sources, store, batch_size=1, time_steps=9, lengths=store.lengths)
    batch = next(iter(StreamDataLoader(dataset)))
    assert batch.data["action"].shape == (9, 1, 2)
    assert np.array(batch.data["task"]).ravel().tolist() == [data.TASKS[0]] * 9


@pytest.mark.parametrize("layout", ["v3", "image"])
def test_cameras_columns_and_pictures_are_chosen(written, layout):
    options = {"cameras": [WRIST], "columns": ["action", "timestamp"], "task": False}
    store = LeRobotStore(written / layout, size=(10, 12), layout="HWC", image_dtype=np.float32, **options)
    item = next(store(0))
    assert {name: (str(leaf.dtype), leaf.shape) for name, leaf in item.items()} == {
        WRIST: ("float32", (10, 12, 3)),
        "action": ("float64", (2,)),
        "timestamp": ("float32", ()),
    }
    assert list(next(LeRobotStore(written / layout, cameras=[TOP], columns=(), task=False)(0))) == [TOP]
    assert list(next(LeRobotStore(written / layout, cameras=(), columns=["index"])(0))) == ["index", "task"]


def test_the_size_is_that_of_the_episode_wherever_reading_begins(written):
    store = LeRobotStore(written / "image", columns=())
    assert next(store(2, start=17))[WRIST].shape == (3, 32, 48)


def test_reading_in_order_decodes_each_frame_once_and_seeks_never(written, monkeypatch):
    opened = []
    original = FrameReader.frames
    monkeypatch.setattr(FrameReader, "frames", lambda self, start=0: opened.append(start) or original(self, start))
    store = LeRobotStore(written / "v3", cameras=[TOP], task=False, size=(24, 32))
    dataset = StreamDataset(list(store.sources), store, batch_size=1, time_steps=4)
    assert sum(int(batch.mask.sum()) for batch in StreamDataLoader(dataset)) == sum(LENGTHS)
    # each episode from where it begins in its file: two files, of 9 + 0 and 14 + 5 frames
    assert opened == [0, 0, 14]
    opened.clear()
    stream = store(2, start=11)
    next(stream)
    next(stream)
    stream.close()
    assert opened == [11]


@pytest.mark.parametrize("drift", [0.02, -0.01])
def test_times_that_are_a_little_off_take_the_nearest_frame(tmp_path, drift):
    data.write_v3(tmp_path / "a", (5, 6), files=1, drift=max(drift, 0.0))
    if drift < 0:
        change_table(tmp_path / "a", f"videos/{TOP}/from_timestamp", [0.0, 0.5 + drift])
    assert_right_frames(LeRobotStore(tmp_path / "a"), (5, 6))


def change_table(folder, name, values):
    data.change(folder / "meta/episodes/chunk-000/file-000.parquet", **{name.replace("/", "__"): values})


def test_times_that_are_further_off_are_an_error(tmp_path):
    data.write_v3(tmp_path / "a", (5, 6), files=1, drift=0.04)
    with pytest.raises(StoreError, match=r"stream 0, camera .*top', step 0: it is at 0.0400 s.*tolerance_s"):
        LeRobotStore(tmp_path / "a")(0)
    assert_right_frames(LeRobotStore(tmp_path / "a", tolerance_s=0.045), (5, 6))


def test_a_video_of_more_frames_than_rows_is_matched_by_time(tmp_path):
    data.write_v3(tmp_path / "a", (5, 6), files=1, cameras=[TOP])
    video = tmp_path / f"a/videos/{TOP}/chunk-000/file-000.mp4"
    frames = [data.picture(TOP, e, step) for e, n in enumerate((5, 6)) for step in range(n) for _ in range(2)]
    data.write_video(video, frames, fps=20)
    store = LeRobotStore(tmp_path / "a")
    for episode, length in enumerate((5, 6)):
        codes = [data.code_of(item[TOP]) for item in read(store(episode))]
        assert codes == [data.code(TOP, episode, step) for step in range(length)]


@pytest.mark.parametrize("frames", [11, 3])
def test_a_video_that_is_shorter_than_its_table_names_both_numbers(copy, frames):
    video = copy / f"videos/{TOP}/chunk-000/file-001.mp4"  # of 14 + 5 frames
    data.write_video(video, [data.picture(TOP, 2, step) for step in range(frames)])
    with pytest.raises(StoreError, match=rf"stream 2, camera .*top': its video has {frames} frames .* 14 rows"):
        LeRobotStore(copy)(2)
    with pytest.raises(StoreError, match=r"stream 3, .* has 0 frames .* and its table 5 rows"):
        LeRobotStore(copy)(3)
    assert len(LeRobotStore(copy, cameras=[WRIST]).verify()) == 0


def test_the_next_episodes_frames_are_never_taken(copy):
    """The episode's part of the video is too short, and the video is long enough."""
    times = [0.0, 0.9, 0.0, 1.4], [0.9, 0.9, 1.2, 1.9]
    for name, values in zip(("from", "to"), times, strict=True):
        change_table(copy, f"videos/{TOP}/{name}_timestamp", list(values))
    with pytest.raises(StoreError, match=r"its video has 12 frames \(from 0.000 s to 1.200 s.* its table 14 rows"):
        LeRobotStore(copy)(2)


def test_a_table_that_is_shorter_than_the_index_says_names_both_numbers(copy):
    path = copy / "data/chunk-000/file-001.parquet"
    pq.write_table(pq.read_table(path).slice(0, 12), path)
    with pytest.raises(StoreError, match=r"14 rows by the dataset's meta, and 12 in .*file-001.parquet"):
        LeRobotStore(copy)(2)
    with pytest.raises(StoreError, match=r"5 rows by the dataset's meta, and 0 in"):
        LeRobotStore(copy)(3)


DATA, META = "data/chunk-000/file-000.parquet", "meta/episodes/chunk-000/file-000.parquet"


@pytest.mark.parametrize(
    ("file", "name", "values", "message"),
    [
        (DATA, "action", None, "'action'"),
        (DATA, "timestamp", None, "'timestamp'"),
        (DATA, "episode_index", None, "'episode_index'"),
        (DATA, "action", [[1.0]] * 9, "'action'"),
        (DATA, "action", [[1.0] * 2] * 8 + [[1.0]], "row 8"),
        (DATA, "action", [[1.0] * 2] * 8 + [None], "row 8"),
        (DATA, "next.done", [2] * 9, "bool"),
        (DATA, "frame_index", [0.5] * 9, "file-000"),
        (DATA, "timestamp", [0, 0.1, 0.1, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8], "top"),
        (DATA, "timestamp", [0, 0.1, 0.2, 0.3, 0.4, float("nan"), 0.6, 0.7, 0.8], "step 5"),
        (DATA, "task_index", [7] * 9, "task_index 7"),
        (DATA, "episode_index", [0] * 4 + [2] + [0] * 4, "row 5"),
        (META, "length", None, "'length'"),
        (META, "length", [9, -1, 14, 5], "episode 1"),
        (META, "length", [2**62, 0, 14, 5], "episode 0"),
        (META, "episode_index", [0, 1, 1, 2], "episode 1"),
        (META, "data__file_index", [5, 0, 1, 1], "file-005.parquet"),
        (META, f"videos__{TOP}__file_index", [9, 0, 1, 1], "file-009.mp4"),
        (META, f"videos__{TOP}__from_timestamp", [float("nan"), 0.0, 0.0, 0.0], "from nan to 0.9 s"),
    ],
)
def test_a_damaged_table_is_named(copy, file, name, values, message):
    data.change(copy / file, **{name: values})
    with pytest.raises(StoreError, match=message) as caught:
        LeRobotStore(copy)(0)
    assert str(copy) in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codebase_version": "v1.6"}, "'v1.6'"),
        ({"codebase_version": None}, "None"),
        ({"fps": 0}, "fps"),
        ({"fps": 1e400}, "fps"),
        ({"features": []}, "info.json"),
        ({"features": {"x": {"dtype": "float32", "shape": [-1]}}}, "x has the shape"),
        ({"total_episodes": 9}, "4 episodes.* 9"),
        ({"data_path": "../{chunk_index}.parquet"}, "outside"),
        ({"data_path": "/etc/{file_index}"}, "outside"),
        ({"data_path": "{file_index:0999999999d}"}, "file_index"),
        ({"data_path": "{file_index.__class__}"}, "file_index"),
        ({"data_path": "{other}"}, "other"),
        ({"video_path": None}, "video_path"),
    ],
)
def test_a_wrong_info_is_named(copy, changes, message):
    data.change(copy / "meta/info.json", **changes)
    with pytest.raises(StoreError, match=message):
        LeRobotStore(copy)(0)


@pytest.mark.parametrize(
    ("option", "value", "kind"),
    [
        ("cameras", ["front"], StoreError),
        ("columns", ["reward"], StoreError),
        ("cameras", "front", TypeError),
        ("tolerance_s", -1, ValueError),
        ("fit", "wide", ValueError),
    ],
)
def test_what_a_dataset_does_not_have_is_named(written, option, value, kind):
    with pytest.raises(kind, match=option):
        LeRobotStore(written / "v3", **{option: value})


def test_a_feature_that_is_not_read_can_be_left_out(copy):
    features = json.loads((copy / "meta/info.json").read_text())["features"]
    data.change(copy / "meta/info.json", features=features | {"style": {"dtype": "language", "shape": [1]}})
    with pytest.raises(StoreError, match=r"'style' is of dtype 'language'.* columns="):
        LeRobotStore(copy)
    assert list(next(LeRobotStore(copy, columns=["action"], cameras=())(0))) == ["action", "task"]


@pytest.mark.parametrize("gone", ["meta/tasks.parquet", "meta/episodes", "data/chunk-000/file-000.parquet"])
def test_a_missing_file_is_named(copy, gone):
    shutil.rmtree(copy / gone) if (copy / gone).is_dir() else os.unlink(copy / gone)
    with pytest.raises(StoreError, match=gone.removesuffix("/episodes")):
        LeRobotStore(copy)(0)


def test_a_video_that_is_damaged_is_named_with_its_step(copy):
    path = copy / f"videos/{WRIST}/chunk-000/file-001.mp4"
    content = bytearray(path.read_bytes())
    begin = content.index(b"mdat") + 4
    size = int.from_bytes(content[begin - 8 : begin - 4], "big") - 8
    content[begin + size // 2 : begin + size] = bytes(size - size // 2)
    path.write_bytes(content)
    problems = LeRobotStore(copy).verify()
    assert problems
    assert all("stream 2, camera 'observation.images.wrist', step" in problem for problem in problems)
    assert not any("on_corrupt" in problem for problem in problems)


@pytest.mark.parametrize(
    ("file", "line", "message"),
    [
        ("episodes", '{"episode_index": 3, "length": "9"}', "episodes.jsonl, line 4"),
        ("episodes", '{"episode_index": 99999999999, "length": 9}', "describes 4 episodes"),
        ("episodes", '{"episode_index": 3', "episodes.jsonl, line 4"),
        ("episodes", "[" * 100_000, "episodes.jsonl, line 4"),
        ("tasks", "[3]", "tasks.jsonl, line 3"),
    ],
)
def test_a_damaged_line_of_version_2_is_named(written, tmp_path, file, line, message):
    folder = shutil.copytree(written / "v21", tmp_path / "a")
    with open(folder / f"meta/{file}.jsonl", "a") as opened:
        opened.write(line)
    with pytest.raises(StoreError, match=message):
        LeRobotStore(folder)


def test_episodes_are_sorted_by_their_index(copy):
    path = copy / "meta/episodes/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    pq.write_table(table.take([3, 1, 0, 2]), path)
    store = LeRobotStore(copy)
    assert_right_frames(store, LENGTHS)
    assert [store.metadata(number)["tasks"] for number in range(4)] == [[data.TASKS[e % 2]] for e in range(4)]


def test_the_names_of_tasks_may_be_those_of_another_pandas(copy):
    data.write_tasks(copy / "meta/tasks.parquet", index="task")
    assert LeRobotStore(copy).tasks == dict(enumerate(data.TASKS))


def test_arrays_of_more_axes_and_texts_are_read(copy):
    path = copy / "data/chunk-000/file-000.parquet"
    maps = np.arange(9 * 6, dtype=np.float32).reshape(9, 2, 3)
    table = pq.read_table(path)
    table = table.append_column("map", pa.array(maps.tolist(), pa.list_(pa.list_(pa.float32()))))
    table = table.append_column("note", pa.array([f"step {step}" for step in range(9)]))
    pq.write_table(table, path)
    features = json.loads((copy / "meta/info.json").read_text())["features"]
    more = {"map": {"dtype": "float32", "shape": [2, 3]}, "note": {"dtype": "string", "shape": [1]}}
    data.change(copy / "meta/info.json", features=features | more)
    items = read(LeRobotStore(copy, cameras=(), columns=["map", "note"])(0))
    assert np.array_equal([item["map"] for item in items], maps)
    assert [item["note"] for item in items] == [f"step {step}" for step in range(9)]


def test_a_row_group_of_many_episodes_is_kept_for_the_next(written, monkeypatch):
    store = LeRobotStore(written / "file", cameras=(), task=False)
    read(store(0))
    monkeypatch.setattr(TableFile, "read", None)  # no file is read from now on
    assert [int(item["index"]) for item in read(store(2))] == list(range(17, 21))


def test_files_without_statistics_are_read(copy):
    path = copy / "data/chunk-000/file-001.parquet"
    pq.write_table(pq.read_table(path), path, write_statistics=False, row_group_size=6)
    assert_right_frames(LeRobotStore(copy), LENGTHS)


def test_pictures_may_lie_in_files_of_the_dataset(written, tmp_path):
    folder = shutil.copytree(written / "image", tmp_path / "a")
    path = folder / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    images = table.column(TOP).to_pylist()
    (folder / "images").mkdir()
    for number, image in enumerate(images):
        (folder / f"images/{number}.png").write_bytes(image["bytes"])
    data.change(path, **{TOP: [{"bytes": None, "path": f"images/{number}.png"} for number in range(len(images))]})
    assert_right_frames(LeRobotStore(folder), (6, 11, 20))
    data.change(path, **{TOP: [{"bytes": None, "path": "../a.png"}] * len(images)})
    with pytest.raises(StoreError, match=r"camera .*top', step 0: .*'\.\./a\.png', which lies outside"):
        next(LeRobotStore(folder)(0))
    data.change(path, **{TOP: [{"bytes": b"GIF", "path": None}] * len(images)})
    with pytest.raises(StoreError, match="step 0: the picture cannot be decoded"):
        next(LeRobotStore(folder)(0))


def test_depth_has_16_bits_in_pictures_and_is_refused_in_videos(written, copy, tmp_path):
    folder = shutil.copytree(written / "image", tmp_path / "a")
    depth = [np.random.default_rng(step).integers(0, 1 << 16, (48, 64), np.uint16) for step in range(17)]
    images = [{"bytes": cv2.imencode(".png", image)[1].tobytes(), "path": None} for image in depth]
    data.change(folder / "data/chunk-000/file-000.parquet", **{TOP: images})
    for dataset in (folder, copy):
        features = json.loads((dataset / "meta/info.json").read_text())["features"]
        features[TOP] |= {"info": {"is_depth_map": True}}
        data.change(dataset / "meta/info.json", features=features)
    found = read(LeRobotStore(folder, image_dtype=np.float32)(1))
    np.testing.assert_equal([item[TOP][0] for item in found], depth[6:])
    assert found[0][WRIST].shape == (3, 32, 48)
    with pytest.raises(StoreError, match="'depth video', which is not read; leave it out, by cameras="):
        LeRobotStore(copy)
    assert len(read(LeRobotStore(copy, cameras=[WRIST])(0))) == LENGTHS[0]
    images[0] = data.encoded(data.picture(TOP, 0, 0))
    data.change(folder / "data/chunk-000/file-000.parquet", **{TOP: images})
    with pytest.raises(StoreError, match="step 0: it is a depth map of uint8, not of 16 bits"):
        next(LeRobotStore(folder)(0))


def test_statistics_are_those_of_the_dataset(written):
    assert LeRobotStore(written / "v3").stats()["action"]["std"] == [1.0, 1.0]
    with pytest.raises(StoreError, match=r"stats\.json is missing"):
        LeRobotStore(written / "v21").stats()


def test_a_dataset_that_is_replaced_is_not_read_on(copy):
    """Its index is equal: only the numbers are others."""
    store = LeRobotStore(copy, cameras=(), task=False)
    sent = pickle.dumps(store)
    shutil.copytree(copy, copy.parent / "other")
    shutil.rmtree(copy)
    (copy.parent / "other").rename(copy)
    with pytest.raises(StoreError):
        store(2)
    with pytest.raises(StoreError):
        pickle.loads(sent)(2)
    assert len(list(LeRobotStore(copy, cameras=(), task=False)(2))) == LENGTHS[2]


def no_utf8(path, name, store):
    """Put a byte into a text of a Parquet file that UTF-8 does not have."""
    content = path.read_bytes()
    assert content.count(name) >= 1
    path.write_bytes(content.replace(name, b"\x80" + name[1:]))
    with pytest.raises(StoreError, match=f"{path.name}|the tasks of episode 0.*0x80"):
        store()


def test_a_task_that_is_no_text_is_an_error_of_its_file(copy):
    no_utf8(copy / "meta/tasks.parquet", b"put the block", lambda: LeRobotStore(copy))


def test_the_tasks_of_an_episode_that_are_no_texts_are_an_error_of_it(copy):
    (path,) = (copy / "meta/episodes").rglob("*.parquet")
    pq.write_table(pq.read_table(path), path, compression="none")
    no_utf8(path, b"put the block", lambda: LeRobotStore(copy).metadata(0))
