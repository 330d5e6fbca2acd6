"""Windows that begin with the last items of the window before (`context`), against a serial model."""

import functools
import itertools

import numpy as np
import pytest
import torch
from cases import Case, Marked, cases, cells, check_fields, ways
from helpers import random_cases
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from stream_dataloader import (
    LaneBatchSampler,
    RecurrentState,
    Sections,
    StreamDataLoader,
    StreamDataset,
    collate_lanes,
    interleave,
    lane_dataset,
    regroup,
    side_by_side,
)
from stream_dataloader.recurrent import LaneCache, LaneMemory
from stream_dataloader.testing import audit, check_resume
from stream_dataloader.testing.resume import batch_key

pytestmark = [
    pytest.mark.filterwarnings("ignore:num_workers is"),
    pytest.mark.filterwarnings("ignore:batch_size is"),
]


def with_context(batches, context, begins):
    """The model's batches with the last items of each lane's stream before them; `begins` says where streams do."""
    before = None
    for batch in batches:
        before, made = before or [[] for _ in batch], []
        for lane, window in enumerate(batch):
            first = window[0]
            goes_on = first is not None and not begins(first)
            back = before[lane][-context:] if context and goes_on else []
            made.append([None] * (context - len(back)) + [(*cell[:2], False, *cell[3:]) for cell in back] + window)
            for cell in filter(None, window):
                before[lane] = [*([] if begins(cell) else before[lane]), cell]
        yield made


def starts_source(cell):
    return cell[1] == 0


def starts_section(cell):
    return cell[3]


def open_at_start(source, start=0):
    return (np.array([source[0], position, 0]) for position in range(start, source[1]))


def open_forward(source):
    return open_at_start(source)


def open_marked(source):
    return Marked(source[0], open_at_start(source))


class Going:
    """An iterator over the items of a source."""

    def __init__(self, number, length):
        self.number, self.length, self.position = number, length, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.position == self.length:
            raise StopIteration
        self.position += 1
        return np.array([self.number, self.position - 1, 0])


class Seeking(Going):
    """An iterator that goes to an item."""

    def seek_item(self, item):
        self.position = item


class Keeping(Going):
    """An iterator that keeps a state of its own, and cannot go to an item."""

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def open_keeping(source):
    return Keeping(*source)


def open_seeking(source):
    return Seeking(*source)


WAYS_TO_GO = {
    "forward": open_forward,
    "marks": open_marked,
    "start": open_at_start,
    "seek_item": open_seeking,
    "state_dict": open_keeping,
}


@random_cases(1000, 20)
@given(
    case=cases(max_lanes=4, modes=["zeros", "data", "drop", "cycle"], marks=True, lengths=True),
    context=st.integers(0, 7),
    way=ways(),
)
def test_batches_are_those_of_a_serial_model(case, context, way):
    dataset = case.dataset(context=context)
    expected = with_context(case.expected(dataset), context, starts_source)
    batches = list(itertools.islice(StreamDataLoader(dataset, **way), 8))
    assert [cells(batch) for batch in batches] == list(itertools.islice(expected, 8))
    for batch in batches:
        assert batch.context == context
        assert batch.time_steps == context + case.time_steps
        check_fields(batch)


@random_cases(500, 12)
@given(case=cases(max_lanes=4, lengths=True), context=st.integers(1, 7), steps=st.integers(1, 5), way=ways())
def test_no_context_comes_from_another_section(case, context, steps, way):
    cut = Sections(steps, jitter=True, lengths=case.lengths)
    dataset = case.dataset(context=context, sections=cut, lengths=None)
    expected = with_context(case.expected(dataset), context, starts_section)
    batches = list(StreamDataLoader(dataset, **way))
    assert [cells(batch) for batch in batches] == list(expected)


@random_cases(400, 12)
@given(
    case=cases(max_streams=8, max_lanes=3, modes=["zeros", "data", "drop", "cycle"], lengths=True),
    context=st.integers(1, 7),
    steps=st.sampled_from([None, 1, 3]),
    how=st.sampled_from(list(WAYS_TO_GO)),
)
def test_every_place_is_resumed_exactly(case, context, steps, how):
    opens = WAYS_TO_GO[how]
    cut = None if steps is None else Sections(steps, jitter=True, lengths=case.lengths)
    lengths = case.lengths if case.knows_lengths and cut is None else None

    def loader(workers):
        dataset = case.dataset(context=context, open_stream=opens, sections=cut, lengths=lengths)
        return StreamDataLoader(dataset, workers, worker_method="thread")

    check_resume(loader, num_workers=[0, 2, 1, 3], limit=6 if case.padding_mode == "cycle" else None)


@pytest.mark.parametrize("how", WAYS_TO_GO)
def test_streams_go_back_by_each_of_their_means(how):
    case = Case(lengths=[9, 2, 0, 7], lanes=2, time_steps=3)
    check_resume(lambda _: StreamDataLoader(case.dataset(context=2, open_stream=WAYS_TO_GO[how])), epochs=1)


def test_a_stream_that_breaks_in_its_context_leaves_its_cells_empty():
    opened = []

    def breaks_when_opened_again(source, start=0):
        opened.append(source)
        for position in range(start, source[1]):
            if opened.count((0, 9)) > 1 and source[0] == 0 and position == 2:
                raise OSError("gone")
            yield np.array([source[0], position, 0])

    def loader():
        dataset = StreamDataset([(0, 9), (1, 2)], breaks_when_opened_again, 1, time_steps=3, context=2, on_error="skip")
        return StreamDataLoader(dataset)

    first = loader()
    next(iter(first))
    second = loader()
    second.load_state_dict(first.state_dict())
    with pytest.warns(RuntimeWarning, match="gone"):
        (batch,) = second
    assert cells(batch) == [[None, None, (1, 0, True, True), (1, 1, True, False), None]]


@pytest.mark.slow
def test_a_worker_that_dies_does_not_change_the_context(tmp_path):
    opens = functools.partial(_dies_once, str(tmp_path))
    for windows in ("aligned", "packed"):
        given = {"windows": windows, "context": 4, "time_steps": 3, "batch_size": 3}
        sources = [(i, n) for i, n in enumerate([9, 2, 14, 0, 5, 7])]
        expected = list(StreamDataLoader(StreamDataset(sources, open_at_start, **given)))
        (tmp_path / "died").unlink(missing_ok=True)
        found = list(StreamDataLoader(StreamDataset(sources, opens, **given), 2, max_restarts=2))
        assert (tmp_path / "died").exists()
        assert list(map(batch_key, found)) == list(map(batch_key, expected))


def _dies_once(folder, source):
    import os
    import pathlib

    for position in range(source[1]):
        mark = pathlib.Path(folder) / "died"
        if source[0] == 2 and position == 8 and not mark.exists():
            mark.touch()
            os._exit(1)
        yield np.array([source[0], position, 0])


@random_cases(1000, 20)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    lanes=st.integers(1, 3),
    time_steps=st.integers(1, 4),
    context=st.integers(0, 6),
    windows=st.sampled_from(["aligned", "packed"]),
    mode=st.sampled_from(["zeros", "data", "drop", "cycle"]),
    steps=st.sampled_from([None, 2, 5]),
    left=st.integers(0, 5),
    ranks=st.sampled_from([1, 2]),
)
def test_the_sampler_draws_the_same_context(lengths, lanes, time_steps, context, windows, mode, steps, left, ranks):
    lengths[0] += mode == "cycle"
    if ranks == 2:
        lengths = [length + 1 for length in lengths] * 2
    items = [np.array([source, position]) for source, length in enumerate(lengths) for position in range(length)]
    ends = np.cumsum(lengths).tolist()
    groups = [range(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    given = {"time_steps": time_steps, "context": context, "windows": windows, "padding_mode": mode, "seed": 3}
    given |= {"shuffle": True, "sections": steps}
    if mode == "drop":
        lanes = min(lanes, len(lengths) // ranks)
    if not items:
        return
    for rank in range(ranks):
        place = {"rank": rank, "world_size": ranks}
        dataset = StreamDataset.from_map_style(items, groups, lanes, **given)
        expected = list(map(_key_of, itertools.islice(StreamDataLoader(dataset, **place), 8)))
        sampler = LaneBatchSampler(lanes, groups=groups, dataset_length=len(items), **given, **place)
        loader = DataLoader(lane_dataset(items), batch_sampler=sampler, collate_fn=collate_lanes)
        found = list(itertools.islice(loader, 8))
        assert [_key_of(batch) for batch in found] == expected
        if left < len(found):
            resumed = LaneBatchSampler(lanes, groups=groups, dataset_length=len(items), **given, **place)
            resumed.load_state_dict(sampler.state_dict(found[left]))
            if resumed._epochs.coming().epoch == 0:
                loader = DataLoader(lane_dataset(items), batch_sampler=resumed, collate_fn=collate_lanes)
                rest = list(map(_key_of, itertools.islice(loader, 7 - left)))
                assert rest == expected[left + 1 : 8]


def _key_of(batch):
    return batch_key(batch) | {"seed": batch.stream_seed.tolist(), "context": batch.context}


@pytest.mark.parametrize("windows", ["aligned", "packed"])
def test_ranks_have_the_context_of_their_lanes(windows):
    case = Case(
        lengths=[9, 2, 6, 0, 5, 7, 3, 8], lanes=2, time_steps=3, windows=windows, shuffle=True, knows_lengths=True
    )
    alone = StreamDataLoader(case.dataset(context=4, batch_size=4), virtual_ranks=2)
    both = [StreamDataLoader(case.dataset(context=4), rank=rank, world_size=2) for rank in range(2)]
    for whole, *halves in itertools.zip_longest(alone, *map(list, both)):
        joined = [lane for half in halves if half is not None for lane in cells(half)]
        assert joined[: len(cells(whole))] == cells(whole)[: len(joined)]


@pytest.mark.parametrize("workers", [0, 2])
def test_objects_have_context_too(workers):
    def texts(length):
        return ({"text": f"{length}.{i}", "number": i} for i in range(length))

    dataset = StreamDataset([5, 2, 3], texts, 2, time_steps=2, context=2)
    loader = StreamDataLoader(dataset, workers, worker_method="thread")
    found = [list(zip(*batch.data["text"], strict=True)) for batch in loader]
    assert found == [
        [(None, None, "5.0", "5.1"), (None, None, "2.0", "2.1")],
        [("5.0", "5.1", "5.2", "5.3"), (None, None, "3.0", "3.1")],
        [("5.2", "5.3", "5.4", None), ("3.0", "3.1", "3.2", None)],
    ]
    loader = StreamDataLoader(dataset, workers, worker_method="thread")
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    loader.load_state_dict(state)
    assert [list(zip(*batch.data["text"], strict=True)) for batch in loader] == found[1:]


def test_a_collate_fn_is_given_windows_with_context():
    loader = StreamDataLoader(StreamDataset([3, 2], range, 2, time_steps=2, context=1), collate_fn=list)
    assert [[window.tolist() for window in windows] for windows in loader] == [
        [[0, 0, 1], [0, 0, 1]],
        [[1, 2, 0], [0, 0, 0]],
    ]


def test_parts_and_torchs_own_loader_have_context():
    case = Case(lengths=[9, 2, 6, 0, 5], lanes=3, time_steps=3, marks=True)
    expected = list(map(batch_key, StreamDataLoader(case.dataset(context=4))))
    found = list(map(batch_key, regroup(DataLoader(case.dataset(context=4), batch_size=None))))
    assert found == expected
    parts = [batch_key(part) for part in StreamDataLoader(case.dataset(context=4)).parts()]
    assert parts == expected


def test_members_of_side_by_side_share_the_context():
    def member(count, **options):
        return StreamDataset([count, 3], range, 1, time_steps=2, **options)

    loader = side_by_side([(member(5, context=1), 1), (member(4, context=1), 2)])
    found = [(batch.context, batch.data.T.tolist(), batch.reset.tolist()) for batch in loader]
    assert found[0] == (1, [[0, 0, 1], [0, 0, 1], [0, 0, 1]], [True, True, True])
    assert found[1][1] == [[1, 2, 3], [1, 2, 3], [1, 2, 0]]
    with pytest.raises(ValueError, match=r"members\[0\] has context=1, and members\[1\] context=0"):
        side_by_side([(member(5, context=1), 1), (member(4), 1)])


def test_interleaved_datasets_agree_on_the_context():
    datasets = [StreamDataset([5], range, 1, time_steps=2, context=context) for context in (1, 1, 2)]
    assert interleave(datasets[:2]).context == 1
    with pytest.raises(ValueError, match=r"datasets\[0\] has context=1 and datasets\[2\] has context=2"):
        interleave(datasets)
    assert interleave(datasets, context=3).context == 3


@pytest.mark.parametrize("make", [lambda: RecurrentState(batch_dim=1), lambda: LaneCache(2), LaneMemory])
def test_carried_states_say_that_they_have_seen_the_context(make):
    carry = make()
    (batch,) = itertools.islice(StreamDataLoader(StreamDataset([5], range, 1, time_steps=2, context=1)), 1)
    with pytest.raises(ValueError, match=r"begins with 1 time steps of context.*batch\.without_context\(\)"):
        list(carry.steps(batch)) if isinstance(carry, LaneMemory) else carry.before(batch)


def test_states_are_carried_over_batches_without_context():
    given = {"batch_size": 2, "time_steps": 2, "seed": 0, "shuffle": True}
    sums = []
    for context in (0, 3):
        carry, found = RecurrentState(batch_dim=0), []
        for batch in StreamDataLoader(StreamDataset([5, 2, 7, 3], range, context=context, **given)):
            own = batch.without_context()
            assert own.without_context() is own
            assert own is batch.without_context()
            state = carry.before(own)
            state = torch.zeros(2, 1) if state is None else state
            carry.after(own, state + own.data.sum(0)[:, None])
            found.append((state.tolist(), own.data.tolist(), own.mask.tolist(), own.reset.tolist()))
        sums.append(found)
    assert sums[0] == sums[1]


def test_an_audit_does_not_take_context_for_repeats():
    given = {"time_steps": 2, "context": 3, "shuffle": True, "seed": 0}
    lengths = list(range(2, 12))
    assert not audit(StreamDataLoader(StreamDataset(lengths, range, 2, **given))).wrong
    assert not audit(LaneBatchSampler(2, lengths=lengths, **given)).wrong


def test_what_a_batch_says_of_itself_does_not_count_context_as_padding():
    *_, batch = StreamDataLoader(StreamDataset([6], range, 1, time_steps=3, context=2))
    assert "time_steps=5" in repr(batch)
    assert "padding=0%" in repr(batch)
    assert batch.host.without_context().mask.tolist() == [[True]] * 3


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_that_the_user_changes_does_not_change_the_context_of_the_next(workers):
    dataset = StreamDataset([9, 7], lambda n: map(float, range(1, n + 1)), 2, time_steps=3, context=2)
    for batch in StreamDataLoader(dataset, workers):
        assert torch.equal(batch.data, (batch.position + 1) * (batch.position >= 0))
        batch.data.zero_()


def test_a_length_counts_no_context():
    dataset = StreamDataset([5, 2, 7], range, 2, time_steps=2, context=3, lengths=[5, 2, 7])
    loader = StreamDataLoader(dataset)
    assert len(loader) == len(list(loader))
    assert loader.stats().items == 14


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": -1, "time_steps": 2}, "context is -1, and must be at least 0"),
        ({"context": 2, "windows": "given"}, "context is 2, and time_steps is None, so streams cut their own windows"),
        ({"context": 2, "time_steps": 2, "deterministic": False}, "live streams, which cannot go back"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        StreamDataset([5], range, 1, **options)
