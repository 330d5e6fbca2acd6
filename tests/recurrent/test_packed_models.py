"""`linear_scan` and `masked_rnn` against a plain loop; burn-in."""

import pytest
import torch
from carried import ones
from torch import nn

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.recurrent import RecurrentState, linear_scan, masked_rnn


def loop(decay, inputs, state, is_first, initial, real):
    """The recurrence as it is written."""
    found = []
    for t in range(len(inputs)):
        if t:
            state = torch.where(is_first[t][:, None], initial, state)
        state = torch.where(real[t][:, None], decay[t] * state + inputs[t], state)
        found.append(state)
    return torch.stack(found)


@pytest.mark.parametrize("steps", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_the_scan_is_the_loop(steps, dtype):
    generator = torch.Generator().manual_seed(steps)
    decay, inputs = (torch.randn(steps, 3, 2, generator=generator, dtype=dtype, requires_grad=True) for _ in range(2))
    state, initial = (torch.randn(n, 2, generator=generator, dtype=dtype, requires_grad=True) for n in (3, 1))
    is_first = torch.rand(steps, 3, generator=generator) < 0.3
    real = torch.arange(steps)[:, None] < torch.tensor([steps, (steps + 1) // 2, 0])
    is_first &= real
    given = (decay, inputs, state, initial)
    expected = loop(decay, inputs, state, is_first, initial, real)
    found, last = linear_scan(inputs=inputs, decay=decay, state=state, is_first=is_first, initial=initial, real=real)
    torch.testing.assert_close(found, expected)
    assert torch.equal(last, found[-1])
    weights = torch.randn(expected.shape, generator=generator, dtype=dtype)
    gradients = [
        torch.autograd.grad((x * weights).abs().sum(), given, materialize_grads=True) for x in (found, expected)
    ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nothing_of_a_stream_gets_into_the_next_one(bad):
    inputs = torch.ones(6, 1, 1, requires_grad=True)
    is_first = torch.tensor([1, 0, 0, 1, 0, 0]).bool()[:, None]
    spoilt = torch.where(torch.arange(6)[:, None, None] == 1, bad, inputs)
    scanned, _ = linear_scan(inputs=spoilt, decay=torch.full((6, 1, 1), 0.5), state=None, is_first=is_first)
    stepped, _ = masked_rnn(lambda x, h: x + 0.5 * h, spoilt, state=torch.zeros(1, 1), is_first=is_first)
    for output in (scanned, stepped):
        assert output[3:].flatten().tolist() == [1, 1.5, 1.75]
        (gradient,) = torch.autograd.grad(output[3:].sum(), inputs, retain_graph=True)
        assert gradient.flatten().tolist() == [0, 0, 0, 1.75, 1.5, 1]


def test_a_cell_begins_with_what_it_is_given():
    cell = nn.LSTMCell(2, 3)
    initial = (torch.ones(1, 3), torch.full((1, 3), 2.0))
    x, is_first = torch.randn(3, 2, 2), torch.tensor([[1, 1], [0, 1], [0, 0]]).bool()
    state = tuple(one.expand(2, 3) for one in initial)
    output, (h, c) = masked_rnn(cell, x, state=state, is_first=is_first, initial=initial)
    alone = masked_rnn(cell, x[1:, 1:], state=initial, is_first=is_first[1:, 1:])[0]
    torch.testing.assert_close(output[1:, 1:], alone)
    torch.testing.assert_close(output[-1], h)
    assert c.shape == (2, 3)


def test_padding_keeps_a_cells_state_also_before_there_is_one():
    real = torch.tensor([[1, 0], [0, 1]]).bool()
    output, state = masked_rnn(
        nn.GRUCell(1, 1), torch.ones(2, 2, 1), state=None, is_first=torch.zeros(2, 2).bool(), real=real
    )
    assert output[0, 1] == 0
    assert output[0, 0] == output[1, 0] == output[1, 1] == state[0] != 0


def burn(carry, n, lengths, time_steps):
    """For each batch: the loss's mask, where gradients reach, and whether the head had one."""
    gru = nn.GRU(1, 2).double()
    for batch in StreamDataLoader(StreamDataset(lengths, lambda n: ones(n, torch.float64), 2, time_steps=time_steps)):
        data = batch.data.clone().requires_grad_()
        with carry.burning_in(batch):
            head, state = gru(data[:n], carry.before(batch))
        alive = state.requires_grad
        tail, state = gru(data[n:], carry.cut_burn_in(batch, state, n))
        carry.after(batch, state)
        mask = carry.loss_mask(batch)
        torch.cat([head, tail])[mask].sum().backward()
        reached = torch.zeros_like(mask) if data.grad is None else data.grad[..., 0] != 0
        yield mask.T.int().tolist(), reached.T.int().tolist(), alive


def test_burn_in_has_no_loss_and_no_gradient():
    found = list(burn(RecurrentState(batch_dim=1, burn_in=2), 2, [8, 3, 5], 4))
    assert [mask for mask, _, _ in found] == [
        [[0, 0, 1, 1], [0, 0, 1, 0]],
        [[1, 1, 1, 1], [0, 0, 1, 1]],
        [[0, 0, 0, 0], [1, 0, 0, 0]],
    ]
    assert [reached for _, reached, _ in found] == [mask for mask, _, _ in found]
    assert [alive for _, _, alive in found] == [False, True, True]
    start = nn.Parameter(torch.zeros(1, 1, 2, dtype=torch.float64))  # a learnt one keeps a gradient, which is zero
    learnt = list(burn(RecurrentState(start, batch_dim=1, burn_in=2), 2, [8, 3, 5], 4))
    assert [marks for *marks, _ in learnt] == [marks for *marks, _ in found]
    assert start.grad.tolist() == [[[0, 0]]]
    of_windows = list(burn(RecurrentState(batch_dim=1, burn_in=1, burn_in_at="window"), 1, [6, 6], 3))
    assert of_windows == [([[0, 1, 1], [0, 1, 1]], [[0, 1, 1], [0, 1, 1]], False)] * 2
    beside_idle = burn(RecurrentState(batch_dim=1, burn_in=1, burn_in_at="window"), 1, [6, 3], 3)
    assert [alive for *_, alive in beside_idle] == [False, False]


def test_burn_in_counts_items_only():
    batch = next(iter(StreamDataLoader(StreamDataset([5, 1], ones, 2, time_steps=3))))
    carry = RecurrentState(burn_in=2)
    assert carry._burn_in_mask(batch).T.int().tolist() == [[1, 1, 0], [1, 0, 0]]
    assert torch.equal(RecurrentState().loss_mask(batch), batch.mask)
    with pytest.raises(ValueError, match="t is 4; it must be 1 to 3"):
        carry.cut_burn_in(batch, torch.zeros(1, 2, 3), 4)


def test_flags_of_another_shape_are_refused():
    x, flags = torch.zeros(3, 2, 1), torch.zeros(2, 3).bool()
    for is_first, real, text in [
        (flags, None, "is_first is"),
        (flags.T, flags, "real is"),
        (flags.T.long(), None, "is_first is torch.int64"),
    ]:
        with pytest.raises(ValueError, match=text):
            linear_scan(inputs=x, decay=x, state=None, is_first=is_first, real=real)
        with pytest.raises(ValueError, match=text):
            masked_rnn(None, x, state=None, is_first=is_first, real=real)
    with pytest.raises(ValueError, match="time step"):
        linear_scan(inputs=x[:0], decay=x[:0], state=None, is_first=flags.T[:0])
