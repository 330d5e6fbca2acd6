"""Connections of workers on other machines, without Ray: frames arrive whole and in order; strangers stay outside."""

import random
import select
import socket
import struct
import sys

import numpy as np
import pytest
import torch
from helpers import soon

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader._engine.reading.activity import Meters, WorkerStatus
from stream_dataloader._engine.remote.frames import FrameSocket
from stream_dataloader._engine.remote.mail import RemoteMail
from stream_dataloader._engine.remote.messages import Pickled, Reports, dumps_home, loads
from stream_dataloader._engine.schedule.rules import deal_lanes
from stream_dataloader._engine.workers.channel import CLOSE, READY


@pytest.fixture
def pair():
    """Two ends of a TCP connection with little room."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
    ends = FrameSocket(one), FrameSocket(other)
    yield ends
    for end in ends:
        end.close()


def taken(end, count, sender=None):
    """The next frames, in time."""
    found = []

    def is_complete():
        if sender is not None:
            sender.flush()
        if (frame := end.take()) is not None:
            found.append(frame)
        return len(found) == count

    assert soon(is_complete, 10), f"only {len(found)} of {count} frames arrived"
    return found


def test_frames_of_any_size_arrive_whole_and_in_order(pair):
    one, other = pair
    rng = random.Random(0)
    sent = [
        [rng.randbytes(rng.choice([0, 1, 100, 9_000])) for _ in range(rng.choice([0, 1, 3, 100]))] for _ in range(20)
    ]
    for frame in sent:
        one.put(frame)
    found = [[bytes(buffer) for buffer in frame] for frame in taken(other, len(sent), one)]
    assert found == sent
    assert other.take() is None


def test_what_is_dropped_leaves_no_half_frame(pair):
    one, other = pair
    for number in range(5):
        one.put([bytes([number]) * 1_000_000])
    assert not one.flush()
    one.drop_unsent()
    one.put([b"next"])
    found = [bytes(frame[0]) for frame in taken(other, 2, one)]
    assert [len(found[0]), found[1]] == [1_000_000, b"next"]


def test_a_closed_connection_is_an_end_of_file_and_sending_into_it_is_no_error(pair):
    one, other = pair
    other.close()
    one.wait(select.POLLIN, 10)
    with pytest.raises(EOFError):
        one.take()
    one.put([b"x" * 10_000_000])
    assert soon(one.flush, 10)


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
        for _ in range(3):
            assert mail.get(0.05) is None
        stranger.settimeout(10)
        with pytest.raises((ConnectionResetError, AssertionError)):
            assert stranger.recv(1)
    assert not mail.places


def test_a_worker_that_comes_late_gets_what_was_sent_before_and_reports(mail):
    mail.send(1, 5)
    mail.send(1, CLOSE)
    end = mail.address.connect(1)
    reports, status, meters = new_reports(mail.readers)
    status.working[1], status.reading[3] = 9, 4
    meters.of(1).opened(1, 3, ahead=False)
    end.put(dumps_home((123, "there", "ab")).buffers)
    for message in ((READY,), None):
        end.put([reports[1].make(), *(Pickled([]) if message is None else dumps_home(message)).buffers])
    end.flush()
    assert mail.get(10) == (1, (READY,))
    assert mail.get(0.1) is None
    assert (mail.places[1].pid, mail.places[1].host) == (123, "there")
    assert (mail.status.working[1], mail.status.reading[3], mail.meters.stats()[1].opened) == (9, 4, 1)
    assert [loads(frame) for frame in taken(end, 2)] == [5, CLOSE]
    end.close()
    assert soon(lambda: mail.get(0.1) is None and mail.broken == {1}, 10)


def test_a_token_of_other_workers_does_not_let_in(mail):
    other = mail.address._replace(token=bytes(32))
    end = other.connect(0)
    for _ in range(3):
        assert mail.get(0.05) is None
    with pytest.raises(EOFError):
        end.take()
    end.close()
    assert struct.calcsize("<I") + len(other.token) == 36


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"multiprocessing_context": "spawn"}, ValueError, 'multiprocessing_context is .* worker_method="ray"'),
        ({"transport": "queue"}, ValueError, "transport .* leave it out"),
        ({"ray_remote_args": {"max_restarts": 3}}, ValueError, "max_restarts, which the loader sets itself"),
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
