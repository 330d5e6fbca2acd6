"""`load_state_dict(state, changes=["weights"])`: a run goes on with other weights from where it stands."""

import collections
import itertools
import json
from bisect import bisect_right
from dataclasses import replace

import pytest
from cases import cells, check_fields, key, keys, ways
from helpers import random_cases
from hypothesis import assume, given
from hypothesis import strategies as st
from mixtures import first_of, mixture_of, mixtures, weights_of
from serial_model import changed

from stream_dataloader import StateError, StreamDataLoader, merge_states, side_by_side
from stream_dataloader._engine.schedule.mix import Replaced
from stream_dataloader._engine.schedule.order import Order
from stream_dataloader._engine.schedule.place import Place

MOST = 30
THREAD = {"num_workers": 1, "worker_method": "thread"}


def through_a_file(state):
    return json.loads(json.dumps(state))


def other_weights(dataset, new, cursor):
    """What is read from so many draws on, by one group, with other weights than before."""
    rules, mix = dataset._rules, dataset._rules.mix
    turn, draw = divmod(cursor, rules.draws)
    if rules.endless_mix:
        turn, draw = 0, cursor
    elif rules.padding_mode != "cycle" and turn:
        turn, draw = 0, rules.draws
    elif cursor and not draw:  # a pass was handed out, and nothing of the next one
        turn, draw = turn - 1, rules.draws
    order = Order(rules, Place(0), dataset._plan().scheduled_lengths)
    begin = 0 if rules.endless_mix else turn * rules.draws
    lists = [bisect_right(mix.starts, order[begin + number].source) - 1 for number in range(draw)]
    counts = tuple(lists.count(number) for number in range(len(mix.sizes)))
    past = (
        (Replaced(turn, draw, counts, mix.weights, mix.sizes),)
        if cursor and mix.weights != new._rules.mix.weights
        else ()
    )
    return new._under(new._rules.with_past(past))


@random_cases(1500, quick=9)
@given(mixtures(), weights_of(), st.integers(1, 6), st.integers(0, 3), ways(), st.integers(0, 4), st.data())
def test_other_weights_hold_from_the_next_draw_on_as_the_model_says(mixture, weights, taken, lanes, way, again, data):
    assume(any(mixture.lengths))
    dataset, first = mixture.dataset(), None
    first = mixture.model(dataset)
    model = list(itertools.islice(first.batches(), taken))
    before = StreamDataLoader(dataset)
    assert [cells(batch) for batch in itertools.islice(before, taken)] == model
    assume(len(model) == taken)
    state = through_a_file(before.state_dict())
    assume(state["epoch"] == 0)
    lanes = min(max(1, mixture.lanes + lanes - 1), sum(map(len, mixture.lists)))
    after = replace(mixture, weights=first_of(weights, len(mixture.lists)), lanes=lanes)
    spliced = other_weights(dataset, after.dataset(), first.cursor)
    read, total = after.model(spliced).read, spliced._rules.draws
    if lanes == mixture.lanes and total == dataset._rules.draws:
        first.read = read
        expected = first.batches()
    else:
        expected = changed(first, model[-1], lanes, mixture.time_steps, read, total).batches()
    expected = list(itertools.islice(expected, MOST))
    if "num_workers" in way:
        way["num_workers"] = min(way["num_workers"], lanes)
    loader = StreamDataLoader(after.dataset(), **way)
    if spliced._rules.mix.past:
        with pytest.raises(StateError, match=r'changes=\["weights"\]'):
            loader.load_state_dict(state, changes=["batch_size"])
    loader.load_state_dict(state, changes=["weights", "batch_size"])
    known = None not in mixture.cut[: len(mixture.lists)] and mixture.padding_mode != "cycle"
    count = len(loader) if known else None
    iterator = iter(loader)
    head = list(itertools.islice(iterator, again))
    middle = through_a_file(loader.state_dict())
    batches = head + list(itertools.islice(iterator, MOST - len(head)))
    assert [cells(batch) for batch in batches] == expected
    assert count in (None, taken + len(expected)) or len(expected) == MOST
    for batch in batches:
        check_fields(batch)
    if len(head) < again or middle["epoch"]:
        return
    resumed = StreamDataLoader(after.dataset(seed=data.draw(st.sampled_from([mixture.seed, 7]))), **THREAD)
    resumed.load_state_dict(middle)  # its own past is no difference
    assert keys(itertools.islice(resumed, MOST - again)) == keys(batches[again:])
    skipping = StreamDataLoader(after.dataset())
    skipping.load_state_dict(state, changes=["weights", "batch_size"])
    assert skipping.skip(again) == again
    assert keys(itertools.islice(skipping, MOST - again)) == keys(batches[again:])


LISTS = [[2, 4, 1, 3, 5, 2, 2, 3, 4, 1, 2, 3], [3, 1, 4, 2, 2, 5, 1, 3]]
MODES = {
    "leave out": {"exhausted": "leave_out"},
    "repeat": {"exhausted": "repeat"},
    "endless": {"exhausted": "repeat", "padding_mode": "cycle"},
    "passes": {"exhausted": "leave_out", "padding_mode": "cycle"},
}


def ranks_of(mixture, world_size, state=None, changes=(), **options):
    """The loaders of all ranks, of two virtual ranks in all."""
    loaders = []
    for rank in range(world_size):
        own = replace(mixture, lanes=mixture.lanes // world_size).dataset()
        loader = StreamDataLoader(own, virtual_ranks=2, rank=rank, world_size=world_size, **options)
        if state is not None:
            loader.load_state_dict(state, changes=changes)
        loaders.append(loader)
    return loaders


def read(loaders, steps):
    """What ranks read in lockstep, their lanes side by side; those of a rank that has ended are idle."""
    rules = loaders[0].dataset._rules
    idle = [[None] * rules.time_steps] * rules.lanes
    read = [[cells(batch) for batch in itertools.islice(loader, steps)] for loader in loaders]
    return [list(itertools.chain(*lanes)) for lanes in itertools.zip_longest(*read, fillvalue=idle)]


@pytest.mark.one_of_each
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.filterwarnings("ignore:ranks cannot agree")
def test_ranks_change_at_the_same_draw(mode, known):
    mixture = mixture_of(LISTS, [3, 1], lanes=4, shuffle=True, cut=(0, 0) if known else (None, None), **MODES[mode])
    after, most = replace(mixture, weights=[(0, [1, 2]), (30, [2, 1])]), 12
    before = ranks_of(mixture, 2)
    head = [batch for loader in before for batch in itertools.islice(loader, 3)]
    states = [loader.state_dict() for loader in before]
    whole = through_a_file(merge_states(states))
    for loaders in (ranks_of(after, 2), ranks_of(after, 1)):
        with pytest.raises(StateError, match=r'weights \[3.0, 1.0\].*changes=\["weights"\]'):
            loaders[0].load_state_dict(whole)
    with pytest.raises(StateError, match=r"virtual ranks \[0\] of 2.*merge_states"):
        ranks_of(after, 2)[0].load_state_dict(states[0], changes=["weights"])
    one = ranks_of(after, 1, whole, "weights")
    count = len(one[0]) if known and "padding_mode" not in MODES[mode] else None
    alone = read(one, most)
    assert count in (None, 3 + len(alone))
    assert read(ranks_of(after, 2, whole, "weights", **THREAD), most)[: len(alone)] == alone
    again = ranks_of(after, 1, whole, "weights")
    assert read(again, 4) == alone[:4]
    state = through_a_file(again[0].state_dict())
    assert read(ranks_of(after, 2, state), most - 4)[: len(alone) - 4] == alone[4:]
    if mode == "leave out":
        cut = [[cell[:2] for lane in cells(batch) for cell in lane if cell] for batch in head]
        rest = [cell[:2] for batch in alone for lane in batch for cell in lane if cell]
        every = collections.Counter(itertools.chain(*cut, rest))
        assert every == {(s, p): 1 for s, length in enumerate(mixture.lengths) for p in range(length)}


@pytest.mark.filterwarnings("ignore:ranks cannot agree")
def test_a_rank_that_is_behind_draws_by_the_old_weights_up_to_the_others():
    """One reads the long streams, the other the short ones: it has made many more draws when weights change."""
    mixture = mixture_of([[9] * 12, [1] * 12], [1, 1], lanes=4, shuffle=False, shuffles=(False,) * 3, cut=(None,) * 3)
    before = ranks_of(mixture, 2)
    head = read(before, 3)
    states = [loader.state_dict() for loader in before]
    assert states[1]["group_1"][1] > states[0]["group_0"][1] + 3
    (loader,) = ranks_of(replace(mixture, weights=[1, 3]), 1, merge_states(states), "weights")
    batches = head + read([loader], 99)
    found = collections.Counter(cell[:2] for batch in batches for lane in batch for cell in lane if cell)
    assert found == {(s, p): 1 for s, length in enumerate(mixture.lengths) for p in range(length)}


@pytest.mark.one_of_each
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", MODES)
def test_weights_are_replaced_again_and_again(mode, workers):
    """Every state of a run that was changed twice is enough to go on from, and the next epoch knows nothing of it."""
    mixture = mixture_of(LISTS, [3, 1], lanes=3, shuffle=True, cut=(0, 0), **MODES[mode])
    state, states = None, []
    for weights, steps in [([3, 1], 3), ([1, 3], 3), ([5, 1], 20)]:
        loader = StreamDataLoader(replace(mixture, weights=weights).dataset(), workers)
        if state is not None:
            loader.load_state_dict(state, changes=["weights"])
        batches = []
        for batch in itertools.islice(loader, steps):
            batches.append(batch)
            states.append(batch.state_dict())
        state = through_a_file(loader.state_dict())
    last = replace(mixture, weights=[5, 1])
    own = states[6:]
    assert len(own[0]["mix"]["past"]) == 2
    for number, one in enumerate(own[:-1], 1):
        resumed = StreamDataLoader(last.dataset())
        resumed.load_state_dict(through_a_file(one))
        assert keys(itertools.islice(resumed, len(own) - number)) == keys(batches[number:])
    if mixture.padding_mode != "cycle":
        assert "past" not in state["mix"]
        assert [batch.state_dict() for batch in batches[:-1]] == own[:-1]  # also when the epoch is over
        fresh = StreamDataLoader(last.dataset())
        fresh.set_epoch(1)
        assert len(loader) == len(fresh)
        assert keys(loader) == keys(fresh)
        assert [batch.state_dict() for batch in batches[:-1]] == own[:-1]


def test_an_endless_run_has_the_shares_of_its_weights_from_the_change_on():
    one_by_one = {"padding_mode": "cycle", "lanes": 1, "time_steps": 1, "lookahead": 0}
    mixture = mixture_of([[1] * 6, [1] * 30], [3, 1], "repeat", **one_by_one)

    def drawn(loader, steps):
        return [loader.dataset.locate(batch.source_index[0, 0])[0] for batch in itertools.islice(loader, steps)]

    def loaded(weights, state):
        loader = StreamDataLoader(replace(mixture, weights=weights).dataset(), batches_per_epoch=1000)
        loader.load_state_dict(state, changes=["weights"])
        return loader

    before = StreamDataLoader(mixture.dataset(), batches_per_epoch=1000)
    assert drawn(before, 400).count(1) == 100
    state = before.state_dict()
    after = loaded([1, 1], state)
    assert drawn(after, 400).count(1) == 200
    again = loaded([1, 9], after.state_dict())
    assert drawn(again, 100).count(1) == 90
    by_schedule = drawn(loaded([(0, [9, 1]), (500, [1, 0])], state), 200)
    assert by_schedule[:100].count(1) == by_schedule.count(1) == 10, "draws count from the beginning of the run"
    assert 1 not in drawn(loaded(lambda draw: [1, float(draw < 420)], state), 100)[24:]


def test_members_side_by_side_take_other_weights():
    def loader(weights):
        alike = [mixture_of([[4, 2, 3] * 3, [2, 2] * 4], own, lanes=2, cut=(0, 0)) for own in ([1, 1], weights)]
        return side_by_side([(mixture.dataset(), 2) for mixture in alike])

    before = loader([3, 1])
    for _ in itertools.islice(before, 3):
        pass
    state = through_a_file(before.state_dict())
    after = loader([1, 3])
    with pytest.raises(StateError, match=r"members\[1\].*weights"):
        after.load_state_dict(state)
    after.load_state_dict(state, changes="weights")
    count, batches, states = len(after), [], []
    for batch in after:
        batches.append(key(batch))
        states.append(after.state_dict())
    assert count == 3 + len(batches)
    for number, one in enumerate(states[:-1], 1):
        again = loader([1, 3])
        again.load_state_dict(one)
        assert keys(again) == batches[number:]
    assert keys(after) == keys(fresh_epoch(loader([1, 3]), 1))


def fresh_epoch(loader, epoch):
    loader.set_epoch(epoch)
    return loader


def test_what_cannot_go_on_is_refused():
    mixture = mixture_of(LISTS, [1, 3], "repeat", lanes=2)
    loader = StreamDataLoader(mixture.dataset())
    list(itertools.islice(loader, 4))
    state = through_a_file(loader.state_dict())

    def load(weights, state=state, changes=("weights",), **options):
        StreamDataLoader(replace(mixture, weights=weights, **options).dataset()).load_state_dict(state, changes)

    with pytest.raises(StateError, match=r"weights \[1.0, 3.0\], and the dataset has \[3.0, 1.0\]; build it as it was"):
        load([3, 1], changes=())
    assert load([1, 3], changes=()) is None
    schedule = [(0, [1, 1]), (24, [0, 1])]
    with pytest.raises(StateError, match=r"datasets\[0\] has weight 0 from draw 24 on.*goes on at draw \d+, would not"):
        load(schedule)
    with pytest.raises(StateError, match="exhausted"):
        load([3, 1], exhausted="leave_out")
    with pytest.raises(ValueError, match="weights"):
        load([3, 1], changes=["weight"])
    changed = StreamDataLoader(replace(mixture, weights=[3, 1]).dataset())
    changed.load_state_dict(state, changes=["weights"])
    list(itertools.islice(changed, 2))
    good = through_a_file(changed.state_dict())
    load([3, 1], good, ())
    epoch, draw, counts, weights, sizes = good["mix"]["past"][0]
    where, more = [epoch, draw, counts], [size + 1 for size in sizes]
    others = [*where, [1, -1], sizes], [epoch, draw + 1, counts, weights, sizes], [epoch, draw, [draw], weights, sizes]
    for wrong in (
        *others,
        [*where, weights, more],
        [*where, weights, sizes[:1]],
        [*where, weights, [0, 0]],
        [*where, weights],
        5,
    ):
        with pytest.raises(StateError):
            load([3, 1], good | {"mix": good["mix"] | {"past": [wrong]}}, ())
