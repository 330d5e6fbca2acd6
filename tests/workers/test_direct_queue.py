"""Queues that write small messages at once: nothing is lost, overtaken or waited for, whatever the sizes."""

import multiprocessing
import os
import struct
import threading
from queue import Empty

import pytest
from helpers import FOREVER, START_METHODS, random_cases
from hypothesis import given
from hypothesis import strategies as st

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader._workers.direct_queue import DirectQueue, with_direct_queues

PIPE_BYTES = 1 << 16  # Linux's; a pipe that holds more is full later


def new_queue():
    return with_direct_queues(None, "fork").Queue()


@given(st.lists(st.sampled_from([1, 2000, 4060, 4090, 4096, 5000, 100_000]), max_size=30))
@random_cases(1000, 30)
def test_messages_of_all_sizes_keep_their_order(sizes):
    queue = new_queue()
    sent = [bytes([i % 256]) * size for i, size in enumerate(sizes)]
    for message in sent:
        queue.put(message)
    assert [queue.get(timeout=60) for _ in sent] == sent
    with pytest.raises(Empty):
        queue.get(timeout=0.001)


def test_a_full_pipe_keeps_nobody_waiting():
    queue = new_queue()
    sent = [bytes([i % 256]) * 3000 for i in range(4 * PIPE_BYTES // 3000)]
    for message in sent:
        queue.put(message)  # would wait for ever
    assert [queue.get(timeout=60) for _ in sent] == sent
    queue.put("again")
    assert queue.get(timeout=60) == "again"


def test_small_messages_need_no_thread():
    queue, before = new_queue(), threading.active_count()
    for number in range(10):
        queue.put(number)
        assert queue.get(timeout=60) == number
    assert threading.active_count() == before


def _answer(asked, answers):
    while (message := asked.get(timeout=60)) is not None:
        answers.put(message)


@pytest.mark.parametrize("method", START_METHODS)
def test_processes_answer_each_other(method):
    context = with_direct_queues(None, method)
    asked, answers = context.Queue(), context.Queue()
    process = context.Process(target=_answer, args=(asked, answers))
    process.start()
    for size in (1, 100_000, 1, 1, 5000, 1):
        asked.put(b"x" * size)
        asked.put(size)
        assert [len(answers.get(timeout=60)), answers.get(timeout=60)] == [size, size]
    asked.put(None)
    process.join(60)
    assert process.exitcode == 0


def _begin_a_message(queue):
    os.write(queue._writer.fileno(), struct.pack("!i", 100) + b"the begin")
    os._exit(1)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("writes", [_begin_a_message, os._exit], ids=["half a message", "nothing"])
def test_nobody_waits_for_a_writer_that_died(writes):
    queue = new_queue()
    writer = with_direct_queues(None, "fork").Process(target=writes, args=(queue if writes is _begin_a_message else 1,))
    writer.start()
    queue.watch([writer], lambda: writer.exitcode == 1)
    with pytest.raises(Empty):
        queue.get(timeout=FOREVER)


def test_a_context_of_the_users_own_is_left_alone():
    class Own(type(multiprocessing.get_context("fork"))):
        pass

    own = Own()
    assert with_direct_queues(own, "fork") is own
    assert isinstance(with_direct_queues(multiprocessing.get_context("fork"), "fork").Queue(), DirectQueue)
    dataset = StreamDataset([[1, 2], [3]], iter, 2, time_steps=2)
    loader = StreamDataLoader(dataset, num_workers=1, multiprocessing_context=own)
    assert [batch.data.tolist() for batch in loader] == [[[1, 3], [2, 0]]]
    assert loader.multiprocessing_context is own


def _texts(sizes):
    return (chr(97 + i % 26) * size for i, size in enumerate(sizes))


@given(st.lists(st.lists(st.sampled_from([1, 700, 4000, 70_000]), max_size=6), min_size=1, max_size=6))
@random_cases(60, 5)
def test_batches_of_all_sizes_arrive_in_their_order(sources):
    dataset = StreamDataset(sources, _texts, 3, time_steps=1)
    alone, by_workers = (
        [batch.data for batch in StreamDataLoader(dataset, n, prefetch_factor=n or None)] for n in (0, 3)
    )
    assert alone == by_workers
