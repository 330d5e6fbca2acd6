"""Where things lie in a slot, which slot is free, and who holds one; without processes."""

import gc
import itertools

import numpy as np
import pytest
import torch

from stream_dataloader._assembly.slot_leases import SlotLeases
from stream_dataloader._assembly.slot_pool import SlotPool
from stream_dataloader._assembly.slot_writer import PooledSlots, SlotWriter
from stream_dataloader._assembly.slots import Geometry
from stream_dataloader._items.layout import Layout

STEPS, LANES = 3, 5


def layout_of(item, windowed=False):
    return Layout.of(item, windowed)[0]


MIXED = layout_of({"image": np.zeros((2, 3), np.uint8), "name": "a", "score": torch.tensor(1.0).to(torch.bfloat16)})


def extents(slot):
    """First and last byte of each array, in memory's order."""
    arrays = [column for column in slot.columns if column is not None]
    return sorted((address(array), address(array) + array.nbytes) for array in arrays)


def address(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("whole_windows", [False, True])
def test_arrays_are_aligned_and_do_not_overlap(whole_windows):
    geometry = Geometry(MIXED, STEPS, LANES)
    memory = np.zeros(geometry.slot_bytes, np.uint8)
    begin, end = address(memory), address(memory) + geometry.slot_bytes
    places = extents(geometry.slot(memory, whole_windows=whole_windows))
    assert [(first - begin) % 64 for first, _ in places] == [0] * 2
    assert all(last <= first for (_, last), (first, _) in itertools.pairwise(places))
    assert begin <= places[0][0] <= places[-1][1] <= end
    assert geometry.slot_bytes % 4096 == 0


def test_a_slot_has_an_array_a_leaf_and_none_for_an_object():
    geometry = Geometry(MIXED, STEPS, LANES)
    slot = geometry.slot(np.zeros(geometry.slot_bytes, np.uint8))
    image, name, score = slot.columns
    assert (image.shape, image.dtype) == ((STEPS, LANES, 2, 3), np.uint8)
    assert name is None
    assert (score.shape, score.dtype) == ((STEPS, LANES), np.uint16), "the bits of bfloat16"
    assert (slot.time_steps, slot.lanes) == (STEPS, LANES)


def test_whole_windows_lie_in_one_piece():
    geometry = Geometry(MIXED, STEPS, LANES)
    memory = np.zeros(geometry.slot_bytes, np.uint8)
    apart, whole = (geometry.slot(memory, whole_windows=flag).columns[0] for flag in (False, True))
    assert apart.shape == whole.shape
    assert apart[0].flags.c_contiguous
    assert not apart[:, 0].flags.c_contiguous
    assert whole[:, 0].flags.c_contiguous


def test_rows_and_steps_of_a_slot_are_over_its_memory():
    geometry = Geometry(MIXED, STEPS, LANES)
    slot = geometry.slot(np.zeros(geometry.slot_bytes, np.uint8))
    piece = slot.rows(range(1, 3)).until(2)
    piece.columns[0][:] = 1
    assert (piece.time_steps, piece.lanes) == (2, 2)
    assert slot.columns[0][:2, 1:3].all()
    assert slot.columns[0].sum() == 2 * 2 * 6


def test_small_slots_make_long_messages_and_large_ones_short():
    small = Geometry(layout_of(np.zeros(2)), 2, 2)
    large = Geometry(layout_of(np.zeros((1000, 1000))), 2, 2)
    assert (small.most_steps, small.most_held) == (64, 64)
    assert (large.most_steps, large.most_held) == (1, 3)


LARGE = layout_of(np.zeros((150, 120)))  # one step a message, in slots of 2 MB


def new_pool():
    pool = SlotPool(LANES, messages=2)
    assert pool.offer(LARGE, STEPS).most_steps == 1
    return pool


def test_the_first_layout_offered_is_that_of_all_slots():
    pool = new_pool()
    other = layout_of(np.zeros(9))
    assert pool.offer(other, STEPS).layout == LARGE
    assert pool.slots == 2 + 3, "as many as messages may be on their way, and as may be held"


def test_a_step_has_one_slot_whoever_claims_it():
    pool = new_pool()
    slots = [pool.claim(1, step) for step in range(5)]
    assert slots == [0, 1, 2, 3, 4]
    assert [pool.claim(1, step) for step in range(5)] == slots
    assert [pool.find(1, step) for step in range(5)] == slots


def test_there_is_no_slot_when_all_are_taken_until_one_is_given_back():
    pool = new_pool()
    for step in range(5):
        pool.claim(1, step)
    assert pool.claim(1, 5) is None
    pool.free(2)
    assert pool.claim(1, 5) == 2
    assert pool.find(1, 6) is None


def test_a_newer_session_frees_what_was_being_filled_and_not_what_is_leased():
    pool = new_pool()
    for step in range(5):
        pool.claim(1, step)
    pool.lease(3)
    assert [pool.claim(2, step) for step in range(5)] == [0, 1, 2, 4, None]
    assert pool.claim(1, 5) is None, "a worker of the session before gets none"
    assert pool.find(1, 0) is None


def test_what_cannot_be_had_is_refused_for_good(monkeypatch):
    def no_room(file, size):
        raise OSError("no room")

    monkeypatch.setattr("stream_dataloader._memory.shared_memory.SharedFile.grow", no_room)
    pool = SlotPool(LANES, messages=2)
    assert pool.offer(MIXED, STEPS) is None
    assert pool.refused
    monkeypatch.undo()
    assert pool.offer(MIXED, STEPS) is None


def test_a_slot_is_free_when_the_last_array_over_it_is_gone():
    pool = new_pool()
    leases = SlotLeases(pool)
    pool.claim(1, 0)
    slot = leases.lease(1, 0, whole_windows=False)
    view = torch.from_numpy(slot.columns[0])[1, 2]
    del slot
    gc.collect()
    leases.release()
    assert pool.claim(1, 1) == 1, "a tensor over it is left"
    del view
    gc.collect()
    assert leases.in_use == 1, "it is known"
    leases.release()
    assert pool.claim(1, 2) == 0


def test_more_batches_than_may_be_held_are_copies():
    pool = new_pool()
    leases = SlotLeases(pool)
    held = []
    for step in range(4):
        number = pool.claim(1, step)
        pool.geometry.slot(pool.memory, pool.offset(number)).columns[0][:] = step
        held.append(leases.lease(1, step, whole_windows=False))
    assert pool.claim(1, 4) == 3, "the fourth was copied, and its slot is free"
    pool.geometry.slot(pool.memory, pool.offset(3)).columns[0][:] = -1
    assert [float(slot.columns[0].mean()) for slot in held] == [0, 1, 2, 3]


def test_leases_know_when_nothing_of_an_iteration_fits():
    pool = new_pool()
    leases = SlotLeases(pool)
    assert leases.lease(1, 0, whole_windows=False) is None
    assert leases.unfit
    pool.claim(1, 1)
    assert leases.lease(1, 1, whole_windows=False) is not None
    assert not leases.unfit
    assert leases.lease(1, 2, whole_windows=False) is None
    assert not leases.unfit, "something fitted"


def test_a_worker_writes_to_its_own_rows():
    pool = new_pool()
    writer = SlotWriter(PooledSlots(pool, 1, whole_windows=False), range(2, 4))
    layout = pool.geometry.layout
    block = writer.block(0, layout, STEPS)
    block.put_step(1, 0, (np.ones((150, 120)),))
    assert writer.left(block) == []
    slot = SlotLeases(pool).lease(1, 0, whole_windows=False)
    assert slot.columns[0][0, 3].all()
    assert not slot.columns[0][0, [0, 1, 2, 4]].any()


def test_windows_that_do_not_fit_the_slots_get_no_room_there():
    pool = new_pool()
    writer = SlotWriter(PooledSlots(pool, 1, whole_windows=False), range(2))
    assert writer.block(0, layout_of(np.zeros(9)), STEPS) is None
    assert writer.block(0, pool.geometry.layout, STEPS + 1) is None
    assert pool.find(1, 0) is None, "no slot was claimed for them"


@pytest.mark.parametrize("slot", [0, 65_533, 65_534, 65_535, 65_536, -1])
@pytest.mark.parametrize("messages", [3, 1023, 1100])
def test_any_number_of_slots_is_told_apart_at_any_step(messages, slot):
    pool = SlotPool(1, messages)
    pool.offer(layout_of(np.zeros(1)), 1)
    slot = min(slot, pool.slots - 1) % pool.slots
    states, places = pool.slot_states, len(pool._entries)
    states[: pool.slots] = 2
    states[slot] = 0
    newest, last_step = (1 << 21) - 1, (1 << 40) - 1
    for session, step in [(1, slot), (newest - 1, last_step - places), (newest, last_step)]:
        assert pool.claim(session, step) == slot
        assert pool.find(session, step) == slot
        assert pool.find(session, step - places) is None
        assert pool.find(session - 1, step) is None
        pool.free(slot)
