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
pytestmark = [
    pytest.mark.parametrize(("before", "after"), [(2, 0), (0, 2)]),
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
]


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


def count_steps(workers, until, folder=None, *, resume=False):
    """torchtitan's: one iterator after another until so many steps are done; checkpoints by `Stateful` objects."""
    model, loader, losses = Training(), loader_of(workers), []
    assert isinstance(loader, Stateful)
    states = {"model": model, "dataloader": loader}
    if resume:
        checkpointing.load(states, checkpoint_id=folder)
    batches = iter(loader)
    while model.step < until:
        try:
            batch = next(batches)
        except StopIteration:
            batches = iter(loader)
            continue
        losses.append(model.train_on(batch))
    if folder and not resume:
        checkpointing.save(states, checkpoint_id=folder)
    return losses


def count_epochs(workers, epochs, path=None, *, stop=None, resume=False):
    """torchtune's: epochs of enumerated batches; the loader's `state_dict()` in a file of `torch.save`."""
    model, loader, losses, epochs_run = Training(), loader_of(workers), [], 0
    if resume:
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        loader.load_state_dict(saved["dataloader"])
        epochs_run = saved["epochs_run"]
    for epoch in range(epochs_run, epochs):
        for batch in loader:
            losses.append(model.train_on(batch))
            if model.step == stop:
                state = {"model": model.state_dict(), "dataloader": loader.state_dict(), "epochs_run": epoch}
                torch.save(state, path)
                return losses
    return losses


@pytest.mark.parametrize("stop", [4, 11])
def test_a_loop_over_steps_goes_on_bit_for_bit(before, after, stop, tmp_path):
    whole = count_steps(0, 16)
    assert len(list(loader_of(0))) < 11  # so that 11 is in the second epoch
    assert count_steps(before, stop, tmp_path) + count_steps(after, 16, tmp_path, resume=True) == whole


@pytest.mark.parametrize("stop", [4, 11])
def test_a_loop_over_epochs_goes_on_bit_for_bit(before, after, stop, tmp_path):
    whole, path = count_epochs(0, 2), tmp_path / "recipe_state.pt"
    head = count_epochs(before, 2, path, stop=stop)
    assert len(head) == stop
    assert head + count_epochs(after, 2, path, resume=True) == whole
