"""Random numbers are new each time that a source is read, also on the device, and the same in all of its steps."""

import itertools
from collections import defaultdict

import numpy as np
import pytest
from kinds_of_loaders import KINDS, endless, mixed

from stream_dataloader import Sections, StreamDataLoader, StreamDataset, get_stream_info
from stream_dataloader.testing import check_resume


def batches_of(kind, **way):
    loader = KINDS[kind](**way)
    return itertools.islice(itertools.chain.from_iterable(loader for _ in range(20 if "n batches" in kind else 2)), 60)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "sampler" not in kind])
def test_each_reading_of_a_source_has_a_seed_of_its_own(kind):
    seeds, latest = defaultdict(list), {}
    for batch in batches_of(kind):
        for t, lane in (batch.source_index >= 0).nonzero().tolist():
            member = 0 if batch.member is None else int(batch.member[lane])
            item, seed = (
                (member, int(batch.source_index[t, lane]), int(batch.position[t, lane])),
                int(batch.stream_seed[t, lane]),
            )
            if not batch.is_first[t, lane]:
                assert seed == latest[lane], f"{item} has another seed than the item before it"
            latest[lane] = seed
            if batch.mask[t, lane]:
                assert seed not in seeds[item], f"{item} has the seed of reading {seeds[item].index(seed)} again"
                seeds[item].append(seed)
        assert (batch.stream_seed[batch.source_index < 0] == 0).all()
    assert max(map(len, seeds.values())) > 1
    sources = defaultdict(set)
    for (member, source, _), found in seeds.items():
        sources[member, source].update(found)
    for one, other in itertools.combinations(sources, 2):
        assert one[0] != other[0] or not sources[one] & sources[other], f"{one} and {other} share a seed"


def test_seeds_are_the_same_after_a_resume():
    def check(make, limit=None):
        check_resume(lambda workers: StreamDataLoader(make(), workers, worker_method="thread"), epochs=1, limit=limit)

    check(lambda: endless([2, 3, 1, 4]), limit=7)
    check(lambda: mixed("repeat"))


def test_seeds_differ_between_datasets_and_are_those_of_all_versions():
    def first(seed):
        return int(
            next(iter(StreamDataLoader(StreamDataset([3], range, 1, time_steps=3, seed=seed)))).stream_seed[0, 0]
        )

    assert len({first(seed) for seed in (0, 1, 2**40, 2**63 - 1)}) == 4
    assert first(0) == -9115381286931587490


def open_drawing(length, start=0):
    info = get_stream_info()
    crop = info.rng_for("crop").integers(1 << 30)
    for position in range(start, length):
        drawn = [info.rng_for(purpose, position) for purpose in ("crop", "jitter")] + [info.rng_at(position)]
        yield np.array([crop, *(rng.integers(1 << 30) for rng in drawn), position])


def test_draws_for_several_purposes_are_independent():
    def drawn(workers, **options):
        dataset = StreamDataset([5, 7, 6, 9], open_drawing, 2, "cycle", time_steps=3, seed=0, **options)
        batches = itertools.islice(StreamDataLoader(dataset, workers), 20)
        cells = [(batch.data[t, b], batch.stream_seed[t, b]) for batch in batches for t, b in batch.mask.nonzero()]
        return {(int(seed), int(item[-1])): tuple(item[:-1].tolist()) for item, seed in cells}

    whole = drawn(0)
    numbers = [number for crop, *others in whole.values() for number in others]
    crops = {(seed, crop) for (seed, _), (crop, *_) in whole.items()}
    assert len(crops) == len({seed for seed, _ in whole}) == len({crop for _, crop in crops})  # one a reading
    assert len({*numbers, *(crop for _, crop in crops)}) == len(numbers) + len(crops)  # no two are the same
    assert drawn(2) == whole
    cut = drawn(0, sections=Sections(4, jitter=True, lengths=[5, 7, 6, 9]))
    shared = cut.keys() & whole.keys()
    assert len(shared) > 20
    assert {item: cut[item] for item in shared if cut[item] != whole[item]} == {}, "read otherwise when cut"


def test_a_purpose_is_a_name():
    def open_wrong(purpose, *, position=None):
        get_stream_info().rng_for(*purpose)
        yield 0

    for purpose, text in [((3,), "purpose must be a string"), (("crop", -1), "position must be 0 or more")]:
        with pytest.raises(Exception, match=text):
            next(iter(StreamDataLoader(StreamDataset([purpose], open_wrong, 1, time_steps=1))))
