"""`StreamDataset.from_map_style`: groups of indices of a map-style dataset are streams."""

import itertools
import json
import pickle

import numpy as np
import pytest
import torch
from cases import cases
from helpers import START_METHODS, random_cases
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

from stream_dataloader import Sections, StateError, StreamDataLoader, StreamDataset
from stream_dataloader._engine.map_style.given_groups import groups_of
from stream_dataloader._engine.map_style.index_groups import IndexGroups
from stream_dataloader.errors import ReadError
from stream_dataloader.testing import check_resume
from stream_dataloader.testing.resume import batch_key


class Numbers(Dataset):
    """Item i is [i]; `broken` raise."""

    def __init__(self, count, broken=()):
        self.count, self.broken = count, broken

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        assert type(index) is int
        if index in self.broken:
            raise OSError(f"item {index} is gone")
        return torch.tensor([index])


class ManyNumbers(Numbers):
    """The same, several by one call; notes the calls."""

    def __init__(self, count, broken=()):
        super().__init__(count, broken)
        self.calls = []

    def __getitems__(self, indices):
        self.calls.append(indices)
        return [self[index] for index in indices]


def rows(loader):
    return [batch.data[..., 0].T.tolist() for batch in loader]


def of_groups(numbers, groups, lanes=1, time_steps=2, **options):
    return StreamDataset.from_map_style(numbers, groups, lanes, **({"time_steps": time_steps, "seed": 0} | options))


IDS = [4, 4, 4, 9, 9, 2]
SAME = [
    IDS,
    tuple(IDS),
    np.array(IDS),
    torch.tensor(IDS),
    ["d", "d", "d", "a", "a", "c"],
    ["d", "d", "d", 1, 1, (2, "x")],
    [range(3), range(3, 5), range(5, 6)],
    [[0, 1, 2], [3, 4], [5]],
    [torch.arange(3), np.array([3, 4]), (5,)],
    iter([range(3), range(3, 5), range(5, 6)]),
]


@pytest.mark.parametrize("groups", SAME, ids=[str(number) for number in range(len(SAME))])
def test_groups_are_the_same_however_they_are_given(groups):
    class Own(StreamDataset):
        pass

    dataset = Own.from_map_style(Numbers(6), groups, 1, time_steps=2, seed=0, fill_value=-1)
    expected = of_groups(Numbers(6), IDS)
    assert type(dataset) is Own
    assert rows(StreamDataLoader(dataset)) == [[[0, 1]], [[2, -1]], [[3, 4]], [[5, -1]]]
    assert dataset.fingerprint == expected.fingerprint
    assert list(dataset.sources) == list(expected.sources)


ORDERS = [[5, 4, 3, 2, 1, 0], lambda i: -i, np.arange(5.0, -1, -1), list("fedcba"), [(9 - i,) for i in range(6)]]


@pytest.mark.parametrize("order", ORDERS)
def test_scattered_ids_are_put_together_in_the_order_of_keys(order):
    dataset = of_groups(Numbers(6), ["x", "y", "x", "z", "y", "x"], order=order)
    assert [list(source) for source in dataset.sources] == [[5, 2, 0], [4, 1], [3]]


def test_lists_may_leave_out_and_repeat_where_that_is_asked_for():
    options = {"fill_value": -1, "allow_partial": True, "allow_repeats": True}
    dataset = of_groups(Numbers(5), [[3, 1, 3], [], [0, 1]], time_steps=3, **options)
    assert rows(StreamDataLoader(dataset)) == [[[3, 1, 3]], [[0, 1, -1]]]


WRONG = [
    ([0, 0, 1], None, ValueError, "groups has 3 ids, and the dataset 6 items"),
    ([3, 3], None, ValueError, "they add up to 6: if they are the lengths of consecutive groups"),
    ([0, 1, 0, 1, 1, 1], None, ValueError, r"id 0 at index 0, and, with other ids between, again at index 2.*order="),
    ([0, 0, 0, None, 1, 1], None, ValueError, r"groups\[3\] is None"),
    ([range(5)], None, ValueError, r"no group has index 5.*allow_partial=True"),
    ([range(4), range(3, 6)], None, ValueError, r"index 3 is in groups\[0\] and \[1\].*allow_repeats=True"),
    ([[0, 1, 2, 1], [3, 4, 5]], None, ValueError, r"index 1 is twice in groups\[0\].*allow_repeats=True"),
    ([[0, 1], [2, -1]], None, ValueError, r"groups\[1\]\[1\] is -1"),
    ([[0, 1], [2, 6]], None, ValueError, r"groups\[1\]\[1\] is 6"),
    ([range(3), 4], None, TypeError, r"groups\[1\] is 4"),
    ([0, [1]] * 3, None, TypeError, r"groups\[1\] is \[1\]"),
    ([["a"]], None, TypeError, r"groups\[0\] is \['a'\]"),
    ([], None, ValueError, "groups is empty"),
    ("abc", None, TypeError, "groups is 'abc'"),
    (3, None, TypeError, "groups is 3"),
    ([0, 1] * 3, [1, 2], ValueError, "order has 2 sort keys, and there are 6 indices"),
    ([0, 1] * 3, [1, 2, float("nan"), 4, 5, 6], ValueError, r"order\[2\]"),
    ([0, 1] * 3, [1, "a", None, 4, 5, 6], TypeError, "cannot be compared"),
    ([0, 1] * 3, 5, TypeError, "order is 5"),
    ([range(6)], list(range(6)), ValueError, "groups are lists of indices; sort those"),
]


@pytest.mark.parametrize(("groups", "order", "kind", "text"), WRONG)
def test_groups_that_do_not_fit_are_refused(groups, order, kind, text):
    with pytest.raises(kind, match=text):
        of_groups(Numbers(6), groups, order=order)


@pytest.mark.parametrize(
    ("dataset", "text"), [(StreamDataset([0], range, 1), "by index"), (Dataset(), "__len__"), (5, "a int")]
)
def test_what_is_no_map_style_dataset_is_refused(dataset, text):
    with pytest.raises(TypeError, match=text):
        of_groups(dataset, [0])
    with pytest.raises(TypeError, match="leave lengths= out"):
        of_groups(Numbers(1), [0], lengths=[1])


@pytest.mark.parametrize("windows", ["aligned", "packed"])
def test_a_windows_items_come_by_one_call(windows):
    numbers = ManyNumbers(40)
    batches = list(StreamDataLoader(of_groups(numbers, [range(17), range(17, 40)], 2, 4, windows=windows)))
    assert sorted(itertools.chain(*numbers.calls)) == list(range(40))
    assert len(numbers.calls) <= 2 * len(batches)
    if windows == "aligned":
        assert sorted(numbers.calls)[:3] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


@random_cases(400, 30)
@given(
    cases(max_streams=12, max_length=7, max_lanes=4, modes=("zeros", "data")),
    st.sampled_from([None, "balanced", "longest_first"]),
    st.sampled_from([Numbers, ManyNumbers]),
)
def test_all_options_are_as_for_sources(case, schedule, kind):
    ends = list(itertools.accumulate(case.lengths))
    groups = [range(end - length, end) for length, end in zip(case.lengths, ends, strict=True)]
    names = ("time_steps", "padding_mode", "windows", "shuffle", "lookahead", "seed", "mark_ends")
    case.shuffle |= schedule == "balanced"
    options = {name: getattr(case, name) for name in names} | {"schedule": schedule}
    ours = StreamDataLoader(StreamDataset.from_map_style(kind(ends[-1]), groups, case.lanes, **options))
    plain = StreamDataLoader(StreamDataset(groups, open_numbers, case.lanes, lengths=case.lengths, **options))
    assert len(ours) == len(plain)
    assert [batch_key(batch) for batch in ours] == [batch_key(batch) for batch in plain]


def open_numbers(group):
    for index in group:
        yield torch.tensor([index])


class Pickled(ManyNumbers):
    """Counts how often it is pickled."""

    pickled = 0

    def __reduce__(self):
        Pickled.pickled += 1
        return Pickled, (self.count,)


@pytest.mark.parametrize("method", START_METHODS)
def test_workers_of_any_start_method_read_the_same(method):
    groups = [[3, 1, 2], [0, 4], [9, 8, 7, 6, 5]]
    Pickled.pickled = 0
    loader = StreamDataLoader(of_groups(Pickled(10), groups, 2), 2, multiprocessing_context=method)
    expected = StreamDataLoader(of_groups(ManyNumbers(10), groups, 2))
    assert [batch_key(batch) for batch in loader] == [batch_key(batch) for batch in expected]
    assert Pickled.pickled == (0 if method == "fork" else 2), "once for each worker"


def test_resume_reads_nothing_again():
    numbers = ManyNumbers(50)
    loader = StreamDataLoader(of_groups(numbers, [range(30), range(30, 50)], 2, 3))
    list(itertools.islice(loader, 4))
    state = json.loads(json.dumps(loader.state_dict()))
    numbers.calls.clear()
    loader.load_state_dict(state)
    assert next(iter(loader)).data[..., 0].T.tolist() == [[12, 13, 14], [42, 43, 44]]
    assert sorted(numbers.calls)[0][0] == 12
    assert min(itertools.chain(*(call for call in numbers.calls if call[0] >= 30))) == 42


@pytest.mark.parametrize("named", [None, "mine"])
def test_a_dataset_whose_length_changed_does_not_take_the_state(named):
    def loader(count):
        return StreamDataLoader(of_groups(Numbers(count), [range(4), range(4, count)], 2, fingerprint=named))

    before = loader(9)
    next(iter(before))
    with pytest.raises(StateError, match=r"9 indices in 2 groups, of a dataset of 9 items.*10 indices in 2 groups"):
        loader(10).load_state_dict(before.state_dict())


@pytest.mark.parametrize("kind", [Numbers, ManyNumbers])
@pytest.mark.parametrize("broken", [0, 4, 5, 6, 9])
def test_an_error_comes_at_its_own_item(kind, broken):
    with pytest.raises(ReadError) as caught:
        list(StreamDataLoader(of_groups(kind(10, [broken]), [range(10)], 1, 4)))
    assert caught.value.position == broken
    assert isinstance(caught.value.__cause__, OSError)
    skipping = of_groups(kind(10, [broken]), [range(10)], 1, 4, on_error="skip", fill_value=-1)
    with pytest.warns(RuntimeWarning, match="skipped the rest"):
        read = rows(StreamDataLoader(skipping))
    assert [item for batch in read for item in batch[0] if item >= 0] == list(range(broken))


class Few(ManyNumbers):
    def __getitems__(self, indices):
        return super().__getitems__(indices)[1:]


class Stops(Numbers):
    def __getitem__(self, index):
        if index == 5:
            raise StopIteration
        return super().__getitem__(index)


@pytest.mark.parametrize("numbers", [Few(8), Stops(8)])
def test_too_few_items_and_a_stop_are_errors(numbers):
    with pytest.raises(ReadError):
        list(StreamDataLoader(of_groups(numbers, [range(8)], 1, 4)))


def test_an_item_may_be_a_given_window():
    items = [torch.arange(3) + 10 * i for i in range(4)]
    dataset = StreamDataset.from_map_style(items, [0, 0, 1, 1], 2, windows="given")
    assert [batch.data.T.tolist() for batch in StreamDataLoader(dataset)] == [
        [[0, 1, 2], [20, 21, 22]],
        [[10, 11, 12], [30, 31, 32]],
    ]


def test_ends_are_marked_without_an_item_more():
    numbers = ManyNumbers(9)
    loader = StreamDataLoader(of_groups(numbers, [range(4), range(4, 9)], 2, mark_ends=True))
    ends = [batch.is_last.T.tolist() for batch in loader]
    assert ends == [[[False] * 2] * 2, [[False, True], [False, False]], [[False] * 2, [True, False]]]
    assert sorted(itertools.chain(*numbers.calls)) == list(range(9))


@pytest.mark.parametrize(
    ("groups", "windows"),
    [([range(11), range(11, 13), range(13, 40)], "packed"), ([range(0, 40, 2), range(1, 40, 2)], "aligned")],
)
def test_groups_are_cut_into_sections_and_no_item_is_fetched_twice(groups, windows):
    numbers = ManyNumbers(40)
    dataset = of_groups(numbers, list(map(list, groups)), 2, 4, sections=Sections(5, jitter=True), windows=windows)
    loader = StreamDataLoader(dataset)
    for _ in range(2):
        count, numbers.calls = len(loader), []
        batches = list(loader)
        assert len(batches) == count
        read = sorted(int(value) for batch in batches for value in batch.data[batch.mask])
        assert read == sorted(itertools.chain(*numbers.calls)) == list(range(40))
    check_resume(lambda workers: StreamDataLoader(dataset, workers), num_workers=(0,))


def test_a_million_groups_are_a_few_arrays():
    count = 1_000_000
    ids = np.arange(2 * count) // 2
    dataset = StreamDataset.from_map_style(Numbers(2 * count), ids, 2, time_steps=2, shuffle=True)
    assert len(pickle.dumps(dataset.sources)) < 17 * count
    assert dataset.sources[count - 1] == range(2 * count - 2, 2 * count)
    again = pickle.loads(pickle.dumps(dataset.sources))
    assert again.fingerprint == dataset.fingerprint
    assert len(next(iter(StreamDataLoader(dataset))).data) == 2


def test_groups_are_those_that_were_given():
    assert groups_of([range(0, 6, 2)], 6, allow_partial=True)[0].tolist() == [0, 2, 4]
    assert list(map(list, groups_of([1, 1, "1", "1"], 4))) == [[0, 1], [2, 3]], "a number is no text"
    even, odd = groups_of([i % 2 for i in range(200)], 200, order=lambda _: 0)  # equal keys, in many indices
    assert (even.tolist(), odd.tolist()) == ([*range(0, 200, 2)], [*range(1, 200, 2)])
    far = [2**31 + 5, 3]  # beyond 32 bits
    assert IndexGroups([2], np.array(far), None)[0].tolist() == far
    with pytest.raises(ValueError, match="read-only"):
        even[0] = 1
    indices = np.array([5, 0, 3, 1, 4, 2])
    assert IndexGroups([2, 4], indices, 6).fingerprint != IndexGroups([4, 2], indices, 6).fingerprint
