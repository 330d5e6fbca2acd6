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
from stream_dataloader._engine.assembly import page_lock
from stream_dataloader._engine.assembly.slot_pool import SlotLeases, SlotPool
from stream_dataloader._engine.device import OneAhead, pinned
from stream_dataloader._engine.items.layout import Layout
from stream_dataloader._engine.kept_fields import map_leaves
from stream_dataloader._engine.memory import copies

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
        size = self.pool.geometry.slot_bytes
        for slot in np.flatnonzero(np.asarray(self.pool.slot_states[: self.pool.slots]) == 0):
            begin = self.pool.offset(int(slot))
            self.pool.memory[begin : begin + size] = b"\xee" * size

    def batches(self, count, odd, holds):
        for step in range(count):
            self.scribble()
            number = self.pool.claim(1, step)
            for column in self.pool.geometry.slot(self.pool.memory, self.pool.offset(number)).columns:
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
    whole = np.full((STEPS, LANES, WIDTH), batch.batch_index, np.float32)
    machine.kernel(batch.data["frame"], whole)
    if rng.random() < 0.5:
        machine.kernel(batch.data["number"], np.full((STEPS, LANES), batch.batch_index))
        machine.kernel(batch.source_index, np.full((STEPS, LANES), batch.batch_index))
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


def faults_of(seed, ahead, pace, breaks=lambda monkeypatch: None):
    """What went wrong on two devices, and in what the loader left behind."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        machine = Machine(seed, devices=2, pace=pace).install(monkeypatch)
        breaks(monkeypatch)
        train(machine, seed, ahead)
        gc.collect()
        machine.run()
        left = {
            "copies under way": machine.begun,
            "memory that was not given back": machine.locked,
            "copies that had the host wait": machine.staged,
            "another device than the user's is the current one": machine.number,
        }
        return [*machine.faults, *(what for what, there in left.items() if there)]


@random_cases(2000, 15)
@given(st.integers(0, 2**32), st.booleans(), st.sampled_from([0, 0.3, 3, 30]))
def test_what_is_computed_with_is_what_was_read(seed, ahead, pace):
    assert faults_of(seed, ahead, pace) == []


class NoDevices(set):
    def add(self, item):
        pass


#: What is broken: where, and what stands there instead.
FAULTS = {
    "does not wait for the copy": [("cuda_machine.Stream.wait_event", lambda stream, event: None)],
    "does not tell who uses memory": [("torch.Tensor.record_stream", lambda tensor, stream: None)],
    "frees slots at once": [(f"{page_lock.__name__}.PendingCopies.free_after", lambda copies, free: free())],
    "looks at the current device only": [
        (f"{page_lock.__name__}.copies", SimpleNamespace(devices=NoDevices(), streams=set())),
        ("torch.cuda.memory_reserved", lambda number: 1),
    ],
    "does not look at the copy stream": [(f"{copies.__name__}.streams", NoDevices())],
    "unlocks without waiting": [(f"{page_lock.__name__}.PendingCopies.wait", lambda copies: None)],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_stand_in_finds(fault):
    def breaks(monkeypatch):
        for where, instead in FAULTS[fault]:
            monkeypatch.setattr(where, instead)

    found = "unlocked while it was copied from" if "unlocks" in fault else "a kernel read"
    for seed in range(200):
        if any(found in told for told in faults_of(seed, bool(seed % 2), 0.3, breaks)):
            return
    pytest.fail("nothing went wrong")
