"""Random cases: a carried count of a stream's items is always the position, however batches are split and resumed."""

import itertools

import pytest
import torch
from helpers import random_cases
from hypothesis import given
from hypothesis import strategies as st

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.recurrent import RecurrentState, linear_scan


def ones(length):
    return (torch.ones(1) for _ in range(length))


def ones_in_windows(length):
    """Windows of 3, 1, 3, 1, ... steps: short ones also before a stream's end."""
    items, sizes = torch.ones(length, 1), itertools.cycle([3, 1])
    while len(items):
        size = next(sizes)
        yield items[:size]
        items = items[size:]


@pytest.mark.filterwarnings("ignore:the iteration that went on from the loaded state was left")
@random_cases(150)
@given(st.data())
def test_a_carried_count_is_the_position(data):
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any), "lengths")
    lanes = data.draw(st.integers(1, 4), "lanes")
    time_steps = data.draw(st.sampled_from([None, 1, 2, 3, 5]), "time_steps")
    windows = data.draw(st.sampled_from(["aligned", "packed"] if time_steps else ["aligned"]), "windows")
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
                real = part.source >= 0
                ones_there = torch.ones(*real.shape, 1)
                _, state = linear_scan(ones_there, ones_there, carry.before(part), part.is_start, real=real)
                carry.after(part, state)
                for row in real.any(0).nonzero().flatten().tolist():
                    assert state[row].item() == part.position[real[:, row], row][-1] + 1
            if data.draw(st.booleans(), "resume"):
                saved, carried = batch.state_dict(), carry.state_dict()
                loader, carry = loader_of(), RecurrentState(batch_dim=0, packed=windows == "packed")
                loader.load_state_dict(saved)
                carry.load_state_dict(carried)
                batches = iter(loader)
