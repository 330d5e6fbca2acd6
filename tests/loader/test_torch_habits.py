"""What a user of torch's own `DataLoader` types first, and what comes of it."""

import copy
import warnings

import pytest
from torch.utils.data import DataLoader, Subset, random_split

from stream_dataloader import StreamDataLoader, StreamDataset


def dataset(**options):
    return StreamDataset([3, 4, 5], range, 2, time_steps=2, seed=0, **options)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"batch_size": 4, "shuffle": True}, r"batch_size is the dataset's: .*shuffle is the dataset's"),
        ({"time_steps": 2, "seed": 3}, r"StreamDataset\(..., time_steps=...\).*StreamDataset\(..., seed=...\)"),
        ({"drop_last": True}, 'padding_mode="drop"'),
        ({"sampler": None}, "shuffle, schedule and seed"),
        ({"batch_sampler": [[1]]}, "LaneBatchSampler"),
        ({"generator": None}, "seed="),
        ({"in_order": False}, "deterministic=False"),
        ({"pin_memory_device": "cuda"}, "device="),
        ({"colour": 3}, "no option colour"),
    ],
)
def test_options_of_torch_are_told_where_they_belong(given, says):
    with pytest.raises(TypeError, match=says):
        StreamDataLoader(dataset(), **given)


SPLITS = [
    lambda one: random_split(one, [0.5, 0.5]),
    lambda one: random_split(one, [2, 1]),
    lambda one: Subset(one, [0, 1])[0],
    lambda one: list(DataLoader(Subset(one, [0, 1]))),
    lambda one: StreamDataLoader(Subset(one, [0, 1])),
    lambda one: one + one,
    lambda one: one[0],
    len,
]


@pytest.mark.parametrize("split", SPLITS)
def test_a_split_by_index_says_what_to_build(split):
    with pytest.raises(TypeError, match=r"split the list of sources.*interleave|StreamDataset\(sources, "):
        split(dataset())


def test_a_dataset_without_a_length_is_true_and_can_be_listed():
    one = dataset()
    assert one
    assert len(list(one)) == len(list(DataLoader(copy.deepcopy(one), batch_size=None))) > 0


@pytest.mark.parametrize(
    ("sources", "mode", "told"), [(3, "zeros", 1), (4, "zeros", 0), (2, "data", 1), (2, "cycle", 0)]
)
def test_lanes_that_never_have_a_source_are_told(sources, mode, told):
    few = StreamDataset(range(5, 5 + sources), range, 8, mode, time_steps=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        StreamDataLoader(few)
    assert [f"sources for {sources} of these lanes" in str(one.message) for one in caught] == [True] * told
    assert all(one.filename == __file__ for one in caught)
