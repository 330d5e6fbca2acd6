"""Resuming: the batches that follow a saved state are bit for bit those of a run without a break."""

import itertools
import json

import numpy as np
import pytest
import torch
from cases import Case, Counting, cases, key
from helpers import random_cases
from hypothesis import given
from hypothesis import strategies as st

from stream_dataloader import ReadError, StateError, StreamDataLoader, StreamDataset, get_stream_info
from stream_dataloader.testing import batch_key, check_resume

CASE = Case([4, 0, 9, 2, 2, 7, 1, 3, 5, 8, 6], lanes=4, time_steps=3, shuffle=True, seed=1)


def resumed(loader, taken, other):
    """Take some batches, save, load into another loader, and take the rest."""
    iterator = iter(loader)
    head = [key(batch) for batch in itertools.islice(iterator, taken)]
    state = json.loads(json.dumps(loader.state_dict()))
    if hasattr(iterator, "close"):
        iterator.close()
    other.load_state_dict(state)
    return head + [key(batch) for batch in other]


@random_cases(1000)
@given(cases(max_streams=14, max_length=7, max_lanes=5), st.integers(0, 12))
def test_any_state_resumes_in_process(case, taken):
    expected = [key(batch) for batch in StreamDataLoader(case.dataset())]
    taken = min(taken, len(expected))
    other = case.dataset(seed=case.seed + 1)  # the state's is adopted
    assert resumed(StreamDataLoader(case.dataset()), taken, StreamDataLoader(other)) == expected


@random_cases(150)
@given(cases(), st.integers(0, 12), st.integers(0, 5), st.integers(0, 5), st.integers(1, 3), st.booleans())
@pytest.mark.filterwarnings("ignore:num_workers is")
def test_any_state_resumes_with_other_workers(case, taken, before, after, prefetch, queue):
    expected = [key(batch) for batch in StreamDataLoader(case.dataset())]
    taken = min(taken, len(expected))
    options = {"prefetch_factor": prefetch, "transport": "queue" if queue else "auto"} if after else {}
    loader, other = StreamDataLoader(case.dataset(), before), StreamDataLoader(case.dataset(seed=5), after, **options)
    assert resumed(loader, taken, other) == expected


@random_cases(300)
@given(cases(modes=("cycle",)), st.integers(0, 8))
def test_endless_epochs_resume(case, taken):
    case.lengths[0] = max(1, case.lengths[0])

    def first(loader, number):
        return [key(batch) for batch in itertools.islice(loader, number)]

    expected = first(StreamDataLoader(case.dataset()), taken + 6)
    loader, other = StreamDataLoader(case.dataset()), StreamDataLoader(case.dataset())
    head = first(loader, taken)
    other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert head + first(other, 6) == expected


def ragged_windows(source):
    index, length = source
    for i in range(length):
        yield np.full((1 + (i + index) % 3, 2), 10 * index + i)


def failing(source):
    for item in Counting()(source):
        if item[1] == 4:
            raise OSError("broken")
        yield item


KINDS = {
    "windows": (ragged_windows, {}, {}),
    "collated windows": (ragged_windows, {}, {"collate_fn": list}),
    "kept workers": (Counting(), {"time_steps": 2}, {"persistent_workers": True}),
    "queue": (Counting(), {"time_steps": 2}, {"transport": "queue"}),
    "known lengths": (Counting(), {"time_steps": 2, "lengths": CASE.lengths, "schedule": "balanced"}, {}),
    "skipping": (failing, {"time_steps": 2, "on_error": "skip"}, {}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:skipped the rest")
def test_every_kind_of_loader_resumes(kind):
    open_stream, rest, options = KINDS[kind]

    def make_loader(workers):
        kept = {name: value for name, value in options.items() if workers or name == "collate_fn"}
        dataset = StreamDataset(list(enumerate(CASE.lengths)), open_stream, 4, shuffle=True, seed=1, **rest)
        return StreamDataLoader(dataset, workers, **kept)

    by_workers = kind in ("collated windows", "kept workers", "queue")
    check_resume(make_loader, num_workers=(2, 0) if by_workers else (0,))


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_other_start_methods_resume(method):
    expected = [key(batch) for batch in StreamDataLoader(CASE.dataset())]
    other = StreamDataLoader(CASE.dataset(), 2, multiprocessing_context=method)
    assert resumed(StreamDataLoader(CASE.dataset(), 3), 3, other) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_without_determinism_every_item_still_comes_once(workers):
    for taken in range(0, 12, 3):
        case = Case(CASE.lengths * 2, lanes=4, time_steps=3, shuffle=True, seed=taken, jitter=True)
        loader = StreamDataLoader(case.dataset(deterministic=False), workers)
        read = resumed(loader, taken, StreamDataLoader(case.dataset(deterministic=False), 2))
        items = [
            (source, position)
            for data, _, _, mask, sources, positions, *_ in read
            for row_mask, row_source, row_position in zip(mask, sources, positions, strict=True)
            for real, source, position in zip(row_mask, row_source, row_position, strict=True)
            if real
        ]
        assert sorted(items) == [(s, p) for s, length in enumerate(case.lengths) for p in range(length)]


# When


def test_states_between_epochs_and_before_the_first():
    expected = []
    loader = StreamDataLoader(CASE.dataset(), 2)
    before = loader.state_dict()
    for _ in range(3):
        expected.append([key(batch) for batch in loader])
    assert (before["epoch"], before["step"]) == (0, 0)
    assert (loader.state_dict()["epoch"], loader.state_dict()["step"]) == (3, 0)
    loader.load_state_dict(before)
    assert [key(batch) for batch in loader] == expected[0]
    loader.set_epoch(2)
    other = StreamDataLoader(CASE.dataset())
    other.load_state_dict(loader.state_dict())
    assert [key(batch) for batch in other] == expected[2]


def test_after_a_break_the_state_is_where_the_epoch_was_left():
    loader = StreamDataLoader(CASE.dataset(), 2)
    for batch in loader:
        if batch.step == 2:
            break
    state = loader.state_dict()
    assert (state["epoch"], state["step"]) == (0, 3)
    assert batch.state_dict() == state
    expected = [key(batch) for batch in StreamDataLoader(CASE.dataset())]
    loader.load_state_dict(state)
    assert [key(batch) for batch in loader] == expected[3:]
    assert next(iter(loader)).epoch == 1


def test_the_last_batch_resumes_to_nothing_and_the_end_to_the_next_epoch():
    loader = StreamDataLoader(CASE.dataset(), 2)
    iterator = iter(loader)
    count = len(list(StreamDataLoader(CASE.dataset())))
    for _ in range(count):
        next(iterator)
    last = loader.state_dict()
    assert next(iterator, None) is None
    end = loader.state_dict()
    other = StreamDataLoader(CASE.dataset())
    other.load_state_dict(last)
    assert list(other) == []
    assert next(iter(other)).epoch == 1
    other.load_state_dict(end)
    assert {batch.epoch for batch in other} == {1}


def test_a_state_as_of_an_earlier_batch():
    loader = StreamDataLoader(CASE.dataset(), 2)
    batches = list(itertools.islice(loader, 5))
    other = StreamDataLoader(CASE.dataset())
    for step, batch in enumerate(batches[:-1]):
        for state in (batch.state_dict(), batch.to("cpu").state_dict(), loader.state_dict(step + 1)):
            other.load_state_dict(state)
            assert key(next(iter(other))) == key(batches[step + 1])
    with pytest.raises(ValueError, match="step 9 is not known: steps 0 to 5"):
        loader.state_dict(9)
    with pytest.raises(ValueError, match="straight from a StreamDataLoader"):
        next(iter(loader.parts())).state_dict()


def test_another_epoch_set_after_loading_is_read_from_its_beginning():
    loader = StreamDataLoader(CASE.dataset())
    next(iter(loader))
    state = loader.state_dict()
    for epoch, first in ((0, 1), (1, 0)):
        loader.load_state_dict(state)
        loader.set_epoch(epoch)
        batch = next(iter(loader))
        assert (batch.epoch, batch.step) == (epoch, first)


def test_parts_resume_too():
    expected = [key(part, worker_id=True) for part in StreamDataLoader(CASE.dataset(), 2).parts()]
    loader = StreamDataLoader(CASE.dataset(), 3)
    list(itertools.islice(loader, 2))
    other = StreamDataLoader(CASE.dataset(), 2)
    other.load_state_dict(loader.state_dict())
    assert [key(part, worker_id=True) for part in other.parts()] == expected[4:]


# How


class Counted:
    """Items that are counted when they are read."""

    read = 0

    def __init__(self, length, start=0):
        self.length, self.position = length, start

    def __iter__(self):
        return self

    def __next__(self):
        if self.position == self.length:
            raise StopIteration
        type(self).read += 1
        self.position += 1
        return get_stream_info().rng_at(self.position - 1).integers(1 << 30)


def test_half_read_epochs_of_seekable_streams_read_nothing_again():
    dataset = StreamDataset([100_000] * 64, Counted, 64, time_steps=50, seed=0)
    snapshot = StreamDataLoader(dataset)
    next(iter(snapshot))
    state = snapshot.state_dict()
    state["step"] = 1000
    for lane in state["group_0"][-1]:
        lane["after"][1:3] = 50_000, 50_000
    for workers in (0, 2):
        other = StreamDataLoader(dataset, workers)
        other.load_state_dict(state)
        Counted.read = 0
        batch = next(iter(other))
        assert batch.position[0].tolist() == [50_000] * 64
        assert Counted.read <= 64 * 50  # in this process


def test_a_stream_that_is_shorter_now_is_an_error():
    lengths = [9]
    loader = StreamDataLoader(StreamDataset([0], lambda _: range(lengths[0]), 1, time_steps=2))
    list(itertools.islice(loader, 3))
    loader.load_state_dict(loader.state_dict())
    lengths[0] = 4
    with pytest.raises(ReadError, match="ended at item 4, and had 6 before"):
        list(loader)


# What is refused


def test_states_of_another_dataset_are_refused():
    state = StreamDataLoader(CASE.dataset()).state_dict()
    for options, reason in [
        ({"time_steps": 4}, "time_steps 3, and the dataset has 4"),
        ({"padding_mode": "data"}, "padding_mode 'zeros', and the dataset has 'data'"),
        ({"lookahead": 2}, "lookahead 1, and the dataset has 2"),
        ({"shuffle": False}, "shuffle True, and the dataset has False"),
    ]:
        with pytest.raises(StateError, match=reason):
            StreamDataLoader(CASE.dataset(**options)).load_state_dict(state)
    with pytest.raises(StateError, match="batch_size 4, and the dataset has 3"):
        StreamDataLoader(Case(CASE.lengths, lanes=3, time_steps=3, shuffle=True).dataset()).load_state_dict(state)
    with pytest.raises(StateError, match=r"other sources .*fingerprint="):
        StreamDataLoader(Case(CASE.lengths[::-1], lanes=4, time_steps=3, shuffle=True).dataset()).load_state_dict(state)
    with pytest.raises(StateError, match="version 7"):
        StreamDataLoader(CASE.dataset()).load_state_dict(state | {"version": 7})
    for missing in state:
        if missing != "version":
            half = {name: value for name, value in state.items() if name != missing}
            with pytest.raises(StateError, match=missing):
                StreamDataLoader(CASE.dataset()).load_state_dict(half)
    for nothing in (None, 3, {}, [1]):
        with pytest.raises(StateError):
            StreamDataLoader(CASE.dataset()).load_state_dict(nothing)


def test_moved_paths_may_share_a_fingerprint():
    def loader(root):
        dataset = StreamDataset(
            [f"{root}/{i}" for i in range(4)], lambda p: range(5), 2, time_steps=2, fingerprint="v1"
        )
        return StreamDataLoader(dataset)

    first, second = loader("/a"), loader("/b")
    next(iter(first))
    second.load_state_dict(first.state_dict())
    assert next(iter(second)).step == 1


def test_a_state_is_small_and_plain():
    dataset = StreamDataset([f"/data/{i}.mp4" for i in range(100_000)], lambda _: range(9), 8, time_steps=2)
    loader = StreamDataLoader(dataset)
    next(iter(loader))
    assert len(json.dumps(loader.state_dict())) < 2000
    assert batch_key(next(iter(loader)))["step"] == 0


@pytest.mark.parametrize("workers", [0, 1])
def test_windows_that_were_not_counted_are_not_taken_for_time_steps(workers):
    def open_windows(length):
        for begin in range(0, length, 3):
            yield torch.arange(begin, min(begin + 3, length))

    dataset = StreamDataset([7, 9], open_windows, 2)
    collated = StreamDataLoader(dataset, workers, collate_fn=list)
    next(iter(collated))
    state = collated.state_dict()
    loader = StreamDataLoader(dataset, workers)
    loader.load_state_dict(state)
    with pytest.raises(StateError, match=r"lane 0 .* time steps were not counted: .* collate_fn"):
        next(iter(loader))
    again = StreamDataLoader(dataset, workers, collate_fn=list)
    again.load_state_dict(state)
    assert [window.tolist() for window in next(iter(again))] == [[3, 4, 5], [3, 4, 5]]
