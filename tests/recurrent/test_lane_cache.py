"""Attention through a cache equals attention over each stream alone, as far as the cache reaches back."""

import itertools

import pytest
import torch
from carried import handed_over, resumed_before_each_batch
from helpers import random_cases
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from stream_dataloader import StateError, StreamDataLoader, StreamDataset
from stream_dataloader.recurrent import LaneCache, RecurrentState

LENGTHS = [7, 3, 5, 1, 4, 2, 6, 3, 5, 2]
SIZE = 3


def vectors(source):
    """A stream: `(n, 3)` float64."""
    return torch.randn(source[1], SIZE, generator=torch.Generator().manual_seed(source[0]), dtype=torch.float64)


def open_vectors(source):
    return iter(vectors(source))


def sources_of(lengths):
    return list(enumerate(lengths))


def loader_of(lengths, lanes, workers=0, groups=None, rank=None, world_size=None, **options):
    dataset = StreamDataset(
        sources_of(lengths), open_vectors, lanes, lengths=lengths, **({"time_steps": 2, "seed": 0} | options)
    )
    return StreamDataLoader(dataset, workers, virtual_ranks=groups, rank=rank, world_size=world_size)


def attend(batch, cache):
    """Each step looks at what it may, with itself as the query; the values are twice the keys."""
    past, mask = cache.before(batch)
    steps, lanes = batch.time_steps, len(batch)
    assert mask.shape == (lanes, steps, cache.steps + steps)
    assert mask.any(-1).all(), "softmax of nothing is NaN"
    keys = batch.data
    if past is None:
        past = [keys.new_zeros(cache.steps, lanes, SIZE) for _ in range(2)]
    both = [torch.cat([old, new]).transpose(0, 1) for old, new in zip(past, (keys, 2 * keys), strict=True)]
    found = scaled_dot_product_attention(keys.transpose(0, 1), *both, attn_mask=mask)
    cache.after(batch, [keys, 2 * keys])
    return found.transpose(0, 1)


def alone(source, first, position):
    """The same of one step of a stream by itself, which sees its items from `first` on."""
    stream = vectors(source)
    keys = stream[first : position + 1]
    return scaled_dot_product_attention(stream[None, position, None], keys[None], 2 * keys[None])[0, 0]


def check(batch, found, lengths, most):
    """Compare each step of a batch; returns how many there are."""
    for t, row in batch.mask.nonzero().tolist():
        source, position = batch.source_index[t, row].item(), batch.position[t, row].item()
        same = batch.source_index[:, row] == source
        entered = int(batch.position[same, row].min())  # where the window enters the stream
        expected = alone(sources_of(lengths)[source], max(0, entered - most), position)
        where = f"batch {batch.batch_index}, t {t}, row {row}, source {source} at {position}"
        torch.testing.assert_close(found[t, row], expected, msg=lambda text, where=where: f"{where}: {text}")
    return int(batch.mask.sum())


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from(["aligned", "packed"]),
    st.integers(1, 12),
    st.booleans(),
)
@random_cases(60)
def test_attention_is_that_over_the_stream_alone(lengths, lanes, time_steps, windows, most, in_pieces):
    cache, steps = LaneCache(most), 0
    for batch in loader_of(lengths, lanes, time_steps=time_steps, windows=windows):
        for piece in batch.split_lanes(1) if in_pieces else [batch]:
            steps += check(piece, attend(piece, cache), lengths, most)
    assert steps == sum(lengths)


def test_dimensions_may_be_those_of_attention_kernels():
    """`(B, heads, T, d)`, nested in layers of keys and values, as transformers' models have them."""
    usual, other, lanes_first = (
        LaneCache(3),
        LaneCache(3, batch_dim=0, time_dim=2),
        LaneCache(3, batch_dim=0, time_dim=1),
    )
    for batch in loader_of(LENGTHS, 3, time_steps=4):  # with padding at the ends of streams
        past, mask = usual.before(batch)
        layers, mask_too = other.before(batch)
        assert torch.equal(mask, mask_too)
        if past is not None:
            for kept in layers[0]:
                assert torch.equal(kept[:, 1].permute(1, 0, 2), past), batch.batch_index
            assert torch.equal(lanes_first.before(batch)[0].transpose(0, 1), past), batch.batch_index
        lanes_first.after(batch, batch.data.transpose(0, 1))
        snapshot, known = usual._snapshot(), usual.before(batch)
        usual.after(batch, batch.data)
        for one, same in zip(snapshot.before(batch), known, strict=True):
            assert one is same is None or torch.equal(one, same), "a snapshot does not go on"
        keys = torch.stack([batch.data, batch.data]).permute(2, 0, 1, 3)
        other.after(batch, [(keys, keys)])


def attend_and_check(batch, cache):
    return check(batch, attend(batch, cache), LENGTHS, cache.steps)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_any_batch_can_be_resumed_from(workers):
    whole = list(loader_of(LENGTHS, 3, windows="packed"))

    def make(_):
        return loader_of(LENGTHS, 3, workers, windows="packed"), LaneCache(4)

    found = resumed_before_each_batch(make, attend_and_check, len(whole))
    assert [batch.batch_index for batch, *_ in found] == [batch.batch_index for batch in whole]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (4, 1), (2, 4)])
def test_any_number_of_ranks_takes_up_a_state(before, after):
    def make(**place):
        return loader_of(LENGTHS, 4 // place["world_size"], groups=4, **place), LaneCache(4, **place)

    assert sum(map(sum, handed_over(make, attend_and_check, before, after))) == sum(LENGTHS)


def test_a_gradient_stays_within_its_window():
    weight, cache = torch.ones(1, dtype=torch.float64, requires_grad=True), LaneCache(3)
    for batch in itertools.islice(loader_of(LENGTHS, 3), 3):
        past, _ = cache.before(batch)
        assert past is None or not past.requires_grad
        cache.after(batch, batch.data * weight)


def test_what_does_not_fit_is_refused():
    one, two, three, *_ = loader_of(LENGTHS, 3)
    cache = LaneCache(4)
    cache.after(one, one.data)
    past, _ = cache.before(two)
    with pytest.raises(
        ValueError, match=r"state is \(6, 3, 3\), but the window has 2 steps .*without the steps from before"
    ):
        cache.after(two, torch.cat([past, two.data]))
    for wrong in (one, three):
        with pytest.raises(StateError, match=r"lane \d"):
            cache.before(wrong)
    with pytest.raises(StateError, match="keeps its structure"):
        cache.after(two, [two.data])
    with pytest.raises(StateError, match=r"has \[4\] steps, but this cache keeps 5;"):
        LaneCache(5).load_state_dict(cache.state_dict())
    carry = RecurrentState(batch_dim=0)
    carry.after(one, torch.zeros(3, 1))
    with pytest.raises(StateError, match="is from a RecurrentState; load a state that a LaneCache saved"):
        cache.load_state_dict(carry.state_dict())
    assert torch.equal(cache.before(two)[0], past), "a state that is refused changes nothing"
    for options in ({"steps": 0}, {"steps": 2, "batch_dim": 0}, {"steps": 2, "time_dim": -1}):
        with pytest.raises(ValueError, match=r"steps|time_dim"):
            LaneCache(**options)


def test_a_state_that_grows_leads_here():
    one, two, *_ = loader_of(LENGTHS, 3)
    carry = RecurrentState(batch_dim=1)
    carry.after(one, one.data)
    with pytest.raises(StateError, match=r"LaneCache keeps a memory that grows in dimension 0 at a fixed size"):
        carry.after(two, torch.cat([one.data, two.data]))
