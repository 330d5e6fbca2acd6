"""Timelines are what a loader reads, whether it has read it or not."""

import itertools

import numpy as np
import pytest
from cases import cases as random_case
from helpers import random_cases
from hypothesis import given
from hypothesis import strategies as st

from stream_dataloader import Sections, StreamDataLoader, StreamDataset, interleave, visualize
from stream_dataloader.visualize import picture

LENGTHS = [7, 0, 12, 3, 5, 21, 1, 9]


def dataset_of(steps=LENGTHS, lanes=3, time_steps=4, **options):
    return StreamDataset(range(len(steps)), lambda i: range(steps[i]), lanes, time_steps=time_steps, **options)


def cells(batches):
    """What batches hold: (lane, time step) -> (source, position, starts, fresh)."""
    found = {}
    for step, batch in enumerate(batches):
        for t, lane in np.argwhere(batch.source_index.numpy() >= 0).tolist():
            fields = (batch.source_index, batch.position, batch.is_first, batch.mask)
            found[lane, step * len(batch.source_index) + t] = tuple(field[t, lane].item() for field in fields)
    return found


def cells_of(timeline):
    return {
        (found.lane, at): (
            *(found.source, found.position + at - found.start),
            *(found.starts and at == found.start, found.fresh),
        )
        for found in timeline.segments
        for at in range(found.start, found.stop)
    }


@random_cases(200, 12)
@given(random_case(max_length=20, min_streams=3), st.sampled_from([None, "longest_first", "balanced"]))
def test_of_lengths_alone_it_is_what_a_loader_reads(case, schedule):
    case.shuffle |= schedule == "balanced"
    dataset = case.dataset(lengths=case.lengths, schedule=schedule)
    batches = list(StreamDataLoader(dataset))
    timeline = visualize.timeline(dataset)
    assert cells_of(timeline) == cells(batches)
    assert timeline.batches == len(batches)
    for begin in range(min(3, len(batches))):
        drawn = visualize.timeline(batches[begin:])
        assert cells_of(drawn) == cells(batches[begin:])
        assert drawn.streams == sum(int(batch.is_first.sum()) for batch in batches[begin:])


def test_nothing_is_opened_for_lengths():
    def refuse(source):
        raise AssertionError(source)

    dataset = StreamDataset(["a", "b"], refuse, 2, time_steps=4, lengths=[3, 9])
    assert visualize.timeline(StreamDataLoader(dataset, 2)).workers == (range(1), range(1, 2))


def test_sections_mixes_and_endless_epochs_are_drawn_too():
    cut = dataset_of([30, 20], 2, 4, sections=Sections(8, jitter=True, lengths=[30, 20]), seed=1)
    halves = [dataset_of(lengths, lengths=lengths) for lengths in ([9, 9], [5, 5, 5])]
    for dataset in (cut, interleave(halves, weights=[1, 2], seed=0)):
        assert cells_of(visualize.timeline(dataset)) == cells(StreamDataLoader(dataset))
    endless = dataset_of(
        [30, 20], 2, 4, sections=Sections(8, jitter=True, lengths=[30, 20]), seed=1, padding_mode="cycle"
    )  # cut anew
    drawn = visualize.timeline(endless, batches=20)
    assert cells_of(drawn) == cells(itertools.islice(StreamDataLoader(endless), 20))
    with pytest.raises(ValueError, match="give batches="):
        visualize.timeline(endless)
    with pytest.raises(TypeError):
        visualize.timeline(3)


def test_text_fits_and_shows_workers_and_resets():
    timeline = visualize.timeline(dataset_of(lengths=LENGTHS), num_workers=2)
    for width in (40, 57, 200):
        lines = timeline.text(width).splitlines()
        scale = max(1, -(-timeline.batches * 4 // (width - 22)))
        assert [lines[1].index(str(step)) for step in (0, 1, 2)] == [22 + 4 * step // scale for step in (0, 1, 2)]
        assert max(map(len, lines[1:])) <= width
        assert [line.split()[:2] for line in lines[2:5]] == [["worker", "0"], ["lane", "1"], ["worker", "1"]]
        assert lines[5].startswith("padding would be ")
    assert sum(character.isupper() for line in lines[:5] for character in line) == timeline.streams
    assert timeline.workers == visualize.timeline(list(StreamDataLoader(dataset_of(), 2))).workers


def test_neighbours_of_a_lane_differ_in_colour():
    sources = [0, *([len(picture._COLOURS)] * 2), 1, 1, 1, 0]
    segments = [picture.Segment(0, n, n + 1, source, 0, True, True) for n, source in enumerate(sources)]
    colours = picture._colours(segments)
    assert all(one != other for one, other in itertools.pairwise(colours)), colours


@pytest.mark.parametrize(
    ("theme", "lanes", "kind", "begin"), [("light", 8, "svg", b"<svg"), ("dark", 32, "png", b"\x89PNG")]
)
def test_a_picture_is_written(tmp_path, theme, lanes, kind, begin, fonts):
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 60, 3 * lanes).tolist()
    timeline = visualize.timeline(dataset_of(lengths, lanes, 8, lengths=lengths), num_workers=4)
    timeline.save(tmp_path / f"a.{kind}", theme=theme)
    assert begin in (tmp_path / f"a.{kind}").read_bytes()
