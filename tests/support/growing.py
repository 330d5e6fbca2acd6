"""Datasets that grow while they are read: interleaved, or one alone."""

import itertools
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st
from mixtures import first_of, weights_of

from stream_dataloader import RecurrentState, Sections, StreamDataLoader, StreamDataset, get_stream_info, interleave


class Numbers:
    """An item tells its source's dataset and index there, its place, and what is drawn at random for it."""

    def __call__(self, source, start=0):
        member, index, length = source
        info = get_stream_info()
        for position in range(start, length):
            drawn = info.rng_at(position).integers(1 << 30)
            yield np.array([member, index, position, drawn, info.epoch, info.repeat])


@dataclass
class Growing:
    """Datasets that are interleaved, and grow behind some of the batches."""

    lists: list
    later: dict = field(default_factory=dict)  # by the number of batches before: (member, lengths that are added)
    options: dict = field(default_factory=dict)
    weights: object = None
    own: tuple = ({}, {}, {})  # options of each dataset
    knows: bool = False
    plain: bool = False  # the first dataset alone, not interleaved

    def lengths(self, batches=None):
        """The lengths of each list behind so many batches; None: at last."""
        found = [list(lengths) for lengths in self.lists]
        for behind, added in self.later.items():
            if batches is None or behind <= batches:
                for member, lengths in added:
                    found[member] += lengths
        return found

    def datasets(self, batches=0):
        common = {name: self.options[name] for name in ("time_steps", "windows", "lookahead") if name in self.options}
        lanes = self.options.get("batch_size", 2)
        for member, lengths in enumerate(self.lengths(batches)):
            options = {"time_steps": 2, **common, **self.own[member]}
            if self.plain:
                options["padding_mode"] = self.options["padding_mode"]
            if options.get("sections"):
                options["sections"] = Sections(options["sections"], jitter=True)
            known = lengths if self.knows or options.get("sections") or options.get("schedule") else None
            sources = [(member, index, length) for index, length in enumerate(lengths)]
            yield StreamDataset(sources, Numbers(), lanes, lengths=known, seed=member, **options)

    def loader(self, batches=0, *given, **others):
        """A loader of the datasets as they are behind so many batches."""
        mixing = {name: value for name, value in self.options.items() if name not in ("windows", "time_steps")}
        self.now = list(self.datasets(batches))
        if self.plain:
            return StreamDataLoader(self.now[0], *given, **others)
        return StreamDataLoader(interleave(self.now, self.weights, **{"batch_size": 2, **mixing}), *given, **others)

    def grow(self, batches):
        for member, lengths in self.later.get(batches, ()):
            dataset = self.now[member]
            begin = len(dataset.sources)
            more = [(member, index, length) for index, length in enumerate(lengths, begin)]
            dataset.extend(more, lengths=None if dataset.lengths is None else lengths)

    def read(self, loader, most=40, begin=0):
        """Batches, and the state behind each."""
        found = []
        for number, batch in enumerate(itertools.islice(loader, most), begin + 1):
            check_places(loader.dataset, batch)
            found.append((batch, batch.state_dict()))
            self.grow(number)
        return found


def check_places(dataset, batch):
    """Source numbers are those of the lists as they were when the batch was read."""
    for t, lane in (batch.source_index >= 0).nonzero().tolist():
        member, index, position, *_ = batch.data[t, lane].tolist()
        assert dataset.locate(int(batch.source_index[t, lane])) == (member, index)
        assert int(batch.position[t, lane]) == position


@st.composite
def growing(draw, modes=("zeros", "data", "drop", "cycle"), exhausted=("leave_out", "repeat")):
    mode = draw(st.sampled_from(modes))
    least = 1 if mode == "cycle" else 0
    lists = draw(st.lists(st.lists(st.integers(least, 6), min_size=1, max_size=5), min_size=1, max_size=3))
    more = st.tuples(st.integers(0, len(lists) - 1), st.lists(st.integers(least, 5), min_size=1, max_size=4))
    weights, knows = first_of(draw(weights_of()), len(lists)), draw(st.booleans())
    options = {
        "padding_mode": mode,
        "batch_size": draw(st.integers(1, min(3, sum(map(len, lists))) if mode == "drop" else 3)),
        "time_steps": draw(st.integers(1, 4)),
        "windows": draw(st.sampled_from(["aligned", "packed"])),
        "lookahead": draw(st.integers(0, 2)),
        "seed": draw(st.integers(0, 3)),
        "shuffle": draw(st.none() | st.booleans()),
        "exhausted": draw(st.sampled_from(exhausted)),
        "weights_by": draw(st.sampled_from(["sources", "steps"])) if knows and all(map(any, lists)) else "sources",
    }
    own = tuple(
        {"shuffle": draw(st.booleans()), "sections": draw(st.sampled_from([None, None, 2, 4])) if knows else None}
        for _ in range(3)
    )
    later = draw(st.dictionaries(st.integers(1, 8), st.lists(more, min_size=1, max_size=2), max_size=3))
    return Growing(lists, dict(sorted(later.items())), options, weights, own, knows)


def check_lanes(batches):
    """Lanes are coherent; return how often each item came as something new."""
    carry, new = RecurrentState(batch_dim=0, packed=True), Counter()
    carry.reset()  # of a loader that was resumed
    for batch in batches:
        before = carry.before(batch)  # raises where a lane does not go on
        carry.after(batch, batch.position[-1][:, None] if before is None else before)
        new.update(tuple(item[:3]) for item in batch.data[batch.mask].tolist())
    return new
