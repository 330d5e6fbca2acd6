"""Random cases, and how a batch is compared with the serial model."""

import itertools
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from helpers import declared
from hypothesis import strategies as st
from serial_model import Serial

from stream_dataloader import StreamDataset, get_stream_info
from stream_dataloader._engine.schedule.order import Order
from stream_dataloader._engine.schedule.place import Place


@dataclass
class Case:
    """One dataset, small enough to be replayed by the model."""

    lengths: list = field(default_factory=lambda: [3, 1, 2])
    lanes: int = 2
    time_steps: int = 2
    windows: str = "aligned"
    padding_mode: str = "zeros"
    lookahead: int = 1
    shuffle: bool = False
    seed: int = 0
    jitter: bool = False
    open_early: bool = True  # declared by the factory
    mark_ends: bool = False
    broken: tuple = ()  # sources that raise behind their last item
    marks: bool = False  # streams say that sequences begin in them
    knows_lengths: bool = False  # the dataset is told them

    def dataset(self, **options):
        given = {
            "open_stream": declared(Counting(self.jitter, self.marks), early=self.open_early),
            "batch_size": self.lanes,
            "padding_mode": self.padding_mode,
            "seed": self.seed,
            "time_steps": self.time_steps,
            "windows": self.windows,
            "shuffle": self.shuffle,
            "lookahead": self.lookahead,
            "mark_ends": self.mark_ends,
            "lengths": self.lengths if self.knows_lengths else None,
        }
        return StreamDataset(list(enumerate(self.lengths)), **(given | options))

    def expected(self, dataset, epoch=0, drawn=None):
        """What the model says, batch after batch; `drawn`: what alone is handed out, in this order."""
        return self.model(dataset, epoch, drawn).batches()

    def model(self, dataset, epoch=0, drawn=None):
        total, orders = dataset._rules.draws if drawn is None else len(drawn), {}
        cut, scheduled = dataset._cuts, dataset._plan().scheduled_lengths

        def place_of(draw):
            """Source, start and stop. With `"cycle"` each pass is an epoch, with `"data"` it is the same again."""
            turn, place = (0, draw) if dataset._rules.endless_mix else divmod(draw, total)
            number = epoch + turn * (self.padding_mode == "cycle")
            if number not in orders:
                orders[number] = Order(dataset._rules, Place(number), scheduled)
            source, number, *_ = orders[number][place] if drawn is None else (drawn[place], number)
            if cut is None:
                return source, 0, self.lengths[source]
            section = cut.section(source, number)
            return section.source, section.start, section.stop if section.stop >= 0 else self.lengths[section.source]

        def read(draw):
            source, start, stop = place_of(draw)
            for position in range(start, stop):
                is_last = [position == stop - 1 and source not in self.broken] if self.mark_ends else []
                is_first = position == start or (self.marks and is_marked(source, position))
                yield source, position, is_first, *is_last

        return Serial(read, total, self.lanes, self.time_steps, self.windows, self.padding_mode, self.lookahead)


@dataclass
class Counting:
    """Streams whose items tell source, position and a random draw that depends on both."""

    jitter: bool = False
    marks: bool = False

    def __call__(self, source):
        return Marked(source[0], self.items(source)) if self.marks else self.items(source)

    def items(self, source):
        index, length = source
        wait = np.random.default_rng(index)
        for position in range(length):
            if self.jitter and (index + position) % 8 < 5:  # then some that take no time
                time.sleep(wait.uniform(0, 0.003))
            info = get_stream_info()
            assert info.source_index == index
            yield np.array([index, position, info.rng_at(position).integers(1 << 20)])


def pairs(source):
    """A source's items as an array, which fits beside others."""
    number, length = source
    return np.array([(number, i) for i in range(length)]).reshape(-1, 2)


def is_marked(source, position):
    """Whether a sequence begins there, in a stream that marks starts: about each third."""
    return (position * 7 + source * 5) % 3 == 0


class Marked:
    """A stream that marks starts; it must be asked about items that were read."""

    def __init__(self, source, items):
        self.source, self.items, self.read = source, iter(items), 0

    def __iter__(self):
        return self

    def __next__(self):
        item = next(self.items)
        self.read += 1
        return item

    def starts_within(self, start, stop):
        assert start < stop <= self.read
        return np.array([n for n in range(start, stop) if is_marked(self.source, n)], np.int64)


MODES = ("zeros", "data", "drop")


def cases(
    max_streams=30,
    max_length=12,
    max_lanes=9,
    modes=MODES,
    min_streams=1,
    min_lanes=1,
    lookahead=0,
    marks=False,
    lengths=False,
):
    """Random cases; `lookahead`: the least; `marks`: some streams mark starts; `lengths`: some datasets know them."""

    def build(lengths, mode, lanes, **rest):
        if mode == "cycle":  # which has to find an item
            lengths = [max(1, lengths[0]), *lengths[1:]]
        return Case(
            lengths=lengths, lanes=min(lanes, len(lengths)) if mode == "drop" else lanes, padding_mode=mode, **rest
        )

    return st.builds(
        build,
        lengths=st.lists(st.integers(0, max_length), min_size=min_streams, max_size=max_streams),
        lanes=st.integers(min_lanes, max_lanes),
        mode=st.sampled_from(modes),
        time_steps=st.integers(1, 5),
        windows=st.sampled_from(["aligned", "packed"]),
        lookahead=st.integers(lookahead, 3),
        shuffle=st.booleans(),
        seed=st.integers(0, 1 << 40),
        open_early=st.booleans(),
        mark_ends=st.booleans(),
        marks=st.booleans() if marks else st.just(False),
        knows_lengths=st.booleans() if lengths else st.just(False),
    )


def ways():
    """Who reads; processes are seldom drawn, as they take long."""
    threads = st.fixed_dictionaries({"num_workers": st.integers(1, 5), "worker_method": st.just("thread")})
    processes = st.fixed_dictionaries({"num_workers": st.integers(1, 5)})
    return st.one_of(threads, threads, threads, st.just({}), processes)


def cells(batch):
    """A batch as the model writes it."""
    told = [batch.source_index, batch.position, batch.mask, batch.is_first]
    told += [] if batch.is_last is None else [batch.is_last]
    return [
        [cell if cell[0] >= 0 else None for cell in zip(*lane, strict=True)]
        for lane in zip(*[field.T.tolist() for field in told], strict=True)
    ]


def check_epoch(loader, case, epoch=0, steps=None):
    """The batches of a loader's next epoch, or the first of them, which are those of the model."""
    batches = list(itertools.islice(loader, steps))
    expected = itertools.islice(case.expected(loader.dataset, epoch), steps)
    assert [cells(batch) for batch in batches] == list(expected)
    for batch in batches:
        check_fields(batch)
    return batches


def check_fields(batch):
    """All fields of a batch agree with each other, and with what the streams wrote into the items."""
    real = batch.source_index >= 0
    assert (real == (batch.position >= 0)).all()
    assert not (batch.mask & ~real).any()
    assert (batch.data[..., 0][real] == batch.source_index[real]).all()
    assert (batch.data[..., 1][real] == batch.position[real]).all()
    assert (batch.data[~real] == 0).all()
    assert not (batch.is_first & ~real).any()
    assert (batch.is_first | (batch.position != 0)).all()
    assert (batch.reset == batch.is_first[batch.context]).all()
    if batch.is_last is not None:
        assert not (batch.is_last & ~real).any()


@dataclass
class Words:
    """Promises 1, 2 and 5 from their words, for batches of one epoch as they come."""

    case: Case
    last: dict = field(default_factory=dict)  # of each lane: source and position read last
    read: Counter = field(default_factory=Counter)

    def note(self, batch):
        """Coherent, once, and not hidden."""
        assert batch.mask.any(), "a batch without anything new"
        for lane, window in enumerate(cells(batch)):
            for source, position, fresh, *_ in filter(None, window):
                before = self.last.get(lane)
                if position > 0:
                    assert before == (source, position - 1), f"lane {lane} has {(source, position)} after {before}"
                elif before is not None:
                    ended = before[1] == self.case.lengths[before[0]] - 1
                    assert ended, f"lane {lane} left a stream behind {before}"
                self.last[lane] = source, position
                self.read[source, position] += fresh
        twice = [item for item, times in self.read.items() if times > 1]
        assert not twice or self.case.padding_mode == "cycle", f"read twice: {twice}"

    def end(self):
        """The epoch has ended: everything was read."""
        if self.case.padding_mode != "drop":
            lengths = enumerate(self.case.lengths)
            missing = {(source, position) for source, length in lengths for position in range(length)} - set(+self.read)
            assert not missing, f"never read: {missing}"


def key(batch, worker_id=False, seeds=False):
    """What was read, to be compared between runs; `seeds`: also the seeds of streams, where both datasets have one."""
    fields = [batch.data, batch.reset, batch.is_first, batch.mask, batch.source_index, batch.position, batch.lane]
    fields += [] if batch.is_last is None else [batch.is_last]
    fields += [batch.stream_seed] if seeds else []
    workers = [batch.worker_id.tolist()] if worker_id else []
    return [f.tolist() for f in fields] + [batch.batch_index, batch.epoch, *workers]


def keys(batches, seeds=False):
    return [key(batch, seeds=seeds) for batch in batches]
