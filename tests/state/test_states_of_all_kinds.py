"""States of every kind of loader that this library saved before are still taken up, with the batches that came after.

`python tests/state/test_states_of_all_kinds.py FILE` saves such states with the library as it stands.
"""

import itertools
import json
import pathlib
import sys

import numpy as np
import pytest

from stream_dataloader import (
    LaneBatchSampler,
    StreamDataLoader,
    StreamDataset,
    interleave,
    sections,
    side_by_side,
)

FILE = pathlib.Path(__file__).parent.parent / "data" / "states_of_all_kinds.json"
LENGTHS = [5, 0, 3, 9, 1, 7, 2, 6, 4, 8, 3, 5]
GROUPS = [list(range(5)), list(range(5, 12)), list(range(12, 15)), list(range(15, 24)), list(range(24, 30))]
BATCHES = 4  # delivered before the state was saved


class Counted:
    """A stream with a state of its own."""

    def __init__(self, length):
        self._length, self._next = length, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self._next == self._length:
            raise StopIteration
        self._next += 1
        return self._next - 1

    def state_dict(self):
        return {"next": self._next}

    def load_state_dict(self, state):
        self._next = state["next"]


def windows(length):
    for begin in range(0, length, 2):
        yield np.arange(begin, min(begin + 2, length))


def dataset(open_stream=range, lengths=LENGTHS, **options):
    defaults = {"batch_size": 4, "time_steps": 2, "shuffle": True, "seed": 3}
    return StreamDataset(lengths, open_stream, **(defaults | options))


def with_lengths(**options):
    return StreamDataset(LENGTHS, range, batch_size=4, time_steps=2, shuffle=True, seed=3, lengths=LENGTHS, **options)


def mixed(exhausted):
    halves = [dataset(lengths=LENGTHS[:7]), dataset(lengths=LENGTHS[7:])]
    return interleave(halves, weights=[1, 2], exhausted=exhausted, seed=5)


def endless(lengths=LENGTHS):
    return dataset(lengths=lengths, padding_mode="cycle")


def sampler(**options):
    return LaneBatchSampler(GROUPS, 3, 2, shuffle=True, seed=7, **options)


#: How each kind of loader is built, for a number of workers.
KINDS = {
    "aligned": lambda n: StreamDataLoader(dataset(), n),
    "packed": lambda n: StreamDataLoader(dataset(windows="packed"), n),
    "windows of the stream's own": lambda n: StreamDataLoader(dataset(windows, time_steps=None), n),
    "no reservations": lambda n: StreamDataLoader(dataset(lookahead=0), n),
    "data": lambda n: StreamDataLoader(dataset(padding_mode="data", lookahead=2), n),
    "drop": lambda n: StreamDataLoader(dataset(padding_mode="drop"), n),
    "cycle": lambda n: StreamDataLoader(endless(), n),
    "in mid-epoch of n batches": lambda n: StreamDataLoader(endless(), n, batches_per_epoch=3),
    "between epochs of n batches": lambda n: StreamDataLoader(endless(), n, batches_per_epoch=4),
    "two groups": lambda n: StreamDataLoader(dataset(), n, groups=2),
    "known lengths": lambda n: StreamDataLoader(with_lengths(schedule="balanced"), n),
    "known lengths, two groups": lambda n: StreamDataLoader(with_lengths(), n, groups=2),
    "streams with states": lambda n: StreamDataLoader(dataset(Counted), n),
    "sections": lambda n: StreamDataLoader(dataset(sections=sections(LENGTHS, 3)), n),
    "mixed, dropped": lambda n: StreamDataLoader(mixed("drop"), n),
    "mixed, repeated": lambda n: StreamDataLoader(mixed("repeat"), n),
    "side by side": lambda n: side_by_side([(dataset(), 2), (endless(LENGTHS[3:]), 2)], n),
    "sampler": lambda _: sampler(padding_mode="zeros"),
    "sampler in mid-epoch of n batches": lambda _: sampler(batches_per_epoch=3),
    "sampler between epochs of n batches": lambda _: sampler(batches_per_epoch=4),
}


def plain(batch):
    if isinstance(batch, list):
        return [[int(index), index.lane, index.t, index.is_start, index.mask] for index in batch]
    fields = (batch.data, batch.source, batch.position, batch.mask, batch.is_start)
    return [field.tolist() for field in fields]


def saved(build):
    """A state after some batches, and the batches that come after it."""
    loader = build(0)
    batches = iter(loader)
    for _ in range(BATCHES):
        try:
            next(batches)
        except StopIteration:  # an epoch of fewer batches
            batches = iter(loader)
            next(batches)
    state = loader.state_dict()
    after = []
    for batch in batches:
        after.append(plain(batch))
        if len(after) == 4:
            break
    other = build(0)
    other.load_state_dict(state)
    if not after:  # an epoch of n batches was over
        after = [plain(batch) for batch in itertools.islice(other, 4)]
    return json.loads(json.dumps({"state": state, "after": after}))


SAVED = json.loads(FILE.read_text()) if FILE.exists() else {}


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_state_of_each_kind_goes_on_where_it_stood(kind, workers):
    loader = KINDS[kind](workers)
    loader.load_state_dict(SAVED[kind]["state"])
    expected = SAVED[kind]["after"]
    assert expected
    assert [plain(batch) for batch in itertools.islice(loader, len(expected))] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_of_each_kind_is_as_it_was(kind):
    found = saved(KINDS[kind])
    for group in ("group_0", "group_1"):
        if group in found["state"]:
            del found["state"][group][4:]  # what items look like, which states did not say then
    assert found == SAVED[kind]


if __name__ == "__main__":
    pathlib.Path(sys.argv[1]).write_text(json.dumps({kind: saved(build) for kind, build in KINDS.items()}))
