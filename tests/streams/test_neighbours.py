"""Folders of ours where another user of the machine was first: what he left is neither read nor written through."""

import fcntl
import os
import pathlib
import stat
import tempfile

import pytest
from file_server import serving

from stream_dataloader import stores
from stream_dataloader.streams.cache import FileCache, keep_tables, kept_tables
from stream_dataloader.streams.cache.own_folder import lock

NEIGHBOUR = 65534

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user"),
    pytest.mark.usefixtures("tries_follow_at_once"),
]


def as_neighbour(task):
    """What a task returns, as text, that another, unprivileged user does in a process of its own."""
    out, into = os.pipe()
    if not (child := os.fork()):
        try:
            os.setgroups([])
            os.setgid(NEIGHBOUR)
            os.setuid(NEIGHBOUR)
            os.umask(0)
            os.write(into, repr(task()).encode())
        finally:
            os._exit(0)
    os.close(into)
    os.waitpid(child, 0)
    with open(out) as told:
        return told.read()


@pytest.fixture
def everyones(tmp_path_factory):
    """A folder that all users may write to, as /scratch is."""
    folder = tmp_path_factory.mktemp("everyones")
    above = pathlib.Path(tempfile.gettempdir())
    for path in [path for path in (folder, *folder.parents) if above in path.parents]:  # deeper with several processes
        path.chmod(path.stat().st_mode | 0o755)
    folder.chmod(0o1777)
    return folder


@pytest.fixture
def precious(tmp_path):
    (file := tmp_path / "precious").write_text("precious")
    file.chmod(0o600)
    yield file
    assert file.read_text() == "precious"


@pytest.fixture
def server():
    with serving() as found:
        found.put("a.npy", b"genuine")
        yield found


def fetched(cache, url):
    with cache.open(url) as file:
        return pathlib.Path(file.path).read_bytes()


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "lock")
    for shared in (True, False):
        lock(str(tmp_path / "lock"), shared=shared).close()


def entry_of(cache, url):
    return cache._entry(url)._directory


def planted(folder, name, text="planted", link=None):
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, name)
    os.symlink(link, path) if link else pathlib.Path(path).write_text(text)
    if not link:
        os.utime(path, (4e9, 4e9))


def test_a_cache_that_others_may_write_to_is_refused_before_anything_is_asked(server, everyones):
    cache, url = FileCache(directory=everyones), f"{server.url}/a.npy"
    with pytest.raises(PermissionError, match=r"others may write to it \(mode 1777\).*shared=True"):
        fetched(cache, url)
    as_neighbour(lambda: planted(everyones / "files", "x"))
    with pytest.raises(
        PermissionError, match=r"files cannot be used: it is user nobody's, and this process is user root"
    ):
        fetched(FileCache(directory=everyones / "files"), url)
    assert not server.count("GET")


@pytest.mark.parametrize(("name", "link"), [("00-a.npy", False), ("part", True), ("lock", True)])
def test_what_a_neighbour_left_in_an_entry_is_not_used(server, everyones, precious, name, link):
    cache, url = FileCache(directory=everyones / "mine"), f"{server.url}/a.npy"
    (everyones / "mine").mkdir(0o700)
    os.makedirs(entry := entry_of(cache, url))
    planted(entry, name, link=str(precious) if link else None)
    os.chown(entry, NEIGHBOUR, NEIGHBOUR)
    with pytest.raises(PermissionError, match="it is user nobody's"):
        fetched(cache, url)


@pytest.mark.parametrize("name", ["part", "lock", "00-a.npy"])
def test_no_link_is_followed_where_users_share_a_cache(server, everyones, precious, name):
    cache, url = FileCache(directory=everyones, shared=True), f"{server.url}/a.npy"
    as_neighbour(lambda: planted(entry_of(cache, url), name, link=str(precious)))
    if name == "part":
        assert fetched(cache, url) == b"genuine"
    else:
        with pytest.raises(OSError, match="symbolic links"):
            fetched(cache, url)


def test_what_is_fetched_is_for_this_user_alone(server, tmp_path):
    cache = FileCache(directory=tmp_path / "cache")
    with cache.open(f"{server.url}/a.npy") as file:
        modes = [stat.S_IMODE(os.stat(path).st_mode) for path in (file.path, os.path.dirname(file.path))]
    modes.append(stat.S_IMODE((tmp_path / "cache").stat().st_mode))
    assert modes == [0o600, 0o700, 0o700]


def test_users_who_trust_each_other_share_what_one_of_them_fetched(server, everyones, monkeypatch):
    url = f"{server.url}/a.npy"
    assert as_neighbour(lambda: fetched(FileCache(directory=everyones, shared=True), url)) == repr(b"genuine")
    asked = server.count("GET")
    monkeypatch.setenv("STREAM_DATALOADER_CACHE_SHARED", "1")
    assert fetched(FileCache(directory=everyones), url) == b"genuine"
    assert server.count("GET") == asked


def test_a_lock_that_a_neighbour_holds_is_an_error_that_names_him(server, everyones):
    cache, url = FileCache(directory=everyones, shared=True, wait_seconds=0.2), f"{server.url}/a.npy"
    fetched(cache, url)
    (held,) = pathlib.Path(entry_of(cache, url)).glob("*a.npy")
    out, into = os.pipe()
    until, end = os.pipe()
    if not (child := os.fork()):
        os.setuid(NEIGHBOUR)
        os.close(end)
        fcntl.flock(os.open(held, os.O_RDONLY), fcntl.LOCK_EX)
        os.write(into, b"1")
        os.read(until, 1)
        os._exit(0)
    os.read(out, 1)
    try:
        with pytest.raises(TimeoutError, match=rf"is locked by process {child} of user nobody, which made no progress"):
            fetched(cache, url)
    finally:
        for fd in (out, into, until, end):
            os.close(fd)
        os.waitpid(child, 0)


def test_pack_goes_into_no_folder_of_a_neighbour(everyones, precious):
    path = everyones / "clips.store"
    as_neighbour(lambda: planted(f"{path}.partial", "lock", link=str(precious)))
    with pytest.raises(PermissionError, match=r"clips.store.partial cannot be used: it is user nobody's"):
        stores.pack(([3], range), path)
    stores.pack(([3], range), everyones / "other.store")
    assert stat.S_IMODE((everyones / "other.store").stat().st_mode) == 0o755


def test_tables_are_neither_kept_nor_read_where_others_may_write(everyones, monkeypatch):
    monkeypatch.setenv("STREAM_DATALOADER_CACHE", str(everyones / "cache"))
    keep_tables("probes", "name", {"keys": [1]})
    assert kept_tables("probes", "name") is not None
    (everyones / "cache" / "probes").chmod(0o777)
    assert kept_tables("probes", "name") is None
