"""`StreamDataset(anchors=...)` reads every n-th item of each stream; against the sampler, and a plain loop."""

import itertools
import warnings

import numpy as np
import pytest
from cases import Marked, cells, ways
from helpers import random_cases
from hypothesis import given
from hypothesis import strategies as st
from test_context import WAYS_TO_GO
from torch.utils.data import DataLoader

from stream_dataloader import (
    Anchors,
    LaneBatchSampler,
    RecurrentState,
    StreamDataLoader,
    StreamDataset,
    collate_lanes,
    get_stream_info,
    interleave,
    lane_dataset,
)
from stream_dataloader.errors import LengthError, ReadError, StateError
from stream_dataloader.testing import audit, check_resume
from stream_dataloader.testing.resume import batch_key

pytestmark = [
    pytest.mark.filterwarnings("ignore:num_workers is"),
    pytest.mark.filterwarnings("ignore:batch_size is"),
    pytest.mark.filterwarnings("ignore:.* of .* have fewer items than ahead"),
]


@st.composite
def chosen(draw, modes=("zeros", "data", "drop")):
    """Lengths of sources, which of their items are anchors, and options of a dataset of them."""
    numbers = st.integers(0, 14)
    lengths = draw(st.lists(numbers, min_size=1, max_size=9))
    spacing = {
        "every": draw(st.integers(1, 6)),
        "phase": draw(st.none() | st.integers(0, 7)),
        "first": draw(st.booleans()),
        "last": draw(st.booleans()),
        "ahead": draw(st.integers(1, 5)),
    }
    mode = draw(st.sampled_from(modes))
    options = {
        "batch_size": draw(st.integers(1, min(4, len(lengths)) if mode == "drop" else 4)),
        "time_steps": draw(st.integers(1, 4)),
        "windows": draw(st.sampled_from(["aligned", "packed"])),
        "context": draw(st.sampled_from([0, 0, 1, 5])),
        "padding_mode": mode,
        "shuffle": draw(st.booleans()),
        "lookahead": draw(st.integers(0, 2)),
        "seed": draw(st.integers(0, 9)),
    }
    return lengths, spacing, options


def dataset_of(lengths, spacing, options, how="start"):
    return StreamDataset(
        list(enumerate(lengths)), WAYS_TO_GO[how], lengths=lengths, anchors=Anchors(**spacing), **options
    )


def frames(batch):
    """Source and frame of each real cell, lane by lane."""
    real = batch.source_index >= 0
    return [
        [(source, item) for source, item, there in zip(*lane, strict=True) if there]
        for lane in zip(batch.data[..., 0].T.tolist(), batch.data[..., 1].T.tolist(), real.T.tolist(), strict=True)
    ]


def serial(lengths, spacing, options, epoch):
    """The frames of each source in an epoch."""
    fixed = spacing if options["shuffle"] or spacing["phase"] is not None else spacing | {"phase": 0}
    known = Anchors(**fixed, lengths=lengths)
    return {
        source: found
        for source in range(len(lengths))
        if (found := known.of(source, epoch=epoch, seed=options["seed"]))
    }


@random_cases(1500, 25)
@given(case=chosen(), how=st.sampled_from(list(WAYS_TO_GO)), way=ways())
def test_each_stream_is_its_anchors_in_order(case, how, way):
    if how == "marks":
        return
    lengths, spacing, options = case
    loader = StreamDataLoader(dataset_of(*case, how=how), **way)
    for epoch in range(2):
        found, carried = {}, {}
        batches = list(loader)
        for batch in batches:
            for lane, (cells_of, told) in enumerate(zip(frames(batch), cells(batch), strict=True)):
                real = [cell for cell in told if cell is not None]
                for (source, frame), (index, position, new, first, *last) in zip(cells_of, real, strict=True):
                    own = serial(lengths, spacing, options, epoch)[source]
                    assert (index, frame) == (source, own[position])
                    assert first == (position == 0)
                    assert last in ([], [False]) or position == len(own) - 1
                    if new:
                        assert first or carried[lane] == (source, position - 1)
                        found.setdefault(source, []).append(frame)
                    if new or options["padding_mode"] == "data":
                        carried[lane] = source, position
        if options["padding_mode"] != "drop":
            assert found == serial(lengths, spacing, options, epoch)
        assert len(batches) == dataset_of(*case)._steps_of(epoch)


@random_cases(600, 15)
@given(case=chosen(modes=["zeros", "drop", "data"]), map_style=st.booleans(), workers=st.integers(0, 3))
def test_rows_are_those_of_the_sampler(case, map_style, workers):
    lengths, spacing, options = case
    items = [np.array([source, item, 0]) for source, length in enumerate(lengths) for item in range(length)]
    if not items:
        return
    anchors = Anchors(**spacing)
    sampler = LaneBatchSampler(lengths=lengths, anchors=anchors, **options)
    by_sampler = DataLoader(lane_dataset(items), batch_sampler=sampler, collate_fn=collate_lanes)
    if map_style:
        groups = [source for source, length in enumerate(lengths) for _ in range(length)]
        groups = [range(end - length, end) for length, end in zip(lengths, np.cumsum(lengths).tolist(), strict=True)]
        dataset = StreamDataset.from_map_style(items, groups, anchors=anchors, **options)
    else:
        dataset = dataset_of(*case)
    loader = StreamDataLoader(dataset, workers, worker_method="thread")
    for _ in range(2):
        for ours, theirs in itertools.zip_longest(loader, by_sampler):
            assert cells(ours) == cells(theirs)
            assert frames(ours) == frames(theirs)
            assert (ours.stream_seed == theirs.stream_seed).all()


@random_cases(400, 12)
@given(case=chosen(modes=["zeros", "data", "drop"]), how=st.sampled_from([*WAYS_TO_GO]))
def test_every_place_is_resumed_exactly(case, how):
    if how == "marks":
        return
    check_resume(
        lambda workers: StreamDataLoader(dataset_of(*case, how=how), workers, worker_method="thread"),
        num_workers=[0, 2, 1, 3],
    )


def test_an_endless_run_draws_anew_in_each_pass_and_is_resumed():
    case = [30, 41], {"every": 9, "first": True}, {"batch_size": 1, "time_steps": 2, "shuffle": True, "seed": 0}
    case[2]["padding_mode"] = "cycle"
    check_resume(lambda workers: StreamDataLoader(dataset_of(*case), workers, worker_method="thread"), limit=14)
    passes = {}
    for batch in itertools.islice(StreamDataLoader(dataset_of(*case)), 60):
        for cell in batch.data[batch.mask[:, 0], 0].tolist():
            if cell[1] == 0:
                passes[len(passes)] = []
            passes[len(passes) - 1].append(tuple(cell))
    assert len({tuple(own) for own in passes.values()}) > 8


class Counted:
    """A map-style dataset that notes the items fetched, in turn."""

    def __init__(self):
        self.fetched = []

    def __len__(self):
        return 60

    def __getitems__(self, indices):
        self.fetched.append(list(indices))
        return [np.array(index) for index in indices]

    __getitem__ = None


def test_only_anchors_are_fetched_of_a_map_style_dataset():
    items = Counted()
    dataset = StreamDataset.from_map_style(items, [range(60)], 1, time_steps=3, anchors=Anchors(10, phase=5, last=True))
    assert [batch.data[:, 0].tolist() for batch in StreamDataLoader(dataset)] == [[5, 15, 25], [35, 45, 55], [59, 0, 0]]
    assert items.fetched == [[5, 15, 25], [35, 45, 55], [59]]


def test_a_stream_that_seeks_is_not_read_in_between():
    asked = []

    class Seeks:
        def __init__(self, length):
            self.length, self.position = length, 0

        def __iter__(self):
            return self

        def __next__(self):
            asked.append(self.position)
            self.position += 1
            return np.array(self.position - 1)

        def seek_item(self, item):
            self.position = item

    dataset = StreamDataset([20], Seeks, 1, time_steps=3, lengths=[20], anchors=Anchors(6, phase=1))
    assert [batch.data[:, 0].tolist() for batch in StreamDataLoader(dataset)] == [[1, 7, 13], [19, 0, 0]]
    assert asked == [1, 7, 13, 19]


def test_streams_that_are_left_are_closed():
    closed = []

    def opens(source):
        try:
            yield from map(np.array, range(10))
        finally:
            closed.append(source)

    dataset = StreamDataset([0, 1], opens, 1, time_steps=2, lengths=[10, 10], anchors=4)
    assert len(list(StreamDataLoader(dataset))) == 4
    assert closed == [0, 1]
    iterator = iter(StreamDataLoader(dataset))
    next(iterator)
    iterator.close()
    assert closed == [0, 1, 0]


def test_a_state_is_carried_from_anchor_to_anchor_and_rows_go_on():
    case = [20, 30, 25], {"every": 5, "last": True}, {"batch_size": 2, "time_steps": 2, "shuffle": True, "seed": 0}
    carry = RecurrentState(batch_dim=1)
    for batch in StreamDataLoader(dataset_of(*case)):
        state = carry.before(batch)
        carry.after(batch, batch.position[None, -1, :, None] if state is None else state)
    assert not audit(StreamDataLoader(dataset_of(*case))).wrong


def test_random_numbers_are_those_of_the_items():
    """A stream draws by its own items, so each anchor has what it has without anchors."""

    def opens(length, start=0):
        info = get_stream_info()
        assert (info.start, info.stop) == (0, None)
        return (np.array([item, info.rng_at(item).integers(1 << 30)]) for item in range(start, length))

    whole = StreamDataset([20], opens, 1, time_steps=20, lengths=[20], seed=3)
    (batch,) = StreamDataLoader(whole)
    some = StreamDataset([20], opens, 1, time_steps=20, lengths=[20], seed=3, anchors=Anchors(3, phase=1))
    (anchors,) = StreamDataLoader(some)
    assert anchors.data[anchors.mask].tolist() == batch.data[1::3, 0].tolist()


def test_datasets_with_anchors_are_interleaved():
    lengths = [14, 9, 20]
    given = {"batch_size": 2, "time_steps": 2, "shuffle": True, "seed": 4}
    chosen = dataset_of(lengths, {"every": 4, "first": True}, given)
    whole = StreamDataset([(0, 5), (1, 6)], WAYS_TO_GO["start"], **given)
    mixed = interleave([chosen, whole])
    read = {}
    for batch in StreamDataLoader(mixed):
        for source, item in zip(batch.source_index[batch.mask].tolist(), batch.data[batch.mask].tolist(), strict=True):
            read.setdefault(source, []).append(item[1])
    assert (read[3], read[4]) == ([*range(5)], [*range(6)])
    for source, length in enumerate(lengths):
        assert read[source] == Anchors(4, first=True, lengths=lengths).of(source, epoch=0, seed=4), length
    check_resume(lambda workers: StreamDataLoader(interleave([chosen, whole]), workers, worker_method="thread"))


def test_shares_of_steps_count_anchors():
    given = {"batch_size": 1, "time_steps": 2}
    whole = dataset_of([4] * 90, {"every": 1}, given)
    every = dataset_of([40] * 90, {"every": 10}, given)
    one, other = ([0, 0], [0, 0])
    for counts, second in ((one, every), (other, dataset_of([4] * 90, {"every": 1}, given))):
        mixed = interleave([whole, second], weights_by="steps", exhausted="repeat")
        for batch in StreamDataLoader(mixed):
            for source in batch.source_index[batch.mask].tolist():
                counts[mixed.locate(source)[0]] += 1
    assert one == other


def test_a_list_with_anchors_grows():
    dataset = StreamDataset([(0, 10)], WAYS_TO_GO["start"], 1, time_steps=2, lengths=[10], anchors=Anchors(4, phase=1))
    read = []
    for number, batch in enumerate(StreamDataLoader(dataset)):
        read += batch.data[batch.mask].tolist()
        if not number:
            dataset.extend([(1, 7)], lengths=[7])
    assert [cell[:2] for cell in read] == [[0, 1], [0, 5], [0, 9], [1, 1], [1, 5]]


def test_a_state_of_other_anchors_is_refused():
    given = {"batch_size": 1, "time_steps": 2, "shuffle": True, "seed": 0}
    loader = StreamDataLoader(dataset_of([20, 30], {"every": 5, "ahead": 3}, given))
    next(iter(loader))
    for other in ({}, {"anchors": 5}, {"sections": 5}):
        dataset = StreamDataset([(0, 20), (1, 30)], WAYS_TO_GO["start"], lengths=[20, 30], **given, **other)
        with pytest.raises(StateError, match=r"Anchors\(5, ahead=3\)"):
            StreamDataLoader(dataset).load_state_dict(loader.state_dict())


def test_a_stream_that_is_too_short_is_named():
    dataset = StreamDataset([3], range, 1, time_steps=2, lengths=[9], anchors=Anchors(4, phase=0))
    with pytest.raises(LengthError, match=r"source 0 \(3\), item 3, .*only 3 items, and item 4 is an anchor"):
        list(StreamDataLoader(dataset))


def test_a_stream_that_breaks_is_opened_again_at_its_anchor():
    opened = []

    def opens(source, start=0):
        opened.append(start)
        for item in range(start, 20):
            if item == 11 and len(opened) == 1:
                raise OSError("gone")
            yield np.array(item)

    options = {"time_steps": 5, "lengths": [20], "anchors": Anchors(6, phase=1)}
    with pytest.raises(ReadError, match="gone"):
        list(StreamDataLoader(StreamDataset([0], opens, 1, **options)))
    opened.clear()
    (batch,) = StreamDataLoader(StreamDataset([0], opens, 1, retries=1, **options))
    assert batch.data[batch.mask].tolist() == [1, 7, 13, 19]
    assert opened == [1, 13]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"anchors": 0}, "anchors, their distance, is 0, and must be at least 1"),
        ({"anchors": 3, "sections": 4, "lengths": [9]}, "anchors= and sections= both say which items"),
        ({"anchors": Anchors(3, lengths=[5]), "lengths": [9]}, r"anchors= has \[5\] as lengths, and the sources have"),
        ({"anchors": 3}, r"Anchors\(3, phase=0\) needs the number of items of each source; pass lengths="),
        ({"anchors": 3, "time_steps": None, "windows": "given"}, "anchors= counts time steps"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        StreamDataset([9], range, 1, **{"time_steps": 2, **options})


def test_streams_that_mark_starts_are_refused():
    dataset = StreamDataset([9], lambda n: Marked(0, iter(range(n))), 1, time_steps=2, lengths=[9], anchors=3)
    with pytest.raises(Exception, match=r"starts_within.*pass a source for each sequence"):
        list(StreamDataLoader(dataset))


def test_sources_without_an_anchor_are_told():
    with pytest.warns(UserWarning, match="1 of 2 sources have fewer items than ahead=8, and so no anchor") as told:
        dataset = StreamDataset([7, 8], range, 1, time_steps=2, lengths=[7, 8], anchors=Anchors(3, ahead=8, first=True))
    assert told[0].filename == __file__
    assert [batch.data[batch.mask].tolist() for batch in StreamDataLoader(dataset)] == [[0]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lengths = Anchors(3, lengths=[9])
        dataset = StreamDataset([9], range, 1, time_steps=2, anchors=lengths)
    assert dataset.lengths.tolist() == [9]
    assert repr(dataset).endswith("anchors=Anchors(3, phase=0))")


def test_keys_agree_with_processes():
    case = [20, 30, 25, 7], {"every": 5}, {"batch_size": 2, "time_steps": 2, "shuffle": True, "seed": 0}
    one, other = (StreamDataLoader(dataset_of(*case), workers) for workers in (0, 2))
    for ours, theirs in zip(one, other, strict=True):
        assert batch_key(ours) == batch_key(theirs)
