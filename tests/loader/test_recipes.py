"""What pages show in place of an option: it resumes exactly, and is the same for any number of workers."""

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
    flips = [[] for _ in range(2)]  # of each lane: of each stream
    for batch in loader(flipped, **options):
        for lane, t in batch.mask.T.nonzero().tolist():
            flips[lane] += [set()] * batch.is_start[t, lane]
            flips[lane][-1].add(int(batch.data[t, lane, 2]))
    drawn = flips[0] + flips[1]
    assert {len(flip) for flip in drawn} == {1}
    assert set.union(*drawn) == {0, 1}
    assert len(drawn) > 6 if cut else len(drawn) == 6
