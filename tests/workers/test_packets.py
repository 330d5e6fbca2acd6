"""Messages between processes: nothing is lost or overtaken, and nobody waits for a process that is dead or stopped."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from queue import Empty

import numpy as np
import pytest
from cases import keys
from helpers import FOREVER, make_loader, random_cases
from hypothesis import given
from hypothesis import strategies as st

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader._memory.shared_memory import SharedFile, SharedMemory
from stream_dataloader._workers import packets
from stream_dataloader._workers.packets import Flag, PacketContext, PacketQueue, Unanswered
from stream_dataloader.errors import WorkerDeathError, WorkerTimeoutError


class Patient:
    """Gives up once a process has died."""

    look_seconds = 1.0

    def __init__(self, context):
        self.context = context

    def gives_up(self, waited_seconds):
        return any(process.exitcode for process in self.context.processes)


def new_context(method="fork"):
    context = PacketContext(multiprocessing.get_context(method))
    context.watch = Patient(context)
    return context


@given(st.lists(st.sampled_from([1, 2000, 16_300, 16_384, 17_000, 500_000]), max_size=30))
@random_cases(1000, 30)
def test_messages_of_all_sizes_keep_their_order(sizes):
    queue = new_context().Queue()
    sent = [bytes([i % 256]) * size for i, size in enumerate(sizes)]
    for message in sent:
        queue.put(message)
    assert [queue.get() for _ in sent] == sent


def test_where_a_queue_was_built_nobody_waits_for_room():
    queue, before = new_context().Queue(), threading.active_count()
    sent = [bytes([i % 256]) * 10_000 for i in range(3000)]
    for message in sent:
        queue.put(message)  # would wait for ever
    assert [queue.get() for _ in sent] == sent
    queue.put("again")
    assert queue.get() == "again"
    assert threading.active_count() == before


def _fill(queue, size, count):
    for _ in range(count):
        queue.put(bytes(size))


@pytest.mark.timeout(120)
def test_a_writer_waits_for_room_until_nobody_reads_any_more():
    context = new_context()
    queue, ended = context.Queue(), context.Event()
    process = context.Process(target=_fill, args=(queue, 10_000, 10_000))
    process.start()
    assert len(queue.get()) == 10_000
    process.join(0.2)
    assert process.exitcode is None, "there is no room for all"
    ended.set()
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.timeout(120)
def test_what_was_sent_is_read_before_its_writer_is_found_dead():
    context = new_context()
    queue = context.Queue()
    process = context.Process(target=lambda: (_fill(queue, 20_000, 5), os._exit(1)))
    process.start()
    process.join()
    assert [len(queue.get()) for _ in range(5)] == [20_000] * 5
    with pytest.raises(Unanswered):
        queue.get()


@pytest.mark.timeout(120)
def test_a_death_is_found_though_a_child_of_the_dead_holds_all_that_it_had_open():
    context = new_context()
    queue, childs = context.Queue(), context.Queue()

    def forks():
        child = os.fork()
        if not child:
            time.sleep(FOREVER)
        childs.put(child)
        os._exit(1)

    process = context.Process(target=forks)
    process.start()
    child = childs.get(60)
    try:
        with pytest.raises(Unanswered):
            queue.get()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_message_waits_no_longer_than_it_is_told_to():
    queue = new_context().Queue()
    queue._context = None  # as in a process that it was sent to
    with pytest.raises(Empty):
        queue.get(0.001)


def test_a_message_that_no_descriptor_is_left_for_is_an_error():
    resource = pytest.importorskip("resource")
    queue = new_context().Queue()
    queue.put(bytes(100_000))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(OSError, match="too many files"):
            queue.get()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_context_of_the_users_own_starts_the_processes():
    started = []

    class Own(type(multiprocessing.get_context("fork"))):
        def Process(self, *args, **options):
            started.append(args)
            return super().Process(*args, **options)

    own = Own()
    loader = make_loader([[1, 2], [3]], iter, 2, time_steps=2, num_workers=1, multiprocessing_context=own)
    assert [batch.data.tolist() for batch in loader] == [[[1, 3], [2, 0]]]
    assert loader.multiprocessing_context is own
    assert len(started) == 1


# Everything that processes take from each other, and a worker that is killed at that very place

#: What a worker runs of it, on the way of each message, and under the one lock that there is.
PLACES = (
    PacketQueue.put,
    PacketQueue.send_all,
    PacketQueue.get,
    PacketQueue._receive,
    packets._file_of,
    packets._is_ready,
    Flag.is_set,
    SharedFile.locked.__wrapped__,
    SharedFile._acquire,
)


def lines_of(function):
    return sorted({line for _, _, line in function.__code__.co_lines() if line} - {function.__code__.co_firstlineno})


def lines(every):
    """A parameter for every n-th line of all places, and for the last of each."""
    for function in PLACES:
        for number, line in enumerate(found := lines_of(function)):
            marks = () if number % every == 0 or line == found[-1] else pytest.mark.slow
            yield pytest.param(function, line, id=f"{function.__name__}-{number}", marks=marks)


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
@pytest.mark.parametrize("transport", ["shared_memory", "queue"])
@pytest.mark.parametrize(("function", "line"), list(lines(every=16)))
def test_a_worker_that_is_killed_at_any_line_between_processes_keeps_nobody_waiting(
    function, line, transport, tmp_path
):
    def loader(open_stream, workers, **options):
        return make_loader(range(6), open_stream, 3, time_steps=2, num_workers=workers, transport=transport, **options)

    expected = keys(loader(plain, 0))
    assert keys(loader(EndsAt(tmp_path / "again", function, line), 2, max_restarts=1)) == expected
    with contextlib.suppress(WorkerDeathError):  # some lines are for what does not happen here, or after the last batch
        list(loader(EndsAt(tmp_path / "once", function, line), 2))


def plain(n):
    return (np.full(3000, n + i) for i in range(9))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("function", [PacketQueue.get, SharedFile.locked.__wrapped__])
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
