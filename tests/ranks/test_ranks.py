"""Several ranks, as real processes: the same global batch for any world size, the same steps on all, no hang."""

import dataclasses
import functools
import gc
import itertools
import json
import os
import pickle
import re
import signal
import threading
import time
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import Case, Counting, key, keys
from helpers import PATIENCE, random_cases, soon
from hypothesis import given
from hypothesis import strategies as st
from rank_processes import (
    EXAMPLES,
    Failed,
    RankProcesses,
    free_port,
    group,
    loader_of,
    read,
    shared_cases,
    side_by_side,
    world_sizes,
)
from worker_streams import acting, hang, kill_self, raising

from stream_dataloader import StreamDataLoader, StreamDataset, merge_states
from stream_dataloader._engine.ranks import keys as keys_of_ranks
from stream_dataloader._engine.ranks.store import StoreConnection, use_of


@pytest.fixture(scope="module")
def ranks():
    with RankProcesses() as processes:
        yield processes


@pytest.mark.slow
@random_cases(EXAMPLES, quick=5)
@given(shared_cases(), st.data())
def test_the_union_of_all_ranks_is_the_batch_of_one(ranks, drawn, data):
    _, groups, _ = drawn
    world_size = data.draw(world_sizes(groups))
    workers = data.draw(st.lists(st.integers(0, 3), min_size=world_size, max_size=world_size))
    whole = [key(batch) for batch in loader_of(*drawn)]
    batches, _ = zip(*ranks.run(world_size, read, world_size, drawn, workers), strict=True)
    assert [len(mine) for mine in batches] == [len(whole)] * world_size
    assert [side_by_side(step) for step in zip(*batches, strict=True)] == whole


@pytest.mark.slow
@random_cases(EXAMPLES, quick=2)
@given(shared_cases(), st.data())
def test_any_number_of_ranks_goes_on_with_the_same_batches(ranks, drawn, data):
    _, groups, _ = drawn
    before, after = data.draw(world_sizes(groups)), data.draw(world_sizes(groups))
    workers = data.draw(st.lists(st.sampled_from([0, 0, 1, 2]), min_size=8, max_size=8))
    whole = [key(batch) for batch in loader_of(*drawn)]
    step = data.draw(st.integers(0, max(len(whole) - 1, 0)))
    _, states = zip(*ranks.run(before, read, before, drawn, workers, None, step), strict=True)
    tails, _ = zip(*ranks.run(after, read, after, drawn, workers, merge_states(states)), strict=True)
    assert [side_by_side(batch) for batch in zip(*tails, strict=True)] == whole[step:]


def read_with(rank, world_size, cases, dataset=None, most=None, epochs=1, **options):
    """Batches of a rank, whose case may differ from the others'; `known` in it are its lengths."""
    case = dict(cases[rank])
    given = (dataset or {}) | ({"lengths": case.pop("known")} if "known" in case else {})
    loader = StreamDataLoader(Case(**case).dataset(**given), **options, process_group=group(world_size))
    return [key(batch) for _ in range(epochs) for batch in itertools.islice(loader, most)]


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        ({"seed": 5}, "rank 1 has seed 5, and rank 0 0"),
        ({"lanes": 4}, "rank 1 has batch_size 4, and rank 0 2"),
        ({"time_steps": 3}, "rank 1 has time_steps 3, and rank 0 2"),
        ({"lengths": [3, 4, 5, 6]}, "rank 1 has fingerprint '"),
        ({"lengths": [3, 4, 5]}, "rank 1 has num_sources 3, and rank 0 4"),
        ({"known": None}, "rank 1 has lengths "),
        ({"known": [5, 4, 3, 5]}, "rank 1 has lengths "),
    ],
)
def test_what_ranks_do_not_share_is_an_error_on_all_of_them(ranks, odd, reason):
    whole = {"lengths": [3, 4, 5, 5]} | ({"known": [3, 4, 5, 5]} if "known" in odd else {})
    for failed in ranks.run(3, read_with, 3, [whole, whole | odd, whole], failing=True):
        assert failed.kind == "RankError"
        assert reason in failed.message
    assert all(len(found) == 3 for found in ranks.run(3, read_with, 3, [whole] * 3))


def differing_slowly(rank):
    """Rank 1 does not know lengths, as the others do, and takes its time to say what differs."""
    put_first = StoreConnection.put_first

    def slow(connection, name, value):
        time.sleep(0.3 * (name == keys_of_ranks.DIFFERS))
        return put_first(connection, name, value)

    cases = [{"lengths": [3, 4, 5, 5], "known": None if one == 1 else [3, 4, 5, 5]} for one in range(3)]
    with mock.patch.object(StoreConnection, "put_first", slow):
        return read_with(rank, 3, cases)


def test_no_rank_begins_before_all_have_said_what_differs(ranks):
    assert [type(failed) for failed in ranks.run(3, differing_slowly, failing=True)] == [Failed] * 3


def windows(source):
    for i in range(source[1]):
        yield {"name": f"item {i}", "window": torch.full((2, 3), i)}


ZEROS = torch.zeros(2, 2, 3, dtype=torch.int64)
#: Streams, options, and what padding looks like.
PADDING = {
    "zeros": (Counting(), {"time_steps": 2}, ZEROS),
    "data": (Counting(), {"time_steps": 2, "padding_mode": "data"}, ZEROS),
    "windows": (windows, {"windows": "given", "fill_value": 7}, {"name": [[None, None]], "window": ZEROS[:1] + 7}),
    "collated": (Counting(), {"time_steps": 2}, list(ZEROS)),
}


def padded(rank, kind, known):
    """Of each batch what it holds, and if there is an item in it."""
    open_stream, options, _ = PADDING[kind]
    lengths = [0, 5, 0, 0, 0, 0]
    sources, known = list(enumerate(lengths)), lengths if known else None
    dataset = StreamDataset(sources, open_stream, 2, lengths=known, seed=0, **options)
    if kind == "collated":
        return [(repr(batch), False) for batch in StreamDataLoader(dataset, 0, list, process_group=group(2))]
    loader = StreamDataLoader(dataset, 1, process_group=group(2))
    return [(repr(batch.data), bool(batch.mask.any() or (batch.source_index >= 0).any())) for batch in loader]


@pytest.mark.one_of_each
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("kind", PADDING)
def test_a_rank_without_an_item_pads_what_others_read(ranks, kind, known):
    idle, busy = ranks.run(2, padded, kind, known)[:: -1 if known else 1]  # known lengths are dealt longest first
    assert len(busy) > 2
    assert idle == [(repr(PADDING[kind][-1]), False)] * len(busy)


def padded_by_what_is_in_the_store(rank, value, make_item):
    """Of two ranks one reads items, the other pads; `value` is what a neighbour writes over the layout."""

    def put(connection, name, own):
        original(connection, name, own if value is None or name != keys_of_ranks.LAYOUT else value)

    def open_stream(length):
        return (make_item() for _ in range(length))

    original = StoreConnection.put
    with mock.patch.object(StoreConnection, "put", put):
        dataset = StreamDataset([0, 5, 0, 0], open_stream, 2, seed=0, time_steps=2)
        list(StreamDataLoader(dataset, process_group=group(2)))


class Code:
    def __init__(self, marker):
        self._marker = marker

    def __reduce__(self):
        return open, (self._marker, "w")


def leaf_of(spec):
    return json.dumps({"structure": None, "specs": [spec], "windowed": False})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (lambda marker: pickle.dumps(Code(marker)).hex(), "cannot read the layout to pad with"),
        (lambda _: '{"a":' * 100_000, "cannot read the layout to pad with"),
        (lambda _: leaf_of(["float32.__class__", [2], True]), "no leaf is a 'float32.__class__'"),
        (lambda _: leaf_of(["float32", [-1], True]), "no leaf is a 'float32' \\[-1\\]"),
        (lambda _: leaf_of(["float32", [2], True]).replace("null", '{"type": "os:system"}'), "cannot be read"),
    ],
    ids=["pickle", "deep", "no dtype", "no shape", "no class"],
)
def test_what_a_neighbour_writes_to_the_store_is_data(ranks, tmp_path, value, text):
    marker = str(tmp_path / "marker")
    told = ranks.run(2, padded_by_what_is_in_the_store, value(marker), int, failing=True)
    assert any(isinstance(one, Failed) and re.search(text, one.message) for one in told), told
    assert not os.path.exists(marker)


def made_of(name):
    return globals()[name](1)


Unnamed = dataclasses.make_dataclass("another name", ["x"])


@pytest.mark.parametrize("make_item", [functools.partial(dict, [((1, 2), 3)]), functools.partial(made_of, "Unnamed")])
def test_items_that_other_ranks_cannot_know_are_an_error_that_says_what_to_do(ranks, make_item):
    told = ranks.run(2, padded_by_what_is_in_the_store, None, make_item, failing=True)
    assert any("define the class at the top level of a module" in str(one) for one in told), told


LENGTHS = [4, 9, 3, 8, 2, 2, 1, 9, 5, 3, 7, 1] * 4


def items_of(rank, known, broken, **options):
    """The items of each batch of a rank, of streams of which some break at their item 2."""
    acts = {(n, 2): raising(OSError) for n in range(1, len(LENGTHS), 3)} if broken else {}

    def read(source):
        return itertools.islice(acting(acts)(source), LENGTHS[source])

    dataset = StreamDataset(
        range(len(LENGTHS)), read, 2, seed=0, time_steps=2, lengths=LENGTHS if known else None, **options
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batches = list(StreamDataLoader(dataset, 0 if broken else 2, process_group=group(4)))
    return [
        list(zip(batch.source_index[batch.mask].tolist(), batch.position[batch.mask].tolist(), strict=True))
        for batch in batches
    ]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    ("broken", "options"),
    [(True, {"on_error": "skip"}), pytest.param(False, {"deterministic": False}, marks=pytest.mark.slow)],
    ids=["skipped", "first come"],
)
def test_steps_are_equal_and_all_is_read_where_nobody_knows_how_much_that_is(ranks, known, broken, options):
    found = ranks.run(4, functools.partial(items_of, **options), known, broken)
    assert len({len(batches) for batches in found}) == 1
    assert any(batches[-1] for batches in found)  # the last step is not padding everywhere
    read = [min(2, length) if broken and i % 3 == 1 else length for i, length in enumerate(LENGTHS)]
    items = [item for batches in found for batch in batches for item in batch]
    assert sorted(items) == [(i, j) for i, length in enumerate(read) for j in range(length)]


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False])
def test_epochs_left_early_by_all_ranks_do_not_disturb_the_next(ranks, known):
    case = {"lengths": [9] * 8} | ({"known": [9] * 8} if known else {})
    leaving = functools.partial(read_with, num_workers=1, persistent_workers=True, most=2, epochs=5)
    found = ranks.run(4, leaving, 4, [case] * 4)
    assert [[batch[-1] for batch in batches] for batches in found] == [[0, 0, 1, 1, 2, 2, 3, 3, 4, 4]] * 4


def two_loaders(rank):
    train = StreamDataLoader(Case([3, 9, 2, 6, 7]).dataset(), process_group=group(3))
    valid = StreamDataLoader(Case([2, 8, 5]).dataset(), process_group=group(3))
    steps = []
    for _ in range(2):
        for batch in train:
            if batch.batch_index == 1:
                steps.append(len(list(valid)))
        steps.append(batch.batch_index + 1)
    return steps


def test_loaders_and_epochs_do_not_mix(ranks):
    assert ranks.run(3, two_loaders) == [[4, 5, 4, 5]] * 3


def twins(rank, way):
    """Two data-parallel ranks of two processes each, which must read the same."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    lengths = [3, 9, 2, 6, 7, 1, 1, 4]
    if way == "numbers":  # which need lengths, as nobody says who is to agree on the number of batches
        dataset = Case(lengths, jitter=True).dataset(lengths=lengths)
        options = {"rank": mesh.get_local_rank("data"), "world_size": 2}
    else:
        dataset = Case(lengths, jitter=True).dataset()
        options = {"process_group": mesh["data"] if way == "mesh" else mesh.get_group("data")}
    return [key(batch) for _ in range(2) for batch in StreamDataLoader(dataset, **options)]


@pytest.fixture(scope="module")
def four():
    with RankProcesses(4) as processes:
        yield processes


@pytest.mark.parametrize("way", ["numbers", pytest.param("mesh", marks=pytest.mark.slow), "group"])
def test_model_parallel_ranks_read_the_same(four, way):
    found = four.run(4, twins, way)
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert found[0] != found[2]
    assert len(found[0]) == len(found[2])


def without_group(rank):
    loader = StreamDataLoader(Case([3] * 4).dataset(), rank=rank // 2, world_size=2)
    with pytest.raises(ValueError, match=r"world_size is 2, and torch.distributed has 4 .*process_group="):
        next(iter(loader))


def test_ranks_that_cannot_know_their_number_of_batches_need_their_group(four):
    four.run(4, without_group)


def own_loader(rank):
    """torch.distributed is running, and this loader is for rank 0 alone."""
    loader = StreamDataLoader(Case([3, 4]).dataset(), rank=0, world_size=1)
    return len(list(loader)) if rank == 0 else None


def test_a_loader_may_be_one_ranks_own(ranks):
    assert ranks.run(2, own_loader) == [2, None]


def leftovers(rank, most):
    """Threads, descriptors and keys in the store after some epochs, and after many more."""
    store, found = dist.distributed_c10d._get_default_store(), []
    for epochs in (5, 40):
        loader = StreamDataLoader(Case([3, 9, 2, 6, 7]).dataset(), process_group=group(2))
        for _ in range(epochs):
            list(itertools.islice(loader, most))
        dist.barrier(group(2))
        gc.collect()
        for thread in threading.enumerate():  # what was left ends in threads of its own
            if thread is not threading.current_thread():
                thread.join(60)
        calls = sum(map(len, use_of(store).calls.values()))
        found.append((threading.active_count(), len(os.listdir("/proc/self/fd")), store.num_keys(), calls))
        dist.barrier(group(2))
    return found


@pytest.mark.parametrize("most", [None, 2])
def test_many_epochs_leave_no_thread_connection_or_key_behind(ranks, most):
    for few, many in ranks.run(2, leftovers, most):
        assert many[0] <= few[0]
        assert many[1] <= few[1] + 2
        assert many[2] <= few[2] + 30  # those of the last sessions of another loader
        assert few[3] == many[3] == 0, "calls that are open"


# Ranks that fail


def test_a_rank_that_does_not_come_is_named(four):
    reading = functools.partial(read_with, timeout=2)
    for failed in four.run(2, reading, 3, [{"lengths": [3, 4, 5, 5]}] * 3, failing=True):
        assert failed.kind == "RankError"
        assert "rank 2 did not begin the epoch within 2 s" in failed.message


ENDS = {
    "killed": kill_self,
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "stuck": hang,
    "left": int,
}


def stumble(rank, who, way):
    """One rank of three fails at its step 2; it is the only one with much to read. The others' error."""
    lengths = [3] * 3 + [40 if i == who else 0 for i in range(3)]
    loader = StreamDataLoader(Case(lengths, lanes=1).dataset(), process_group=group(3), timeout=5)
    for batch in loader:
        if rank == who and batch.batch_index == 2:
            time.sleep(0.5 * (way != "left"))
            ENDS[way]()
            return "left"
    return "ended"


MISSED = "rank 1 did not say if it has data for step [23] within 5 s"
NO_STORE = "the store of torch.distributed, through which ranks agree, "
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("who", "way", "text"),
    [
        (1, "killed", MISSED),
        pytest.param(1, "stuck", MISSED, marks=slow),
        # rank 0 keeps the store; one that is stopped is as one behind a network that was cut: nothing answers
        pytest.param(0, "killed", f"{NO_STORE}failed", marks=slow),
        pytest.param(0, "stopped", f"{NO_STORE}did not answer within", marks=slow),
    ],
)
def test_a_rank_that_ends_or_is_stuck_does_not_leave_others_hanging(who, way, text):
    with RankProcesses(3, killed=True) as processes:
        for pipe in processes.pipes:
            pipe.send((stumble, (who, way)))
        for rank in {0, 1, 2} - {who}:
            assert processes.pipes[rank].poll(PATIENCE)
            _, (kind, message, _) = processes.pipes[rank].recv()
            assert kind == "RankError"
            assert re.search(text, message)


def test_a_rank_that_leaves_alone_is_named_at_once(ranks):
    found = ranks.run(3, stumble, 1, "left", failing=True)
    assert found[1] == "left"
    for failed in (found[0], found[2]):
        assert failed.kind == "RankError"
        assert failed.message.startswith("rank 1 left the epoch at step 3, before its end")


def leave(rank, who, told):
    """One rank gives up its wait for another one, or leaves; the last of them stays until the others know."""
    waits_long = (
        "stream_dataloader._engine.ranks.store._QUIET_SECONDS"  # a look at others would come after the test's end
    )
    options = {"padding_mode": "drop", "lanes": 1, "lookahead": 0}
    timeout = 3 if (rank, who) == (0, "gives up") else PATIENCE
    dist.barrier(group(3))  # so that it has not to wait for the beginning
    with mock.patch(waits_long, PATIENCE):
        loader = StreamDataLoader(Case([20] * 9, **options).dataset(), process_group=group(3), timeout=timeout)
        for batch in loader:
            if rank == 2 and batch.batch_index == 2:
                assert who == "leaves" or soon(told.exists)
                return "left"
    return "ended"


@pytest.mark.parametrize(
    ("who", "text"),
    [("gives up", "rank 2 did not say if it has data for step 3 within 3 s"), ("leaves", "rank 2 left the epoch at")],
)
def test_all_that_wait_for_the_same_are_told_at_once(ranks, tmp_path, who, text):
    """Of ranks that wait for the same step, those that would wait longer get the error of the first one."""
    for found in ranks.run(3, leave_and_tell, who, tmp_path / "told", failing=True)[:2]:
        assert isinstance(found, Failed)
        assert text in found.message


def leave_and_tell(rank, who, told):
    try:
        return leave(rank, who, told)
    finally:
        if rank == 1:
            told.touch()


def wait_for_a_slow_one(rank):
    """Rank 0 has read its share at once, and waits for a step that comes later than its timeout."""

    def read(n):
        for item in range(6):
            time.sleep(0.8 * n)
            yield item

    dataset = StreamDataset(range(2), read, 1, time_steps=1, lookahead=0)
    loader = StreamDataLoader(dataset, process_group=group(2), timeout=2.5)
    return [batch.batch_index for batch in loader]


def test_a_rank_may_be_behind_for_longer_than_the_timeout_as_long_as_it_reads(ranks):
    assert ranks.run(2, wait_for_a_slow_one) == [list(range(6))] * 2


def keys_after(rank, steps):
    """How many keys there are after so many steps of one epoch, and many more."""
    store, found = dist.distributed_c10d._get_default_store(), []
    loader = StreamDataLoader(Case([steps] * 8, 1, 1, padding_mode="drop").dataset(), process_group=group(2))
    for batch in loader:
        if batch.batch_index in (steps, 3 * steps):
            found.append(store.num_keys())
    return found


def test_a_long_epoch_leaves_no_key_a_step_behind(ranks):
    for few, many in ranks.run(2, keys_after, 80):
        assert many <= few + 20


# torch.distributed.checkpoint


def save_and_go_on(rank, world_size, folder, step, workers):
    import torch.distributed.checkpoint as checkpointing  # takes a second

    case = Case([7, 3, 9, 5, 8, 2, 6, 4, 9, 9, 1, 3], lanes=8 // world_size, shuffle=True)
    loader = StreamDataLoader(case.dataset(), workers, virtual_ranks=4, process_group=group(world_size))
    where = {"checkpoint_id": folder, "process_group": group(world_size)}
    if step is None:
        checkpointing.load({"loader": loader}, **where)
        return keys(loader)
    iterator = iter(loader)
    list(itertools.islice(iterator, step))
    checkpointing.save({"loader": loader}, **where)
    return keys(iterator)


@pytest.mark.parametrize(
    ("before", "after"), [pytest.param(*sizes, marks=pytest.mark.slow) for sizes in [(2, 1), (4, 4), (4, 2), (1, 4)]]
)
def test_distributed_checkpoints_are_dealt_out_to_other_world_sizes(ranks, tmp_path, before, after):
    saved = ranks.run(before, save_and_go_on, before, tmp_path, 3, 1)
    loaded = ranks.run(after, save_and_go_on, after, tmp_path, None, 2)
    assert len(saved[0]) > 3
    assert [side_by_side(b) for b in zip(*loaded, strict=True)] == [side_by_side(b) for b in zip(*saved, strict=True)]


def started_again(rank, method, times):
    """Steps of epochs of other lengths, each with torch.distributed started anew at the same address."""
    dist.destroy_process_group()
    steps = []
    for lengths in ([9, 40], [3, 2], [5, 30])[:times]:
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2)
        loader = StreamDataLoader(Case(lengths, lanes=1, time_steps=1).dataset(), timeout=PATIENCE)
        steps.append(len(list(loader)))
        dist.barrier()
        dist.destroy_process_group()
        time.sleep(0.5)  # until the other one has too
    return steps


@pytest.mark.parametrize(("kind", "times"), [pytest.param("tcp", 3, marks=pytest.mark.slow), ("file", 1)])
def test_torch_distributed_may_be_started_again_and_with_a_file(tmp_path, kind, times):
    method = f"tcp://127.0.0.1:{free_port()}" if kind == "tcp" else f"file://{tmp_path}/store"
    with RankProcesses(2, killed=True) as processes:
        assert processes.run(2, started_again, method, times) == [[40, 3, 30][:times]] * 2


def states_around_the_end(rank):
    loader = StreamDataLoader(Case([3, 9, 2, 6, 7]).dataset(), timeout=PATIENCE)
    batches = list(itertools.islice(loader, 2))
    before = loader.state_dict()
    dist.destroy_process_group()
    resumed = StreamDataLoader(Case([3, 9, 2, 6, 7]).dataset(), rank=rank, world_size=2)
    resumed.load_state_dict(loader.state_dict())
    return loader.state_dict() == before == batches[1].state_dict() and resumed.state_dict() == before


@pytest.mark.slow
def test_a_rank_stays_what_it_is_when_torch_distributed_ends():
    with RankProcesses(2, killed=True) as processes:
        assert processes.run(2, states_around_the_end) == [True, True]


LANES_OF_A_RUN = [4, 0, 9, 2, 2, 7, 1, 3]


def read_epochs(rank, world_size, n, epochs, workers):
    """Epochs of n batches; each rank reads as many as it is told."""
    dataset = Case(LANES_OF_A_RUN, 2, 3, "packed", "cycle", 1, True, 3).dataset()
    loader = StreamDataLoader(dataset, workers, batches_per_epoch=n[rank], process_group=group(world_size))
    return [keys(loader) for _ in range(epochs[rank])], loader.state_dict()


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_epochs_of_n_batches_are_alike_on_all_ranks(ranks, workers):
    found = ranks.run(2, read_epochs, 2, [3, 3], [4, 1], workers)  # the second one stops after an epoch
    dataset = Case(LANES_OF_A_RUN, 4, 3, "packed", "cycle", 1, True, 3).dataset()
    expected = keys(StreamDataLoader(dataset, virtual_ranks=2, batches_per_epoch=12))
    assert [len(epoch) for epochs, _ in found for epoch in epochs] == [3] * 5
    (first, _), (second, _) = found
    assert [side_by_side(pair) for pair in zip(first[0], second[0], strict=True)] == expected[:3]
    assert [batch[-2] for epoch in first for batch in epoch] == list(range(12))
    states = [state for _, state in ranks.run(2, read_epochs, 2, [5, 5], [1, 1], workers)]
    assert merge_states(states)["epoch_place"] == {"number": 1, "delivered": 0, "batches_per_epoch": 5}
    otherwise = ranks.run(2, read_epochs, 2, [3, 4], [1, 1], workers, failing=True)
    assert any("batches_per_epoch" in str(rank) for rank in otherwise)
