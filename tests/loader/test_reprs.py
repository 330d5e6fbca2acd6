"""A dataset, a loader or a sampler shows what it was made of, and a batch which cells are padding."""

import copy

import pytest

from stream_dataloader import LaneBatchSampler, StreamDataLoader, StreamDataset, interleave, side_by_side
from stream_dataloader.streams import ArrayStream


def words(count, **options):
    return StreamDataset([3] * count, range, 2, **({"time_steps": 4, "seed": 7} | options))


class Own(StreamDataset):
    pass


REPRS = [
    (words(3), "StreamDataset(3 sources, range, batch_size=2, time_steps=4, seed=7)"),
    (
        Own([3] * 1200, ArrayStream(), 2, "cycle", time_steps=4, windows="packed", shuffle=True, seed=7),
        "Own(1,200 sources, ArrayStream, batch_size=2, time_steps=4, padding_mode='cycle', windows='packed', "
        "shuffle=True, seed=7)",
    ),
    (
        words(3, lengths=[3] * 3, sections=2, schedule="longest_first", deterministic=False),
        "StreamDataset(3 sources, range, batch_size=2, time_steps=4, schedule='longest_first', deterministic=False, "
        "seed=7, sections=2)",
    ),
    (
        words(2, time_steps=None, windows="given"),
        "StreamDataset(2 sources, range, batch_size=2, windows='given', seed=7)",
    ),
    (
        interleave([words(3), words(1)]),
        "StreamDataset(4 sources of 2 datasets, batch_size=2, time_steps=4, seed=7)",
    ),
    (
        StreamDataLoader(words(3), 2, device="cpu"),
        "StreamDataLoader(StreamDataset(3 sources, range, batch_size=2, time_steps=4, seed=7), num_workers=2, "
        "device=device(type='cpu'))",
    ),
    (
        StreamDataLoader(words(3), collate_fn=list),
        "StreamDataLoader(StreamDataset(3 sources, range, batch_size=2, time_steps=4, seed=7), num_workers=0, "
        "collate_fn=<class 'list'>)",
    ),
    (
        side_by_side([(words(2), 1), (words(1), 2)]),
        "JointLoader(SideBySide(StreamDataset(2 sources, range, batch_size=1, time_steps=4, seed=7), "
        "StreamDataset(1 sources, range, batch_size=2, time_steps=4, seed=7), ends_with='first'), num_workers=0)",
    ),
    (
        LaneBatchSampler(2, lengths=[3, 1], seed=7),
        "LaneBatchSampler(2 groups, batch_size=2, time_steps=1, seed=7)",
    ),
]


@pytest.mark.parametrize(("shown", "text"), REPRS, ids=[text[:30] for _, text in REPRS])
def test_what_is_built_shows_its_options(shown, text):
    assert repr(shown) == repr(copy.deepcopy(shown)) == text


@pytest.mark.parametrize("workers", [0, 1])
def test_padding_is_what_holds_no_item_also_where_items_are_read_again(workers):
    dataset = StreamDataset([5, 1, 2], range, 2, "data", time_steps=2, seed=0)
    batches = list(StreamDataLoader(dataset, workers))
    assert any((~batch.mask & ~batch.is_padding).any() for batch in batches)
    for batch in batches:
        assert batch.is_padding.equal(batch.source_index < 0)
        assert batch.is_padding.equal(batch.position < 0)
        assert batch.to("meta").host.is_padding.equal(batch.is_padding)
        assert batch.map(lambda leaf: leaf).is_padding.equal(batch.is_padding)
