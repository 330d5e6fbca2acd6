"""The way to an accelerator, with a stand-in for `torch.cuda` that records what is asked of it."""

import contextlib
import copy
import dataclasses
import gc
import itertools
import mmap
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader._assembly.page_lock import PendingCopies, lock_pages
from stream_dataloader._device import OneAhead


def rows_of(length):
    return iter([np.full(4, i) for i in range(length)])


def loader_of(**options):
    return StreamDataLoader(StreamDataset((50,) * 4, rows_of, 4, time_steps=2), 2, **options)


class StandIn:
    """A `torch.cuda` whose streams and events only note what happens; `done` says whether copies are."""

    def __init__(self, status=0):
        self.log, self.done, self.status = [], False, status
        self.Event, self.Stream = self, self

    def __call__(self, *args):
        return self

    def __getattr__(self, name):
        def note(*args):
            self.log.append(name)
            return self.status if name == "cudaHostRegister" else self

        return note

    def query(self):
        return self.done

    def cudart(self):
        return self

    @contextlib.contextmanager
    def stream(self, stream):
        yield


@pytest.fixture
def used_by(monkeypatch):
    """Which streams tensors are told of; torch before 2.5 takes no stand-in for one."""
    streams = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: streams.append(stream))
    return streams


def test_batches_are_copied_one_ahead_and_held_until_the_copy_is_done(used_by):
    fetched = []

    def batches():
        for i in range(3):
            fetched.append(i)
            yield torch.tensor([i])
        raise OSError("broken")

    backend, held = StandIn(), []
    ahead = OneAhead(batches(), torch.device("cpu"), lambda *what: held.append(what), backend)
    assert next(ahead).tolist() == [0]
    assert fetched == [0, 1]
    assert backend.log.index("wait_event") < backend.log.index("synchronize")
    assert [next(ahead).tolist(), next(ahead).tolist()] == [[1], [2]], "the error comes at its own batch"
    with pytest.raises(OSError, match="broken"):
        next(ahead)
    assert held == [(True, False), (True, False), (False, True), (False, False)]
    assert used_by == [backend] * 3


def test_a_batch_fetched_ahead_is_not_in_the_state_yet(used_by):
    loader = loader_of()
    iterator = iter(loader)

    def hold(batch, end):  # there is something to follow once a batch was asked for
        loader._position.progress.hold(batch, end)

    ahead = OneAhead(iterator, torch.device("cpu"), hold, StandIn())
    for step in range(25):
        assert next(ahead).step == step
        assert loader.state_dict()["step"] == step + 1
    assert loader.state_dict()["epoch"] == 0
    assert next(ahead, None) is None
    assert loader.state_dict()["epoch"] == 1


# Device "meta" has no data to copy back: what is known of a batch there was kept in host memory.


def bookkeeping(batch):
    """All of a batch that is no data."""
    fields = [batch.reset, batch.is_start, batch.mask, batch.source, batch.position, batch.worker_id, batch.lane]
    return [field.tolist() for field in fields] + [batch.step, batch.epoch]


def on_meta(loader):
    return loader.to("meta")


def moved_by_hand(loader):
    return (batch.to("meta", non_blocking=True) for batch in loader)


def one_ahead(loader):
    return OneAhead(iter(loader), torch.device("meta"), lambda *_: None, StandIn())


@pytest.mark.parametrize("move", [on_meta, moved_by_hand, one_ahead])
def test_the_bookkeeping_of_a_moved_batch_is_known_without_asking_its_device(move, used_by):
    expected = [bookkeeping(batch) for batch in loader_of()]
    hosts, datas = [], []
    for batch in move(loader_of()):
        hosts.append(batch.host)
        datas.append(batch.data)
    assert [bookkeeping(host) for host in hosts] == expected
    assert {host.data for host in hosts} == {None}
    assert {data.device.type for data in datas} == {"meta"}


def test_what_is_kept_of_a_batch_is_not_what_it_was_before_a_change():
    batch = next(iter(loader_of()))
    host = bookkeeping(batch)
    for same in (batch, copy.copy(batch.to("meta")), batch.to("meta").to("meta"), batch.to("meta").map(lambda t: t)):
        assert bookkeeping(same.host) == host
    nothing = torch.zeros_like(batch.mask)
    changed = dataclasses.replace(batch.to("meta"), mask=nothing)
    assert not changed.host.mask.any()
    assert changed.host.source.tolist() == batch.source.tolist()
    assert "padding=100%" in repr(changed)
    batch.mask[:] = False  # the user's own, as the batch is
    assert not batch.host.mask.any()


def test_a_batch_whose_bookkeeping_was_not_kept_copies_it_back():
    batch = next(iter(loader_of())).map(lambda tensor: tensor.to("meta"))
    with pytest.raises(NotImplementedError, match="meta"):
        _ = batch.host


def parts_of_loader(dataset, workers):
    return StreamDataLoader(dataset, workers).parts()


def parts_of_torch(dataset, workers):
    return iter(DataLoader(dataset, batch_size=None, num_workers=workers))


@pytest.mark.parametrize("parts_of", [parts_of_loader, parts_of_torch])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_part_has_one_worker(parts_of, workers):
    dataset = StreamDataset((5,) * 3, rows_of, 3, time_steps=2)
    found = []
    for part in parts_of(dataset, workers):
        there = part.to("meta")
        assert there.host.mask.data_ptr() != part.mask.data_ptr(), "the slot would stay leased"
        same = [
            part,
            pickle.loads(pickle.dumps(part)),
            part.map(torch.clone),
            there,
            dataclasses.replace(there, step=9),
        ]
        (worker,) = {each.worker for each in same}
        assert type(worker) is int
        assert part.worker_id.tolist() == [worker] * len(part)
        found.append(worker)
    assert sorted(found) == sorted([*range(max(workers, 1))] * 3)


def test_a_batch_of_one_worker_has_it_and_one_of_several_says_who_they_are():
    dataset = StreamDataset((5,) * 3, rows_of, 3, time_steps=2)
    assert {batch.worker for workers in (0, 1) for batch in StreamDataLoader(dataset, workers)} == {0}
    for batch in itertools.islice(StreamDataLoader(dataset, 2), 1):
        for same in (batch, batch.to("meta")):
            with pytest.raises(ValueError, match=r"read by workers \[0, 1\]; .*loader.parts\(\)"):
                _ = same.worker


def test_memory_that_may_still_be_read_is_not_freed():
    backend, freed = StandIn(), []
    copies = PendingCopies(backend)
    copies.free_after(lambda: freed.append(1))
    copies.poll()
    assert not freed
    backend.done = True
    copies.poll()
    assert freed == [1]


def test_pages_are_locked_for_as_long_as_they_are_mapped():
    backend, memory = StandIn(), mmap.mmap(-1, 8192)
    assert lock_pages(memory, backend)
    assert backend.log == ["cudaHostRegister"]
    del memory
    gc.collect()
    assert backend.log == ["cudaHostRegister", "cudaHostUnregister"]
    with pytest.warns(RuntimeWarning, match="error 2, 8192 bytes"):
        assert not lock_pages(mmap.mmap(-1, 8192), StandIn(2))


@pytest.mark.skipif(torch.cuda.is_available(), reason="without CUDA only")
def test_without_cuda_pinning_warns_as_torch_does():
    with pytest.warns(UserWarning, match="pin_memory=True has no effect"):
        batches = list(loader_of(pin_memory=True))
    assert len(batches) == 25


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("device", [None, "cuda"])
def test_pinned_batches_on_a_device(device):
    expected = [batch.data.tolist() for batch in loader_of()]
    loader = loader_of(pin_memory=True, device=device)
    found = []
    for batch in loader:
        assert device or batch.data.is_pinned()
        found.append(batch.to("cuda", non_blocking=True).data)
    assert [data.tolist() for data in found] == expected
