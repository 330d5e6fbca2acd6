"""What `_workers/torch_quirks.py` relies on holds for the torch that is installed."""

import multiprocessing
import os
import signal
import threading
import time

import pytest
import torch
from stream_dataloader._workers.direct_queue import DirectQueue, with_direct_queues
from torch.utils.data import DataLoader, IterableDataset

from stream_dataloader._workers import torch_quirks


class Stuck(IterableDataset):
    """Yields its worker's process id, then nothing any more."""

    def __iter__(self):
        yield os.getpid()
        time.sleep(60)


@pytest.fixture
def own_handler():
    """SIGCHLD handlers as they are in a process that has started no worker."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    known = torch.utils.data._utils.signal_handling._SIGCHLD_handler_set
    torch.utils.data._utils.signal_handling._SIGCHLD_handler_set = False
    yield
    torch.utils.data._utils.signal_handling._SIGCHLD_handler_set = known
    signal.signal(signal.SIGCHLD, before)


def batches_of_a_stuck_worker():
    loader = DataLoader(Stuck(), batch_size=None, num_workers=1, multiprocessing_context="fork", timeout=60)
    batches = iter(loader)
    pid = next(batches)
    batches._timeout = 0.1
    return batches, pid


def die(pid):
    """Kill a worker; its death interrupts this, unless a handler keeps it."""
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # torch's handler finds none that was waited for
    time.sleep(0.1)


def test_messages_come_by_a_queue_of_the_context_that_the_workers_are_started_with(own_handler):
    batches = iter(DataLoader(range(2), num_workers=1, multiprocessing_context=with_direct_queues(None, "fork")))
    assert isinstance(torch_quirks.messages_of(batches), DirectQueue)
    assert len(list(batches)) == 2


def test_a_timeout_is_told_by_its_text(own_handler):
    batches, pid = batches_of_a_stuck_worker()
    with pytest.raises(RuntimeError) as late:
        next(batches)
    assert torch_quirks.is_timeout(late.value)
    assert not torch_quirks.dead_worker(late.value)
    torch_quirks.guard_handler(lambda _: False)  # else the death might be raised while the iterator goes
    die(pid)


def test_a_death_is_raised_from_a_handler_of_sigchld_and_names_the_process(own_handler):
    batches, pid = batches_of_a_stuck_worker()
    assert callable(signal.getsignal(signal.SIGCHLD))
    with pytest.raises(RuntimeError) as death:
        die(pid)
    assert torch_quirks.dead_worker(death.value) == pid
    assert torch_quirks.tells_of_death(death.value)
    assert not torch_quirks.is_timeout(death.value)
    del batches


def test_a_death_that_is_not_wanted_is_raised_by_next_alone(own_handler):
    batches, pid = batches_of_a_stuck_worker()
    dead = []
    torch_quirks.guard_handler(dead.append)
    guard = signal.getsignal(signal.SIGCHLD)
    die(pid)
    assert set(dead) == {pid}
    with pytest.raises(RuntimeError) as death:
        next(batches)
    assert torch_quirks.dead_worker(death.value) == pid
    others, pid = batches_of_a_stuck_worker()
    assert signal.getsignal(signal.SIGCHLD) is guard  # torch sets its handler once
    die(pid)
    del others


def test_a_death_is_told_where_runtime_errors_are_swallowed(own_handler):
    batches, pid = batches_of_a_stuck_worker()
    torch_quirks.guard_handler(lambda _: False, lambda: pid)

    class Waiter:
        release = staticmethod(lambda: die(pid))

    asked = threading.Condition()  # as in the queues through which workers are asked
    asked._waiters.append(Waiter)
    with asked, pytest.raises(torch_quirks.DeathNotice) as death:
        asked.notify()
    assert torch_quirks.tells_of_death(death.value)
    del batches


def test_an_iterator_waits_for_each_worker_as_long_as_it_is_said_to():
    assert torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL == torch_quirks.JOIN_SECONDS


def test_kept_workers_of_which_one_died_are_found_broken_where_batches_are_awaited(own_handler):
    loader = DataLoader(range(2), num_workers=1, persistent_workers=True, multiprocessing_context="fork", timeout=60)
    assert len(list(loader)) == 2
    loader._iterator._timeout = 0.1
    torch_quirks.guard_handler(lambda _: False)
    (process,) = multiprocessing.active_children()
    die(process.pid)
    batches = torch_quirks.iterator_of(loader, kept=True)
    with pytest.raises(RuntimeError):
        next(batches)
