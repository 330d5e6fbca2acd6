"""LeRobot datasets of the Hugging Face Hub, from a small hub on this machine."""

import hashlib
import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from lerobot_data import write_v3

from stream_dataloader import StreamDataLoader, StreamDataset, stores

COMMIT = "c0ffee" * 6 + "abcd"
READS = """
import sys
from stream_dataloader import StreamDataLoader, StreamDataset, stores

if __name__ == "__main__":
    name, workers = sys.argv[1], int(sys.argv[2])
    sources, open_episode = stores.open(name, task=False)
    print(len(sources), open_episode.lengths.sum())
    if workers >= 0:
        for batch in StreamDataLoader(StreamDataset(sources, open_episode, 2, time_steps=4), workers):
            print(batch.data["action"][batch.mask].sum().item())
"""


class Hub(BaseHTTPRequestHandler):
    """A hub that has one dataset, `me/robot`, and counts what is fetched."""

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, *, body):
        folder, path = self.server.folder, self.path.partition("?")[0]
        files = [str(file.relative_to(folder)) for file in sorted(folder.rglob("*")) if file.is_file()]
        listed = [{"type": "file", "path": name, "size": 1, "oid": "0"} for name in files]
        siblings = [{"rfilename": name} for name in files]
        answers = {
            "/api/datasets/me/robot/revision/main": {"id": "me/robot", "sha": COMMIT, "siblings": siblings},
            f"/api/datasets/me/robot/tree/{COMMIT}": listed,
        }
        headers, name = {}, path.removeprefix(f"/datasets/me/robot/resolve/{COMMIT}/")
        if path in answers:
            content = json.dumps(answers[path]).encode()
        elif name in files:
            content = (folder / name).read_bytes()
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
            self.server.fetched[name] += body
        else:
            self.send_error(404)
            return
        self.send_response(200)
        for key, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(tmp_path):
    write_v3(tmp_path / "robot", (7, 4, 9), cameras=())
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.folder, server.fetched = tmp_path / "robot", Counter()
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def read(hub, tmp_path, programs):
    def run(name, workers=-1, **environment):
        url = f"http://127.0.0.1:{hub.server_port}"
        home = {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        done = programs(READS, name, workers, **(home | environment))
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_files_are_fetched_once_when_they_are_first_read(hub, read):
    read("hf://datasets/me/robot")
    assert all(name.startswith("meta/") for name in hub.fetched)
    sources, local = stores.open(hub.folder, task=False)
    batches = StreamDataLoader(StreamDataset(sources, local, 2, time_steps=4))
    expected = "".join(f"{batch.data['action'][batch.mask].sum().item()}\n" for batch in batches)
    expected = f"3 {local.lengths.sum()}\n{expected}"
    assert read("hf://datasets/me/robot@main", 2) == expected
    assert any(name.startswith("data/") for name in hub.fetched)
    assert max(hub.fetched.values()) == 1
    hub.shutdown()
    assert read("hf://datasets/me/robot", 0, HF_HUB_OFFLINE="1") == expected


@pytest.mark.parametrize("options", [{}, {"format": "lerobot"}, {"format": "memmap"}], ids=str)
def test_a_path_that_is_missing_here_is_not_asked_for_at_the_hub(tmp_path, monkeypatch, options):
    def asked(*_, **__):
        raise AssertionError("the Hub was asked")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("stream_dataloader.stores._base.hub._asked", asked)
    for path in ("me/robot", "me/robot@main", Path("me/robot")):
        with pytest.raises(FileNotFoundError, match=r"no store at me/robot.*is hf://datasets/me/robot"):
            stores.open(path, **options)


@pytest.mark.slow
def test_what_is_not_there_is_an_error_that_names_it(hub, read):
    with pytest.raises(AssertionError, match=r"OSError: .*me/other of the Hugging Face Hub"):
        read("hf://datasets/me/other")
    data = next(Path(hub.folder, "data").rglob("*.parquet"))
    data.unlink()
    with pytest.raises(AssertionError, match=data.name):
        read("hf://datasets/me/robot", 0)
    Path(hub.folder, "meta/info.json").unlink()
    with pytest.raises(AssertionError, match=r"no meta/info\.json"):
        read("hf://datasets/me/robot", HF_HOME=str(hub.folder / "elsewhere"))


def test_a_folder_here_comes_first(tmp_path, monkeypatch):
    write_v3(tmp_path / "me/robot", (3, 4), cameras=())
    monkeypatch.chdir(tmp_path)
    assert len(stores.open("me/robot").sources) == 2
