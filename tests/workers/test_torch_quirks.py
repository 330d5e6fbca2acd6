"""What the workers' side relies on, of what torch and Python do not document, holds for those installed."""

import _socket
import io
import multiprocessing
import os
import signal
import socket
import tempfile
import time
from multiprocessing import context, forkserver, process, resource_tracker, util
from multiprocessing.reduction import ForkingPickler

import cloudpickle
import numpy as np
import pytest
import torch
from helpers import FOREVER
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils import signal_handling

from stream_dataloader._workers import torch_quirks
from stream_dataloader._workers.packets import Flag, PacketContext, PacketQueue, Unanswered


class Stuck(IterableDataset):
    """Yields its worker's process id, then nothing any more."""

    def __iter__(self):
        yield os.getpid()
        time.sleep(FOREVER)


class GivesUp:
    """Waits no longer than until a process has ended."""

    look_seconds = FOREVER

    def gives_up(self, waited_seconds):
        return True


@pytest.fixture
def own_handler(monkeypatch):
    """SIGCHLD handlers as they are in a process that has started no worker."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    monkeypatch.setattr(signal_handling, "_SIGCHLD_handler_set", False)
    yield
    signal.signal(signal.SIGCHLD, before)


def loader_and_context(dataset, **options):
    packets = PacketContext(multiprocessing.get_context("fork"))
    packets.watch = GivesUp()
    return DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context=packets, **options), packets


def die(pid):
    """Kill a worker; its death interrupts this, if a handler raises it."""
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # torch's handler finds none that was waited for
    time.sleep(0.1)


def test_torch_takes_queues_event_and_processes_from_its_context(own_handler):
    loader, packets = loader_and_context(range(2))
    batches = iter(loader)
    assert isinstance(batches._worker_result_queue, PacketQueue)
    assert isinstance(batches._workers_done_event, Flag)
    assert [type(queue) for queue in batches._index_queues] == [PacketQueue]
    assert batches._workers == packets.processes
    assert list(batches) == [0, 1]


def test_torch_raises_deaths_from_a_handler_which_must_not_be_ours(own_handler):
    batches = iter(DataLoader(Stuck(), batch_size=None, num_workers=1, multiprocessing_context="fork"))
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        die(next(batches))
    loader, _ = loader_and_context(Stuck())
    ours = torch_quirks.iterator_of(loader)
    die(next(ours))
    with pytest.raises(Unanswered):
        next(ours)
    del batches, ours


def test_torchs_profiler_sees_what_is_taken_while_it_runs(own_handler):
    loader, _ = loader_and_context(range(2))
    batches = torch_quirks.iterator_of(loader)
    assert torch_quirks.next_of(batches) == 0
    with torch.autograd.profiler.profile() as profile:
        assert torch_quirks.next_of(batches) == 1
    assert any("DataLoader" in event.name for event in profile.function_events)
    with pytest.raises(StopIteration):
        torch_quirks.next_of(batches)


def test_workers_end_with_an_iterator_whose_start_a_death_interrupts(own_handler, monkeypatch):
    loader, packets = loader_and_context(range(2))
    loader.num_workers = 2
    set_handler = signal_handling._set_SIGCHLD_handler

    def set_handler_and_die():
        set_handler()
        die(packets.processes[0].pid)

    monkeypatch.setattr(signal_handling, "_set_SIGCHLD_handler", set_handler_and_die)
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        torch_quirks.iterator_of(loader)
    assert all(process.exitcode is not None for process in packets.processes)


def test_kept_workers_are_awaited_where_an_iterator_is_asked_for(own_handler):
    loader, packets = loader_and_context(range(2), persistent_workers=True)
    assert list(torch_quirks.iterator_of(loader)) == [0, 1]
    die(packets.processes[0].pid)
    with pytest.raises(Unanswered):
        torch_quirks.iterator_of(loader)


def test_an_iterator_that_was_shut_down_has_no_workers_and_does_nothing_where_it_goes():
    loader, packets = loader_and_context(range(9))
    batches = torch_quirks.iterator_of(loader)
    next(batches)
    torch_quirks.shut_down(batches)
    assert [process.exitcode is None for process in packets.processes] == [False]
    assert not hasattr(batches, "__del__")


def test_an_iterator_waits_for_each_worker_as_long_as_it_is_said_to():
    assert torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL == torch_quirks.JOIN_SECONDS


@pytest.mark.timeout(120)
def test_a_process_that_was_forked_leaves_workers_alone():
    loader, packets = loader_and_context(Stuck())
    batches = torch_quirks.iterator_of(loader)
    next(batches)
    if not (pid := os.fork()):
        del batches
        util._exit_function()  # what Python does at its end
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    (worker,) = packets.processes
    worker.join(0.1)
    assert worker.exitcode is None
    worker.kill()
    del batches


def test_a_process_group_tells_its_store_and_what_lies_below_its_prefixes():
    store = torch.distributed.HashStore()
    prefixed = torch.distributed.PrefixStore("a", torch.distributed.PrefixStore("b", store))
    assert type(torch_quirks.bare_store(prefixed)) is type(store)
    assert torch_quirks.bare_store(store) is store
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        torch_quirks.default_store().set("here", "1")
    finally:
        torch.distributed.destroy_process_group()


def test_what_pickling_and_memory_rely_on():
    assert socket.socket in ForkingPickler(io.BytesIO()).dispatch_table
    for by_value in (lambda: 1, type("Local", (), {})):
        assert len(cloudpickle.Pickler(io.BytesIO()).reducer_override(by_value)) == 6
    assert context.get_spawning_popen() is None
    assert os.path.isdir(process.ORIGINAL_DIR)
    assert callable(resource_tracker.ensure_running)
    assert callable(forkserver.ensure_running)
    assert not hasattr(_socket.socket.close, "__code__"), "it is of C"
    with tempfile.NamedTemporaryFile() as file:
        assert np.memmap(file, np.uint8, "w+", shape=4)[1:]._mmap is not None


def test_what_pythons_multiprocessing_keeps_by_its_own_names():
    assert isinstance(forkserver._forkserver._preload_modules, list)
    util.get_temp_dir()
    assert multiprocessing.current_process()._config["tempdir"]
    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    assert child in process._children
    child.join()
