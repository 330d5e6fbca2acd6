"""The heart of carrying: each stream's outputs are those of that stream fed alone, however it was cut and dealt."""

import pytest
import torch
from helpers import FULL
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
    """Each model, as a function `(x, state, is_start, real)`, and the dimension of the lanes in its state."""
    torch.manual_seed(0)
    lstm_cell, gru_cell, maps_cell = nn.LSTMCell(18, 5), nn.GRUCell(18, 5), ConvLSTMCell(2, 3)
    decay, inputs, lstm, gru = nn.Linear(18, 6), nn.Linear(18, 6), nn.LSTM(18, 5, 2), nn.GRU(18, 5, 2)
    for module in (lstm_cell, gru_cell, maps_cell, decay, inputs, lstm, gru):
        module.double()

    def scan(x, state, is_start, real):
        x = x.flatten(2)
        return linear_scan(decay(x).sigmoid(), inputs(x), state, is_start, real=real)

    found = {
        "lstm cell": (lambda x, h, start, real: masked_rnn(lstm_cell, x.flatten(2), h, start, real=real), 0),
        "gru cell": (lambda x, h, start, real: masked_rnn(gru_cell, x.flatten(2), h, start, real=real), 0),
        "conv-lstm": (lambda x, h, start, real: masked_rnn(maps_cell, x, h, start, real=real), 0),
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
        real = batch.source >= 0
        for name, (model, _) in known.items():
            output, state = model(batch.data, carries[name].before(batch), batch.is_start, real)
            carries[name].after(batch, state)
            places = zip(batch.source[real].tolist(), batch.position[real].tolist(), strict=True)
            outputs[name].update(zip(places, output[real], strict=True))
    for name, (model, _) in known.items():
        assert len(outputs[name]) == sum(LENGTHS)
        for index, length in enumerate(LENGTHS):
            carried = torch.stack([outputs[name][index, t] for t in range(length)])
            torch.testing.assert_close(carried, alone(model, index), rtol=0, atol=1e-6)
