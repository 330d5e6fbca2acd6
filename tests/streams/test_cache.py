"""Remote files through the local cache: real servers on loopback, real processes, some of them killed."""

import contextlib
import gc
import http.server
import itertools
import logging
import multiprocessing
import os
import pathlib
import pickle
import shutil
import signal
import sys
import threading
import time
import types
import zipfile
from concurrent.futures import ThreadPoolExecutor

import fsspec
import numpy as np
import pytest
from file_server import serving
from fsspec.implementations.memory import MemoryFileSystem
from helpers import PATIENCE

from stream_dataloader.streams.cache import remote
from stream_dataloader.streams.cache.file_cache import FileCache, is_url, open_local
from stream_dataloader.streams.cache.own_folder import LocalFile, Wait, lock
from stream_dataloader.streams.cache.remote import SizeError

fork = multiprocessing.get_context("fork")


@pytest.fixture
def cache(tmp_path):
    return FileCache(directory=tmp_path / "cache", timeout_seconds=PATIENCE)


pytestmark = pytest.mark.usefixtures("tries_follow_at_once")


def read(cache, url):
    with cache.open(url) as file:
        return pathlib.Path(file.path).read_bytes()


def with_limit(cache, limit):
    return FileCache(directory=cache.directory, size_limit_bytes=limit)


@pytest.fixture
def asking(cache):
    """Asks the server each time."""
    return FileCache(directory=cache.directory, check_seconds=0)


def wait_for_part(server, cache):
    """Wait until a slow download has begun to be written."""
    assert server.half_sent.wait(PATIENCE)
    while "part" not in stored(cache):  # it was sent, and is not written yet
        time.sleep(0.01)


def stored(cache):
    """What is in the cache, by name."""
    paths = pathlib.Path(cache.directory).glob("*/*")
    return sorted(path.name.partition("-")[2] or path.name for path in paths if path.name != "lock")


def run(target, *args):
    process = fork.Process(target=target, args=args)
    process.start()
    return process


def join(*processes):
    for process in processes:
        process.join(PATIENCE)
        assert process.exitcode is not None, "it hangs"
    return [process.exitcode for process in processes]


def test_what_is_no_url_is_a_local_path(tmp_path, monkeypatch):
    urls = "https://host/a.mp4 S3://bucket/a zip://a.npy::http://host/b.zip simplecache::s3://bucket/a"
    assert all(map(is_url, urls.split()))
    assert not is_url(0)
    monkeypatch.setenv("STREAM_DATALOADER_CACHE", str(tmp_path / "never made"))
    for path in ("a.npy", "/a/b.npy", "C:\\a.npy", "rtsp://host/live", "udp://@239.0.0.1:1", "a://b", "odd::name", ""):
        assert open_local(path).path == path
    assert open_local(tmp_path / "a.npy").path == str(tmp_path / "a.npy")
    assert open_local("file:///a/b.npy").path == "/a/b.npy"
    with open_local("a.npy") as file:
        pass
    file.close()  # a second time
    assert not (tmp_path / "never made").exists()


def test_a_file_is_fetched_once_and_asked_for_as_often_as_wanted(server, cache, asking):
    url = server.put("clip.one.mp4", b"x" * 1000)
    for _ in range(3):
        with cache.open(url) as file:
            assert file.path.endswith("-clip.one.mp4")
            assert pathlib.Path(file.path).read_bytes() == b"x" * 1000
    assert (server.count("GET"), server.count("HEAD")) == (1, 1)
    read(asking, url)
    assert (server.count("GET"), server.count("HEAD")) == (1, 2)
    (kept,) = pathlib.Path(cache.directory).glob("*/*clip.one.mp4")
    os.utime(kept, (1, 1))  # it was asked for long ago
    for _ in range(2):
        read(cache, url)
    assert (server.count("GET"), server.count("HEAD")) == (1, 3)
    read(cache, server.put("clip.one.mp4?part=2", b""))
    assert stored(cache) == ["clip.one.mp4", "clip.one.mp4"]


def test_a_file_counts_as_asked_for_when_it_came_whatever_its_time_on_the_server(tmp_path, monkeypatch):
    old = tmp_path / "old.bin"
    old.write_bytes(b"old")
    os.utime(old, (1, 1))
    monkeypatch.setattr(MemoryFileSystem, "get_file", lambda _, __, path, **___: shutil.copy2(old, path))
    with fsspec.open("memory://old.bin", "wb") as file:
        file.write(b"old")
    cache = FileCache(directory=tmp_path / "cache")
    assert read(cache, "memory://old.bin") == b"old"
    (kept,) = pathlib.Path(cache.directory).glob("*/*-old.bin")
    assert kept.stat().st_mtime > time.time() - PATIENCE


def test_a_changed_file_is_fetched_anew_and_the_old_one_stays_while_it_is_read(server, asking):
    url = server.put("a.bin", b"old")
    old = asking.open(url)
    server.put("a.bin", b"new")
    assert read(asking, url) == b"new"
    assert pathlib.Path(old.path).read_bytes() == b"old"
    assert read(asking, url) == b"new"
    assert server.count("GET") == 2
    old.close()
    assert read(asking, url) == b"new"
    assert not os.path.exists(old.path)


def fetch(cache, url, expected):
    gc.collect()  # in a fork, of the parent's client too, if nobody held it
    assert read(cache, url) == expected


def test_eight_processes_fetch_a_file_once(server, cache):
    content = os.urandom(3_000_000)
    url = server.put("a.bin", content)
    server.plan.append("slow")
    processes = [run(fetch, cache, url, content) for _ in range(8)]
    wait_for_part(server, cache)
    server.go_on.set()
    assert join(*processes) == [0] * 8
    assert (server.count("GET"), server.count("HEAD")) == (1, 2)  # of a large file also after its bytes


def test_others_go_on_when_the_fetching_process_is_killed(server, cache):
    content = os.urandom(200_000)
    url = server.put("a.bin", content)
    server.plan.append("slow")
    first = run(read, cache, url)
    wait_for_part(server, cache)
    assert stored(cache) == ["part"]
    others = [run(fetch, cache, url, content) for _ in range(2)]
    os.kill(first.pid, signal.SIGKILL)
    assert join(first, *others) == [-signal.SIGKILL, 0, 0]
    assert server.count("GET") == 2
    assert stored(cache) == ["a.bin"]


def interrupted(cache, url):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
    try:
        read(cache, url)
    except KeyboardInterrupt:
        assert {thread.name for thread in threading.enumerate()} == {"MainThread", "fsspecIO"}
        os._exit(7)


def test_ctrl_c_in_the_middle_of_a_download_leaves_nothing(server, cache):
    server.plan.append("slow")
    process = run(interrupted, cache, server.put("a.bin", b"x" * 200_000))
    wait_for_part(server, cache)
    os.kill(process.pid, signal.SIGINT)
    assert join(process) == [7]
    assert stored(cache) == []


def interrupted_before_the_answer(cache, url):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        read(cache, url)
    assert read(cache, url) == b"x" * 1000
    time.sleep(1.0)  # for the answer to the first request, if somebody still waits for it


def test_after_ctrl_c_nothing_is_written_when_the_server_answers_at_last(server, cache):
    url = server.put("a.bin", b"x" * 1000)
    server.plan.append("late")
    process = run(interrupted_before_the_answer, cache, url)
    assert server.half_sent.wait(PATIENCE)
    os.kill(process.pid, signal.SIGINT)
    while stored(cache) != ["a.bin"]:
        assert process.is_alive(), "it ended without the file"
        time.sleep(0.01)
    server.go_on.set()
    assert join(process) == [0]
    assert stored(cache) == ["a.bin"]


def test_sixty_files_take_two_requests_each_over_one_connection(server, cache):
    for index in range(60):
        read(cache, server.put(f"{index}.bin", bytes([index])))
    assert (len(server.requests), server.connected) == (120, 1)


def test_a_forked_process_has_a_connection_of_its_own_and_leaves_its_parents(server, asking):
    read(asking, server.put("a", b"a"))
    assert join(run(fetch, asking, server.put("child", b"child"), b"child")) == [0]
    assert read(asking, server.put("b", b"b")) == b"b"
    assert (server.count("GET"), server.connected) == (3, 2)


def test_a_file_of_another_version_is_made_anew_and_a_failed_one_is_not_kept(cache):
    def fail(path):
        pathlib.Path(path).write_bytes(b"half")
        raise ValueError("broke off")

    for version in ("v1", "v2"):
        for _ in range(2):
            with cache.made("a", version, 10, lambda path, text=version: pathlib.Path(path).write_text(text)) as file:
                assert pathlib.Path(file.path).read_text() == version
    with pytest.raises(ValueError, match="broke off"):
        cache.made("b", "v1", 10, fail)
    assert stored(cache) == ["a"]


def test_part_of_a_file_is_fetched_past_the_cache(server, cache):
    url = server.put("a.bin", b"x" * 1000)
    server.plan += ["cut", 503]
    content, version, size = cache.remote(url).part(100, 50)
    assert (content, size) == (b"x" * 50, 1000)
    assert version == cache.remote(url).ask()[0]
    assert not os.path.exists(cache.directory)


@pytest.mark.parametrize(
    ("wrong", "start", "told"),
    [
        ("whole", 100, "answered a request for a part with the status 200; use one that knows ranges"),
        ("whole", 0, "more bytes come than the 50 that were asked for"),
        ("endless", 100, "more bytes come than the 50 that were asked for"),
        ("endless", 0, "more bytes come than the 50 that were asked for"),
        ("short", 100, "49 bytes came, and 50 were asked for"),
    ],
)
def test_a_server_sends_as_much_as_was_asked_for(server, cache, wrong, start, told):
    url = server.put("a.bin", b"x" * (64 << 20))
    server.plan += [wrong]
    with pytest.raises(SizeError, match=told):
        cache.remote(url).part(start, 50)
    assert server.count("GET") == 1
    assert server.sent["a.bin"] <= 64 << 20  # of 4 GiB
    server.plan += ["whole"]
    assert cache.remote(url).part(0, 64 << 20)[0] == server.files["a.bin"]  # a part that is the whole


def test_the_files_not_used_for_longest_make_room(server, cache):
    small = with_limit(cache, 250)
    a, b, c, d = (server.put(name, name.encode() * 100) for name in "abcd")
    for url in (a, b, a, c):
        small.open(url).close()  # it counts as used, also where nobody reads it and the file system notes that
    assert stored(small) == ["a", "c"]
    with small.open(a):  # the oldest, but in use
        read(small, c)
        read(small, d)
        assert stored(small) == ["a", "d"]
        assert len(os.listdir(cache.directory)) == 2
    read(small, b)
    assert stored(small) == ["b", "d"]
    read(with_limit(cache, 300), c)
    assert stored(small) == ["b", "c", "d"]  # the limit itself may be filled
    (kept,) = pathlib.Path(cache.directory).glob("*/*-c")
    kept.unlink()
    assert read(small, a) == b"a" * 100
    assert server.count("GET", "/a") == 2
    for ask in (small.open, lambda url: small.made(url, "v1", 251, os.remove)):
        with pytest.raises(ValueError, match="has 251 bytes, and the cache's limit is 250; raise size_limit_bytes or"):
            ask(server.put("e", b"e" * 251))
    assert "e" not in stored(small)


def test_a_file_is_let_go_of_by_its_own_process_also_when_it_is_dropped(server, cache):
    small = with_limit(cache, 150)
    file = small.open(server.put("a", b"a" * 100))
    assert join(run(LocalFile.close, file)) == [0]  # a fork's
    read(small, server.put("b", b"b" * 100))
    assert stored(small) == ["a", "b"]
    del file
    read(small, server.put("c", b"c" * 100))
    assert stored(small) == ["c"]


def churn(cache, urls, seed):
    for index in np.random.default_rng(seed).integers(len(urls), size=30):
        with cache.open(urls[index]) as file:
            assert pathlib.Path(file.path).read_bytes() == bytes([index]) * 1000


def test_processes_that_drive_out_each_others_files_read_what_they_asked_for(server, cache):
    small = with_limit(cache, 4000)
    urls = [server.put(f"{index}.bin", bytes([index]) * 1000) for index in range(12)]
    assert join(*(run(churn, small, urls, seed) for seed in range(4))) == [0] * 4
    read(small, urls[0])
    read(small, server.put("last.bin", b"z"))
    assert sum(path.stat().st_size for path in pathlib.Path(cache.directory).glob("*/*-*")) <= 4000


def test_settings_come_from_the_environment(server, tmp_path, monkeypatch):
    url = server.put("a.bin", b"a" * 100)
    monkeypatch.delenv("STREAM_DATALOADER_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    home = {"HOME": ".cache/stream_dataloader", "XDG_CACHE_HOME": "stream_dataloader", "STREAM_DATALOADER_CACHE": "."}
    for variable, below in home.items():
        monkeypatch.setenv(variable, str(tmp_path / variable))
        assert tmp_path / variable / below / "files" in pathlib.Path(open_local(url).path).parents
    for limit, message in (("50", "the cache's limit is 50"), ("1 GB", "STREAM_DATALOADER_CACHE_BYTES is '1 GB'")):
        monkeypatch.setenv("STREAM_DATALOADER_CACHE_BYTES", limit)
        with pytest.raises(ValueError, match=message):
            open_local(server.put("b.bin", b"b" * 100))


def test_a_cache_is_a_value_that_can_be_sent(tmp_path):
    cache = FileCache(directory=tmp_path, storage_options={"s3": {"secret": "x"}})
    assert pickle.loads(pickle.dumps(cache)) == cache
    assert hash(cache) == hash(pickle.loads(pickle.dumps(cache)))
    assert "secret" not in repr(cache)


AZURE = "AccountName={};AccountKey={}"

#: URLs, options, and how many entries a cache has after each was stored.
PLACES = [
    ("a", {"memory": {"token": "old"}}, 1),
    ("a", {"memory": {"client_kwargs": {"aws_session_token": "t"}, "timeout": 3}}, 1),
    ("a", {"http": {"headers": {"Authorization": "b"}}}, 1),
    ("a", {"memory": {"endpoint_url": "http://elsewhere", "token": "a"}}, 2),
    ("a", {"memory": {"client_kwargs": {"endpoint_url": "http://another"}}}, 3),
    ("a", {"github": {"org": "o", "repo": "r", "sha": "main"}}, 4),
    *(("a", {"abfs": {"connection_string": AZURE.format("mine", key)}}, 5) for key in ("old", "new")),
    ("a", {"abfs": {"connection_string": AZURE.format("other", "old")}}, 6),
    *((f"https://{user}@host/a", {}, 7 + (user == "you:two")) for user in ("me:one", "me:two", "you:two")),
]


def test_credentials_that_change_leave_a_file_its_name_and_another_place_does_not(tmp_path):
    for url, options, entries in PLACES:
        cache = FileCache(directory=tmp_path, storage_options=options)
        cache.made(url, "v", 1, lambda path: pathlib.Path(path).touch()).close()
        assert len(os.listdir(tmp_path)) == entries, (url, options)


def test_a_directory_that_cannot_be_written_is_named(server, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    cache = FileCache(directory=tmp_path / "file" / "cache")
    with pytest.raises(NotADirectoryError, match=r"STREAM_DATALOADER_CACHE .*file/cache"):
        cache.open(server.put("a.bin", b"a"))


def test_what_is_not_there_is_said_at_once(server, cache):
    with pytest.raises(FileNotFoundError, match=r"http://.*/no\.bin"):
        cache.open(f"{server.url}/no.bin")
    assert len(server.requests) == 2  # HEAD, then GET
    with pytest.raises(FileNotFoundError, match="memory://nothing"):
        cache.open("memory://nothing")
    with pytest.raises(ValueError, match="nosuch://a"):
        cache.open("nosuch://a")


@pytest.mark.parametrize(
    ("status", "kind"), [(403, PermissionError), (410, FileNotFoundError), (418, OSError), (500, ConnectionError)]
)
def test_what_the_server_answers_is_said(server, cache, status, kind):
    url, server.always = server.put("a.bin", b"a"), status
    with pytest.raises(kind, match=rf"{url} .*{status}"):
        cache.open(url)
    assert len(server.requests) == (8 if status == 500 else 2)


def test_what_may_go_better_is_tried_again_and_not_for_ever(server, cache):
    url = server.put("a.bin", b"a" * 1000)
    server.plan += [503, "cut"]
    assert read(cache, url) == b"a" * 1000
    assert server.count("GET") == 3
    server.plan += ["cut"] * 10
    with pytest.raises(ConnectionError, match=r"/b\.bin could not be fetched \(4 tries in .*Not enough data"):
        cache.open(server.put("b.bin", b"b" * 1000))
    assert stored(cache) == ["a.bin"]


def test_a_body_whose_end_nothing_marks_is_believed_when_two_agree(server, cache):
    url = server.put("a.bin", b"a" * 1000)
    server.endings = [0, 600, 0]  # each other one is of the question for its size
    assert read(cache, url) == b"a" * 1000
    server.endings = [0, 100, 0, 200, 0, 300, 0, 400]
    with pytest.raises(ConnectionError, match=r"b.bin could not be .* 300 bytes arrived, then 400, and the server gi"):
        cache.open(server.put("b.bin", b"a" * 1000))
    server.endings = [0] * 8
    with pytest.raises(ConnectionError, match=r"c.bin could not be .* 0 bytes arrived, then 0, and the server gives"):
        cache.open(server.put("c.bin", b"a" * 1000))


def test_a_server_that_is_gone_is_an_error_or_the_copy_is_read(cache, asking, caplog):
    with serving() as server:
        url = server.put("a.bin", b"abc")
        read(cache, url)
    with pytest.raises(ConnectionError, match=r"/b\.bin could not be fetched \(4 tries "):
        cache.open(f"{server.url}/b.bin")
    with caplog.at_level(logging.WARNING, "stream_dataloader"):
        assert read(asking, url) == b"abc"
    assert "its copy in the cache is read instead" in caplog.text


def test_a_server_that_is_silent_is_an_error_in_time(server, cache):
    url, server.always = server.put("a.bin", b"abc"), "silent"
    with pytest.raises(ConnectionError, match=r"/a\.bin could not be fetched \(1 tries"):
        FileCache(directory=cache.directory, timeout_seconds=0.5).open(url)


def test_missing_packages_are_named(server, cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ImportError, match=r"gs://bucket/a needs a package that is not installed: .*gcsfs"):
        cache.open("gs://bucket/a")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ImportError, match=r"not installed: .*fsspec.* \(pip install 'stream-dataloader\[remote\]'"):
        cache.open(server.put("a.bin", b"a"))


def test_chained_urls(server, cache, tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("deep/clip.bin", b"inside" * 1000)
    url = server.put("a.zip", (tmp_path / "a.zip").read_bytes())
    with cache.open(f"zip://deep/clip.bin::{url}") as file:
        assert pathlib.Path(file.path).read_bytes() == b"inside" * 1000
        assert file.path.endswith("-clip.bin")
    assert read(cache, f"zip://deep/clip.bin::file://{tmp_path}/a.zip") == b"inside" * 1000
    with pytest.raises(IsADirectoryError, match="is a directory; give the files in it"):
        cache.open(f"zip://deep::file://{tmp_path}/a.zip")


@pytest.mark.parametrize("given", ["environment", "options"])
def test_s3_has_one_client_and_two_requests_a_file(server, tmp_path, monkeypatch, given):
    from aiobotocore.session import AioSession

    clients, make = [], AioSession.create_client
    monkeypatch.setattr(AioSession, "create_client", lambda *args, **more: clients.append(1) or make(*args, **more))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    if given == "environment":
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    options = {"s3": {"endpoint_url": server.url}} if given == "options" else {}
    cache = FileCache(directory=tmp_path, storage_options=options)
    contents = [os.urandom(1_000_000), b"b", b"c", b"d"]
    for index, content in enumerate(contents):
        server.put(f"clips/{index}", content)
    with ThreadPoolExecutor() as threads:
        assert list(threads.map(lambda index: read(cache, f"s3://clips/{index}"), range(4))) == contents
    assert len(clients) == 1
    assert (server.count("GET"), server.count("HEAD")) == (4, 4)
    asking = FileCache(directory=tmp_path, check_seconds=0, storage_options=options)
    assert read(asking, "s3://clips/0") == contents[0]
    assert server.count("GET") == 4
    server.put("clips/0", b"changed")
    assert read(asking, "s3://clips/0") == b"changed"
    with pytest.raises(FileNotFoundError, match=r"s3://clips/none is not there"):
        cache.open("s3://clips/none")


def test_who_waits_for_a_lock_on_a_file_that_is_deleted_notices(tmp_path):
    path = str(tmp_path / "lock")
    first = lock(path, create=True)
    assert lock(path) is None
    assert lock(path, shared=True) is None
    got = []
    waiting = threading.Thread(target=lambda: got.append(lock(path, create=True, wait=Wait(60))))
    waiting.start()
    os.unlink(path)
    first.close()
    waiting.join()
    assert os.path.exists(path)
    assert lock(path) is None
    got[0].close()
    with lock(path, shared=True), lock(path, shared=True):
        pass
    with lock(path) as held:
        wait = Wait(0.05, itertools.count().__next__)
        for _ in range(10):  # of 0.01 s each: the holder makes progress
            wait.once(path, held.fd)
        with pytest.raises(TimeoutError, match=r"made no progress for 0\.05 s"):
            lock(path, wait=Wait(0.05))
    assert lock(str(tmp_path / "none")) is None
    first.close()


def answering(pieces, length, wait=0.0):
    """A server that answers each GET with some pieces, and HEAD with the length it is told to."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self):
            self.send_response(200)
            self.send_header(*(("Content-Length", str(length)) if length else ("Transfer-Encoding", "chunked")))
            self.end_headers()

        def do_GET(self):
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            with contextlib.suppress(OSError):
                for piece in pieces:
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                    self.server.sent += len(piece)
                    if wait:
                        time.sleep(wait)
                self.wfile.write(b"0\r\n\r\n")

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.sent = 0
    return server


@contextlib.contextmanager
def served(*args, **options):
    server = answering(*args, **options)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{server.server_port}/a"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(("length", "error"), [(None, ValueError), (10, OSError)], ids=["no size", "a lie"])
def test_a_server_does_not_decide_how_much_is_fetched(tmp_path, length, error):
    pieces = [bytes(1 << 20)] * 64
    with served(pieces, length) as (server, url):
        with pytest.raises(error, match=r"limit is 1,048,576|more bytes arrive than the 10"):
            FileCache(directory=tmp_path, size_limit_bytes=1 << 20).open(url)
        assert server.sent < 4 * (16 << 20)  # what sockets hold, a try
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size]


def test_a_server_that_becomes_slow_is_left_however_fast_it_began(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(remote, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    arrival = remote._arrival(lambda _: None, 1000, 1.0)
    for now[0] in (0.5, 1.0):
        arrival.relative_update(1 << 20)
    now[0] = 2.5
    with pytest.raises(ConnectionError, match=r"10 bytes arrived in 1\.5 s, and min_bytes_per_second is 1,000"):
        arrival.relative_update(10)


def test_a_server_that_sends_a_byte_now_and_then_is_left(tmp_path):
    with served([b"x"] * 200, 200, wait=0.05) as (server, url):
        slow = FileCache(directory=tmp_path, timeout_seconds=0.5)
        with pytest.raises(OSError, match=r"bytes arrived in .* min_bytes_per_second is 1,000"):
            slow.open(url)
        with pytest.raises(OSError, match=r"bytes arrived in .* min_bytes_per_second is 1,000"):
            slow.remote(url).part(0, 200)
        assert server.sent < 8 * 100
    with served([b"x"] * 5, 5, wait=0.05) as (_, url):
        FileCache(directory=tmp_path, timeout_seconds=0.1, min_bytes_per_second=0).open(url).close()
