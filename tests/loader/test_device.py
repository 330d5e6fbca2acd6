"""The way to an accelerator, with a stand-in for `torch.cuda` that runs what it is told late."""

import copy
import dataclasses
import gc
import mmap
import multiprocessing
import os
import pickle

import numpy as np
import pytest
import torch
from cuda_machine import LOST, Machine
from helpers import soon
from torch.utils.data import DataLoader

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader._engine.assembly.page_lock import PendingCopies, lock_pages
from stream_dataloader._engine.device import OneAhead
from stream_dataloader._engine.memory import copies as noted


def rows_of(length):
    return iter([np.full(4, i) for i in range(length)])


def loader_of(workers=2, length=50, **options):
    return StreamDataLoader(StreamDataset((length,) * 4, rows_of, 4, time_steps=2), workers, **options)


def test_batches_are_copied_one_ahead(cuda):
    fetched = []

    def batches():
        for i in range(3):
            fetched.append(i)
            yield torch.tensor([i])
        raise OSError("broken")

    held = []
    ahead = OneAhead(batches(), torch.device("cuda"), lambda *what: held.append(what))
    assert next(ahead).tolist() == [0]
    assert fetched == [0, 1]
    assert [next(ahead).tolist(), next(ahead).tolist()] == [[1], [2]], "the error comes at its own batch"
    with pytest.raises(OSError, match="broken"):
        next(ahead)
    assert held == [(True, False), (True, False), (True, False), (False, True), (False, False)]
    with pytest.raises(StopIteration):
        next(ahead)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_on_a_device_yields_what_it_does_without(cuda, workers):
    expected = [(batch.data.tolist(), bookkeeping(batch)[:5]) for batch in loader_of()]
    loader = loader_of(workers, device="cuda")
    for epoch in range(2):
        found = []
        for batch in loader:
            assert batch.data.device.type == batch.mask.device.type == "cuda"
            found.append((batch.data.tolist(), bookkeeping(batch.host)[:5]))
            state = loader.state_dict()
            assert (state["epoch"], state["step"]) == (epoch, len(found)), "without what was fetched ahead"
        assert found == expected
        assert loader.state_dict()["epoch"] == epoch + 1
    assert not cuda.staged, "no copy had the host wait"
    assert not cuda.waited
    assert len(cuda.locked) == (workers > 0), "the slots' memory, once"
    assert len(cuda.streams) == 2, "a new one an epoch would keep memory of its own each"
    del loader, batch
    gc.collect()
    assert soon(lambda: not cuda.locked)
    assert not cuda.faults


def test_parts_on_a_device(cuda):
    def parts(**options):
        loader = loader_of(length=9, **options)
        return [(part.worker, part.batch_index, part.data.tolist()) for part in loader.parts()]

    assert parts(device="cuda") == parts()
    assert not cuda.staged, "one worker's lanes have gaps, and are gathered in page-locked memory"
    assert not cuda.faults


@pytest.mark.parametrize("workers", [0, 2])
def test_another_device_than_the_current_one(monkeypatch, workers):
    machine = Machine(devices=2).install(monkeypatch)
    for batches in (loader_of(workers, device="cuda:1"), loader_of(workers, device="cuda:1").parts()):
        for batch in batches:
            assert batch.data.device.index == 1
            assert machine.number == 0
    assert machine.contexts == {1}, "the current device is not in use, and got no context"


def compute(cuda, batch):
    cuda.kernel(batch.data, batch.host.position.numpy()[..., None].repeat(4, 2).astype(np.int64))


def test_the_host_waits_only_if_copies_are_slower_than_all_else(cuda):
    for _ in loader_of(device="cuda"):
        cuda.run()
        assert not cuda.waited
    for batch in loader_of(device="cuda"):
        compute(cuda, batch)
        begun = sum(size == batch.data.nbytes for _, size in cuda.begun)
        assert begun <= 2, "of the batch that was handed out, and of the one ahead"
    assert cuda.waited
    cuda.run()
    assert not cuda.faults


def test_a_host_that_reads_nothing_back_does_not_fill_the_device(cuda):
    for batch in loader_of(device="cuda"):
        compute(cuda, batch)
    assert sum(len(block.memory) == batch.data.nbytes for block in cuda.blocks) <= 6
    cuda.run()
    assert not cuda.faults


def test_a_batch_that_has_no_room_is_told_in_its_place_and_is_not_lost(cuda):
    expected = [batch.data.tolist() for batch in loader_of()]
    loader, found, held, failed = loader_of(device="cuda"), [], [], []
    iterator = iter(loader)
    while len(found) < 25:
        try:
            batch = next(iterator)
        except torch.cuda.OutOfMemoryError:
            failed.append(len(found))
            assert loader.state_dict()["step"] == len(found)
            cuda.room = None if len(failed) == 3 else cuda.room
            continue
        found.append(batch.data.tolist())
        held.append(batch)
        if len(found) == 3:
            cuda.room = cuda.memory_reserved(0)
    assert found == expected
    assert failed == [4, 4, 4], "the fourth was there already; the fifth is tried again and again"


def test_a_lost_device_is_told_and_the_loader_closes(cuda):
    iterator = iter(loader_of(device="cuda"))
    before = next(iterator)
    cuda.lost = True
    with pytest.raises(RuntimeError, match=LOST):
        next(iterator)
    del iterator, before
    gc.collect()
    assert soon(lambda: not multiprocessing.active_children())


def test_a_slot_let_go_in_a_graph_is_looked_at_later(cuda):
    copies, freed = PendingCopies(), []
    noted.devices.add(0)
    cuda.capturing = True
    copies.free_after(lambda: freed.append(1))
    cuda.capturing = False
    copies.poll()
    assert not freed
    cuda.run()
    copies.poll()
    assert freed == [1]


def test_a_lost_device_frees_nothing(cuda):
    copies, freed = PendingCopies(), []
    noted.devices.add(0)
    copies.free_after(lambda: freed.append(1))
    cuda.lost = True
    copies.free_after(lambda: freed.append(2))
    with pytest.raises(RuntimeError, match=LOST):
        copies.poll()
    copies.poll()
    copies.wait()
    assert not freed


def test_what_cannot_be_copied_ahead_is_moved_when_it_is_handed_out(cuda):
    streams = []

    class Graph:
        def to(self, device):
            streams.append(cuda.current_stream(device))
            return self

    ahead = OneAhead(iter([{"graph": Graph(), "x": torch.ones(2)}] * 3), torch.device("cuda"), lambda *_: None)
    with torch.cuda.stream(own := torch.cuda.Stream("cuda:0")):
        assert [batch["x"].tolist() for batch in ahead] == [[1, 1]] * 3
    assert streams == [own] * 3


# Device "meta" has no data to copy back: what is known of a batch there was kept in host memory.


def bookkeeping(batch):
    fields = [batch.reset, batch.is_first, batch.mask, batch.source_index, batch.position, batch.worker_id, batch.lane]
    return [field.tolist() for field in fields] + [batch.batch_index, batch.epoch]


def to_meta(loader):
    """Have a loader move its batches to the only other device that each machine has, which users may not name."""
    loader._destination.device = torch.device("meta")
    return loader


MOVES = {
    "the loader": to_meta,
    "by hand": lambda loader: (batch.to("meta", non_blocking=True) for batch in loader),
}


@pytest.mark.parametrize("move", MOVES)
def test_the_bookkeeping_of_a_moved_batch_is_known_without_asking_its_device(move):
    expected = [bookkeeping(batch) for batch in loader_of()]
    moved = [(batch.host, batch.data) for batch in MOVES[move](loader_of())]
    assert [bookkeeping(host) for host, _ in moved] == expected
    assert {(host.data, data.device.type) for host, data in moved} == {(None, "meta")}


def test_what_is_kept_of_a_batch_is_not_what_it_was_before_a_change():
    batch = next(iter(loader_of()))
    host = bookkeeping(batch)
    for same in (batch, copy.copy(batch.to("meta")), batch.to("meta").to("meta"), batch.to("meta").map(lambda t: t)):
        assert bookkeeping(same.host) == host
    nothing = torch.zeros_like(batch.mask)
    changed = dataclasses.replace(batch.to("meta"), mask=nothing)
    assert not changed.host.mask.any()
    assert changed.host.source_index.tolist() == batch.source_index.tolist()
    assert "padding=100%" in repr(changed)
    batch.mask[:] = False  # the user's own, as the batch is
    assert not batch.host.mask.any()


def test_a_batch_whose_bookkeeping_was_not_kept_copies_it_back():
    batch = next(iter(loader_of())).map(lambda tensor: tensor.to("meta"))
    with pytest.raises(NotImplementedError):
        _ = batch.host


@pytest.mark.parametrize("torchs", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_part_has_one_worker(torchs, workers):
    found, dataset = [], StreamDataset((5,) * 3, rows_of, 3, time_steps=2)
    loader = StreamDataLoader(dataset, workers)
    for part in DataLoader(dataset, batch_size=None, num_workers=workers) if torchs else loader.parts():
        there = part.to("meta")
        assert there.host.mask.data_ptr() != part.mask.data_ptr(), "the slot would stay leased"
        copies = (
            pickle.loads(pickle.dumps(part)),
            part.map(torch.clone),
            there,
            dataclasses.replace(there, batch_index=9),
        )
        (worker,) = {each.worker for each in (part, *copies)}
        assert type(worker) is int
        assert part.worker_id.tolist() == [worker] * len(part)
        found.append(worker)
    assert sorted(found) == sorted([*range(max(workers, 1))] * 3)


def test_a_batch_of_one_worker_has_it_and_one_of_several_has_none():
    assert {batch.worker for workers in (0, 1) for batch in loader_of(workers)} == {0}
    batch = next(iter(loader_of()))
    for same in (batch, batch.to("meta")):
        with pytest.raises(ValueError, match=r"workers \[0, 1\]"):
            _ = same.worker


def test_pages_are_locked_for_as_long_as_they_are_mapped(cuda):
    memory = mmap.mmap(-1, 8192)
    locked = lock_pages(memory, PendingCopies())
    view = torch.from_numpy(np.ndarray(4096, np.uint8, locked, 4096))
    assert view.is_pinned()
    del memory, locked
    gc.collect()
    assert list(cuda.locked.values()) == [8192], "a tensor over it is left"
    del view
    gc.collect()
    assert not cuda.locked
    assert not cuda.faults


def test_a_driver_that_refuses_costs_speed_and_no_error_later(cuda):
    cuda.refuses = 2
    with pytest.warns(RuntimeWarning, match="would not lock"):
        assert lock_pages(mmap.mmap(-1, 8192), PendingCopies()) is None
    cuda.launch()  # the error was read by then
    expected = [batch.data.tolist() for batch in loader_of()]
    with pytest.warns(RuntimeWarning):
        assert [batch.data.tolist() for batch in loader_of(device="cuda")] == expected
    assert not cuda.staged


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_unlocks_nothing(cuda):
    locked = lock_pages(mmap.mmap(-1, 8192), PendingCopies())
    if not (pid := os.fork()):
        del locked
        gc.collect()
        os._exit(len(cuda.locked))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1, "it is as it was"
    del locked
    assert not cuda.locked


@pytest.mark.skipif(torch.cuda.is_available(), reason="without CUDA only")
def test_without_cuda_pinning_warns_as_torch_does():
    with pytest.warns(UserWarning, match="pin_memory=True has no effect"):
        batches = list(loader_of(pin_memory=True))
    assert len(batches) == 25


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("device", [None, "cuda"])
def test_pinned_batches_on_a_device(device):
    found = []
    for batch in loader_of(pin_memory=True, device=device):
        assert device or batch.data.is_pinned()
        found.append(batch.to("cuda", non_blocking=True).data)
    assert [data.tolist() for data in found] == [batch.data.tolist() for batch in loader_of()]
