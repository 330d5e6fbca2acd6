"""`loader.skip(n)`: what comes behind the batches that are passed over is as if they had been read."""

import itertools

import pytest
from cases import Case, Counting, cases, keys, pairs
from helpers import random_cases
from hypothesis import given
from hypothesis import strategies as st

from stream_dataloader import Sections, StreamDataLoader, interleave, side_by_side

MODES = ("zeros", "data", "drop", "cycle")
MOST = 30
LENGTHS = [4, 0, 9, 2, 2, 7, 1, 3, 5, 8, 6]
CASE = Case(LENGTHS, lanes=3, time_steps=2, shuffle=True, seed=1)


def check(make, taken, skipped):
    """Read some batches, pass over others, and compare what follows."""
    whole = keys(itertools.islice(make(), MOST))
    taken %= max(len(whole), 1)
    loader = make()
    iterator = iter(loader)
    head = keys(itertools.islice(iterator, taken))
    passed = loader.skip(skipped)
    assert passed == min(skipped, len(whole) - taken)
    if loader.epoch == 0:
        rest = keys(itertools.islice(loader, MOST - taken - passed))
        assert head + whole[taken : taken + passed] + rest == whole
    else:
        assert taken + passed == len(whole)
    return loader


@random_cases(1000, quick=20)
@given(cases(max_streams=12, max_length=7, max_lanes=4, modes=MODES), *[st.integers(0, 9)] * 2, st.booleans())
def test_what_is_passed_over_is_as_if_it_were_read(case, taken, skipped, known):
    case.lengths[0] = max(1, case.lengths[0])
    lengths = {"lengths": case.lengths} if known else {}
    check(lambda: StreamDataLoader(case.dataset(**lengths)), taken, skipped)


def of(**options):
    return CASE.dataset(lengths=LENGTHS, **options)


KINDS = {
    "sections": lambda: StreamDataLoader(of(sections=3)),
    "jitter": lambda: StreamDataLoader(of(sections=Sections(3, jitter=True))),
    "endless with jitter": lambda: StreamDataLoader(of(sections=Sections(3, jitter=True), padding_mode="cycle")),
    "balanced": lambda: StreamDataLoader(of(schedule="balanced")),
    "one of two ranks": lambda: StreamDataLoader(of(), virtual_ranks=2, rank=1, world_size=2),
    "mix": lambda: StreamDataLoader(interleave([of(open_stream=pairs)] * 2, batch_size=3, seed=4)),
    "side by side": lambda: side_by_side([(of(open_stream=pairs), 2)] * 2),
    "workers": lambda: StreamDataLoader(of(), 2, persistent_workers=True),
    "skips": lambda: StreamDataLoader(of(on_error="skip")),
}


@pytest.mark.one_of_each
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("taken", "skipped"), [(0, 4), (2, 3), (3, 0), (1, 20)])
def test_every_kind_of_loader_passes_over_batches(kind, taken, skipped):
    check(KINDS[kind], taken, skipped)


def test_nothing_is_read_of_what_is_passed_over():
    read = []

    def open_stream(source, start=0):
        for item in itertools.islice(Counting()(source), start, None):
            read.append((source[0], item[1]))
            yield item

    loader = StreamDataLoader(of(open_stream=open_stream))
    whole = keys(loader)
    read.clear()
    loader.set_epoch(0)
    assert loader.skip(6) == 6
    assert not read
    assert keys(loader) == whole[6:]
    assert len(read) == len(set(read)) < sum(LENGTHS) - 6 * 3


@pytest.mark.one_of_each
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(("taken", "resumed"), [(0, False), (2, False), (2, True), (5, False)])
def test_an_epoch_of_n_batches_is_passed_over_to_its_end_whether_lengths_are_known_or_not(taken, resumed, known):
    def make():
        dataset = CASE.dataset(padding_mode="cycle", **({"lengths": LENGTHS} if known else {}))
        return StreamDataLoader(dataset, batches_per_epoch=5)

    other, loader = make(), make()
    whole = [keys(other) for _ in range(4)]
    assert keys(itertools.islice(loader, taken)) == whole[0][:taken]
    if resumed:
        saved, loader = loader.state_dict(), make()
        loader.load_state_dict(saved)
    at, left = (1, 5) if taken == 5 else (0, 5 - taken)
    for number, asked in enumerate((left - 2, 7, 7)):  # inside the epoch, and past its end
        passed = (left - 2, 2, 5)[number]
        assert loader.skip(asked) == passed
        assert loader.epoch == (at, at + 1, at + 2)[number]
    assert keys(loader) == whole[at + 2]


def test_a_number_of_batches_is_not_negative():
    with pytest.raises(ValueError, match="batches is -1"):
        StreamDataLoader(of()).skip(-1)
