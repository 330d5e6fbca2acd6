"""Random mixtures of datasets, small enough to be replayed by the serial model."""

import itertools
from dataclasses import dataclass, field

import cases
import numpy as np
from hypothesis import strategies as st

from stream_dataloader import Sections, StreamDataset, get_stream_info, interleave
from stream_dataloader._engine.schedule.order import Order
from stream_dataloader._engine.schedule.place import Place

# What is read: sources are (list, index over all lists, length)


def item(source, position):
    number, index, _ = source
    info = get_stream_info()
    assert info.source_index == index
    return np.array([index, position, number, info.rng_at(position).integers(1 << 30), info.epoch, info.repeat])


@dataclass(frozen=True)
class OfList:
    number: int
    open_early = True

    def __call__(self, source, *, start=0):
        assert source[0] == self.number, "opened by another list's factory"
        for position in range(start, source[2]):
            yield item(source, position)


@dataclass
class Mixture(cases.Case):
    """Up to three datasets that are read together, small enough to be replayed by the model."""

    lists: list = field(default_factory=list)
    weights: object = None
    exhausted: str | None = "leave_out"
    shuffles: tuple = (False, True, True)
    shuffle: bool | None = None
    cut: tuple = (None, None, None)  # of each list: in sections of so many steps, 0: whole, of known lengths

    def __post_init__(self):
        self.lengths = [length for lengths in self.lists for length in lengths]

    def datasets(self, **options):
        index = itertools.count()
        for number, lengths in enumerate(self.lists):
            sources, cut = [(number, next(index), length) for length in lengths], self.cut[number]
            given = {
                "time_steps": self.time_steps,
                "windows": self.windows,
                "lookahead": self.lookahead,
                "seed": number,
                "mark_ends": self.mark_ends,
                "sections": Sections(cut, jitter=True, lengths=lengths) if cut else None,
                "lengths": lengths if cut == 0 else None,
            }
            yield StreamDataset(sources, OfList(number), self.lanes, shuffle=self.shuffles[number], **(given | options))

    def dataset(self, **options):
        given = {"exhausted": self.exhausted, "shuffle": self.shuffle, "seed": self.seed}
        return interleave(self.datasets(), self.weights, padding_mode=self.padding_mode, **(given | options))

    def drawn(self, dataset, epoch=0):
        order = Order(dataset._rules, Place(epoch), dataset.lengths)
        return [order[draw].source for draw in range(dataset._rules.draws)]


weight_of = st.sampled_from([0.25, 1.0, 1.0, 2.0, 3.0, 7.5]) | st.floats(0.1, 10)
rows_of = st.tuples(weight_of, weight_of, weight_of)


@st.composite
def weights_of(draw):
    """Three numbers, or a schedule of them, in which a dataset has none for a while; as a list or a function."""
    numbers = sorted(draw(st.sets(st.integers(1, 25), max_size=3)))
    rows = [draw(st.tuples(*[weight_of | st.just(0.0)] * 3).filter(lambda row: row[0])) for _ in numbers]
    listed = list(zip([0, *numbers], [*rows, draw(rows_of)], strict=True))
    return draw(st.sampled_from([None, listed[-1][1], listed, Schedule(listed)]))


@dataclass
class Schedule:
    """A schedule as a function."""

    listed: list

    def __call__(self, draw):
        return next(row for number, row in reversed(self.listed) if number <= draw)


def first_of(weights, count):
    """The weights of the first datasets."""
    if isinstance(weights, Schedule):
        return Schedule(first_of(weights.listed, count))
    if weights is None or isinstance(weights, tuple):
        return weights and weights[:count]
    return [(number, row[:count]) for number, row in weights]


def mixtures():
    def build(case, lists, weights, cut, **rest):
        if case.padding_mode == "drop":
            case.lanes = min(case.lanes, sum(map(len, lists)))
        some = [
            [max(1, length) for length in lengths] if steps else lengths
            for lengths, steps in zip(lists, cut, strict=False)
        ]
        return Mixture(**{**vars(case), **rest}, lists=some, weights=first_of(weights, len(lists)), cut=cut)

    lengths = st.lists(st.integers(0, 7), min_size=1, max_size=9)
    steps = st.sampled_from([None, None, 0, 0, 1, 3, 6])
    return st.builds(
        build,
        cases.cases(5, 1, 5, ("zeros", "data", "drop", "cycle"), min_streams=5),
        st.lists(lengths, min_size=1, max_size=3),
        weights_of(),
        st.tuples(steps, steps, steps),
        exhausted=st.sampled_from(["leave_out", "repeat"]),
        shuffles=st.tuples(st.booleans(), st.booleans(), st.booleans()),
        shuffle=st.none() | st.booleans(),
    )


def mixture_of(lists, weights=None, exhausted="leave_out", **more):
    return Mixture(lists=lists, weights=weights, exhausted=exhausted, **more)
