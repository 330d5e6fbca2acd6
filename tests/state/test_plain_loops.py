"""Loops as torchtitan and torchtune have them: of the loader they need the protocol of `StatefulDataLoader`, no more.

Both count batches. They save and load the loader along with the model, one as an object in the dict that
`torch.distributed.checkpoint` saves, the other as its `state_dict()` in a file of `torch.save`.
"""

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as checkpointing
from cases import key
from torch.distributed.checkpoint.stateful import Stateful

from stream_dataloader import StreamDataLoader, StreamDataset, get_stream_info

LENGTHS = [7, 12, 3, 9, 5, 8, 4, 11]


def open_stream(length):
    rng = get_stream_info().rng
    return iter(rng.normal(size=(length, 3)).astype(np.float32))


def loader_of(workers):
    return StreamDataLoader(StreamDataset(LENGTHS, open_stream, 3, time_steps=4, shuffle=True, seed=0), workers)


class Model(torch.nn.Module):
    """Knows how many batches it has seen."""

    def __init__(self):
        super().__init__()
        self.register_buffer("step", torch.tensor(0))


class InObjects:
    """torchtitan's: model and loader are `Stateful` objects in the dict that is saved."""

    @staticmethod
    def save(model, loader, folder):
        assert isinstance(loader, Stateful)
        checkpointing.save({"model": model, "dataloader": loader}, checkpoint_id=folder)

    @staticmethod
    def load(model, loader, folder):
        checkpointing.load({"model": model, "dataloader": loader}, checkpoint_id=folder)


class InOneFile:
    """torchtune's: the loader's `state_dict()` in a file of `torch.save`."""

    @staticmethod
    def save(model, loader, folder):
        torch.save({"model": model.state_dict(), "dataloader": loader.state_dict()}, folder / "recipe_state.pt")

    @staticmethod
    def load(model, loader, folder):
        saved = torch.load(folder / "recipe_state.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        loader.load_state_dict(saved["dataloader"])


def train(model, loader, until):
    """One epoch after another until so many batches are seen."""
    seen = []
    while model.step < until:
        for batch in loader:
            seen.append(key(batch))
            model.step += 1
            if model.step == until:
                break
    return seen


@pytest.mark.parametrize("way", [InObjects, InOneFile])
@pytest.mark.parametrize("stop", [4, 11])
@pytest.mark.parametrize(("before", "after"), [(2, 0), (0, 2)])
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_loop_goes_on_bit_for_bit(before, after, stop, way, tmp_path):
    whole = train(Model(), loader_of(0), 16)
    assert whole[10][-1] == 1, "the second epoch"
    model, loader = Model(), loader_of(before)
    head = train(model, loader, stop)
    way.save(model, loader, tmp_path)
    model, loader = Model(), loader_of(after)
    way.load(model, loader, tmp_path)
    assert head + train(model, loader, 16) == whole
