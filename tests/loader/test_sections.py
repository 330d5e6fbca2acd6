"""Sources read in sections, against the serial model: each section is a stream of its own; items keep their names."""

from dataclasses import dataclass, field

import cases
import numpy as np
import pytest
from cases import cells, check_epoch, keys
from helpers import make_loader, random_cases
from hypothesis import given
from hypothesis import strategies as st

from stream_dataloader import (
    Sections,
    StreamDataLoader,
    StreamDataset,
    errors,
    get_stream_info,
    interleave,
    merge_states,
)
from stream_dataloader._engine.schedule.order import Order
from stream_dataloader._engine.schedule.place import Place
from stream_dataloader.testing import check_resume

# What is read: sources are (index, length). Items tell source, position, and a random draw that depends on both.


def item(source, position, flip=0):
    info = get_stream_info()
    assert info.source_index == source[0]
    return np.array([source[0], position, info.rng_at(position).integers(1 << 20), flip])


def starting(source, *, start=0):
    flip = int(get_stream_info().rng.random() < 0.5)  # one draw for a whole stream, also where it is resumed
    for position in range(start, source[1]):
        yield item(source, position, flip)


starting.open_early = True


def forward(source):
    yield from starting(source)


@dataclass
class Seeking:
    source: tuple
    position: int = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.position >= self.source[1]:
            raise StopIteration
        self.position += 1
        return item(self.source, self.position - 1)

    def seek_item(self, item):
        self.position = item


class Stateful(Seeking):
    """Can only go where it was, and is read forward to a section's start."""

    seek_item = None

    def state_dict(self):
        return {"at": self.position}

    def load_state_dict(self, state):
        self.position = state["at"]


@dataclass
class Writing:
    source: tuple
    start: int = 0

    def __iter__(self):
        while self.start < self.source[1]:
            self.start += 1
            yield item(self.source, self.start - 1)

    def read_into(self, out):
        count = min(len(out), self.source[1] - self.start)
        for row in out[:count]:
            row[:] = item(self.source, self.start)
            self.start += 1
        return count


class Marking(Writing):
    def starts_within(self, start, stop):
        return (n for n in range(start, stop) if cases.is_marked(self.source[0], n))


FACTORIES = {"start": starting, "forward": forward, "seek": Seeking, "state": Stateful, "write": Writing}
FACTORIES["mark"] = Marking


@dataclass
class Case(cases.Case):
    lengths: list = field(default_factory=lambda: [11, 0, 3, 8, 20])
    time_steps: int = 3
    shuffle: bool = True
    jitter: bool = True
    steps: int = 4
    factory: str = "start"

    def dataset(self, **options):
        cut = Sections(self.steps, jitter=self.jitter, lengths=self.lengths)
        return super().dataset(**({"open_stream": FACTORIES[self.factory], "sections": cut} | options))


def cut_cases():
    def build(case, **rest):
        case.lanes = 1 if case.padding_mode == "drop" else case.lanes
        case.marks = rest["factory"] == "mark"
        return Case(**{**vars(case), **rest})

    return st.builds(
        build,
        cases.cases(max_streams=8, max_length=25, max_lanes=5, modes=("zeros", "data", "drop", "cycle")),
        steps=st.integers(1, 9),
        jitter=st.booleans(),
        factory=st.sampled_from(tuple(FACTORIES)),
    )


@random_cases(300)
@given(cut_cases(), st.integers(1, 12))
def test_batches_are_those_of_the_serial_model(case, steps):
    loader = StreamDataLoader(case.dataset())
    if case.padding_mode == "cycle":
        check_epoch(loader, case, steps=steps)
        return
    for epoch in range(2):
        count = len(loader)
        assert len(check_epoch(loader, case, epoch)) == count


@random_cases(40, quick=2)
@given(cut_cases())
def test_it_resumes_exactly_in_the_middle_of_any_section(case):
    options = {"epochs": 1, "limit": 12} if case.padding_mode == "cycle" else {}
    check_resume(lambda workers: StreamDataLoader(case.dataset(), workers), num_workers=(0,), **options)


def test_a_stream_is_told_of_its_section_and_draws_for_it():
    told, draws = [], []

    def watched(source, *, start=0):
        info = get_stream_info()
        told.append((info.source_index, info.start, info.stop, start))
        draws.append(int(info.rng.integers(1 << 40)))
        yield from starting(source, start=start)

    list(make_loader([(0, 9), (1, 2)], watched, 1, time_steps=2, sections=Sections(4, jitter=False, lengths=[9, 2])))
    assert told == [(0, 0, 4, 0), (0, 4, 8, 4), (0, 8, 9, 8), (1, 0, 2, 0)]
    assert len(set(draws)) == 4


def test_random_draws_of_an_item_do_not_depend_on_where_its_source_is_cut():
    def draws(**options):
        batches = StreamDataLoader(Case().dataset(**options))
        return {tuple(row[:2]): row[2] for batch in batches for row in batch.data[batch.mask].tolist()}

    assert draws() == draws(sections=None) == draws(sections=Sections(6, jitter=False, lengths=Case().lengths))


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("jitter", [True, False])
@pytest.mark.parametrize("length", [9, 13])
def test_a_stream_of_another_length_is_an_error(factory, jitter, length):
    cut = Sections(5, jitter=jitter, lengths=[12])
    with pytest.raises(errors.LengthError, match=rf"{length} items, and lengths\[0\] is 12") as caught:
        list(make_loader([(0, length)], FACTORIES[factory], 1, time_steps=3, sections=cut))
    assert caught.value.source_index == 0
    assert "without lengths" not in str(caught.value)  # which sections need


@pytest.mark.parametrize("factory", ["forward", "state"])
def test_sections_behind_a_streams_end_are_skipped_one_by_one(factory):
    cut = Sections(5, jitter=False, lengths=[12])
    loader = make_loader([(0, 2)], FACTORIES[factory], 1, time_steps=3, sections=cut, on_error="skip")
    with pytest.warns(RuntimeWarning, match="skipped"):
        assert sum(int(batch.mask.sum()) for batch in loader) == 2
    assert [type(failure) for failure in loader.failures] == [errors.LengthError, errors.ReadError, errors.ReadError]
    assert "lengths=" in str(loader.failures[1])


def test_a_stream_that_breaks_is_opened_again_within_its_section():
    broken = []

    def breaking(source, *, start=0):
        for position in range(start, source[1]):
            if position in (5, 9) and position not in broken:
                broken.append(position)
                raise OSError("lost")
            yield item(source, position)

    cut = Sections(4, jitter=False, lengths=[12])
    dataset = StreamDataset([(0, 12)], breaking, 1, time_steps=2, sections=cut, retries=1, seed=0)
    assert [int(p) for batch in StreamDataLoader(dataset) for p in batch.position[:, 0]] == list(range(12))
    assert broken == [5, 9]


def test_an_empty_section_marks_no_end_where_a_stream_was_cut_short():
    def breaking(source, *, start=0):
        for position in range(start, 3):
            yield item(source, position)
        raise OSError("lost")

    cut = Sections(2, jitter=True, lengths=[4])
    seed = next(seed for seed in range(99) if cut.of(0, epoch=0, seed=seed) == [(0, 2), (2, 4)])  # and an empty one
    options = {"windows": "packed", "mark_ends": True, "on_error": "skip", "time_steps": 8}
    loader = make_loader([(0, 4)], breaking, 1, sections=cut, seed=seed, **options)
    with pytest.warns(RuntimeWarning, match="lost"):
        (batch,) = loader
    assert loader.stats().opened == 2
    assert batch.position[:4, 0].tolist() == [0, 1, 2, -1]
    assert batch.is_first[:4, 0].tolist() == [True, False, True, False]
    assert batch.is_last[:4, 0].tolist() == [False, True, False, False]


@pytest.mark.parametrize("schedule", ["longest_first", "balanced"])
def test_schedules_go_by_the_lengths_of_sections(schedule):
    dataset = Case([30, 5, 9], steps=8).dataset(schedule=schedule, lookahead=0)
    order = Order(dataset._rules, Place(1), dataset._plan().scheduled_lengths)
    lengths = dataset._cuts.lengths(1).tolist()
    drawn = [lengths[order[draw].source] for draw in range(len(lengths))]
    assert sorted(drawn) == sorted(lengths)
    assert schedule == "balanced" or drawn == sorted(drawn, reverse=True)
    loader = StreamDataLoader(dataset)
    assert len(loader) == len(list(loader))


@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_share_the_sections(world_size):
    case = Case([30, 5, 17, 9, 22], steps=6, lanes=4 // world_size)
    ranks = [
        StreamDataLoader(case.dataset(), virtual_ranks=2, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    read = [list(loader) for loader in ranks]
    assert {len(batches) for batches in read} == {len(ranks[0])}
    places = [cell[:2] for batches in read for batch in batches for lane in cells(batch) for cell in lane if cell]
    assert sorted(places) == [(source, p) for source, length in enumerate(case.lengths) for p in range(length)]
    case.lanes = 4
    StreamDataLoader(case.dataset(), virtual_ranks=2).load_state_dict(
        merge_states(loader.state_dict() for loader in ranks)
    )


def test_a_state_of_other_sections_is_refused():
    case = Case()
    loader = StreamDataLoader(case.dataset())
    next(iter(loader))
    state = loader.state_dict()
    cuts = (5, True, case.lengths), (4, False, case.lengths), (4, True, [11, 0, 3, 8, 21])
    given = [None, *(Sections(steps, jitter=jitter, lengths=lengths) for steps, jitter, lengths in cuts)]
    for other in (StreamDataLoader(case.dataset(sections=cut)) for cut in given):
        with pytest.raises(errors.StateError, match="saved with sections 'max_steps=4, jitter=True"):
            other.load_state_dict(state)
        with pytest.raises(errors.StateError, match="sections"):
            loader.load_state_dict(other.state_dict())
    StreamDataLoader(case.dataset()).load_state_dict(state)


def test_the_datasets_own_lengths_will_do():
    case = Case()
    for short in (case.steps, Sections(case.steps)):
        own = case.dataset(sections=short, lengths=case.lengths)
        assert keys(StreamDataLoader(own)) == keys(StreamDataLoader(case.dataset()))
    assert case.dataset(lengths=case.lengths).lengths.tolist() == case.lengths


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("shuffle", "jitter", "is_drawn"),
    [(False, None, False), (True, None, True), (False, True, True), (True, False, False)],
)
def test_cuts_are_drawn_anew_where_the_dataset_is_shuffled_unless_jitter_says_otherwise(
    shuffle, jitter, is_drawn, workers
):
    case = Case([30, 20], steps=8, shuffle=shuffle)
    dataset = case.dataset(sections=Sections(8, jitter=jitter), lengths=case.lengths)
    assert dataset.sections.jitter == is_drawn
    starts = []
    for epoch in range(2):
        batches = list(StreamDataLoader(dataset, workers)) if epoch else list(StreamDataLoader(dataset))
        read = {(int(s), int(p)) for batch in batches for s, p in batch_starts(batch)}
        assert read == {(s, cut[0]) for s in (0, 1) for cut in dataset.sections.of(s, epoch=0, seed=case.seed)}
        starts.append([dataset.sections.of(s, epoch=epoch, seed=case.seed) for s in (0, 1)])
    assert (starts[0] != starts[1]) == is_drawn


def batch_starts(batch):
    return zip(batch.source_index[batch.is_first], batch.position[batch.is_first], strict=True)


def test_datasets_that_are_mixed_are_cut_by_their_own_shuffle():
    case = Case([30, 20], steps=8)
    plain, drawn = (case.dataset(sections=8, lengths=case.lengths, shuffle=shuffle) for shuffle in (False, True))
    lists = interleave([plain, drawn], shuffle=True)._source_lists.lists
    assert [one.sections.jitter for one in lists] == [False, True]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"sections": 4}, ValueError, r"Sections\(4, jitter=True\) takes the dataset's lengths.*pass lengths= to"),
        ({"sections": 0}, ValueError, "sections, the most items of one, is 0, and must be at least 1"),
        ({"sections": True}, TypeError, "sections, the most items of one, must be an integer, and is True"),
        ({"sections": (4, 5)}, TypeError, "sections, the most items of one, must be an integer, and is"),
        ({"sections": Sections(4, jitter=True)}, ValueError, "takes the dataset's lengths"),
        ({"sections": Sections(4, jitter=True, lengths=[1, 2])}, ValueError, "lengths must be 5 integers"),
        ({"lengths": [1] * 5}, ValueError, "pass lengths to one of them only"),
        ({"time_steps": None}, ValueError, "pass time_steps"),
    ],
)
def test_sections_that_do_not_fit_are_refused(options, error, text):
    with pytest.raises(error, match=text):
        Case().dataset(**options)
