"""`load_state_dict(state, changes=...)`: the rest of an epoch under other options, held against the serial model."""

import itertools
import json
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import Case, Counting, cases, cells, check_fields, key, keys, pairs, ways
from helpers import random_cases
from hypothesis import assume, given
from hypothesis import strategies as st
from serial_model import changed

from stream_dataloader import Sections, StateError, StreamDataLoader, interleave, merge_states, side_by_side
from stream_dataloader.recurrent import RecurrentState

MODES = ("zeros", "data", "drop", "cycle")
MOST = 25
LENGTHS = [4, 0, 9, 2, 2, 7, 1, 3, 5, 8, 6]
THREAD = {"num_workers": 1, "worker_method": "thread"}
CASE = Case(LENGTHS, lanes=3, time_steps=2, shuffle=True, seed=1)
ALL = ("batch_size", "time_steps", "sources")


def loaded(case, state, way=(), **options):
    loader = StreamDataLoader(case.dataset(**options), **dict(way))
    loader.load_state_dict(json.loads(json.dumps(state)), changes=ALL)
    return loader


def read(loader, most=MOST):
    batches = list(itertools.islice(loader, most))
    for batch in batches:
        check_fields(batch)
    return [cells(batch) for batch in batches]


@st.composite
def changing(draw, modes=MODES):
    """A case, how many of its batches are read, and the case that follows."""
    case = draw(cases(max_streams=14, max_length=7, max_lanes=5, modes=modes))
    case.lengths[0] = max(1, case.lengths[0])
    lanes = draw(st.integers(1, 6 if case.padding_mode != "drop" else len(case.lengths)))
    return case, draw(st.integers(1, 8)), replace(case, lanes=lanes, time_steps=draw(st.integers(1, 5)))


@random_cases(1000, quick=7)
@given(changing(), st.booleans(), ways(), st.integers(0, 4))
def test_lanes_and_windows_change_as_the_model_says(change, known, way, again):
    case, taken, other = change
    assume((case.lanes, case.time_steps) != (other.lanes, other.time_steps))
    options = {"lengths": case.lengths} if known else {}
    first = case.model(case.dataset())
    model = list(itertools.islice(first.batches(), taken))
    before = StreamDataLoader(case.dataset(**options))
    assert [cells(batch) for batch in itertools.islice(before, taken)] == model
    assume(len(model) == taken)
    state = before.state_dict()
    assume(state["epoch"] == 0)  # else it was the last batch
    expected = list(itertools.islice(changed(first, model[-1], other.lanes, other.time_steps).batches(), MOST))
    if "num_workers" in way:
        way["num_workers"] = min(way["num_workers"], other.lanes)
    loader = StreamDataLoader(other.dataset(**options), **way)
    loader.load_state_dict(json.loads(json.dumps(state)), changes=("batch_size", "time_steps"))
    if known and case.padding_mode != "cycle" and len(expected) < MOST:
        assert len(loader) == taken + len(expected)
    iterator = iter(loader)
    head = [cells(batch) for batch in itertools.islice(iterator, again)]
    middle = loader.state_dict()
    assert head + [cells(batch) for batch in itertools.islice(iterator, MOST - len(head))] == expected
    if len(head) == again < len(expected) and middle["epoch"] == 0:  # and the rest of that from its own state
        assert read(loaded(other, middle, **options), MOST - again) == expected[again:]
        third = loaded(other, state, **options)
        assert third.skip(again) == again
        assert read(third, MOST - again) == expected[again:]


@random_cases(1000, quick=5)
@given(changing(("zeros", "data", "drop", "cycle")), st.lists(st.integers(0, 7), max_size=8), st.booleans())
def test_a_longer_list_joins_behind_what_is_left(change, more, known):
    case, taken, other = change
    longer = replace(other, lengths=case.lengths + more)
    before = StreamDataLoader(case.dataset(**({"lengths": case.lengths} if known else {})))
    head = [cells(batch) for batch in itertools.islice(before, taken)]
    state = before.state_dict()
    assume(state["epoch"] == 0 and len(head) == taken)
    options = {"lengths": longer.lengths} if known else {}
    loader = loaded(longer, state, **options)
    count = len(loader) if known and case.padding_mode != "cycle" else None
    rest = read(loader, 200 if case.padding_mode == "cycle" else None)
    assert count in (None, len(head) + len(rest))
    found = Counter(cell[:2] for batch in head + rest for lane in batch for cell in lane if cell and cell[2])
    every = {(source, position) for source, length in enumerate(longer.lengths) for position in range(length)}
    if case.padding_mode in ("zeros", "data"):
        assert found == Counter(every)
    elif case.padding_mode == "drop":
        assert max(found.values()) == 1
        assert found.keys() <= every
    else:
        assert found.keys() == every
    assert read(loaded(longer, state, THREAD, **options), len(rest)) == rest


def of(case=CASE, **options):
    return case.dataset(**{"lengths": case.lengths} | options)


def windows(source):
    number, length = source
    for begin in range(0, length, 2):
        yield np.array([(number, i) for i in range(begin, min(begin + 2, length))])


class Numbers:
    """A stream that says where it stands, by itself."""

    def __init__(self, source):
        self.items, self.place = list(Counting()(source)), 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.place == len(self.items):
            raise StopIteration
        self.place += 1
        return self.items[self.place - 1]

    def state_dict(self):
        return {"place": np.array(self.place)}

    def load_state_dict(self, state):
        self.place = int(state["place"])


KINDS = {
    "sections": {"sections": 3},
    "jitter": {"sections": Sections(3, jitter=True)},
    "balanced": {"schedule": "balanced"},
    "longest first": {"schedule": "longest_first"},
    "first come": {"deterministic": False},
    "skips": {"on_error": "skip"},
    "own windows": {"open_stream": windows, "time_steps": None, "windows": "given", "lengths": None},
    "own state": {"open_stream": Numbers},
}


def items(batches):
    """What is read as something new, as (source, position)."""
    found = []
    for batch in batches:
        new = batch.mask.numpy() & (batch.source_index.numpy() >= 0)
        found += zip(batch.source_index.numpy()[new].tolist(), batch.position.numpy()[new].tolist(), strict=True)
    return sorted(found)


LONGER = replace(CASE, lengths=[*LENGTHS, 5, 1, 12, 3])
ITEMS, MORE = ([(n, i) for n, length in enumerate(case.lengths) for i in range(length)] for case in (CASE, LONGER))


@pytest.mark.one_of_each
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("lanes", "number"), [(1, 0), (2, 0), (5, 2)])
def test_every_kind_of_dataset_reads_each_item_once(kind, lanes, number):
    before = StreamDataLoader(of(**KINDS[kind]), number)
    head = list(itertools.islice(before, 3))
    state = before.state_dict()
    loader = StreamDataLoader(of(LONGER, **KINDS[kind], batch_size=lanes), number)
    with pytest.raises(StateError, match="batch_size"):
        loader.load_state_dict(state)
    loader.load_state_dict(state, changes=["batch_size", "sources"])
    iterator = iter(loader)
    middle = list(itertools.islice(iterator, 2))
    again = StreamDataLoader(of(LONGER, **KINDS[kind], batch_size=3))
    again.load_state_dict(loader.state_dict(), changes=["batch_size"])
    assert items([*head, *middle, *again]) == items([*head, *middle, *iterator]) == MORE


def test_groups_change_each_for_itself():
    def ranks(world_size, state=None, lanes=4):
        loaders = []
        for rank in range(world_size):
            own = StreamDataLoader(
                of(batch_size=lanes // world_size), virtual_ranks=2, rank=rank, world_size=world_size
            )
            if state is not None:
                own.load_state_dict(state, changes=ALL)
            loaders.append(own)
        return loaders

    before = ranks(2)
    head = [batch for loader in before for batch in itertools.islice(loader, 3)]
    whole = merge_states([loader.state_dict() for loader in before])
    (alone,) = ranks(1, whole, lanes=2)
    assert len(alone) == 3 + len(rest := list(alone))
    assert items([*head, *rest]) == ITEMS
    with pytest.warns(UserWarning, match="ranks cannot agree"):
        assert items([*head, *[batch for loader in ranks(2, whole, lanes=2) for batch in loader]]) == ITEMS


IN_SEVERAL_PARTS = {
    "one part": lambda lanes, steps: StreamDataLoader(of(batch_size=lanes, time_steps=steps)),
    "virtual ranks": lambda lanes, steps: StreamDataLoader(of(batch_size=2 * lanes, time_steps=steps), virtual_ranks=2),
    "side by side": lambda lanes, steps: side_by_side([(of(time_steps=steps, seed=n), lanes) for n in range(2)]),
}


@pytest.mark.parametrize("kind", IN_SEVERAL_PARTS)
@pytest.mark.parametrize("lanes", [1, 2, 5])
def test_carried_states_go_along_with_their_lanes(lanes, kind):
    def counted(loader, carry):
        """How many items each lane's state knows of the stream behind each window, and how many were read of it."""
        for batch in loader:
            before = carry.before(batch)
            counts = batch.mask.sum(0)[:, None] + (0 if before is None else before)
            carry.after(batch, counts)
            yield batch, counts[:, 0]

    loader, carry = IN_SEVERAL_PARTS[kind](3, 2), RecurrentState(batch_dim=0)
    for _ in itertools.islice(counted(loader, carry), 3):
        pass
    saved = loader.state_dict(), carry.state_dict()
    loader, carry = IN_SEVERAL_PARTS[kind](lanes, 3), RecurrentState(batch_dim=0)
    loader.load_state_dict(saved[0], changes=ALL)
    carry.load_state_dict(saved[1], loader=loader)
    begun = torch.tensor(0)
    for batch, counts in counted(loader, carry):
        begun = torch.where(batch.is_first[0], batch.position[0], begun)  # a stream that another lane left
        read = batch.position.max(0).values + 1 - begun
        assert (counts == read)[batch.mask[0]].all()
        saved = loader.state_dict(), carry.state_dict()
    carry.load_state_dict(saved[1])


def test_members_side_by_side_change_together():
    def loader(time_steps):
        cases = (Case(own, lanes=1, time_steps=time_steps) for own in ([17, 9, 13, 8], [15, 16, 12]))
        members = [(case.dataset(lengths=case.lengths, open_stream=pairs), 1) for case in cases]
        return side_by_side(members)

    before = loader(2)
    for _ in itertools.islice(before, 4):
        pass
    after = loader(4)
    after.load_state_dict(before.state_dict(), changes="time_steps")
    count, batches, states = len(after), [], []
    for batch in after:
        batches.append(key(batch))
        states.append(after.state_dict())
    assert count == 4 + len(batches) > 6
    for number, state in enumerate(states[:-1], 1):
        again = loader(4)
        again.load_state_dict(state)
        assert keys(again) == batches[number:]
    assert states[-1]["epoch"] == 1


def test_streams_of_removed_lanes_that_have_no_item_left_do_not_make_an_endless_run_seem_empty():
    before, after = (StreamDataLoader(Case([1], lanes, 1, padding_mode="cycle").dataset()) for lanes in (6, 1))
    next(iter(before))
    after.load_state_dict(before.state_dict(), changes=["batch_size"])
    assert {int(batch.position) for batch in itertools.islice(after, 3)} == {0}


def test_an_endless_run_gains_sources_again_and_again():
    lengths, state, found = [3, 2, 4], None, Counter()
    for more in ([1, 5], [2], [], [6, 6]):
        case = Case(lengths, lanes=2, time_steps=2, padding_mode="cycle", shuffle=True)
        loader = StreamDataLoader(case.dataset())
        if state is not None:
            loader.load_state_dict(state, changes=["sources"])
        for batch in itertools.islice(loader, 11):
            found.update(batch.source_index[batch.is_first].tolist())
        state, lengths = loader.state_dict(), lengths + more
    assert max(found.values()) > min(found.values()) > 0
    assert found.keys() == set(range(len(lengths) - 2))


def grown(by=1, first=()):
    return StreamDataLoader(replace(CASE, lengths=[*first, *LENGTHS, *[2] * by]).dataset())


def changed_windows():
    return StreamDataLoader(of(open_stream=windows, time_steps=None, windows="given"))


def mixed(by=0):
    return StreamDataLoader(interleave([CASE.dataset(), grown(by).dataset], batch_size=2))


@pytest.mark.parametrize(
    ("before", "after", "changes", "told"),
    [
        (grown(), grown(0), ALL, "can only become longer"),
        (grown(0), grown(first=[9]), ["sources"], "other sources"),
        (grown(0), grown(), (), r'changes=\["sources"\]'),
        (grown(0), changed_windows(), ALL, "time_steps"),
        (mixed(), StreamDataLoader(of()), ALL, "one dataset"),
        (mixed(1), mixed(), ALL, "can only become longer"),
        (mixed(), mixed(1), (), r'the numbers of sources .*changes=\["sources"\]'),
        (mixed(1), mixed(), (), "the numbers of sources .*; build it as it was or start"),
        (grown(0), StreamDataLoader(of(windows="packed")), ALL, "windows"),
        (grown(0), StreamDataLoader(of(batch_size=2)), ["time_steps"], "batch_size"),
    ],
)
def test_what_is_not_meant_or_cannot_be_is_refused(before, after, changes, told):
    next(iter(before))
    with pytest.raises(StateError, match=told):
        after.load_state_dict(before.state_dict(), changes=changes)


@pytest.mark.parametrize(
    ("after", "named"),
    [
        (StreamDataLoader(of(replace(CASE, lengths=LENGTHS[:-1]))), []),
        (changed_windows(), []),
        (grown(1), ["sources"]),
        (StreamDataLoader(of(batch_size=2)), ["batch_size"]),
        (StreamDataLoader(of(time_steps=3)), ["time_steps"]),
    ],
    ids=["fewer sources", "windows of streams", "more sources", "fewer lanes", "longer windows"],
)
def test_a_refusal_names_only_a_change_that_would_be_taken(after, named):
    with pytest.raises(StateError, match="build it as it was") as caught:
        after.load_state_dict(grown(0).state_dict())
    assert re.findall(r'changes=\["(\w+)"\]', str(caught.value)) == named


def test_a_change_of_no_name_is_refused():
    loader = grown()
    with pytest.raises(ValueError, match="lanes"):
        loader.load_state_dict(loader.state_dict(), changes=["lanes"])
