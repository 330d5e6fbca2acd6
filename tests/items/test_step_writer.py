"""Steps that are read in one go hold what they would hold one by one, or tell the same of the same item."""

import collections
import dataclasses
import itertools
import pickle
import signal
import warnings

import numpy as np
import pytest
import torch
from helpers import FULL, random_cases
from hypothesis import given
from hypothesis import strategies as st
from worker_streams import acting, few, raising

from stream_dataloader import Sections, StreamDataLoader, StreamDataset
from stream_dataloader._engine.items.layout import Layout, flatten
from stream_dataloader._engine.items.step_writer import step_writer
from stream_dataloader.errors import ItemError, LengthError, ReadError

Pair = collections.namedtuple("Pair", "left right")


@dataclasses.dataclass
class Sample:
    left: object
    right: object


class Own(np.ndarray):
    """A kind of array that is not masked."""


def conjugated(x):
    return torch.complex(torch.tensor(x), torch.tensor(1.0)).conj()


#: Leaves made of a number; those in a row are alike, or nearly.
LEAVES = [
    np.float64,
    float,
    lambda x: np.array(float(x)),
    lambda x: torch.tensor(float(x), dtype=torch.float64),
    np.float32,
    int,
    np.int64,
    lambda x: np.array(int(x)),
    lambda x: torch.tensor(int(x)),
    np.longlong,
    lambda x: int(x) << 62,  # may not fit
    lambda x: x > 1,
    lambda x: np.bool_(x > 1),
    lambda x: complex(x, 1),
    np.complex64,
    conjugated,
    lambda x: torch.tensor(x).to(torch.bfloat16),
    lambda x: np.full(3, x, np.float32),
    lambda x: np.full(3, x, ">f4"),
    lambda x: pickle.loads(pickle.dumps(np.full(3, x, np.float32))),
    lambda x: np.full((6, 2), x, np.float32)[::2, 1],
    lambda x: np.full(3, x, np.float32).view(Own),
    lambda x: np.ma.masked_array(np.full(3, x, np.float32), [0, 1, 0]),
    lambda x: torch.full((3,), x),
    lambda x: torch.full((3,), x).requires_grad_(),
    lambda x: torch.full((6,), x)[::2],
    lambda x: torch.full((4,), x),
    lambda x: torch.full((3,), x).to_sparse(),
    lambda x: torch.full((3,), x, dtype=torch.bfloat16),
    lambda x: torch.full((1, 3), x, dtype=torch.bfloat16),
    lambda x: torch.full((3,), x, dtype=torch.bfloat16).to_sparse(),
    lambda x: torch.complex(torch.zeros(3), torch.full((3,), x)).conj().imag,
    lambda x: np.full(4, x, np.float32),
    lambda x: np.full((3, 1), x, np.float32),
    lambda x: np.full((1, 3), x, np.float32),
    lambda x: np.full(3, x),
    lambda x: np.full((1, 9), x, np.float32),
    lambda x: np.full((9, 9), x, np.float32).T,
    lambda x: np.full((9, 9), x, np.float32, "F"),
    lambda x: np.zeros((0, 3), np.float32),
    lambda x: np.array([f"{x}"]),
    lambda x: np.datetime64(int(x), "D"),
    lambda x: f"{x}",
    np.str_,
    lambda x: b"%f" % x,
    lambda x: None,
    lambda x: [x],
    lambda x: {x},
]


KINDS = ["dict", "ordered", "tuple", "pair", "sample"]
trees = st.recursive(
    st.integers(0, len(LEAVES) - 1),
    lambda below: st.tuples(st.sampled_from(KINDS), below, below).map(list),
    max_leaves=4,
)


def build(tree, x):
    if isinstance(tree, int):
        return LEAVES[tree](x)
    kind, *children = tree
    values = [build(child, x + i) for i, child in enumerate(children)]
    if kind in ("pair", "sample"):
        return {"pair": Pair, "sample": Sample}[kind](*(values * 2)[:2])
    if kind == "tuple":
        return tuple(values)
    return (collections.OrderedDict if kind == "ordered" else dict)(zip(["b", 1, ("a",)], values, strict=False))


def is_copied(leaf):
    """Not so if it is an object to the loader, which is passed on as it is."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.dtype.char not in "qUM" and not isinstance(leaf, np.ma.MaskedArray)
    return not leaf.is_sparse if isinstance(leaf, torch.Tensor) else isinstance(leaf, (bool, int, float, complex))


def near(draw, tree):
    """A tree that differs at one place."""
    if isinstance(tree, int):
        return min(max(tree + draw(st.sampled_from([-1, 1])), 0), len(LEAVES) - 1)
    place = draw(st.integers(0, len(tree)))
    if place == 0:
        return [draw(st.sampled_from(KINDS)), *tree[1:]]
    if place == len(tree):
        return [*tree, 0]
    return [near(draw, child) if i == place else child for i, child in enumerate(tree)]


@st.composite
def sources(draw):
    """Streams of trees whose first ones are equal, and of which a few others are nearly so."""
    first, streams = draw(trees), []
    for _ in range(draw(st.integers(1, 3))):
        stream = [first] * draw(st.integers(1, 45))
        for at in draw(st.lists(st.integers(1, 44), max_size=3)):
            if at < len(stream):
                stream[at] = draw(trees) if draw(st.integers(0, 3)) == 0 else near(draw, first)
        streams.append(stream)
    return streams


def items_of(trees):
    """Items, whose memory is used again if all of it is copied."""
    reuses = all(map(is_copied, flatten(build(trees[0], 0.0))[1]))
    for x, tree in enumerate(trees):
        item = build(tree, float(x % 5))
        yield item
        for leaf in flatten(item)[1] if reuses else []:
            if isinstance(leaf, (np.ndarray, torch.Tensor)) and is_copied(leaf):
                with torch.no_grad():
                    leaf[...] = 0


def plain(leaf):
    if not isinstance(leaf, torch.Tensor):
        return type(leaf).__name__, repr(leaf)
    leaf = leaf.detach().to_dense().resolve_conj().contiguous()
    return str(leaf.dtype), tuple(leaf.shape), bytes(leaf.view(-1).view(torch.uint8).numpy())


def steps_of(streams, time_steps, **options):
    dataset = StreamDataset(streams, items_of, 1, time_steps=time_steps, windows="packed", **options)
    found, error = [], None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for batch in StreamDataLoader(dataset):
                structure, leaves = flatten(batch.data)
                for t in batch.mask[:, 0].nonzero()[:, 0].tolist():
                    place = batch.source_index[t, 0].item(), batch.position[t, 0].item()
                    found.append((*place, repr(structure), [plain(leaf[t][0]) for leaf in leaves]))
        except ItemError as raised:
            error = str(raised)
    return found, error, [str(warning.message) for warning in caught if "skipped" in str(warning.message)]


@pytest.mark.filterwarnings("ignore")
def test_a_leaf_behind_another_kind_is_written_or_told_as_one_by_one():
    reach = len(LEAVES) if FULL else 3
    for first in range(len(LEAVES)):
        near = range(max(0, first - reach), min(first + reach + 1, len(LEAVES)))
        streams = [[first, first, second] for second in near]
        assert steps_of(streams, 40, on_error="skip") == steps_of(streams, 1, on_error="skip")


@pytest.mark.filterwarnings("ignore")
def test_a_structure_behind_another_is_read_or_told_as_one_by_one():
    structures = [17] + [[kind, *children] for kind in KINDS for children in ([17, 5], [17, 5, 17], [17])]
    if FULL:
        structures += [["dict", structure, 5] for structure in structures]
    for first in structures:
        streams = [[first, first, second] for second in structures]
        assert steps_of(streams, 40, on_error="skip") == steps_of(streams, 1, on_error="skip")


@pytest.mark.filterwarnings("ignore")
@given(sources(), st.sampled_from([2, 7, 40]), st.sampled_from(["raise", "skip"]))
@random_cases(4000, 20)
def test_steps_read_in_one_go_are_those_read_one_by_one(streams, time_steps, on_error):
    one_by_one, error, failures = steps_of(streams, 1, on_error=on_error)
    found, same_error, same_failures = steps_of(streams, time_steps, on_error=on_error)
    assert (same_error, same_failures) == (error, failures)
    if error is None:
        assert found == one_by_one
    else:  # the batch that it would have been in is not delivered
        assert found == one_by_one[: len(found)]
        assert len(one_by_one) - len(found) < time_steps


class Careless:
    """An iterator that begins anew whenever it is asked for itself, or after its end."""

    def __init__(self, count):
        self.count, self.asked, self.given = count, 0, 0

    def __iter__(self):
        self.asked += 1
        return self

    def __next__(self):
        self.given = (self.given + 1) % (self.count + 1)
        if not self.given:
            raise StopIteration
        return self.given


def read(dataset):
    return [x for batch in StreamDataLoader(dataset) for x in batch.data[batch.mask].tolist()]


@pytest.mark.parametrize("count", [3, 4, 5, 8])
def test_a_stream_is_iterated_once_and_asked_for_nothing_behind_its_end(count):
    stream = Careless(count)
    assert read(StreamDataset([0], lambda _: stream, 1, time_steps=4)) == list(range(1, count + 1))
    assert stream.asked == 1
    assert stream.given == 0, "it went on behind its end"


@pytest.mark.parametrize("broken", [1, 2, 3, 4, 7])
def test_a_stream_that_breaks_is_opened_again_where_it_broke(broken, tmp_path):
    open_stream = acting({(0, broken): few(tmp_path / "broken", raising(OSError, "the line is dead"))})
    with pytest.raises(ReadError) as caught:
        read(StreamDataset([0], open_stream, 1, time_steps=4))
    assert caught.value.position == broken
    (tmp_path / "broken").unlink()
    assert read(StreamDataset([0], open_stream, 1, time_steps=4, retries=1)) == list(range(9))


@pytest.mark.parametrize(("promised", "at"), [(3, 3), (5, 5), (8, 7)])
def test_a_stream_of_another_length_is_found_at_the_same_item(promised, at):
    with pytest.raises(LengthError, match=f"{min(at + 1, 7)} items, and lengths") as caught:
        read(StreamDataset([7], range, 1, time_steps=4, lengths=[promised]))
    assert caught.value.position == at


def test_no_item_behind_a_section_or_a_misfit_is_taken():
    taken = []

    def count(stop, start=0, odd=None):
        for i in range(start, stop):
            taken.append(i)
            yield i if i != odd else "odd"

    cuts = Sections(4, jitter=False, lengths=[10])
    assert read(StreamDataset([10], count, 1, time_steps=3, sections=cuts)) == taken == list(range(10))
    taken.clear()
    with pytest.raises(ItemError) as caught:
        read(StreamDataset([9], lambda stop: count(stop, odd=5), 1, time_steps=9))
    assert caught.value.position == 5
    assert taken == list(range(6))


def test_the_cells_behind_an_item_that_fits_in_part_are_padded():
    items = [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}, {"a": 1 << 70, "b": "z"}]
    with pytest.warns(RuntimeWarning, match="number does not fit"):
        (batch,) = StreamDataLoader(StreamDataset([items], iter, 1, time_steps=4, on_error="skip", fill_value=-1))
    assert batch.data["a"].T.tolist() == [[1, 2, -1, -1]]
    assert batch.mask.T.tolist() == [[True, True, False, False]]


WINDOWS = {
    "tensor": torch.arange(6.0).reshape(3, 2),
    "bfloat16": torch.arange(3).bfloat16(),
    "another byte order": np.arange(3, dtype=">i4"),
    "dict": {"x": np.arange(3), "of all steps": 7, "pair": Pair(torch.ones(3, 2), True)},
}


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
def test_a_window_is_written_alike_in_each_lane_and_step(window):
    batches = list(
        StreamDataLoader(StreamDataset([2, 2, 2], lambda n: itertools.repeat(window, n), 3, windows="given"))
    )
    given = [leaf.astype("i4") if isinstance(leaf, np.ndarray) else leaf for leaf in flatten(window)[1]]
    for batch in batches:
        for leaf, own in zip(flatten(batch.data)[1], map(torch.as_tensor, given), strict=True):
            assert all(lane.eq(own.expand(3, *lane.shape[1:])).all() for lane in leaf.unbind(1))


ODD_WINDOWS = {
    "key": {"x": np.zeros(3)},
    "length": {"x": np.zeros(3), "y": np.zeros(2), "n": 1},
    "no time": {"x": np.zeros(()), "y": np.zeros(3), "n": 1},
    "number": {"x": np.zeros(3), "y": np.zeros(3), "n": 1 << 70},
    "dtype": {"x": np.zeros(3), "y": np.zeros(3, np.int8), "n": 1},
}


@pytest.mark.parametrize("odd", [*ODD_WINDOWS.values(), np.zeros(())], ids=[*ODD_WINDOWS, "alone"])
@pytest.mark.parametrize("lane", [0, 1])
def test_a_window_unlike_the_first_is_an_error_in_each_lane(odd, lane):
    usual = {"x": np.zeros(3), "y": np.zeros(3), "n": 1} if isinstance(odd, dict) else np.zeros(3)
    dataset = StreamDataset([0, 1], lambda i: iter([usual, odd if i == lane else usual]), 2, windows="given")
    batches = iter(StreamDataLoader(dataset))
    next(batches)
    with pytest.raises(ItemError) as raised:
        next(batches)
    assert (raised.value.lane, raised.value.position) == (lane, 1)


ENDLESS = {"number": 1.5, "array": np.zeros(3), "dict": {"x": np.zeros(3), "y": 1}, "tensor": torch.zeros(3)}


@pytest.mark.parametrize("item", ENDLESS.values(), ids=ENDLESS)
def test_what_a_signal_raises_in_the_middle_is_not_lost(item):
    def ring(*_):
        raise TimeoutError("enough")

    def alarmed(milliseconds):
        yield item
        signal.setitimer(signal.ITIMER_REAL, milliseconds / 1000)
        yield from itertools.repeat(item)

    before = signal.signal(signal.SIGALRM, ring)
    try:
        for milliseconds in range(1, 11):
            loader = StreamDataLoader(StreamDataset([milliseconds], alarmed, 1, time_steps=10**6))
            with pytest.raises((TimeoutError, ReadError), match="enough"):
                next(iter(loader))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_the_function_for_many_leaves_grows_with_their_number():
    def bytes_of(leaves):
        layout, _ = Layout.of({str(i): np.zeros(3) for i in range(leaves)}, windowed=False)
        return len(step_writer(layout, 64).__code__.co_code)

    assert bytes_of(80) < 2.2 * bytes_of(40)  # and not with its square: 1000 leaves took nine seconds
