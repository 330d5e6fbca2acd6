"""The contract of stores: a store that is wrong in one way does not pass."""

import inspect
import os

import numpy as np
import pytest
from packed import images, pack_here

from stream_dataloader.errors import StoreError
from stream_dataloader.stores import memmap
from stream_dataloader.stores.memmap import MemmapStore
from stream_dataloader.stores.memmap.writer import MemmapPacker
from stream_dataloader.testing import StoreContract

STREAMS = images((5, 0, 9, 3))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    pack_here(MemmapPacker(str(folder)), STREAMS)
    return str(folder)


class Changed:
    """Steps that are others."""

    def __init__(self, steps):
        self.steps = steps

    def __len__(self):
        return len(self.steps)

    def item(self, index):
        return self.steps.item(index)

    def read(self, start, out):
        self.steps.read(start, out)

    def close(self):
        self.steps.close()


class AnotherItem(Changed):
    def item(self, index):
        item = self.steps.item(index)
        return item | {"label": item["label"] + 1}


class OneRoomForAll(Changed):
    room = np.empty((3, 4, 5), np.uint8)

    def item(self, index):
        item = self.steps.item(index)
        self.room[...] = item["image"]
        return item | {"image": self.room}


class ViewsOfTheMap(Changed):
    def item(self, index):
        return self.steps.item(index) | {"image": self.steps._rows[0][index]}


class OtherRows(Changed):
    def read(self, start, out):
        self.steps.read(max(0, start - 1), out)


class TooShort(Changed):
    def __len__(self):
        return max(0, len(self.steps) - 1)


class OtherSteps(MemmapStore):
    kind = Changed

    def _open_steps(self, number):
        return self.kind(super()._open_steps(number))


class WrongLengths(MemmapStore):
    @property
    def lengths(self):
        return super().lengths + 1


class LengthOfTheWhole(MemmapStore):
    def length(self, source):
        return super().length(source[0] if isinstance(source, tuple) else source)


class NoStop(MemmapStore):
    def _section(self, source):
        return *super()._section(source)[:2], None


class OneKey(MemmapStore):
    def key(self, number):
        return "same"


class LeavesLeftOut(MemmapStore):
    def _leaves(self):
        return dict(list(super()._leaves().items())[1:])


class NoMetadata(MemmapStore):
    def metadata(self, number):
        raise RuntimeError("none")


class ClosedForGood(MemmapStore):
    def close(self):
        super().close()
        self._index = "closed"


class FindsFault(MemmapStore):
    def check_stream(self, number):
        raise StoreError("damaged")


class ChecksNothing(MemmapStore):
    def check_stream(self, number):
        pass


class NamesNothing(MemmapStore):
    def _read_index(self):
        try:
            return super()._read_index()
        except (OSError, ValueError):
            raise StoreError("damaged") from None


class SendsItself(MemmapStore):
    def __getstate__(self):
        return super().__getstate__() | {"all": bytes(1 << 17)}


class RunsInCircles(MemmapStore):
    def _check_number(self, number):
        return int(number) % len(self)


class OtherEachTime(MemmapStore):
    def __getstate__(self):
        return super().__getstate__() | {"_expected": None}

    def _read_index(self):
        index = super()._read_index()
        index.fingerprint = os.urandom(8).hex()
        return index


FAULTS = [
    (AnotherItem, "holds_what_was_put_in"),
    (TooShort, "holds_what_was_put_in"),
    (OneRoomForAll, "items_are_copies"),
    (ViewsOfTheMap, "items_are_copies"),
    (OtherRows, "writes_what_it_yields"),
    (WrongLengths, "knows_its_lengths"),
    (LengthOfTheWhole, "cuts_sections"),
    (NoStop, "cuts_sections"),
    (OneKey, "keys_name_streams"),
    (LeavesLeftOut, "tells_what_it_holds"),
    (NoMetadata, "tells_what_it_holds"),
    (ClosedForGood, "can_be_used_after_it_was_closed"),
    (FindsFault, "is_whole"),
    (ChecksNothing, "damage_is_noticed"),
    (NamesNothing, "damage_is_noticed"),
    (SendsItself, "costs_little_to_send"),
    (RunsInCircles, "refuses_what_is_no_stream"),
    (OtherEachTime, "is_found"),
]


@pytest.mark.parametrize(("fault", "test"), FAULTS, ids=lambda one: getattr(one, "__name__", one))
def test_a_store_that_is_wrong_does_not_pass(path, fault, test, monkeypatch):
    kind = type(fault.__name__, (OtherSteps,), {"kind": fault}) if issubclass(fault, Changed) else fault
    monkeypatch.setattr(memmap, "MemmapStore", kind)
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
    assert {test for _, test in FAULTS} < set(contract.check_store(store, STREAMS))
    store.close()
