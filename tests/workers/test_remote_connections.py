"""Connections of workers on other machines, without Ray: frames arrive whole and in order; strangers stay outside."""

import random
import socket
import sys
import threading

import numpy as np
import pytest
import torch
from helpers import soon

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader._engine.reading.activity import Meters, WorkerStatus
from stream_dataloader._engine.remote.frames import Connection
from stream_dataloader._engine.remote.mail import RemoteMail
from stream_dataloader._engine.remote.messages import Reports, dumps_home, loads
from stream_dataloader._engine.schedule.rules import deal_lanes
from stream_dataloader._engine.workers.channel import CLOSE, READY


@pytest.fixture
def pair():
    """Two ends of a TCP connection with little room."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
    ends = Connection(one), Connection(other)
    yield ends
    for end in ends:
        end.close()


def test_frames_of_any_size_arrive_whole_and_in_order(pair):
    one, other = pair
    rng = random.Random(0)
    sent = [
        [rng.randbytes(rng.choice([0, 1, 100, 9_000])) for _ in range(rng.choice([0, 1, 3, 100]))] for _ in range(20)
    ]
    threading.Thread(target=lambda: [one.send(frame) for frame in sent], daemon=True).start()
    assert [[bytes(buffer) for buffer in other.receive()] for _ in sent] == sent


def test_a_connection_that_breaks_in_the_middle_of_a_frame_ends_both_sides(pair):
    one, other = pair
    sender = threading.Thread(target=one.send, args=([bytes(10_000_000)],), daemon=True)
    sender.start()
    other.receive_bytes(1000)
    other.close()
    sender.join(10)
    assert not sender.is_alive(), "the sender still waits for room"
    with pytest.raises(EOFError):
        one.receive()
    one.send([b"into nothing"])


def test_closing_wakes_the_thread_that_receives(pair):
    one, _ = pair

    def receive():
        with pytest.raises(EOFError):
            one.receive()

    receiver = threading.Thread(target=receive, daemon=True)
    receiver.start()
    one.close()
    receiver.join(10)
    assert not receiver.is_alive()


@pytest.mark.parametrize(
    "tensor", [torch.arange(6.0).reshape(2, 3).T, torch.tensor(3), torch.ones(3, dtype=torch.bfloat16)]
)
def test_tensors_and_arrays_arrive_as_they_were_and_may_be_written_to(tensor):
    message = dumps_home({"tensor": tensor, "array": np.arange(5)})
    assert len(message) == sum(map(len, message.buffers))
    found = loads([bytearray(buffer) for buffer in message.buffers])
    assert found["tensor"].dtype == tensor.dtype
    assert torch.equal(found["tensor"], tensor)
    found["array"] += 1
    found["tensor"] += 1


def new_reports(readers):
    status, meters = WorkerStatus(readers, shared=False), Meters(2, shared=False)
    return {number: Reports(number, status, meters) for number in range(2)}, status, meters


@pytest.fixture
def mail():
    readers = deal_lanes(4, 2)
    reports, status, meters = new_reports(readers)
    mail = RemoteMail("127.0.0.1", reports, None)
    mail.status, mail.meters, mail.readers = status, meters, readers
    yield mail
    mail.close()


@pytest.mark.parametrize("hello", [b"GET / HTTP/1.1\r\n" * 9, b"\0" * 36, b"", b"short"])
def test_strangers_are_turned_away_and_hold_up_nobody(mail, hello):
    with socket.create_connection((mail.address.host, mail.address.port)) as stranger:
        stranger.sendall(hello)
        if len(hello) < 36:
            stranger.shutdown(socket.SHUT_WR)
        assert mail.get(0.05) is None
        stranger.settimeout(10)
        with pytest.raises((ConnectionResetError, AssertionError)):
            assert stranger.recv(1)
    assert not mail.processes


def test_a_worker_that_comes_late_gets_what_was_sent_before_and_reports(mail):
    mail.send(1, 5)
    mail.send(1, CLOSE)
    end = mail.address.connect(1)
    reports, status, meters = new_reports(mail.readers)
    status.working[1], status.reading[3] = 9, 4
    meters.of(1).opened(1, 3, ahead=False)
    end.send(dumps_home((123, "there", "ab")).buffers)
    end.send([reports[1].make(), *dumps_home((READY,)).buffers])
    assert mail.get(10) == (1, (READY,))
    end.send([reports[1].make()])  # a sign of life
    assert mail.get(0.1) is None
    assert (mail.processes[1].pid, mail.processes[1].host) == (123, "there")
    assert (mail.status.working[1], mail.status.reading[3], mail.meters.stats()[1].opened) == (9, 4, 1)
    assert [loads(end.receive()) for _ in range(2)] == [5, CLOSE]
    end.close()
    assert soon(lambda: mail.get(0.1) is None and mail.broken == {1}, 10)


def test_another_worker_that_takes_the_place_of_one_gets_its_messages(mail):
    mail.send(0, 5)
    first = mail.address.connect(0)
    assert loads(first.receive()) == 5
    mail.expect(0)
    with pytest.raises(EOFError):
        first.receive()
    second = mail.address.connect(0)
    assert loads(second.receive()) == 5
    assert not mail.broken
    first.close()
    second.close()


def test_a_token_of_other_workers_does_not_let_in(mail):
    end = mail.address._replace(token=bytes(32)).connect(0)
    with pytest.raises(EOFError):
        end.receive()
    end.close()
    assert mail.get(0.05) is None


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"multiprocessing_context": "spawn"}, ValueError, 'multiprocessing_context is .* worker_method="ray"'),
        ({"ray_remote_args": {"max_retries": 3}}, ValueError, "max_retries, which the loader sets itself"),
        ({"ray_remote_args": 2}, TypeError, "must be a dict"),
        ({"ray_remote_args": {"num_cpus": 1}, "worker_method": "thread"}, ValueError, 'needs worker_method="ray"'),
    ],
)
def test_options_that_actors_cannot_have_are_refused(options, error, text):
    dataset = StreamDataset([3] * 4, range, 2, time_steps=1, deterministic=False)
    with pytest.raises(error, match=text):
        StreamDataLoader(dataset, 2, **({"worker_method": "ray"} | options))


def test_without_ray_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install .stream-dataloader\[ray\]"):
        StreamDataLoader(StreamDataset([3] * 4, range, 2, time_steps=1), 2, worker_method="ray")
