"""Live cameras, real ones on loopback: what comes in is counted, what is lost comes back or is an error in time."""

import contextlib
import itertools
import logging
import threading
import time

import numpy as np
import pytest
from helpers import FOREVER
from servers import CameraServer, number_of

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.errors import OpenError, ReadError
from stream_dataloader.streams.camera.stream import CameraStream

QUICK = {"reconnect_seconds": (0.01, 0.05), "timeout_seconds": 60.0}
CAMERAS = [("live.ts", "http"), ("live.mjpg", "http"), ("live", "rtsp")]
BACKENDS = ["av", "opencv"]


@pytest.fixture
def server():
    with CameraServer() as server:
        yield server


@contextlib.contextmanager
def opened(address, **options):
    stream = CameraStream(**{**QUICK, **options})(address)
    try:
        yield stream
    finally:
        stream.close()


def steps(items):
    numbers = [number_of(item["frame"].mean()) for item in items]
    return [(after - before) % 24 for before, after in itertools.pairwise(numbers)]


def left_out(items):
    return [int(item["dropped"] + item["lost"]) for item in items[1:]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("path", "scheme"), CAMERAS)
def test_frames_come_with_time_stamps_and_none_is_missing(server, path, scheme, backend):
    with opened(server.url(path, scheme), backend=backend, keep="all") as stream:
        items = list(itertools.islice(stream, 30))
    assert {item["frame"].shape for item in items} == {(3, 48, 64)}
    numbers = {"dropped": np.int64, "lost": np.int64, "connection": np.int64}
    times = {"time_seconds": np.float64, "pts_seconds": np.float64}
    assert {name: value.dtype for name, value in items[0].items()} == {"frame": np.uint8} | numbers | times
    assert steps(items) == [1] * 29
    assert left_out(items) == [0] * 29
    arrivals = [item["time_seconds"] for item in items]
    assert arrivals == sorted(arrivals)
    assert time.time() - 60 < arrivals[0] < arrivals[-1] <= time.time()
    stamps = np.array([item["pts_seconds"] for item in items[2:]])  # RTSP knows them from the second frame on
    if backend == "opencv" or path == "live.mjpg":
        assert np.isnan(stamps).all()
    else:
        assert np.allclose(np.diff(stamps), 0.02, atol=1e-4)


@pytest.mark.one_of_each
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("path", "scheme"), CAMERAS)
def test_what_a_slow_consumer_misses_is_counted(server, path, scheme, backend):
    items = []
    with opened(server.url(path, scheme), backend=backend, buffer_frames=2) as stream:
        for item in itertools.islice(stream, 200):
            items.append(item)
            if len(items) > 8 and sum(left_out(items)) > 0:
                break
            server.closing.wait(0.05)  # two and a half frames
    assert sum(left_out(items)) > 0
    assert steps(items) == [(1 + count) % 24 for count in left_out(items)]


def test_what_was_lost_on_the_way_is_counted(server):
    with opened(server.url(), keep="all") as stream:
        items = list(itertools.islice(stream, 40))
        server.skipped = 5
        while not items[-1]["lost"]:
            items.append(next(iter(stream)))
    assert left_out(items) == [0] * (len(items) - 2) + [5]
    assert steps(items)[-1] == 6


def test_fewer_frames_a_second(server):
    with opened(server.url(), fps=10, keep="all") as stream:
        items = list(itertools.islice(stream, 12))
    assert steps(items) == [5] * 11
    assert left_out(items) == [0] * 11
    with opened(server.url("live.mjpg"), fps=20, items="frame", keep="all") as stream:
        assert isinstance(next(iter(stream)), np.ndarray)
    with opened(server.url("live.mjpg"), fps=20, keep="all") as stream:
        times = [float(item["time_seconds"]) for item in itertools.islice(stream, 20)]
    assert times[-1] - times[0] > 0.8  # and not 0.4, as the camera sends 50 a second


@pytest.mark.one_of_each
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("path", "scheme"), CAMERAS)
def test_connects_again_also_to_another_size(server, path, scheme, backend, caplog):
    with opened(server.url(path, scheme), backend=backend) as stream:
        items = [next(iter(stream))]
        for connection, size in enumerate([(96, 100), (32, 48)], 1):
            server.size = size
            server.drop()
            while items[-1]["connection"] < connection:
                items.append(next(iter(stream)))
    assert server.connected == 3
    assert {item["frame"].shape for item in items} == {(3, 48, 64)}
    assert {int(item["connection"]) for item in items} == {0, 1, 2}
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert all(f"127.0.0.1:{server.port}/{path}: " in text for text in warnings)


def test_a_camera_that_comes_back():
    with CameraServer() as server:
        stream = CameraStream(**QUICK, reconnect_tries=None)(server.url())
        items = iter(stream)
        assert next(items)["connection"] == 0
    with contextlib.closing(stream), CameraServer(port=server.port):
        assert next(item for item in items if item["connection"])["connection"] == 1


@pytest.mark.parametrize("tries", [0, 3])
def test_a_camera_that_stays_away_is_an_error(tries):
    with CameraServer() as server:
        stream = CameraStream(**QUICK, reconnect_tries=tries)(server.url())
    with contextlib.closing(stream):
        for _ in range(2):
            with pytest.raises(ConnectionError, match=f"{server.port}/live.ts: lost, .* after {tries} tries"):
                list(stream)


def test_a_camera_that_falls_silent_is_lost(server):
    with opened(server.url("stalling.ts"), timeout_seconds=1.5, keep="all") as stream:
        items = list(itertools.islice(stream, 40))
    assert [int(item["connection"]) for item in items] == [0] * 30 + [1] * 10


@pytest.mark.parametrize("backend", ["av", "opencv"])
@pytest.mark.parametrize("path", ["missing", "text", "sound", "silent", "stranger"])
def test_what_cannot_be_opened_is_an_error(server, path, backend):
    scheme = "nonsense" if path == "stranger" else "http"
    address = server.url(path, scheme).replace("127", "reader:secret@127", 1)
    with pytest.raises(ConnectionError) as raised:
        CameraStream(backend=backend, timeout_seconds=0.5 if path == "silent" else 60)(address)
    assert str(raised.value).startswith(f"{scheme}://reader:***@127.0.0.1:{server.port}/{path}: ")
    assert "secret" not in str(raised.value)


def test_bad_sources():
    for source, error in (("/dev/video97", OSError), (__file__, ValueError), (-1, ValueError), (97, ConnectionError)):
        with pytest.raises(error, match=str(source)):
            CameraStream()(source)
    for source in (("rtsp://a", 0, 5), True):
        with pytest.raises(TypeError, match="a camera is an index"):
            CameraStream()(source)
    with pytest.raises(ConnectionError, match="camera 97: cannot be opened: No such file"):
        CameraStream(backend="av")(97)


def readers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("camera ")]


HELD_UP = {"keep": "all", "buffer_frames": 1}
WAITING = {"reconnect_seconds": (FOREVER, FOREVER), "keep": "all", "buffer_frames": 64}


@pytest.mark.parametrize(("path", "options"), [("live.ts", {}), ("live.ts", HELD_UP), ("short.ts", WAITING)])
def test_close_ends_the_reader(server, path, options):
    with opened(server.url(path), **options) as stream:
        assert len(list(itertools.islice(stream, 20))) == 20
        (reader,) = readers()
    reader.join()
    assert list(stream) == []
    assert stream.read_into({"frame": np.empty((4, 3, 48, 64), np.uint8)}) == 0
    let_go_of = CameraStream(**QUICK)(server.url(path))
    assert len(readers()) == 1
    del let_go_of
    assert readers() == []


@pytest.mark.parametrize("backend", ["av", pytest.param("opencv", marks=pytest.mark.slow)])
def test_a_reader_held_up_by_its_library_ends_by_its_time_limit_and_close_does_not_wait(server, backend, monkeypatch):
    monkeypatch.setattr("stream_dataloader.streams.camera.live._LONGEST_JOIN_SECONDS", 0.1)
    with opened(server.url("stalling.ts"), backend=backend, keep="all", timeout_seconds=2) as stream:
        assert len(list(itertools.islice(stream, 25))) == 25
        (reader,) = readers()
        time.sleep(0.5)  # until it has read the last picture, and waits for one more
    assert reader.is_alive()
    reader.join()


def dataset_of(servers, batch_size, path="live.ts", **options):
    cameras = [server.url(path) for server in servers]
    open_camera = CameraStream(size=(24, 32), **{**QUICK, **options})
    return StreamDataset(cameras, open_camera, batch_size, time_steps=4, deterministic=False)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_two_cameras_are_two_lanes(workers):
    """Read for a while, then left; also by one worker, which reads them in turn."""
    with CameraServer(first=0) as one, CameraServer(first=10_000, rate=100) as other:
        loader = StreamDataLoader(dataset_of([one, other], 2), num_workers=workers)
        batches = list(itertools.islice(loader, 10))
        del loader
    assert {tuple(batch.data["frame"].shape) for batch in batches} == {(4, 2, 3, 24, 32)}
    assert all(batch.mask.all() for batch in batches)
    assert batches[0].source_index[0].sort().values.tolist() == [0, 1]
    for lane in range(2):
        steps_of = [(batch, t) for batch in batches for t in range(4)]
        items = [{name: leaf[t, lane].numpy() for name, leaf in batch.data.items()} for batch, t in steps_of]
        assert [int(batch.position[t, lane]) for batch, t in steps_of] == list(range(40))
        assert steps(items) == [(1 + count) % 24 for count in left_out(items)]
        far = items[-1]["pts_seconds"] - items[0]["pts_seconds"]
        rate = 50 if batches[0].source_index[0, lane] == 0 else 100
        assert round(far * rate) == 39 + sum(left_out(items))


def test_a_loader_names_what_it_cannot_open_and_what_was_lost():
    with CameraServer() as server:
        with pytest.raises(OpenError, match=r"source 0 .*/missing"):
            next(iter(StreamDataLoader(dataset_of([server], 1, path="missing"), num_workers=1)))
        batches = iter(StreamDataLoader(dataset_of([server], 1, reconnect_tries=1), num_workers=1))
        next(batches)
    with pytest.raises(ReadError, match=r"source 0 .*/live\.ts"):
        list(batches)


def test_going_on_from_a_state_reads_what_comes_in_now(server):
    loader = StreamDataLoader(dataset_of([server], 1), num_workers=1)
    last = list(itertools.islice(loader, 5))[-1]
    state = loader.state_dict()
    loader = StreamDataLoader(dataset_of([server], 1), num_workers=1)
    loader.load_state_dict(state)
    batch = next(iter(loader))
    assert batch.position[0, 0] == last.position[-1, 0] + 1
    assert batch.data["time_seconds"][0, 0] > last.data["time_seconds"][-1, 0]
