"""Two hosts, as network namespaces joined by a pair of virtual interfaces, of which one is cut off in mid-epoch."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time

import pytest
from helpers import PATIENCE, ROOT

SCRIPT = ROOT / "tests" / "trainers" / "two_hosts.py"


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Hosts:
    def __init__(self):
        number = os.getpid() % 10000
        self.names = [f"sdl-{number}-{i}" for i in range(2)]
        self.links = [f"sdl{number}v{i}" for i in range(2)]
        ip("link", "add", self.links[0], "type", "veth", "peer", "name", self.links[1])
        for i, (name, link) in enumerate(zip(self.names, self.links, strict=True)):
            ip("netns", "add", name)
            ip("link", "set", link, "netns", name)
            ip("-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")

    def cut(self, *, off):
        ip("-n", self.names[1], "link", "set", self.links[1], "down" if off else "up")

    def start(self, rank, *arguments):
        command = ["ip", "netns", "exec", self.names[rank], sys.executable, SCRIPT, rank, *arguments]
        environment = os.environ | {"MASTER": "10.77.0.1", "GLOO_SOCKET_IFNAME": self.links[rank]}
        return subprocess.Popen(list(map(str, command)), env=environment, stderr=subprocess.PIPE, text=True)

    def close(self):
        for name in self.names:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "delete", name)


@pytest.fixture
def hosts():
    if shutil.which("ip") is None:
        pytest.skip("there is no ip command")
    try:
        both = Hosts()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not allowed: {error.stderr.decode()}")
    yield both
    both.close()


def told(folder, processes):
    for process in processes:
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, errors
    return [json.loads((folder / f"seen.{rank}").read_text()) for rank in range(2)]


@pytest.mark.slow
def test_two_hosts_end_with_an_error_when_one_is_cut_off_and_go_on_from_a_checkpoint(hosts, tmp_path):
    whole = told(tmp_path, [hosts.start(rank, tmp_path, 0, 0) for rank in range(2)])
    assert [len(mine["seen"]) for mine in whole] == [60, 60]
    assert [mine["ending"] for mine in whole] == ["ended", "ended"]

    (tmp_path / "state.0.20").unlink()
    processes = [hosts.start(rank, tmp_path, 0.1, 0) for rank in range(2)]
    while not (tmp_path / "state.0.20").exists():
        time.sleep(0.05)
    hosts.cut(off=True)
    near, far = told(tmp_path, processes)
    assert near["ending"].startswith("rank 1 did not say if it has data for step 60 within 4 s")
    assert "the store of torch.distributed, through which ranks agree, did not answer within 4 s" in far["ending"]
    assert near["seen"] == whole[0]["seen"]
    assert far["seen"] == whole[1]["seen"][:40]

    hosts.cut(off=False)
    resumed = told(tmp_path, [hosts.start(rank, tmp_path, 0, 20) for rank in range(2)])
    assert [mine["seen"] for mine in resumed] == [mine["seen"][20:] for mine in whole]
