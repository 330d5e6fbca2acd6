"""Where things lie in a slot, which slot is free, and who holds one; without processes."""

import numpy as np
import pytest

from stream_dataloader._engine.assembly.slot_pool import SlotLeases, SlotPool
from stream_dataloader._engine.items.layout import Layout


def layout_of(item):
    return Layout.of(item, windowed=False)[0]


def test_a_newer_session_frees_what_was_being_filled_and_not_what_is_leased():
    pool = SlotPool(5, messages=2)
    large = layout_of(np.zeros((150, 120)))  # one step a message, in slots of 2 MB
    assert pool.offer(large, 3, False).most_steps == 1
    assert [pool.claim(1, step) for step in range(6)] == [0, 1, 2, 3, 4, None]
    pool.slot_states[3] = 2
    assert [pool.claim(2, step) for step in range(3)] == [0, 1, 2]
    assert pool.claim(1, 5) is None, "a worker of the session before gets none"
    assert [pool.claim(2, step) for step in (3, 4)] == [4, None]
    assert pool.find(1, 0) is None


def test_items_fit_no_slot_only_if_none_of_an_iteration_has_one():
    pool = SlotPool(1, messages=2)
    leases = SlotLeases(pool)
    pool.offer(layout_of(np.zeros(1)), 1, False)
    told = []
    for step in (0, 1, 2):
        if step == 1:
            pool.claim(1, step)
        leases.lease(1, step)
        told.append(leases.unfit)
    assert told == [True, False, False]


@pytest.mark.parametrize("slot", [0, 65_533, 65_534, 65_535, 65_536, -1])
@pytest.mark.parametrize("messages", [3, 1023, 1100])
def test_any_number_of_slots_is_told_apart_at_any_step(messages, slot):
    pool = SlotPool(1, messages)
    pool.offer(layout_of(np.zeros(1)), 1, False)
    slot = min(slot, pool.slots - 1) % pool.slots
    states, places = np.asarray(pool.slot_states), len(pool._entries)
    states[: pool.slots] = 2
    states[slot] = 0
    newest, last_step = (1 << 21) - 1, (1 << 40) - 1
    for session, step in [(1, slot), (newest - 1, last_step - places), (newest, last_step)]:
        assert pool.claim(session, step) == slot
        assert pool.find(session, step) == slot
        assert pool.find(session, step - places) is None
        assert pool.find(session - 1, step) is None
        states[slot] = 0
