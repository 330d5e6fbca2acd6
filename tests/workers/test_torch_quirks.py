"""What the workers' side relies on, of what torch and Python do not document, holds for those installed."""

import _socket
import io
import multiprocessing
import os
import socket
import tempfile
from multiprocessing import context, forkserver, process, resource_tracker, util
from multiprocessing.reduction import ForkingPickler

import cloudpickle
import numpy as np
import pytest
import torch
from helpers import START_METHODS
from torch.utils.data._utils import worker as torch_worker

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader._engine.workers import torch_quirks


def test_a_default_device_is_the_cpu_where_workers_are_forked():
    torch.set_default_device("meta")
    try:
        with torch_quirks.on_cpu():
            assert torch.get_default_device().type == "cpu"
    finally:
        torch.set_default_device(None)
    assert torch_worker.WorkerInfo(id=1, num_workers=2, seed=3, dataset=None).id == 1


def test_a_process_that_was_forked_leaves_workers_alone():
    loader = StreamDataLoader(StreamDataset([9], range, 1, time_steps=1), 1, persistent_workers=True)
    assert len(list(loader)) == 9
    (worker,) = multiprocessing.active_children()
    if not (pid := os.fork()):
        util._exit_function()  # what Python does at its end
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    worker.join(0.1)
    assert worker.exitcode is None
    assert len(list(loader)) == 9


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


@pytest.mark.parametrize("method", START_METHODS)
def test_multiprocessing_runs_no_code_where_the_object_of_an_ended_worker_goes(method):
    loader = StreamDataLoader(StreamDataset([9], range, 1, time_steps=1), 1, multiprocessing_context=method)
    batches = iter(loader)
    next(batches)
    (worker,) = multiprocessing.active_children()
    popen = worker._popen
    assert worker in process._dangling
    for _ in batches:
        pass
    assert worker not in process._dangling
    assert popen.finalizer is None or not popen.finalizer.still_active()
