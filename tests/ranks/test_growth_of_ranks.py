"""`dataset.extend` on several ranks, which agree on the draw from which on new sources come."""

import dataclasses
import itertools
import threading
from collections import Counter

import pytest
from cases import key
from growing import Numbers, check_lanes, growing
from helpers import PATIENCE, random_cases
from hypothesis import given
from hypothesis import strategies as st
from rank_processes import EXAMPLES, RankProcesses, group, side_by_side

from stream_dataloader import StreamDataLoader, StreamDataset, interleave, merge_states
from stream_dataloader.errors import RankError


@pytest.fixture(scope="module")
def ranks():
    with RankProcesses(3) as processes:
        yield processes


MOST = 12  # batches of an epoch


def read_epochs(case, loader):
    """The batches of an epoch in which lists grow, with the state behind each, and some of the next epoch."""
    return case.read(loader, MOST), case.read(loader, 3, begin=MOST * 9)


def read_grown(rank, case, groups, world_size):
    """The batches of a rank, the state behind each, and how often it read each item as something new."""
    options = {"virtual_ranks": groups, "process_group": group(world_size), "timeout": PATIENCE}
    read, after = read_epochs(case, case.loader(0, **options))
    new = check_lanes([batch for batch, _ in (*read, *after)])
    return [key(batch) for batch, _ in (*read, *after)], [state for _, state in read], list(new.items())


@st.composite
def grown_on_ranks(draw):
    """A case with the lanes of a rank, the same one with those of all ranks, virtual ranks and ranks."""
    case = draw(growing())
    world_size, hosted = draw(st.integers(2, 3)), draw(st.integers(1, 2))
    groups = world_size * hosted
    case.plain = draw(st.booleans())
    least = groups * (case.options["batch_size"] if case.options["padding_mode"] == "drop" else 1)
    for lengths in case.lists:  # enough for each virtual rank
        lengths += [1 + i % 3 for i in range(least - len(lengths))]
    lanes = case.options["batch_size"]
    one, whole = ({**case.options, "batch_size": lanes * count} for count in (hosted, groups))
    return dataclasses.replace(case, options=one), dataclasses.replace(case, options=whole), groups, world_size


@pytest.mark.slow
@random_cases(EXAMPLES * 5, quick=10)
@given(grown_on_ranks(), st.data())
def test_ranks_that_grow_read_what_one_process_reads(ranks, drawn, data):
    """Also what it reads that continues from their merged states, saved before they grew or after."""
    case, whole, groups, world_size = drawn
    found, states, counts = zip(*ranks.run(world_size, read_grown, case, groups, world_size), strict=True)
    read, after = read_epochs(whole, whole.loader(0, virtual_ranks=groups))
    expected = [key(batch) for batch, _ in (*read, *after)]
    assert {len(of_rank) for of_rank in found} == {len(expected)}
    assert [side_by_side(pair) for pair in zip(*found, strict=True)] == expected
    assert sum((Counter(dict(count)) for count in counts), Counter()) == check_lanes([b for b, _ in (*read, *after)])
    if not (moments := [behind for behind in whole.later if behind < len(read)]):
        return
    behind = data.draw(st.sampled_from(moments))
    once = len(whole.later[behind]) == 1  # what is added twice in a row is shuffled apart, what is loaded is not
    for at in (behind, behind + 1) if once else (behind + 1,):
        state = merge_states([of_rank[at - 1] for of_rank in states])
        if state["epoch"] > read[at - 1][0].epoch:
            return  # the epoch was known to end here
        resumed = whole.loader(behind, virtual_ranks=groups)
        resumed.load_state_dict(state, changes=["sources", "weights"] if at == behind else ())
        if at != behind:
            whole.grow(at)
        again = whole.read(resumed, len(read) - at, begin=at)
        assert [key(batch) for batch, _ in again] == expected[at : len(read)]


def grow_apart(rank, how, world_size=2):
    """What extending says if ranks do not do it alike, and how many items are read by then and afterwards."""
    made = [StreamDataset([(m, i, 4) for i in range(4)], Numbers(), 1, "cycle", time_steps=2) for m in range(2)]
    dataset = made[0] if how == "alone" else interleave(made)
    loader = StreamDataLoader(dataset, process_group=group(world_size), timeout=1 if how == "alone" else PATIENCE)
    batches = iter(loader)
    for _ in range(3 + (how == "later" and rank)):
        next(batches)
    error = None
    if how != "alone" or rank == 0:
        try:
            made[0].extend([(0, 4, 4 + (how == "others" and rank))])
        except RankError as raised:
            error = str(raised)
    rest = [int(item[2]) for batch in itertools.islice(batches, 3) for item in batch.data[:, 0]]
    return error, rest, len(dataset.sources)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("others", "rank 1 has sources after extend"),
        ("later", "rank 1 has step 4, and rank 0 3"),
        ("alone", "rank 1 did not extend the dataset within 1 s"),
    ],
)
def test_ranks_that_do_not_grow_alike_are_told_and_nothing_changes(ranks, how, text):
    for rank, (error, rest, sources) in enumerate(ranks.run(2, grow_apart, how)):
        assert text in error if (how, rank) != ("alone", 1) else error is None
        assert rest == ([0, 1, 2, 3, 0, 1] if how == "later" and rank else [2, 3, 0, 1, 2, 3])
        assert sources == (4 if how == "alone" else 8)


def grow_both(rank, in_thread):
    """Items that two loaders of one dataset read on a rank, each item once by each of them."""
    made = StreamDataset([(0, i, 2) for i in range(4)], Numbers(), 1, time_steps=1, shuffle=True, seed=1)
    loaders = [StreamDataLoader(interleave([made]), process_group=group(2), timeout=PATIENCE) for _ in range(2)]
    found = [[], []]
    for number, batches in enumerate(zip(*loaders, strict=True)):
        for own, batch in zip(found, batches, strict=True):
            own += [tuple(item[:3]) for item in batch.data[batch.mask].tolist()]
        if number == 1:
            thread = threading.Thread(target=made.extend, args=([(0, i, 2) for i in range(4, 8)],))
            thread.start() if in_thread else thread.run()
            thread.join() if in_thread else None
    return found


@pytest.mark.parametrize("in_thread", [False, True])
def test_several_loaders_of_a_dataset_grow_on_all_ranks(ranks, in_thread):
    for found in zip(*ranks.run(2, grow_both, in_thread), strict=True):
        assert sorted(itertools.chain(*found)) == [(0, index, position) for index in range(8) for position in range(2)]
