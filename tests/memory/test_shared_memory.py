"""Blocks of shared memory lie side by side, and an idle loader holds no descriptor, thread or process."""

import multiprocessing
import os
import resource
import threading

import pytest
from helpers import PATIENCE

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader._engine.memory.shared_memory import SharedMemory


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def few_descriptors():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_descriptors() + 40, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def loaders(count):
    for number in range(count):
        dataset = StreamDataset([range(3), range(4)], iter, batch_size=2, time_steps=2)
        yield StreamDataLoader(dataset, num_workers=number % 3)


@pytest.mark.parametrize("count", [60, pytest.param(5_000, marks=pytest.mark.slow)])
def test_idle_loaders_hold_no_descriptor_thread_or_process(few_descriptors, count):
    next(loaders(1))
    before = open_descriptors(), threading.active_count(), len(multiprocessing.active_children())
    idle = list(loaders(count))
    after = open_descriptors(), threading.active_count(), len(multiprocessing.active_children())
    assert after[1:] == before[1:]
    assert after[0] <= before[0] + 2 * (1 + count // 300)  # arenas, of some hundred loaders each
    assert [len(list(loader)) for loader in idle[-3:]] == [2, 2, 2]
    assert len(list(idle[0])) == 2


def fill(one, other, value):
    assert bytes(other.buffer) == bytes(other.size)
    own = SharedMemory(8)  # of this process: nobody else sees it
    own.buffer[:] = b"\xff" * 8
    one.buffer[:] = bytes([value]) * one.size


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_block_is_seen_by_other_processes_and_by_no_other_block(method):
    blocks = [SharedMemory(size) for size in (1, 100, 1 << 19, 7)]
    context = multiprocessing.get_context(method)
    for value, block in enumerate(blocks, 1):
        process = context.Process(target=fill, args=(block, SharedMemory(64), value))
        process.start()
        process.join(PATIENCE)
        assert process.exitcode == 0
    later = SharedMemory(1000)
    assert bytes(later.buffer) == bytes(1000)
    assert [set(bytes(block.buffer)) for block in blocks] == [{1}, {2}, {3}, {4}]


def hold(block, holds, let_go):
    with block.locked():
        holds.set()
        let_go.wait(PATIENCE)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_block_locks_its_own_bytes(method):
    one, other = SharedMemory(10), SharedMemory(10)
    context = multiprocessing.get_context(method)
    holds, let_go = context.Event(), context.Event()
    process = context.Process(target=hold, args=(one, holds, let_go))
    process.start()
    assert holds.wait(PATIENCE)
    with other.locked():
        entered = threading.Event()
        waiting = threading.Thread(target=lambda: (one._acquire(__import__("fcntl")), entered.set()))
        waiting.start()
        assert not entered.wait(0.2)
        let_go.set()
        assert entered.wait(PATIENCE)
        waiting.join()
    process.join(PATIENCE)
