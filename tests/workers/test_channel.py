"""A worker that is killed or stopped anywhere on the way of a message keeps nobody waiting, and nothing is lost."""

import contextlib
import os
import signal
import sys
import threading

import numpy as np
import pytest
from cases import keys
from helpers import make_loader

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader._engine.memory.shared_memory import SharedFile, SharedMemory
from stream_dataloader._engine.workers import channel, packet_socket, serve
from stream_dataloader._engine.workers.shared import Rows, Shared
from stream_dataloader.errors import WorkerDeathError, WorkerTimeoutError

#: What a worker runs of it, on the way of each message, and under the one lock that there is.
PLACES = (
    packet_socket.PacketSocket.put,
    packet_socket.PacketSocket.flush,
    packet_socket.PacketSocket._take_any,
    packet_socket._file_of,
    packet_socket.PacketSocket.wait,
    channel.Port.has_mail,
    channel.ProcessPort.send,
    channel.ProcessPort._next,
    serve._read,
    serve.message_of,
    Shared.enter,
    Rows.enter,
    SharedFile.locked.__wrapped__,
    SharedFile._acquire,
)


def lines_of(function):
    return sorted({line for _, _, line in function.__code__.co_lines() if line} - {function.__code__.co_firstlineno})


def lines():
    """Parameters for all lines of all places; the quick run has the last of every second."""
    for place, function in enumerate(PLACES):
        for number, line in enumerate(found := lines_of(function)):
            for messages in (False, True):
                is_often = line == found[-1] and place % 2 == 0 and messages == bool(place % 4)
                marks = () if is_often else pytest.mark.slow
                name = f"{function.__qualname__}-{number}-{'messages' if messages else 'slots'}"
                yield pytest.param(function, line, messages, id=name, marks=marks)


class EndsAt:
    """Streams of which one has its worker get a signal, once, when it next runs a line."""

    def __init__(self, mark, function, line, number=signal.SIGKILL):
        self.mark = mark
        self.place = function.__code__.co_filename, line
        self.number = number
        self.ended = False

    def __call__(self, n):
        for i in range(9):
            if (n, i) == (1, 3) and not self.mark.exists():
                self.mark.touch()
                sys.settrace(self.look)
            yield np.full(3000, n + i)

    def look(self, frame, event, _):
        if frame.f_code.co_filename != self.place[0]:
            return None
        if event == "line" and frame.f_lineno == self.place[1] and not self.ended:
            self.ended = True
            os.kill(os.getpid(), self.number)
        return self.look


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("function", "line", "messages"), list(lines()))
def test_a_worker_that_is_killed_at_any_line_between_processes_keeps_nobody_waiting(function, line, messages, tmp_path):
    def loader(open_stream, workers, **options):
        return make_loader(range(6), open_stream, 3, time_steps=2, num_workers=workers, messages=messages, **options)

    again = loader(EndsAt(tmp_path / "again", function, line), 2, max_restarts=1)
    assert keys(again) == keys(loader(plain, 0))
    if again.stats().restarts:  # some lines are for what does not happen here
        with contextlib.suppress(WorkerDeathError):  # or after the last batch
            list(loader(EndsAt(tmp_path / "once", function, line), 2))


def plain(n):
    return (np.full(3000, n + i) for i in range(9))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("function", [channel.ProcessPort._next, SharedFile.locked.__wrapped__])
def test_a_worker_that_is_stopped_anywhere_is_named(function, tmp_path):
    line = lines_of(function)[-1]
    dataset = StreamDataset(range(6), EndsAt(tmp_path / "once", function, line, signal.SIGSTOP), 3, time_steps=2)
    with pytest.raises(WorkerTimeoutError, match="is stopped"):
        list(StreamDataLoader(dataset, 2, timeout=1))


def test_a_forked_process_has_no_lock_that_another_thread_held():
    memory = SharedMemory(8)
    held, done = threading.Event(), threading.Event()

    def hold():
        with memory._thread_lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    if not (pid := os.fork()):
        with memory.locked():
            os._exit(0)
    done.set()
    thread.join()
    assert os.waitpid(pid, 0)[1] == 0


def test_a_message_that_no_descriptor_is_left_for_is_an_error():
    resource = pytest.importorskip("resource")
    mail = channel.ProcessMail(1)
    mail.ports[0].send((channel.READY, bytes(100_000)))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(OSError, match="too many files"):
            mail.get(0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_the_loader_never_waits_for_room_and_a_worker_only_while_its_parts_are_wanted():
    mail = channel.ProcessMail(1)
    (port,) = mail.ports
    for step in range(5000):
        mail.send(0, step)  # would wait for ever
    received = []
    while len(received) < 5000:
        received.append(port.receive())
        mail.get(0)
    assert received == list(range(5000))
    full = threading.Thread(target=lambda: [port.send(bytes(10_000)) for _ in range(300)])
    full.start()
    full.join(0.2)
    assert full.is_alive(), "there is no room for all"
    mail.send(0, channel.CLOSE)
    full.join(60)
    assert not full.is_alive()
