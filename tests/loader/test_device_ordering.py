"""Copies to devices that run late: nothing is read before it is there, nor after it was written again."""

import contextlib
import gc
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cuda_machine import Machine
from helpers import random_cases
from hypothesis import given
from hypothesis import strategies as st

from stream_dataloader import StreamBatch
from stream_dataloader._assembly import page_lock
from stream_dataloader._assembly.page_lock import PendingCopies
from stream_dataloader._assembly.slot_pool import SlotLeases, SlotPool
from stream_dataloader._device import OneAhead, pinned
from stream_dataloader._items.layout import Layout
from stream_dataloader._kept_fields import map_leaves
from stream_dataloader._memory import copies

STEPS, LANES, WIDTH = 2, 3, 5


class Ring:
    """A loader's slots, and a worker that writes to each slot at the first moment it may."""

    def __init__(self, device):
        self.pool = SlotPool(LANES, messages=2)
        item = {"frame": np.zeros(WIDTH, np.float32), "number": np.int64(0)}
        self.pool.offer(Layout.of(item, windowed=False)[0], STEPS, False)
        self.leases = SlotLeases(self.pool)
        self.leases.lock_for(device)

    def scribble(self):
        """Write to all slots that are free."""
        states = self.pool.slot_states[: self.pool.slots]
        for slot in np.flatnonzero(states == 0):
            begin = self.pool.offset(int(slot))
            self.pool.memory[begin : begin + self.pool.geometry.slot_bytes] = b"\xee" * self.pool.geometry.slot_bytes

    def batches(self, count, odd, holds):
        for step in range(count):
            self.scribble()
            number = self.pool.claim(1, step)
            written = self.pool.geometry.slot(self.pool.memory, self.pool.offset(number))
            for column in written.columns:
                column[:] = step
            slot = self.leases.lease(1, step)
            batch = map_leaves(batch_of(slot, step, odd), pinned)
            if not holds:
                slot = None
            yield (batch, batch := None)[0]


def batch_of(slot, step, odd):
    frame, number = map(torch.from_numpy, slot.columns)
    data = {"frame": frame, "number": number, "name": [str(step)]}
    if odd:
        data["odd"] = torch.full((2, 2), float(step)).to_sparse()
    lanes, places = torch.arange(LANES), torch.full((STEPS, LANES), step)
    marks = torch.ones(STEPS, LANES, dtype=torch.bool)
    return StreamBatch(data, marks[0], marks, marks, places, places, lanes, lanes, step, 0)


def compute(machine, batch, rng):
    """What a model does with a batch, some of it."""
    whole = np.full((STEPS, LANES, WIDTH), batch.step, np.float32)
    machine.kernel(batch.data["frame"], whole)
    if rng.random() < 0.5:
        machine.kernel(batch.data["number"], np.full((STEPS, LANES), batch.step))
        machine.kernel(batch.source, np.full((STEPS, LANES), batch.step))
        machine.kernel(batch.data["frame"][1, :2], whole[1, :2])


def train(machine, seed, ahead, steps=12):
    """A loop over batches that does all sorts of things; `ahead`: the loader copies, else the user."""
    rng = random.Random(seed)
    number = rng.randrange(machine.devices)
    device = torch.device("cuda", number)
    streams = [machine.defaults[number], torch.cuda.Stream(device)]
    ring, kept = Ring(device), []
    holds = ahead and rng.random() < 0.5  # the slot is let go when the next batch is asked for, as by `parts`
    batches = ring.batches(rng.randrange(steps), rng.random() < 0.2, holds)
    if ahead:
        batches = OneAhead(batches, device, lambda *_: None)
    while True:
        stream = streams[rng.random() < 0.2]
        with torch.cuda.stream(stream) if stream is streams[1] else contextlib.nullcontext():
            batch = next(batches, None)
            if batch is None:
                return
            if not ahead:
                batch = batch.to(device, non_blocking=True)  # the one in host memory is let go here
            compute(machine, batch, rng)
        if rng.random() < 0.3:
            kept.append((stream, batch))
        del batch
        if kept and rng.random() < 0.5:
            stream, batch = kept.pop(0)
            with torch.cuda.stream(stream):
                compute(machine, batch, rng)
            del batch
        machine.run(rng.randrange(4))
        ring.scribble()
        if rng.random() < 0.03:
            return


def finish(machine):
    gc.collect()
    machine.run()
    assert not machine.begun
    return machine.faults


@pytest.fixture
def machine_of(monkeypatch):
    return lambda *args, **options: Machine(*args, **options).install(monkeypatch)


CASES = {"seed": st.integers(0, 2**32), "ahead": st.booleans(), "pace": st.sampled_from([0, 0.3, 3, 30])}


@random_cases(2000, 60)
@given(**CASES)
def test_what_is_computed_with_is_what_was_read(seed, ahead, pace):
    with pytest.MonkeyPatch.context() as monkeypatch:
        machine = Machine(seed, devices=2, pace=pace).install(monkeypatch)
        train(machine, seed, ahead)
        assert finish(machine) == []
        assert not machine.locked, "the memory was given back"
        assert not machine.staged, "no copy had the host wait"
        assert machine.number == 0, "the current device is the user's"


def does_not_wait_for_the_copy(monkeypatch):
    monkeypatch.setattr("cuda_machine.Stream.wait_event", lambda stream, event: None)


def does_not_tell_who_uses_memory(monkeypatch):
    monkeypatch.setattr(Machine, "record_stream", lambda machine, tensor, stream: None)


def frees_slots_at_once(monkeypatch):
    monkeypatch.setattr(PendingCopies, "free_after", lambda copies, free: free())


class NoDevices(set):
    def add(self, item):
        pass


def looks_at_the_current_device_only(monkeypatch):
    monkeypatch.setattr(page_lock, "copies", SimpleNamespace(devices=NoDevices(), streams=set()))
    monkeypatch.setattr(Machine, "memory_reserved", lambda machine, number: 1)


def does_not_look_at_the_copy_stream(monkeypatch):
    class NoStreams:
        devices = property(lambda _: copies.devices)
        streams = frozenset()

    monkeypatch.setattr(page_lock, "copies", NoStreams())


def unlocks_without_waiting(monkeypatch):
    monkeypatch.setattr(PendingCopies, "wait", lambda copies: None)


FAULTS = {
    does_not_wait_for_the_copy: "a kernel read",
    does_not_tell_who_uses_memory: "a kernel read",
    frees_slots_at_once: "a kernel read",
    looks_at_the_current_device_only: "a kernel read",
    does_not_look_at_the_copy_stream: "a kernel read",
    unlocks_without_waiting: "unlocked while it was copied from",
}


@pytest.mark.parametrize("breaks", FAULTS, ids=lambda breaks: breaks.__name__)
def test_the_stand_in_finds(breaks):
    for seed in range(200):
        with pytest.MonkeyPatch.context() as monkeypatch:
            breaks(monkeypatch)
            machine = Machine(seed, devices=2, pace=0.3).install(monkeypatch)
            train(machine, seed, ahead=bool(seed % 2))
            if any(FAULTS[breaks] in fault for fault in finish(machine)):
                return
    pytest.fail("nothing went wrong")
