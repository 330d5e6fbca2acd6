"""The contract of stores: a store that is wrong in one way does not pass."""

import inspect
import os

import numpy as np
import pytest
from packed import STREAMS, memory_mapped

from stream_dataloader._engine.kept_fields import map_leaves
from stream_dataloader.errors import StoreError
from stream_dataloader.stores import memmap
from stream_dataloader.stores._base.rows import RowSteps
from stream_dataloader.stores.memmap import MemmapStore
from stream_dataloader.testing import StoreContract


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return memory_mapped(tmp_path_factory.mktemp("store"))


def of_steps(**methods):
    """A store whose steps have other methods."""

    def open_steps(self, number):
        steps = MemmapStore._open_steps(self, number)
        steps.__class__ = type("Other", (RowSteps,), methods)
        return steps

    return {"_open_steps": open_steps}


right = RowSteps.item
ROOM = np.empty((3, 4, 5), np.uint8)


def one_room(steps, index):
    ROOM[...] = right(steps, index)["image"]
    return right(steps, index) | {"image": ROOM}


def half_of(out):
    return map_leaves(out, lambda rows: rows[: (len(rows) + 1) // 2])


def says_nothing(self):
    try:
        return MemmapStore._read_index(self)
    except (OSError, ValueError):
        raise StoreError("damaged") from None


def raises(kind):
    def method(self, number):
        raise kind("damaged")

    return method


def closed_for_good(self):
    MemmapStore.close(self)
    self._index = "closed"


def other_each_time(self):
    index = MemmapStore._read_index(self)
    index.fingerprint = os.urandom(8).hex()
    return index


def state_with(**others):
    return lambda self: MemmapStore.__getstate__(self) | others


#: What a store has that is wrong, and the test that finds it.
FAULTS = [
    (of_steps(item=lambda steps, i: right(steps, i) | {"label": np.int64(7)}), "holds_what_was_put_in"),
    (of_steps(__len__=lambda steps: max(0, steps._steps - 1)), "holds_what_was_put_in"),
    (of_steps(item=one_room), "items_are_copies"),
    (of_steps(item=lambda steps, i: right(steps, i) | {"image": steps._parts[0][1][i]}), "items_are_copies"),
    (
        of_steps(read=lambda steps, start, out: RowSteps.read(steps, max(0, start - 1), out)),
        "writes_what_it_yields",
    ),
    (of_steps(read=lambda steps, start, out: RowSteps.read(steps, start, half_of(out))), "writes_what_it_yields"),
    ({"lengths": property(lambda self: MemmapStore.lengths.fget(self) + 1)}, "knows_its_lengths"),
    (
        {"length": lambda self, source: MemmapStore.length(self, source[0] if type(source) is tuple else source)},
        "cuts_sections",
    ),
    ({"_section": lambda self, source: (*MemmapStore._section(self, source)[:2], None)}, "cuts_sections"),
    ({"key": lambda self, number: "same"}, "keys_name_streams"),
    ({"_leaves": lambda self: dict(list(MemmapStore._leaves(self).items())[1:])}, "tells_what_it_holds"),
    ({"metadata": raises(RuntimeError)}, "tells_what_it_holds"),
    ({"close": closed_for_good}, "can_be_used_after_it_was_closed"),
    ({"check_stream": raises(StoreError)}, "is_whole"),
    ({"check_stream": lambda self, number: None}, "damage_is_noticed"),
    ({"_read_index": says_nothing}, "damage_is_noticed"),
    ({"__getstate__": state_with(all=bytes(1 << 17))}, "costs_little_to_send"),
    ({"_check_number": lambda self, number: int(number) % len(self)}, "refuses_what_is_no_stream"),
    ({"__getstate__": state_with(_expected=None), "_read_index": other_each_time}, "is_found"),
]


@pytest.mark.parametrize(("fault", "test"), FAULTS)
def test_a_store_that_is_wrong_does_not_pass(path, fault, test, monkeypatch):
    kind = type("WrongStore", (MemmapStore,), fault | {"__module__": __name__})
    monkeypatch.setattr(memmap, "MemmapStore", kind)
    monkeypatch.setitem(globals(), "WrongStore", kind)  # to be pickled
    contract = StoreContract()
    contract.has_checksums = True
    given = {"open_stream": kind(path), "sources": range(4), "expected": STREAMS}
    check = getattr(contract, f"test_{test}")
    with pytest.raises((AssertionError, RuntimeError, AttributeError)):
        check(**{name: given[name] for name in inspect.signature(check).parameters})


def test_a_store_that_is_right_passes(path):
    contract = StoreContract()
    contract.num_workers, contract.damages, contract.has_checksums = (0,), 5, True
    store = MemmapStore(path)
    assert {test for _, test in FAULTS} < set(contract.check(store, expected=STREAMS))
    contract.damages = 1
    assert "holds_what_was_put_in" in contract.check(store)
    with pytest.raises(AssertionError):
        contract.check(store, [3, (2, 1, 5)], expected=STREAMS[::-1])
    store.close()
