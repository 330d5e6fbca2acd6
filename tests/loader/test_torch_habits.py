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


@pytest.mark.parametrize(
    "split",
    [
        lambda one: random_split(one, [0.5, 0.5]),
        lambda one: random_split(one, [2, 1]),
        lambda one: Subset(one, [0, 1])[0],
        lambda one: list(DataLoader(Subset(one, [0, 1]))),
        lambda one: one + one,
        lambda one: one[0],
        len,
    ],
)
def test_a_split_by_index_says_what_to_split(split):
    with pytest.raises(TypeError, match=r"Split the list of sources.*interleave"):
        split(dataset())


def test_a_loader_of_a_subset_says_what_to_build():
    with pytest.raises(TypeError, match="StreamDataset"):
        StreamDataLoader(Subset(dataset(), [0, 1]))


def test_a_dataset_without_a_length_is_true_and_can_be_listed():
    one = dataset()
    assert one
    assert len(list(one)) == len(list(DataLoader(copy.deepcopy(one), batch_size=None))) > 0


@pytest.mark.parametrize(
    ("sources", "options", "told"),
    [
        (2, {}, True),
        (3, {}, True),
        (4, {}, False),
        (2, {"padding_mode": "data"}, True),
        (2, {"padding_mode": "cycle"}, False),
    ],
)
def test_lanes_that_never_have_a_source_are_told(sources, options, told):
    few = StreamDataset(range(5, 5 + sources), range, 8, time_steps=2, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        StreamDataLoader(few)
    assert [f"sources for {sources} of these lanes" in str(one.message) for one in caught] == [True] * told
    assert all(one.filename == __file__ for one in caught)
