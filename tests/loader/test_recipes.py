"""What pages show in place of an option: it resumes exactly, and is the same for any number of workers."""

import itertools

import numpy as np
import pytest

from stream_dataloader import StreamDataLoader, StreamDataset, get_stream_info, sections
from stream_dataloader.testing import check_resume

LENGTH = 12


def flipped(source, start=0):
    flip = get_stream_info().rng.random() < 0.5
    for t in range(start, LENGTH):
        yield np.array([source, t, flip])


def loader(factory, num_workers=0, **options):
    dataset = StreamDataset(range(6), factory, 2, time_steps=5, shuffle=True, seed=3, **options)
    return StreamDataLoader(dataset, num_workers)


@pytest.mark.parametrize("cut", [False, True])
def test_one_draw_holds_for_a_whole_stream_and_in_a_section_also_after_a_resume(cut):
    options = {"sections": sections([LENGTH] * 6, 5)} if cut else {}
    check_resume(lambda workers: loader(flipped, workers, **options), num_workers=(0,))
    flips = {}
    for batch in itertools.chain.from_iterable([loader(flipped, **options)]):
        for lane, t in batch.mask.T.nonzero().tolist():
            if batch.is_start[t, lane]:
                stream = (lane, batch.step, t)
                flips[stream] = []
            else:
                stream = max(key for key in flips if key[0] == lane)
            flips[stream].append(int(batch.data[t, lane, 2]))
    assert all(len(set(drawn)) == 1 for drawn in flips.values())
    assert {drawn[0] for drawn in flips.values()} == {0, 1}
    assert len(flips) > 6 if cut else len(flips) == 6
