"""The heart of carrying: each stream's outputs are those of that stream fed alone, however it was cut and dealt.

In random cases a carried count of a stream's items is always the position, however batches are split and resumed.
"""

import itertools

import pytest
import torch
from carried import ones
from helpers import FULL, random_cases
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.recurrent import RecurrentState, linear_scan, masked_rnn

LENGTHS = [7, 3, 12, 1, 9, 4, 8, 2, 5, 6, 11, 3]


def open_maps(index):
    """Pictures `(2, 3, 3)` of double precision, so that sums in another order are still equal."""
    generator = torch.Generator().manual_seed(index)
    return iter(torch.randn(LENGTHS[index], 2, 3, 3, generator=generator, dtype=torch.float64))


class ConvLSTMCell(nn.Module):
    """Shi et al., Convolutional LSTM Network, 2015, without peepholes."""

    def __init__(self, channels, hidden):
        super().__init__()
        self.hidden = hidden
        self.gates = nn.Conv2d(channels + hidden, 4 * hidden, 3, padding=1)

    def forward(self, x, state):
        if state is None:
            state = (x.new_zeros(len(x), self.hidden, *x.shape[2:]),) * 2
        h, c = state
        i, f, o, g = self.gates(torch.cat([x, h], 1)).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


def models(windows):
    """Each model, as a function `(x, state, is_first, real)`, and the dimension of the lanes in its state."""
    torch.manual_seed(0)
    lstm_cell, gru_cell, maps_cell = nn.LSTMCell(18, 5), nn.GRUCell(18, 5), ConvLSTMCell(2, 3)
    decay, inputs, lstm, gru = nn.Linear(18, 6), nn.Linear(18, 6), nn.LSTM(18, 5, 2), nn.GRU(18, 5, 2)
    for module in (lstm_cell, gru_cell, maps_cell, decay, inputs, lstm, gru):
        module.double()

    def scan(x, state, is_first, real):
        x = x.flatten(2)
        return linear_scan(inputs=inputs(x), decay=decay(x).sigmoid(), state=state, is_first=is_first, real=real)

    found = {
        "lstm cell": (
            lambda x, h, start, real: masked_rnn(lstm_cell, x.flatten(2), state=h, is_first=start, real=real),
            0,
        ),
        "gru cell": (
            lambda x, h, start, real: masked_rnn(gru_cell, x.flatten(2), state=h, is_first=start, real=real),
            0,
        ),
        "conv-lstm": (lambda x, h, start, real: masked_rnn(maps_cell, x, state=h, is_first=start, real=real), 0),
        "scan": (scan, 0),
    }
    if windows == "aligned":
        found["lstm"] = (lambda x, h, *_: lstm(x.flatten(2), h), 1)
        found["gru"] = (lambda x, h, *_: gru(x.flatten(2), h), 1)
    return found


def alone(model, index):
    """The outputs of one stream, fed alone and in one piece."""
    x = torch.stack(list(open_maps(index)))[:, None]
    steps = torch.arange(len(x))[:, None]
    return model(x, None, steps == 0, steps >= 0)[0][:, 0]


QUICK = [("aligned", "batches", 0), ("aligned", "parts", 2), ("packed", "batches", 3), ("packed", "parts", 1)]
ALL = [(w, form, n) for w in ("aligned", "packed") for form in ("batches", "parts") for n in range(4)]


@pytest.mark.parametrize(("windows", "form", "workers"), ALL if FULL else QUICK)
@torch.no_grad()
def test_each_streams_outputs_are_those_of_the_stream_fed_alone(windows, form, workers):
    known = models(windows)
    carries = {name: RecurrentState(batch_dim=dim, packed=windows == "packed") for name, (_, dim) in known.items()}
    dataset = StreamDataset(range(len(LENGTHS)), open_maps, 5, time_steps=4, windows=windows, shuffle=True, seed=1)
    loader = StreamDataLoader(dataset, workers)
    outputs = {name: {} for name in known}
    for batch in loader if form == "batches" else loader.parts():
        real = batch.source_index >= 0
        for name, (model, _) in known.items():
            output, state = model(batch.data, carries[name].before(batch), batch.is_first, real)
            carries[name].after(batch, state)
            places = zip(batch.source_index[real].tolist(), batch.position[real].tolist(), strict=True)
            outputs[name].update(zip(places, output[real], strict=True))
    for name, (model, _) in known.items():
        assert len(outputs[name]) == sum(LENGTHS)
        for index, length in enumerate(LENGTHS):
            carried = torch.stack([outputs[name][index, t] for t in range(length)])
            torch.testing.assert_close(carried, alone(model, index), rtol=0, atol=1e-6)


def ones_in_windows(length):
    """Windows of 3, 1, 3, 1, ... steps: short ones also before a stream's end."""
    items, sizes = torch.ones(length, 1), itertools.cycle([3, 1])
    while len(items):
        size = next(sizes)
        yield items[:size]
        items = items[size:]


@pytest.mark.filterwarnings("ignore:the iteration that continued from the loaded state was left")
@random_cases(150)
@given(st.data())
def test_a_carried_count_is_the_position(data):
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any), "lengths")
    lanes = data.draw(st.integers(1, 4), "lanes")
    time_steps = data.draw(st.sampled_from([None, 1, 2, 3, 5]), "time_steps")
    windows = data.draw(st.sampled_from(["aligned", "packed"] if time_steps else ["given"]), "windows")
    padding = data.draw(st.sampled_from(["zeros", "data", "cycle"]), "padding_mode")
    epochs, most = data.draw(st.integers(1, 3), "epochs"), 8

    def loader_of():
        open_stream = ones if time_steps else ones_in_windows
        options = {"windows": windows, "padding_mode": padding, "shuffle": True, "seed": 1}
        return StreamDataLoader(StreamDataset(lengths, open_stream, lanes, time_steps=time_steps, **options))

    loader, carry = loader_of(), RecurrentState(batch_dim=0, packed=windows == "packed")
    for _ in range(epochs):
        batches, count = iter(loader), 0
        while count < most and (batch := next(batches, None)) is not None:
            count += 1
            for part in data.draw(st.permutations(batch.split_lanes(data.draw(st.integers(1, lanes), "split")))):
                real = part.source_index >= 0
                ones_there = torch.ones(*real.shape, 1)
                _, state = linear_scan(
                    inputs=ones_there,
                    decay=ones_there,
                    state=carry.before(part),
                    is_first=part.is_first,
                    real=real,
                )
                carry.after(part, state)
                for row in real.any(0).nonzero().flatten().tolist():
                    assert state[row].item() == part.position[real[:, row], row][-1] + 1
            if data.draw(st.booleans(), "resume"):
                saved, carried = batch.state_dict(), carry.state_dict()
                loader, carry = loader_of(), RecurrentState(batch_dim=0, packed=windows == "packed")
                loader.load_state_dict(saved)
                carry.load_state_dict(carried)
                batches = iter(loader)
