"""Reading that is stopped from outside: by another thread, by a signal to all processes, by the program's end."""

import multiprocessing
import threading

import pytest
from helpers import PATIENCE, soon

from stream_dataloader import StreamDataLoader, StreamDataset, errors

KINDS = [{"num_workers": 0}, {"num_workers": 2}, {"num_workers": 2, "worker_method": "thread"}]


@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.parametrize("act", ["close", "load_state_dict", "iter"])
def test_a_thread_that_reads_in_a_loop_lets_another_one_end_that(act, options):
    loader = StreamDataLoader(StreamDataset(range(5, 9), range, 2, "cycle", time_steps=2, seed=0), **options)
    batches, found, asked = iter(loader), [], threading.Event()

    def read():
        try:
            for batch in batches:
                found.append((batch.batch_index, asked.is_set()))
        except errors.IteratorError as error:
            found.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    assert soon(lambda: len(found) > 3)
    for _ in range(3):
        asked.set()
        if act == "close":
            batches.close()
        elif act == "load_state_dict":
            loader.load_state_dict(loader.state_dict())
        else:
            assert next(iter(loader)).batch_index == 0
        asked.clear()
    reader.join(PATIENCE)
    assert not reader.is_alive()
    ended = found.pop() if act != "close" else None
    assert act == "close" or (isinstance(ended, errors.IteratorError) and "newer iter()" in str(ended))
    assert sum(late for _, late in found) <= 2, "the batch that was read, and one that was asked for at the same moment"
    assert [step for step, _ in found] == list(range(len(found)))
    assert next(iter(loader)).batch_index >= 0


def in_daemon(options):
    try:
        return len(list(StreamDataLoader(StreamDataset([5, 3, 4], range, 2, time_steps=2, seed=0), **options)))
    except errors.WorkerError as error:
        return str(error)


def test_a_daemonic_process_hears_which_workers_it_may_have():
    with multiprocessing.get_context("fork").Pool(1) as pool:
        found = [pool.apply(in_daemon, (options,)) for options in KINDS]
    assert found[0] == found[2] == 4
    assert "daemonic" in found[1]
    assert 'worker_method="thread"' in found[1]


def interrupting(length):
    yield 0
    if length == 7:
        raise KeyboardInterrupt
    yield from range(1, length)


@pytest.mark.parametrize("opening", [False, True])
def test_a_stream_that_raises_keyboard_interrupt_is_named_with_that(opening):
    def open_stream(length):
        if opening and length == 7:
            raise KeyboardInterrupt
        return interrupting(length)

    with pytest.raises(errors.WorkerDeathError, match=r"source 1 \(7\).* raised KeyboardInterrupt"):
        list(StreamDataLoader(StreamDataset([5, 7, 4], open_stream, 2, time_steps=2), 2))


def test_a_signal_to_the_process_group_is_named(programs):
    done = programs("""
import itertools, os, signal
from stream_dataloader import StreamDataLoader, StreamDataset, errors
def endless(start):
    yield from itertools.count(start)

os.setsid()
signal.signal(signal.SIGTERM, lambda *_: None)  # takes note
for restarts in (0, 2):
    loader = StreamDataLoader(StreamDataset([5, 7], endless, 2, time_steps=2), 2, max_restarts=restarts)
    try:
        for batch in loader:
            if batch.batch_index == 1:
                os.killpg(0, signal.SIGTERM)
            if batch.batch_index == 30:
                break
        assert restarts
        assert loader.stats().restarts == 1
    except errors.WorkerDeathError as error:
        assert not restarts
        assert "killed by SIGTERM" in str(error), error
        assert "It got SIGTERM, maybe sent to the whole process group" in str(error), error
""")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("options", KINDS[1:], ids=str)
def test_a_program_may_end_while_a_daemon_thread_reads(options, programs):
    done = programs(f"""
import itertools, queue, threading, time
from stream_dataloader import StreamDataLoader, StreamDataset

def slow(start):
    for item in itertools.count(start):
        time.sleep(0.002)
        yield item

loader = StreamDataLoader(StreamDataset([5, 7], slow, 2, time_steps=2), **{options})
batches = queue.Queue(2)

def read_ahead():
    for batch in loader:
        batches.put(batch)

threading.Thread(target=read_ahead, daemon=True).start()
for _ in range(5):
    batches.get()
""")
    assert done.returncode == 0
    assert "bug" not in done.stderr
    assert "Traceback" not in done.stderr or "the program is ending" in done.stderr
