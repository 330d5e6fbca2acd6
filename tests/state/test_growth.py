"""`dataset.extend`: lists of sources that grow while they are read, and lists that change without it."""

import copy
import itertools
import pickle
import threading
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from cases import key
from helpers import random_cases
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from stream_dataloader import RecurrentState, StateError, StreamDataLoader, StreamDataset, interleave, side_by_side
from stream_dataloader.errors import OpenError, ReadError

MODES = ("zeros", "data", "drop", "cycle")


def interleave_one(dataset):
    return interleave([dataset])


class Numbers:
    """Streams of so many items as the source says; an item tells its source's place in the list, and its own."""

    def __call__(self, source, start=0):
        index, length = source
        for position in range(start, length):
            yield np.array([index, position])


@dataclass
class Grown:
    """A dataset whose list grows behind some of its batches."""

    lengths: list
    later: dict = field(default_factory=dict)  # by the number of batches before: lengths that are added
    options: dict = field(default_factory=dict)

    @property
    def sources(self):
        return list(enumerate([*self.lengths, *itertools.chain.from_iterable(self.later.values())]))

    def dataset(self, *, longer=False, **others):
        own = self.sources if longer else list(enumerate(self.lengths))
        options = {"batch_size": 2, "time_steps": 2, **self.options, **others}
        knows = options.pop("knows", False)
        return StreamDataset(own, Numbers(), lengths=[length for _, length in own] if knows else None, **options)

    def grow(self, dataset, batches):
        """Add what comes behind so many batches."""
        if batches in self.later:
            begin = len(dataset.sources)
            more = self.sources[begin : begin + len(self.later[batches])]
            knows = self.options.get("knows", False)
            dataset.extend(more, lengths=[length for _, length in more] if knows else None)

    def read(self, loader, most=60):
        """Batches, and the state behind each."""
        found = []
        for batch in itertools.islice(loader, most):
            found.append((batch, batch.state_dict()))
            self.grow(loader.dataset, len(found))
        return found


@st.composite
def grown(draw, modes=MODES):
    lengths = st.lists(st.integers(0, 6), min_size=2, max_size=8)
    mode = draw(st.sampled_from(modes))
    later = draw(st.dictionaries(st.integers(1, 6), st.lists(st.integers(0, 5), min_size=1, max_size=4), max_size=3))
    options = {
        "padding_mode": mode,
        "batch_size": draw(st.integers(1, 2 if mode == "drop" else 4)),
        "time_steps": draw(st.integers(1, 4)),
        "windows": draw(st.sampled_from(["aligned", "packed"])),
        "shuffle": draw(st.booleans()),
        "lookahead": draw(st.integers(0, 2)),
        "seed": draw(st.integers(0, 3)),
        "knows": draw(st.booleans()),
    }
    first = draw(lengths)
    if mode == "cycle":
        first = [max(length, 1) for length in first]
    return Grown(first, dict(sorted(later.items())), options)


def check_items(batches, case):
    """Lanes are coherent; without an end no source falls behind, else each item that was listed in time is new once."""
    carry, new = RecurrentState(batch_dim=0, packed=True), Counter()
    for batch in batches:
        before = carry.before(batch)  # raises where a lane does not go on
        carry.after(batch, batch.position[-1][:, None] if before is None else before)
        cells = zip(batch.source_index[batch.mask].tolist(), batch.position[batch.mask].tolist(), strict=True)
        new.update(cells)
        real = batch.source_index >= 0
        assert (batch.data[..., 0][real] == batch.source_index[real]).all()
        assert (batch.data[..., 1][real] == batch.position[real]).all()
    return new


def items_of(case, batches):
    """All items of the sources that were listed before the epoch's end."""
    count = len(case.lengths) + sum(len(more) for behind, more in case.later.items() if behind <= batches)
    return {(index, position): 1 for index, length in case.sources[:count] for position in range(length)}


@random_cases(1000, 20)
@given(grown(modes=("zeros", "data")))
def test_each_item_is_read_once_however_the_list_grows(case):
    batches = [batch for batch, _ in case.read(StreamDataLoader(case.dataset()))]
    assert check_items(batches, case) == items_of(case, len(batches))


@random_cases(500, 12)
@given(grown(), st.data())
def test_a_state_behind_each_batch_goes_on_with_the_longer_list(case, data):
    """A resumed run has the sources that the list had then; the rest of the batches are bit for bit the same."""
    read = case.read(StreamDataLoader(case.dataset()), most=14)
    if not read:
        return
    at = data.draw(st.integers(1, len(read)))
    if read[at - 1][1]["epoch"] > read[at - 1][0].epoch:
        return  # saved where the epoch was known to end, so it is of the next one; the list grew after that
    count = len(case.lengths) + sum(len(more) for behind, more in case.later.items() if behind < at)
    was = Grown([length for _, length in case.sources[:count]], {}, case.options)
    loader = StreamDataLoader(was.dataset())
    loader.load_state_dict(read[at - 1][1])
    case.grow(loader.dataset, at)
    found = [read[at - 1][0]]
    for number, batch in enumerate(itertools.islice(loader, len(read) - at), at + 1):
        found.append(batch)
        assert key(batch) == key(read[number - 1][0])
        case.grow(loader.dataset, number)
    assert len(found) == len(read) - at + 1


def check_equal(one, other):
    assert len(one) == len(other)
    for (ours, _), (theirs, _) in zip(one, other, strict=True):
        assert key(ours) == key(theirs)


@pytest.mark.one_of_each
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "options", [{"num_workers": 2, "persistent_workers": True}, {"num_workers": 2, "worker_method": "thread"}]
)
def test_batches_are_the_same_for_any_workers(mode, options):
    case = Grown([5, 3, 4, 6], {2: [2, 7], 3: [4]}, {"padding_mode": mode, "shuffle": True, "seed": 1})
    expected = case.read(StreamDataLoader(case.dataset()), most=20)
    loader = StreamDataLoader(case.dataset(), **options)
    check_equal(case.read(loader, most=20), expected)
    if mode != "cycle":  # the next epoch shuffles all of them together
        whole = StreamDataLoader(case.dataset(longer=True))
        whole.set_epoch(1)
        for ours, theirs in zip(loader, whole, strict=True):
            assert key(ours) == key(theirs)


def test_with_cycle_new_sources_join_at_the_next_pass():
    case = Grown([2, 2, 2], {1: [2, 2]}, {"padding_mode": "cycle", "batch_size": 1, "shuffle": True, "lookahead": 0})
    drawn = [int(batch.source_index[0, 0]) for batch, _ in case.read(StreamDataLoader(case.dataset()), most=13)]
    assert [sorted(drawn[begin:end]) for begin, end in ((0, 3), (3, 8), (8, 13))] == [
        [0, 1, 2],
        [*range(5)],
        [*range(5)],
    ]
    assert drawn[3:8] != drawn[8:13]


def test_an_endless_run_read_in_epochs_goes_on_in_the_next_iteration():
    case = Grown([3, 2, 4], {}, {"padding_mode": "cycle", "shuffle": True, "seed": 5})
    dataset, whole = case.dataset(), case.dataset()
    loader, other = (StreamDataLoader(each, batches_per_epoch=5) for each in (dataset, whole))
    for number in range(4):
        for ours, theirs in zip(loader, other, strict=True):
            assert key(ours) == key(theirs)
        if number == 1:  # between two epochs
            dataset.extend([(3, 2)])
            whole.extend([(3, 2)])
    assert loader.state_dict() == other.state_dict()
    state = loader.state_dict()
    assert state["num_sources"] == 4
    assert [size for _, size in state["growth"]] == [3]


@pytest.mark.parametrize("length", [None, 6])
def test_a_loop_that_is_left_after_the_list_grew_looked_at_no_loaded_state(length):
    """A warning, that the rest of a loaded state is not read, would be an error."""
    dataset = Grown([9] * 4).dataset(padding_mode="cycle" if length else "zeros")
    loader = StreamDataLoader(dataset, batches_per_epoch=length)
    batches = iter(loader)
    next(batches), next(batches)
    dataset.extend([(4, 9)])
    assert next(batches).batch_index == 2
    batches.close()
    assert next(iter(loader)).batch_index == (3 if length else 0)


def test_length_and_progress_count_what_was_added():
    case = Grown([4, 4], {1: [4, 4]}, {"knows": True, "batch_size": 1})
    loader = StreamDataLoader(case.dataset())
    assert len(loader) == 4
    assert len(case.read(loader)) == len(loader) == 8


def test_parts_and_torchs_own_loader_have_them_too():
    case = Grown([4, 4], {}, {})
    dataset = case.dataset()
    loader = StreamDataLoader(dataset, 2)
    seen = []
    for part in loader.parts():
        seen += part.source_index[part.mask].tolist()
        if len(dataset.sources) == 2:
            dataset.extend([(2, 3), (3, 1)])
    assert Counter(seen) == {0: 4, 1: 4, 2: 3, 3: 1}
    torchs = DataLoader(dataset, batch_size=None, num_workers=1)
    assert Counter(int(i) for part in torchs for i in part.source_index[part.mask]) == {0: 4, 1: 4, 2: 3, 3: 1}


@pytest.mark.parametrize("read_as", [lambda dataset: dataset, interleave_one])
def test_a_dataset_counts_its_own_epochs_on(read_as):
    """Without a `StreamDataLoader`, too; else each time that the list grows, epoch 0 comes again."""
    dataset = Grown([2, 2, 2]).dataset(time_steps=1)
    reads = read_as(dataset)
    torchs = DataLoader(reads, batch_size=None, num_workers=2)
    kept = DataLoader(reads, batch_size=None, num_workers=2, persistent_workers=True)
    assert [{part.epoch for part in each} for each in (reads, torchs, kept)] == [{0}, {1}, {2}]
    dataset.extend([(3, 2)])
    assert [{part.epoch for part in each} for each in (reads, torchs)] == [{3}, {4}]
    with pytest.raises(RuntimeError, match=r"3 sources, and the dataset has 4.*persistent_workers=True"):
        next(iter(kept))
    reads.set_epoch(9)
    dataset.extend([(4, 2)])
    assert [{part.epoch for part in each} for each in (reads, torchs)] == [{9}, {10}]


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "worker_method": "thread"}])
def test_a_stream_cannot_extend_its_dataset(options):
    """It would be a copy in a worker process, and a thread would wait for its own end."""

    class Finds(Numbers):
        def __call__(self, source, start=0):
            dataset.extend([(2, 2)])
            return super().__call__(source, start)

    dataset = StreamDataset([(0, 2), (1, 2)], Finds(), 1, time_steps=2)
    with pytest.raises(OpenError, match=r"source 0 .*extend was called by a stream, .*the loop over the loader"):
        next(iter(StreamDataLoader(dataset, **options)))
    assert len(dataset.sources) == 2


def test_a_member_side_by_side_grows():
    one, other = (Grown([6, 6], {}, {"batch_size": 1}).dataset() for _ in range(2))
    seen = Counter()
    for number, batch in enumerate(side_by_side([(one, 1), (other, 1)], ends_with="longest")):
        seen.update(
            (int(member), int(source)) for member, source in zip(batch.member, batch.source_index[0], strict=True)
        )
        if number == 1:
            other.extend([(2, 4)])
    assert (1, 2) in seen
    assert seen[0, 1] == 3


def test_another_thread_may_extend_while_batches_are_read():
    """As what watches a folder does; each item is read once all the same."""
    dataset = Grown([3] * 4, {}, {"batch_size": 2, "padding_mode": "zeros"}).dataset()
    loader, begun = StreamDataLoader(dataset, 1), threading.Event()

    def watch():
        begun.wait(30)
        for number in range(4, 12):
            dataset.extend([(number, 3)])

    watcher = threading.Thread(target=watch)
    watcher.start()
    seen = Counter()
    for batch in loader:
        begun.set()
        seen.update(batch.source_index[batch.mask].tolist())
        if len(dataset.sources) < 12:
            watcher.join(0.2)
    watcher.join()
    late = {number for number in range(12) if seen[number] == 0}
    assert all(seen[number] == 3 for number in range(12) if number not in late)
    assert late <= set(range(11, 12)) or len(dataset.sources) == 12


def test_a_loop_that_was_left_begins_the_next_epoch():
    case = Grown([5, 5, 5], {}, {})
    dataset = case.dataset()
    loader = StreamDataLoader(dataset)
    next(iter(loader))
    dataset.extend([(3, 5)])
    seen = Counter(int(i) for batch in loader for i in batch.source_index[batch.mask])
    assert seen == {0: 5, 1: 5, 2: 5, 3: 5}
    assert loader.epoch == 2


@pytest.mark.parametrize("copied", [lambda loader: loader, copy.deepcopy])
def test_a_loop_that_was_left_can_be_skipped_on(copied):
    case = Grown([5, 5, 5], {}, {"batch_size": 1, "time_steps": 1})
    dataset = case.dataset()
    loader = StreamDataLoader(dataset)
    next(iter(loader))
    dataset.extend([(3, 2)])
    loader = copied(loader)
    assert loader.skip(2) == 2
    seen = [(int(batch.source_index), int(batch.position)) for batch in loader]
    assert seen == [(0, 3), (0, 4), *((n, i) for n in (1, 2) for i in range(5)), (3, 0), (3, 1)]


@pytest.mark.parametrize("set_on", ["loader", "dataset"])
@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "worker_method": "thread"}])
def test_an_epoch_that_was_set_before_the_list_grew_comes_next(set_on, options):
    dataset = Grown([3, 3]).dataset(time_steps=1, batch_size=1)
    loader = StreamDataLoader(dataset, **options)
    seen = []
    for batch in loader:
        seen.append((int(batch.source_index), int(batch.position)))
        if len(seen) == 2:
            (loader if set_on == "loader" else dataset).set_epoch(7)
            dataset.extend([(2, 3)])
            assert loader.state_dict()["epoch"] == 7
    assert seen == [(n, i) for n in range(3) for i in range(3)]
    assert {batch.epoch for batch in loader} == {7}


def test_a_run_that_is_to_start_over_does_so_although_the_list_grew():
    dataset = Grown([3, 3]).dataset(time_steps=1, batch_size=1, padding_mode="cycle")
    loader = StreamDataLoader(dataset, batches_per_epoch=4)
    iterator = iter(loader)
    next(iterator)
    loader.set_epoch(0)
    dataset.extend([(2, 3)])
    assert [int(batch.position) for batch in iterator] == [1, 2, 0]
    assert [(int(batch.source_index), int(batch.position)) for batch in loader] == [(0, 0), (0, 1), (0, 2), (1, 0)]


@random_cases(300, 15)
@given(grown(), st.integers(1, 6))
def test_a_state_of_an_epoch_that_was_left_is_of_the_longer_list_too(case, read):
    """As that of an epoch whose iterator still exists."""
    more = next(iter(case.later.values()), [2, 3])
    case = Grown(case.lengths, {read: more}, case.options)
    held, left = StreamDataLoader(case.dataset()), StreamDataLoader(case.dataset())
    iterator = iter(held)
    if len(list(itertools.islice(iterator, read))) < read or len(list(itertools.islice(left, read))) < read:
        return
    for loader in (held, left):
        case.grow(loader.dataset, read)
    assert left.state_dict() == held.state_dict()
    resumed = StreamDataLoader(case.dataset(longer=True))
    resumed.load_state_dict(left.state_dict())
    read_on = iter(resumed)
    for other in itertools.islice(iterator, 9):
        assert key(next(read_on)) == key(other)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
@pytest.mark.parametrize("resumed", [False, True])
def test_a_copied_loader_reads_what_its_dataset_is_extended_by(copied, resumed):
    loader = copied(StreamDataLoader(Grown([3, 3]).dataset(time_steps=1, batch_size=1)))
    if resumed:
        loader.load_state_dict(loader.state_dict())
        loader.dataset.extend([(2, 3)])
        assert loader.state_dict()["num_sources"] == 3
    seen = []
    for batch in loader:
        seen.append((int(batch.source_index), int(batch.position)))
        if len(seen) == 2 and not resumed:
            loader.dataset.extend([(2, 3)])
    assert seen == [(n, i) for n in range(3) for i in range(3)]


def test_what_cannot_grow_is_refused_and_nothing_changes():
    dataset = Grown([2, 2], {}, {}).dataset()
    known = Grown([2, 2], {}, {"knows": True}).dataset()
    for wrong, text in (("ab", r"pass \[source\]"), (3, r"pass \[source\]"), ([threading.Lock()], "pickle")):
        with pytest.raises(TypeError, match=text):
            dataset.extend(wrong)
    with pytest.raises(ValueError, match="lengths= is missing"):
        known.extend([(2, 2)])
    with pytest.raises(ValueError, match="the dataset has no lengths"):
        dataset.extend([(2, 2)], lengths=[2])
    with pytest.raises(ValueError, match="lengths"):
        known.extend([(2, 2)], lengths=[2, 3])
    mixed = interleave([dataset, known], batch_size=1)
    with pytest.raises(TypeError, match="interleaves 2, and sources belong to one of them; extend that one"):
        mixed.extend([(2, 2)])
    with pytest.raises(TypeError, match="a range, which knows its own"):
        StreamDataset(range(3), range, 1, time_steps=1).extend([4])
    with pytest.raises(TypeError, match="which knows its own"):
        StreamDataset.from_map_style([1, 2], [[0], [1]], 1, time_steps=1).extend([[1]])
    endless = Grown([2] * 4, {}, {"padding_mode": "cycle", "batch_size": 1}).dataset()
    loader = StreamDataLoader(endless, rank=0, world_size=2)
    next(iter(loader))
    reader = iter(loader)
    next(reader)
    with pytest.raises(ValueError, match=r"ranks must agree on the draw.*needs torch.distributed"):
        endless.extend([(4, 2)])
    assert len(endless.sources) == 4
    next(reader)
    dataset.extend([])
    assert len(dataset.sources) == len(known.sources) == 2


@pytest.mark.filterwarnings("ignore:ranks cannot agree:UserWarning")
def test_ranks_that_extend_alike_read_each_item_once():
    case = Grown([5, 3, 4, 6], {2: [2, 7, 3], 3: [4]}, {"knows": True, "batch_size": 1, "shuffle": True, "seed": 2})
    read = [case.read(StreamDataLoader(case.dataset(), rank=rank, world_size=2)) for rank in range(2)]
    new = Counter()
    for rank in read:
        new += check_items([batch for batch, _ in rank], case)
    assert new == items_of(case, 3)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda sources: sources.append((2, 1)), r"it had 2, and has 3; dataset.extend\(\[\(2, 1\)\]\) adds"),
        (lambda sources: sources.pop(), r"sources\[1\] was \(1, 3\); leave the list"),
        (lambda sources: sources.reverse(), r"sources\[0\] was \(0, 3\)"),
    ],
)
def test_a_list_that_changes_without_extend_is_noticed(change, text):
    sources = [(0, 3), (1, 3)]
    dataset = StreamDataset(sources, Numbers(), 1, time_steps=2)
    loader = StreamDataLoader(dataset)
    mixed = StreamDataLoader(interleave([dataset, Grown([2]).dataset()], batch_size=1))
    list(loader)
    change(sources)
    for reads in (loader, mixed, dataset):
        with pytest.raises(ValueError, match=text):
            next(iter(reads))


def test_a_list_may_have_what_it_was_extended_by():
    sources = [(0, 3)]
    dataset = StreamDataset(sources, Numbers(), 1, time_steps=3)
    sources.append((1, 3))
    dataset.extend(sources[1:])
    assert len(list(StreamDataLoader(dataset))) == 2


def test_a_state_of_a_grown_list_needs_the_grown_list():
    case = Grown([4, 4], {1: [4]}, {"batch_size": 1})
    (_, state), *_ = case.read(StreamDataLoader(case.dataset()), most=1)
    assert state["num_sources"] == 2
    *_, (_, state) = case.read(StreamDataLoader(case.dataset()), most=2)
    assert state["num_sources"] == 3
    with pytest.raises(StateError, match="number of sources 3, and the dataset has 2"):
        StreamDataLoader(case.dataset()).load_state_dict(state)


def test_a_broken_source_among_the_new_ones_is_named():
    class Broken(Numbers):
        def __call__(self, source, start=0):
            if source[0] == 2:
                raise OSError("gone")
            return super().__call__(source, start)

    dataset = StreamDataset([(0, 2), (1, 2)], Broken(), 1, time_steps=1)
    loader = iter(StreamDataLoader(dataset))
    next(loader)
    dataset.extend([(2, 2)])
    with pytest.raises(Exception, match=r"source 2.*gone") as raised:
        list(loader)
    assert not isinstance(raised.value, ReadError)
