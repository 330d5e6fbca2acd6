"""The numbers that pages print are right: each is computed here once more, by a plain loop over single streams.

`test_pages.py` runs the pages' code and compares what it prints with the page. Here the page is compared with loops
that know nothing of the package, except for decoded videos. `Serial` is the tests' own model of which lane reads what.
"""

import math
import re
from itertools import islice, pairwise

import numpy as np
import pytest
import torch
from serial_model import Serial
from test_pages import PAGES, blocks_of, name_of

from stream_dataloader.cli.demo import default_clips
from stream_dataloader.streams import VideoStream

cross_entropy = torch.nn.functional.cross_entropy
BLOCKS = {
    (name_of(page), number): (code, output)
    for page in PAGES
    for number, (code, output) in enumerate((code, out) for kind, code, out in blocks_of(page) if kind == "python")
}
TRAINS = re.compile(r"torch\.nn|linear_scan|masked_rnn")
NO_NUMBER = {
    ("docs/guides/recurrent.md", 2): "compares a resumed run with a whole one",
    ("docs/guides/inside-streams.md", 3): "shows a mode of torch, and trains nothing",
}


def shuffled(count, epoch, seed=0):
    """The order of an epoch: NumPy's permutation from (seed, epoch)."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0, epoch))).permutation(count).tolist()


def windows_of(lengths, lanes, steps, *, order=None, windows="aligned"):
    """For each batch and each lane the (source, position) of each time step, or None."""
    order = range(len(lengths)) if order is None else order
    model = Serial(
        lambda n: [(order[n], i) for i in range(lengths[order[n]])], len(order), lanes, steps, windows, "zeros", 1
    )
    for batch in model.batches():
        yield [[cell and cell[:2] for cell in window] for window in batch]


def inputs_of(window, streams):
    """A lane's items `(T, 1, F)`, zeros in padding."""
    empty = torch.zeros_like(streams[0][0])
    return torch.stack([empty if cell is None else streams[cell[0]][cell[1]] for cell in window])[:, None]


def began(states, window, zero=None):
    """The state with which a lane begins a window: that of its source, or `zero` at the beginning of one."""
    if window[0] is None:
        return zero
    source, position = window[0]
    return states[source] if position else zero


def readme():
    films = [list(VideoStream(size=(24, 32))(clip)) for clip in default_clips()]
    streams = [torch.stack([torch.as_tensor(frame) for frame in film]).flatten(1) for film in films]
    torch.manual_seed(0)
    gru, states, losses = torch.nn.GRU(3 * 24 * 32, 64), {}, []
    optimizer = torch.optim.Adam(gru.parameters())
    for batch in islice(windows_of([len(frames) for frames in streams], 4, 8), 7):
        counted = []
        for window in batch:
            output, state = gru(inputs_of(window, streams) / 255, began(states, window))
            counted += [output[t] for t, cell in enumerate(window) if cell]
            if window[0]:
                states[window[0][0]] = state.detach()
        loss = torch.cat(counted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [f"{loss:.3f}" for loss in losses[3:7]]


def waves():
    return [(0.5 + 0.1 * i, int(60 / (0.5 + 0.1 * i))) for i in range(8)]


def get_started():
    torch.manual_seed(0)
    streams = [torch.tensor([[math.sin(t * f)] for t in range(n)]) for f, n in waves()]
    gru = torch.nn.GRU(1, 1)
    optimizer, states, losses = torch.optim.Adam(gru.parameters()), {}, []
    for batch in windows_of([n for _, n in waves()], 4, 10, order=shuffled(8, 0)):
        errors = []
        for window in batch:
            inputs = inputs_of(window, streams)
            output, state = gru(inputs, began(states, window))
            errors += [(output[t - 1] - inputs[t]).square().sum() for t in range(1, 10) if window[t]]
            if window[0]:
                states[window[0][0]] = state.detach()
        loss = sum(errors) / max(1, len(errors)) if errors else output.sum() * 0
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [f"{sum(losses) / len(losses):.4f}"]


def recurrent_train():
    torch.manual_seed(0)
    streams = [torch.tensor([[math.sin(t * f), math.sin((t + 1) * f)] for t in range(n)]) for f, n in waves()]
    lstm, head = torch.nn.LSTM(1, 16), torch.nn.Linear(16, 1)
    optimizer, means = torch.optim.Adam([*lstm.parameters(), *head.parameters()], lr=0.01), []
    for epoch in range(6):
        states, losses = {}, []
        for batch in windows_of([n for _, n in waves()], 4, 10, order=shuffled(8, epoch)):
            errors = []
            for window in batch:
                now, following = inputs_of(window, streams).split(1, dim=-1)
                output, state = lstm(now, began(states, window))
                error = (head(output) - following).square().flatten()
                errors += [error[t] for t in range(10) if window[t]]
                if window[0]:
                    states[window[0][0]] = tuple(part.detach() for part in state)
            loss = sum(errors) / len(errors)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        means.append(sum(losses) / len(losses))
    return [f"from {means[0]:.3f} to {means[-1]:.3f}"]


def initial_values():
    torch.manual_seed(0)
    start = torch.nn.Parameter(torch.full((1, 1, 3), 0.5))
    output, _ = torch.nn.GRU(1, 3)(torch.ones(2, 1, 1), start)
    (2 * output.sum()).backward()  # both lanes begin with it, and with two items
    return [f"{start.grad.sum():.3f}", "0.000", "0.000"]


def workers():
    torch.manual_seed(0)
    grus, states, found = [torch.nn.GRU(1, 8) for _ in range(2)], {}, []
    streams = [torch.arange(n)[:, None].float() for n in (6, 4, 5, 3, 2)]
    for batch in windows_of([6, 4, 5, 3, 2], 4, 3):
        totals = [0.0, 0.0]
        for lane, window in enumerate(batch):
            output, state = grus[lane // 2](inputs_of(window, streams), began(states, window))
            totals[lane // 2] += sum(output[t].sum().item() for t in range(3) if window[t])
            if window[0]:
                states[window[0][0]] = state
        found += [f"{total:.3f}" for total in totals]
    return found


def longer_gradients():
    torch.manual_seed(0)
    gru, state, found = torch.nn.GRU(1, 8), None, []
    for _ in range(2):
        output, state = gru(torch.ones(8, 1, 1), state)  # both lanes are alike
        (output[:4].square().mean() + output[4:].square().mean()).backward()
        state = state.detach()
        found.append(f"{gru.weight_hh_l0.grad.sum():.3f}")
    return found


def smaller_batches():
    torch.manual_seed(0)
    gru, states, total = torch.nn.GRU(1, 8), {}, 0.0
    lengths = [9, 4, 7, 5]
    for batch in windows_of(lengths, 4, 3):
        gru.zero_grad()
        steps = [int(cell is not None) for window in batch for cell in window]
        for window in batch:
            items = [cell for cell in window if cell]
            if items:
                output, states[items[0][0]] = gru(torch.ones(len(items), 1, 1), began(states, window))
                (output.square().sum() / sum(steps)).backward()
                states[items[0][0]] = states[items[0][0]].detach()
        total += sum(parameter.grad.sum().item() for parameter in gru.parameters())
    return [f"{total:.3f}"]


def burn_in():
    torch.manual_seed(0)
    gru, states, found = torch.nn.GRU(1, 8), {}, []
    for batch in windows_of([8, 3, 5], 2, 4):
        squares = []
        for window in batch:
            state = began(states, window)
            for cell in filter(None, window):
                output, state = gru(torch.ones(1, 1, 1), state)
                if cell[1] < 2:
                    state = state.detach()
                else:
                    squares += output.flatten().square().unbind()
            if window[0]:
                states[window[0][0]] = state.detach()
        loss = sum(squares) / len(squares)
        loss.backward()
        found.append(f"{loss:.3f} {gru.weight_hh_l0.grad.sum():.3f}")
    return found


def packed_windows():
    torch.manual_seed(0)
    cell, decay, found = torch.nn.LSTMCell(1, 8), torch.rand(8), []
    outputs, scanned = {}, {}
    for source, length in enumerate([5, 2, 4]):
        state, h = None, torch.zeros(8)
        for position in range(length):
            state = cell(torch.ones(1, 1), state)
            h = decay * h + 1
            outputs[source, position], scanned[source, position] = state[0].sum().item(), h.sum().item()
    for batch in windows_of([5, 2, 4], 2, 3, windows="packed"):
        cells = [cell for window in batch for cell in window if cell]
        found.append(f"{sum(outputs[cell] for cell in cells):.3f} {sum(scanned[cell] for cell in cells):.3f}")
    return found


def text():
    torch.manual_seed(0)
    embedding, gru, head = torch.nn.Embedding(256, 8), torch.nn.GRU(8, 16), torch.nn.Linear(16, 256)
    codes, total = torch.tensor(list(b"to be or not to be, " * 100)), 0.0
    for begin in range(0, len(codes) - 1, 256):
        stop = min(begin + 256, len(codes) - 1)
        output, _ = gru(embedding(codes[begin:stop]))
        total += cross_entropy(head(output), codes[begin + 1 : stop + 1], reduction="sum").item()
    return [f"{total:.1f}"]


def tokens_with_a_scan():
    torch.manual_seed(0)
    embedding, head = torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50)
    rng, tokens = np.random.default_rng(0), []
    for _ in range(200):
        tokens += [*rng.integers(1, 50, rng.integers(5, 40)).tolist(), 0]
    h, total = torch.zeros(16), 0.0
    for position, (token, target) in enumerate(pairwise(tokens)):
        if position % 512 == 0 or (position and tokens[position - 1] == 0):
            h = torch.zeros(16)
        h = 0.9 * h + embedding.weight[token].detach()
        if token != 0:
            total += cross_entropy(head(h), torch.tensor(target), reduction="sum").item()
    return [f"{total:.1f}"]


def tokens_with_linear_scan():
    torch.manual_seed(0)
    weight, total, h = torch.nn.Embedding(50, 16).weight.detach(), 0.0, torch.zeros(16)
    for token in [7, 3, 5, 8, 0]:
        h = 0.9 * h + weight[token]
        total += 400 * h.sum().item()
    return [f"{total:.1f}"]


def voxel_grids():
    width, bins, totals = 8, 3, {}
    for source, milliseconds in enumerate([700, 330, 200]):
        rng = np.random.default_rng(milliseconds)
        x, y, p = (rng.integers(0, stop, milliseconds) for stop in (8, 6, 2))
        grids = np.zeros((-(-milliseconds // 50), bins + 1, 6, width))
        for t in range(milliseconds):  # an event each millisecond
            left, later = divmod(t % 50 / 50 * (bins - 1), 1)
            grids[t // 50, int(left), y[t], x[t]] += (2.0 * p[t] - 1) * (1 - later)
            grids[t // 50, int(left) + 1, y[t], x[t]] += (2.0 * p[t] - 1) * later
        for first in range(0, len(grids), 4):
            totals[source, first // 4] = np.abs(grids[first : first + 4]).sum()
    return [f"{sum(totals[cell[0]] for cell in batch if cell[0]):.2f}" for batch in windows_of([4, 2, 1], 2, 1)]


def sparse_labels():
    torch.manual_seed(0)
    gate, new = (torch.nn.Conv2d(3 + 4, 4, 3, padding=1) for _ in range(2))
    state = torch.zeros(1, 4, 6, 8)
    for _ in range(4):  # both lanes are alike, and have their label at the fourth step
        both = torch.cat([torch.ones(1, 3, 6, 8), state], 1)
        state = state + gate(both).sigmoid() * (new(both).tanh() - state)
    return ["0.000", f"{(state.mean() - 1).square():.3f}", "0.000"]


def drawn(seeds, *keys):
    """SplitMix64 in Python's integers (Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014)."""
    bits, mask = seeds, 2**64 - 1
    for key in keys:
        bits = (bits * 0x9E3779B97F4A7C15 + key + 1) & mask
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & mask
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & mask
        bits ^= bits >> 31
    return bits


def augmented():
    total = 0.0
    for source, length in enumerate([7, 8, 9, 10]):
        seed = drawn(0, 0, 0, source)  # the dataset's seed, epoch, it is not repeated, source
        top, left, flip = ((drawn(seed, key) >> 40) / 2**24 for key in range(3))
        top, left = int(top * 3), int(left * 5)
        for t in range(length):
            frame = np.random.default_rng((source + 1, t)).integers(0, 256, (3, 8, 10), np.uint8)
            cut = frame[:, top : top + 6, left : left + 6] / 255  # flipped or not, its sum is the same
            light = 0.9 + 0.2 * (drawn(seed, 3, t) >> 40) / 2**24
            weights = np.arange(6) if flip < 0.5 else np.arange(6)[::-1]
            total += ((cut * light - 0.5) / 0.25 * weights).sum()
    return [f"{total:.1f}"]


def key_frames():
    distance = 0.0
    for number in range(6):
        generator, bank = torch.Generator().manual_seed(number), []
        for _ in range(5 + number):
            frame = torch.rand(3, generator=generator)
            distance += sum((frame - key).abs().sum().item() for key in bank)
            if not bank or frame.sum() > bank[-1].sum():
                bank = [*bank, frame][-4:]
    return [f"{distance:.2f}"]


def attention():
    torch.manual_seed(0)
    query, key, value = (torch.nn.Linear(3, 8) for _ in range(3))
    total = 0.0
    for number in range(6):
        x = torch.randn(1, 5 + number, 3, generator=torch.Generator().manual_seed(number))
        output = torch.nn.functional.scaled_dot_product_attention(query(x), key(x), value(x), is_causal=True)
        total += output.abs().sum().item()
    return [f"{total:.3f}"]


ORACLES = {
    ("README.md", 0): readme,
    ("docs/get-started.md", 1): get_started,
    ("docs/guides/recurrent.md", 0): recurrent_train,
    ("docs/guides/recurrent.md", 1): initial_values,
    ("docs/guides/recurrent.md", 3): workers,
    ("docs/guides/recurrent.md", 4): longer_gradients,
    ("docs/guides/recurrent.md", 5): smaller_batches,
    ("docs/guides/recurrent.md", 6): burn_in,
    ("docs/guides/recurrent.md", 7): packed_windows,
    ("docs/guides/memory.md", 0): key_frames,
    ("docs/guides/memory.md", 1): attention,
    ("docs/guides/text.md", 2): text,
    ("docs/guides/text.md", 3): tokens_with_a_scan,
    ("docs/guides/text.md", 4): tokens_with_linear_scan,
    ("docs/guides/event-camera.md", 0): voxel_grids,
    ("docs/guides/event-camera.md", 1): sparse_labels,
    ("docs/guides/cookbook.md", 10): augmented,
}


@pytest.mark.parametrize("block", ORACLES, ids=lambda block: f"{block[0]}-{block[1]}")
def test_a_page_prints_what_a_plain_loop_computes(block):
    _, output = BLOCKS[block]
    printed = re.findall(r"(?:from )?-?\d+\.\d+(?: (?:to )?-?\d+\.\d+)?", output)
    assert printed == ORACLES[block]()


def test_each_snippet_that_trains_prints_a_number():
    trains = {block for block, (code, _) in BLOCKS.items() if TRAINS.search(code)}
    assert sorted(trains - ORACLES.keys()) == sorted(NO_NUMBER)
