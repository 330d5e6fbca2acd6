"""`dataset.extend` of datasets that are interleaved: weights, orders, random numbers and states while one grows."""

import itertools
import pickle
from collections import Counter

import pytest
from cases import key
from growing import Growing, Numbers, check_lanes, growing
from helpers import random_cases
from hypothesis import given
from hypothesis import strategies as st

from stream_dataloader import (
    StateError,
    StreamDataLoader,
    StreamDataset,
    interleave,
    merge_states,
)


@random_cases(1000, 25)
@given(growing(modes=("zeros", "data"), exhausted=("leave_out",)))
def test_each_item_is_read_once_whichever_dataset_grows(case):
    batches = [batch for batch, _ in case.read(case.loader(), most=400)]
    lists = case.lengths(len(batches) if batches else 0)
    assert check_lanes(batches) == {
        (member, index, position): 1
        for member, lengths in enumerate(lists)
        for index, length in enumerate(lengths)
        for position in range(length)
    }


@random_cases(500, 15)
@given(growing(modes=("zeros", "data"), exhausted=("repeat",)))
def test_an_epoch_that_repeats_ends_once_each_dataset_was_drawn_in_full(case):
    batches = [batch for batch, _ in case.read(case.loader(), most=400)]
    if len(batches) == 400:
        return  # a weight near 0
    new = check_lanes(batches)
    for member, lengths in enumerate(case.lengths(len(batches) if batches else 0)):
        for index, length in enumerate(lengths):
            assert all(new[member, index, position] for position in range(length)), (member, index)


@random_cases(1000, 25)
@given(growing(), st.data())
def test_a_state_behind_each_batch_goes_on_with_the_longer_lists(case, data):
    """A resumed run is of datasets that are built with all sources of that moment; its batches are the same."""
    read = case.read(case.loader(), most=14)
    if not read:
        return
    at = data.draw(st.integers(1, len(read)))
    if read[at - 1][1]["epoch"] > read[at - 1][0].epoch and case.options["padding_mode"] != "cycle":
        return  # saved where the epoch was known to end, so it is of the next one; the lists grew after that
    loader = case.loader(at - 1)
    loader.load_state_dict(read[at - 1][1])
    case.grow(at)
    again = case.read(loader, most=len(read) - at, begin=at)
    assert [key(batch) for batch, _ in again] == [key(batch) for batch, _ in read[at:]]
    assert [state for _, state in again] == [state for _, state in read[at:]]


@random_cases(300, 12)
@given(growing(modes=("zeros", "drop", "cycle")), st.integers(1, 6))
def test_extending_and_loading_the_state_into_longer_datasets_are_the_same(case, at):
    case.later = dict(itertools.islice(case.later.items(), 1))
    for behind in case.later:
        read = case.read(case.loader(), most=behind + 6)
        if len(read) < behind or read[behind - 1][1]["epoch"] > read[behind - 1][0].epoch:
            return
        loader = case.loader(behind)
        loader.load_state_dict(read[behind - 1][1], changes=["sources", "weights"])
        again = list(itertools.islice(loader, len(read) - behind))
        assert [key(batch) for batch in again] == [key(batch) for batch, _ in read[behind:]]


def starts(case, most=60, **others):
    """The rows of the first items of streams, in order; of a single lane."""
    batches = [batch for batch, _ in case.read(case.loader(**others), most)]
    return [batch.data[0, 0].tolist() for batch in batches if batch.is_first[0, 0]]


ENDLESS = {"padding_mode": "cycle", "exhausted": "repeat", "batch_size": 1, "time_steps": 2, "seed": 3, "lookahead": 0}


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("cut", [None, 2])
def test_in_an_endless_mix_the_other_datasets_do_not_notice(shuffle, cut):
    """Its weights hold all the time, and a dataset's order and random numbers are its own."""
    own = ({}, {"shuffle": True, "sections": cut}, {"shuffle": True})
    before = Growing([[2, 2], [2, 2, 2], [2] * 4], {}, ENDLESS | {"shuffle": shuffle}, [2, 1, 1], own)
    case = Growing(before.lists, {4: [(0, [2] * 3)], 21: [(0, [2]), (1, [2, 2])]}, before.options, [2, 1, 1], own)
    expected, found = starts(before), starts(case)
    assert [row[0] for row in found] == [row[0] for row in expected]
    assert [row for row in found if row[0] == 2] == [row for row in expected if row[0] == 2]
    assert {row[1] for row in found if row[0] == 0} == {*range(6)}
    assert {row[1] for row in found if row[0] == 1} == {*range(5)}


def test_in_an_endless_mix_new_sources_join_at_the_next_pass_over_their_dataset():
    own = ({"shuffle": True}, {"shuffle": True}, {})
    case = Growing([[2] * 4, [2] * 3], {6: [(1, [2, 2])], 20: [(0, [2])], 21: [(1, [2])]}, ENDLESS, [1, 1], own)
    counts = {0: 4, 1: 3}
    left = {0: set(), 1: set()}
    for number, (member, index, *_) in enumerate(starts(case)):
        counts[1] = 3 + 2 * (number >= 6) + (number >= 21)
        counts[0] = 4 + (number >= 20)
        left[member] = left[member] or {*range(counts[member])}
        assert index in left[member], (number, member, index)
        left[member].remove(index)


@pytest.mark.parametrize("weights_by", ["sources", "steps"])
def test_with_cycle_and_leave_out_new_sources_join_at_the_next_pass_over_all(weights_by):
    """Lists grow twice in the first pass; the second time the weights change there, too, if they count steps."""
    options = ENDLESS | {"exhausted": "leave_out", "shuffle": True, "weights_by": weights_by}
    own = ({"shuffle": True}, {"shuffle": True}, {})
    later = {2: [(0, [2])], 3: [(1, [8, 2])], 9: [(0, [2])]}
    rows = [(row[0], row[1]) for row in starts(Growing([[2] * 3, [2] * 3], later, options, own=own, knows=True))]
    for one, other in [(3, 3), (4, 5), (5, 5), (5, 5)]:
        own, rows = rows[: one + other], rows[one + other :]
        assert sorted(own) == [*((0, index) for index in range(one)), *((1, index) for index in range(other))]


@pytest.mark.one_of_each
@pytest.mark.parametrize(
    "workers", [{"num_workers": 2, "persistent_workers": True}, {"num_workers": 2, "worker_method": "thread"}]
)
@pytest.mark.parametrize("options", [{}, {"padding_mode": "cycle"}, ENDLESS | {"batch_size": 3}])
def test_batches_are_the_same_for_any_workers(workers, options):
    own = ({"shuffle": True}, {"shuffle": True}, {})
    case = Growing([[5, 3], [4, 6, 2]], {2: [(0, [2, 7])], 3: [(1, [4]), (0, [1])]}, options, [2, 1], own)
    expected = case.read(case.loader(), 20)
    found = case.read(case.loader(0, **workers), 20)
    assert [key(batch) for batch, _ in found] == [key(batch) for batch, _ in expected]
    assert [state for _, state in found] == [state for _, state in expected]


def test_length_counts_what_was_added():
    for exhausted in ("leave_out", "repeat"):
        case = Growing([[4, 4], [4]], {1: [(1, [4, 4])]}, {"batch_size": 1, "exhausted": exhausted}, knows=True)
        loader = case.loader()
        before = len(loader)
        assert len(case.read(loader)) == len(loader) > before


def test_shares_of_steps_follow_the_lengths():
    """After long sources came, sources of the dataset are drawn less often, so its share of time steps stays."""
    options = ENDLESS | {"weights_by": "steps", "time_steps": 4}
    case = Growing([[4] * 4, [4] * 4], {20: [(0, [36] * 4)]}, options, [1, 1], knows=True)
    items = Counter(int(batch.data[0, 0, 0]) for batch, _ in case.read(case.loader(), 600)[100:])
    assert abs(items[0] - items[1]) < 80


def test_other_weights_and_longer_lists_at_once():
    own = ({"shuffle": True}, {"shuffle": True}, {})
    for options in ({}, {"padding_mode": "cycle"}, ENDLESS):
        case = Growing([[3, 2], [4, 1, 2]], {2: [(0, [2, 2])]}, {"batch_size": 1, **options}, [1, 1], own)
        (*_, (_, state)) = case.read(case.loader(), 3)
        case.weights = [3, 1]
        loader = case.loader(3)
        with pytest.raises(StateError, match=r"weights \[1.0, 1.0\], and the dataset has \[3.0, 1.0\]"):
            loader.load_state_dict(state)
        loader.load_state_dict(state, changes=["weights"])
        read = [(batch, batch.state_dict()) for batch in itertools.islice(loader, 8)]
        again = case.loader(3)
        again.load_state_dict(read[2][1])
        rest = [key(batch) for batch in itertools.islice(again, len(read) - 3)]
        assert rest == [key(batch) for batch, _ in read[3:]]


def test_other_weights_hold_in_the_pass_in_which_new_sources_join():
    options = ENDLESS | {"exhausted": "leave_out", "shuffle": False}
    case = Growing([[2] * 6, [2] * 6], {1: [(0, [2])]}, options, [1, 1])
    (*_, (_, state)) = case.read(case.loader(), 2)
    case.weights = [50, 1]
    loader = case.loader(2)
    loader.load_state_dict(state, changes=["weights"])
    members = [int(batch.data[0, 0, 0]) for batch in itertools.islice(loader, 23)]
    assert members == [0] * 5 + [1] * 5 + [0] * 7 + [1] * 6


@pytest.mark.filterwarnings("ignore:skipped the rest of a stream:RuntimeWarning")
def test_a_source_that_failed_counts_once_although_its_number_moved_up():
    class Broken(Numbers):
        def __call__(self, source, start=0):
            if source[:2] in ((1, 0), (1, 1)):
                raise OSError("gone")
            yield from super().__call__(source, start)

    def loader(count):
        kinds = [(0, count, Numbers()), (1, 2, Broken())]
        made = [StreamDataset([(m, i, 2) for i in range(n)], opens, 1, time_steps=2) for m, n, opens in kinds]
        options = {"padding_mode": "cycle", "on_error": "skip", "max_failures": 2, "lookahead": 0}
        return made, StreamDataLoader(interleave(made, [1, 1], **options))

    made, reader = loader(3)
    for number, _ in enumerate(reader, 1):
        if number == 4:
            made[0].extend([(0, 3, 2), (0, 4, 2)])
            state = reader.state_dict()
        if number == 12:
            break
    _, again = loader(5)
    again.load_state_dict(state)
    assert len(list(itertools.islice(again, 8))) == 8


def test_what_cannot_grow_is_refused_and_nothing_changes():
    case = Growing([[2, 2], [2]], {})
    loader = case.loader()
    mixed = loader.dataset
    with pytest.raises(TypeError, match="interleaves 2, and sources belong to one of them; extend that one"):
        mixed.extend([(0, 2, 1)])
    next(iter(loader))
    state = loader.state_dict()
    longer = Growing([[2, 2], [2, 2]], {}).loader()
    with pytest.raises(
        StateError, match=r'numbers of sources \[2, 1\], and the dataset has \[2, 2\].*changes=\["sources"\]'
    ):
        longer.load_state_dict(state)
    longer.load_state_dict(state, changes=["sources"])
    with pytest.raises(StateError, match=r"had \[2, 1\] sources and have \[1, 1\]; lists can only become longer"):
        Growing([[2], [2]], {}).loader().load_state_dict(state, changes=["sources"])
    with pytest.raises(StateError, match="other sources"):
        Growing([[3, 2], [2, 2]], {}).loader().load_state_dict(state, changes=["sources"])
    asked = []

    def weights(draw):
        asked.append(draw)
        if len(asked) > 20:
            raise OSError("no weights left")
        return [1, 1]

    mixed = interleave(case.now, weights, batch_size=1)
    asked += [0] * 20
    with pytest.raises(ValueError, match="no weights left"):
        case.now[0].extend([(0, 2, 2)])
    assert (len(case.now[0].sources), len(mixed.sources), len(loader.dataset.sources)) == (2, 3, 3)
    assert len(pickle.loads(pickle.dumps(loader.dataset)).sources) == 3
    case = Growing([[2] * 6, [2]], {}, {"batch_size": 1, "exhausted": "repeat"}, [(0, [1, 1]), (5, [1, 0])])
    reader = iter(loader := case.loader())
    for _ in range(7):
        next(reader)
    with pytest.raises(StateError, match=r"datasets\[1\] has weight 0 from draw 5 on.*goes on at draw 7"):
        case.now[1].extend([(1, 1, 2)])
    assert (len(case.now[1].sources), len(loader.dataset.sources), len(list(reader))) == (1, 7, 2)


@pytest.mark.filterwarnings("ignore:ranks cannot agree:UserWarning")
def test_states_of_several_ranks_load_together_into_longer_datasets():
    case = Growing([[4] * 4, [4] * 6], {}, {"batch_size": 2, "shuffle": True, "seed": 1}, knows=True)
    loaders = [case.loader(0, rank=rank, world_size=2) for rank in range(2)]
    seen, states = Counter(), []
    for loader in loaders:
        batch = next(iter(loader))
        seen += check_lanes([batch])
        states.append(loader.state_dict())
    iterator = iter(loaders[1])
    next(iterator)
    with pytest.raises(ValueError, match=r"start it, .* or merge all ranks' states"):
        case.now[0].extend([(0, 4, 4)], lengths=[4])
    case.lists[0] += [4, 4]
    case.lists[1] += [4]
    for rank in range(2):
        loader = case.loader(0, rank=rank, world_size=2)
        loader.load_state_dict(merge_states(states), changes=["sources"])
        seen += check_lanes(loader)
    assert seen == {
        (member, index, position): 1
        for member, lengths in enumerate(case.lists)
        for index in range(len(lengths))
        for position in range(4)
    }
