"""Accelerate saves and loads a carried state beside the loader's."""

import pytest
import torch

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.recurrent import RecurrentState

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings are theirs


def build():
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator._custom_objects.clear()  # they outlive an Accelerator of the same process
    dataset = StreamDataset([9, 7, 5, 4], range, 2, time_steps=2, seed=0)
    loader, carry = StreamDataLoader(dataset), RecurrentState(batch_dim=1)
    accelerator.register_for_checkpointing(loader, carry)
    return accelerator, loader, carry


def test_accelerate_saves_and_loads_a_carried_state(tmp_path):
    torch.manual_seed(0)
    gru = torch.nn.GRU(1, 3)

    def step(batch, carry):
        output, state = gru(batch.data[..., None].float(), carry.before(batch))
        carry.after(batch, state)
        return output.detach()

    accelerator, loader, carry = build()
    whole = []
    for batch in loader:
        whole.append(step(batch, carry))
        if batch.step == 2:
            accelerator.save_state(tmp_path)
    accelerator, loader, carry = build()
    accelerator.load_state(tmp_path)
    rest = [step(batch, carry) for batch in loader]
    assert len(rest) == 4
    assert all(map(torch.equal, rest, whole[3:]))
