"""Timelines are what a loader reads, whether it has read it or not."""

import io

import numpy as np
import pytest
from helpers import random_cases
from hypothesis import given
from hypothesis import strategies as st

from stream_dataloader import StreamDataLoader, StreamDataset, interleave, sections, visualize

LENGTHS = [7, 0, 12, 3, 5, 21, 1, 9]


def dataset_of(steps=LENGTHS, lanes=3, time_steps=4, **options):
    return StreamDataset(range(len(steps)), lambda i: range(steps[i]), lanes, time_steps=time_steps, **options)


def cells(batches):
    """What batches hold: (lane, time step) -> (source, position, starts, fresh)."""
    found = {}
    for step, batch in enumerate(batches):
        for t, lane in np.argwhere(batch.source.numpy() >= 0).tolist():
            found[lane, step * len(batch.source) + t] = (
                batch.source[t, lane].item(),
                batch.position[t, lane].item(),
                batch.is_start[t, lane].item(),
            )
    return found


def cells_of(timeline):
    return {
        (found.lane, at): (
            found.source,
            found.position + at - found.begin,
            found.starts and at == found.begin,
        )
        for found in timeline.segments
        for at in range(found.begin, found.stop)
    }


@random_cases(200, 12)
@given(
    lengths=st.lists(st.integers(0, 20), min_size=3, max_size=12),
    windows=st.sampled_from(["aligned", "packed"]),
    mode=st.sampled_from(["zeros", "data", "drop"]),
    schedule=st.sampled_from(["listed", "longest_first", "balanced"]),
    lookahead=st.integers(0, 2),
    time_steps=st.integers(1, 6),
)
def test_of_lengths_alone_it_is_what_a_loader_reads(lengths, windows, mode, schedule, lookahead, time_steps):
    dataset = dataset_of(
        lengths,
        3,
        time_steps,
        windows=windows,
        padding_mode=mode,
        schedule=schedule,
        lookahead=lookahead,
        shuffle=schedule == "listed",
        seed=3,
        lengths=lengths,
    )
    batches = list(StreamDataLoader(dataset))
    timeline = visualize.timeline(dataset)
    assert cells_of(timeline) == cells(batches)
    assert timeline.steps == len(batches)
    assert cells_of(visualize.timeline(batches)) == cells(batches)


def test_nothing_is_opened_for_lengths():
    def refuse(source):
        raise AssertionError(source)

    dataset = StreamDataset(["a", "b"], refuse, 2, time_steps=4, lengths=[3, 9])
    assert visualize.timeline(StreamDataLoader(dataset, 2)).workers == (range(1), range(1, 2))


def test_sections_mixes_and_endless_epochs_are_drawn_too():
    cut = dataset_of([30, 20], 2, 4, sections=sections([30, 20], 8), seed=1, lengths=None)
    assert cells_of(visualize.timeline(cut)) == cells(StreamDataLoader(cut))
    mixed = interleave(
        [dataset_of([9, 9], lengths=[9, 9]), dataset_of([5, 5, 5], lengths=[5, 5, 5])], weights=[1, 2], seed=0
    )
    assert cells_of(visualize.timeline(mixed)) == cells(StreamDataLoader(mixed))
    endless = dataset_of(padding_mode="cycle", lengths=LENGTHS)
    with pytest.raises(ValueError, match="give steps="):
        visualize.timeline(endless)
    assert visualize.timeline(endless, steps=20).steps == 20


def test_text_fits_and_shows_workers_and_resets():
    timeline = visualize.timeline(dataset_of(lengths=LENGTHS), num_workers=2)
    for width in (40, 57, 200):
        lines = timeline.text(width).splitlines()
        assert max(map(len, lines[1:])) <= width
        assert [line.split()[:2] for line in lines[2:5]] == [["worker", "0"], ["lane", "1"], ["worker", "1"]]
        assert lines[5].startswith("padding would be ")
    assert sum(character.isupper() for line in lines[:5] for character in line) == timeline.streams


@pytest.fixture(scope="module")
def fonts():
    """matplotlib keeps the files of its fonts open once it has drawn something."""
    visualize.Timeline((), 1, 1, 1, (range(1),)).save(io.BytesIO())


@pytest.mark.parametrize(("theme", "lanes"), [("light", 8), ("dark", 128)])
def test_a_picture_is_written(tmp_path, theme, lanes, fonts):
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 60, 3 * lanes).tolist()
    timeline = visualize.timeline(dataset_of(lengths, lanes, 8, lengths=lengths), num_workers=4)
    timeline.save(tmp_path / "a.png", theme=theme)
    timeline.save(tmp_path / "a.svg", theme=theme)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (tmp_path / "a.svg").read_bytes()


def test_what_is_no_loader_is_refused():
    with pytest.raises(TypeError):
        visualize.timeline(3)
