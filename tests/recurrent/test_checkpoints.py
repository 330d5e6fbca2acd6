"""A resumed run is bit-identical, the state included; with another number of workers and ranks, too."""

import contextlib
import copy
import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from carried import Pair, handed_over, ones, resumed_before_each_batch
from helpers import FULL
from rank_processes import RankProcesses
from torch import nn

from stream_dataloader import StateError, StreamDataLoader, StreamDataset, merge_states
from stream_dataloader.recurrent import LaneCache, LaneMemory, RecurrentState
from stream_dataloader.recurrent.checkpoint import _sealed

LENGTHS = [7, 3, 5, 1, 4, 2, 6, 3, 5, 2]


def open_numbers(length):
    return (torch.tensor([length / 7 + t]) for t in range(length))


def loader_of(workers=0, lanes=4, rank=None, world_size=None, **options):
    dataset = StreamDataset(
        LENGTHS, open_numbers, lanes, lengths=LENGTHS, time_steps=2, shuffle=True, seed=5, **options
    )
    return StreamDataLoader(
        dataset, workers, virtual_ranks=4 if rank is not None else None, rank=rank, world_size=world_size
    )


def carry_of(**options):
    return RecurrentState(batch_dim=1, **options)


def step(gru, batch, carry):
    output, state = gru(batch.data, carry.before(batch))
    carry.after(batch, state)
    return output.detach()


def gru_of():
    torch.manual_seed(0)
    return nn.GRU(1, 3, 2)


def test_a_run_that_is_resumed_after_each_batch_is_bit_identical():
    gru, carry = gru_of(), carry_of()
    whole = [step(gru, batch, carry) for batch in loader_of()]
    found = resumed_before_each_batch(
        lambda number: (loader_of(workers=number % 3), carry_of()), functools.partial(step, gru), len(whole)
    )
    for (*_, output), expected in zip(found, whole, strict=True):
        assert torch.equal(output, expected)


def test_the_state_is_that_of_the_last_batch_passed_to_after():
    gru, carry = gru_of(), carry_of()
    used, ahead, beyond, *_ = loader_of()
    step(gru, used, carry)
    carried = carry.state_dict()
    carry.before(ahead)
    assert carry.state_dict()["position"] == carried["position"]
    assert all(map(torch.equal, carry.state_dict()["leaves"], carried["leaves"]))
    resumed = carry_of()
    resumed.load_state_dict(carried)
    with pytest.raises(StateError):
        resumed.before(beyond)


def test_a_class_that_cannot_be_found_again_is_refused():
    class Local(Pair):
        pass

    batch, carry, local = next(iter(loader_of())), carry_of(), carry_of()
    local.after(batch, Local(torch.ones(2, 4, 3), None))
    with pytest.raises(StateError, match="Local"):
        local.state_dict()
    carry.after(batch, Pair(torch.ones(2, 4, 3), None))
    state = carry.state_dict()
    state["structure"]["type"] = "os:system"
    with pytest.raises(StateError):
        carry_of().load_state_dict(state)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (4, 1), (2, 4), (2, 2)])
def test_any_number_of_ranks_takes_up_a_state(before, after):
    gru, carry = gru_of(), carry_of()
    whole = [step(gru, batch, carry) for batch in loader_of(rank=0, world_size=1)]

    made = []

    def make(**place):
        made.append((loader_of(lanes=4 // place["world_size"], **place), carry_of(**place)))
        return made[-1]

    found = handed_over(make, functools.partial(step, gru), before, after)
    for one, other in zip(found, whole, strict=True):
        # products of other sizes are rounded otherwise
        torch.testing.assert_close(torch.cat(one, 1), other, rtol=0, atol=1e-6)
    if before == after:
        third = carry_of(rank=1, world_size=2)
        third.load_state_dict(made[1][1].state_dict())  # its own will do


def saved(lanes=4, hidden=3, rank=0, world_size=1):
    carry = carry_of(rank=rank, world_size=world_size)
    carry.after(next(iter(loader_of(lanes=lanes))), torch.zeros(2, lanes, hidden))
    return carry.state_dict()


def saved_by_cells():
    """The states of rank 1 of 2, with the lanes in another dimension than `saved`."""
    carry = RecurrentState(batch_dim=0, rank=1, world_size=2)
    carry.after(next(iter(loader_of(lanes=4))), torch.zeros(4, 4, 3))
    return carry.state_dict()


@pytest.mark.parametrize(
    ("place", "states", "text"),
    [
        ({}, saved(rank=1, world_size=2), "rank 1 of 2, but this is rank 0 of 1"),
        ({"rank": 0, "world_size": 3}, saved(), "4 lanes, lanes 0 to 3, which 3 ranks"),
        ({}, [saved(rank=1, world_size=2)], r"ranks \[1\] of \[2\]"),
        ({}, [saved(world_size=2), saved(lanes=3, rank=1, world_size=2)], "rank 1 has lanes 0 to 2"),
        ({}, [saved(world_size=2), saved_by_cells()], r"rank 1 has dims \[0\], but rank 0 has \[1\]"),
        ({}, [saved(world_size=2), saved(hidden=4, rank=1, world_size=2)], None),
        ({}, [], None),
    ],
)
def test_ranks_that_do_not_fit_are_refused(place, states, text):
    with pytest.raises(StateError, match=text):
        carry_of(**place).load_state_dict(merge_states(states) if isinstance(states, list) else states)


@pytest.mark.parametrize(
    "state", [None, {"leaves": []}, {"version": 7}, loader_of().state_dict(), {**saved(), "lanes": [0, 1, 2]}]
)
def test_what_is_no_state_is_refused(state):
    with pytest.raises(StateError):
        carry_of().load_state_dict(state)


def test_a_state_of_another_model_is_refused():
    batch, two = next(iter(loader_of())), carry_of()
    two.after(batch, (torch.zeros(2, 4, 3),) * 2)
    for carry in (two, RecurrentState(torch.zeros(2, 1, 5), batch_dim=1), RecurrentState(batch_dim=2)):
        with pytest.raises((StateError, ValueError), match="saved state"):
            carry.load_state_dict(saved())
    carry = carry_of()
    carry.load_state_dict(saved())
    with pytest.raises(StateError):
        carry.after(batch, torch.zeros(2, 4, 5))
    square = carry_of()
    square.after(batch, torch.zeros(4, 4, 3))
    with pytest.raises(StateError, match=r"lanes in dimensions \[1\], but batch_dim says \[0\]"):
        RecurrentState(batch_dim=0).load_state_dict(square.state_dict())


@pytest.mark.parametrize("lanes", [3, 5])
def test_a_state_of_another_batch_size_is_refused(lanes):
    carry, gru = carry_of(), gru_of()
    carry.load_state_dict(saved(lanes=4))
    with pytest.raises(StateError, match=f"lanes 0 to 3, but the batches have lanes 0 to {lanes - 1}"):
        [step(gru, batch, carry) for batch in loader_of(lanes=lanes)]
    carry.reset()
    assert len([step(gru, batch, carry) for batch in loader_of(lanes=lanes)]) > 3


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_each_lane_keeps_its_state_with_any_number_of_lanes_groups_and_ranks(groups):
    """A lane's state is the number of its source, which tells whose it is."""
    lengths = [40 + i for i in range(40)]

    def ranks(world, lanes):
        for rank in range(world):
            dataset = StreamDataset(lengths, range, lanes // world, "cycle", time_steps=4, seed=0)
            place = {"rank": rank, "world_size": world}
            yield StreamDataLoader(dataset, virtual_ranks=groups, **place), RecurrentState(batch_dim=0, **place)

    def go(loader, carry, steps):
        for batch in itertools.islice(loader, steps):
            before, goes_on = carry.before(batch), ~batch.reset & batch.mask[0]
            source = batch.source_index[0]
            if before is None:
                assert not goes_on.any()
            else:
                assert torch.equal(before[goes_on, 0], source[goes_on] + 1), "the state is another stream's, or none"
            carry.after(batch, source[:, None] + 1)
            yield batch

    worlds = [world for world in (1, 2, 4) if groups % world == 0]
    some = itertools.product(worlds, repeat=3)
    for before, between, after in some if FULL else itertools.islice(some, 1, None, 4):
        states, lanes_before = None, 0
        for world, lanes in zip((before, between, after), (8, 4, 16) if before == 1 else (4, 16, 8), strict=True):
            loaders = list(ranks(world, lanes))
            if states is not None:
                for loader, carry in loaders:
                    loader.load_state_dict(states[0], changes=["batch_size"])
                    carry.load_state_dict(states[1], loader=loader)
            continuing = 0
            for loader, carry in loaders:
                found = list(go(loader, carry, 3))
                continuing += int((~found[0].reset).sum())
            assert continuing == min(lanes, lanes_before)
            lanes_before = lanes
            states = (
                merge_states([loader.state_dict() for loader, _ in loaders]),
                merge_states([carry.state_dict() for _, carry in loaders]),
            )


def test_what_does_not_belong_to_the_loaders_state_is_refused():
    loader, carry = loader_of(lanes=4), carry_of()
    with pytest.raises(StateError, match="the loader has loaded no state"):
        carry.load_state_dict(saved(), loader=loader)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match="lanes 0 to 5, but the loader's state had 4 lanes on this rank"):
        carry.load_state_dict(saved(lanes=6), loader=loader)


def test_gradients_that_go_back_cannot_be_saved():
    carry, gru = carry_of(detach_every=2), gru_of()
    for batch in loader_of():
        _, state = gru(batch.data, carry.before(batch))
        if carry.after(batch, state):
            carry.state_dict()
        else:
            with pytest.raises(StateError, match="detach_every"):
                carry.state_dict()
    assert batch.batch_index > 2


def test_a_loaded_state_follows_the_batches_to_their_device():
    carry, batches = carry_of(nonfinite="keep"), iter(loader_of())
    carry.after(next(batches), torch.zeros(2, 4, 3))
    resumed = carry_of(nonfinite="keep")
    resumed.load_state_dict(carry.state_dict())
    batch = next(batches)
    assert resumed.before(batch.to("meta")).device.type == "meta"
    assert carry.to("meta").before(batch).device.type == "meta"


class Model(nn.GRU):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(1, 3)
        self.start = nn.Parameter(torch.zeros(1, 1, 3))


def train(rank):
    """Train with a learnt initial state; what it became, and in how many steps this rank had no start."""
    model = nn.parallel.DistributedDataParallel(Model())
    carry, quiet = carry_of(initial=model.module.start), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = StreamDataset(LENGTHS, ones, 1, lengths=LENGTHS, time_steps=2, shuffle=True, seed=0)
    for batch in StreamDataLoader(dataset, virtual_ranks=2):
        output, state = model(batch.data, carry.before(batch))
        carry.after(batch, state)
        optimizer.zero_grad()
        output[batch.mask].square().sum().backward()
        optimizer.step()
        quiet += not batch.reset.any()
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, carry.state_dict())
    return model.module.start.tolist(), quiet, merge_states(gathered)["lanes"]


@pytest.mark.slow
def test_a_learnt_state_is_the_same_on_all_ranks_though_streams_start_in_other_steps():
    with RankProcesses(2) as ranks:
        (one, quiet, lanes), (other, other_quiet, _) = ranks.run(2, train)
    assert one == other
    assert any(value != 0 for value in one[0][0])
    assert quiet
    assert other_quiet  # without a gradient there DistributedDataParallel would raise an error
    assert lanes == [0, 1]


def carried_kinds():
    """Each class that is saved: how it is made, and a state after some batches."""
    found = {}
    for make in (carry_of, LaneMemory, functools.partial(LaneCache, 3)):
        carry, batches = make(), list(itertools.islice(loader_of(), 3))
        for batch in batches:
            if isinstance(carry, LaneMemory):
                for t, values in carry.steps(batch):
                    for lane, value in enumerate(values):
                        if value is not None:
                            value.append((batch.data[t, lane], {"t": t}))
            else:
                one = torch.full((2, 4, 3), 2.5)
                carry.after(batch, one if isinstance(carry, LaneCache) else (one, [one]))
        found[type(carry).__name__] = (make, carry.state_dict())
    return found


def places_in(value, way=()):
    yield way
    inside = value[:2] if isinstance(value, list) else ()
    for key, inner in value.items() if isinstance(value, dict) else enumerate(inside):
        yield from places_in(inner, (*way, key))


def with_other(state, way, other):
    changed = copy.deepcopy(state)
    place = changed
    for key in way[:-1]:
        place = place[key]
    place[way[-1]] = other
    return changed


def nested(depth):
    inner = []
    for _ in range(depth):
        inner = [inner]
    return inner


OTHERS = (-1, 0, 7, 2**31, 2**62, 2**70, float("nan"), True, None, "1", [], {}, b"1", torch.zeros(2), (1, 2))


@pytest.mark.parametrize("kind", ["RecurrentState", "LaneMemory", "LaneCache"])
def test_whatever_is_changed_in_a_carried_state_is_an_error_or_changes_nothing(kind):
    make, state = carried_kinds()[kind]
    for way in list(places_in(state))[1:]:
        for other in (*OTHERS, nested(5000)):
            changed = with_other(state, way, other)
            try:
                (loaded := make()).load_state_dict(changed)
            except StateError:
                continue
            found, expected = loaded.state_dict(), state
            for key in way:
                found, expected = found[key], expected[key]
            assert type(found) is type(expected), f"{way} = {other!r} was taken"
            assert torch.equal(found, expected) if isinstance(found, torch.Tensor) else found == expected, way


FORGED = [
    ("RecurrentState", ("lanes", 3), 2**31, "lanes is 2147483648, and must be a whole number from 0 to 1048576"),
    ("RecurrentState", ("lanes", 3), 0, "some twice"),
    ("RecurrentState", ("world_size",), 0, "world_size is 0"),
    ("RecurrentState", ("rank",), 1, "rank is 1, and must be a whole number from 0 to 0"),
    ("RecurrentState", ("source", 0), -4, "source is -4"),
    ("RecurrentState", ("dims", 0), -1, "dimension of the lanes is -1"),
    ("RecurrentState", ("leaves", 0), torch.zeros(2, 3, 3), r"names 4 lanes, but its tensors have \[3, 4\]"),
    ("RecurrentState", ("leaves",), torch.zeros(2, 4, 3), "leaves and dims must be lists"),
    ("RecurrentState", ("structure", "keys"), [0], "keys"),
    ("RecurrentState", ("structure",), nested(5000), "nested|cannot be read"),
    ("LaneMemory", ("age",), [0, 0, 0], "names 4 lanes, but has another number of age"),
    ("LaneMemory", ("values",), [], "another number of values"),
    ("LaneMemory", ("values", 2), ("deque", -1, []), "the saved value of lane 2 cannot be read"),
    ("LaneMemory", ("values", 2), nested(5000), "nested"),
    ("LaneCache", ("leaves", 0), torch.tensor([1, 1, -1, 1]), "numbers of kept steps"),
    ("LaneCache", ("leaves", 0), torch.zeros(4), "numbers of kept steps"),
]


@pytest.mark.parametrize(("kind", "way", "other", "text"), FORGED)
def test_a_forged_carried_state_is_refused_with_what_is_wrong(kind, way, other, text):
    make, state = carried_kinds()[kind]
    changed = with_other(state, way, other)
    with contextlib.suppress(StateError, TypeError):  # of some, no checksum can be made
        changed = _sealed(changed)
    with pytest.raises(StateError, match=text):
        make().load_state_dict(changed)


def test_a_carried_state_of_very_many_ranks_is_refused_at_once():
    state = _sealed(saved() | {"world_size": 2**62})
    with pytest.raises(StateError, match=r"from ranks \[0\] of \[4611686018427387904\]"):
        merge_states([state])
