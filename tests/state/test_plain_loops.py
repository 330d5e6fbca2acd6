"""Loops as torchtitan and torchtune have them: of the loader they need the protocol of `StatefulDataLoader`, no more.

Both count batches. They save and load the loader along with model and optimizer, one as an object in the dict that
`torch.distributed.checkpoint` saves, the other as its `state_dict()` in a file of `torch.save`.
"""

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as checkpointing
from torch.distributed.checkpoint.stateful import Stateful

from stream_dataloader import StreamDataLoader, StreamDataset, get_stream_info

LENGTHS = [7, 12, 3, 9, 5, 8, 4, 11]


def open_stream(length):
    rng = get_stream_info().rng
    return iter(rng.normal(size=(length, 3)).astype(np.float32))


def loader_of(workers):
    return StreamDataLoader(StreamDataset(LENGTHS, open_stream, 3, time_steps=4, shuffle=True, seed=0), workers)


class Training(torch.nn.Module):
    """A model whose state is carried from batch to batch, and how many batches it has seen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.cell = torch.nn.GRU(3, 3)
        self.register_buffer("h", torch.zeros(1, 3, 3))
        self.register_buffer("step", torch.tensor(0))
        self.optimizer = torch.optim.SGD(self.cell.parameters(), 0.1)

    def train_on(self, batch):
        outputs, h = self.cell(batch.data, self.h * ~batch.reset.view(1, -1, 1))
        loss = (outputs - batch.data)[batch.mask].square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.h.copy_(h.detach())
        self.step += 1
        return loss.item()


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


def losses_of(workers, until, folder=None, way=None, *, resume=False):
    """One epoch after another until so many steps are done."""
    model, loader, losses = Training(), loader_of(workers), []
    if resume:
        way.load(model, loader, folder)
    while model.step < until:
        for batch in loader:
            losses.append(model.train_on(batch))
            if model.step == until:
                break
    if folder and not resume:
        way.save(model, loader, folder)
    return losses


@pytest.mark.parametrize("way", [InObjects, InOneFile])
@pytest.mark.parametrize("stop", [4, 11])
@pytest.mark.parametrize(("before", "after"), [(2, 0), (0, 2)])
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_loop_goes_on_bit_for_bit(before, after, stop, way, tmp_path):
    whole = losses_of(0, 16)
    assert len(list(loader_of(0))) < 11  # so that 11 is in the second epoch
    assert losses_of(before, stop, tmp_path, way) + losses_of(after, 16, tmp_path, way, resume=True) == whole
