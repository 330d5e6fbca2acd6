"""Resuming: the batches that follow a saved state are bit for bit those of a run without a break."""

import itertools
import json

import numpy as np
import pytest
import torch
from cases import Case, Counting, cases, key, keys
from helpers import loader_of, random_cases, seldom
from hypothesis import given
from hypothesis import strategies as st

from stream_dataloader import StateError, StreamDataLoader, StreamDataset, get_stream_info
from stream_dataloader._engine.schedule.state_check import checksum
from stream_dataloader.errors import ReadError
from stream_dataloader.testing import check_resume
from stream_dataloader.testing.resume import batch_key

CASE = Case([4, 0, 9, 2, 2, 7, 1, 3, 5, 8, 6], lanes=4, time_steps=3, shuffle=True, seed=1)


def resumed(loader, taken, other, most=None):
    """Take some batches, save, load into another loader, and take the rest."""
    iterator = iter(loader)
    head = keys(itertools.islice(iterator, taken), seeds=True)
    state = json.loads(json.dumps(loader.state_dict()))
    iterator.close()
    other.load_state_dict(state)
    return head + keys(itertools.islice(other, most), seeds=True)


@random_cases(1300, quick=30)
@given(
    cases(max_streams=14, max_length=7, max_lanes=5, modes=("zeros", "data", "drop", "cycle"), marks=True),
    st.integers(0, 12),
)
def test_any_state_resumes_in_process(case, taken):
    case.lengths[0] = max(1, case.lengths[0])
    most = 6 if case.padding_mode == "cycle" else None
    expected = keys(itertools.islice(StreamDataLoader(case.dataset()), most and taken + most), seeds=True)
    other = StreamDataLoader(case.dataset(seed=case.seed + 1))  # the state's seed is adopted
    assert resumed(StreamDataLoader(case.dataset()), min(taken, len(expected)), other, most) == expected


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
    "windows": (ragged_windows, {"windows": "given"}, {}),
    "collated windows": (ragged_windows, {}, {"collate_fn": list}),
    "kept workers": (Counting(), {"time_steps": 2}, {"persistent_workers": True}),
    "queue": (Counting(), {"time_steps": 2}, {"messages": True}),
    "known lengths": (Counting(), {"time_steps": 2, "lengths": CASE.lengths, "schedule": "balanced"}, {}),
    "skipping": (failing, {"time_steps": 2, "on_error": "skip"}, {}),
}


@pytest.mark.parametrize("kind", seldom(KINDS, "skipping", "known lengths", "queue", "windows"))
@pytest.mark.filterwarnings("ignore:skipped the rest")
def test_every_kind_of_loader_resumes(kind):
    open_stream, rest, options = KINDS[kind]

    def make_loader(workers):
        dataset = StreamDataset(list(enumerate(CASE.lengths)), open_stream, 4, shuffle=True, seed=1, **rest)
        return loader_of(dataset, workers, **(options if workers or "collate_fn" in options else {}))

    check_resume(make_loader, num_workers=(2, 0) if options else (0,), epochs=1 if options else 2)


def test_parts_resume_too():
    expected = [key(part, worker_id=True) for part in StreamDataLoader(CASE.dataset(), 2).parts()]
    loader = StreamDataLoader(CASE.dataset(), 3)
    list(itertools.islice(loader, 2))
    other = StreamDataLoader(CASE.dataset(), 2)
    other.load_state_dict(loader.state_dict())
    assert [key(part, worker_id=True) for part in other.parts()] == expected[4:]


class Counted:
    read = 0

    def __init__(self, length, start=0):
        self.positions = iter(range(start, length))

    def __iter__(self):
        return self

    def __next__(self):
        position = next(self.positions)
        type(self).read += 1
        return get_stream_info().rng_at(position).integers(1 << 30)


@pytest.mark.parametrize("workers", [0, 2])
def test_half_read_epochs_of_seekable_streams_read_nothing_again(workers):
    dataset = StreamDataset([100_000] * 64, Counted, 64, time_steps=50, seed=0)
    loader, other = StreamDataLoader(dataset), StreamDataLoader(dataset, workers)
    next(iter(loader))
    state = loader.state_dict()
    state["step"] = 1000
    *place, _ = state["group_0"]
    for lane in place[3]:
        lane["after"][1:3] = 50_000, 50_000
    state["group_0"] = *place, checksum(state, place)
    other.load_state_dict(state)
    Counted.read = 0
    assert next(iter(other)).position[0].tolist() == [50_000] * 64
    assert Counted.read <= 64 * 50  # in this process


def test_a_stream_that_is_shorter_now_is_an_error():
    lengths = [9]
    loader = StreamDataLoader(StreamDataset([0], lambda _: range(lengths[0]), 1, time_steps=2))
    list(itertools.islice(loader, 3))
    loader.load_state_dict(loader.state_dict())
    lengths[0] = 4
    with pytest.raises(ReadError, match="ended at item 4, and had at least 6 before"):
        list(loader)


OTHERS = [
    (CASE.dataset(time_steps=4), "time_steps 3, and the dataset has 4"),
    (CASE.dataset(padding_mode="data"), "padding_mode"),
    (CASE.dataset(lookahead=2), "lookahead"),
    (CASE.dataset(shuffle=False), "shuffle"),
    (CASE.dataset(batch_size=3), "batch_size"),
    (Case(CASE.lengths[::-1], lanes=4, time_steps=3, shuffle=True).dataset(), r"other sources .*fingerprint="),
]


@pytest.mark.parametrize(("other", "reason"), OTHERS)
def test_states_of_another_dataset_are_refused(other, reason):
    with pytest.raises(StateError, match=reason):
        StreamDataLoader(other).load_state_dict(StreamDataLoader(CASE.dataset()).state_dict())


def test_what_is_no_whole_state_is_refused():
    loader = StreamDataLoader(CASE.dataset())
    state = loader.state_dict()
    halves = [{name: value for name, value in state.items() if name != missing} for missing in state]
    for wrong in (state | {"version": 7}, None, 3, {}, [1], *halves[1:]):
        with pytest.raises(StateError):
            loader.load_state_dict(wrong)


def test_moved_paths_may_share_a_fingerprint():
    def loader(root):
        paths = [f"{root}/{i}" for i in range(4)]
        return StreamDataLoader(StreamDataset(paths, lambda _: range(5), 2, time_steps=2, fingerprint="v1"))

    first, second = loader("/a"), loader("/b")
    next(iter(first))
    second.load_state_dict(first.state_dict())
    assert next(iter(second)).batch_index == 1


def test_a_state_is_small_and_plain():
    dataset = StreamDataset([f"/data/{i}.mp4" for i in range(100_000)], lambda _: range(9), 8, time_steps=2)
    loader = StreamDataLoader(dataset)
    next(iter(loader))
    assert len(json.dumps(loader.state_dict())) < 2000
    assert batch_key(next(iter(loader)))["batch_index"] == 0


@pytest.mark.parametrize("workers", [0, 1])
def test_windows_that_were_not_counted_are_not_taken_for_time_steps(workers):
    dataset = StreamDataset([7, 9], lambda length: torch.arange(length).split(3), 2, windows="given")
    collated, again = (StreamDataLoader(dataset, workers, collate_fn=list) for _ in range(2))
    next(iter(collated))
    state = collated.state_dict()
    loader = StreamDataLoader(dataset, workers)
    loader.load_state_dict(state)
    with pytest.raises(StateError, match="collate_fn"):
        next(iter(loader))
    again.load_state_dict(state)
    assert [window.tolist() for window in next(iter(again))] == [[3, 4, 5], [3, 4, 5]]
